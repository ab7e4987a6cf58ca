"""Proves that the scales of blocks lose less than the scale of the largest weight, and that MatMulNBits reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from accel.converters.quantize.nbits import add_weights, block_scales, finish, replace_product, rounded_blocks


def _restored(steps: np.ndarray, scales: np.ndarray, size: int) -> np.ndarray:
    return steps * np.repeat(scales, size, axis=0)[: len(steps)]


def _error(weights: np.ndarray, steps: np.ndarray, scales: np.ndarray, size: int) -> float:
    return float(np.square(_restored(steps, scales, size) - weights).sum())


@given(
    st.integers(1, 140), st.integers(1, 5), st.sampled_from([16, 32, 128]), st.sampled_from([4, 8]), st.integers(0, 99)
)
def test_no_block_loses_more_than_with_the_scale_of_its_largest_weight(
    inputs: int, outputs: int, size: int, bits: int, seed: int
) -> None:
    """Fails if a worse scale is taken, a step leaves its range, or zeros, an odd size or huge weights break it."""
    draw = np.random.default_rng(seed)
    weights = (draw.standard_normal((inputs, outputs)) * 10.0 ** draw.integers(-6, 7, outputs)).astype(np.float32)
    weights[:, 0] *= seed % 3  # sometimes zeros
    steps, scales = rounded_blocks(weights, bits, size)
    lowest = -(2 ** (bits - 1))
    assert np.isfinite(scales).all()
    assert ((steps >= lowest) & (steps <= -lowest - 1)).all()
    padded = np.zeros((len(scales) * size, outputs), np.float32)
    padded[:inputs] = weights
    blocks = padded.reshape(len(scales), size, outputs)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)[:, 0]
    usual = np.where(largest == 0, np.float32(1), largest / np.float32(lowest))
    plain = np.clip(np.rint(padded / np.repeat(usual, size, axis=0)), lowest, -lowest - 1)
    for column in range(outputs):
        own, other = weights[:, [column]], padded[:, [column]]
        least = _error(other, plain[:, [column]], usual[:, [column]], size)
        assert _error(own, steps[:, [column]], scales[:, [column]], size) <= least * 1.001


def test_four_bits_lose_a_tenth_less() -> None:
    """Fails if only the scale of the largest weight is tried. An 8th of the error of normal weights goes."""
    weights = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    blocks = weights.reshape(16, 32, 64)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)[:, 0] / np.float32(-8)
    plain = np.clip(np.rint(weights / np.repeat(largest, 32, axis=0)), -8, 7)
    assert _error(weights, *rounded_blocks(weights, 4, 32), 32) < 0.9 * _error(weights, plain, largest, 32)


def test_important_inputs_lose_less() -> None:
    """Fails if the importance of the inputs is left out."""
    draw = np.random.default_rng(1)
    block, importance = draw.standard_normal((32, 200)).astype(np.float32), np.geomspace(1, 1e4, 32)

    def lost(scales: np.ndarray) -> float:
        wrong = block - np.clip(np.rint(block / scales), -8, 7) * scales
        return float((importance[:, None] * wrong**2).sum())

    assert lost(block_scales(block, 4, importance)) < 0.9 * lost(block_scales(block, 4))


@pytest.mark.parametrize(("bits", "inputs"), [(4, 96), (4, 70), (8, 64), (8, 70)])
def test_onnx_runtime_reads_the_weights(bits: int, inputs: int, tmp_path: Path) -> None:
    """Fails if the nibbles, the zero point or the padding of the last block are wrong, for a scale of either sign."""
    weights = np.random.default_rng(2).standard_normal((inputs, 48)).astype(np.float32)
    steps, scales = rounded_blocks(weights, bits, 32)
    assert scales.min() < 0 < scales.max()
    product = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    graph = helper.make_graph(
        [product],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 48])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    made = add_weights(model, "w", steps, scales, bits, 32)
    replace_product(model.graph.node[0], made, (inputs, 48), bits, 32)
    for attribute in model.graph.node[0].attribute:
        attribute.i = 0 if attribute.name == "accuracy_level" else attribute.i  # float32 activations
    finish(model, ["w"])
    assert [tensor.name for tensor in model.graph.initializer] == made
    onnx.save(model, str(tmp_path / "m.onnx"))
    x = np.random.default_rng(3).standard_normal((5, inputs)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    np.testing.assert_allclose(found, x @ _restored(steps, scales, 32), rtol=1e-4, atol=1e-4)
