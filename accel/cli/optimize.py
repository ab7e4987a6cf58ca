"""Implements the command ``accel optimize``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import ANY_WIDTH, TABLE_WIDTH, output_options
from .options import read_contexts, read_sizes, sizes_option, source_options, wide_option

if TYPE_CHECKING:
    from accel.sources.source import SourceOptions

    from . import Output


@click.command("optimize")
@click.argument("model")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The folder to write.")
@click.option(
    "--target",
    multiple=True,
    default=("auto",),
    help="auto (whatever this machine can run, the default), ort-cpu, openvino, ort-cuda, tensorrt or tensorrt-rtx. "
    "Repeatable.",
)
@click.option(
    "--precision",
    multiple=True,
    help="Try only this: fp32, tf32, fp16, bf16, int8, fp8, int4 (weights) or mixed. Repeatable.",
)
@click.option(
    "--data", type=click.Path(path_type=Path), help="Samples: .npz with one array an input, or a folder of them."
)
@click.option(
    "--eval-data", type=click.Path(path_type=Path), help="Samples that the metric is computed on; by default --data."
)
@click.option(
    "--metric",
    help="module:function or file.py:function, f(outputs, data) -> float, higher is better. For a decoder: kl, "
    "perplexity or top1.",
)
@click.option("--labels", type=click.Path(path_type=Path), help="Labels to judge by instead of a metric, as .npz.")
@click.option(
    "--label-metric",
    help="top1, top5 or another top<K>, spearman, or iou (a class for each place); by default what fits the labels.",
)
@click.option(
    "--max-drop",
    type=float,
    default=0.01,
    show_default=True,
    help="Largest loss against the source: relative loss of the metric, else 1 - concordance of the outputs.",
)
@click.option("--text", type=click.Path(path_type=Path), help="Text to judge a decoder on. Default: its own texts.")
@click.option("--max-kl", type=float, help="For a decoder: --metric kl, and its limit in nats a token.")
@click.option("--contexts", metavar="N,...", help="Tokens in a decoder's cache to measure with: 128,1024.")
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
    help="Option of an engine's build: builder-level=0..5, workspace=2GB; for tensorrt also version-compatible=yes, "
    "hardware=ampere-plus. Repeatable.",
)
@click.option(
    "--quantize",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of quantization: calibration=minmax, percentile, entropy or mse, percentile=99.99, samples=N, "
    "smooth=0..1, per-channel=no, ops=MatMul,..., keep=NODE,... (stay float); for weights alone block-size=64, "
    "smallest=N. Repeatable.",
)
@click.option(
    "--cast",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of fp16 and bf16: keep-fp32=NODE,... (names or operators, with * and ?), keep-io=no. Repeatable.",
)
@click.option("--kernels", is_flag=True, help="Fuse products with the nodes after them into accel's own operators.")
@sizes_option
@click.option(
    "--objective",
    type=click.Choice(["latency", "throughput"]),
    default="latency",
    show_default=True,
    help="Time one request after the other, or as many at once as the runtime takes.",
)
@click.option("--batch", type=int, help="Samples in a request to measure with.")
@click.option(
    "--lengths",
    metavar="[NAME=]N,...|FILE|data",
    help="Mix of lengths to measure with: 8,16,128, a file of whole numbers, or data for the lengths of the samples.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    default=0,
    help="Threads to run with; by default all cores, or fewer if that is faster.",
)
@click.option("--fixed-session", is_flag=True, help="Try no other threads, streams, graph levels or spinning.")
@click.option(
    "--budget-seconds",
    type=float,
    help="Seconds for everything: export, building and measuring. By default, the search goes on after its first "
    "result for twice as long as this result took, and for at least a minute. A candidate is given up if it leaves no "
    "time to measure. Exports and compilers can't be interrupted and may end later.",
)
@click.option("--thorough", is_flag=True, help="Make and measure all candidates, without a time limit.")
@click.option("--rounds", type=click.IntRange(min=5), default=9, show_default=True, help="Rounds of the measurement.")
@wide_option
@source_options
@click.option("--no-cache", is_flag=True, help="Run and measure everything again.")
@output_options
def command(
    model: str,
    target: tuple[str, ...],
    precision: tuple[str, ...],
    sizes: str | None,
    fixed_session: bool,
    wide: bool,
    source: SourceOptions,
    no_cache: bool,
    contexts: str | None,
    say: Output,
    **options: Any,
) -> None:
    """Make and verify the fastest version of MODEL for a target. The quality loss of the fastest version is at most
    --max-drop.

    MODEL is an ONNX file, or any source that accel export takes.
    """
    from accel.api.optimize import optimize
    from accel.optimizer.report.table import table

    result = optimize(
        model,
        target=target[0] if len(target) == 1 else target,
        precision=precision or None,
        sizes=read_sizes(sizes),
        contexts=read_contexts(contexts),
        vary_session=not fixed_session,
        use_cache=not no_cache,
        **source,
        **options,
    )
    say.result(
        {"path": str(result.artifact.path), **result.to_json()},
        lambda: table(result, wide=wide),
        columns=ANY_WIDTH if wide else TABLE_WIDTH,
    )
    if say.as_json and not say.quiet:  # the notes below the table contain the warnings
        for warning in result.warnings:
            click.echo(f"accel: warning: {warning}", err=True)
