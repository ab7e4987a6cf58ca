"""Defines networks for images: convolutions of all kinds, detection heads, attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..case import Case


def conv(a: int, b: int, stride: int = 1) -> nn.Sequential:
    """Returns a convolution with a batch norm and SiLU."""
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.SiLU())


class UNet(nn.Module):
    """A U-Net with two levels, upsampled by transposed convolutions or by interpolation."""

    def __init__(self, interpolate: bool = False) -> None:
        super().__init__()
        self.down = nn.ModuleList((conv(3, 8), conv(8, 16), conv(16, 16)))
        self.up = nn.ModuleList((nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(8, 8, 2, 2)))
        self.merge, self.out = nn.ModuleList((conv(32, 8), conv(16, 8))), nn.Conv2d(8, 2, 1)
        self.interpolate = interpolate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down[0](x)
        b = self.down[1](F.max_pool2d(a, 2))
        y = self.down[2](F.max_pool2d(b, 2))
        for skip, up, merge in zip((b, a), self.up, self.merge, strict=True):
            y = F.interpolate(y, skip.shape[2:], mode="bilinear") if self.interpolate else up(y)
            y = merge(torch.cat([y, skip], 1))
        return self.out(y)


class Vit(nn.Module):
    """A vision transformer that interpolates its position embeddings to the image's size."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.randn(1, 1, 32))
        self.place = nn.Parameter(torch.randn(1, 32, 4, 4))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
        self.out = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x)
        x = x + F.interpolate(self.place, x.shape[2:], mode="bicubic")
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)], 1)
        return self.out(self.layers(x)[:, 0])


class Variants(nn.Module):
    """Combines convolutions (grouped, dilated, depthwise, strided) with squeeze-and-excitation and several norms."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 8, 3, padding="same", groups=2)
        self.b = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8, padding_mode="reflect")
        self.c = nn.Conv2d(8, 16, (1, 5), (1, 2), (0, 2))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.Hardswish(), nn.Conv2d(4, 16, 1))
        self.norms = nn.ModuleList((nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True), nn.LocalResponseNorm(3)))
        self.last = nn.PixelShuffle(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[2](self.norms[1](self.b(self.norms[0](self.a(x)).relu())))
        x = self.c(x)
        return self.last(x * self.gate(x).sigmoid())


class Pools(nn.Module):
    """Returns a list with the results of six pooling operators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(3, 8)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.conv(x)
        return [
            F.adaptive_avg_pool2d(x, 4),
            F.adaptive_max_pool2d(x, (2, 4)),
            F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
            F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
            F.lp_pool2d(x.abs() + 0.1, 2, 2),
            F.unfold(x, 2, stride=2),
        ]


class Unpooled(nn.Module):
    """A SegNet: max unpooling with the indices of max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8), conv(8, 8), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, where = F.max_pool2d(self.a(x), 2, return_indices=True)
        return self.c(F.max_unpool2d(self.b(x), where, 2))


class Volume(nn.Module):
    """3-D convolutions with trilinear upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv3d(1, 4, 3, 2, 1), nn.ConvTranspose3d(4, 4, 3, 2, 1, output_padding=1)
        self.norm = nn.BatchNorm3d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.a(x)).relu()
        return self.b(y) + F.interpolate(y, scale_factor=2, mode="trilinear")


