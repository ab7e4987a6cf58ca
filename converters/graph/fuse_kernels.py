"""ONNX to ONNX: ``act(A @ W + bias) + residual`` becomes one ``accel::FusedGemm``, a convolution likewise one
``accel::FusedConv2d``, each with a body for any runtime."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from accel.artifact import Artifact, beside
from accel.errors import StageFailed, one_line
from accel.sources.onnx_file import read_proto
from accel.stage import StageConfig


@dataclass(frozen=True, kw_only=True)
class FuseKernelsConfig(StageConfig):
    """``residual``: also take in the sum that follows, where its shape is that of the product."""

    residual: bool = True


class FusedGraphInvalid(StageFailed):
    """The fused graph doesn't pass the checker."""


def fuse_kernels(src: Artifact, config: FuseKernelsConfig, out: Path) -> Artifact:
    """Write ``src`` with its products fused to ``out``; the notes count what each function replaced.

    A model with nothing to fuse comes out as it is. Raises ``UnsupportedHere`` for an opset or IR without functions,
    ``FusedGraphInvalid`` where the result doesn't pass the checker with full shape inference.
    """
    import onnx

    from accel.kernels.onnx_patterns import fuse_products

    model = read_proto(src.path, weights=True)
    fused = fuse_products(model, residual=config.residual)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise FusedGraphInvalid(f"the fused graph is not valid ({one_line(error)}); leave --kernels out") from error
    with beside(out) as temporary:
        onnx.save(model, str(temporary))
    counts = dict(sorted(Counter(fused).items()))
    return replace(src, path=out, manifest=None, companions=(), notes={"fused": len(fused), "functions": counts})
