"""Proves that ``RoundedSession`` rounds to 16 bits after every node, and so shows overflows that ONNX Runtime hides."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from accel.artifact import Artifact
from accel.errors import UnsupportedHere
from accel.runtimes.base import SessionOptions, default_runtime, open_session
from accel.runtimes.onnx_rounded import RoundedSession
from accel.sources.onnx.file import open_onnx
from tests.support.onnx_builder import FLOAT, HALF, artifact, node, run, square_root_of_square


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


@pytest.mark.parametrize("inside", [False, True])
def test_products_round_their_inputs_to_tf32(tmp_path: Path, inside: bool) -> None:
    """Fails if a TF32 session doesn't round the inputs of a product to 10 bits of mantissa, rounds its sums, or turns a
    huge value into NaN. An expected value is computed from the bits of float32. The product may be inside a branch."""
    taken = [node("MatMul", "x w", "t"), node("MatMul", "x w", "e")]
    branches = [
        helper.make_graph([one], one.output[0], [], [helper.make_tensor_value_info(one.output[0], FLOAT, None)])
        for one in taken
    ]
    chosen = node("If", "c", "p", then_branch=branches[0], else_branch=branches[1])
    src = artifact(
        tmp_path / "m.onnx",
        [chosen if inside else node("MatMul", "x w", "p"), node("Add", "p b", "y")],
        {"x": (FLOAT, ["batch", 64]), **({"c": (TensorProto.BOOL, [])} if inside else {})},
        {"y": (FLOAT, ["batch", 8])},
        {"w": np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32), "b": np.full(8, 1.0001, "f4")},
    )
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32) * np.float32(2.0) ** 90
    x[0] = 1 + 2.0**-11 + 2.0**-20  # is next to the middle between two TF32 numbers
    x[4, 0] = 3e38
    feeds = {"x": x, **({"c": np.array(True)} if inside else {})}
    weights = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    with np.errstate(over="ignore"):  # the huge value overflows in some products, in float32 and in TF32
        exact = x @ weights + np.float32(1.0001)
        expected = _to_tf32(x) @ _to_tf32(weights) + np.float32(1.0001)
    with RoundedSession(src, SessionOptions(precision="tf32")) as session:
        found = session.run(feeds)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(exact[0] - expected[0]).max() > 1e-3  # the rounding is larger than the tolerance
    with RoundedSession(src, SessionOptions()) as session:
        np.testing.assert_allclose(session.run(feeds)["y"], exact, rtol=1e-5, atol=1e-5)


def _to_tf32(value: np.ndarray) -> np.ndarray:
    """Returns ``value`` rounded to nearest in TF32, which drops the last 13 bits of float32."""
    bits = value.view(np.uint32)
    rounded = ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.abs(value) < 2.0**113, rounded, value).astype(np.float32)


def test_a_bfloat16_model_runs_on_a_cpu(tmp_path: Path) -> None:
    """Fails if accel loads a bfloat16 model with ONNX Runtime, which has no kernels for bfloat16, or if the error for
    this runtime doesn't name a runtime that works."""
    src = _product_in_bfloat16(tmp_path / "m.onnx")
    x = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32)
    low = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    with open_session(src) as session:
        found = session.run({"x": x})["y"]
    assert np.array_equal(found, (low @ low).astype(ml_dtypes.bfloat16).astype(np.float32))
    assert default_runtime(src).name == "onnx-rounded"
    with pytest.raises(UnsupportedHere, match="use the runtime onnx-rounded, or export the model in float32"):
        open_session(src, "onnxruntime")


def _product_in_bfloat16(path: Path) -> Artifact:
    cast = node("Cast", "x", "b", to=TensorProto.BFLOAT16)
    nodes = [cast, node("MatMul", "b b", "p"), node("Cast", "p", "y", to=FLOAT)]
    artifact(path, nodes, {"x": (FLOAT, [3, 3])}, {"y": (FLOAT, [3, 3])})
    return open_onnx(path)
