"""Defines the limits of the relative errors that rewriting a model may cause, one limit per row.

By default, a limit is compared with rel_l2 = ||candidate - reference||₂ / ||reference||₂ of an output. A row may name
another measure. Gates, judges and searches read their limits from this table, so that each step has the same limit
everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limit:
    """``value`` is the largest error that the step ``step`` allows for a model in the precision or format ``form``."""

    step: str
    form: str
    value: float
    reason: str


TABLE: tuple[Limit, ...] = (
    # export: limits for conversions of sources to ONNX, for conversions of ONNX graphs to other formats, and for
    # rewrites in the same precision.
    Limit(step="export", form="fp32", value=1e-4, reason="float32 sums move by a few units in the last place"),
    Limit(step="export", form="fp16", value=2e-2, reason="10 bits of mantissa, and runtimes round at different nodes"),
    Limit(step="export", form="bf16", value=1e-1, reason="7 bits of mantissa, and runtimes round at different nodes"),
    Limit(
        step="export",
        form="tflite-int8",
        value=5e-2,
        reason="TFLite's int8 kernels round activations, with dynamic scales even if only the weights are int8",
    ),
    # optimize: limits for the stages that make a candidate. After these stages, the judge compares the candidate's
    # accuracy with the user's accuracy budget.
    Limit(step="optimize", form="simplify", value=1e-4, reason="the graph is rewritten, the precision stays"),
    Limit(step="optimize", form="fp32", value=1e-3, reason="a runtime fuses and reorders float32 sums"),
    Limit(step="optimize", form="tf32", value=1e-2, reason="10 bits of mantissa for the inputs of products alone"),
    Limit(step="optimize", form="fp16", value=2e-2, reason="10 bits of mantissa at every node"),
    Limit(step="optimize", form="bf16", value=1e-1, reason="7 bits of mantissa at every node"),
    Limit(
        step="optimize",
        form="fp16-in-int8",
        value=1e-1,
        reason="a value that float16 moves a little may fall into the next int8 step",
    ),
    Limit(
        step="optimize",
        form="int8",
        value=1.0,
        reason="the judge decides; the gate finds a lost mask or a baked-in batch, as unrelated outputs are 1.4 apart",
    ),
    Limit(step="optimize", form="fp8", value=1.0, reason="as int8: the judge decides"),
    Limit(step="optimize", form="int4", value=1.0, reason="as int8: the judge decides"),
    # verify: limits for the difference between two versions of one model on real data.
    Limit(step="verify", form="fp32", value=1e-3, reason="two runtimes order their float32 sums differently"),
    Limit(step="verify", form="tf32", value=1e-2, reason="10 bits of mantissa for the inputs of products alone"),
    Limit(step="verify", form="fp16", value=2e-2, reason="10 bits of mantissa at every node"),
    Limit(step="verify", form="bf16", value=1e-1, reason="7 bits of mantissa at every node"),
    Limit(
        step="verify", form="int8", value=2.5e-1, reason="256 steps a tensor; the README tells which accuracy is left"
    ),
    Limit(
        step="verify", form="fp8", value=2.5e-1, reason="3 bits of mantissa; the README tells which accuracy is left"
    ),
    Limit(
        step="verify",
        form="int4",
        value=4e-1,
        reason="15 steps a block of 32 weights: a twelfth of a product's norm, added up over some 20 products",
    ),
    # bisect: limits for a tensor inside the graph. A precision without a bisect limit has its verify limit.
    Limit(step="bisect", form="fp32", value=1e-4, reason="both graphs run node by node without fusions"),
    Limit(
        step="bisect",
        form="as-run",
        value=1e-1,
        reason="a runtime computes the graph it was made from; a larger error is a fault of the runtime",
    ),
    # cast: the overflow search investigates each output of the 16-bit graph with an error above this limit.
    Limit(step="cast", form="fp16", value=1e-2, reason="half of what the gate allows: the search has to leave room"),
    Limit(step="cast", form="bf16", value=8e-2, reason="below what the gate allows: the search has to leave room"),
    Limit(step="cast", form="quantized", value=1e-1, reason="an int8 model answers a tiny change with a whole step"),
    # Others.
    Limit(
        step="saved_model",
        form="axes",
        value=1e-2,
        reason="largest absolute error, relative to the largest value; a wrongly turned axis is further off",
    ),
    Limit(step="any", form="rounding", value=1e-2, reason="rounding can add up to this; a fault is further off"),
)


def limits_of(step: str) -> Mapping[str, float]:
    """Returns the limits of ``step`` by precision or format."""
    return {row.form: row.value for row in TABLE if row.step == step}


EXPORT_LIMITS = limits_of("export")
STAGE_LIMITS = limits_of("optimize")
VERIFY_LIMITS = limits_of("verify")
BISECT_LIMITS = {**VERIFY_LIMITS, **limits_of("bisect")}
CAST_LIMITS = limits_of("cast")
AXES_LIMIT = limits_of("saved_model")["axes"]
ROUNDING = limits_of("any")["rounding"]
