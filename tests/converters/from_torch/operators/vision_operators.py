"""Declares two operators of torchvision for the tests, because torchvision needs another build of PyTorch. The
reference implementations follow the operators' documentation and compute one box or one sample at a time."""

from __future__ import annotations

import math

import torch

_KEPT: list[torch.library.Library] = []  # keeps the library alive, because the operators disappear with their library


def declare_operators() -> None:
    """Declares ``torchvision::nms`` and ``torchvision::roi_align`` for this process if torchvision hasn't declared
    them."""
    if _KEPT or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    library.impl("nms", _nms, "CPU")
    library.impl("roi_align", _roi_align, "CPU")
    torch.library.register_fake("torchvision::nms", _fake_nms, lib=library)
    torch.library.register_fake("torchvision::roi_align", _fake_roi_align, lib=library)
    _KEPT.append(library)


def _area(box: torch.Tensor) -> float:
    return float((box[2] - box[0]) * (box[3] - box[1]))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> float:
    width = max(0.0, float(min(one[2], other[2]) - max(one[0], other[0])))
    height = max(0.0, float(min(one[3], other[3]) - max(one[1], other[1])))
    shared = width * height
    return shared / (_area(one) + _area(other) - shared)


def _nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Returns the indices of the boxes that overlap no box with a higher score. The indices are sorted by score, from
    high to low."""
    kept: list[int] = []
    for index in scores.argsort(descending=True).tolist():
        if all(_overlap(dets[index], dets[other]) <= iou_threshold for other in kept):
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64)


def _fake_nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    count = torch.library.get_ctx().new_dynamic_size()
    return dets.new_empty(count, dtype=torch.int64)


def _at(image: torch.Tensor, y: float, x: float) -> torch.Tensor:
    """Interpolates the image at a point between pixels. Returns 0 for a point outside the image."""
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return image.new_zeros(len(image))
    y, x = max(y, 0.0), max(x, 0.0)
    top, left = min(int(y), height - 1), min(int(x), width - 1)
    below, right = min(top + 1, height - 1), min(left + 1, width - 1)
    down, across = (y - top if below > top else 0.0), (x - left if right > left else 0.0)
    upper = image[:, top, left] * (1 - across) + image[:, top, right] * across
    lower = image[:, below, left] * (1 - across) + image[:, below, right] * across
    return upper * (1 - down) + lower * down


def _roi_align(
    input: torch.Tensor,
    rois: torch.Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> torch.Tensor:
    """Returns the mean over sampled points in each cell of each box, as float[boxes, channels, pooled_height,
    pooled_width]."""
    out = input.new_zeros(len(rois), input.shape[1], pooled_height, pooled_width)
    offset = 0.5 if aligned else 0.0
    for number, (image, *corners) in enumerate(rois.tolist()):
        left, top, right, bottom = (corner * spatial_scale - offset for corner in corners)
        height, width = bottom - top, right - left
        if not aligned:
            height, width = max(height, 1.0), max(width, 1.0)
        cell_y, cell_x = height / pooled_height, width / pooled_width
        rows = sampling_ratio if sampling_ratio > 0 else math.ceil(cell_y)
        columns = sampling_ratio if sampling_ratio > 0 else math.ceil(cell_x)
        for i in range(pooled_height):
            for j in range(pooled_width):
                points = [
                    _at(
                        input[int(image)],
                        top + cell_y * (i + (a + 0.5) / rows),
                        left + cell_x * (j + (b + 0.5) / columns),
                    )
                    for a in range(rows)
                    for b in range(columns)
                ]
                out[number, :, i, j] = torch.stack(points).mean(0)
    return out


def _fake_roi_align(
    input: torch.Tensor,
    rois: torch.Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> torch.Tensor:
    return input.new_empty(rois.shape[0], input.shape[1], pooled_height, pooled_width)
