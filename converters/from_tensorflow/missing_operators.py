"""Gives ONNX translations of TensorFlow's operators that tf2onnx leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def translations() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Returns the table ``custom_op_handlers`` of tf2onnx. Runs in the TensorFlow process."""
    return {"Bucketize": (_bucketize, [])}


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
