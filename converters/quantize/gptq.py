"""Quantizes the weights of large products to 4 bits with GPTQ, for ONNX Runtime's MatMulNBits.

GPTQ rounds one input channel after the other, and changes the channels that are still float so that the product of real
activations changes least. Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022, algorithm 1. The GPTQ in onnxruntime.quantization 1.31 reads the wrong triangle of the Cholesky
factor, so it compensates no error, and it finds the scales again after rounding. ``quantize`` runs this module in a
child process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx

from accel.progress import report
from accel.sources.onnx.weights import weight_array

from ..graph.write import write_onnx
from .nbits import add_weights, block_scales, finish, replace_product
from .stage import Task
from .texts import observed
from .weights import chosen_products

# The products are treated in groups whose sums of activations together take at most this many bytes. The texts run once
# for each group.
_SUMS_BYTES = 1 << 30
# The share of the mean square of the activations that is added to the square of each channel.
_DAMPING = 0.01
_BITS = 4
_LOWEST, _HIGHEST = -8, 7
# The errors of this many channels are carried over to the later channels at once.
_AT_ONCE = 128


def run_gptq(task: Task) -> dict[str, Any]:
    """Quantizes the weights with one float32 scale for every ``block_size`` weights of a column, without zero points.
    Returns the notes."""
    model = onnx.load(str(task.path))
    nodes = chosen_products(model, task)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    made: dict[str, list[str]] = {}
    done, block = 0, task.config.block_size
    for group in _groups(nodes, tensors):
        sums = _sums(model, sorted({node.input[0] for node in group}), task)
        for node in group:
            report(f"GPTQ, product {done + 1} of {len(nodes)}", done / len(nodes))
            done += 1
            source, weight = node.input[0], node.input[1]
            if weight not in made:
                steps, scales = rounded(weight_array(tensors[weight]), sums[source], block)
                made[weight] = add_weights(model, weight, steps, scales, _BITS, block)
            replace_product(node, made[weight], tensors[weight].dims, _BITS, block)
    finish(model, list(made))
    write_onnx(model, task.out)
    return {"block_size": block, "damping": _DAMPING}


def _groups(nodes: Sequence[onnx.NodeProto], tensors: dict[str, onnx.TensorProto]) -> Iterator[list[onnx.NodeProto]]:
    """Yields the products in groups of limited size. Products of the same activations stay together."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        found.setdefault(node.input[0], []).append(node)
    group: list[onnx.NodeProto] = []
    size = 0
    for together in found.values():
        needed = 4 * tensors[together[0].input[1]].dims[0] ** 2
        if group and size + needed > _SUMS_BYTES:
            yield group
            group, size = [], 0
        group = [*group, *together]
        size += needed
    if group:
        yield group


def _sums(model: onnx.ModelProto, names: Sequence[str], task: Task) -> dict[str, np.ndarray]:
    """Returns the sum of x xᵀ over all tokens of the texts for each tensor, where x holds a token's channels."""
    found: dict[str, np.ndarray] = {}
    for tensors in observed(model, names, task):
        for name, value in tensors.items():
            rows = value.reshape(-1, value.shape[-1]).astype(np.float32)
            found[name] = found.get(name, 0) + rows.T @ rows
    return found


def rounded(weights: np.ndarray, sums: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns 4-bit integers [inputs, outputs] from -8 to 7, and the scales [blocks, outputs] of blocks of ``block``
    inputs, for the weights [inputs, outputs]. ``sums`` [inputs, inputs] is the sum of x xᵀ over the activations x."""
    count, outputs = weights.shape
    left = weights.astype(np.float32)
    factor = _factor(sums)
    steps = np.zeros((count, outputs), np.int8)
    scales = np.ones((-(-count // block), outputs), np.float32)
    at_once = max(_AT_ONCE, block)
    for start in range(0, count, at_once):
        end = min(start + at_once, count)
        part = left[start:end]
        errors = np.zeros_like(part)
        for row in range(end - start):
            channel = start + row
            if channel % block == 0:
                importance = 1 / np.diag(factor)[channel : channel + block] ** 2
                scales[channel // block] = block_scales(part[row : row + block], _BITS, importance)
            scale = scales[channel // block]
            steps[channel] = np.clip(np.rint(part[row] / scale), _LOWEST, _HIGHEST)
            errors[row] = (part[row] - steps[channel] * scale) / factor[channel, channel]
            part[row + 1 :] -= np.outer(factor[channel, channel + 1 : end], errors[row])
        left[end:] -= factor[start:end, end:].T @ errors
    return steps, scales


def _factor(sums: np.ndarray) -> np.ndarray:
    """Returns the upper triangle U of the inverse UᵀU of the damped sums. A channel that is always 0 changes no other
    channel."""
    square = sums.astype(np.float64)
    diagonal = np.diag(square).copy()
    square[np.diag_indices_from(square)] += _DAMPING * diagonal.mean() + np.where(diagonal == 0, 1.0, 0.0)
    found: np.ndarray = np.linalg.cholesky(np.linalg.inv(square)).T.astype(np.float32)
    return found
