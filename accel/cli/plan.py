"""``accel plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel.errors import BadConfig

from . import output_options

if TYPE_CHECKING:
    from accel.plan.compare import Reduction
    from accel.plan.search import Plan
    from accel.plan.spec import Layout, Machine, ModelSpec
    from accel.train.config.schema import TrainConfig

    from . import Output


class Quantity(click.ParamType):  # type: ignore[type-arg]
    """Parses a number with an optional unit, such as 80G, 80GiB, 7.5e9 or 7.5B."""

    name = "quantity"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ARG002
        from accel.plan.spec import quantity

        return quantity(value) if isinstance(value, str) else float(value)


# Options that are off by default.
_EXTRA = ("replicate", "hpz", "qwz", "qgz", "offload", "disk", "disk_parameters")


@click.command("plan")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--params", type=Quantity(), help="Parameters of the model: 7.5e9 or 7.5B.")
@click.option("--layers", type=int, default=0, help="Transformer layers.")
@click.option("--hidden", type=int, default=0, help="Hidden size.")
@click.option("--heads", type=int, default=0, help="Attention heads.")
@click.option("--kv-heads", type=int, default=0, help="Heads of keys and values, if they are fewer.")
@click.option("--vocab", type=int, default=0, help="Vocabulary size.")
@click.option("--seq", type=int, default=0, help="Sequence length.")
@click.option("--world", type=click.IntRange(1), default=1, show_default=True, help="Ranks.")
@click.option("--zero", type=int, help="ZeRO stage, 0 to 3.")
@click.option("--tp", type=int, help="Tensor-parallel ranks.")
@click.option("--pp", type=int, help="Pipeline stages.")
@click.option("--cp", type=int, help="Context-parallel ranks, which share sequences, and heads during attention.")
@click.option("--cp-method", help="ulysses (ranks share heads during attention) or ring (keys and values travel).")
@click.option("--ep", type=int, help="Data-parallel ranks that share the experts of a CONFIG's model.")
@click.option("--precision", help="fp32, bf16, fp16 (float32 master weights), ...; with --inference also int8, int4.")
@click.option("--optimizer", help="adam, adamw, momentum or sgd.")
@click.option("--micro-batch", type=int, help="Samples of a rank in a pass.")
@click.option("--global-batch", type=int, help="Samples of all ranks in a step.")
@click.option("--recompute", help="Activation checkpointing: none, selective or full.")
@click.option("--pipeline", help="gpipe, 1f1b, interleaved or zero-bubble.")
@click.option("--hpz", type=int, default=0, help="ZeRO++: ranks that hold a second shard of the parameters.")
@click.option("--qwz", is_flag=True, help="ZeRO++: gather parameters as int8.")
@click.option("--qgz", is_flag=True, help="ZeRO++: reduce gradients as int8.")
@click.option("--replicate", type=int, help="Replicas of the group that ZeRO shards over (HSDP).")
@click.option("--offload", is_flag=True, help="CPU offload: keep the shards of ZeRO on the host.")
@click.option("--disk", default="", help="Keep the optimizer states in this folder of the disk.")
@click.option("--disk-parameters", is_flag=True, help="Keep the shards of the parameters in --disk too (ZeRO 3).")
@click.option("--inference", is_flag=True, help="Plan inference (weights and KV cache) instead of training.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences of --inference.")
@click.option("--hbm", type=Quantity(), help="Memory of a rank: 80G. List every layout that fits, fastest first.")
@click.option("--flops", type=Quantity(), help="FLOP/s that a rank sustains: 400T.")
@click.option("--bandwidth", type=Quantity(), help="Bytes/s that a rank sends between nodes: 40G.")
@click.option("--node-bandwidth", type=Quantity(), help="Bytes/s that a rank sends inside its node: 300G.")
@click.option("--host-bandwidth", type=Quantity(), help="Bytes/s that a rank copies from or to its host: 25G.")
@click.option("--disk-bandwidth", type=Quantity(), help="Bytes/s that a rank reads or writes on its disk: 3G.")
@click.option("--node-size", type=int, help="Ranks a node: 8.")
@click.option("--latency", type=float, help="Seconds that an empty message takes, for --compare: 1e-5.")
@click.option("--compare", is_flag=True, help="Compare ring, tree, hierarchy and parameter servers for the gradients.")
@click.option("--servers", type=int, help="Parameter servers of --compare. Default: 1.")
@click.option("--choose", type=click.IntRange(1), default=1, show_default=True, help="Which layout --out writes.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the training config of the layout (TOML).")
@output_options
def command(config: Path | None, world: int, out: Path | None, choose: int, say: Output, **given: Any) -> None:
    """Show the memory, the bytes sent and the time of a training run before the launch.

    CONFIG is a training config (TOML). Without CONFIG, describe the model with --params, or with --layers, --hidden,
    --heads, --vocab and --seq.

    With --hbm, list every layout that fits, fastest first. Options such as --zero, --tp and --micro-batch restrict the
    list to layouts with the given values. Layouts that send int8 (ZeRO++) are listed only with --qwz or --qgz. Equally
    fast layouts are ordered by fewest bytes sent, fewest pipeline stages, largest micro-batch and lowest ZeRO stage.
    """
    from accel.train.config.schema import APEX

    given["precision"] = APEX.get(given["precision"], given["precision"])
    machine = _machine(given)
    base = _config(config, given)
    _refuse_unused(given, out)
    if given["inference"]:
        _inference(_spec(base, given), given, world, say)
        return
    found = _search(base, given, machine, world) if given["hbm"] else [_one(base, given, machine, world)]
    if choose > len(found):
        raise BadConfig(f"--choose is {choose}, but only {len(found)} layouts fit; choose one of them")
    chosen = found[choose - 1]
    lacks: list[str] = []
    if out is not None:
        from accel.api.plan import config_of
        from accel.artifact import beside
        from accel.train.config.rules import missing

        written = config_of(chosen, base)
        lacks = [*missing(written)]
        with beside(out) as temporary:
            temporary.write_text(written.to_toml(), encoding="utf-8")
    body = chosen.to_json() | {"assumptions": assumptions(machine, chosen)}
    if given["hbm"] and say.as_json:
        body["feasible"] = [plan.to_json() for plan in found]
    if out is not None:
        body |= {"config": str(out), "missing": lacks}
    if given["compare"]:
        from accel.plan.compare import compare

        reductions = compare(chosen.spec, chosen.layout, machine, 1 if given["servers"] is None else given["servers"])
        body["reductions"] = [vars(one) for one in reductions]
        show = partial(_comparison, reductions, chosen)
    else:
        show = partial(_table, found, chosen, machine) if given["hbm"] else partial(words, chosen, machine)
    say.result(body, lambda: _noted(show(), out, lacks))


def _noted(shown: Any, out: Path | None, lacks: Sequence[str]) -> Any:
    """Returns ``shown``, a text or a rich object, with a line for each thing that the config ``out`` lacks."""
    from rich.console import Group
    from rich.text import Text

    lines = [f"{out} isn't ready for accel train: {one}" for one in lacks]
    return "\n".join((shown, *lines)) if isinstance(shown, str) else Group(shown, *map(Text, lines))


# Options that describe training alone.
_TRAINING = (
    "zero",
    "tp",
    "pp",
    "cp",
    "cp_method",
    "ep",
    "optimizer",
    "micro_batch",
    "global_batch",
    "recompute",
    "pipeline",
    *_EXTRA,
    "hbm",
    "compare",
)


def _refuse_unused(given: dict[str, Any], out: Path | None) -> None:
    """Raises ``BadConfig`` for an option that the plan would ignore."""
    unused = [name for name in _TRAINING if given[name]]
    if given["inference"] and (unused or out is not None):
        raise BadConfig(f"--inference plans no training; leave out --{(unused or ['out'])[0].replace('_', '-')}")
    for name in ("servers", "latency"):
        if given[name] is not None and not given["compare"]:
            raise BadConfig(f"--{name} is for --compare; leave it out, or pass --compare")
    for name in ("ep", "cp_method"):
        if given["hbm"] and given[name]:
            key = f"--{name.replace('_', '-')}"
            raise BadConfig(f"--hbm doesn't vary {key[2:]}; leave out {key}, or leave out --hbm to plan this layout")
    if given["batch"] > 1 and not given["inference"]:
        raise BadConfig("--batch is the number of sequences of --inference; pass --global-batch for a training step")


def _config(path: Path | None, given: dict[str, Any]) -> TrainConfig | None:
    if path is None:
        return None
    from accel.train.config.schema import TrainConfig

    names = {
        "zero": "parallel.zero",
        "tp": "parallel.tp",
        "pp": "parallel.pp",
        "cp": "parallel.cp",
        "cp_method": "parallel.cp_method",
        "ep": "parallel.ep",
        "recompute": "parallel.recompute",
        "pipeline": "parallel.pipeline",
        "precision": "precision.mode",
        "micro_batch": "micro_batch",
        "global_batch": "global_batch",
        **{name: f"shape.{name}" for name in ("params", "layers", "hidden", "heads", "kv_heads", "vocab", "seq")},
    }
    if given["optimizer"]:
        raise BadConfig("the config names its optimizer; leave out --optimizer")
    return TrainConfig.load(path, [f"{key}={given[name]}" for name, key in names.items() if given[name]])


def _spec(base: TrainConfig | None, given: dict[str, Any]) -> ModelSpec:
    from accel.api.plan import spec_of_config
    from accel.plan.spec import ModelSpec

    if base is not None:
        return spec_of_config(base)
    shape = {name: given[name] for name in ("layers", "hidden", "heads", "kv_heads", "vocab", "seq")}
    return ModelSpec(params=int(given["params"] or 0), **shape)


def _machine(given: dict[str, Any]) -> Machine:
    from accel.plan.spec import Machine

    names = ("flops", "bandwidth", "node_bandwidth", "host_bandwidth", "disk_bandwidth", "node_size", "hbm", "latency")
    return Machine(**{name: given[name] for name in names if given[name] is not None})


def _one(base: TrainConfig | None, given: dict[str, Any], machine: Machine, world: int) -> Plan:
    from accel.api.plan import layout_of_config, plan
    from accel.plan.spec import Layout

    extra = {name: given[name] for name in _EXTRA if given[name]}
    if base is not None:
        return plan(_spec(base, given), replace(layout_of_config(base, world), **extra), machine)
    names = (
        "zero",
        "tp",
        "pp",
        "cp",
        "cp_method",
        "ep",
        "precision",
        "optimizer",
        "micro_batch",
        "recompute",
        "pipeline",
    )
    kept = {name: given[name] for name in names if given[name] is not None} | extra
    spec, batch = _spec(None, given), given["global_batch"]
    layout = Layout(world=world, **kept) if batch is None else Layout.for_batch(batch, world=world, **kept)
    return plan(spec, layout, machine)


def _search(base: TrainConfig | None, given: dict[str, Any], machine: Machine, world: int) -> list[Plan]:
    from accel.api.plan import search_for_config
    from accel.plan.search import search

    names = ("zero", "tp", "pp", "cp", "micro_batch", "recompute")
    fixed = {name: given[name] for name in names if given[name] is not None}
    fixed |= {name: given[name] for name in _EXTRA if given[name]}
    if base is not None:
        return search_for_config(base, machine, world, fixed)
    return search(
        _spec(None, given),
        machine,
        world=world,
        global_batch=given["global_batch"] or world,
        precision=given["precision"] or "bf16",
        optimizer=given["optimizer"] or "adamw",
        pipeline=given["pipeline"] or "1f1b",
        fixed=fixed,
    )


def _inference(spec: ModelSpec, given: dict[str, Any], world: int, say: Output) -> None:
    from accel.plan.memory import inference_memory

    weights = given["precision"] or "fp16"
    memory = inference_memory(spec, weights=weights, world=world, batch=given["batch"])
    body = {
        "weight_bytes_per_rank": round(memory.parameters),
        "kv_cache_bytes_per_rank": round(memory.kv_cache),
        "temporary_bytes_per_rank": round(memory.temporary),
        "total_bytes_per_rank": round(memory.total),
        "precision": weights,
    }
    say.result(
        body,
        lambda: "\n".join(
            (
                f"{_model(spec.params, world, f' as {weights}')}, {given['batch']} sequences of {spec.seq}",
                f"  weights    {_size(memory.parameters)}",
                f"  KV cache   {_size(memory.kv_cache)}",
                f"  logits     {_size(memory.temporary)}",
                f"  together   {_size(memory.total)}",
            )
        ),
    )


def assumptions(machine: Machine, plan: Plan) -> list[str]:
    """Returns what the times of ``plan`` assume, a sentence for each assumption."""
    said = [
        f"{machine.flops / 1e12:g} TFLOP/s a rank, {machine.node_bandwidth / 1e9:g} GB/s inside a node of "
        f"{machine.node_size}, {machine.bandwidth / 1e9:g} GB/s between nodes"
        + (f", {machine.host_bandwidth / 1e9:g} GB/s to the host" if plan.layout.offload else "")
        + (f", {machine.disk_bandwidth / 1e9:g} GB/s to the disk" if plan.layout.disk else ""),
        "data-parallel traffic is hidden behind compute as far as it fits, tensor- and context-parallel traffic is not",
    ]
    if plan.spec.experts:
        said.append("the activations of experts are counted as those of an MLP of four times the hidden size")
    if plan.memory.activations is None:
        said.append("activations are unknown and not counted; give --layers, --hidden, --heads, --vocab and --seq")
    return said


def _size(value: float | None) -> str:
    if value is None:
        return "unknown"
    binary = f"{value / 2**20:9.3f} MiB" if value < 1e8 else f"{value / 2**30:9.3f} GiB"
    return f"{_bytes(value, 9)}  {binary}"


def _bytes(value: float, width: int = 0) -> str:
    return f"{value / 1e6:{width}.3f} MB" if value < 1e8 else f"{value / 1e9:{width}.3f} GB"


def _model(params: float, ranks: int, how: str) -> str:
    """Describes the size of a model, and the ranks that train or run it in the way ``how``."""
    size = f"{params / 1e9:.4g} B" if params >= 1e8 else f"{params / 1e6:.4g} M"
    return f"{size} parameters{how} on {ranks} rank{'s' if ranks > 1 else ''}"


def _more(layout: Layout, before: str = "") -> str:
    """Describes the options of a layout, except the mesh axes and the ZeRO stage."""
    said = [
        *([f"{layout.replicate} replicas"] if layout.replicate > 1 else []),
        *([f"hpZ {layout.hpz}"] if layout.hpz else []),
        *(name for name, there in (("qwZ", layout.qwz), ("qgZ", layout.qgz), ("offload", layout.offload)) if there),
        *(
            ["parameters and states on the disk" if layout.disk_parameters else "states on the disk"]
            if layout.disk
            else []
        ),
    ]
    return before + ", ".join(said) if said else ""


def _moved(plan: Plan) -> str:
    from accel.plan.traffic import disk_bytes

    read, written = disk_bytes(plan.spec, plan.layout)
    if read == written:
        return "read and written in a step"
    return f"of which a step reads {_bytes(read)} and writes {_bytes(written)}"


def words(plan: Plan, machine: Machine) -> str:
    """Returns the plan of one layout as lines of text."""
    m, layout, t = plan.memory, plan.layout, plan.time
    sent = ", ".join(f"{axis} {_bytes(size)}" for axis, size in plan.sent.items() if size) or "nothing"
    lines = [
        f"{_model(plan.spec.params, layout.world, f', {layout.precision}, {layout.optimizer},')}: "
        f"ZeRO {layout.zero}, tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, dp {layout.dp}, "
        f"micro-batch {layout.micro_batch} x {layout.accumulation}{_more(layout, ', ')}",
        "each rank holds",
        f"  parameters   {_size(m.parameters)}",
        f"  gradients    {_size(m.gradients)}",
        f"  optimizer    {_size(m.optimizer)}",
        f"  model states {_size(m.model_states)}",
        f"  activations  {_size(m.activations)}",
        f"  temporary    {_size(m.temporary)}",
        *([f"  teacher      {_size(m.teacher)}"] if m.teacher else []),
        f"  or in a step {_size(m.stepping)}",
        f"  at most      {_size(m.total)}",
        *([f"  on its host  {_size(m.host)}"] if layout.offload else []),
        *([f"  on its disk  {_size(m.disk)}, {_moved(plan)}"] if layout.disk else []),
        f"each rank sends in a step: {sent}",
    ]
    if plan.spec.seq or plan.spec.flops:
        lines.append(f"a step takes about {t.step:.4g} s ({t.compute:.4g} s of compute, bubble {t.bubble:.4g} s)")
    return "\n".join([*lines, *(f"assumed: {text}" for text in assumptions(machine, plan))])


def _comparison(reductions: list[Reduction], plan: Plan) -> Any:
    from rich.table import Table

    ranks = plan.layout.dp * plan.layout.cp
    table = Table(title=f"Ways to sum the gradients of {ranks} data-parallel ranks, fastest first")
    for name in ("", "GB a rank sends", "GB through a server", "rounds", "seconds", "source"):
        table.add_column(name, justify="left" if name in ("", "source") else "right")
    for one in reductions:
        server = f"{one.server / 1e9:.3f}" if one.server else ""
        table.add_row(one.name, f"{one.sent / 1e9:.3f}", server, str(one.rounds), f"{one.seconds:.4g}", one.source)
    return table


def _table(found: list[Plan], chosen: Plan, machine: Machine) -> Any:
    from rich.console import Group
    from rich.table import Table

    table = Table(title=f"{len(found)} layouts fit in {machine.hbm / 1e9:g} GB, fastest first")
    axes = ("tp", "pp", "cp", "dp")
    for name in ("", *axes, "ZeRO", "micro", "x", "recompute", "more", "GB a rank", "GB sent", "s a step", "bubble"):
        table.add_column(name, justify="right")
    for number, plan in enumerate(found[:20], 1):
        layout = plan.layout
        row = (
            f"{'*' if plan is chosen else ''}{number}",
            *(getattr(layout, axis) for axis in axes),
            *(layout.zero, layout.micro_batch, layout.accumulation, layout.recompute, _more(layout)),
            f"{plan.memory.total / 1e9:.2f}",
            f"{sum(plan.sent.values()) / 1e9:.3f}",
            f"{plan.time.step:.4g}",
            f"{plan.to_json()['bubble_fraction']:.1%}",
        )
        table.add_row(*map(str, row))
    return Group(table, *(f"assumed: {text}" for text in assumptions(machine, chosen)))
