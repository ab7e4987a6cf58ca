"""Proves that ONNX models convert to PyTorch modules that can be trained and exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import accel
from accel.artifact import Artifact
from accel.errors import AccelError


def test_training_goes_on(digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks that the weights of the converted module are trainable parameters."""
    accel.export(digits.path, to="torch", out=tmp_path / "torch")
    module = torch.export.load(tmp_path / "torch" / "model.pt2").module()
    with np.load(digits_data[1]) as test:
        image, label = torch.from_numpy(test["image"][:64]), torch.from_numpy(test["label"][:64])
    wrong = (label + 1) % 10
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        (logits,) = module(image)
        loss = torch.nn.functional.cross_entropy(logits, wrong)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(p.numel() for p in module.parameters()) > 50_000
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.proof(seconds=60)
def test_a_text_model_to_torch_and_back(minilm: Artifact, tmp_path: Path) -> None:
    """Converts a transformer from ONNX to PyTorch and back. Fails if the sequence length becomes fixed, or if the
    outputs change."""
    accel.export(minilm.path, to="torch", out=tmp_path / "torch")
    back = accel.export(tmp_path / "torch", out=tmp_path / "back.onnx")
    assert back.signature.inputs == minilm.signature.inputs
    assert accel.verify(minilm.path, back.path).passed


def test_an_operator_that_torch_has_not(tmp_path: Path) -> None:
    """Checks that the error names an operator that can't be converted to PyTorch."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Celu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "a.onnx")
    with pytest.raises(AccelError, match=r"Celu of a\.onnx"):
        accel.export(tmp_path / "a.onnx", to="torch", out=tmp_path / "out")
