"""Proves that an export compares only its last file with PyTorch, and still finds the faults of every step. The export
of ``accel optimize`` does the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import accel
from accel.api.as_onnx import as_onnx
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.from_torch import onnx_from_torch as stage
from accel.converters.graph import simplify as simplify_stage
from accel.errors import GateFailed
from accel.optimizer.recipes.steps import simplify
from accel.runtimes.base import BaseSession
from accel.sources.declare import parse_inputs
from accel.sources.source import Source

INPUTS = {"x": "float32[batch,4]"}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).eval()


def spoilt(path: Path) -> None:
    """Changes a weight of an ONNX file."""
    model = onnx.load(path)
    weight = next(t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
    onnx.save(model, path)


def of_stage(made: Artifact, name: str) -> Any:
    return next(record for record in made.history if record["name"] == name)


def test_the_exported_file_runs_only_in_its_simplified_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if an export runs the files of both stages on the same inputs, or if the record says that more was
    compared than was."""
    runs: Counter[tuple[str, str]] = Counter()
    run = BaseSession.run

    def counting(self: BaseSession, *args: Any, **words: Any) -> Any:
        runs[self.artifact.kind, self.artifact.content_digest] += 1
        return run(self, *args, **words)

    monkeypatch.setattr(BaseSession, "run", counting)
    made = accel.export(net(), inputs=INPUTS, out=tmp_path / "m.onnx", use_cache=False)
    assert [digest for kind, digest in runs if kind == "onnx"] == [made.content_digest]
    assert of_stage(made, "onnx_from_torch")["gates"] == []
    results = of_stage(made, "simplify")["gates"]
    cases = {row["case"] for row in results}
    assert cases >= {"batch=1", "batch=2", "batch=8"}
    assert sum("seed" in case for case in cases) == 2
    assert {row["gate"] for row in results} == {"outputs, compared with the source"}
    assert sum(count for (kind, _), count in runs.items() if kind == "onnx") == len(results)


def test_a_wrong_exporter_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if an exporter with a fault isn't refused, or if the next exporter isn't tried."""
    exporter = stage._RUNGS["dynamo"]

    def wrong(src: Artifact, opset: int, out: Path) -> None:
        exporter(src, opset, out)
        spoilt(out)

    monkeypatch.setitem(stage._RUNGS, "dynamo", wrong)
    made = accel.export(net(), inputs=INPUTS, out=tmp_path / "m.onnx", use_cache=False)
    notes = of_stage(made, "onnx_from_torch")["notes"]
    assert notes["rung"] == "legacy"
    assert "the file's outputs are off" in notes["refused"]["dynamo"]
    assert not list(tmp_path.glob("*.rejected"))


@pytest.fixture
def wrong_simplification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the stage simplify write a file with other outputs."""
    write = simplify_stage.onnx_artifact

    def wrong(src: Artifact, model: Any, out: Path, *rest: Any) -> Artifact:
        made = write(src, model, out, *rest)
        spoilt(out)
        return made

    monkeypatch.setattr(simplify_stage, "onnx_artifact", wrong)


@pytest.mark.usefixtures("wrong_simplification")
def test_a_wrong_simplification_is_found(tmp_path: Path) -> None:
    """Fails if a fault of the second stage passes, if the first stage is blamed, or if the wrong file isn't set
    aside."""
    with pytest.raises(GateFailed, match=r"stage simplify changed the output .*m\.onnx\.rejected"):
        accel.export(net(), inputs=INPUTS, out=tmp_path / "m.onnx", use_cache=False)
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx.rejected"]


def opened_to_optimize(folder: Path) -> Artifact:
    """Returns the ONNX file that ``accel optimize`` would make its candidates from."""
    (folder / "net.py").write_text(
        "import torch\ndef make():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).eval()\n"
    )
    source = Source(f"{folder / 'net.py'}:make", inputs=parse_inputs(INPUTS))
    return as_onnx(source, StageCache(folder / "cache")).artifact


def test_optimize_starts_from_the_simplified_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if ``accel optimize`` runs the exported file before its simplification, if every candidate simplifies it
    again, or if it isn't compared with PyTorch."""
    runs: Counter[str] = Counter()
    run = BaseSession.run

    def counting(self: BaseSession, *args: Any, **words: Any) -> Any:
        runs[self.artifact.content_digest] += self.artifact.kind == "onnx"
        return run(self, *args, **words)

    monkeypatch.setattr(BaseSession, "run", counting)
    made = opened_to_optimize(tmp_path)
    assert {digest for digest, count in runs.items() if count} == {made.content_digest}
    assert simplify(made) == []
    assert {row["gate"] for row in of_stage(made, "simplify")["gates"]} == {"outputs, compared with the source"}


@pytest.mark.usefixtures("wrong_simplification")
def test_optimize_starts_from_the_exported_file_if_the_simplified_one_is_wrong(tmp_path: Path) -> None:
    """Fails if a wrong simplification ends ``accel optimize``, or if ``accel optimize`` starts from the wrong file."""
    made = opened_to_optimize(tmp_path)
    assert [record["name"] for record in made.history] == ["onnx_from_torch"]
    assert made.history[0]["gates"]
