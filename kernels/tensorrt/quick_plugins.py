"""Makes TensorRT quick plugins for ``accel::FusedGemm`` and ``accel::FusedConv2d``. Triton compiles the kernels to PTX.

``register(FusedGemm(product="gemm_nt", act="gelu_erf", bias=True, residual=False, dtype=TensorProto.FLOAT16))``
registers the plugin ``accel::FusedGemm_gemm_nt_bias_gelu_erf_fp16``. The operator in an ONNX file has the same name as
the plugin. The engine holds the PTX and needs neither Triton nor accel to run. Quick plugins work with TensorRT
(``tensorrt.plugin``), but not with TensorRT-RTX.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accel.errors import BuildFailed, MissingExtra, UnsupportedHere, one_line

from ..catalogue.configs import FIRST_FP8, get
from ..onnx.function import DOMAIN, OPERANDS, FusedConv2d, FusedGemm
from ..triton.cross import POINTERS
from ..triton.launch import GROUP, tile

# Maps an output dtype to its name in tensorrt.
TENSORRT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Plain PTX for sm_80 runs on every later architecture. PTX with wgmma or tensor memory runs on one architecture only.
PORTABLE_ARCH = 80


@dataclass(frozen=True, kw_only=True)
class PluginKernel:
    """A kernel for TensorRT. ``ptx`` is the code, and ``name`` is the name of the code's entry point.

    Each program computes ``block_m`` x ``block_n`` elements. The kernel's parameters are the inputs, the sizes and the
    output. The sizes of a product are M, N and K. A convolution has seven sizes: output pixels, output channels, image
    channels, image height, image width, output height and output width.
    """

    name: str
    ptx: str
    threads: int
    shared: int
    block_m: int
    block_n: int


def arch_for(function: FusedGemm | FusedConv2d) -> int:
    """Returns the oldest architecture whose PTX can express ``function``."""
    return FIRST_FP8 if OPERANDS[function.dtypes[0]] == "fp8_e4m3" else PORTABLE_ARCH


def compile_kernel(function: FusedGemm | FusedConv2d, arch: int = PORTABLE_ARCH) -> PluginKernel:
    """Returns the kernel of ``function`` as PTX for sm_``arch`` and later.

    Raises ``UnsupportedHere`` if the architecture can't multiply the dtypes of ``function``, and ``MissingExtra``
    without Triton.
    """
    dtypes = [OPERANDS[dtype] for dtype in function.dtypes]
    if arch < arch_for(function):
        raise UnsupportedHere(
            f"the function {function.name} has no plugin for sm_{arch}; pass arch={arch_for(function)} or higher, or "
            "don't register the function, so that TensorRT inlines the function"
        )
    if importlib.util.find_spec("triton") is None:
        raise MissingExtra("Triton", "kernels")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ..triton import plugin_kernels as triton_plugin

    kind, sizes = ("conv", 7) if isinstance(function, FusedConv2d) else ("gemm", 3)
    config = get("conv2d_64x64" if kind == "conv" else "gemm_64x64")
    kernel = getattr(triton_plugin, f"{kind}_plugin_{len(dtypes) - 2}")
    constants = {**plugin_constants(function), **tile(config, dtypes[0]), "GROUP": GROUP, "UPCAST": False}
    kinds = [*(POINTERS[dtype] for dtype in dtypes), *["i32"] * sizes, POINTERS[OPERANDS[function.dtype]]]
    kinds += ["constexpr"] * len(constants)
    signature = dict(zip(kernel.arg_names, kinds, strict=True))
    tensors = [at for at, kind in enumerate(kinds) if kind.startswith("*")]
    attributes = {(at,): [["tt.divisibility", 16]] for at in tensors}  # TensorRT's buffers are aligned
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return PluginKernel(
        name=made.metadata.name,
        ptx=without_scratch(made.asm["ptx"], len(kernel.arg_names) - len(constants)),
        threads=config.warps * 32,
        shared=made.metadata.shared,
        block_m=config.block_m,
        block_n=config.block_n,
    )


def plugin_constants(function: FusedGemm | FusedConv2d) -> dict[str, Any]:
    """Returns the compile-time constants of the kernel."""
    if isinstance(function, FusedConv2d):
        pairs = zip("KSPD", (function.kernel, function.stride, function.padding, function.dilation), strict=True)
        sizes = {f"{letter}{axis}": size for letter, pair in pairs for axis, size in zip("HW", pair, strict=True)}
        return sizes | {"ACT": function.act, "HAS_BIAS": function.bias, "HAS_RESIDUAL": function.residual}
    return {
        "ACT": function.act,
        "HAS_BIAS": function.bias,
        "HAS_ROW": function.row_scale,
        "HAS_COL": function.col_scale,
        "HAS_RESIDUAL": function.residual,
        "TRANSPOSED": function.product == "gemm_nt",
        "INTEGER": OPERANDS[function.dtypes[0]] == "int8",
    }


def without_scratch(ptx: str, kept: int) -> str:
    """Returns ``ptx`` with only the first ``kept`` parameters of its entry point.

    Triton appends pointers to scratch memory, which TensorRT would leave unset. Raises ``BuildFailed`` if the code
    reads one of the appended pointers.
    """
    entry = re.search(r"\.entry\s+([\w$]+)\(\s*(.*?)\s*\)", ptx, re.DOTALL)
    if entry is None:
        raise BuildFailed("the PTX has no known entry point; install a Triton version that accel supports")
    parameters = re.split(r",\s*", entry[2])
    body = ptx[entry.end() :]
    for at in range(kept, len(parameters)):
        if re.search(rf"\b{re.escape(entry[1])}_param_{at}\b", body):
            raise BuildFailed(
                "the kernel reads Triton's scratch memory, which TensorRT doesn't provide; don't register the operator"
            )
    text = ",\n\t".join(parameters[:kept])
    return ptx[: entry.start(2)] + text + ptx[entry.end(2) :]


def register(function: FusedGemm | FusedConv2d, *, arch: int = PORTABLE_ARCH) -> str:
    """Registers ``function`` in TensorRT's plugin registry and returns its id, ``accel::<name>``.

    Raises ``MissingExtra`` without TensorRT or Triton, and ``UnsupportedHere`` if the installed TensorRT has no quick
    plugins. Also raises the errors of ``compile_kernel``.
    """
    if importlib.util.find_spec("tensorrt") is None:
        raise MissingExtra("tensorrt", "tensorrt")
    import tensorrt

    try:
        import tensorrt.plugin as plugin
    except ImportError as error:
        raise UnsupportedHere(f"this TensorRT has no quick plugins ({one_line(error)}); update TensorRT") from error
    if not hasattr(plugin, "aot_impl"):
        raise UnsupportedHere(
            "quick plugins of this TensorRT can't hold compiled kernels; update TensorRT to 10.10 or later"
        )

    kernel = compile_kernel(function, arch)
    identity = f"{DOMAIN}::{function.name}"
    names = _names(function)

    def describe(*inputs: Any) -> Any:
        out = inputs[0].like()
        for axis, size in _changed(function, inputs).items():
            out.shape_expr[axis] = size
        if isinstance(function, FusedGemm) and function.wide:
            out.dtype = getattr(tensorrt, TENSORRT_DTYPES[OPERANDS[function.dtype]])
        return out

    def ahead_of_time(*given: Any) -> Any:
        m, n, *rest = sizes_of(function, given)
        launch = plugin.KernelLaunchParams()
        launch.grid_x = plugin.cdiv(m, kernel.block_m) * plugin.cdiv(n, kernel.block_n)
        launch.block_x = kernel.threads
        launch.shared_mem = kernel.shared
        scalars = plugin.SymIntExprs(2 + len(rest))
        for at, size in enumerate((m, n, *rest)):
            scalars[at] = plugin.SymInt32(size)
        return kernel.name, kernel.ptx, launch, scalars

    plugin.register(identity)(_typed(describe, names, plugin.TensorDesc, returns=plugin.TensorDesc))
    returns = tuple[str | bytes, str | bytes, plugin.KernelLaunchParams, plugin.SymIntExprs]
    plugin.aot_impl(identity)(_typed(ahead_of_time, [*names, "outputs", "tactic"], None, returns=returns))
    return identity


def _names(function: FusedGemm | FusedConv2d) -> list[str]:
    if isinstance(function, FusedConv2d):
        return ["x", "weight", *["bias"] * function.bias, *["residual"] * function.residual]
    scales = [*["row_scale"] * function.row_scale, *["col_scale"] * function.col_scale]
    return ["a", "b", *["bias"] * function.bias, *scales, *["residual"] * function.residual]


def _changed(function: FusedGemm | FusedConv2d, inputs: Sequence[Any]) -> dict[int, Any]:
    """Returns the output's size for each axis on which the output and the first input differ."""
    if isinstance(function, FusedConv2d):
        height, width = _spatial(function, inputs[0].shape_expr)
        return {1: inputs[1].shape_expr[0], 2: height, 3: width}
    return {-1: _columns(function, inputs[1].shape_expr)}


