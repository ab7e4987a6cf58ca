"""Quantizes products to int8 at run time, but multiplies the outlier columns of the activations in float32.

Some columns of a transformer's activations are many times larger than the others. With one scale for all columns, the
others get only a few of the int8 values, or round to 0. The product with the outlier columns is therefore computed
apart, and both results are added. Source: Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at
Scale", 2022, section 3.2. ``quantize`` runs this module in a child process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from accel.sources.onnx.file import read_proto
from accel.sources.onnx.weights import weight_array

from ...graph.write import write_onnx
from ..products import layers_to_quantize
from ..stage import QuantizeFailed, Task
from ..texts import observed, texts_or_samples
from .plain import run_dynamic

# A column is an outlier if its largest value is this many times that of the median column.
_TIMES = 6.0
# At most this share of the columns of an activation is computed in float32, the largest ones.
_MOST = 1 / 16


def run_outliers(task: Task) -> dict[str, Any]:
    """Splits each product whose activations have outlier columns, and quantizes the rest as ``run_dynamic`` does.

    The columns are those of the largest values on the samples or texts in the config's ``data``. Raises
    ``QuantizeFailed`` if no product has an outlier column.
    """
    model = read_proto(task.path, weights=True)
    ops = tuple(op for op in ("MatMul", "Gemm") if op in (task.config.ops or ("MatMul", "Gemm")))
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = [one for one in layers_to_quantize(model, task.excluded, ops) if _is_plain(one, weights)]
    columns = _outliers(model, sorted({node.input[0] for node in nodes}), task)
    split = [node for node in nodes if node.input[0] in columns]
    if not split:
        raise QuantizeFailed(
            f"no column of an activation is {_TIMES:g} times as large as the others, so outlier columns change "
            "nothing; use the mode dynamic"
        )
    apart = _split(model, split, columns, weights)
    path = task.path.with_name("split.onnx")
    write_onnx(model, path)
    run_dynamic(replace(task, path=path, excluded=(*task.excluded, *apart)))
    return {"outlier_columns": sum(map(len, columns.values())), "split_products": len(split)}


def _is_plain(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> bool:
    """Tells whether ``node`` multiplies the last axis of its activation by a matrix, without a factor."""
    numbers = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    return len(weights[node.input[1]].dims) == 2 and not numbers.get("transA") and numbers.get("alpha", 1.0) == 1.0


def _outliers(model: onnx.ModelProto, names: Sequence[str], task: Task) -> dict[str, np.ndarray]:
    """Returns the outlier columns of each activation that has some."""
    largest: dict[str, np.ndarray] = {}
    for values in observed(model, names, task, texts_or_samples(task)):
        for name, value in values.items():
            found = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0, initial=0.0)
            largest[name] = np.maximum(largest.get(name, 0.0), found)
    columns = {name: outlier_columns(value) for name, value in largest.items()}
    return {name: value for name, value in columns.items() if len(value)}


def outlier_columns(largest: np.ndarray) -> np.ndarray:
    """Returns the numbers of the outlier columns, in order. ``largest`` has the largest absolute value of each
    column."""
    over = np.flatnonzero(largest > _TIMES * np.median(largest))
    most = max(1, int(len(largest) * _MOST))
    return np.sort(over[np.argsort(-largest[over], kind="stable")][:most])


def _split(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    columns: Mapping[str, np.ndarray],
    weights: Mapping[str, onnx.TensorProto],
) -> list[str]:
    """Lets ``nodes`` read their activations without the outlier columns, and adds the products with these columns.
    Returns the names of the added products."""
    after: dict[int, list[onnx.NodeProto]] = {}
    before: dict[int, list[onnx.NodeProto]] = {}
    seen: set[str] = set()
    added = []
    for node in nodes:
        source, outlying = node.input[0], columns[node.input[0]]
        inner, large = f"{source}/inner", f"{source}/outliers"
        if source not in seen:
            seen.add(source)
            kept = np.ones(weights[node.input[1]].dims[1 if _turned(node) else 0], np.float32)
            kept[outlying] = 0
            _constant(model, f"{inner}/kept", kept)
            _constant(model, f"{large}/columns", outlying.astype(np.int64))
            before[id(node)] = [
                helper.make_node("Mul", [source, f"{inner}/kept"], [inner], name=inner),
                helper.make_node("Gather", [source, f"{large}/columns"], [large], name=large, axis=-1),
            ]
        matrix = weight_array(weights[node.input[1]])
        name = f"{node.name}/outliers"
        _constant(model, f"{name}/weights", np.ascontiguousarray((matrix.T if _turned(node) else matrix)[outlying]))
        result = node.output[0]
        node.input[0], node.output[0] = inner, f"{result}/inner"
        after[id(node)] = [
            helper.make_node("MatMul", [large, f"{name}/weights"], [f"{result}/outliers"], name=name),
            helper.make_node("Add", [node.output[0], f"{result}/outliers"], [result], name=f"{node.name}/sum"),
        ]
        added.append(name)
    own = list(model.graph.node)
    placed = [one for node in own for one in (*before.get(id(node), ()), node, *after.get(id(node), ()))]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in placed]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    return added


def _turned(node: onnx.NodeProto) -> bool:
    return any(one.name == "transB" and one.i for one in node.attribute)


def _constant(model: onnx.ModelProto, name: str, value: np.ndarray) -> None:
    model.graph.initializer.append(numpy_helper.from_array(value, name))
