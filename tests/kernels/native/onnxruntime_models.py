"""Makes models that call the operators for ONNX Runtime, opens sessions with these models, and checks the results."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper

from accel.artifact import Artifact
from accel.kernels.catalogue import reference
from accel.kernels.catalogue.spec import ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.onnx.function import DOMAIN, DTYPES, OPERANDS, FusedConv2d, FusedGemm
from accel.runtimes.base import SessionOptions
from accel.runtimes.onnxruntime import OnnxRuntimeSession
from accel.signature import Signature, TensorSpec

INCLUDE = os.environ.get("ACCEL_ONNXRUNTIME_INCLUDE", "")
M, N, K = 6, 5, 7
IMAGES, CHANNELS, HEIGHT, WIDTH, FILTERS = 2, 3, 7, 6, 4
# Each row has the kernel, stride, padding and dilation of a convolution.
GEOMETRIES = (
    ((3, 2), (2, 1), (1, 0), (1, 2)),
    ((1, 1), (1, 1), (0, 0), (1, 1)),
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 5), (3, 2), (2, 4), (2, 1)),
)
SHAPES = {
    "a": [M, K],
    "a3": [2, 3, K],
    "nn": [K, N],
    "nt": [N, K],
    "bias": [N],
    "residual": [M, N],
    "residual3": [2, 3, N],
    "row": [M],
    "col": [N],
    "whole_a": [M, K],
    "whole_b": [K, N],
    "image": [IMAGES, CHANNELS, HEIGHT, WIDTH],
    "filters": [FILTERS],
}
TORCH = {dtype: reference.TORCH_DTYPES[text] for dtype, text in OPERANDS.items()}
OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]


def convolution(geometry: int = 0, **epilogue: Any) -> FusedConv2d:
    given = {"act": "relu", "bias": True, "residual": False, "dtype": TensorProto.FLOAT, **epilogue}
    return FusedConv2d(
        **dict(zip(("kernel", "stride", "padding", "dilation"), GEOMETRIES[geometry], strict=True)), **given
    )


def spec_of(function: FusedConv2d) -> ConvSpec:
    epilogue = EpilogueSpec(
        act=function.act, bias=function.bias, residual=function.residual, out_dtype=DTYPES[function.dtype]
    )
    return ConvSpec(
        images=IMAGES,
        height=HEIGHT,
        width=WIDTH,
        c_in=CHANNELS,
        c_out=FILTERS,
        kernel=function.kernel,
        stride=function.stride,
        padding=function.padding,
        dilation=function.dilation,
        in_dtype=DTYPES[function.dtype],
        epilogue=epilogue,
    )


def conv_inputs(function: FusedConv2d) -> dict[str, list[int]]:
    """Returns the shapes of a convolution's inputs by name."""
    spec = spec_of(function)
    kernel, out = function.kernel, (spec.out_height, spec.out_width)
    found = {"image": SHAPES["image"], f"weight{kernel[0]}x{kernel[1]}": [FILTERS, CHANNELS, *kernel]}
    found |= {"filters": [FILTERS]} if function.bias else {}
    return found | ({f"sum{out[0]}x{out[1]}": [IMAGES, FILTERS, *out]} if function.residual else {})


for _geometry in range(len(GEOMETRIES)):
    SHAPES |= conv_inputs(convolution(_geometry, residual=True))


def options(library: Path | None, *convolutions: FusedConv2d) -> ort.SessionOptions:
    made = ort.SessionOptions()
    for at, function in enumerate(convolutions):
        made.add_session_config_entry(f"custom_op.FusedConv2d.{at}", function.name)
    if library is not None:
        made.register_custom_ops_library(str(library))
    return made


def session(made: onnx.ModelProto, given: ort.SessionOptions) -> ort.InferenceSession:
    return ort.InferenceSession(made.SerializeToString(), given, providers=["CPUExecutionProvider"])


def inputs_of(function: FusedGemm | FusedConv2d) -> list[str]:
    if isinstance(function, FusedConv2d):
        return list(conv_inputs(function))
    wide = "3" if function.product == "matmul" else ""
    names = [f"a{wide}", "nt" if function.product == "gemm_nt" else "nn"]
    if function.operand == TensorProto.INT8:
        names = ["whole_a", "whole_b"]
    scales = [*["row"] * function.row_scale, *["col"] * function.col_scale]
    return [*names, *["bias"] * function.bias, *scales, *[f"residual{wide}"] * function.residual]


