"""Proves, without a GPU, that TensorRT-RTX fuses the function bodies into the expected kernels for three GPU
architectures.

These tests check that TensorRT-RTX can build every function body, and that the epilogue of a product is in the
product's kernel. The tests fail if int8 or fp8 operands are converted to another type before the product.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.cache import StageCache
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig
from accel.converters.to_tensorrt.kernel_table import parse_layers
from accel.converters.to_tensorrt.plugins import take_fp8_bodies
from accel.kernels.onnx.function import DOMAIN, FusedConv2d, FusedGemm, QuantizeRowwise
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage

pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra [tensorrt-rtx]")
pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]
CAPABILITIES = ("SM86", "SM89", "SM120")
NUMPY = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.INT8: np.int8,
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
}
WORDS = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}
Function = FusedGemm | FusedConv2d | QuantizeRowwise


def weight(name: str, dtype: int, *shape: int) -> onnx.TensorProto:
    values = np.random.default_rng(0).standard_normal(shape)
    return numpy_helper.from_array((values * (40 if dtype == TensorProto.INT8 else 0.2)).astype(NUMPY[dtype]), name)


def model(
    calls: Sequence[tuple[Function, list[str], list[str]]],
    image: tuple[int, Sequence[int | str]],
    out: tuple[int, Sequence[int | str]],
    weights: list[onnx.TensorProto],
) -> onnx.ModelProto:
    """Returns a model with the input ``x`` and the output ``y``. ``image`` is the dtype and shape of ``x``. Each item
    of ``calls`` has an operator, the names of its inputs, and the names of its outputs."""
    nodes = [helper.make_node(f.name, inputs, outputs, domain=DOMAIN) for f, inputs, outputs in calls]
    ends = [helper.make_tensor_value_info(name, *end) for name, end in (("x", image), ("y", out))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    functions = [function.function(20) for function, _, _ in calls]
    made = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made


def kernels_of(made: onnx.ModelProto, file: Path, capability: str) -> list[dict[str, Any]]:
    """Builds an engine and returns the kernels that compute ONNX nodes. The entry ``parts`` has the short names of a
    kernel's nodes."""
    take_fp8_bodies(made)  # an engine build calls take_fp8_bodies, too
    onnx.save(made, file)
    script = Path(__file__).with_name("build_engine.py")
    words = [sys.executable, str(script), str(file), capability]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parsed"]
    assert found["errors"] == []
    assert found["bytes"] > 1000
    rows = [row for row in parse_layers(found["layers"]) if row["onnx"]]
    for row in rows:
        row["parts"] = {source.partition(" | ")[0].rpartition("_")[2] for source in row["onnx"]}
    return rows


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", WORDS)
def test_a_layer_is_one_kernel(dtype: int, capability: str, tmp_path: Path) -> None:
    """Fails if a layer becomes several kernels. One layer has a product, a bias and a GELU, and the other layer has a
    product, a bias and a residual."""
    gelu = FusedGemm(product="gemm_nt", act="gelu_erf", bias=True, residual=False, dtype=dtype)
    added = FusedGemm(product="gemm_nt", act="none", bias=True, residual=True, dtype=dtype)
    calls: list[tuple[Function, list[str], list[str]]] = [
        (gelu, ["x", "w1", "b1"], ["h"]),
        (added, ["h", "w2", "b2", "x"], ["y"]),
    ]
    shapes = {"w1": (512, 256), "b1": (512,), "w2": (256, 512), "b2": (256,)}
    weights = [weight(name, dtype, *shape) for name, shape in shapes.items()]
    end = (dtype, ("n", 256))
    rows = kernels_of(model(calls, end, end, weights), tmp_path / "m.onnx", capability)
    assert [row["parts"] for row in rows] == [{"product", "activated"}, {"product", "summed"}]
    assert all(set(row["inputs"]) == set(row["outputs"]) == {WORDS[dtype]} for row in rows)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_convolution_is_one_kernel(capability: str, tmp_path: Path) -> None:
    """Fails if a convolution becomes several kernels. The test uses fp16, because ONNX's Conv has no bf16 before opset
    22."""
    dtype = TensorProto.FLOAT16
    geometry = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    relu = FusedConv2d(act="relu", bias=True, residual=False, dtype=dtype, **geometry)
    added = FusedConv2d(act="none", bias=True, residual=True, dtype=dtype, **geometry)
    calls: list[tuple[Function, list[str], list[str]]] = [
        (relu, ["x", "w1", "b1"], ["h"]),
        (added, ["h", "w2", "b2", "x"], ["y"]),
    ]
    shapes = {"w1": (64, 64, 3, 3), "b1": (64,), "w2": (64, 64, 3, 3), "b2": (64,)}
    weights = [weight(name, dtype, *shape) for name, shape in shapes.items()]
    end = (dtype, ("n", 64, 16, 16))
    rows = kernels_of(model(calls, end, end, weights), tmp_path / "m.onnx", capability)
    products = [row for row in rows if "product" in row["parts"]]
    assert [row["parts"] for row in products] == [{"product", "activated"}, {"product", "summed"}]
    assert all(set(row["inputs"]) == set(row["outputs"]) == {WORDS[dtype]} for row in products)


