"""Proves that accel optimize tries the recipes first that give the largest speedup for the time that they take."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import accel
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.recipes import openvino, order
from accel.optimizer.recipes.candidates import recipes, targets_for
from accel.optimizer.recipes.recipe import Recipe, RecipeRequest


@pytest.fixture(scope="module")
def perceptron(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return accel.export(net, example=(torch.randn(2, 4),), out=tmp_path_factory.mktemp("net") / "net.onnx")


@pytest.fixture
def made(perceptron: Artifact, monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    monkeypatch.setattr(openvino, "cpu_has_bf16", lambda: True)
    request = RecipeRequest(targets=targets_for("auto"), precisions=None, data=Path("x.npz"), samples=8, threads=2)
    return recipes(perceptron, request)[0]


def names(found: list[Recipe]) -> list[str]:
    return [one.name for one in found]


@pytest.mark.parametrize(
    ("kind", "first"), [(order.TRANSFORMER, "ort-cpu int8 dynamic"), (order.OTHER, "openvino bf16")]
)
def test_cheap_speedups_come_first(
    kind: str, first: str, perceptron: Artifact, made: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a large model waits for a calibration although a quick recipe gives a good speedup. Also fails if a
    recipe comes first that doesn't make this kind of model faster."""
    monkeypatch.setattr(order, "kind_of", lambda _: kind)
    monkeypatch.setattr(order, "megabytes", lambda _: 400.0)
    monkeypatch.setattr(order, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(order, "int8_saturates", lambda: False)
    found = names(order.Costs(perceptron, StageCache(tmp_path)).in_order(made))
    assert sorted(found) == sorted(names(made))
    assert found[:3] == [first, "openvino int8", "openvino int8+bf16"]


class Mixed(torch.nn.Module):
    """Computes attention between the pixels of an image, after convolutions with ``width`` channels, and before a
    perceptron with ``hidden`` features."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.convolved = torch.nn.Sequential(
            torch.nn.Conv2d(3, width, 3, padding=1), torch.nn.Conv2d(width, 8, 3, padding=1)
        )
        self.project = torch.nn.Linear(8, 24)
        self.perceptron = torch.nn.Sequential(torch.nn.Linear(8, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.convolved(x).flatten(2).transpose(1, 2)).chunk(3, -1)
        return self.perceptron(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


@pytest.mark.parametrize(
    ("width", "hidden", "first"), [(64, 16, "openvino fp32"), (2, 512, "ort-cpu int8 dynamic"), (2, 2, "openvino fp32")]
)
def test_what_takes_the_time_of_a_model_with_attention(
    width: int, hidden: int, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if dynamic int8 comes first for a network with attention although convolutions or the attention's own
    products take most of the time, or if it comes later although the products with weights take most of the time."""
    example = (torch.randn(2, 3, 8, 8),)
    net = accel.export(Mixed(width, hidden), example=example, out=tmp_path / "net.onnx")
    monkeypatch.setattr(order, "cpu_has_bf16", lambda: False)
    monkeypatch.setattr(order, "int8_saturates", lambda: False)
    request = RecipeRequest(targets=targets_for("auto"), precisions=None, data=None, samples=0, threads=2)
    found = names(order.Costs(net, StageCache(tmp_path / "cache")).in_order(recipes(net, request)[0]))
    assert found[0] == first
    assert {"openvino fp32", "ort-cpu int8 dynamic"} <= set(found)


def test_earlier_runs_change_the_order(
    perceptron: Artifact, made: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the measured speedup and time of a recipe don't change its place in the next run of a model of about the
    same size, or if they change its place for a model of another size."""
    cache = StageCache(tmp_path / "cache")
    monkeypatch.setattr(order, "megabytes", lambda _: 400.0)
    slow = next(one for one in made if one.name == "ort-cpu int8 static")
    assert order.Costs(perceptron, cache).in_order(made)[0] is not slow
    manifest = perceptron.manifest
    assert manifest is not None
    stages = tuple({"name": step.stage, "seconds": 0.1, "key": ""} for step in slow.stages)
    artifact = perceptron.with_manifest(replace(manifest, stages=stages))
    row = CandidateResult(name=slow.name, recipe=slow, artifact=artifact, measured={"speedup": 20.0})
    failed = CandidateResult(name="failed", recipe=made[0], artifact=None, measured={"speedup": None})
    order.Costs(perceptron, cache).remember([row, failed])
    assert order.Costs(perceptron, cache).in_order(made)[0] is slow
    monkeypatch.setattr(order, "megabytes", lambda _: 4.0)  # a small model has averages of its own
    assert order.Costs(perceptron, cache).in_order(made)[0] is not slow
    monkeypatch.setattr(order, "megabytes", lambda _: 400.0)
    row.measured = {"speedup": 0.5}
    for _ in range(100):
        order.Costs(perceptron, cache).remember([row])
    assert order.Costs(perceptron, cache).in_order(made)[0] is not slow


def test_recipes_without_torch(perceptron: Artifact) -> None:
    """Fails if the choice of recipes for an ONNX file imports torch, which takes seconds of a short time budget."""
    code = (
        "import sys; from pathlib import Path; from accel.artifact import Artifact;"
        "from accel.optimizer.recipes.candidates import recipes, targets_for;"
        "from accel.optimizer.recipes.recipe import RecipeRequest;"
        "request = RecipeRequest(targets=targets_for('auto'), precisions=None, data=None, samples=0, threads=2);"
        "made = recipes(Artifact.open(Path(sys.argv[1])), request)[0];"
        "print(len(made) > 1, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code, perceptron.path], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["True", "False"]
