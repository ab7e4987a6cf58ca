"""Proves that torch's NaN guard after softmax is removed only if the guard can't change an output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from accel.artifact import Artifact
from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig, openvino_from_onnx
from accel.runtimes.base import SessionOptions, open_session
from tests.support.cpu_features import has_bf16
from tests.support.onnx_builder import FLOAT, artifact, node

pytest.importorskip("openvino")

LOWEST = np.finfo(np.float32).min
BOOL = onnx.TensorProto.BOOL


def attention(path: Path, mask: str, scores: str = "MatMul") -> Artifact:
    """Makes a model with ``softmax(q @ k + mask)`` and torch's NaN guard. If ``mask`` is "input", the mask is an input
    of the model. If ``mask`` is "lowest", the model adds the lowest float32 number to each hidden score. If ``mask`` is
    "-inf", the model adds -inf to each hidden score. A score is hidden if the input ``seen`` is false."""
    nodes = [
        node("MatMul", "q k", "product"),
        node("Identity" if scores == "MatMul" else scores, "product", "scores"),
        node("Where", "seen zero low", "chosen") if mask != "input" else node("Identity", "given", "chosen"),
        node("Add", "scores chosen", "masked"),
        node("Softmax", "masked", "p", axis=-1),
        node("IsNaN", "p", "nan"),
        node("Where", "nan zero p", "guarded"),
        node("MatMul", "guarded v", "y"),
    ]
    matrix = (FLOAT, ["batch", 4, 4])
    last = {"given": matrix} if mask == "input" else {"seen": (BOOL, ["batch", 4, 4])}
    constants = {"zero": np.float32(0)}
    if mask != "input":
        constants["low"] = np.float32(LOWEST if mask == "lowest" else -np.inf)
    return artifact(
        path, nodes, {"q": matrix, "k": matrix, "v": matrix, **last}, {"y": (FLOAT, ["batch", 4, 4])}, constants
    )


def convert(src: Artifact, folder: Path) -> tuple[Artifact, int]:
    made = openvino_from_onnx(src, OpenVinoFromOnnxConfig(), folder / "model.xml")
    return made, made.notes["softmax_guards_removed"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_guard_that_cannot_act_goes_and_a_row_that_sees_nothing_stays_the_same(
    precision: str, tmp_path: Path
) -> None:
    """Checks that a guard without effect is removed, because any guard prevents fused attention. Also fails if the
    lowest float32 number in the mask becomes -inf in bfloat16, because the outputs would then be NaN."""
    if precision == "bf16" and not has_bf16():
        pytest.skip("this CPU has no bfloat16")
    src = attention(tmp_path / "a.onnx", "lowest")
    made, removed = convert(src, tmp_path)
    assert removed == 1
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 4, 4)).astype(np.float32) - 40 for name in ("q", "k", "v")}
    feeds["seen"] = rng.integers(0, 2, (2, 4, 4)).astype(bool)
    feeds["seen"][0, 1] = False
    with open_session(src) as session:
        wanted = session.run(feeds)["y"]
    with open_session(made, options=SessionOptions(precision=precision)) as session:
        got = session.run(feeds)["y"]
    np.testing.assert_allclose(got, wanted, rtol=0.02 if precision == "bf16" else 1e-5)


@pytest.mark.parametrize(("mask", "scores"), [("-inf", "MatMul"), ("input", "MatMul"), ("lowest", "Log")])
def test_a_guard_that_can_act_stays(mask: str, scores: str, tmp_path: Path) -> None:
    """Fails if the guard is removed although the mask or the scores may be -inf. Without the guard, a row in which the
    mask hides every position is NaN."""
    src = attention(tmp_path / "a.onnx", mask, scores)
    made, removed = convert(src, tmp_path)
    assert removed == 0
    feeds = {name: np.ones((1, 4, 4), np.float32) for name in ("q", "k", "v")}
    nothing = np.full((1, 4, 4), -np.inf, np.float32) if mask == "input" else np.zeros((1, 4, 4), bool)
    feeds |= {"given" if mask == "input" else "seen": nothing}
    if scores == "Log":
        feeds["q"] = np.zeros((1, 4, 4), np.float32)
    with open_session(made) as session:
        assert np.all(session.run(feeds)["y"] == 0)
