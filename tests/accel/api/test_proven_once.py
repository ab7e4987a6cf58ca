"""Proves that an export compares only its last file with PyTorch, and still finds the faults of every step."""

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
from accel.artifact import Artifact
from accel.converters.from_torch import onnx_from_torch as stage
from accel.converters.graph import simplify as simplify_stage
from accel.errors import GateFailed
from accel.runtimes.base import BaseSession

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


def test_a_wrong_simplification_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a fault of the second stage passes, if the first stage is blamed, or if the wrong file isn't set
    aside."""
    write = simplify_stage.onnx_artifact

    def wrong(src: Artifact, model: Any, out: Path, *rest: Any) -> Artifact:
        made = write(src, model, out, *rest)
        spoilt(out)
        return made

    monkeypatch.setattr(simplify_stage, "onnx_artifact", wrong)
    with pytest.raises(GateFailed, match=r"stage simplify changed the output .*m\.onnx\.rejected"):
        accel.export(net(), inputs=INPUTS, out=tmp_path / "m.onnx", use_cache=False)
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx.rejected"]
