"""Compares the outputs of two models."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from accel.artifact import Artifact, finite_json
from accel.errors import BadSource, RunFailed, UnsupportedHere, UsageError
from accel.progress import report, shows_progress
from accel.proof.compare import (
    INTEGERS_ALONE,
    Difference,
    compare,
    holds_floats,
    in_order_note,
    near_integers,
    new_output_names,
    worst,
)
from accel.runtimes.base import open_session, recorded_options
from accel.signature import BATCH, Bound, DimRange, Feeds, Signature, TensorSpec
from accel.signature.decoder import LOGITS, is_decoder
from accel.sources.notes import integers_note
from accel.sources.source import Model, Source, SourceOptions, declared_dims, known_keywords, shared, with_declared
from accel.spelling import option
from accel.tables.limits import VERIFY_LIMITS
from accel.tables.precision import PRECISIONS
from accel.timing.columns import as_text

from .decoder.pair import checked_pair
from .decoder.verify import decoder_results, is_other_form, whole_texts
from .samples import Data, path_of, takes_samples

if TYPE_CHECKING:
    import numpy as np

# The ``repr`` of a result shows the errors of at most this many outputs.
_SHOWN = 4


@dataclass(frozen=True, kw_only=True, repr=False)
class Verification:
    """Holds the result of a comparison.

    ``outputs`` maps each output to its largest differences over all ``cases``. ``middle_sample`` maps each output to
    the median of the samples' relative errors (rel_l2). Axis 0 is the axis of the samples. A few samples with large
    values change the error of a whole output, but not the median. ``problems`` has a sentence for each output that
    differs by more than ``limit``. ``notes`` says what the comparison didn't cover, and what was rounded.
    """

    passed: bool
    limit: float
    outputs: dict[str, Difference]
    middle_sample: dict[str, float]
    cases: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Returns the verdict in words, with the largest error and its limit."""
        if not self.passed:
            return "; ".join(self.problems)
        largest = max(self.outputs.values(), key=lambda d: d.rel_l2, default=None)
        error = f", with a relative error of {largest.rel_l2:.2g} at most" if largest else ""
        return f"same within the limit {self.limit:g}{error}"

    def rich_table(self, title: str = "") -> Any:
        """Returns the differences as a table of rich, a row for each output."""
        from rich.table import Table

        table = Table(title=f"{title}{self.verdict}", title_justify="left")
        for column in ("output", "max abs", "rel l2", "middle sample", "limit", "cosine (worst sample)"):
            table.add_column(column, justify="left" if column == "output" else "right")
        for name, d in self.outputs.items():
            middle = f"{self.middle_sample[name]:.3g}" if name in self.middle_sample else ""
            table.add_row(name, f"{d.max_abs:.3g}", f"{d.rel_l2:.3g}", middle, f"{self.limit:g}", f"{d.cosine:.6f}")
        return table

    def table(self) -> str:
        """Returns the differences as text of at most 100 columns."""
        return as_text(self.rich_table())

    def __repr__(self) -> str:
        errors = [f"{name} {d.rel_l2:.2g}" for name, d in self.outputs.items()]
        more = f" and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        each = f"; rel l2: {', '.join(errors[:_SHOWN])}{more}" if len(errors) > 1 else ""
        shapes = f"{len(self.cases)} shape{'s' * (len(self.cases) != 1)}"
        return f"<accel verification: {self.verdict}{each}; {shapes}>"

    def _repr_html_(self) -> str:
        """Returns the table for a notebook."""
        return f"<pre>{html.escape(self.table())}</pre>"

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "limit": self.limit,
            "outputs": {name: d.to_json() for name, d in self.outputs.items()},
            "middle_sample": finite_json(self.middle_sample),
            "cases": list(self.cases),
            "problems": list(self.problems),
            "notes": list(self.notes),
        }


