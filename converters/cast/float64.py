"""Refuses float64 models for runtimes that compute float64 in float32 and say nothing."""

from __future__ import annotations

from accel.errors import BuildFailed
from accel.signature import Signature, TensorSpec

NO_FLOAT64 = (
    "convert the model to float32 before it is exported (model.float()), or keep it as ONNX, which ONNX Runtime "
    "computes in float64"
)


class ComputesInFloat32(BuildFailed):
    """The model has inputs or outputs in float64, but its runtime computes in float32."""


def float64_end(signature: Signature) -> tuple[str, TensorSpec] | None:
    """Returns the role (``input`` or ``output``) and the spec of the first tensor in float64, or None."""
    for role, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.dtype == "float64":
                return role, spec
    return None


def refuse_float64(signature: Signature, runtime: str) -> None:
    """Raises ``ComputesInFloat32`` if an input or output of the model is float64. A gate can't find the lost digits,
    because its limits are those of float32, nor the values beyond float32's range, because it doesn't draw them."""
    if found := float64_end(signature):
        role, spec = found
        raise ComputesInFloat32(
            f"{runtime} computes float64 in float32, but the model's {role} {spec.name!r} is float64; {NO_FLOAT64}"
        )
