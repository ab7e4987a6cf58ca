"""A small convolutional net for scikit-learn's digits, trained in seconds.

accel export accel.examples.digits:model --weights digits.safetensors -o digits.onnx
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel.artifact import beside
from accel.errors import MissingExtra
from accel.sources.declare import declare

if TYPE_CHECKING:
    import numpy as np
    import torch

TEST_SAMPLES = 500


@declare(
    inputs={"image": ("float32", ("batch", 1, 8, 8))},
    outputs=("logits",),
    dims={"batch": (1, 1, 64)},
)
def model() -> torch.nn.Module:
    """Makes a net of three convolutions with batch norm and random weights. ``logits`` is float32[batch, 10]."""
    from torch import nn

    def block(channels: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip


def data() -> dict[str, dict[str, np.ndarray]]:
    """Returns the splits ``train`` and ``test``, each with ``image`` float32[n, 1, 8, 8] from 0 to 1 and ``label``
    int64[n]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra("scikit-learn", "examples") from error
    import numpy as np

    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return {
        "train": {"image": images[train], "label": labels[train]},
        "test": {"image": images[test], "label": labels[test]},
    }


def train(out: Path, epochs: int = 12, seed: int = 0) -> float:
    """Trains on the digits, writes the state dict to ``out`` (.safetensors) and returns the top-1 accuracy on the test
    samples."""
    import torch
    from safetensors.torch import save_file

    parts = data()
    images, labels = (torch.from_numpy(parts["train"][name]) for name in ("image", "label"))
    torch.manual_seed(seed)
    net = model().train()
    steps = epochs * (len(images) // 64)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(images))[: len(images) // 64 * 64].split(64):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.inference_mode():
        logits = net(torch.from_numpy(parts["test"]["image"])).numpy()
    with beside(out) as temporary:
        save_file(net.state_dict(), str(temporary))
    return top1({"logits": logits}, parts["test"])


def top1(outputs: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> float:
    """Returns the top-1 accuracy, for ``accel optimize --metric``."""
    return float((outputs["logits"].argmax(1) == data["label"]).mean())
