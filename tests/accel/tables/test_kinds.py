"""Proves that a new format for accel export needs only a converter and a row in each table."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import accel
from accel.artifact import Artifact
from accel.errors import SignatureDrift, UnknownName
from accel.signature import Signature
from accel.sources.main_file import main_file
from accel.sources.onnx.file import describe
from accel.stage import StageConfig
from accel.tables.kinds import KINDS, Kind, kind_of
from accel.tables.stage_table import STAGES, Stage, route

KIND = Kind(
    name="toy", main_file="model.toy", runtimes=("onnxruntime",), reader=f"{__name__}:read_back", export_as="toy"
)
STAGE = Stage(
    name="toy_from_onnx",
    function=f"{__name__}:toy_from_onnx",
    config=f"{__name__}:ToyConfig",
    takes=("onnx",),
    gives="toy",
    packages=("onnx",),
)
MODEL = '<ir_version: 10, opset_import: ["": 20]> g (float[batch, 4] x) => (float[batch, 4] y) { y = Relu (x) }'
# If LOSES holds a name, the toy converter wrongly renames the model's output to this name.
LOSES: list[str] = []


@dataclass(frozen=True, kw_only=True)
class ToyConfig(StageConfig):
    """The toy converter has no options."""


def toy_from_onnx(src: Artifact, config: ToyConfig, out: Path) -> Artifact:
    shutil.copyfile(src.path, out)
    if LOSES:
        model = onnx.load(str(out))
        model.graph.output[0].name = LOSES[0]
        model.graph.node[-1].output[0] = LOSES[0]
        onnx.save(model, str(out))
    return Artifact(path=out, kind="toy", signature=src.signature)


def read_back(path: Path, known: Signature) -> Any:
    return describe(path)


@pytest.fixture
def source(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules["test_kinds"])
    monkeypatch.setitem(KINDS, "toy", KIND)
    monkeypatch.setattr("accel.tables.stage_table.STAGES", (*STAGES, STAGE))
    path = tmp_path / "affine.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), str(path))
    return path


def test_a_format_is_a_converter_and_its_rows(source: Path, tmp_path: Path) -> None:
    """Checks that accel exports to a format that has a converter and table rows, and that accel finds, checks and runs
    the exported file."""
    made = accel.export(source, to="toy", out=tmp_path / "out")
    assert made.path == tmp_path / "out" / "model.toy" == main_file(tmp_path / "out")
    assert kind_of(made.path) == made.kind == "toy"
    assert [record["name"] for record in made.history] == ["toy_from_onnx"]
    assert all(gate["passed"] for gate in made.history[-1]["gates"])
    assert accel.inspect(made.path, check=True).intact
    with accel.load(source) as wanted, accel.load(tmp_path / "out") as found:
        feeds = wanted.example_inputs(batch=3)
        np.testing.assert_array_equal(found.run(feeds)["y"], wanted.run(feeds)["y"])
    with pytest.raises(UnknownName, match=r"to= takes .*toy"):
        accel.export(source, to="game", out=tmp_path / "other")


def test_its_reader_holds_the_contract(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that accel reads the signature of an exported file with the reader in the table, and so notices a renamed
    output."""
    monkeypatch.setattr(f"{__name__}.LOSES", ["lost"])
    with pytest.raises(SignatureDrift, match="stage toy_from_onnx lost the output 'y'; the remaining outputs: lost"):
        accel.export(source, to="toy", out=tmp_path / "out")
    assert not (tmp_path / "out" / "model.toy").exists()


def test_routes() -> None:
    """Checks that accel chooses the shortest chain of stages to a format, and refuses a format that no chain
    reaches."""
    assert [stage.name for stage in route("onnx", "tflite")] == ["saved_model_from_onnx", "tflite_from_saved_model"]
    assert [stage.name for stage in route("onnx", "torch")] == ["torch_from_onnx"]
    assert route("onnx", "onnx") == ()
    with pytest.raises(UnknownName, match="no stages convert engine to onnx; engine can be converted to nothing"):
        route("engine", "onnx")
