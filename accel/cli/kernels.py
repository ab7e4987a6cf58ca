"""``accel kernels``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel.errors import GateFailed, UnknownName, UnsupportedHere

from . import output_options

if TYPE_CHECKING:
    from accel.kernels.catalogue.spec import ConvSpec, GemmSpec
    from accel.kernels.native.build import Built

    from . import Output


@click.group("kernels")
def command() -> None:
    """List, check, build and tune the fused GEMM and convolution kernels."""


@command.command("list")
@output_options
def list_(say: Output) -> None:
    """List the op, dtypes, tile, architectures and implementation of every shipped kernel configuration."""
    from accel.kernels.catalogue.configs import rows

    found = rows()

    def human() -> Any:
        columns = ("name", "op", "implementation", "dtypes", "tile", "archs")
        return _table(columns, [[_plain(row[column]) for column in columns] for row in found])

    say.result({"configurations": found}, human)


@command.command("check")
@click.option("--all", "every", is_flag=True, help="Compile every shipped configuration (minutes).")
@output_options
def check_(every: bool, say: Output) -> None:
    """Check the kernels, with all checks that this machine can run."""
    from accel.kernels.proof.check import check
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
    help="sm_90a, sm_80, ..., or native for this machine's GPU. Repeatable.",
)
@click.option(
    "--onnxruntime-include",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of ONNX Runtime's headers. Builds the operators for its register_custom_ops_library.",
)
@click.option(
    "--tensorrt-include",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of TensorRT's headers. Builds the plugins for its registry's load_library, on the CUDA kernels.",
)
@click.option(
    "--cpu",
    is_flag=True,
    help="Builds the int4 and int8 products of few rows for PyTorch on this machine's CPU.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Files to compile at a time. Default: the number of cores.")
@output_options
def build_(
    archs: tuple[str, ...],
    onnxruntime_include: Path | None,
    tensorrt_include: Path | None,
    cpu: bool,
    jobs: int | None,
    say: Output,
) -> None:
    """Compile the CUDA kernels (with this machine's nvcc), the CPU kernels, the operators for ONNX Runtime and the
    plugins for TensorRT."""
    from accel.kernels.native.bridges import build_for_onnxruntime, build_for_tensorrt, check_headers
    from accel.kernels.native.build import build
    from accel.kernels.native.cpu.build import build_for_cpu
    from accel.progress import report

    if not (archs or cpu or onnxruntime_include or tensorrt_include):
        raise click.UsageError(
            "the command names nothing to build; pass --arch sm_90a, --cpu, --onnxruntime-include DIR, "
            "or --tensorrt-include DIR"
        )
    # Reports wrong header folders before nvcc starts, because nvcc is slow.
    check_headers(onnxruntime=onnxruntime_include, tensorrt=tensorrt_include)
    body: dict[str, Any] = {}
    kernels: Path | None = None
    words = []
    if archs:
        built = build([_native() if arch == "native" else arch for arch in archs], jobs=jobs, progress=report)
        kernels = built.path
        body |= {"path": str(built.path), "archs": list(built.archs), "cached": built.cached}
        words.append(_built(built, ", ".join(built.archs)))
    if cpu:
        library = build_for_cpu(progress=report)
        body["cpu"] = {"path": str(library.path), "cached": library.cached}
        words.append(_built(library, "for the CPU"))
    if onnxruntime_include is not None:
        bridge = build_for_onnxruntime(onnxruntime_include, progress=report)
        body["onnxruntime"] = {"path": str(bridge.path), "cached": bridge.cached}
        words.append(_built(bridge, "for register_custom_ops_library"))
    if tensorrt_include is not None:
        plugins = build_for_tensorrt(tensorrt_include, kernels=kernels, progress=report)
        body["tensorrt"] = {"path": str(plugins.path), "cached": plugins.cached}
        words.append(_built(plugins, "for the plugin registry's load_library"))
    say.result(body, lambda: "\n".join(words))


def _native() -> str:
    import torch

    from accel.kernels.choose.choices import native_arch

    if not torch.cuda.is_available():
        raise UnsupportedHere("no NVIDIA GPU here; name the architecture of the GPU, as in --arch sm_90a")
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
    help="A product, 1x4096x4096. Repeatable. Default without --conv: 30 products.",
)
@click.option(
    "--conv",
    "convolutions",
    multiple=True,
    metavar="NxHxWxC,OUT,KERNEL[,STRIDE[,PADDING[,DILATION]]]",
    help="A convolution, 8x56x56x64,64,3,1,1 (or 3x3,1x1,1x1). Repeatable. Default without --shape: ResNet-50's.",
)
@click.option(
    "--dtype", "dtypes", multiple=True, default=("fp16",), show_default=True, help="Dtype of the operands. Repeatable."
)
@click.option("--act", "acts", multiple=True, default=("none",), show_default=True, help="Activation. Repeatable.")
@click.option(
    "--add",
    "added",
    multiple=True,
    default=("none", "bias", "bias+residual"),
    show_default=True,
    help="Summands of the product: none, bias, residual or bias+residual. Repeatable.",
)
@output_options
def tune_(
    shapes: tuple[str, ...],
    convolutions: tuple[str, ...],
    dtypes: tuple[str, ...],
    acts: tuple[str, ...],
    added: tuple[str, ...],
    say: Output,
) -> None:
    """Time matrix products and convolutions on this machine's GPU, and store the fastest correct kernel for each
    problem.

    With --dtype int8 or fp8, each problem is tuned for fp16 outputs and for bf16 outputs.
    """
    from accel.kernels.choose.tune import CONVOLUTIONS, conv_specs, specs, tune
    from accel.kernels.choose.tuned import Table
    from accel.progress import report

    table = Table()
    named = bool(shapes or convolutions)
    problems: list[GemmSpec | ConvSpec] = []
    if shapes or not named:
        problems += specs(dtypes, acts, [_shape(text) for text in shapes], added=added)
    if convolutions or not named:
        geometries = [_convolution(text) for text in convolutions] if named else CONVOLUTIONS
        problems += conv_specs(dtypes, acts, geometries, added=added)
    found = []
    for at, spec in enumerate(problems):
        report(f"{_sizes(spec)} {spec.in_dtype}", at / len(problems))
        found.append(tune(spec, table))
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
            _sizes(s),
            s.in_dtype,
            s.epilogue.key,
            str(r["config"]),
            f"{r['microseconds'] or 0:.1f}",
            str(len(t.refused)),
        ]
        for s, r, t in zip(problems, rows, found, strict=True)
    ]
    columns = ("problem", "dtype", "epilogue", "fastest", "microseconds", "refused")
    say.result({"path": str(table.path), "problems": rows}, lambda: _table(columns, human))


def _shape(text: str) -> tuple[int, int, int]:
    try:
        m, n, k = (int(part) for part in text.split("x"))
    except ValueError:
        raise UnknownName(f"{text!r} is no shape; write M, N and K as 16x4096x4096") from None
    return m, n, k


def _convolution(text: str) -> ConvSpec:
    from accel.kernels.catalogue.spec import ConvSpec

    try:
        image, out, *rest = text.split(",")
        images, height, width, channels = (int(part) for part in image.split("x"))
        pairs = [tuple(int(size) for size in part.split("x")) for part in rest]
        if not (1 <= len(pairs) <= 4 and all(len(pair) in (1, 2) for pair in pairs)):
            raise ValueError
        sizes = {"images": images, "height": height, "width": width, "c_in": channels, "c_out": int(out)}
    except ValueError:
        raise UnknownName(
            f"{text!r} is no convolution; write NxHxWxC,OUT,KERNEL,STRIDE,PADDING,DILATION, e.g. 8x56x56x64,64,3x3,1,1"
        ) from None
    names = ("kernel", "stride", "padding", "dilation")
    geometry = {name: (pair[0], pair[-1]) for name, pair in zip(names, pairs, strict=False)}
    return ConvSpec(**sizes, **geometry)  # type: ignore[arg-type]


def _sizes(spec: GemmSpec | ConvSpec) -> str:
    """Returns the sizes of a matrix product or a convolution, in the notation of ``--shape`` or ``--conv``."""
    from accel.kernels.catalogue.spec import ConvSpec

    if not isinstance(spec, ConvSpec):
        return f"{spec.m}x{spec.n}x{spec.k}"
    image = "x".join(map(str, (spec.images, spec.height, spec.width, spec.c_in)))
    pairs = [f"{height}x{width}" for height, width in (spec.kernel, spec.stride, spec.padding, spec.dilation)]
    return ",".join([image, str(spec.c_out), *pairs])


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
