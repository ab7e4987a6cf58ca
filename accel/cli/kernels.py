"""``accel kernels``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel.cli import output_options
from accel.errors import GateFailed, UnknownName, UnsupportedHere

if TYPE_CHECKING:
    from accel.cli import Output
    from accel.kernels.build import Built


@click.group("kernels")
def command() -> None:
    """Fused GEMM and convolution kernels: what there is and what is proven."""


@command.command("list")
@output_options
def list_(say: Output) -> None:
    """Every shipped configuration: op, dtypes, tile, architectures, implementation.

    Those that aren't dispatched are called through the C interface alone.
    """
    from accel.kernels.configs import rows

    found = rows()

    def human() -> Any:
        columns = ("name", "op", "implementation", "dispatched", "dtypes", "tile", "archs")
        return _table(columns, [[_plain(row[column]) for column in columns] for row in found])

    say.result({"configurations": found}, human)


@command.command("check")
@click.option("--all", "every", is_flag=True, help="Compile every shipped configuration (minutes).")
@output_options
def check_(every: bool, say: Output) -> None:
    """What can be proven about the kernels on this machine."""
    from accel.kernels.check import check
    from accel.progress import report

    proofs = check(every=every, progress=report)
    words = {True: "proven", False: "FAILED", None: "not here"}
    human = [[p.what, words[p.passed], p.detail] for p in proofs]
    say.result({"proofs": [asdict(p) for p in proofs]}, lambda: _table(("what", "result", "detail"), human))
    if failed := [p for p in proofs if p.passed is False]:
        raise GateFailed(f"{failed[0].what}: {failed[0].detail}; don't use the kernels of this installation")


@command.command("build")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    help="sm_90a, sm_80, ..., or native for the GPU that is here; again for more.",
)
@click.option(
    "--onnxruntime-include",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where ONNX Runtime's headers are: builds the operators for its register_custom_ops_library.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Files compiled at a time (default: the cores).")
@output_options
def build_(archs: tuple[str, ...], onnxruntime_include: Path | None, jobs: int | None, say: Output) -> None:
    """Compile the CUDA kernels with the nvcc that is here, or the operators for ONNX Runtime."""
    from accel.kernels.bridges import build_for_onnxruntime
    from accel.kernels.build import build
    from accel.progress import report

    if not archs and onnxruntime_include is None:
        raise click.UsageError("say what to build: --arch sm_90a, or --onnxruntime-include DIR")
    body: dict[str, Any] = {}
    words = []
    if archs:
        built = build([_native() if arch == "native" else arch for arch in archs], jobs=jobs, progress=report)
        body |= {"path": str(built.path), "archs": list(built.archs), "cached": built.cached}
        words.append(_built(built, ", ".join(built.archs)))
    if onnxruntime_include is not None:
        bridge = build_for_onnxruntime(onnxruntime_include, progress=report)
        body["onnxruntime"] = {"path": str(bridge.path), "cached": bridge.cached}
        words.append(_built(bridge, "for register_custom_ops_library"))
    say.result(body, lambda: "\n".join(words))


def _native() -> str:
    import torch

    from accel.kernels.dispatch import native_arch

    if not torch.cuda.is_available():
        raise UnsupportedHere("no NVIDIA GPU here; say which it is for, as in --arch sm_90a")
    return native_arch(torch.cuda.get_device_capability())


def _built(built: Built, what: str) -> str:
    size = built.path.stat().st_size / 1e6
    return f"{built.path}: {what}, {size:.1f} MB{', from the cache' if built.cached else ''}"


@command.command("tune")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="MxNxK",
    help="A problem, 1x4096x4096; again for more. Default: 30 of them.",
)
@click.option("--dtype", "dtypes", multiple=True, default=("fp16",), show_default=True, help="Of the operands; again.")
@click.option("--act", "acts", multiple=True, default=("none",), show_default=True, help="Activation; again for more.")
@click.option(
    "--add",
    "added",
    multiple=True,
    default=("none", "bias", "bias+residual"),
    show_default=True,
    help="What is added to the product: none, bias, residual or bias+residual; again for more.",
)
@output_options
def tune_(
    shapes: tuple[str, ...], dtypes: tuple[str, ...], acts: tuple[str, ...], added: tuple[str, ...], say: Output
) -> None:
    """Time the products on the GPU that is there and remember the fastest right kernel of each problem.

    int8 and fp8 are tuned for fp16 and for bf16 output; convolutions aren't tuned.
    """
    from accel.kernels.tune import specs, tune_gemm
    from accel.kernels.tuned import Table
    from accel.progress import report

    table = Table()
    problems = specs(dtypes, acts, [_shape(text) for text in shapes], added=added)
    found = []
    for at, spec in enumerate(problems):
        report(f"{spec.m}x{spec.n}x{spec.k} {spec.in_dtype}", at / len(problems))
        found.append(tune_gemm(spec, table))
    rows = [
        {
            "key": tuned.key.text,
            "config": tuned.entry.config if tuned.entry else None,
            "microseconds": tuned.entry.microseconds if tuned.entry else None,
            "timed": dict(tuned.timed),
            "refused": dict(tuned.refused),
        }
        for tuned in found
    ]
    human = [
        [
            f"{s.m}x{s.n}x{s.k}",
            s.in_dtype,
            s.epilogue.key,
            str(r["config"]),
            f"{r['microseconds'] or 0:.1f}",
            str(len(t.refused)),
        ]
        for s, r, t in zip(problems, rows, found, strict=True)
    ]
    columns = ("M x N x K", "dtype", "epilogue", "fastest", "microseconds", "refused")
    say.result({"path": str(table.path), "problems": rows}, lambda: _table(columns, human))


def _shape(text: str) -> tuple[int, int, int]:
    try:
        m, n, k = (int(part) for part in text.split("x"))
    except ValueError:
        raise UnknownName(f"{text!r} is no shape; write M, N and K as 16x4096x4096") from None
    return m, n, k


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> Any:
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    return table
