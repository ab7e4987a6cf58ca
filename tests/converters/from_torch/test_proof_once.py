"""Proves that export runs PyTorch and the exported file once per shape and records the comparison in the manifest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from accel import kept_outputs
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.from_torch.onnx_from_torch import SEEDS, OnnxFromTorchConfig
from accel.errors import ExportFailed
from accel.kept_outputs import Run
from accel.proof.gates import OutputGate, what_both_take
from accel.runtimes.base import BaseSession
from accel.sources.source import Source
from accel.stage import run_stage

SMALL = """
import torch

def small():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))

class Branch(torch.nn.Module):
    def forward(self, x):
        return x * 2 if len(torch.nonzero(x)) == 0 else x + 1
"""


@pytest.fixture
def source(tmp_path: Path) -> Artifact:
    (tmp_path / "small.py").write_text(SMALL)
    return Source(f"{tmp_path / 'small.py'}:small", inputs={"x": ("float32", ("batch", 4))}).open()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Counts the runs of each kind of artifact on each set of feeds. Turns off the gates' cache of outputs."""
    counted: Counter[tuple[str, str]] = Counter()
    run = BaseSession.run

    def counting(self: BaseSession, feeds: Any, *rest: Any, **words: Any) -> Any:
        counted[self.artifact.kind, Run.of("", "", feeds).inputs] += 1
        return run(self, feeds, *rest, **words)

    monkeypatch.setattr(BaseSession, "run", counting)
    monkeypatch.setattr(kept_outputs, "_MOST_BYTES", 0)
    kept_outputs.forget()
    return counted


@pytest.mark.parametrize("rung", ["dynamo", "legacy"])
def test_each_shape_runs_once(rung: str, source: Artifact, runs: Counter[tuple[str, str]], tmp_path: Path) -> None:
    """Fails if the comparison runs twice, once in the stage and once in ``run_stage``. Also fails if the comparison
    skips the extra seeds that a tracing exporter needs."""
    gate = OutputGate(limit=1e-4)
    made = run_stage(
        "onnx_from_torch", source, OnnxFromTorchConfig(ladder=(rung,)), gates=[gate], cache=StageCache(tmp_path / "c")
    )
    assert set(runs.values()) == {1}
    cases = len(what_both_take(source.signature, made.signature).cases())
    every = cases + SEEDS[rung] - 1
    # The source also runs with an empty batch. Its outputs are empty too, so there is nothing to compare.
    assert Counter(kind for kind, _ in runs) == {"torch": every + 1, "onnx": every}
    recorded = made.history[-1]["gates"]
    assert len(recorded) == cases + gate.seeds - 1
    assert all(row["passed"] and row["limit"] == gate.limit for row in recorded)


def test_exporters_are_held_to_the_gate_of_the_run(source: Artifact, tmp_path: Path) -> None:
    """Checks that an exported file must stay within the gate's limit, even if this limit is lower than the default
    limit."""
    with pytest.raises(ExportFailed, match=r"dynamo: the file's outputs are off: .*\(limit 1e-12\)"):
        run_stage(
            "onnx_from_torch",
            source,
            OnnxFromTorchConfig(),
            gates=[OutputGate(limit=1e-12)],
            cache=StageCache(tmp_path / "c"),
        )


def test_the_gate_runs_no_inputs_that_opening_the_model_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a model runs twice on the same inputs. Opening a model with a branch runs it on further inputs of the
    usual size, which the gate compares, too."""
    (tmp_path / "small.py").write_text(SMALL)
    ran: Counter[tuple[int, ...]] = Counter()
    run = BaseSession.run

    def counting(self: BaseSession, feeds: Any, *rest: Any, **words: Any) -> Any:
        ran[feeds["x"].shape] += 1
        return run(self, feeds, *rest, **words)

    monkeypatch.setattr(BaseSession, "run", counting)
    kept_outputs.forget()
    model = Source(f"{tmp_path / 'small.py'}:Branch", inputs={"x": ("float32", ("batch", 4))}).open()
    assert all(result.passed for result in OutputGate(limit=1e-6).check(model, model))
    assert ran == {(8, 4): 1}
