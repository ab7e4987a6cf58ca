"""Gives ONNX translations of TensorFlow's operators that tf2onnx leaves out or translates wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def translations() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Returns the table ``custom_op_handlers`` of tf2onnx. Runs in the TensorFlow process."""
    return {"Bucketize": (_bucketize, []), "FloorDiv": (_floor_div, []), "FloorMod": (_floor_mod, [])}


def _is_signed(graph: Any, node: Any) -> bool:
    from onnx import TensorProto

    return graph.get_dtype(node.input[0]) in (TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64)


def _floor_div(graph: Any, node: Any, name: str, _: Any) -> None:
    """Rounds the quotient of integers down. ONNX's Div rounds it towards zero, as tf2onnx leaves it."""
    import numpy as np
    from onnx import helper
    from tf2onnx.onnx_opset.math import FloorDiv

    if not _is_signed(graph, node):
        FloorDiv.version_6(graph, node)
        return
    (over, under), kept = node.input, node.output
    dtype = graph.get_dtype(over)
    shapes, dtypes = [graph.get_shape(kept[0])], [dtype]
    zero = graph.make_const(f"{name}/zero", np.zeros((), helper.tensor_dtype_to_np_dtype(dtype))).output[0]
    graph.remove_node(node.name)

    def made(kind: str, *inputs: str, **attributes: Any) -> str:
        output: str = graph.make_node(kind, list(inputs), attr=attributes).output[0]
        return output

    quotient = made("Div", over, under)
    whole = made("Equal", made("Mod", over, under), zero)
    same_sign = made("Not", made("Xor", made("Less", over, zero), made("Less", under, zero)))
    less = made("Cast", made("Not", made("Or", whole, same_sign)), to=dtype)
    graph.make_node("Sub", [quotient, less], outputs=kept, shapes=shapes, dtypes=dtypes, name=name)


def _floor_mod(graph: Any, node: Any, name: str, _: Any) -> None:
    """Gives the remainder of integers the sign of the divisor, as ONNX's Mod does. tf2onnx gives it that of the
    dividend."""
    from tf2onnx.onnx_opset.math import FloorMod

    if not _is_signed(graph, node):
        FloorMod.version_7(graph, node)
        return
    inputs, kept = list(node.input), node.output
    shapes, dtypes = [graph.get_shape(kept[0])], [graph.get_dtype(kept[0])]
    graph.remove_node(node.name)
    graph.make_node("Mod", inputs, outputs=kept, shapes=shapes, dtypes=dtypes, name=name)


def _bucketize(graph: Any, node: Any, name: str, _: Any) -> None:
    """Counts the boundaries that aren't above each value, as TensorFlow's bucketize_op.cc does with ``upper_bound``.
    NaN is above all boundaries."""
    import numpy as np
    from onnx import TensorProto

    values, kept = node.input[0], node.output
    dtype = graph.get_dtype(values)
    if dtype not in (TensorProto.FLOAT, TensorProto.DOUBLE):
        # TensorFlow compares integers with the boundaries as float32 too.
        values, dtype = graph.make_node("Cast", [values], attr={"to": TensorProto.FLOAT}).output[0], TensorProto.FLOAT
    found = np.asarray(node.get_attr_value("boundaries"), np.float32)
    found = found.astype(np.float64 if dtype == TensorProto.DOUBLE else np.float32)
    boundaries = graph.make_const(f"{name}/boundaries", found).output[0]
    last = graph.make_const(f"{name}/last", np.array([-1], np.int64)).output[0]
    shapes, dtypes = [graph.get_shape(kept[0])], [graph.get_dtype(kept[0])]
    graph.remove_node(node.name)
    below = graph.make_node("Less", [graph.make_node("Unsqueeze", [values, last]).output[0], boundaries]).output[0]
    counted = graph.make_node(
        "Cast", [graph.make_node("Not", [below]).output[0]], attr={"to": TensorProto.INT32}
    ).output[0]
    graph.make_node(
        "ReduceSum", [counted, last], attr={"keepdims": 0}, outputs=kept, shapes=shapes, dtypes=dtypes, name=name
    )
