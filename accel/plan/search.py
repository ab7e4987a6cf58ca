"""Finds all layouts that fit the memory of a rank, sorted from the fastest to the slowest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from accel.errors import BadConfig
from accel.spelling import option

from .memory import Memory
from .peak import training_memory
from .rules import Axes, fit_problems, layout_problems
from .spec import Layout, Machine, ModelSpec
from .traffic import StepTime, bubble, disk_bytes, flops, host_bytes, step_time, traffic


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout of a model on a machine, with its memory, the bytes sent over each mesh axis, and the time of a step."""

    spec: ModelSpec
    layout: Layout
    machine: Machine
    memory: Memory
    sent: dict[str, float]
    time: StepTime

    @classmethod
    def of(cls, spec: ModelSpec, layout: Layout, machine: Machine) -> Plan:
        """Returns the plan of ``layout``. Raises ``BadConfig`` if the model doesn't fit ``layout``."""
        _check_shape(spec, {"tp": layout.tp, "cp": layout.cp})
        if layout.ep > 1 and (not spec.experts or spec.experts % layout.ep):
            raise BadConfig(
                f"{spec.experts or 'no'} experts can't be shared evenly by ep {layout.ep}; use a divisor of the number "
                "of experts, or ep 1"
            )
        sizes = {name: getattr(spec, name) for name in ("layers", "heads", "kv_heads", "seq")}
        axes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
        for problem in fit_problems(**axes, ring=layout.ring, sequence=layout.sequence_parallel, **sizes):
            raise BadConfig(problem)
        sent = traffic(spec, layout)
        return cls(
            spec=spec,
            layout=layout,
            machine=machine,
            memory=training_memory(spec, layout),
            sent=sent,
            time=step_time(spec, layout, machine, sent),
        )

    @property
    def fits(self) -> bool:
        """Tells whether the plan fits the memory of a rank. Returns True if the machine's memory isn't given."""
        return not self.machine.hbm or self.memory.total <= self.machine.usable

    def to_json(self) -> dict[str, object]:
        """Returns the plan as plain values in bytes, seconds and fractions. A value that can't be computed from the
        inputs is None.
        """
        m, t = self.memory, self.time
        read, written = disk_bytes(self.spec, self.layout)
        timed = bool(self.spec.seq or self.spec.flops)
        return {
            "model_state_bytes_per_rank": round(m.model_states),
            "parameter_bytes_per_rank": round(m.parameters),
            "gradient_bytes_per_rank": round(m.gradients),
            "optimizer_bytes_per_rank": round(m.optimizer),
            "activation_bytes_per_rank": None if m.activations is None else round(m.activations),
            "temporary_bytes_per_rank": round(m.temporary),
            "optimizer_step_bytes_per_rank": round(m.stepping),
            "kv_cache_bytes_per_rank": round(m.kv_cache),
            "teacher_bytes_per_rank": round(m.teacher),
            "total_bytes_per_rank": round(m.total),
            "host_bytes_per_rank": round(m.host),
            "communication_bytes_per_step": round(sum(self.sent.values())),
            "communication_bytes_per_step_by_axis": {axis: round(sent) for axis, sent in self.sent.items()},
            "flops_per_step": flops(self.spec, self.layout) if timed else None,
            "step_seconds": t.step if timed else None,
            "compute_seconds": t.compute if timed else None,
            "communication_seconds": {"dp": t.dp, "tp": t.tp, "pp": t.pp, "cp": t.cp, "ep": t.ep},
            "host_bytes_copied_per_step": round(host_bytes(self.spec, self.layout)),
            "host_seconds": t.host,
            "disk_bytes_per_rank": round(m.disk),
            "disk_bytes_read_per_step": round(read),
            "disk_bytes_written_per_step": round(written),
            "disk_seconds": t.disk,
            "bubble_fraction": bubble(self.layout),
            "samples_per_second": self.layout.global_batch / t.step if timed else None,
            "fits": self.fits,
            "layout": {
                "world": self.layout.world,
                "dp": self.layout.dp,
                "tp": self.layout.tp,
                "pp": self.layout.pp,
                "cp": self.layout.cp,
                "cp_method": self.layout.cp_method,
                "ep": self.layout.ep,
                "zero": self.layout.zero,
                "precision": self.layout.precision,
                "optimizer": self.layout.optimizer,
                "micro_batch": self.layout.micro_batch,
                "accumulation": self.layout.accumulation,
                "recompute": self.layout.recompute,
                "pipeline": self.layout.pipeline,
                "replicate": self.layout.replicate,
                "hpz": self.layout.hpz,
                "qwz": self.layout.qwz,
                "qgz": self.layout.qgz,
                "offload": self.layout.offload,
                "disk": self.layout.disk,
                "disk_parameters": self.layout.disk_parameters,
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
    """Yields every layout of ``world`` ranks that divides the model and the batch evenly.

    The ranks of tp and cp together fit in a node, and the pp size is at most the number of layers. The sizes of
    micro-batches are powers of two. ZeRO shards over all data-parallel ranks or within each node (HSDP), and keeps
    shards on the device or on the host. Layouts are tried without and with hpZ, which keeps a second copy of the
    parameters, sharded within each node. Pipelines are not combined with ZeRO 3, because ZeRO 3 would gather the
    parameters for every micro-batch. Layouts have qwZ and qgZ only if ``fixed`` requires qwZ or qgZ, because both
    options round values. ``fixed`` maps names of ``Layout`` fields to required values.
    """
    named = {name: value for name, value in fixed.items() if name in Axes.__dataclass_fields__}
    again = [mode for mode in _recompute(spec, fixed) if fixed.get("recompute", mode) == mode]
    for tp, pp, cp in _cuts(spec, machine, world):
        if any(fixed.get(name, size) != size for name, size in (("tp", tp), ("pp", pp), ("cp", cp))):
            continue
        dp = world // (tp * pp * cp)
        if global_batch % dp:
            continue
        each = global_batch // dp
        node = machine.node_size // (tp * cp) * cp  # the number of data-parallel ranks in a node
        replicas = (1, dp * cp // node) if node > 1 and dp * cp % node == 0 else (1,)
        asked = fixed.get("micro_batch", 0)
        choices: dict[str, Iterable[Any]] = {
            "micro_batch": [asked] if asked > 0 and each % asked == 0 else _powers(each),
            "zero": (0, 1, 2, 3) if pp == 1 else (0, 1, 2),
            "replicate": _asked(fixed, "replicate", replicas),
            "hpz": _asked(fixed, "hpz", (0, node) if tp * pp * cp == 1 else (0,)),
            # ZeRO 3 gathers a whole block at once. CPU offload is tried only if the size of a block is known.
            "offload": _asked(fixed, "offload", (False, True) if spec.block else (False,)),
        }
        for values in product(*choices.values()):
            varied: dict[str, Any] = dict(zip(choices, values, strict=True))
            if any(fixed.get(name, value) != value for name, value in varied.items()):
                continue
            if _same_as_plain(varied, dp * cp):
                continue
            kind = {"world": world, "tp": tp, "pp": pp, "cp": cp, "pipeline": pipeline, **varied}
            if any(layout_problems(Axes(**(named | kind)), global_batch)):
                continue
            kind |= {"precision": precision, "optimizer": optimizer, "accumulation": each // varied["micro_batch"]}
            for recompute in again:
                yield Layout(**{**fixed, **kind, "recompute": recompute})


def _shape_options() -> str:
    """Returns the command-line options that describe a transformer."""
    return f"{option('layers')}, {option('hidden')}, {option('heads')} and {option('seq')}"


def _asked(fixed: Mapping[str, Any], name: str, usual: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the values to try for the field ``name``: the value in ``fixed``, or else the distinct values of
    ``usual``."""
    return (fixed[name],) if name in fixed else tuple(dict.fromkeys(usual))


def _recompute(spec: ModelSpec, fixed: Mapping[str, Any]) -> tuple[str, ...]:
    if not spec.is_transformer:
        return ("none",)
    return _asked(fixed, "recompute", ("none", "selective", "full"))


def _check_shape(spec: ModelSpec, axes: Mapping[str, Any]) -> None:
    """Raises ``BadConfig`` if ``axes`` need the shape of the model, and the shape isn't known."""
    for axis, what in (("tp", "tensor parallel"), ("cp", "context parallel")):
        if axes.get(axis, 1) > 1 and not spec.is_transformer:
            raise BadConfig(
                f"{what} needs the model's shape; pass the shape as {_shape_options()} together with {option(axis)}"
            )


def _same_as_plain(kind: Mapping[str, Any], ranks: int) -> bool:
    """Tells whether the replicas in ``kind`` change nothing: ZeRO 0 replicates everything, and so do replicas of a
    single one of the ``ranks`` data-parallel ranks."""
    replicas: int = kind["replicate"]
    return replicas > 1 and (kind["zero"] == 0 or replicas == ranks)


def _cuts(spec: ModelSpec, machine: Machine, world: int) -> Iterator[tuple[int, int, int]]:
    """Yields each combination (tp, pp, cp) that divides the ranks and the model evenly."""
    near = min(world, machine.node_size) if spec.is_transformer else 1
    sizes = {name: getattr(spec, name) for name in ("layers", "heads", "kv_heads", "seq")}
    for tp, cp in product(range(1, near + 1), repeat=2):
        if tp * cp > near or world % (tp * cp):
            continue
        if any(fit_problems(tp=tp, pp=1, cp=cp, ring=False, sequence=True, **sizes)):
            continue
        for pp in range(1, min(world // (tp * cp), spec.layers if spec.is_transformer else 1) + 1):
            if world % (tp * cp * pp) == 0 and not (spec.layers and spec.layers % pp):
                yield tp, pp, cp


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
    """Returns the layouts that fit ``machine.hbm`` bytes per rank, fastest first.

    Layouts with the same estimated time are sorted by ``preferred``. ``fixed`` maps names of ``Layout`` fields
    (``zero``, ``tp``, ``hpz``, ...) to required values. Raises ``BadConfig`` with the size of the smallest layout if no
    layout fits.
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
        _check_shape(spec, fixed)
        asked = ", ".join(f"{name} {value}" for name, value in fixed.items())
        raise BadConfig(
            f"no layout of {world} ranks and a global batch of {global_batch} fits the options {asked}; "
            "leave out one of these options"
        )
    if not found:
        raise BadConfig(
            f"a global batch of {global_batch} can't be divided over {world} ranks; use a multiple of {world} samples"
        )
    fitting = [plan for plan in found if plan.fits]
    if not fitting:
        least = min(plan.memory.total for plan in found)
        raise BadConfig(
            f"no layout of {world} ranks fits into memory: the smallest layout takes {least / 1e9:.4g} GB per rank, "
            f"but only {machine.usable / 1e9:.4g} of {machine.hbm / 1e9:.4g} GB are usable; "
            "use more ranks or a smaller global batch"
        )
    return sorted(fitting, key=lambda plan: (plan.time.step, preferred(plan)))


def preferred(plan: Plan) -> tuple[float, ...]:
    """Returns the sort key for layouts of the same estimated time. The layout with the smaller key comes first. The key
    consists of these criteria, the most important first:

    - No recomputation, because the estimate leaves out the time of recomputed elementwise work.
    - The fewest bytes sent.
    - The fewest pipeline stages.
    - The fewest tensor- and context-parallel ranks.
    - The largest micro-batch, which keeps a device busiest.
    - The simplest layout: no CPU offload, no hpZ, no replicas, and the lowest ZeRO stage.
    """
    layout = plan.layout
    # Rounding removes the last digits, which depend on the order of summation.
    sent = float(f"{sum(plan.sent.values()):.9g}")
    simple = (layout.offload, layout.hpz, layout.replicate, layout.zero)
    return (layout.recompute != "none", sent, layout.pp, layout.tp * layout.cp, -layout.micro_batch, *simple)


def _powers(largest: int) -> Iterator[int]:
    size = 1
    while size <= largest:
        if largest % size == 0:
            yield size
        size *= 2