def sizes_of(function: FusedGemm | FusedConv2d, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the values of the kernel's scalar parameters, in the order of the parameters."""
    first, second = inputs[0].shape_expr, inputs[1].shape_expr
    if isinstance(function, FusedConv2d):
        height, width = _spatial(function, first)
        return first[0] * height * width, second[0], first[1], first[2], first[3], height, width
    return _product(first[:-1]), _columns(function, second), first[-1]


def _spatial(function: FusedConv2d, image: Any) -> tuple[Any, Any]:
    """Returns the height and width of the output, by the formula of ONNX's Conv."""
    found = []
    for at in range(2):
        reach = function.dilation[at] * (function.kernel[at] - 1) + 1
        found.append((image[2 + at] + (2 * function.padding[at] - reach)) // function.stride[at] + 1)
    return found[0], found[1]


def _columns(function: FusedGemm, shape: Any) -> Any:
    return shape[0] if function.product == "gemm_nt" else shape[1]


def _product(sizes: Sequence[Any]) -> Any:
    found = sizes[0]
    for size in sizes[1:]:
        found = found * size
    return found


def _typed(function: Callable[..., Any], names: Sequence[str], kind: Any, returns: Any) -> Callable[..., Any]:
    """Returns ``function`` with a signature, because TensorRT reads the inputs of a plugin from the signature."""
    empty = inspect.Signature.empty
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind or empty) for name in names
    ]
    signature = inspect.Signature(parameters, return_annotation=returns or empty)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
