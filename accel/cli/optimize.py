"""``accel optimize``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from accel.cli import output_options
from accel.cli.options import read_dims, read_sizes, sizes_option, source_options, tensorflow_options

if TYPE_CHECKING:
    from accel.api.optimize import Optimization
    from accel.cli import Output


@click.command("optimize")
@click.argument("model")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The folder to write.")
@click.option(
    "--target",
    default="auto",
    show_default=True,
    help="auto (whatever this machine can run), ort-cpu, openvino, ort-cuda, tensorrt or tensorrt-rtx.",
)
@click.option(
    "--precision", multiple=True, help="Only this: fp32, fp16, bf16, int8, fp8, int4 (weights) or mixed. Repeatable."
)
@click.option("--data", type=click.Path(path_type=Path), help=".npz with one array an input, or a folder of them.")
@click.option("--eval-data", type=click.Path(path_type=Path), help="What the metric is computed on; by default --data.")
@click.option("--metric", help="module:function or file.py:function, f(outputs, data) -> float, higher is better.")
@click.option("--labels", type=click.Path(path_type=Path), help="Instead of a metric: .npz with the labels.")
@click.option(
    "--label-metric",
    help="top1, top5 or another top<K>, spearman, or iou (a class for each place); by default as the labels look.",
)
@click.option(
    "--max-drop",
    type=float,
    default=0.01,
    show_default=True,
    help="How much worse than the source it may be: relative loss of the metric, else 1 - concordance of the outputs.",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="INPUT=MIN,OPT,MAX",
    help="Optimization profile of an engine: input_ids=1x8,8x128,64x512. Repeat for each input.",
)
@click.option("--compute-capability", "compute_capabilities", multiple=True, help="GPU to build for: 8.6. Repeatable.")
@click.option(
    "--engine",
    multiple=True,
    metavar="KEY=VALUE",
    help="Of an engine's build: builder-level=0..5, workspace=2GB; of tensorrt also version-compatible=yes, "
    "hardware=ampere-plus. Repeatable.",
)
@click.option(
    "--quantize",
    multiple=True,
    metavar="KEY=VALUE",
    help="Of quantization: calibration=minmax, percentile, entropy or mse, percentile=99.99, samples=N, smooth=0..1, "
    "per-channel=no, ops=MatMul,..., keep=NODE,... (stay float); of weights alone block-size=64, smallest=N. "
    "Repeatable.",
)
@click.option(
    "--cast",
    multiple=True,
    metavar="KEY=VALUE",
    help="Of fp16 and bf16: keep-fp32=NODE,... (names or operators, with * and ?), keep-io=no. Repeatable.",
)
@click.option("--kernels", is_flag=True, help="Fuse products with what follows them into accel's own operators.")
@sizes_option
@click.option(
    "--objective",
    type=click.Choice(["latency", "throughput"]),
    default="latency",
    show_default=True,
    help="One request after the other, or as many at once as the runtime takes.",
)
@click.option("--batch", type=int, help="Samples a request to measure with.")
@click.option(
    "--lengths",
    metavar="[NAME=]N,...|FILE|data",
    help="A mix of lengths to measure on: 8,16,128, a file of whole numbers, or data for those of the samples.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    default=0,
    help="Threads to run with; by default all cores, or fewer if faster.",
)
@click.option("--fixed-session", is_flag=True, help="Try no other threads, streams, graph levels or spinning.")
@click.option(
    "--budget-seconds",
    type=float,
    help="How long all of it is to take, export, building and measuring included: the likeliest candidates first, each "
    "given up where it would leave no time to measure. What can't be interrupted (export, a compiler) may end later.",
)
@click.option("--rounds", type=click.IntRange(min=5), default=9, show_default=True, help="Rounds of the measurement.")
@source_options
@tensorflow_options
@click.option("--no-cache", is_flag=True, help="Run and measure everything again.")
@output_options
def command(
    model: str,
    out: Path,
    target: str,
    precision: tuple[str, ...],
    data: Path | None,
    eval_data: Path | None,
    metric: str | None,
    labels: Path | None,
    label_metric: str | None,
    max_drop: float,
    profiles: tuple[str, ...],
    compute_capabilities: tuple[str, ...],
    engine: tuple[str, ...],
    quantize: tuple[str, ...],
    cast: tuple[str, ...],
    kernels: bool,
    sizes: str | None,
    objective: str,
    batch: int | None,
    lengths: str | None,
    threads: int,
    fixed_session: bool,
    budget_seconds: float | None,
    rounds: int,
    inputs: tuple[str, ...],
    weights: Path | None,
    dims: tuple[str, ...],
    tensorflow: dict[str, Any],
    no_cache: bool,
    say: Output,
) -> None:
    """Make the fastest form of MODEL for a target that stays within the budget, and prove it.

    MODEL is an ONNX file, or anything that accel export takes.
    """
    from accel.api.optimize import optimize

    result = optimize(
        model,
        out=out,
        target=target,
        precision=precision or None,
        data=data,
        eval_data=eval_data,
        metric=metric,
        labels=labels,
        label_metric=label_metric,
        max_drop=max_drop,
        profiles=profiles,
        compute_capabilities=compute_capabilities,
        engine=engine,
        quantize=quantize,
        cast=cast,
        kernels=kernels,
        sizes=read_sizes(sizes),
        objective=objective,
        batch=batch,
        lengths=lengths,
        threads=threads,
        vary_session=not fixed_session,
        budget_seconds=budget_seconds,
        rounds=rounds,
        inputs=inputs or None,
        weights=weights,
        dims=read_dims(dims),
        use_cache=not no_cache,
        **tensorflow,
    )
    say.result({"path": str(result.artifact.path), **result.to_json()}, lambda: table(result))
    if not say.quiet:  # the table and the JSON have them, too
        for warning in result.warnings:
            click.echo(f"accel: warning: {warning}", err=True)


def table(result: Optimization) -> Any:
    """Every candidate with its figures, and which one was taken."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from accel.bench.columns import named

    shown = Table(title=Text(f"{result.artifact.path}: {result.chosen}"), title_justify="left")
    second = "samples/s" if result.objective == "throughput" else "p99 ms"
    columns = named("candidate", "median ms", second, "speedup", "drop", "metric", "MB", "verdict")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        shown.add_column(column.title, justify=justify, no_wrap=column.whole, overflow="fold")
    for one in result.candidates:
        row = one.bench_row()
        texts = [Text(column.text(row) or "-") for column in columns]
        if one.status == "chosen":
            texts[-1].stylize("bold", 0, len(one.status))
        shown.add_row(*texts)
    return Group(shown, *map(Text, result.notes))