class Warp(nn.Module):
    """A spatial transformer that samples the image bilinearly on an affine grid."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        theta = 0.1 * self.find(x).view(-1, 2, 3) + torch.eye(2, 3)
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


class Windows(nn.Module):
    """Computes attention in shifted windows, with a bias for relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.table = nn.Parameter(torch.randn(49, 2))
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]) + 3
        self.register_buffer("index", apart[0] * 7 + apart[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        y = (
            torch.roll(x, (-2, -2), (1, 2))
            .view(b, h // 4, 4, w // 4, 4, c)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, 16, c)
        )
        q, k, v = self.qkv(y).view(-1, 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.flatten()].view(16, 16, 2).permute(2, 0, 1)
        y = ((q @ k.transpose(-1, -2)) / 8**0.5 + bias).softmax(-1) @ v
        y = y.transpose(1, 2).reshape(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(y, (2, 2), (1, 2))


class Yolo(nn.Module):
    """A YOLO head on two scales that returns boxes and scores, without non-maximum suppression."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.next = conv(3, 8, 2), conv(8, 16, 2)
        self.heads = nn.ModuleList((nn.Conv2d(8, 3 * 7, 1), nn.Conv2d(16, 3 * 7, 1)))
        self.register_buffer("anchors", torch.rand(2, 3, 2) * 8 + 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = self.stem(x)
        found = []
        for level, (head, f) in enumerate(zip(self.heads, (a, self.next(a)), strict=True)):
            b, _, h, w = f.shape
            y = head(f).view(b, 3, 7, h, w).permute(0, 1, 3, 4, 2)
            gy, gx = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            centre = (y[..., :2].sigmoid() * 2 - 0.5 + torch.stack([gx, gy], -1)) * 2 ** (level + 1)
            size = (y[..., 2:4].sigmoid() * 2) ** 2 * self.anchors[level][None, :, None, None]
            found.append(torch.cat([centre - size / 2, centre + size / 2, y[..., 4:].sigmoid()], -1).view(b, -1, 7))
        all_found = torch.cat(found, 1)
        return all_found[..., :4], all_found[..., 4:5] * all_found[..., 5:]


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the intersection over union of all pairs of boxes."""
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    inside = (high - low).clamp(min=0).prod(-1)
    area_a, area_b = ((t[:, 2:] - t[:, :2]).prod(-1) for t in (a, b))
    return inside / (area_a[:, None] + area_b[None] - inside + 1e-6)


class MatrixNms(nn.Module):
    """Selects the 20 boxes with the highest scores, and then lowers the score of each box that overlaps a better
    box."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, index = scores.topk(20)
        kept = boxes[index]
        iou = overlap(kept, kept).triu(1)
        return kept, best * (1 - iou.max(0).values)


class GreedyNms(nn.Module):
    """Non-maximum suppression of the best 10 boxes, in a loop of fixed length."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, index = scores.topk(10)
        kept = boxes[index]
        iou = overlap(kept, kept)
        keep = torch.ones(10, dtype=torch.bool)
        for i in range(9):
            later = torch.arange(10) > i
            keep = keep & ~(keep[i] & later & (iou[i] > 0.5))
        return kept, best * keep


class NmsThatSelects(nn.Module):
    """Non-maximum suppression that removes the suppressed boxes from the result. The number of returned boxes depends
    on the input's values."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best, index = scores.sort(descending=True)
        iou = overlap(boxes[index], boxes[index]).triu(1)
        return boxes[index][(best > 0.3) & (iou.max(0).values < 0.5)]


class CenterNet(nn.Module):
    """Finds the peaks of a heat map with max pooling and topk."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heat, self.size = conv(3, 8, 2), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        f = self.body(x)
        heat = self.heat(f).sigmoid()
        heat = heat * (F.max_pool2d(heat, 3, 1, 1) == heat)
        best, index = heat.flatten(1).topk(8)
        place = index % (heat.shape[2] * heat.shape[3])
        size = self.size(f).flatten(2).gather(2, place[:, None].expand(-1, 2, -1))
        return best, size, torch.stack([place // heat.shape[3], place % heat.shape[3]], -1)


class DetrHead(nn.Module):
    """Attends from queries to an image, and returns a dict with boxes and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.queries = nn.Conv2d(3, 16, 8, 8), nn.Embedding(6, 16)
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True)
        self.boxes, self.classes = nn.Linear(16, 4), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        f = self.body(x).flatten(2).transpose(1, 2)
        y, _ = self.attend(self.queries.weight[None].expand(len(x), -1, -1), f, f)
        return {"boxes": self.boxes(y).sigmoid(), "logits": self.classes(y)}


class Normalized(nn.Module):
    """Normalizes images of type uint8, and returns a dict with the features of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1))
        self.layers = nn.ModuleDict({"low": conv(3, 8, 2), "high": conv(8, 16, 2)})

    def forward(self, image: torch.Tensor) -> dict[str, Any]:
        x = (image.float() / 255 - self.mean) / 0.2
        found: dict[str, Any] = {}
        for name, layer in self.layers.items():
            x = layer(x)
            found[name] = {"features": x, "norm": x.flatten(1).norm(dim=1)}
        return found


class Style(nn.Module):
    """Adaptive instance normalization of two images, with weight norm and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.b = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, content: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        c, s = self.a(content), self.a(style)
        (sc, mc), (ss, ms) = (torch.std_mean(t, (2, 3), keepdim=True) for t in (c, s))
        return self.b((c - mc) / (sc + 1e-5) * ss + ms).tanh()


def _image(size: int = 32, channels: int = 3) -> Any:
    return lambda b, _: (torch.randn(b, channels, size, size),)


def _sized(b: int, s: int) -> Any:
    return (torch.randn(b, 3, s, s + 8),)


def _boxes(_: int, s: int) -> Any:
    low = torch.rand(s, 2) * 20
    return torch.cat([low, low + torch.rand(s, 2) * 10 + 1], 1), torch.rand(s)


_SIZED = {"x": {0: "batch", 2: "height", 3: "width"}}
_BOXES = {"boxes": {0: "boxes"}, "scores": {0: "boxes"}}
MODELS = {
    "unet": lambda: Case(UNet(), _image()),
    "unet-any-size": lambda: Case(UNet(True), _sized, _SIZED, (32, 24, 40)),
    "vit": lambda: Case(Vit(), _image()),
    "vit-any-size": lambda: Case(Vit(), _sized, _SIZED, (32, 24, 48)),
    "conv-variants": lambda: Case(Variants(), _image(16, 4)),
    "pools": lambda: Case(Pools(), _image(16)),
    "max-unpool": lambda: Case(Unpooled(), _image(16)),
    "conv3d": lambda: Case(Volume(), lambda b, _: (torch.randn(b, 1, 8, 8, 8),)),
    "spatial-transformer": lambda: Case(Warp(), _image(16)),
    "shifted-windows": lambda: Case(Windows(), lambda b, _: (torch.randn(b, 8, 8, 16),)),
    "yolo-head": lambda: Case(Yolo(), _image()),
    "yolo-head-any-size": lambda: Case(Yolo(), _sized, _SIZED, (32, 24, 40)),
    "matrix-nms": lambda: Case(MatrixNms(), _boxes, _BOXES, (40, 30, 55)),
    "greedy-nms": lambda: Case(GreedyNms(), _boxes, _BOXES, (40, 30, 55)),
    "nms-that-selects": lambda: Case(NmsThatSelects(), _boxes, _BOXES, (40, 30, 55)),
    "centernet": lambda: Case(CenterNet(), _image()),
    "detr-head": lambda: Case(DetrHead(), _image()),
    "bytes-to-dict": lambda: Case(Normalized(), lambda b, _: (torch.randint(0, 256, (b, 3, 16, 16)).to(torch.uint8),)),
    "adain": lambda: Case(Style(), lambda b, _: (torch.randn(b, 3, 16, 16), torch.randn(b, 3, 16, 16))),
}
