"""Proves that adaptive pooling is exported for images of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

import accel


class Pools(nn.Module):
    def forward(self, image: torch.Tensor) -> Any:
        pool = nn.functional
        return {
            "even in the example": pool.adaptive_avg_pool2d(image, (2, 5)),
            "odd": pool.adaptive_avg_pool2d(image, (3, 7)),
            "larger than the image": pool.adaptive_avg_pool2d(image, (11, 50)),
            "one": pool.adaptive_avg_pool2d(image, 1),
            "only the height": pool.adaptive_avg_pool2d(image, (3, None)),
            "the width to one": pool.adaptive_avg_pool2d(image, (None, 1)),
            "without a batch": pool.adaptive_avg_pool2d(image[0], (4, 5)),
            "row": pool.adaptive_avg_pool1d(image[:, 0], 5),
            "volume": pool.adaptive_avg_pool3d(image[:, None], (2, 3, 4)),
        }


def test_images_of_any_size(tmp_path: Path) -> None:
    """Fails if an average takes the windows of the example's size, or of a size that divides evenly."""
    made = accel.export(
        Pools(),
        example=(torch.randn(2, 3, 8, 20),),
        dynamic={"image": {0: "batch", 2: "height", 3: "width"}},
        dims={"height": (4, 8, 40), "width": (4, 20, 60)},
        out=tmp_path / "pools.onnx",
    )
    with accel.load(made) as session:
        for size in ((1, 8, 20), (2, 7, 33), (3, 40, 4), (2, 13, 59)):
            image = torch.randn(size[0], 3, *size[1:])
            torch.testing.assert_close(session(image), Pools()(image))


class Maxima(nn.Module):
    def forward(self, image: torch.Tensor) -> Any:
        pool = nn.functional
        return {
            "odd": pool.adaptive_max_pool2d(image, (3, 7), return_indices=True),
            "larger than the image": pool.adaptive_max_pool2d(image, (5, 9)),
            "one": pool.adaptive_max_pool2d(image, 1),
            "without a batch": pool.adaptive_max_pool2d(image[0], (2, 3), return_indices=True),
            "row": pool.adaptive_max_pool1d(image[:, 0], 5, return_indices=True),
            "volume": pool.adaptive_max_pool3d(image[:, None], (2, 3, 4), return_indices=True),
        }


def test_maxima_of_images_of_any_size(tmp_path: Path) -> None:
    """Fails if a maximum takes the windows of the example's size, or if its place is the place in its window. Also
    fails if the last of equal values is returned."""
    made = accel.export(
        Maxima(),
        example=(torch.randn(2, 3, 8, 20),),
        dynamic={"image": {0: "batch", 2: "height", 3: "width"}},
        dims={"height": (4, 8, 40), "width": (4, 20, 60)},
        out=tmp_path / "pools.onnx",
    )
    with accel.load(made) as session:
        for size in ((1, 8, 20), (2, 7, 33), (3, 31, 4), (2, 13, 59)):
            image = torch.randint(0, 9, (size[0], 3, *size[1:])).float()
            torch.testing.assert_close(session(image), Maxima()(image))


def test_a_fixed_size_needs_no_windows(tmp_path: Path) -> None:
    """Fails if the graph of an image of a fixed size computes with sizes."""
    net = nn.Sequential(nn.AdaptiveAvgPool2d((3, 5)), nn.AdaptiveAvgPool2d((3, 1))).eval()
    made = accel.export(net, example=(torch.randn(2, 3, 12, 21),), out=tmp_path / "pool.onnx")
    operators = {node.op_type for node in onnx.load(str(made.path)).graph.node}
    assert operators <= {"AveragePool", "MatMul", "ReduceMean"}