def quantized_layer(operand: int) -> onnx.ModelProto:
    rows_of = QuantizeRowwise(source=TensorProto.FLOAT16, dtype=operand)
    flags = {"bias": True, "residual": False, "row_scale": True, "col_scale": True}
    scaled = FusedGemm(product="gemm_nt", act="silu", dtype=TensorProto.FLOAT16, operand=operand, **flags)
    calls: list[tuple[Function, list[str], list[str]]] = [
        (rows_of, ["x"], ["q", "row"]),
        (scaled, ["q", "w", "b", "row", "col"], ["y"]),
    ]
    weights = [weight("w", operand, 512, 256), *(weight(name, TensorProto.FLOAT, 512) for name in ("b", "col"))]
    return model(calls, (TensorProto.FLOAT16, ("n", 256)), (TensorProto.FLOAT16, ("n", 512)), weights)


def test_the_stage_builds_fp8_from_a_file_for_any_runtime(tmp_path: Path) -> None:
    """Checks that an engine build replaces the fp8 function bodies of an ONNX file with function bodies for TensorRT.
    TensorRT's parser refuses the original function bodies, which are made for ONNX Runtime."""
    made = quantized_layer(TensorProto.FLOAT8E4M3FN)
    onnx.save(made, tmp_path / "m.onnx")
    config = EngineFromOnnxConfig(compute_capabilities=("8.9",))
    src = open_onnx(tmp_path / "m.onnx", probe=False)
    engine = run_stage("engine_from_onnx", src, config, cache=StageCache(tmp_path / "cache"))
    gemms = [row for row in engine.history[-1]["notes"]["kernels"] if row["type"] == "gemm"]
    assert [row["inputs"] for row in gemms] == [["fp8"]]


@pytest.mark.parametrize(
    ("operand", "capability", "word"),
    [(TensorProto.INT8, capability, "int8") for capability in CAPABILITIES]
    + [(TensorProto.FLOAT8E4M3FN, capability, "fp8") for capability in ("SM89", "SM120")],
)
def test_small_types_are_multiplied_as_such(operand: int, capability: str, word: str, tmp_path: Path) -> None:
    """Fails if int8 or fp8 operands are converted to another type before the product. Also checks that a layer becomes
    three kernels: the quantization of the rows, the product, and the epilogue of scales, bias and activation."""
    quantize, product, epilogue = kernels_of(quantized_layer(operand), tmp_path / "m.onnx", capability)
    assert word in quantize["outputs"]
    assert product["type"] == "gemm"
    assert set(product["inputs"]) == {word}
    assert "product" in product["parts"]
    assert {"biased", "activated", "out"} <= epilogue["parts"]
    assert epilogue["outputs"] == ["float16"]
