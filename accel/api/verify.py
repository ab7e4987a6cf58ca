"""Are two models still the same?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, finite_json
from accel.errors import BadSource, RunFailed, UnsupportedHere, UsageError
from accel.progress import report
from accel.runtimes.base import open_session, recorded_options
from accel.signature import BATCH, DimRange, Feeds, Signature
from accel.sources import is_source, open_source
from accel.sources.tensorflow_source import options_of_each
from accel.verify.compare import Difference, compare, holds_floats, worst

if TYPE_CHECKING:
    import numpy as np

    from accel.sources.declare import Dims, Inputs

# The largest relative error (rel_l2) that each precision may have on real data; see the README for what they are worth.
# int4 (of weights alone): a twelfth of each product's norm at 15 steps a block of 32, added up over some 20 of them.
LIMITS = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1, "int8": 2.5e-1, "fp8": 2.5e-1, "int4": 4e-1}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """``outputs``: the worst of each number for each output over all ``cases``. ``middle_sample``: of each output with
    a sample on axis 0 the relative error (rel_l2) of the middle sample by itself, which the largest ones can't hide.
    ``problems``: what didn't hold."""

    passed: bool
    limit: float
    outputs: dict[str, Difference]
    middle_sample: dict[str, float]
    cases: tuple[str, ...]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "limit": self.limit,
            "outputs": {name: d.to_json() for name, d in self.outputs.items()},
            "middle_sample": finite_json(self.middle_sample),
            "cases": list(self.cases),
            "problems": list(self.problems),
        }


def verify(
    reference: str | Path | Artifact,
    candidate: str | Path | Artifact,
    *,
    data: str | Path | None = None,
    limit: float | None = None,
    samples: int = 64,
    inputs: Inputs | None = None,
    weights: str | Path | None = None,
    dims: Dims | None = None,
    tensorflow: Mapping[str, Any] | None = None,
) -> Verification:
    """Run both models on the same inputs and compare every output by name.

    On ``samples`` samples of ``data`` (.npz, or a folder of them), or without data on random inputs at several shapes:
    batch 1, 2 and the largest, every other dim at its ends. ``limit``: largest ||candidate - reference||₂ /
    ||reference||₂ of any output, and of its middle sample alone; the default follows the candidate's precision.
    ``inputs``, ``weights``, ``dims``: of what is a source, as in ``accel.export``; one that doesn't say what it takes
    gets what the other model takes. ``tensorflow``: as in ``accel.benchmark``.

    Raises ``UnsupportedHere`` where one of them can't run on this machine, ``BadData`` where the data doesn't fit,
    or holds an integer that a model fails on.
    """
    if limit is not None and not limit >= 0:
        raise UsageError(f"a limit of {limit:g} can't be; it is a relative error, e.g. 1e-3")
    import numpy as np

    from accel.verify.concordance import sample_errors
    from accel.verify.data import widened
    from accel.verify.gates import cast_feeds, gate_runtime
    from accel.verify.runs import failed_on_data

    first, second = _open(reference, candidate, inputs, Path(weights) if weights else None, dims, tensorflow or {})
    first = widened(first, Path(data) if data else None, dict(dims or {}))
    for artifact in (first, second):
        if gate_runtime(artifact) is None:
            raise UnsupportedHere(f"{artifact.path} can't run on this machine; verify it where there is an NVIDIA GPU")
    names = [{spec.name for spec in a.signature.inputs} for a in (first, second)]
    if names[0] != names[1]:
        raise UsageError(
            f"the inputs differ: {', '.join(sorted(names[0]))} and {', '.join(sorted(names[1]))}; "
            "give two forms of one model"
        )
    limit = limit if limit is not None else LIMITS[effective_precision(second)]
    found: list[list[Difference]] = []
    cases: list[str] = []
    problems: list[str] = []
    errors: dict[str, list[np.ndarray]] = {}
    with open_session(first, gate_runtime(first)) as one, open_session(second, gate_runtime(second)) as two:
        for case, feeds in _feeds(first, second, Path(data) if data else None, samples):
            report("verify")
            try:
                wanted, got = one.run(cast_feeds(one, feeds)), two.run(cast_feeds(two, feeds))
            except (RunFailed, BadSource) as error:
                if data is None:
                    raise
                specs = (*first.signature.inputs, *second.signature.inputs)
                raise failed_on_data(error, Path(data), feeds, specs) from error
            found.append(compare(wanted, got))
            cases.append(case)
            for name in (d.output for d in found[-1] if not d.problem and _by_sample(first, feeds, wanted[d.output])):
                errors.setdefault(name, []).append(sample_errors(wanted[name], got[name]))
    outputs = worst(found)
    middle = {name: float(np.median(np.concatenate(each))) for name, each in errors.items()}
    for name, difference in outputs.items():
        if difference.problem:
            problems.append(f"output {name!r}: {difference.problem}")
        elif difference.rel_l2 > limit:
            problems.append(f"output {name!r}: rel_l2 {difference.rel_l2:.3g} is over the limit {limit:g}")
        elif middle.get(name, 0.0) > limit:
            problems.append(
                f"output {name!r}: half of the samples, each by itself, are off by {middle[name]:.3g} of their size or "
                f"more, over the limit {limit:g}"
            )
    return Verification(
        passed=not problems,
        limit=limit,
        outputs=outputs,
        middle_sample=middle,
        cases=tuple(cases),
        problems=tuple(problems),
    )


