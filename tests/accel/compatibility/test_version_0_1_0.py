"""Proves that files of version 0.1.0 still work: manifests, folders of accel optimize, run folders, configs, and the
cache of stages.

Four commands of version 0.1.0 wrote the files of ``v0_1_0/`` in a folder ``/model``. The commands were ``accel export
net.py:make --input x:float32[batch,4]``, ``accel optimize net.onnx``, ``accel export net.onnx --to openvino`` and
``accel train train.toml``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.artifact import Artifact
from accel.cache import StageCache

OLD = Path(__file__).with_name("v0_1_0")
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies the files of 0.1.0 and makes the copy the current folder."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def outputs(model: str) -> np.ndarray:
    with accel.load(model) as session:
        return next(iter(session.run({"x": X}).values()))


def test_artifacts_are_opened(old: Path) -> None:
    """Checks that accel loads the ONNX file, the OpenVINO IR and the optimized folder of 0.1.0, and that their outputs
    agree."""
    wanted = outputs("net.onnx")
    assert np.allclose(outputs("ir"), wanted, atol=1e-6)
    assert np.allclose(outputs("optimized"), wanted, atol=1e-6)
    assert [record["name"] for record in Artifact.open(old / "net.onnx").history] == ["onnx_from_torch", "simplify"]


def test_the_chain_is_followed(old: Path) -> None:
    """Checks that the hashes recorded by 0.1.0 match the files, and that the hash check finds a changed file."""
    hold = {link.path: link.status for link in accel.inspect("net.onnx", check=True).chain}
    assert hold["net.onnx"] == "ok"
    (old / "net.onnx").write_bytes((old / "net.onnx").read_bytes()[:-1] + b"x")
    assert not accel.inspect("net.onnx", check=True).intact


def test_the_report_of_optimize_names_the_choice(old: Path, cli: Any) -> None:
    """Checks that accel reads an optimize.json of 0.1.0, and opens the model file that the key ``chosen`` names."""
    chosen = json.loads((old / "optimized" / "optimize.json").read_text())["chosen"]["file"]
    ran = cli("inspect", "optimized", "--json")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["path"].endswith(chosen)


def test_a_run_is_exported_and_goes_on(old: Path, cli: Any) -> None:
    """Checks that accel exports a run folder of 0.1.0, and continues the training from the folder's checkpoint."""
    ran = cli("export", "run", "--input", "x:float32[batch,4]", "-o", "trained.onnx", "-q")
    assert ran.code == 0, ran.stderr
    ran = cli("train", "train.toml", "--steps", "6", "--out", "run", "-q", "--json")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["steps"] == 6


def test_an_entry_of_the_cache_is_found(old: Path) -> None:
    """Checks that accel reads a stage result from the cache of 0.1.0."""
    (entry,) = (old / "cache" / "stages").iterdir()
    found = StageCache(old / "cache").find(entry.name)
    assert found is not None
    assert found.history[-1]["name"] == "simplify"


def test_an_artifact_is_made_again(old: Path, cli: Any) -> None:
    """Fails if an artifact of 0.1.0 can't be made again. 0.1.0 recorded a hash of the source that covers fewer things
    than today's. Also fails if an edited source is taken for the recorded one."""
    ran = cli("reproduce", "net.onnx", "--json")
    assert ran.code == 0, ran.stderr
    (old / "net.py").write_text((old / "net.py").read_text() + "\n# edited\n")
    ran = cli("reproduce", "net.onnx")
    assert (ran.code, "restore the original code" in ran.stderr) == (1, True), ran.stderr