@shows_progress
@known_keywords
@takes_samples
def verify(
    reference: Model,
    candidate: Model,
    *,
    data: Data | None = None,
    limit: float | None = None,
    samples: int = 64,
    **about: Unpack[SourceOptions],
) -> Verification:
    """Runs both models on the same inputs and compares every output by name.

    Outputs with other names are compared in their order if their number, dtypes and shapes are equal. ``notes`` says
    so.

    The models run on ``samples`` samples of ``data``, which is an .npz file, a folder of .npz files, a batch, or an
    iterable of batches (see ``accel.optimize``). Without data, the models run on random inputs. Random inputs have a
    batch size of 1, 2 or the largest batch. Every other dim has the smallest or the largest size in its range.
    ``limit`` is the largest allowed ||candidate - reference||₂ / ||reference||₂, both for a whole output and for the
    median over its samples. The default limit depends on the candidate's precision. If a quantized candidate differs
    too much on random inputs, the last entry of ``problems`` advises the user to pass ``data``.

    If a model is a source, the other arguments set the fields of its ``accel.Source``. An option for one TensorFlow
    file format applies only to models of that format. ``inputs`` and ``dims`` also apply to the reference if the
    reference is a file. A source that doesn't declare its inputs gets the inputs of the other model.

    Raises ``UnsupportedHere`` if a model can't run on this machine. Raises ``BadData`` if the data doesn't fit, or if a
    model fails on an integer in the data. Raises ``UsageError`` if the inputs or the outputs differ.
    """
    if limit is not None and not limit >= 0:
        raise UsageError(f"{limit:g} is not a valid limit; give a relative error such as 1e-3")
    import numpy as np

    from accel.proof.concordance import sample_errors
    from accel.proof.data import rounding_note, widened
    from accel.proof.gates import PATIENT, cast_feeds, gate_runtime
    from accel.proof.runs import failed_on_data

    if data is None and (pair := _checked_pair(reference, candidate, about, limit)) is not None:
        return pair
    samples_path = path_of(data)
    first, second = _open(reference, candidate, about)
    first = widened(first, samples_path, declared_dims(reference, about))
    for artifact in (first, second):
        if gate_runtime(artifact) is None:
            raise UnsupportedHere(
                f"{artifact.path} can't run on this machine; verify it on a machine with an NVIDIA GPU"
            )
    other_form = is_other_form(first, second)
    if other_form and data is not None:
        raise UsageError(
            f"{second.path} is a decoder with other inputs and takes texts of its own; leave out {option('data')}"
        )
    names_of = {} if other_form else _new_output_names(first.signature, second.signature)
    limit = limit if limit is not None else VERIFY_LIMITS[effective_precision(second)]
    found: list[list[Difference]] = []
    cases: list[str] = []
    problems: list[str] = []
    errors: dict[str, list[np.ndarray]] = {}
    unequal: set[str] = set()
    for case, wanted, got in whole_texts(first, second) if other_form else ():
        found.append(compare(wanted, got))
        cases.append(case)
        errors.setdefault(LOGITS, []).append(sample_errors(wanted[LOGITS], got[LOGITS]))
    with (
        open_session(first, gate_runtime(first), PATIENT) as one,
        open_session(second, gate_runtime(second), PATIENT) as two,
    ):
        for case, feeds in () if other_form else _feeds(first, second, samples_path, samples):
            report("verify")
            try:
                wanted, got = one.run(cast_feeds(one, feeds)), two.run(cast_feeds(two, feeds))
            except (RunFailed, BadSource) as error:
                if samples_path is None:
                    raise
                raise failed_on_data(error, samples_path, feeds, first.signature, second.signature) from error
            got = {names_of.get(name, name): array for name, array in got.items()}
            found.append(compare(wanted, got))
            cases.append(case)
            if near := near_integers(found[-1], wanted, limit):
                unequal |= near & one.integers_alone(cast_feeds(one, feeds))
            for name in (d.output for d in found[-1] if not d.problem and _by_sample(first, feeds, wanted[d.output])):
                errors.setdefault(name, []).append(sample_errors(wanted[name], got[name]))
    note = (
        None
        if other_form
        else integers_note(_common(first, second))
        if samples_path is None
        else rounding_note(samples_path, first.signature)
    )
    for result in decoder_results(first, second, limit) if data is None else ():
        cases.append(result.case)
        if not result.passed:
            problems.append(f"output {result.output!r} at {result.case}: {result.finding}")
    outputs = worst(found)
    middle = {name: float(np.median(np.concatenate(each))) for name, each in errors.items()}
    advice = _advice_on_weights(first, second) or (_advice_on_random_inputs(second) if data is None else "")
    for name, difference in outputs.items():
        if difference.problem:
            problems.append(f"output {name!r}: {difference.problem}")
        elif difference.rel_l2 > limit:
            problems.append(f"output {name!r}: rel_l2 {difference.rel_l2:.3g} is over the limit {limit:g}")
        elif name in unequal:
            problems.append(
                f"output {name!r}: its integers differ by up to {difference.max_abs:.15g}; {INTEGERS_ALONE}"
            )
        elif middle.get(name, 0.0) > limit:
            problems.append(
                f"output {name!r}: half of the samples have a relative error of {middle[name]:.3g} or more, over the "
                f"limit {limit:g}"
            )
    if advice and problems and not any(difference.problem for difference in outputs.values()):
        problems[-1] += f"; {advice}"
    return Verification(
        passed=not problems,
        limit=limit,
        outputs=outputs,
        middle_sample=middle,
        cases=tuple(cases),
        problems=tuple(problems),
        notes=tuple(filter(None, (in_order_note(names_of), note))),
    )


def _new_output_names(first: Signature, second: Signature) -> dict[str, str]:
    """Returns the outputs of ``second`` with other names (see ``new_output_names``). Raises ``UsageError`` if the
    inputs differ."""
    names = [sorted(spec.name for spec in one.inputs) for one in (first, second)]
    if names[0] != names[1]:
        raise UsageError(
            f"the two models have different inputs: {', '.join(names[0])} and {', '.join(names[1])}; give two versions "
            "of one model"
        )
    return new_output_names(first, second)