def model(functions: Sequence[FusedGemm | FusedConv2d], *, bodies: bool) -> onnx.ModelProto:
    """Returns a model that calls each of ``functions`` once on the same fp32 inputs. The model casts the inputs to each
    function's dtypes, and the outputs to fp32."""
    nodes = []
    taken = {function.name: list(zip(inputs_of(function), function.dtypes, strict=True)) for function in functions}
    for name, dtype in sorted(set(itertools.chain.from_iterable(taken.values()))):
        nodes.append(helper.make_node("Cast", [name], [f"{name}_{dtype}"], to=dtype))
    for function in functions:
        given = [f"{name}_{dtype}" for name, dtype in taken[function.name]]
        nodes.append(helper.make_node(function.name, given, [f"{function.name}_out"], domain=DOMAIN))
        nodes.append(helper.make_node("Cast", [f"{function.name}_out"], [function.name], to=TensorProto.FLOAT))
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in SHAPES.items()]
    outputs = [helper.make_tensor_value_info(f.name, TensorProto.FLOAT, None) for f in functions]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    extra = [function.function(20) for function in functions] if bodies else []
    return helper.make_model(graph, opset_imports=OPSETS, functions=extra, ir_version=10)


def feeds() -> dict[str, np.ndarray[Any, Any]]:
    g = np.random.default_rng(0)
    made = {name: g.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    made |= {name: 0.01 * made[name] for name in ("row", "col")}
    made |= {name: 0.2 * made[name] for name in made if name.startswith("weight")}
    made |= {name: np.rint(40 * made[name]).clip(-128, 127) for name in ("whole_a", "whole_b")}
    return made | {"a3": made["a"].reshape(SHAPES["a3"]), "residual3": made["residual"].reshape(SHAPES["residual3"])}


def right(function: FusedGemm, got: np.ndarray[Any, Any]) -> None:
    """Checks that the error is at most half a unit in the last place of the output's dtype, plus 1e-5 for fp32 sums."""
    rounded = {
        name.rstrip("3"): torch.from_numpy(feeds()[name]).to(TORCH[dtype]).double().numpy()
        for name, dtype in zip(inputs_of(function), function.dtypes, strict=True)
    }
    dtype = DTYPES[function.dtype]
    operands = {"bias": "bias", "residual": "residual", "row_scale": "row", "col_scale": "col"}
    there = {flag: name for flag, name in operands.items() if getattr(function, flag)}
    epilogue = EpilogueSpec(act=function.act, out_dtype=dtype, **dict.fromkeys(there, True))
    operand = OPERANDS[function.operand or function.dtype]
    spec = GemmSpec(m=M, n=N, k=K, in_dtype=operand, epilogue=epilogue)
    a, b = list(rounded.values())[:2]
    a, b = a.reshape(M, K), b.T if function.product == "gemm_nt" else b
    wanted = reference.gemm_numpy(
        spec, a, b, **{flag: rounded[name].reshape(SHAPES[name]) for flag, name in there.items()}
    )
    assert got.shape == ((2, 3, N) if function.product == "matmul" else (M, N))
    relative, step = reference.ROUNDING[dtype]
    limit = relative * np.abs(wanted) + step + 1e-5
    assert np.all(np.abs(got.reshape(M, N) - wanted) <= limit), function.name


def right_convolution(function: FusedConv2d, got: np.ndarray[Any, Any]) -> None:
    rounded = [
        torch.from_numpy(feeds()[name]).to(TORCH[function.dtype]).double().numpy() for name in inputs_of(function)
    ]
    image, weight, *rest = (x.transpose(0, 2, 3, 1) if x.ndim == 4 else x for x in rounded)
    there = [name for name in ("bias", "residual") if getattr(function, name)]
    wanted = reference.conv2d_numpy(spec_of(function), image, weight, **dict(zip(there, rest, strict=True)))
    wanted = wanted.transpose(0, 3, 1, 2)
    relative, step = reference.ROUNDING[DTYPES[function.dtype]]
    assert got.shape == wanted.shape
    assert np.all(np.abs(got - wanted) <= relative * np.abs(wanted) + step + 1e-5), function.name


def opened(function: FusedGemm | FusedConv2d, folder: Path) -> OnnxRuntimeSession:
    """Opens accel's session with a model of one operator that has no function body."""
    onnx.save(model([function], bodies=False), folder / "model.onnx")
    inputs = tuple(TensorSpec(name, "float32", tuple(shape)) for name, shape in SHAPES.items())
    out = (M, N)
    if isinstance(function, FusedConv2d):
        out = tuple(conv_inputs(replace(function, residual=True)).popitem()[1])
    signature = Signature(inputs, (TensorSpec(function.name, "float32", out),))
    return OnnxRuntimeSession(Artifact(path=folder / "model.onnx", kind="onnx", signature=signature), SessionOptions())
