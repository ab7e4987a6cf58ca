"""What the CPU that the tests run on can do."""

from __future__ import annotations

import pytest

from accel.cpu import int8_saturates


def has_bf16() -> bool:
    """Whether OpenVINO computes in bfloat16 here."""
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def needs_vnni() -> None:
    """Skip what is left of a test that bounds the error of int8 in ONNX Runtime: on an x86 CPU without VNNI its sums
    of two products saturate in 16 bits."""
    if int8_saturates():
        pytest.skip("ONNX Runtime's int8 saturates on this CPU: it has no VNNI")
