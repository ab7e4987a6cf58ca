"""Fuses matrix products and convolutions of an ONNX model with the operators that follow.

``act(A @ W + bias) + residual`` becomes one ``accel::FusedGemm``. A convolution with bias, activation and residual
becomes one ``accel::FusedConv2d``. Both operators have a function body that any runtime can run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from accel.artifact import Artifact, beside
from accel.errors import StageFailed, one_line
from accel.sources.onnx.file import read_proto
from accel.spelling import option
from accel.stage import StageConfig


@dataclass(frozen=True, kw_only=True)
class FuseKernelsConfig(StageConfig):
    """If ``residual`` is true, a product is also fused with the addition of a residual that has the product's shape."""

    residual: bool = True


class FusedGraphInvalid(StageFailed):
    """The fused graph doesn't pass the checker."""


def fuse_kernels(src: Artifact, config: FuseKernelsConfig, out: Path) -> Artifact:
    """Fuses the matrix products and convolutions of ``src``, and writes the model to ``out``.

    ``notes["functions"]`` maps the name of each ONNX function in the fused graph to the number of its uses. If no
    product can be fused, the model is written unchanged. Raises ``UnsupportedHere`` if the opset or IR is too old for
    functions, and ``FusedGraphInvalid`` if the result fails the checker with full shape inference.
    """
    import onnx

    from accel.kernels.onnx.patterns import fuse_products

    model = read_proto(src.path, weights=True)
    fused = fuse_products(model, residual=config.residual)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise FusedGraphInvalid(
            f"the fused graph is not valid ({one_line(error)}); leave out {option('kernels')}"
        ) from error
    with beside(out) as temporary:
        onnx.save(model, str(temporary))
    counts = dict(sorted(Counter(fused).items()))
    return replace(src, path=out, manifest=None, companions=(), notes={"fused": len(fused), "functions": counts})
