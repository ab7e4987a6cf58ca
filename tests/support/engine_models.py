"""Makes small models that several engine tests build, and chooses the toolkit for this machine's GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig
from accel.errors import MissingExtra, UnsupportedHere
from accel.runtimes.base import RUNTIMES
from accel.runtimes.cuda_memory import device_capability
from accel.runtimes.tensorrt_toolkit import check_this_gpu, load_toolkit, offered_capabilities
from accel.signature import DimRange
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage

FLOAT = TensorProto.FLOAT
NEEDS_TOOLKIT = "needs [tensorrt] and an NVIDIA GPU, or [tensorrt-rtx] and an RTX GPU"


def toolkit_of_this_gpu() -> str | None:
    """Returns the toolkit whose engines run on this machine's GPU, or None."""
    if RUNTIMES["tensorrt"].runnable():
        return "tensorrt"
    if not RUNTIMES["tensorrt-rtx"].runnable():
        return None
    try:
        check_this_gpu("tensorrt-rtx", offered_capabilities(load_toolkit("tensorrt-rtx")), device_capability())
    except (UnsupportedHere, MissingExtra):
        return None
    return "tensorrt-rtx"


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray] | None = None,
    opsets: Sequence[onnx.OperatorSetIdProto] = (),
) -> Path:
    weights = [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), *opsets], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def value(name: str, shape: Sequence[int | str], dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def two_inputs(path: Path, dtype: int = FLOAT) -> Path:
    """Makes a model with token embeddings, a mask and two linear layers. The tokens and the mask have the same two
    dynamic dims."""
    rng = np.random.default_rng(0)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="embed"),
        helper.make_node("Cast", ["mask"], ["kept"], name="cast_mask", to=dtype),
        helper.make_node("Unsqueeze", ["kept", "last"], ["column"], name="unsqueeze"),
        helper.make_node("Mul", ["rows", "column"], ["masked"], name="apply_mask"),
        helper.make_node("MatMul", ["masked", "w1"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="second"),
    ]
    constants = {
        "table": rng.standard_normal((10, 16)).astype(kind),
        "last": np.array([-1]),
        "w1": rng.standard_normal((16, 32)).astype(kind),
        "w2": rng.standard_normal((32, 8)).astype(kind),
    }
    dims = ["batch", "sequence"]
    inputs = [value("ids", dims, TensorProto.INT64), value("mask", dims, TensorProto.INT64)]
    return save(path, nodes, inputs, [value("y", [*dims, 8], dtype)], constants)


def relu(path: Path, shape: Sequence[int | str] = ("batch", 4)) -> Path:
    return save(path, [helper.make_node("Relu", ["x"], ["y"], name="relu")], [value("x", shape)], [value("y", shape)])


def opened(path: Path, **dims: DimRange) -> Artifact:
    return open_onnx(path, probe=False, dims=dims)


def two_inputs_source(folder: Path) -> Artifact:
    return opened(two_inputs(folder / "two.onnx"), batch=DimRange(1, 2, 4), sequence=DimRange(2, 8, 16))


def two_inputs_engine(source: Artifact, folder: Path) -> Artifact:
    """Builds an engine for two GPU architectures with ``run_stage``. The engine accepts the dim ranges of the source's
    signature."""
    config = EngineFromOnnxConfig(compute_capabilities=("8.6", "12.0"))
    cache = StageCache(folder / "cache")
    return run_stage("engine_from_onnx", source, config, cache=cache, out=folder / "two.engine")
