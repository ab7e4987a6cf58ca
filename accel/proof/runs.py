"""Checks that a model runs at the sizes and values that its signature allows, and on the user's samples."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, canonical_json, text_sha256
from accel.cache import StageCache
from accel.errors import (
    AccelError,
    BadData,
    BadInputSpec,
    BadSource,
    ChildCrashed,
    FailsOnInputs,
    GateFailed,
    RunFailed,
    shortened,
)
from accel.progress import report
from accel.runtimes.base import BaseSession, open_session
from accel.signature import Feeds, IntegerRanges, Signature
from accel.sources.output_specs import step_advice
from accel.spelling import option
from accel.stage import path_sha256
from accel.tables.limits import ROUNDING

from .compare import compare, holds_floats
from .data import data_files, open_npz, place
from .gates import PATIENT, Outputs, case_name, cast_feeds, gate_runtime
from .stream import SampleStream

if TYPE_CHECKING:
    import numpy as np

_AT_ONCE = 8
# At most this many samples are compared with the source of an export. A large model takes a second for them.
_COMPARED = 8


def check_runs(src: Artifact, cache: StageCache) -> None:
    """Runs ``src`` once at every case of its signature, unless ``cache`` says that an earlier run succeeded.

    A file that declares no ranges gets accel's defaults, which may be wrong for the model. Wrong ranges cause a single
    error here, instead of a later error for each candidate.

    Raises ``BadInputSpec`` with the case that failed.
    """
    signature = src.signature
    key = text_sha256(f"{src.digest}\n{canonical_json(signature.to_json())}")
    if cache.get_record("runs", key):
        return
    with ExitStack() as stack:
        run = Outputs(src, gate_runtime(src), stack).of  # later checks find the outputs that it keeps
        for sizes in signature.cases():
            try:
                run(signature.inputs_at(sizes))
            except RunFailed as error:
                sizes_taken = option("dims", {"NAME": "MIN:OPT:MAX[:STEP]"})
                numbers = option("inputs", [f"{_ranged(signature)}{{LOW..HIGH}}"])
                advice = f"; give the sizes it takes with {sizes_taken}, and the range of its numbers with {numbers}"
                fix = step_advice(signature, run) or advice
                raise BadInputSpec(f"{src.path.name} fails at {case_name(sizes)} ({_reason(error)}){fix}") from error
    cache.put_record("runs", key, True)


def _ranged(signature: Signature) -> str:
    """Returns the first integer input, or the first input if none holds integers, in the notation of ``--input``."""
    inputs = [replace(spec, values=None) for spec in signature.inputs]
    return str(next((spec for spec in inputs if "int" in spec.dtype), inputs[0]))


@dataclass(frozen=True)
class Furthest:
    """The largest difference of a model from its source, and the number of samples with NaN.

    ``rel_l2`` is ||model - source||₂ / ||source||₂ of the output ``output`` on the samples ``where``. ``nan`` is the
    number of samples, out of ``samples``, for which an output of the model has NaN.
    """

    rel_l2: float = 0.0
    output: str = ""
    where: str = ""
    nan: int = 0
    samples: int = 0


def check_samples(
    src: Artifact,
    data: Path,
    limit: int | None = None,
    cache: StageCache | None = None,
    *,
    source: Artifact | None = None,
    tolerance: float = ROUNDING,
) -> Furthest:
    """Run ``src`` on the first ``limit`` samples of ``data`` (all samples if None) before any stage uses these samples.

    ``source`` is the model that ``src`` was exported from, and runs on the first samples. The gate of an export only
    uses random inputs, and real values may take other branches of a model. ``cache`` stores the result.

    Returns the largest difference between ``src`` and ``source``.

    Raises ``BadData`` with the first sample that fails and the input that is out of range. Raises ``GateFailed`` with
    the first samples on which a float output differs from the source by more than ``tolerance``.
    """
    of = source.digest if source is not None else ""
    key = text_sha256(f"{src.digest}\n{of}\n{path_sha256(data)}\n{limit}\n{tolerance:g}\nnan")
    if cache is not None and (known := cache.get_record("samples", key)) is not None:
        return Furthest(**known)
    left = len(SampleStream(data, src.signature)) if limit is None else limit
    furthest, nan, samples = Furthest(), 0, 0
    with ExitStack() as stack:
        session = stack.enter_context(open_session(src, gate_runtime(src), PATIENT))
        beside = (
            stack.enter_context(open_session(source, gate_runtime(source), PATIENT)) if source is not None else None
        )
        compared = 0
        for file in data_files(data):
            done = 0
            for feeds in SampleStream(file, src.signature).batches(_AT_ONCE, left):
                report("running the source on the data")
                wanted = _run(beside, file, feeds, done) if beside is not None and compared < _COMPARED else {}
                found = _run(session, file, feeds, done)
                count = _count(src, feeds)
                compared += count
                nan, samples = nan + nan_samples(found), samples + count
                for one in compare(wanted, found):
                    apart = Furthest(one.rel_l2, one.output, f"samples {done} to {done + count - 1} of {place(file)}")
                    if holds_floats(wanted[one.output]):
                        wrong = not one.rel_l2 <= tolerance
                    else:
                        wrong = one.rel_l2 > 0 and beside is not None and one.output in beside.integers_alone(feeds)
                    if wrong:
                        raise _not_the_source(src, apart, one.problem)
                    furthest = max(furthest, apart, key=lambda f: f.rel_l2)
                done += count
            left -= done
    furthest = replace(furthest, nan=nan, samples=samples)
    if cache is not None:
        cache.put_record("samples", key, asdict(furthest))
    return furthest


def nan_samples(outputs: Mapping[str, np.ndarray]) -> int:
    """Returns the number of samples (axis 0) with NaN in a float output. Infinities don't count, because the scores of
    masked positions may be infinite.
    """
    import numpy as np

    floats = [value.astype(np.float64) for value in outputs.values() if value.ndim and holds_floats(value)]
    rows: list[Any] = [np.isnan(value.reshape(len(value), -1)).any(axis=1) for value in floats if value.size]
    same = [row for row in rows if row.shape == rows[0].shape]
    return int(np.logical_or.reduce(same).sum()) if same else 0


def nan_words(nan: int, samples: int, signature: Signature, data: Path | None) -> str:
    """Returns the warning for a source that outputs NaN for ``nan`` of ``samples`` samples, or "" if ``nan`` is 0."""
    if not nan:
        return ""
    floats = [spec for spec in signature.inputs if spec.is_float and spec.values is None]
    ranged = option("inputs", [f"{spec}{{0.1..1}}" for spec in floats[:1]])
    fix = "leave these samples out" if data or not floats else f"give the range of random inputs with {ranged}"
    return (
        f"the source itself gives NaN for {nan} of {samples} samples of {data or 'random inputs'}, and a "
        "candidate has to give NaN there too; correct the model (look for a logarithm, a root or a division of values "
        f"that may be 0 or less), or {fix}"
    )


def _run(session: BaseSession, file: Path, feeds: Feeds, before: int) -> dict[str, np.ndarray]:
    try:
        return session.run(cast_feeds(session, feeds))
    except RunFailed as error:
        raise _bad_sample(session, file, feeds, before, error) from error
    except (BadSource, ChildCrashed) as error:  # errors from the TensorFlow process
        raise failed_on_data(error, file, feeds, session.signature) from error


def _not_the_source(src: Artifact, apart: Furthest, problem: str) -> GateFailed:
    why = problem or f"off by {apart.rel_l2:.2g} of its size"
    fix = (
        "write the part that overflows in another way (x - x.max() before an exponential, say)"
        if problem
        else "a choice by values has to be in the graph: write torch.where or torch.cond (tf.where, tf.cond)"
    )
    return GateFailed(
        f"on {apart.where} the ONNX form of {src.source['spec']} gives another {apart.output!r} ({why}); {fix}"
    )


def failed_on_data(error: AccelError, data: Path, feeds: Feeds, *signatures: Signature) -> AccelError:
    """Returns an error that tells the user why a model raised ``error`` on ``feeds`` from ``data``.

    If an integer is outside the ``values`` of its spec, the error names the file, the input and the number. An integer
    outside its range is an error only if the run fails. A range that is derived from a graph may be too narrow, because
    the model may also take negative indices, which count from the end.
    """
    for signature in signatures:
        found = IntegerRanges(signature.inputs).first_outside(feeds)
        if found is None:
            continue
        why = f" ({shortened(_reason(error))})"
        if isinstance(error, ChildCrashed):
            if str(found.value) not in str(error):
                continue  # the integer is perhaps not the reason for the crash
            why = ""  # Leaves out the library's error text, because the text names internal nodes of the library.
        return BadData(
            f"{place(_file_with(data, found.input, found.value))}: {found.input!r} holds {found.value}, outside "
            f"{found.low}..{found.high}, and the model fails on it{why}; correct it or leave it out"
        )
    if isinstance(error, FailsOnInputs):
        return BadData(f"{error.reason}; correct the samples in {place(data)}")
    return error


def _file_with(data: Path, name: str, number: int) -> Path:
    """Returns the first file of ``data`` whose array ``name`` holds ``number``, or ``data`` itself if no file does."""
    for file in data_files(data):
        with open_npz(file) as archive:
            if (archive[name] == number).any():
                return file
    return data


def _count(src: Artifact, feeds: Mapping[str, np.ndarray]) -> int:
    return len(feeds[src.signature.inputs[0].name])


def _bad_sample(
    session: BaseSession, file: Path, feeds: Mapping[str, np.ndarray], before: int, error: RunFailed
) -> BadData:
    """Returns the error for the first failing sample of a batch.

    If the model can't run single samples, or if no single sample fails, the error names the whole batch.
    """
    count = _count(session.artifact, feeds)
    where = f"samples {before} to {before + count - 1}" if count > 1 else f"sample {before}"
    if session.signature.batch_unit == 1:
        for index in range(count):
            alone = {name: value[index : index + 1] for name, value in feeds.items()}
            try:
                session.run(cast_feeds(session, alone))
            except RunFailed as found:
                where, error, feeds = f"sample {before + index}", found, alone
                break
    reason = _reason(error)
    outside = IntegerRanges(session.signature.inputs).first_outside(feeds)
    if outside is not None and f"input {outside.input!r}" not in reason:
        reason += f" ({outside})"
    return BadData(f"{place(file)}: the model can't run on {where}: {reason}; correct it or leave it out")


def _reason(error: AccelError) -> str:
    """Returns only the reason from an error's text, without the model, the shapes and the advice."""
    text = str(error)
    return (text.partition(": ")[2] or text).partition("; check")[0].partition("; correct ")[0]
