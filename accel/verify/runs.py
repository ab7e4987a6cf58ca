"""Whether a model runs at all: at the sizes and values that its signature allows, and on the user's samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel.artifact import Artifact, text_sha256
from accel.cache import StageCache
from accel.errors import BadData, BadInputSpec, RunFailed
from accel.progress import report
from accel.runtimes.base import BaseSession, open_session
from accel.stage import path_sha256
from accel.verify.data import data_files
from accel.verify.gates import case_name, cast_feeds, gate_runtime
from accel.verify.stream import SampleStream

if TYPE_CHECKING:
    import numpy as np

_AT_ONCE = 8


def check_runs(src: Artifact) -> None:
    """Run ``src`` once at every case of its signature. A file that declares no ranges gets accel's own, which may be
    wrong for it: better one sentence now than a reason in each candidate's row later.

    Raises ``BadInputSpec`` with the case that failed.
    """
    with open_session(src) as session:
        for sizes in src.signature.cases():
            try:
                session.run(src.signature.example_inputs(**sizes))
            except RunFailed as error:
                raise BadInputSpec(
                    f"{src.path.name} fails at {case_name(sizes)} ({_reason(error)}); say which sizes it "
                    "takes with --dim NAME=MIN:OPT:MAX, and which integers with --input 'NAME:int64[DIM]{LOW..HIGH}'"
                ) from error


def check_samples(src: Artifact, data: Path, limit: int | None = None, cache: StageCache | None = None) -> None:
    """Run ``src`` on the first ``limit`` samples of ``data`` (None: all), before anything is made from either. With a
    ``cache`` what ran once is not run again.

    Raises ``BadData`` with the first sample on which it fails, and the input that holds what it doesn't take.
    """
    key = text_sha256(f"{src.digest}\n{path_sha256(data)}\n{limit}")
    if cache is not None and cache.get_record("samples", key) is not None:
        return
    left = len(SampleStream(data, src.signature)) if limit is None else limit
    with open_session(src, gate_runtime(src)) as session:
        for file in data_files(data):
            done = 0
            for feeds in SampleStream(file, src.signature).batches(_AT_ONCE, left):
                report("running the source on the data")
                try:
                    session.run(cast_feeds(session, feeds))
                except RunFailed as error:
                    raise _bad_sample(session, file, feeds, done, error) from error
                done += _count(src, feeds)
            left -= done
    if cache is not None:
        cache.put_record("samples", key, True)


def _count(src: Artifact, feeds: Mapping[str, np.ndarray]) -> int:
    return len(feeds[src.signature.inputs[0].name])


def _bad_sample(
    session: BaseSession, file: Path, feeds: Mapping[str, np.ndarray], before: int, error: RunFailed
) -> BadData:
    """What is wrong with the first sample of a batch that can't be run; with the whole batch where no sample of it can
    be run alone."""
    count = _count(session.artifact, feeds)
    where = f"samples {before} to {before + count - 1}" if count > 1 else f"sample {before}"
    if session.signature.fixed_batch is None:
        for index in range(count):
            alone = {name: value[index : index + 1] for name, value in feeds.items()}
            try:
                session.run(cast_feeds(session, alone))
            except RunFailed as found:
                where, error, feeds = f"sample {before + index}", found, alone
                break
    reason = _reason(error)
    for spec in session.signature.inputs:
        value = feeds[spec.name]
        if spec.values and value.size and f"input {spec.name!r}" not in reason:
            wrong = value[(value < spec.values[0]) | (value > spec.values[1])]
            if wrong.size:
                reason += f" (input {spec.name!r} holds {wrong.flat[0]}, it takes {spec.values[0]}..{spec.values[1]})"
    return BadData(f"{file}: the model can't run on {where}: {reason}; correct it or leave it out")


def _reason(error: RunFailed) -> str:
    """Without the model and the shapes before it, and the advice after it."""
    return str(error).partition(": ")[2].partition("; check")[0]
