"""Where a model will run, and what follows from it: the runtime, the precisions, the QDQ form, opset and IR limits."""

from __future__ import annotations

from dataclasses import dataclass

from accel.errors import UnknownName

# int4: of the weights of large products alone. mixed: int8 but for the layers that need more. fp8: of products, on an
# fp16 base, for GPUs that have it.
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "fp8", "int4", "mixed")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One place to run. ``runtime`` and ``kind`` name what runs there and what is shipped to it."""

    name: str
    runtime: str
    kind: str
    precisions: tuple[str, ...]  # the candidates accel optimize makes
    qdq: str  # the form of int8 that this target runs fast: see converters/quantize.py
    extra: str | None  # the pip extra that brings its toolkit; None: in the base install
    needs_gpu: bool = False
    min_opset: int = 13
    max_opset: int = 23
    max_ir: int = 11
    brings: str = ""

    @classmethod
    def get(cls, name: str) -> Target:
        """The target of that name; ``UnknownName`` lists them."""
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
            precisions=("fp32", "fp16"),
            qdq="tensorrt",
            extra="cuda",
            needs_gpu=True,
            brings="ONNX Runtime on NVIDIA GPUs",
        ),
        Target(
            name="tensorrt",
            runtime="tensorrt",
            kind="engine",
            precisions=("fp32", "fp16", "bf16", "int8", "fp8"),
            qdq="tensorrt",
            extra="tensorrt",
            needs_gpu=True,
            brings="engines for data-centre GPUs",
        ),
        Target(
            name="tensorrt-rtx",
            runtime="tensorrt-rtx",
            kind="engine",
            precisions=("fp32", "fp16", "bf16", "int8", "fp8"),
            qdq="tensorrt",
            extra="tensorrt-rtx",
            needs_gpu=True,
            brings="engines for RTX GPUs, built without one",
        ),
    )
}
