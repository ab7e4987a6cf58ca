"""Proves that accel optimize tries the recipes first that give the largest speedup for the time that they take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import accel
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.recipes import order
from accel.optimizer.recipes.candidates import recipes, targets_for
from accel.optimizer.recipes.recipe import Recipe, RecipeRequest


@pytest.fixture(scope="module")
def perceptron(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return accel.export(net, example=(torch.randn(2, 4),), out=tmp_path_factory.mktemp("net") / "net.onnx")


@pytest.fixture
def made(perceptron: Artifact) -> list[Recipe]:
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
