"""Defines the table of targets that a model can run on. Each row holds a target's runtime, precisions, QDQ scheme,
opset limits and IR limit."""

from __future__ import annotations

from dataclasses import dataclass

from accel.errors import UnknownName


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target. ``runtime`` names the runtime that runs the model. ``kind`` is the kind of the deployed file.

    ``precisions`` names the rows of ``accel.tables.precision`` that ``accel optimize`` tries by default. ``qdq`` is the
    int8 scheme that runs fast on the target, given as a key of ``converters.quantize.stage.FORMS``. ``extra`` is the
    pip extra that installs the target's runtime, or None if the base install includes this runtime.
    """

    name: str
    runtime: str
    kind: str
    precisions: tuple[str, ...]
    qdq: str
    extra: str | None
    needs_gpu: bool = False
    min_opset: int = 13
    max_opset: int = 23
    max_ir: int = 11
    brings: str = ""

    @classmethod
    def get(cls, name: str) -> Target:
        """Returns the target called ``name``. Raises ``UnknownName`` with a list of the targets for an unknown name."""
        if name not in TARGETS:
            raise UnknownName(f"unknown target {name!r}; use auto or one of {', '.join(TARGETS)}")
        return TARGETS[name]


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="ort-cpu",
            runtime="onnxruntime",
            kind="onnx",
            precisions=("fp32", "int8"),
            qdq="ort-cpu",
            extra=None,
            brings="ONNX Runtime on any CPU",
        ),
        Target(
            name="openvino",
            runtime="openvino",
            kind="openvino",
            precisions=("fp32", "bf16", "int8"),
            qdq="openvino",
            extra="openvino",
            brings="the fastest int8 and bf16 on x86 CPUs",
        ),
        Target(
            name="ort-cuda",
            runtime="onnxruntime-cuda",
            kind="onnx",
            precisions=("fp32", "tf32", "fp16"),
            qdq="tensorrt",
            extra="cuda",
            needs_gpu=True,
            brings="ONNX Runtime on NVIDIA GPUs",
        ),
        Target(
            name="tensorrt",
            runtime="tensorrt",
            kind="engine",
            precisions=("fp32", "tf32", "fp16", "bf16", "int8", "fp8"),
            qdq="tensorrt",
            extra="tensorrt",
            needs_gpu=True,
            brings="engines for data-center GPUs",
        ),
        Target(
            name="tensorrt-rtx",
            runtime="tensorrt-rtx",
            kind="engine",
            precisions=("fp32", "tf32", "fp16", "bf16", "int8", "fp8"),
            qdq="tensorrt",
            extra="tensorrt-rtx",
            needs_gpu=True,
            brings="engines for RTX GPUs, built without one",
        ),
    )
}