def _by_sample(artifact: Artifact, feeds: Feeds, output: np.ndarray) -> bool:
    """Whether axis 0 of an output is that of the samples, and what it holds are numbers that can be a little off."""
    samples = next((value.shape[:1] for value in feeds.values() if value.ndim), None)
    own = output.ndim > (BATCH not in artifact.signature.dims)  # a vector may be anything where no dim is the batch
    return own and output.shape[:1] == samples and holds_floats(output)


def _open(
    reference: str | Path | Artifact,
    candidate: str | Path | Artifact,
    inputs: Inputs | None,
    weights: Path | None,
    dims: Dims | None,
    tensorflow: Mapping[str, Any],
) -> tuple[Artifact, Artifact]:
    """Both models. What has to be said of a source is said of each that is one; inputs and dims also of the reference
    whatever it is, since they say what it is run on."""
    each = options_of_each([str(m.path if isinstance(m, Artifact) else m) for m in (reference, candidate)], tensorflow)
    sources = [not isinstance(m, Artifact) and is_source(m) for m in (reference, candidate)]
    # Weights that no model asks for are refused by the first.
    own = weights if sources[0] or not sources[1] else None
    if not sources[1]:
        second = open_source(candidate)
        like = partial(getattr, second, "signature")
        return open_source(reference, inputs=inputs, weights=own, dims=dims, tensorflow=each[0], like=like), second
    first = open_source(reference, inputs=inputs, weights=own, dims=dims, tensorflow=each[0])
    like = partial(getattr, first, "signature")
    return first, open_source(candidate, inputs=inputs, weights=weights, dims=dims, tensorflow=each[1], like=like)


def effective_precision(artifact: Artifact) -> str:
    """The precision it computes in: the file's own, or the lower one its session was chosen with."""
    own = str(artifact.properties.get("precision", "fp32"))
    asked = recorded_options(artifact).get("precision", "fp32")
    return asked if own == "fp32" else own


def _feeds(
    first: Artifact, second: Artifact, data: Path | None, samples: int
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    from accel.verify.data import Dataset

    if data is not None:
        for index, feeds in enumerate(Dataset.load(data, first.signature).batches(8, samples)):
            yield f"{data.name} batch {index}", feeds
        return
    common = _common(first, second)
    for index, sizes in enumerate(common.cases()):
        case = ", ".join(f"{d}={s}" for d, s in sizes.items()) or "fixed shape"
        yield case, common.example_inputs(seed=index, **sizes)


def _common(first: Artifact, second: Artifact) -> Signature:
    """The inputs of ``first`` in the shapes and the integers that both take: an engine's profile may be narrower than
    what it was made from, and an ONNX file without a manifest declares no ranges at all."""
    from accel.verify.gates import what_both_take

    theirs = {spec.name: spec for spec in second.signature.inputs}
    for spec in first.signature.inputs:
        if len(spec.shape) != len(theirs[spec.name].shape):
            raise UsageError(f"the inputs differ: {spec} and {theirs[spec.name]}; give two forms of one model")
    common = what_both_take(first.signature, second.signature)
    inputs = tuple(replace(spec, values=_both(spec.values, theirs[spec.name].values)) for spec in common.inputs)
    declares = [artifact.kind != "onnx" or artifact.manifest is not None for artifact in (first, second)]
    dims = dict(common.dims)
    for dim, other in common.dims.items():
        own = first.signature.dims.get(dim, other)
        both = DimRange.within(
            max(own.min, other.min), other.opt, min(own.max, other.max), math.lcm(own.step, other.step)
        )
        if declares[0] and not declares[1]:
            dims[dim] = own
        elif declares[0] == declares[1] and both is not None:
            dims[dim] = both
    return Signature(inputs, (), dims)


def _both(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    """The integers in both ranges; None is any."""
    if one is None or other is None:
        return one or other
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (low, high) if low <= high else other
