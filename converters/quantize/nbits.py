"""Rounds weights in blocks, and writes them for ONNX Runtime's MatMulNBits.

A block of weights of a column has one scale. The quantizer of onnxruntime takes the scale at which the largest weight
is exact. Here each block tries several scales, and each scale is then fitted to the rounded weights, which loses less
and costs nothing at run time. llama.cpp finds the scales of its k-quants in the same way (``make_qx_quants`` in
ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from accel.machine import available_cores

# The accuracy level of MatMulNBits is the dtype to which the operator may round blocks of activations. Level 4 means
# int8, for which CPUs have instructions.
ACCURACY_LEVEL = 4
# The steps that the largest weight of a block is away from 0, beside the largest number of steps. With 8 bits, all of
# them lose the same.
_STRETCHED = {4: (0.0, -1.2, -0.9, -0.6, -0.3, 0.3, 0.6, 0.9), 8: (0.0,)}
# The weights that are rounded at once, so that all arrays of the search stay in the cache of a core.
_AT_ONCE = 1 << 15


def block_scales(block: np.ndarray, bits: int, importance: np.ndarray | None = None) -> np.ndarray:
    """Returns a scale for each column of ``block`` [inputs, outputs], so that integers of ``bits`` bits times the scale
    have the least squared error. ``importance`` [inputs] weighs the squares."""
    lowest = -(2 ** (bits - 1))
    largest = np.take_along_axis(block, np.abs(block).argmax(axis=0)[None], axis=0)[0]
    found = np.where(largest == 0, np.float32(1), largest / np.float32(lowest)).astype(np.float32)
    safe = np.where(largest == 0, np.float32(1), largest)
    weighed = block if importance is None else block * _column(importance)
    best = np.full(block.shape[1], -1.0, np.float32)
    for stretch in _STRETCHED[bits]:
        steps = block * (np.float32(lowest - stretch) / safe)
        np.rint(steps, out=steps)
        np.clip(steps, lowest, -lowest - 1, out=steps)
        fitting = (weighed * steps).sum(axis=0)
        length = ((steps if importance is None else steps * _column(importance)) * steps).sum(axis=0)
        # The scale fitting / length has the error |block|^2 - fitting^2 / length.
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = fitting / length
            kept = fitting * scale
        better = (kept > best) & np.isfinite(scale) & (scale != 0)
        best, found = np.where(better, kept, best), np.where(better, scale, found)
    return found


def _column(importance: np.ndarray) -> np.ndarray:
    return importance[:, None].astype(np.float32)


def rounded_blocks(weights: np.ndarray, bits: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns integers [inputs, outputs] of ``bits`` bits from the lowest to the highest, and the scales [blocks,
    outputs] of blocks of ``size`` inputs, for the weights [inputs, outputs]."""
    inputs, outputs = weights.shape
    blocks, columns = -(-inputs // size), max(1, _AT_ONCE // size)
    steps = np.zeros((inputs, outputs), np.int8)
    scales = np.ones((blocks, outputs), np.float32)

    def round_columns(first: int) -> None:
        part = slice(first, first + columns)
        for number in range(blocks):
            rows = slice(number * size, (number + 1) * size)
            block = np.ascontiguousarray(weights[rows, part], np.float32)
            scales[number, part] = block_scales(block, bits)
            highest = 2 ** (bits - 1) - 1
            steps[rows, part] = np.clip(np.rint(block / scales[number, part]), -highest - 1, highest)

    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(round_columns, range(0, outputs, columns)))
    return steps, scales


def add_weights(
    model: onnx.ModelProto, name: str, steps: np.ndarray, scales: np.ndarray, bits: int, size: int
) -> list[str]:
    """Adds integers [inputs, outputs] and their scales [blocks, outputs] to the model, in the form of MatMulNBits.
    Returns their names."""
    blocks, outputs = scales.shape
    padded = np.zeros((outputs, blocks * size), np.int8)
    padded[:, : len(steps)] = steps.T
    unsigned = (padded.reshape(outputs, blocks, size).astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    arrays = {
        f"{name}/int{bits}": unsigned[..., ::2] | (unsigned[..., 1::2] << 4) if bits == 4 else unsigned,
        f"{name}/scales": np.ascontiguousarray(scales.T),
    }
    model.graph.initializer.extend(numpy_helper.from_array(array, own) for own, array in arrays.items())
    return list(arrays)


def replace_product(node: onnx.NodeProto, made: Sequence[str], dims: Sequence[int], bits: int, size: int) -> None:
    """Turns the product ``node`` with weights of the size ``dims`` into a MatMulNBits of the weights ``made``."""
    inputs, outputs = dims
    sizes: dict[str, Any] = {"K": inputs, "N": outputs, "bits": bits, "block_size": size}
    node.CopyFrom(
        helper.make_node(
            "MatMulNBits", [node.input[0], *made], list(node.output), name=node.name, domain="com.microsoft", **sizes,
            accuracy_level=ACCURACY_LEVEL,
        )
    )  # fmt: skip


def finish(model: onnx.ModelProto, replaced: Sequence[str]) -> None:
    """Removes the float weights ``replaced`` that no node reads any more, and declares the domain of MatMulNBits."""
    read = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in replaced or tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    if not any(entry.domain == "com.microsoft" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
