"""What happens on one rank of the distributed suite and all of them have to answer alike: an overflow, a weight that is
no number, a damaged shard. ``start`` is the suite's: overrides and a folder to a trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accel.errors import TrainingFailed
from accel.train.loop import Trainer

Start = Callable[[list[str], Path], Trainer]

SMALL = Path(__file__).with_name("small.py")
# The first loss of the last rank is infinite. (Of a pipeline the second: torch tries the loss once to learn shapes.)
SPIKY = {
    "zero2": ["parallel.zero=2", f"loss={SMALL}:overflow_once"],
    "tp": ["parallel.tp=2", f"loss={SMALL}:overflow_once"],
    "pp": ["parallel.pp=2", f"loss={SMALL}:overflow_second"],
}
HALVES = ["precision.mode=autocast-fp16", "precision.loss_scale=1024"]
# Where one value of BAD is no number on the last rank that has it: with a loss scale a step could be skipped for it.
BAD = "blocks.2.up.weight"
NOT_A_NUMBER = {
    "ZeRO 3": ["parallel.zero=3"],
    "ZeRO 3, loss scale": ["parallel.zero=3", *HALVES],
    "PP 2, loss scale": ["parallel.pp=2", *HALVES],
}


def overflow(start: Start, folder: Path) -> dict[str, list[list[float]]]:
    """Of two steps, whether each was skipped and the loss scale after it."""
    found = {}
    for name, overrides in SPIKY.items():
        trainer = start([*overrides, *HALVES], folder / "none")
        batches = trainer.batches()
        seen = [trainer.one_step(batches) for _ in range(2)]
        found[name] = [[s["skipped"], s["loss_scale"]] for s in seen]
    return found


def not_a_number(start: Start, folder: Path) -> dict[str, str]:
    """What this rank says."""
    said = {}
    last = int(os.environ["WORLD_SIZE"]) - 1
    for name, overrides in NOT_A_NUMBER.items():
        trainer = start(overrides, folder / "none")
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
    """The losses of three steps, each but the first with a checkpoint before it, and where this rank goes on once a
    bit of the last rank's shard of the second one was turned."""
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
