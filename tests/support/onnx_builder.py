"""Builds small ONNX files for the tests of stages, and runs ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.runtimes.base import SessionOptions
from accel.runtimes.onnx_rounded import RoundedSession
from accel.signature import DimRange
from accel.sources.onnx.file import open_onnx

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64


def artifact(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: dict[str, tuple[int, list[Any]]],
    constants: dict[str, Any] | None = None,
    *,
    opset: int = 20,
    dims: dict[str, DimRange] | None = None,
) -> Artifact:
    """Saves the nodes as an ONNX file, and opens the file."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))
    return open_onnx(path, probe=False, dims=dims)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Makes a node. The name ``-`` omits an optional input."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=f"n_{outputs.split()[0]}", **attributes)


def save_data(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def kept(made: Artifact) -> set[str]:
    return {entry["node"] for entry in made.notes["kept_fp32"]}


def run(made: Artifact, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    """Runs the model in a ``RoundedSession``, which rounds after every node."""
    with RoundedSession(made, SessionOptions()) as session:
        return session.run(feeds)


def proto(made: Artifact) -> onnx.ModelProto:
    model = onnx.load(str(made.path))
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    return model


def square_root_of_square(path: Path) -> Artifact:
    return artifact(
        path,
        [node("Mul", "x x", "a"), node("Sqrt", "a", "y"), node("Relu", "y", "z")],
        {"x": (FLOAT, ["batch"])},
        {"z": (FLOAT, ["batch"])},
    )
