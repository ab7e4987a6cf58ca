"""Every layout that fits the memory of a rank, fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accel.errors import BadConfig
from accel.plan.memory import Memory, training_memory
from accel.plan.spec import Layout, Machine, ModelSpec
from accel.plan.traffic import StepTime, bubble, flops, step_time, traffic


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout of one model on one machine, and what it takes."""

    spec: ModelSpec
    layout: Layout
    machine: Machine
    memory: Memory
    sent: dict[str, float]
    time: StepTime

    @classmethod
    def of(cls, spec: ModelSpec, layout: Layout, machine: Machine) -> Plan:
        """Everything about ``layout``. Raises ``BadConfig`` where it can't be."""
        if layout.tp > 1 and not spec.is_transformer:
            raise BadConfig(
                "tensor parallel cuts heads and layers; pass --layers, --hidden, --heads and --seq with --tp"
            )
        if layout.tp > 1 and (spec.heads % layout.tp or spec.kv_heads % layout.tp):
            raise BadConfig(f"{spec.kv_heads} heads don't divide by tp {layout.tp}; use a divisor")
        if layout.cp > 1 and not spec.is_transformer:
            raise BadConfig(
                "context parallel cuts sequences and heads; pass --layers, --hidden, --heads and --seq with --cp"
            )
        if layout.cp > 1 and not _shares(spec, layout.cp):
            raise BadConfig(
                f"{spec.heads} heads ({spec.kv_heads} of keys and values) and a sequence of {spec.seq} don't all "
                f"divide by cp {layout.cp}; use a common divisor"
            )
        return cls(
            spec=spec,
            layout=layout,
            machine=machine,
            memory=training_memory(spec, layout),
            sent=traffic(spec, layout),
            time=step_time(spec, layout, machine),
        )

    @property
    def fits(self) -> bool:
        """Whether a rank's memory holds it; True where no memory was given."""
        return not self.machine.hbm or self.memory.total <= self.machine.usable

    def to_json(self) -> dict[str, object]:
        """Everything as plain values: bytes, seconds, fractions; None for what can't be known from what was given."""
        m, t = self.memory, self.time
        timed = bool(self.spec.seq or self.spec.flops)
        return {
            "model_state_bytes_per_rank": round(m.model_states),
            "parameter_bytes_per_rank": round(m.parameters),
            "gradient_bytes_per_rank": round(m.gradients),
            "optimizer_bytes_per_rank": round(m.optimizer),
            "activation_bytes_per_rank": None if m.activations is None else round(m.activations),
            "temporary_bytes_per_rank": round(m.temporary),
            "kv_cache_bytes_per_rank": round(m.kv_cache),
            "total_bytes_per_rank": round(m.total),
            "communication_bytes_per_step": round(sum(self.sent.values())),
            "communication_bytes_per_step_by_axis": {axis: round(sent) for axis, sent in self.sent.items()},
            "flops_per_step": flops(self.spec, self.layout) if timed else None,
            "step_seconds": t.step if timed else None,
            "compute_seconds": t.compute if timed else None,
            "communication_seconds": {"dp": t.dp, "tp": t.tp, "pp": t.pp, "cp": t.cp},
            "bubble_fraction": bubble(self.layout),
            "samples_per_second": self.layout.global_batch / t.step if timed else None,
            "fits": self.fits,
            "layout": {
                "world": self.layout.world,
                "dp": self.layout.dp,
                "tp": self.layout.tp,
                "pp": self.layout.pp,
                "cp": self.layout.cp,
                "zero": self.layout.zero,
                "precision": self.layout.precision,
                "optimizer": self.layout.optimizer,
                "micro_batch": self.layout.micro_batch,
                "accumulation": self.layout.accumulation,
                "recompute": self.layout.recompute,
                "pipeline": self.layout.pipeline,
            },
        }


