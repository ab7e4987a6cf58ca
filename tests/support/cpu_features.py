"""Finds the features of the CPU on which the tests run."""

from __future__ import annotations

import pytest

from accel.machine import int8_saturates


def has_bf16() -> bool:
    """Tells whether OpenVINO computes in bfloat16 on this CPU."""
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def needs_vnni() -> None:
    """Skips the rest of the test on an x86 CPU without VNNI. On a CPU without VNNI, ONNX Runtime's int8 sums of two
    products saturate in 16 bits, so the int8 error has no bound."""
    if int8_saturates():
        pytest.skip("ONNX Runtime's int8 saturates on this CPU: it has no VNNI")
