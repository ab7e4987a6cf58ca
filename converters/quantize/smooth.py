"""Smooths models: moves outliers from activations into weights before the quantization.

The activations of a transformer have a few channels that are many times larger than the others. With one scale for all
channels, the small channels use only a few of the int8 values. Smoothing divides channel j of a product's input by s_j,
and multiplies row j of the weights by s_j. In exact arithmetic, the product's result doesn't change. The factors s_j =
max|X_j|^alpha / max|W_j|^(1-alpha) make the ranges of the channels more even (SmoothQuant, arXiv 2211.10438, eq. 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from accel.runtimes.onnx_rounded import RoundedModel
from accel.sources.onnx.weights import weight_array

from .calibrate import Batches, collect

_SMALLEST = 1e-5


def smooth(
    model: onnx.ModelProto,
    ops: tuple[str, ...],
    excluded: set[str],
    batches: Batches,
    alpha: float,
    unfinished: Path | None = None,
) -> int:
    """Smooths ``model`` in place, and returns the number of smoothed activations.

    All products that read the same activation share smoothing factors. If a layer normalization produces the
    activation, and no other node reads the activation, the factors are folded into the layer normalization. For
    ``batches`` and ``unfinished``, see ``collect``.
    """
    weights = {t.name: t for t in model.graph.initializer}
    readers: dict[str, list[NodeProto]] = {}
    users: dict[str, int] = {}
    for node in model.graph.node:
        for name in node.input:
            users[name] = users.get(name, 0) + 1
        if node.op_type in ops and node.name not in excluded and _rows_axis(node, weights) is not None:
            readers.setdefault(node.input[0], []).append(node)
    outputs = {value.name for value in model.graph.output}
    channels = _Channels(model, list(readers))
    collect(channels, batches, unfinished)
    ranges = {name: value for name, value in channels.largest.items() if np.isfinite(value).all()}
    makers = {n.output[0]: n for n in model.graph.node if n.op_type == "LayerNormalization"}
    done = 0
    for name, largest in ranges.items():
        products = readers[name]
        factors = _factors(largest, [_rows(node, weights) for node in products], alpha)
        if factors is None:
            continue
        for node in products:
            _scale_rows(model, node, weights, factors)
        free = users[name] == len(products) and name not in outputs
        if not (free and name in makers and _fold(model, makers[name], weights, factors)):
            _insert(model, name, products, factors)
        done += 1
    return done


def _rows_axis(node: NodeProto, weights: Mapping[str, onnx.TensorProto]) -> int | None:
    """Returns the axis of the weights that the product sums over.

    Returns None if ``node`` is not a product with a constant matrix. Also returns None if the product transposes the
    activation.
    """
    if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in weights:
        return None
    if len(weights[node.input[1]].dims) != 2:
        return None
    flags = {a.name: a.i for a in node.attribute}
    return None if flags.get("transA") else int(flags.get("transB", 0))


def _rows(node: NodeProto, weights: Mapping[str, onnx.TensorProto]) -> np.ndarray:
    """Returns the largest absolute weight of each row."""
    axis = _rows_axis(node, weights)
    return np.asarray(np.abs(weight_array(weights[node.input[1]])).max(axis=1 - (axis or 0)))


class _Channels:
    """Collects the largest absolute value of each channel (last axis) of each tensor, over all batches."""

    def __init__(self, model: onnx.ModelProto, names: list[str]) -> None:
        self._plain = RoundedModel(model)
        self._inner = [name for name in names if name in self._plain.tensors]
        self.largest: dict[str, np.ndarray] = {}

    def add(self, feeds: Mapping[str, np.ndarray]) -> None:
        for name, value in self._plain.run(feeds, self._inner).items():
            largest = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0, initial=0.0)
            self.largest[name] = np.maximum(self.largest[name], largest) if name in self.largest else largest

    def state(self) -> dict[str, np.ndarray]:
        return dict(self.largest)

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self.largest = dict(state)


def _factors(largest: np.ndarray, rows: list[np.ndarray], alpha: float) -> np.ndarray | None:
    weight = np.maximum.reduce(rows)
    if weight.shape != largest.shape:
        return None
    activation = np.maximum(largest.astype(np.float64), _SMALLEST)
    factors = activation**alpha / np.maximum(weight.astype(np.float64), _SMALLEST) ** (1 - alpha)
    return np.asarray(np.maximum(factors, _SMALLEST), np.float32)


def _scale_rows(
    model: onnx.ModelProto, node: NodeProto, weights: dict[str, onnx.TensorProto], factors: np.ndarray
) -> None:
    axis = _rows_axis(node, weights)
    old = weights[node.input[1]]
    scaled = weight_array(old) * (factors[None, :] if axis == 1 else factors[:, None])
    shared = sum(old.name in n.input for n in model.graph.node) > 1
    if not shared:
        old.CopyFrom(numpy_helper.from_array(scaled, old.name))
        return
    new = model.graph.initializer.add()  # another node that shares the weights keeps the unscaled weights
    new.CopyFrom(numpy_helper.from_array(scaled, f"{old.name}/{node.name}"))
    weights[new.name] = new
    node.input[1] = new.name


def _fold(
    model: onnx.ModelProto, norm: NodeProto, weights: Mapping[str, onnx.TensorProto], factors: np.ndarray
) -> bool:
    """Divides the scale and bias of a layer normalization by ``factors``, and returns whether the division was
    possible.

    The division is impossible if another node reads the scale or bias, or if the normalization is not along the last
    axis.
    """
    own = [name for name in norm.input[1:] if name]
    axis = next((a.i for a in norm.attribute if a.name == "axis"), -1)
    if axis != -1 or any(name not in weights or list(weights[name].dims) != [factors.size] for name in own):
        return False
    if any(sum(name in n.input for n in model.graph.node) > 1 for name in own):
        return False
    for name in own:
        weights[name].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights[name]) / factors, name))
    return True


def _insert(model: onnx.ModelProto, name: str, products: list[NodeProto], factors: np.ndarray) -> None:
    """Inserts a multiplication by 1 / ``factors`` before the products."""
    constant, smoothed = f"{name}/smoothing", f"{name}/smoothed"
    model.graph.initializer.append(numpy_helper.from_array(1 / factors, constant))
    place = min(index for index, node in enumerate(model.graph.node) if any(node is p for p in products))
    node = helper.make_node("Mul", [name, constant], [smoothed], name=smoothed)
    for product in products:
        product.input[0] = smoothed
    model.graph.node.insert(place, node)
