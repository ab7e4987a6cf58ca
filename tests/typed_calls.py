"""Calls the public functions as a user in a notebook does.

``make lint`` checks these calls with mypy in strict mode, and so finds public types that a user's code can't meet. No
test runs this file.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import accel


def top1(outputs: dict[str, np.ndarray], data: dict[str, np.ndarray]) -> float:
    return float((outputs["output"].argmax(-1) == data["labels"]).mean())


def top1_of_mappings(outputs: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> float:
    return float((outputs["output"].argmax(-1) == data["labels"]).mean())


def calls(model: torch.nn.Module, x: torch.Tensor, images: torch.Tensor) -> None:
    """Calls each public function with a model in memory."""
    loader = DataLoader(TensorDataset(images, torch.zeros(len(images))), batch_size=32)
    fast = accel.optimize(model, example=(x,), data=loader, metric=top1, max_drop=0.01)
    accel.optimize(model, example={"input": x}, data={"input": x.numpy()}, metric=top1_of_mappings)
    accel.optimize(model, inputs=["input:float32[batch,3,8,8]"], data="samples.npz", metric="my.py:top1")
    y: torch.Tensor = fast(x)
    speedup: float | None = fast.speedup
    table: str = fast.table()
    saved: accel.Artifact = fast.save("out")
    with accel.load("out") as session:
        z: torch.Tensor = session(x)
        array: np.ndarray = session.run({"input": x.numpy()})["output"]
    exported: accel.Artifact = accel.export(model, example=(x,), dynamic={"input": {0: "batch", 2: "height"}})
    passed: bool = accel.verify(model, exported, example=(x,)).passed
    noisy: bool = accel.bench([fast, exported, "out"], against=model, example=(x,)).too_noisy
    print(y, speedup, table, saved.path, z, array, passed, noisy, torch.compile(model, backend="accel")(x))
