"""Features of the CPU that the tests run on."""

from __future__ import annotations

import pytest

from accel.machine import int8_saturates


def has_bf16() -> bool:
    """Tells whether OpenVINO computes in bfloat16 on this CPU."""
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def needs_vnni() -> None:
    """Skips the rest of a test that bounds the error of int8 in ONNX Runtime if the CPU is an x86 CPU without VNNI. On
    an x86 CPU without VNNI, sums of two products saturate in 16 bits."""
    if int8_saturates():
        pytest.skip("ONNX Runtime's int8 saturates on this CPU: it has no VNNI")
