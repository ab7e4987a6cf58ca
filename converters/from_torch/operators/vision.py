"""Translates the operators of torchvision that are registered in this process. If another library declares these
operators in the place of torchvision, torch's exporter can't translate them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for name, translation in (("nms", _nms), ("roi_align", _roi_align)):
        if hasattr(torch.ops.torchvision, name):
            found[getattr(torch.ops.torchvision, name).default] = translation
    return found


def _nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Selects the boxes that overlap no box with a higher score."""
    from onnxscript.function_libs.torch_lib.ops.vision import torchvision_nms

    return torchvision_nms(boxes, scores, iou_threshold)


def _roi_align(
    image: Any,
    boxes: Any,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Any:
    """Averages sampling points inside each cell of each box. In ONNX, a sampling ratio of 0 makes the number of points
    depend on the size of the box."""
    from onnxscript.function_libs.torch_lib.ops.vision import torchvision_roi_align

    return torchvision_roi_align(
        image, boxes, spatial_scale, pooled_height, pooled_width, max(sampling_ratio, 0), aligned
    )
