"""Counts the bytes that a rank of the distributed suite holds and sends during training. The argument ``start`` is the
function ``suite.start``, which makes a trainer from overrides and a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from accel.plan.measure import SavedBytes, blocks
from accel.train import passes
from accel.train.loop import Trainer
from accel.train.ranks import Ranks
from accel.train.simulate import Sent, Simulated
from tests.support.runs import SMALL

Start = Callable[[list[str], Path], Trainer]

# For each config in HELD, four ranks train a step of two micro-batches with AdamW. Each rank counts the bytes that it
# holds and sends in this step.
HELD = {
    **{f"ZeRO {zero}": [f"parallel.zero={zero}"] for zero in range(4)},
    **{f"ZeRO {zero}, bf16": [f"parallel.zero={zero}", "precision.mode=bf16"] for zero in (0, 1, 3)},
    "ZeRO 3, hpZ 2": ["parallel.zero=3", "parallel.hpz=2"],
    "ZeRO 3, qwZ": ["parallel.zero=3", "parallel.qwz=true"],
    "ZeRO 3, qgZ": ["parallel.zero=3", "parallel.qgz=true"],
    "ZeRO 3, hpZ 2, qwZ, qgZ": ["parallel.zero=3", "parallel.hpz=2", "parallel.qwz=true", "parallel.qgz=true"],
}
HELD = {name: [*words, "optimizer.name=adamw", "micro_batch=1"] for name, words in HELD.items()}
# `make test` checks the configs in FAST_HELD, and `make proof` checks all others.
FAST_HELD = (
    *(f"ZeRO {zero}" for zero in range(4)),
    "ZeRO 1, bf16",
    "ZeRO 3, qwZ",
    "ZeRO 3, qgZ",
    "ZeRO 3, hpZ 2, qwZ, qgZ",
)
DEEP = f"model={SMALL}:deep"
# In these pipelines, each rank counts the bytes that it sends to other stages in a step. The outer keys are world
# sizes.
STAGES = {
    2: {
        "1F1B": ["parallel.pp=2"],
        "interleaved": ["parallel.pp=2", "parallel.pipeline=interleaved"],
        "zero-bubble": ["parallel.pp=2", "parallel.pipeline=zero-bubble"],
        "GPipe, autocast-bf16": ["parallel.pp=2", "parallel.pipeline=gpipe", "precision.mode=autocast-bf16"],
        "1F1B, bf16": ["parallel.pp=2", "precision.mode=bf16"],
    },
    4: {
        "GPipe": ["parallel.pp=4", "parallel.pipeline=gpipe"],
        "interleaved": [DEEP, "parallel.pp=4", "parallel.pipeline=interleaved"],
        "zero-bubble": [DEEP, "parallel.pp=4", "parallel.pipeline=zero-bubble"],
        "1F1B, TP 2": ["parallel.pp=2", "parallel.tp=2"],
        "1F1B, TP 2, no sequence parallel": ["parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=false"],
    },
}

FAST_STAGES = {2: tuple(STAGES[2]), 4: ("GPipe", "interleaved", "1F1B, TP 2")}
CP, RING = ["parallel.cp=2"], ["parallel.cp=2", "parallel.cp_method=ring"]
GPIPE = ["parallel.pp=2", "parallel.pipeline=gpipe"]
WHOLE = "parallel.sequence_parallel=false"
# In these layouts with context parallel, each rank counts the bytes that it keeps for the backward pass, and that it
# sends over each axis. GPipe runs all forward passes first, so the kept bytes add up.
SHARED = {
    2: {"Ulysses": CP, "ring": RING},
    4: {
        "Ulysses, TP 2": [*CP, "parallel.tp=2"],
        "Ulysses, TP 2, no sequence parallel, full recomputation": [
            *CP, "parallel.tp=2", WHOLE, "parallel.recompute=full",
        ],
        "ring, TP 2": [*RING, "parallel.tp=2"],
        "ring, TP 2, no sequence parallel": [*RING, "parallel.tp=2", WHOLE],
        "Ulysses, few key-value heads": [f"model={SMALL}:grouped", "parallel.cp=4"],
        "Ulysses, PP 2": [*CP, *GPIPE],
        "ring, PP 2, full recomputation": [*RING, *GPIPE, "parallel.recompute=full"],
    },
    8: {
        "Ulysses, PP 2, TP 2": [*CP, *GPIPE, "parallel.tp=2"],
        "ring, PP 2, TP 2, no sequence parallel": [*RING, *GPIPE, "parallel.tp=2", WHOLE],
    },
}  # fmt: skip
# Each of these layouts has four ranks: two ranks divide the experts, and two divide the other tensors.
_EXPERTS = [f"model={SMALL}:moe", "parallel.ep=2", "parallel.tp=2", "micro_batch=4"]
EXPERTS = {
    "ZeRO 3": [*_EXPERTS, "parallel.zero=3"],
    "ZeRO 1, full recomputation": [*_EXPERTS, "parallel.zero=1", "parallel.recompute=full"],
    "ZeRO 2, no sequence parallel": [*_EXPERTS, "parallel.zero=2", WHOLE],
}
FAST_SHARED = {
    2: ("Ulysses", "ring"),
    4: ("Ulysses, TP 2", "ring, TP 2, no sequence parallel", "Ulysses, PP 2"),
}


def _local(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(getattr(t, "to_local", lambda t=t: t)().nbytes for t in tensors if t is not None)


def switched_on(trainer: Trainer) -> dict[str, Any]:
    """Returns four properties of a run that its losses don't show.

    ``offload`` is True if FSDP2 keeps the shards on the host. ``shards between the passes`` lists how many ranks share
    the parameters between the forward and the backward pass. ``compiled`` is a list with True for each compiled block,
    and False for each other block. ``frames`` is the number of Python frames that torch.compile has compiled since the
    last call of this function.
    """
    groups = [
        group
        for part in trainer.module.modules()
        if isinstance(part, FSDPModule)
        for group in part._get_fsdp_state()._fsdp_param_groups
    ]
    between = [group.post_forward_mesh_info for group in groups]
    compiled = [block._compiled_call_impl is not None for block in blocks(trainer.module)]
    frames = counters["frames"]["ok"]
    counters.clear()
    return {
        "offload": bool(groups) and all(p.offload_to_cpu for group in groups for p in group.fsdp_params),
        "shards between the passes": sorted({mesh.shard_mesh_size for mesh in between if mesh is not None}),
        "compiled": compiled,
        "frames": frames,
    }


def held_and_sent(start: Start, names: Sequence[str], folder: Path) -> dict[str, dict[str, float]]:
    """Returns this rank's byte counts for each config of ``names``. A rank counts the bytes that it holds between
    steps, after a micro-batch and between the passes, and the bytes that it sends. If a count differs between the
    micro-batches of a step, the result is the maximum."""
    return {name: _of_a_step(start(HELD[name], folder / "none")) for name in names}


def _of_a_step(trainer: Trainer) -> dict[str, float]:
    held: dict[str, int] = {}
    batches = trainer.batches()
    trainer.one_step(batches)
    whole, loss = passes.micro_batch, trainer.built.passes.loss

    def note(**now: int) -> None:
        held.update({name: max(size, held.get(name, 0)) for name, size in now.items()})

    @contextmanager
    def watched(module: torch.nn.Module, zero: int, *, last: bool) -> Iterator[None]:
        with whole(module, zero, last=last):
            yield
        parameters = list(trainer.module.parameters())
        note(step=_local(parameters), gradients=_local(p.grad for p in parameters))

    def between(outputs: Any, targets: Any) -> Any:
        note(between=_local(trainer.module.parameters()))
        return loss(outputs, targets)

    passes.micro_batch, trainer.built.passes.loss = watched, between
    try:
        with Sent(seen := Simulated()):
            trainer.one_step(batches)
    finally:
        passes.micro_batch = whole
    return {
        "parameters in a step": held["step"],
        "parameters between the passes": held["between"],
        "gradients": held["gradients"],
        "parameters": _local(trainer.module.parameters()),
        "optimizer": sum(t.nbytes for t in trainer.optimizer.tensors()),
        "sent": seen.sent,
    }


def of_experts(start: Start, names: Sequence[str], folder: Path) -> dict[str, dict[str, float]]:
    """Returns the bytes of this rank's optimizer states, and the bytes that it sends over each axis in its second
    step."""
    found = {}
    for name in names:
        _clear_sharding_prop_cache()
        trainer = start(EXPERTS[name], folder / "none")
        batches = trainer.batches()
        trainer.one_step(batches)
        with Sent(seen := Simulated()):
            trainer.one_step(batches)
        states = sum(t.nbytes for t in trainer.optimizer.tensors())
        found[name] = {"optimizer": states, **_over_axes(seen, trainer.ranks)}
    return found


def sent_by_stages(start: Start, names: Sequence[str], world: int, folder: Path) -> dict[str, float]:
    """Returns the bytes that this rank sends to other stages in its second step. The first step doesn't count, because
    torch also sends shapes in this step."""
    found = {}
    for name in names:
        trainer = start(STAGES[world][name], folder / "none")
        batches = trainer.batches()
        trainer.one_step(batches)
        with Sent(seen := Simulated()):
            trainer.one_step(batches)
        found[name] = seen.sent_pp
    return found


def _over_axes(found: Simulated, ranks: Ranks) -> dict[str, float]:
    """Returns the bytes that were sent over each axis of the ranks. ``same`` are the ranks with the same experts."""
    meshes = {
        "dp": ranks.data, "tp": ranks.tp, "pp": ranks.pp, "cp": ranks.cp, "ep": ranks.ep, "same": ranks.beside,
    }  # fmt: skip
    return {
        axis: sum(found.groups[mesh.get_group(index).group_name] for index in range(mesh.ndim))
        for axis, mesh in meshes.items()
        if mesh is not None
    }


def of_shared_sequences(start: Start, names: Sequence[str], world: int, folder: Path) -> dict[str, dict[str, float]]:
    """Returns the bytes that this rank keeps for the backward passes of its second step, and the bytes that it sends
    over each axis."""
    found = {}
    for name in names:
        # DTensor would send over the groups of an earlier layout whose mesh has the same ranks.
        _clear_sharding_prop_cache()
        trainer = start([*SHARED[world][name], "micro_batch=2"], folder / "none")
        batches = trainer.batches()
        trainer.one_step(batches)
        for part in trainer.module.modules():
            if isinstance(part, FSDPModule):  # gathered parameters aren't activations
                part.unshard()
        with SavedBytes(trainer.module.parameters()) as saved, Sent(seen := Simulated()):
            trainer.one_step(batches)
        found[name] = {"kept": saved.bytes, **_over_axes(seen, trainer.ranks)}
    return found
