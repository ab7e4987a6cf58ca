"""A small CNN on scikit-learn's handwritten digits, 8 x 8: learns to over 97 % in well under a minute on two cores."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from accel.errors import MissingExtra
from accel.signature import TensorSpec
from accel.sources.declare import declare

if TYPE_CHECKING:
    import torch

# Of 1,797 images every fifth is held out.
_HELD_OUT = 5


@cache
def _images() -> tuple[Any, Any]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra("scikit-learn", "examples") from error
    found = load_digits()
    return (found.images / 8.0 - 1.0).astype("float32")[:, None], found.target.astype("int64")


def _split(*, held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    images, labels = (torch.from_numpy(part) for part in _images())
    chosen = (torch.arange(len(labels)) % _HELD_OUT == 0) == held_out
    return images[chosen], labels[chosen]


@declare(
    inputs=(TensorSpec("image", "float32", ("batch", 1, 8, 8)),),
    outputs=("logits",),
    dims={"batch": (1, 1, 64)},
)
def model() -> torch.nn.Module:
    """Images float32[batch, 1, 8, 8] in -1..1 to ``logits`` float32[batch, 10]."""
    from torch import Tensor, nn

    class Digits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)])
            self.hidden = nn.Linear(64 * 4, 128)
            self.head = nn.Linear(128, 10)

        def forward(self, image: Tensor) -> Tensor:
            x = image
            for block in self.blocks:
                x = nn.functional.max_pool2d(nn.functional.relu(block(x)), 2)
            logits: Tensor = self.head(nn.functional.relu(self.hidden(x.flatten(1))))
            return logits

    return Digits()


def data() -> list[tuple[Any, Any]]:
    """1,437 training samples (image, label)."""
    images, labels = _split(held_out=False)
    return list(zip(images, labels, strict=True))


def evaluate(module: torch.nn.Module) -> dict[str, float]:
    """Top-1 on the 360 held-out images."""
    import torch

    images, labels = _split(held_out=True)
    with torch.inference_mode():
        found = module(images.to(next(module.parameters()).dtype)).argmax(1)
    return {"top1": float((found == labels).double().mean())}
