"""Proves that the source runs on all calibration samples before a candidate is calibrated on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.artifact import Artifact
from accel.errors import BadData
from accel.optimizer import attempt
from accel.optimizer import run as module
from accel.proof.runs import Furthest
from accel.runtimes.base import BaseSession
from tests.support.onnx_builder import FLOAT, INT64, artifact, node, save_data

COUNT, BAD = 40, 15


@pytest.fixture
def lookup(tmp_path: Path) -> tuple[Artifact, Path]:
    """Makes a model that looks up rows of a table, and samples of which one names a missing row."""
    table = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    model = artifact(
        tmp_path / "m.onnx",
        [node("Gather", "table ids", "row"), node("MatMul", "row w", "y")],
        {"ids": (INT64, ["batch"])},
        {"y": (FLOAT, ["batch", 4])},
        {"table": table, "w": table[:4]},
    )
    ids = np.arange(COUNT) % 8
    ids[BAD] = 99
    return model, save_data(tmp_path / "data.npz", ids=ids)


def test_a_large_model_finds_its_bad_samples_later(
    lookup: tuple[Artifact, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the samples that are left out at first are never checked, or only after a candidate was calibrated on
    them. A small model runs on all of them before any candidate is made."""
    made: list[str] = []
    attempt_of = module.attempt

    def counting(recipe: Any, *rest: Any) -> Any:
        made.append(recipe.name)
        return attempt_of(recipe, *rest)

    monkeypatch.setattr(module, "attempt", counting)
    model, data = lookup
    words = {"data": data, "target": "ort-cpu", "vary_session": False, "rounds": 5}
    plain = ["ort-cpu fp32"]
    for megabytes, precision, candidates in ((100.0, "fp32", []), (0.0, "fp32", plain), (0.0, "int8", [])):
        made.clear()
        monkeypatch.setattr(module, "LARGE_MEGABYTES", megabytes)
        with pytest.raises(BadData, match=f"sample {BAD}: "):
            accel.optimize(model.path, out=tmp_path / "out", precision=precision, **words)
        assert made == candidates


def test_a_large_model_has_few_runs_before_its_first_candidate(
    lookup: tuple[Artifact, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a large model runs on most of its samples before the first candidate is judged, although each run may
    take seconds. The samples of the judge don't count, because no candidate can be judged without them."""
    model, data = lookup
    save_data(data, ids=np.arange(COUNT) % 8)
    checked: list[int] = []
    monkeypatch.setattr("accel.api.as_onnx.check_samples", lambda *given, **_: checked.append(given[2]) or Furthest())
    gates: list[int] = []
    gates_of = attempt.gates_of

    def counting(*given: Any) -> Any:
        made = gates_of(*given)
        gates.extend(gate.samples for gate in made)
        return made

    monkeypatch.setattr(attempt, "gates_of", counting)
    for where in (module, attempt):
        monkeypatch.setattr(where, "LARGE_MEGABYTES", 0.0)
    words = {"data": data, "target": "ort-cpu", "precision": "fp32", "vary_session": False, "rounds": 5}
    accel.optimize(model.path, out=tmp_path / "out", **words)
    assert checked == [2, COUNT // 2]
    assert set(gates) == {8}


@pytest.mark.usefixtures("own_cache")
def test_random_inputs_take_no_time_beyond_the_budget(
    lookup: tuple[Artifact, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the source still runs on random inputs after the time is over, or if the run then gives no file."""
    runs: list[Any] = []
    run = BaseSession.run
    monkeypatch.setattr("accel.kept_outputs.find", lambda _: None)
    monkeypatch.setattr(BaseSession, "run", lambda self, feeds: runs.append(feeds) or run(self, feeds))
    found = accel.optimize(lookup[0].path, out=tmp_path / "out", budget_seconds=1e-3)
    assert found.chosen == "source"
    assert len(runs) == len(lookup[0].signature.cases())  # those that checked the file
    with accel.load(tmp_path / "out") as session:
        assert session.run({"ids": np.array([2])})["y"].shape == (1, 4)
