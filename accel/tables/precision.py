"""Defines the table of model precisions. Each row holds the bytes per weight, the requirements, and the ranks that
order the precisions by speed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A row of the table.

    ``weight_bytes`` is the bytes per weight, or None if the layers have different precisions. ``quantized`` is True if
    weights are integers or 8-bit floats with scales. ``needs_data`` is True if activations are quantized with ranges
    calibrated on samples. ``min_opset`` is the first ONNX opset that can express the precision with standard operators.
    ``min_capability`` is the lowest CUDA compute capability that computes in the precision, or (0, 0) if any GPU can.
    ``rank`` orders the precisions by their likely speed on this machine, with 0 for the precision that is most likely
    the fastest. ``rank_unmeasured`` orders the precisions by the usual speeds of GPUs, for a target GPU that is not in
    this machine.
    """

    name: str
    means: str
    weight_bytes: float | None
    quantized: bool = False
    needs_data: bool = False
    min_opset: int = 1
    min_capability: tuple[int, int] = (0, 0)
    rank: int
    rank_unmeasured: int


PRECISIONS: dict[str, Precision] = {
    row.name: row
    for row in (
        Precision(name="fp32", means="32-bit floats everywhere", weight_bytes=4.0, rank=7, rank_unmeasured=7),
        Precision(
            name="tf32",
            means="32-bit floats, whose products round their inputs to 10 bits of mantissa",
            weight_bytes=4.0,
            min_capability=(8, 0),
            rank=6,
            rank_unmeasured=6,
        ),
        Precision(
            name="fp16",
            means="16-bit floats, except for nodes that overflow",
            weight_bytes=2.0,
            rank=5,
            rank_unmeasured=0,
        ),
        Precision(
            name="bf16",
            means="16-bit floats with the exponent of fp32",
            weight_bytes=2.0,
            min_opset=13,
            min_capability=(8, 0),
            rank=4,
            rank_unmeasured=5,
        ),
        Precision(
            name="int8",
            means="8-bit integers with per-channel scales, for weights and activations",
            weight_bytes=1.0,
            quantized=True,
            needs_data=True,
            min_opset=13,  # the first opset with per-channel scales (QuantizeLinear's axis)
            rank=0,
            rank_unmeasured=1,
        ),
        Precision(
            name="fp8",
            means="8-bit floats (E4M3) for products, on an fp16 base",
            weight_bytes=1.0,
            quantized=True,
            needs_data=True,
            min_opset=19,
            min_capability=(8, 9),
            rank=1,
            rank_unmeasured=2,
        ),
        Precision(
            name="int4",
            means="4-bit integers for the weights of large products alone",
            weight_bytes=0.5,
            quantized=True,
            min_opset=21,  # the first opset with blockwise scales (QuantizeLinear's block_size)
            rank=3,
            rank_unmeasured=4,
        ),
        Precision(
            name="mixed",
            means="int8, except for the layers that need more",
            weight_bytes=None,
            quantized=True,
            needs_data=True,
            min_opset=13,
            rank=2,
            rank_unmeasured=3,
        ),
    )
}
