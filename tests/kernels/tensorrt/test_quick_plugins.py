"""Proves, without TensorRT, that the quick plugin's PTX, kernel parameters and launch sizes are correct.

These tests check that the PTX of each variant assembles and has a tensor-core product. The tests check that a kernel
has only the parameters that TensorRT passes, in the order inputs, M, N, K, output. The tests also check that the
kernels match the reference in Triton's interpreter, and that the launch grid and the scalar arguments match the shapes.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from onnx import TensorProto

from tests.support.fake_tensorrt import Descriptor, quick_plugins

pytest.importorskip("triton", reason="needs the extra [kernels]")

import triton

from accel.errors import BuildFailed, MissingExtra, UnsupportedHere
from accel.kernels.onnx.function import FusedConv2d, FusedGemm
from accel.kernels.proof import interpret
from accel.kernels.tensorrt import quick_plugins as tensorrt_plugin
from accel.kernels.tensorrt.quick_plugins import compile_kernel, register, without_scratch

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


def function(product: str, bias: bool, residual: bool, dtype: int = TensorProto.FLOAT16) -> FusedGemm:
    return FusedGemm(product=product, act="gelu_erf", bias=bias, residual=residual, dtype=dtype)


def parameters(kernel: Any) -> list[str]:
    """Reads the kinds of a kernel's parameters from the PTX."""
    entry = re.search(r"\.entry\s+(\w+)\(\s*(.*?)\s*\)", kernel.ptx, re.DOTALL)
    assert entry is not None
    assert entry[1] == kernel.name
    return ["pointer" if ".u64" in line else "integer" for line in entry[2].split(",")]


def assemble(kernel: Any, folder: Path) -> None:
    source = folder / "kernel.ptx"
    source.write_text(kernel.ptx)
    for arch in ("sm_80", "sm_90", "sm_120"):
        subprocess.run([PTXAS, f"-arch={arch}", source, "-o", folder / "kernel.cubin"], check=True)


@pytest.mark.parametrize(("bias", "residual"), list(itertools.product([False, True], repeat=2)))
def test_the_ptx_assembles_and_takes_what_tensorrt_passes(bias: bool, residual: bool, tmp_path: Path) -> None:
    kernel = compile_kernel(function("gemm_nt", bias, residual, TensorProto.BFLOAT16 if bias else TensorProto.FLOAT16))
    assert "mma.sync" in kernel.ptx
    assert parameters(kernel) == ["pointer"] * (2 + bias + residual) + ["integer"] * 3 + ["pointer"]
    assemble(kernel, tmp_path)


def convolution(bias: bool, residual: bool, dtype: int = TensorProto.FLOAT16) -> FusedConv2d:
    geometry = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 3)}
    return FusedConv2d(act="silu", bias=bias, residual=residual, dtype=dtype, **geometry)


