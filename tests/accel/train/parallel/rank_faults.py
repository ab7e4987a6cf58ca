"""Causes a fault on one rank of the distributed suite: an overflow, a NaN weight or a damaged shard. All ranks must
respond to the fault in the same way. The argument ``start`` is the function ``suite.start``, which makes a trainer from
overrides and a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accel.errors import TrainingFailed
from accel.train.loop import Trainer
from tests.support.runs import SMALL

Start = Callable[[list[str], Path], Trainer]

# The first loss of the last rank is infinite. In a pipeline, the second loss of the last rank is infinite instead,
# because torch computes the first loss only to learn the shapes.
SPIKY = {
    "zero2": ["parallel.zero=2", f"loss={SMALL}:overflow_once"],
    "tp": ["parallel.tp=2", f"loss={SMALL}:overflow_once"],
    "pp": ["parallel.pp=2", f"loss={SMALL}:overflow_second"],
}
HALVES = ["precision.mode=autocast-fp16", "precision.loss_scale=1024"]
# In the layouts of NOT_A_NUMBER, the last rank sets one value of the parameter BAD to NaN. With a loss scale, a rank
# could wrongly skip the step instead of raising an error.
BAD = "blocks.2.up.weight"
NOT_A_NUMBER = {
    "ZeRO 3": ["parallel.zero=3"],
    "ZeRO 3, loss scale": ["parallel.zero=3", *HALVES],
    "PP 2, loss scale": ["parallel.pp=2", *HALVES],
}


def overflow(start: Start, names: Sequence[str], folder: Path) -> dict[str, list[list[float]]]:
    """Returns two values for each of two steps: the number of skipped steps so far, and the loss scale after the
    step."""
    found = {}
    for name in names:
        trainer = start([*SPIKY[name], *HALVES], folder / "none")
        batches = trainer.batches()
        seen = [trainer.one_step(batches) for _ in range(2)]
        found[name] = [[s["skipped"], s["loss_scale"]] for s in seen]
    return found


def not_a_number(start: Start, names: Sequence[str], folder: Path) -> dict[str, str]:
    """Returns this rank's error for each layout of NOT_A_NUMBER."""
    said = {}
    last = int(os.environ["WORLD_SIZE"]) - 1
    for name in names:
        trainer = start(NOT_A_NUMBER[name], folder / "none")
        weight = dict(trainer.module.named_parameters()).get(BAD)
        if weight is not None and trainer.ranks.rank == last:
            with torch.no_grad():
                (weight.to_local() if isinstance(weight, DTensor) else weight)[0, 0] = torch.nan
        try:
            trainer.one_step(trainer.batches())
        except TrainingFailed as error:
            said[name] = str(error)
    return said


def damaged(start: Start, folder: Path) -> dict[str, Any]:
    """Flips one bit in a shard of the last rank. Returns the losses of three steps, and the step at which this rank
    resumes. The run saves checkpoints after its first two steps, and the damaged shard belongs to the second
    checkpoint."""
    overrides = ["parallel.zero=3", "checkpoint.asynchronous=false"]
    trainer = start(overrides, folder)
    batches, losses = trainer.batches(), []
    for _ in range(3):
        losses.append(trainer.one_step(batches)["loss"])
        if trainer.step < 3:
            trainer.save()
    shard = folder / "checkpoints" / "step-00000002" / f"__{trainer.ranks.world - 1}_0.distcp"
    if trainer.ranks.rank == 0:
        body = bytearray(shard.read_bytes())
        body[len(body) // 2] ^= 1
        shard.write_bytes(body)
    torch.distributed.barrier()
    again = start(overrides, folder)
    again.resume()
    said, step, batches = again.checkpoints.damaged, again.step, again.batches()
    return {"losses": losses, "step": step, "said": said, "again": [again.one_step(batches)["loss"] for _ in range(2)]}
