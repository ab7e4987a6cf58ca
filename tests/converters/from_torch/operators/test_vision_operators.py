"""Proves that detectors are exported with their post-processing. In the file, ONNX operators replace torchvision's
operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import accel
from tests.converters.from_torch.operators.vision_operators import declare_operators

declare_operators()


class Backbone(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Conv2d(3, 8, 3, stride=4, padding=1)
        self.head = torch.nn.Conv2d(8, 5, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(image).relu()).flatten(2).transpose(1, 2)
        return found


def select(found: torch.Tensor) -> dict[str, torch.Tensor]:
    """Decodes the boxes of one image. Drops boxes with a low score, and boxes that overlap a box with a higher
    score."""
    scores, corner = found[:, 4].sigmoid(), found[:, :2].sigmoid() * 16
    boxes = torch.cat([corner, corner + 4 + found[:, 2:4].exp()], -1)
    strong = scores > 0.4
    boxes, scores = boxes[strong], scores[strong]
    keep = torch.ops.torchvision.nms(boxes, scores, 0.5)
    return {"boxes": boxes[keep], "scores": scores[keep]}


def detect(parts: Any, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [parts.select(found) for found in parts.backbone(images)]


def test_a_detector_with_its_selection_in_the_graph(tmp_path: Path) -> None:
    """Fails if export refuses the selection of boxes, or if the exported file selects other boxes than PyTorch. Also
    fails if the file fixes the number of boxes."""

    class Detector(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = Backbone()

        def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
            return select(self.backbone(image)[0])

    detector = Detector().eval()
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    made = accel.export(detector, example=(image,), dynamic={}, out=tmp_path / "m.onnx")
    assert [spec.shape for spec in made.signature.outputs] == [("boxes_0", 4), ("boxes_0",)]
    assert "NonMaxSuppression" in {node.op_type for node in onnx.load(made.path).graph.node}
    counts = set()
    with accel.load(made) as session, torch.no_grad():
        for seed in range(6):
            image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
            found, wanted = session(image), detector(image)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            counts.add(len(found["boxes"]))
        assert len(counts) > 1
        assert (
            session(torch.full_like(image, -9.0))["boxes"].shape
            == detector(torch.full_like(image, -9.0))["boxes"].shape
        )


def test_a_detector_as_a_pipeline(tmp_path: Path) -> None:
    """Fails if export refuses a module whose output sizes depend on values. Also fails if the exported pipeline gives
    other outputs than the original."""
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    pipeline = accel.Pipeline(detect, backbone=Backbone(), select=select)
    made = accel.export(pipeline, example=(images,), out=tmp_path / "out")
    assert made.source["live"]["note"].endswith("stays 2, because the model returns other tensors at 3")
    with accel.load(tmp_path / "out") as session, torch.no_grad():
        torch.testing.assert_close(session(images), pipeline(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [2, -1])
def test_regions(aligned: bool, ratio: int, tmp_path: Path) -> None:
    """Fails if the exported RoiAlign samples a region at wrong points, or from the wrong image."""

    class Regions(torch.nn.Module):
        def forward(self, image: torch.Tensor, corners: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            boxes = torch.cat([corners.abs() * 3, corners.abs() * 3 + 1 + sizes.abs() * 4], -1)
            which = (torch.arange(len(boxes)) % 2)[:, None].to(boxes.dtype)
            found: torch.Tensor = torch.ops.torchvision.roi_align(
                image, torch.cat([which, boxes], -1), 0.5, 2, 3, ratio, aligned
            )
            return found

    example = (torch.randn(2, 2, 6, 7), torch.rand(3, 2), torch.rand(3, 2))
    dynamic = {"corners": {0: "boxes"}, "sizes": {0: "boxes"}}
    made = accel.export(Regions(), example=example, dynamic=dynamic, out=tmp_path / "m.onnx")
    assert "RoiAlign" in {node.op_type for node in onnx.load(made.path).graph.node}
    more = (torch.randn(2, 2, 6, 7), torch.rand(5, 2), torch.rand(5, 2))
    with accel.load(made) as session:
        torch.testing.assert_close(session(*more), Regions()(*more), rtol=1e-4, atol=1e-5)
