"""A small CNN for scikit-learn's handwritten digits, 8 x 8. The CNN reaches over 97 % accuracy in well under a minute
on two cores."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from accel.signature import TensorSpec
from accel.sources.declare import declare

from . import digits

if TYPE_CHECKING:
    import torch


@declare(
    inputs=(TensorSpec("image", "float32", ("batch", 1, 8, 8)),),
    outputs=("logits",),
    dims={"batch": (1, 1, 64)},
)
def model() -> torch.nn.Module:
    """Makes the CNN, which maps images float32[batch, 1, 8, 8] (0 to 1) to ``logits`` float32[batch, 10]."""
    from torch import Tensor, nn

    class Digits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = itertools.pairwise((1, 32, 64, 128))
            self.blocks = nn.ModuleList(nn.Conv2d(taken, made, 3, padding=1) for taken, made in pairs)
            self.hidden = nn.Linear(128 * 4, 128)
            self.head = nn.Linear(128, 10)

        def forward(self, image: Tensor) -> Tensor:
            x = image
            for index, block in enumerate(self.blocks):
                x = nn.functional.relu(block(x))
                if index:
                    x = nn.functional.max_pool2d(x, 2)
            logits: Tensor = self.head(nn.functional.relu(self.hidden(x.flatten(1))))
            return logits

    return Digits()


def data() -> list[tuple[Any, Any]]:
    """Returns the 1,297 training samples (image, label)."""
    import torch

    part = digits.data()["train"]
    return list(zip(torch.from_numpy(part["image"]), torch.from_numpy(part["label"]), strict=True))


def evaluate(module: torch.nn.Module) -> dict[str, float]:
    """Returns the top-1 accuracy on the 500 test images."""
    import torch

    test = digits.data()["test"]
    with torch.inference_mode():
        logits = module(torch.from_numpy(test["image"]).to(next(module.parameters()).dtype))
    return {"top1": digits.top1({"logits": logits.float().numpy()}, test)}
