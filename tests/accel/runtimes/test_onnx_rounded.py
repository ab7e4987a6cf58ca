"""Proves that ``RoundedSession`` rounds to 16 bits after every node, and so shows overflows that ONNX Runtime hides."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from accel.runtimes.base import SessionOptions
from accel.runtimes.onnx_rounded import RoundedSession
from tests.support.onnx_builder import HALF, artifact, node, run, square_root_of_square


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_rounded_session_rounds_after_every_node(tmp_path: Path, kind: int) -> None:
    """Checks that inner tensors are rounded exactly as in numpy. For each rounding, the session adds two casts, which
    ONNX Runtime must not remove. For x = 300, sqrt(x*x) overflows in fp16. ONNX Runtime itself hides the overflow and
    returns 300."""
    dtype = np.dtype(np.float16 if kind == TensorProto.FLOAT16 else ml_dtypes.bfloat16)
    src = artifact(
        tmp_path / "m.onnx",
        [node("Mul", "x x", "a"), node("Sqrt", "a", "y")],
        {"x": (kind, ["batch"])},
        {"y": (kind, ["batch"])},
    )
    x = np.array([300.0, 1.2345, 3e-4, 7.7, 255.9], dtype)
    with np.errstate(over="ignore"):
        squares = (x.astype(np.float32) ** 2).astype(dtype)
        roots = np.sqrt(squares.astype(np.float32)).astype(dtype)
    with RoundedSession(src, SessionOptions()) as session:
        found = session.run_all({"x": x})
        assert session.run({"x": x})["y"].dtype == dtype
    assert np.array_equal(found["a"], squares)
    assert np.array_equal(found["y"], roots)
    assert np.isinf(roots[0]) == (kind == TensorProto.FLOAT16)


def test_rounded_session_leaves_float32_and_int8_alone(tmp_path: Path) -> None:
    """Checks that the rounded session doesn't round float32 values. The outputs of a float32 graph must have the same
    bits as ONNX Runtime's."""
    src = square_root_of_square(tmp_path / "m.onnx")
    x = np.array([300.0, 1.2345], np.float32)
    plain = onnxruntime.InferenceSession(str(src.path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    assert np.array_equal(run(src, x=x)["z"], plain)


def test_rounded_session_rounds_inside_branches(tmp_path: Path) -> None:
    """Checks that the rounded session also rounds inside subgraphs. In this test, a subgraph computes 300 * 300, which
    must overflow in fp16."""
    branch = helper.make_graph(
        [node("Mul", "x x", "t0"), node("Sqrt", "t0", "t")],
        "then",
        [],
        [helper.make_tensor_value_info("t", HALF, None)],
    )
    other = helper.make_graph([node("Neg", "x", "e")], "else", [], [helper.make_tensor_value_info("e", HALF, None)])
    src = artifact(
        tmp_path / "m.onnx",
        [node("If", "c", "y", then_branch=branch, else_branch=other)],
        {"x": (HALF, ["batch"]), "c": (TensorProto.BOOL, [])},
        {"y": (HALF, ["batch"])},
    )
    x = np.array([300, 2], np.float16)
    assert np.array_equal(run(src, x=x, c=np.array(True))["y"], np.array([np.inf, 2], np.float16))
    assert np.array_equal(run(src, x=x, c=np.array(False))["y"], -x)