@pytest.mark.parametrize(("bias", "residual"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_ptx_of_a_convolution(bias: bool, residual: bool, tmp_path: Path) -> None:
    kernel = compile_kernel(convolution(bias, residual, TensorProto.BFLOAT16 if residual else TensorProto.FLOAT16))
    assert re.search(rf"mma\.sync\.\S*\.{'bf16.bf16' if residual else 'f16.f16'}\.", kernel.ptx)
    assert parameters(kernel) == ["pointer"] * (2 + bias + residual) + ["integer"] * 7 + ["pointer"]
    assemble(kernel, tmp_path)


def test_shapes_and_launch_of_a_convolution(registered: dict[str, Any]) -> None:
    """Fails if the output shape or the launch grid is wrong for a convolution of two images of 9x8. The output has (9 +
    2 - 3) // 2 + 1 = 5 rows and 8 - 4 + 1 = 5 columns, and a tile covers 64 pixels and 64 channels."""
    name = register(convolution(True, True))
    assert name == "accel::FusedConv2d_k3x2_s2x1_p1x0_d1x3_bias_silu_residual_fp16"
    inputs = (Descriptor(2, 6, 9, 8), Descriptor(70, 6, 3, 2), Descriptor(70), Descriptor(2, 70, 5, 5))
    out = registered[f"{name} shapes"](*inputs)
    assert (out.shape_expr, out.dtype) == ([2, 70, 5, 5], "that of the first")
    names = ["x", "weight", "bias", "residual"]
    assert list(inspect.signature(registered[f"{name} shapes"]).parameters) == names
    assert list(inspect.signature(registered[f"{name} kernel"]).parameters) == [*names, "outputs", "tactic"]
    kernel, ptx, launch, scalars = registered[f"{name} kernel"](*inputs, (out,), 0)
    assert f".entry {kernel}(" in ptx
    assert scalars == [50, 70, 6, 9, 8, 5, 5]
    assert (launch.grid_x, launch.block_x) == (1 * 2, 256)


@pytest.mark.proof
def test_the_kernels_are_right_in_the_interpreter() -> None:
    found = interpret.run(case="plugin")
    assert len(found) == 16 + 8
    assert sum("conv" in name for name in found) == 8
    assert {name for name, value in found.items() if not value <= 1} == set()


def test_what_reads_scratch_memory_is_no_plugin() -> None:
    parameters = ".param .u64 k_param_0,\n\t.param .u64 k_param_1"
    ptx = f".visible .entry k(\n\t{parameters}\n)\n{{\nld.param.b64 %rd1, [k_param_0];\n}}"
    assert without_scratch(ptx, 1) == ptx.replace(",\n\t.param .u64 k_param_1", "")
    with pytest.raises(BuildFailed, match="scratch memory"):
        without_scratch(ptx.replace("[k_param_0]", "[k_param_1]"), 1)


def scaled(operand: int, **changed: Any) -> FusedGemm:
    flags = {"bias": True, "residual": True, "row_scale": True, "col_scale": True, **changed}
    return FusedGemm(product="gemm_nn", act="silu", dtype=TensorProto.FLOAT16, operand=operand, **flags)


@pytest.mark.parametrize(
    ("function", "arch", "word"),
    [
        (scaled(TensorProto.INT8), 80, "s8.s8"),
        (scaled(TensorProto.INT8, bias=False, row_scale=False), 80, "s8.s8"),
        (scaled(TensorProto.FLOAT8E4M3FN, residual=False), 89, "e4m3.e4m3"),
        (scaled(TensorProto.FLOAT16, bias=False, residual=False, col_scale=False), 80, "f16.f16"),
    ],
)
def test_products_with_scales_multiply_in_their_own_type(
    function: FusedGemm, arch: int, word: str, tmp_path: Path
) -> None:
    kernel = compile_kernel(function, arch)
    assert re.search(rf"mma\.sync\.\S*\.{re.escape(word)}\.", kernel.ptx)
    entry = re.search(r"\.entry\s+(\w+)\(\s*(.*?)\s*\)", kernel.ptx, re.DOTALL)
    assert entry is not None
    kinds = ["pointer" if ".u64" in line else "integer" for line in entry[2].split(",")]
    assert kinds == ["pointer"] * len(function.dtypes) + ["integer"] * 3 + ["pointer"]
    source = tmp_path / "kernel.ptx"
    source.write_text(kernel.ptx)
    for name in (f"sm_{arch}", "sm_90", "sm_120"):
        subprocess.run([PTXAS, f"-arch={name}", source, "-o", tmp_path / "kernel.cubin"], check=True)


def test_fp8_has_no_plugin_where_it_has_no_products() -> None:
    with pytest.raises(UnsupportedHere, match=r"pass arch=89 .*or don't register the function"):
        compile_kernel(scaled(TensorProto.FLOAT8E4M3FN))


def test_the_output_of_int8_has_its_own_type(registered: dict[str, Any]) -> None:
    name = register(scaled(TensorProto.INT8))
    inputs = (Descriptor(150, 96), Descriptor(96, 130), Descriptor(130), Descriptor(150), Descriptor(130))
    out = registered[f"{name} shapes"](*inputs, Descriptor(150, 130))
    assert (out.shape_expr, out.dtype) == ([150, 130], "HALF")
    names = ["a", "b", "bias", "row_scale", "col_scale", "residual"]
    assert list(inspect.signature(registered[f"{name} shapes"]).parameters) == names


def test_without_tensorrt_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_plugin.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtra, match=r"accel-toolchain\[tensorrt\]"):
        register(function("matmul", True, False))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the functions that the plugin registers with a stand-in for ``tensorrt.plugin``. With the stand-in, the
    tests can check the arithmetic of the launch grid and the shapes, but not TensorRT itself."""
    plugin = quick_plugins()
    package = ModuleType("tensorrt")
    package.__spec__ = importlib.machinery.ModuleSpec("tensorrt", None)
    package.__dict__.update(plugin=plugin, float16="HALF")
    monkeypatch.setitem(sys.modules, "tensorrt", package)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", plugin)
    kept: dict[str, Any] = plugin.kept
    return kept


@pytest.mark.parametrize("product", ["matmul", "gemm_nt"])
def test_shapes_and_launch(product: str, registered: dict[str, Any]) -> None:
    """Fails if the output shape or the launch grid is wrong for a product of (3, 50, 96) and (96, 130). The output has
    150 rows and 130 columns, and a tile is 64x64."""
    name = register(function(product, True, True))
    assert name == f"accel::FusedGemm_{product}_bias_gelu_erf_residual_fp16"
    a = Descriptor(150, 96) if product == "gemm_nt" else Descriptor(3, 50, 96)
    b = Descriptor(130, 96) if product == "gemm_nt" else Descriptor(96, 130)
    inputs = (a, b, Descriptor(130), Descriptor(*a.shape_expr[:-1], 130))
    out = registered[f"{name} shapes"](*inputs)
    assert (out.shape_expr, out.dtype) == ([*a.shape_expr[:-1], 130], "that of the first")
    # TensorRT reads a plugin's inputs from the function signatures. The kernel function needs the arguments ``outputs``
    # and ``tactic`` and has to return four values.
    names = ["a", "b", "bias", "residual"]
    shapes, launched = (inspect.signature(registered[f"{name} {what}"]) for what in ("shapes", "kernel"))
    assert list(shapes.parameters) == names
    assert {p.annotation for p in shapes.parameters.values()} == {shapes.return_annotation} == {Descriptor}
    assert list(launched.parameters) == [*names, "outputs", "tactic"]
    assert len(launched.return_annotation.__args__) == 4
    kernel, ptx, launch, scalars = registered[f"{name} kernel"](*inputs, (out,), 0)
    assert f".entry {kernel}(" in ptx
    assert scalars == [150, 130, 96]
    assert (launch.grid_x, launch.block_x) == (3 * 3, 256)