def _checked_pair(reference: Model, candidate: Model, about: SourceOptions, asked: float | None) -> Verification | None:
    """Returns the result for an encoder-decoder, or None for any other model."""
    one, two = shared((reference, candidate), about)
    checked = checked_pair(one, two, asked)
    if checked is None:
        return None
    whole, results, limit = checked
    bad = [f"output {one.output!r} at {one.case}: {one.finding}" for one in results if not one.passed]
    if whole.problem or whole.rel_l2 > limit:
        bad.append(
            f"output {whole.output!r}: {whole.problem or f'rel_l2 {whole.rel_l2:.3g} is over the limit {limit:g}'}"
        )
    return Verification(
        passed=not bad,
        limit=limit,
        outputs={whole.output: whole},
        middle_sample={},
        cases=tuple(one.case for one in results),
        problems=tuple(bad),
    )


def _advice_on_weights(first: Artifact, second: Artifact) -> str:
    """Returns advice to pass the weights if one model is a PyTorch source without weights, and the other model was made
    from a source with weights. Otherwise returns ""."""
    for bare, other in ((first, second), (second, first)):
        weights = other.source.get("weights")
        if weights and bare.kind == "torch" and bare.manifest is None and not bare.source.get("weights"):
            return (
                f"{bare.source.get('spec')} was opened without weights, and {other.path} was made with weights; "
                f"pass {option('weights', weights)}"
            )
    return ""


def _advice_on_random_inputs(candidate: Artifact) -> str:
    """Returns advice for a quantized ``candidate`` that differs on random inputs, or "" for a float candidate.

    Random inputs may lie outside the ranges that the quantized model was calibrated on.
    """
    row = PRECISIONS.get(effective_precision(candidate))
    quantized = row is not None and row.quantized
    return f"these were random inputs; pass {option('data')} with real samples" if quantized else ""


def _by_sample(artifact: Artifact, feeds: Feeds, output: np.ndarray) -> bool:
    """Tells whether an output holds floats and has one entry on axis 0 for each sample."""
    samples = next((value.shape[:1] for value in feeds.values() if value.ndim), None)
    # If the model has no batch dim, an output with a single axis may hold one sample.
    own = output.ndim > (BATCH not in artifact.signature.dims)
    return own and output.shape[:1] == samples and holds_floats(output)


def _open(reference: Model, candidate: Model, about: SourceOptions) -> tuple[Artifact, Artifact]:
    """Opens both models. ``inputs`` and ``dims`` also apply to a reference that is a file, because both models run on
    the inputs of the reference."""
    one, two = shared((reference, candidate), about)
    one = with_declared(one, about)
    if not one.native and not two.native:
        one = Source.of(
            one,
            weights=about.get("weights"),
            weights_dtype=about.get("weights_dtype", ""),
            adapters=about.get("adapters"),
        )  # ``Source.of`` raises an error if the user gave weights
    if two.native:
        first = one.open()
        return first, two.open(like=partial(getattr, first, "signature"))
    second = two.open()
    if is_decoder(second.signature) and one.native and one.form is None:
        one = replace(one, decoder=True)
    return one.open(like=partial(getattr, second, "signature")), second


def effective_precision(artifact: Artifact) -> str:
    """Returns the precision that a model computes in. The session options in the manifest may lower the precision of an
    fp32 file."""
    own = str(artifact.properties.get("precision", "fp32"))
    asked = recorded_options(artifact).get("precision", "fp32")
    return asked if own == "fp32" else own


def _feeds(
    first: Artifact, second: Artifact, data: Path | None, samples: int
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    from accel.proof.data import Dataset

    if data is not None:
        for index, feeds in enumerate(Dataset.load(data, first.signature).batches(8, samples)):
            yield f"{data.name} batch {index}", feeds
        return
    common = _common(first, second)
    for sizes in common.cases():
        case = ", ".join(f"{d}={s}" for d, s in sizes.items()) or "fixed shape"
        yield case, common.inputs_at(sizes)


def _common(first: Artifact, second: Artifact) -> Signature:
    """Returns the inputs of ``first``, limited to the shapes and the ranges of integers that both models take.

    The profile of an engine may be narrower than the ranges of its source, and an ONNX file without a manifest declares
    no ranges.
    """
    from accel.proof.gates import what_both_take

    theirs = {spec.name: spec for spec in second.signature.inputs}
    for spec in first.signature.inputs:
        if len(spec.shape) != len(theirs[spec.name].shape):
            raise UsageError(
                f"the two models have different inputs: {spec} and {theirs[spec.name]}; give two versions of one model"
            )
    common = what_both_take(first.signature, second.signature)
    inputs = tuple(replace(spec, values=_both(spec, theirs[spec.name])) for spec in common.inputs)
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


def _both(one: TensorSpec, other: TensorSpec) -> tuple[Bound, Bound] | None:
    """Returns the range of the integers that both inputs take, or None if both inputs take all integers. If the ranges
    don't overlap, returns the range of ``other``. If only one of the two ranges has a bound that names a dim, returns
    the range with this bound."""
    first, second = one.range_at({}), other.range_at({})
    if first is None or second is None:
        return (one.values if one.bound_dims or other.values is None else other.values) or one.values
    low, high = max(first[0], second[0]), min(first[1], second[1])
    return (low, high) if low <= high else second