def layouts(
    spec: ModelSpec,
    machine: Machine,
    *,
    world: int,
    global_batch: int,
    precision: str,
    optimizer: str,
    pipeline: str,
    fixed: Mapping[str, Any],
) -> Iterator[Layout]:
    """Every layout of ``world`` ranks that divides the model and the batch: tp or cp within a node, pp within the
    layers, micro-batches in powers of two. ZeRO 3 is left out of pipelines: it would gather for every micro-batch.
    ``fixed``: fields of ``Layout`` that are to be just so."""
    for tp, pp, cp in _cuts(spec, machine, world):
        dp = world // (tp * pp * cp)
        if global_batch % dp:
            continue
        each = global_batch // dp
        asked = fixed.get("micro_batch", 0)
        for micro in [asked] if asked > 0 and each % asked == 0 else _powers(each):
            for zero in (0, 1, 2, 3) if pp == 1 else (0, 1, 2):
                for recompute in _recompute(spec, fixed):
                    varied: dict[str, Any] = {"zero": zero, "tp": tp, "pp": pp, "cp": cp}
                    varied |= {"micro_batch": micro, "recompute": recompute}
                    kept = {name: value for name, value in fixed.items() if name not in varied}
                    if any(varied[name] != value for name, value in fixed.items() if name in varied):
                        continue
                    if not _holds(kept, zero, dp * cp):
                        continue
                    yield Layout(
                        world=world,
                        precision=precision,
                        optimizer=optimizer,
                        pipeline=pipeline,
                        accumulation=each // micro,
                        **varied,
                        **kept,
                    )


def _recompute(spec: ModelSpec, fixed: Mapping[str, Any]) -> tuple[str, ...]:
    if not spec.is_transformer:
        return ("none",)
    return (fixed["recompute"],) if "recompute" in fixed else ("none", "full")


def _holds(kept: Mapping[str, Any], zero: int, ranks: int) -> bool:
    """Whether hybrid sharding and ZeRO++ as in ``kept`` can be on so many data-parallel ``ranks`` at stage ``zero``."""
    replicate, hpz = kept.get("replicate", 1), kept.get("hpz", 0)
    if ranks % replicate:
        return False
    shards = ranks // replicate
    if hpz and (shards % hpz or not 1 < hpz < shards):
        return False
    return zero == 3 or not (hpz or kept.get("qwz") or kept.get("qgz"))


def _cuts(spec: ModelSpec, machine: Machine, world: int) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, cp) that divide the ranks and the model."""
    near = min(world, machine.node_size)
    for tp in range(1, near + 1):
        if world % tp or (
            tp > 1 and (not spec.is_transformer or spec.heads % tp or spec.kv_heads % tp or spec.vocab % tp)
        ):
            continue
        for pp in range(1, min(world // tp, max(1, spec.layers if spec.is_transformer else 1)) + 1):
            if world % (tp * pp) == 0 and not (spec.layers and spec.layers % pp):
                yield tp, pp, 1
    for cp in range(2, near + 1):
        if world % cp == 0 and spec.is_transformer and _shares(spec, cp):
            yield 1, 1, cp


def _shares(spec: ModelSpec, cp: int) -> bool:
    """Whether ``cp`` ranks can share heads and positions evenly."""
    return not (spec.heads % cp or spec.kv_heads % cp or spec.seq % cp)


def search(
    spec: ModelSpec,
    machine: Machine,
    *,
    world: int,
    global_batch: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    pipeline: str = "1f1b",
    fixed: Mapping[str, Any] | None = None,
) -> list[Plan]:
    """The layouts that fit ``machine.hbm`` bytes a rank, fastest first; of equals the one that leaves most memory.
    ``fixed``: fields of ``Layout`` (``zero``, ``tp``, ``hpz``, ...) that every one of them is to have just so.

    Raises ``BadConfig`` with the least that any layout needs, where none fits.
    """
    fixed = fixed or {}
    found = [
        Plan.of(spec, layout, machine)
        for layout in layouts(
            spec,
            machine,
            world=world,
            global_batch=global_batch,
            precision=precision,
            optimizer=optimizer,
            pipeline=pipeline,
            fixed=fixed,
        )
    ]
    if not found and fixed:
        asked = ", ".join(f"{name} {value}" for name, value in fixed.items())
        raise BadConfig(
            f"no layout of {world} ranks and a global batch of {global_batch} has {asked}; leave one of them to the "
            "search"
        )
    if not found:
        raise BadConfig(
            f"a global batch of {global_batch} can't be cut over {world} ranks; use a multiple of {world} samples"
        )
    fitting = [plan for plan in found if plan.fits]
    if not fitting:
        least = min(plan.memory.total for plan in found)
        raise BadConfig(
            f"no layout of {world} ranks fits {machine.hbm / 1e9:.4g} GB a rank, the smallest takes "
            f"{least / 1e9:.4g} GB of the "
            f"{machine.usable / 1e9:.4g} GB that may be filled; use more ranks or a smaller global batch"
        )
    return sorted(fitting, key=lambda plan: (plan.time.step, plan.memory.total))


def _powers(largest: int) -> Iterator[int]:
    size = 1
    while size <= largest:
        if largest % size == 0:
            yield size
        size *= 2
