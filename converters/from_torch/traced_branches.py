"""Finds the branches of a traced model that depend on the values of its inputs.

While the older exporter traces a model, a size such as ``x.shape[0]`` is a tensor. The exporter therefore warns about
a branch on a size, too. The traced graph tells where a tensor comes from.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from .python_numbers import SHAPE_ONLY, users_frame

# Operators whose results have a size that depends on values, although they don't have the tag of torch for this.
_SIZED = ("nonzero_numpy", "combinations", "tensor_split", "_pack_padded_sequence", "_pad_packed_sequence")
# Nodes without operators: they only make or open lists, or turn a number into a tensor.
_PLAIN = ("Constant", "GetAttr", "ListConstruct", "ListUnpack", "NumToTensor", "TupleConstruct", "TupleUnpack")
# Nodes whose results depend on the shape of their argument only.
_SIZES = ("aten::size", "aten::sym_size", "aten::numel", "aten::len", "aten::dim")


@contextlib.contextmanager
def value_branches() -> Iterator[set[tuple[str, int]]]:
    """Within the ``with`` block, collects the files and lines of the branches that depend on values of a traced model's
    inputs, or on a size that depends on these values. A branch on a size of an input isn't collected."""
    from torch.overrides import TorchFunctionMode

    found: set[tuple[str, int]] = set()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") == "__bool__" and _from_values(args[0]):
                frame = users_frame(sys._getframe(1))
                if frame is not None:
                    found.add((frame.f_code.co_filename, frame.f_lineno))
            return func(*args, **(kwargs or {}))

    with Watch():
        yield found


def _from_values(tensor: Any) -> bool:
    """Tells whether a traced tensor depends on values of the graph's inputs. Searches the graph backwards from the
    tensor, once for values and once for shapes."""
    import torch

    traced: Any = torch._C
    if not traced._is_tracing():
        return False
    # Each item of the search is a value of the graph, and tells whether only the value's shape matters.
    pending = [(traced._get_value_trace(tensor), False)]
    seen: set[tuple[int, bool]] = set()
    while pending:
        value, only_shape = pending.pop()
        if (value.unique(), only_shape) in seen:
            continue
        seen.add((value.unique(), only_shape))
        node = value.node()
        space, _, kind = node.kind().partition("::")
        if kind == "Param":
            if not only_shape:
                return True
        elif space == "prim" and kind not in _PLAIN:  # a branch, a loop or a call of TorchScript
            return True
        elif only_shape:
            keeps = kind == "index_put" or (kind.endswith("_") and kind != "resize_")  # the size of the first argument
            given = list(node.inputs())[: 1 if keeps else None]
            pending += [(one, not (_is_sized(node) or _gives_size(one, kind))) for one in given]
        else:
            shape = node.kind() in _SIZES or kind.endswith(SHAPE_ONLY)
            pending += [(one, shape) for one in node.inputs()]
    return False


def _is_sized(node: Any) -> bool:
    """Tells whether the size of the result of ``node`` may depend on values. An operator that isn't torch's own may
    have such a result."""
    import torch

    space, _, name = node.kind().partition("::")
    if space != "aten":
        return bool(space != "prim")
    if name in _SIZED or (name == "where" and node.inputsSize() == 1):
        return True
    overloads = getattr(torch.ops.aten, name, None)
    tags = {tag for one in overloads.overloads() for tag in getattr(overloads, one).tags} if overloads else set()
    return name != "index" and torch.Tag.dynamic_output_shape in tags


def _gives_size(value: Any, kind: str) -> bool:
    """Tells whether the values of ``value`` may decide the size of the result of a node. ``kind`` is the node's kind
    without its namespace. A number may be a size, and a mask in the list of an index selects elements."""
    if "Tensor" not in value.type().annotation_str:
        return True
    return bool(kind == "ListConstruct" and value.type().kind() == "TensorType" and value.type().scalarType() == "Bool")
