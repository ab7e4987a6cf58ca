"""Reductions in front of quantized activations, as OpenVINO computes them rightly."""

from __future__ import annotations

from typing import Any

_REDUCTIONS = {"ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"}


def keep_reduced_dims(model: Any) -> int:
    """Let the reductions of a quantized ``ov.Model`` keep the dims that they reduce, and take these out behind them,
    which is the same; how many were rewritten.

    The CPU plugin (2026.4) appends to a reduction what follows it element by element. Behind one that drops dims
    (tokens averaged for a sentence) it takes the factors of a multiplication in front of a FakeQuantize, which NNCF's
    SmoothQuant puts there, for those of another axis: errors of 40% to 75%.
    """
    import openvino.opset13 as opset

    operations = model.get_ordered_ops()
    if not any(op.get_type_name() == "FakeQuantize" for op in operations):
        return 0
    count = 0
    for op in operations:
        if op.get_type_name() not in _REDUCTIONS or op.get_attributes()["keep_dims"]:
            continue
        value, axes = op.input_value(0), op.input_value(1)
        constant = axes.get_node()
        if constant.get_type_name() != "Constant" or not constant.data.size:  # to squeeze no axis is to squeeze all
            continue
        kept = getattr(opset, _snake(op.get_type_name()))(value, axes, True)
        dropped = opset.squeeze(kept, axes)
        kept.set_friendly_name(op.get_friendly_name())
        op.output(0).replace(dropped.output(0))
        count += 1
    return count


def _snake(name: str) -> str:
    """ReduceMean as OpenVINO's functions are called: reduce_mean."""
    return name.replace("Reduce", "reduce_").lower()
