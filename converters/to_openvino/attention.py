"""Replaces the attention that an ONNX decoder spells out by OpenVINO's operator, which keeps the cache in its own form.

OpenVINO stores the keys and values with the precision of ``KV_CACHE_PRECISION`` only if its operator reads them. It
ignores the property for attention of products and a softmax, and doesn't say so.
"""

from __future__ import annotations

from typing import Any

# The operations between the keys or values of the cache and their product, if several heads share them.
_REPEATED = ("Reshape", "Broadcast", "Unsqueeze")


def fuse_attention(model: Any) -> int:
    """Replaces ``softmax(scale Q K^T + mask) V`` by ScaledDotProductAttention where K and V come from a variable of the
    ``ov.Model``, and returns the number of replacements. Other attention stays as it is."""
    return sum(_fused(node) for node in model.get_ordered_ops() if node.get_type_name() == "Softmax")


def _fused(softmax: Any) -> bool:
    import openvino.opset13 as opset

    readers = [port.get_node() for port in softmax.output(0).get_target_inputs()]
    if len(readers) != 1 or readers[0].get_type_name() != "MatMul" or not _is_plain(readers[0]):
        return False
    product, rank = readers[0], len(softmax.get_output_partial_shape(0))
    scores, mask = softmax.input_value(0), None
    if softmax.get_axis() not in (-1, rank - 1) or rank != 4 or product.input_value(0).get_node() != softmax:
        return False
    if scores.get_node().get_type_name() == "Add":
        sides = [scores.get_node().input_value(n) for n in (0, 1)]
        scores, mask = sides if _is_product(sides[0]) else sides[::-1]
    scores, scale = _unscaled(scores)
    if scores.get_node().get_type_name() != "MatMul":
        return False
    query, of_query = _unscaled(scores.get_node().input_value(0))
    key, of_key = _unscaled(scores.get_node().input_value(1))
    if not _is_plain(scores.get_node()) or not _swaps_last(key.get_node()):
        return False
    key, of_rows = _unscaled(key.get_node().input_value(0))
    value = product.input_value(1)
    if not (_is_cached(key) and _is_cached(value)):
        return False
    element = query.get_element_type()
    factor = opset.constant(scale * of_query * of_key * of_rows, dtype=element)
    if mask is None:
        mask = opset.constant(0.0, dtype=element)
    fused = opset.scaled_dot_product_attention(query, key, value, mask, factor, causal=False)
    fused.set_friendly_name(product.get_friendly_name())
    product.output(0).replace(fused.output(0))
    return True


def _unscaled(port: Any) -> tuple[Any, float]:
    """Returns the input of a multiplication by a constant and the constant. Returns ``port`` and 1 for anything
    else."""
    node = port.get_node()
    if node.get_type_name() not in ("Multiply", "Divide"):
        return port, 1.0
    for n in (1, 0) if node.get_type_name() == "Multiply" else (1,):
        other = node.input_value(n).get_node()
        if other.get_type_name() == "Constant" and other.get_data().size == 1:
            factor = float(other.get_data().reshape(-1)[0])
            return node.input_value(1 - n), factor if node.get_type_name() == "Multiply" else 1 / factor
    return port, 1.0


def _is_product(port: Any) -> bool:
    return bool(_unscaled(port)[0].get_node().get_type_name() == "MatMul")


def _is_plain(product: Any) -> bool:
    """Tells whether a matrix product transposes none of its inputs."""
    given = product.get_attributes()
    return not given["transpose_a"] and not given["transpose_b"]


def _swaps_last(node: Any) -> bool:
    if node.get_type_name() != "Transpose" or node.input_value(1).get_node().get_type_name() != "Constant":
        return False
    return bool(node.input_value(1).get_node().get_data().tolist() == [0, 1, 3, 2])


def _is_cached(port: Any) -> bool:
    """Tells whether keys or values are those of a variable with the new ones behind them, repeated for the heads that
    share them."""
    node = port.get_node()
    while node.get_type_name() in _REPEATED:
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Concat":
        return False
    past = node.input_value(0).get_node()
    return bool(past.get_type_name() == "Gather" and past.input_value(0).get_node().get_type_name() == "ReadValue")
