"""Runs a teacher that isn't a module of PyTorch over all samples before training, and keeps its outputs on disk."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from accel.artifact import Artifact, beside
from accel.errors import BadConfig, CannotWrite
from accel.runtimes.base import BaseSession, open_session

from ..batch import named_inputs
from ..config.schema import TrainConfig
from ..data.stream import Stream
from ..log import beat
from ..ranks import Ranks

FOLDER = "teacher"
_OUTPUTS, _FACTS = "logits.npy", "facts.json"


class Taught(torch.utils.data.Dataset[Any]):
    """The samples of ``data``, with the teacher's logits beside the targets: ``(inputs, (targets, logits))``."""

    def __init__(self, data: Sequence[Any], logits: np.ndarray) -> None:
        self.data, self.logits = data, logits
        self.for_training = getattr(data, "for_training", ())

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, targets = self.data[index]
        return inputs, (targets, torch.from_numpy(np.array(self.logits[index])))


def taught(data: Sequence[Any], teacher: Artifact, config: TrainConfig, out: Path, ranks: Ranks) -> Taught:
    """Returns ``data`` with the logits of ``teacher``, float32. Every rank computes a part of the logits.

    The logits are kept in ``out/teacher``, and a later run with the same teacher and samples takes them from there.
    Raises ``BadConfig`` if the teacher can't run on the samples, and ``CannotWrite`` if the disk is too small.
    """
    if isinstance(data, Stream):
        raise BadConfig(
            f"the teacher {config.distillation.teacher} runs over all samples before training, which an iterable "
            "dataset doesn't have; use a teacher of PyTorch, or a map-style dataset"
        )
    folder = out / FOLDER
    facts = {
        "teacher": teacher.digest,
        "data": config.data,
        "seed": config.seed,
        "samples": len(data),
        "first": _fingerprint(data),
    }
    known = folder / _FACTS
    ready = known.is_file() and json.loads(known.read_text()) == facts
    _together(ranks)  # no rank may write the facts before all ranks have read them
    if not ready:
        with open_session(teacher) as session:
            _run(session, data, config, folder, ranks, out)
        _together(ranks)
        if ranks.rank == 0:
            with beside(known) as temporary:
                temporary.write_text(json.dumps(facts))
    return Taught(data, np.load(folder / _OUTPUTS, mmap_mode="r"))


def _run(session: BaseSession, data: Sequence[Any], config: TrainConfig, folder: Path, ranks: Ranks, out: Path) -> None:
    """Writes the logits of this rank's share of the samples."""
    first = _logits(session, [data[0]], config)
    shape = (len(data), *first.shape[1:])
    path = folder / _OUTPUTS
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FACTS).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        size, free = 4 * math.prod(shape), shutil.disk_usage(folder).free
        if size > free:
            raise CannotWrite(
                f"the teacher's logits of {len(data)} samples take {size / 1e9:.4g} GB, but {folder} has "
                f"{free / 1e9:.4g} GB free; free some space, or use a teacher of PyTorch, which runs beside the student"
            )
        np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape).flush()
    _together(ranks)
    logits = np.lib.format.open_memmap(path, mode="r+")
    begin, end = (len(data) * part // ranks.world for part in (ranks.rank, ranks.rank + 1))
    for start in range(begin, end, config.micro_batch):
        beat(out)
        stop = min(end, start + config.micro_batch)
        logits[start:stop] = _logits(session, [data[index] for index in range(start, stop)], config)
    logits.flush()


def _logits(session: BaseSession, samples: Sequence[Any], config: TrainConfig) -> np.ndarray:
    """Returns the teacher's logits for ``samples``: its output ``logits``, or its first output."""
    signature, name = session.signature, config.distillation.teacher
    inputs = torch.utils.data.default_collate(list(samples))[0]
    given = named_inputs([spec.name for spec in signature.inputs], inputs)
    if missing := [spec.name for spec in signature.inputs if spec.name not in given]:
        raise BadConfig(
            f"the teacher {name} takes the input {missing[0]!r}, which the samples of {config.data} don't have; give "
            "the samples as dicts with the teacher's names, or take another teacher"
        )
    feeds = {spec.name: given[spec.name].numpy().astype(spec.dtype) for spec in signature.inputs}
    found = session.run(feeds)
    logits = found.get("logits", next(iter(found.values())))
    if logits.shape[:1] != (len(samples),):
        raise BadConfig(
            f"the teacher {name} returns the shape {list(logits.shape)} for {len(samples)} samples; take a teacher "
            "whose first output has one entry for each sample"
        )
    return logits.astype(np.float32)


def _fingerprint(data: Sequence[Any]) -> list[float]:
    """Returns sums over the first and the last sample's inputs, which change if the data changes."""
    values = []
    for index in (0, len(data) - 1):
        inputs = data[index][0]
        for value in named_inputs([str(n) for n in range(9)], inputs).values():
            values.append(float(torch.as_tensor(value).double().sum()))
    return values


def _together(ranks: Ranks) -> None:
    if ranks.world > 1:
        dist.barrier(ranks.saving)
