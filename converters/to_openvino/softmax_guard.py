"""Removes the guards against NaN after softmax from an OpenVINO model, if the softmax can't give NaN."""

from __future__ import annotations

from typing import Any

# These operators give finite numbers for finite inputs if no number overflows.
_ARITHMETIC = frozenset({"Add", "Subtract", "Multiply", "MatMul"})
_MOVEMENT = frozenset(
    {
        "Broadcast", "Convert", "Gather", "GatherND", "Identity", "Reshape", "Slice", "Squeeze", "StridedSlice",
        "Transpose", "Unsqueeze",
    }
)  # fmt: skip
_FRACTIONS = frozenset({"f16", "bf16", "f32", "f64"})


def remove_softmax_guards(model: Any) -> int:
    """Replaces ``Select(IsNaN(s), 0, s)`` by ``s`` for every softmax ``s`` whose input can't be infinite.

    Returns the number of removed guards. PyTorch's exporter adds a guard after each softmax, because a row that has
    only -inf gives NaN. With a finite mask, such as the dtype's lowest number in transformers, no row gives NaN.
    OpenVINO fuses an attention into one kernel only if the attention has no guard.

    Also clips the mask to the range of bfloat16, so that the mask is finite in bfloat16, too. The clipped mask doesn't
    change the softmax in float32 if the scores are below 1e30.
    """
    count = 0
    for guard in model.get_ordered_ops():
        softmax = _guarded(guard)
        masks: list[Any] = []
        if softmax is None or not _finite(softmax.input_value(0), masks):
            continue
        for mask in masks:
            _lift(mask)
        guard.output(0).replace(softmax.output(0))
        count += 1
    if count:
        model.validate_nodes_and_infer_types()
    return count


def _guarded(op: Any) -> Any | None:
    """Returns the softmax that the guard ``op`` protects, or None if ``op`` is not a softmax guard."""
    if op.get_type_name() != "Select":
        return None
    condition, replacement, value = (op.input_value(i).get_node() for i in range(3))
    if condition.get_type_name() != "IsNaN" or value.get_type_name() != "Softmax":
        return None
    same = condition.input_value(0).get_node() == value
    zero = replacement.get_type_name() == "Constant" and not replacement.data.any()
    return value if same and zero else None


def _finite(output: Any, masks: list[Any]) -> bool:
    """Checks whether the tensor ``output`` is finite for finite activations. Adds constants beyond the range of
    bfloat16 to ``masks``."""
    import numpy as np

    seen: set[str] = set()
    open_ends = [output]
    while open_ends:
        node = open_ends.pop().get_node()
        kind = node.get_type_name()
        if node.get_friendly_name() in seen or node.get_output_element_type(0).get_type_name() not in _FRACTIONS:
            continue
        seen.add(node.get_friendly_name())
        inputs = [node.input_value(i) for i in range(node.get_input_size())]
        if kind == "Constant":
            if not np.isfinite(node.data).all():
                return False
            if np.abs(node.data).max(initial=0) > _BF16_MAX:
                masks.append(node)
        elif kind == "MatMul":
            continue  # this product computes the attention scores, which are infinite only after an overflow
        elif kind in _ARITHMETIC:
            open_ends += inputs
        elif kind in _MOVEMENT or kind == "FakeQuantize":
            open_ends.append(inputs[0])
        elif kind == "Select":
            open_ends += inputs[1:]
        else:
            return False  # other nodes, such as an input of the model or a Log, may give -inf
    return True


_BF16_MAX = 3.3895313892515355e38


def _lift(mask: Any) -> None:
    import numpy as np
    import openvino.opset13 as ops

    bounded = np.clip(mask.data, -_BF16_MAX, _BF16_MAX).astype(mask.data.dtype)
    mask.output(0).replace(ops.constant(bounded, name=f"{mask.get_friendly_name()}/finite").output(0))
