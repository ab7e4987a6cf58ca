"""Proves that accel doctor lists installed and missing dependencies, with an install command for each missing
dependency."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from accel.api.doctor import doctor
from accel.converters.to_others.saved_model_from_onnx import ONNX2TF
from accel.errors import MissingExtra
from accel.tables.target import TARGETS
from tests.support import ROOT

# These extras combine other extras, or install packages for accel's own development.
NOT_PARTS = {"all-cpu", "demo", "dev", "docs"}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parts() -> dict[str, dict[str, Any]]:
    found = doctor()["parts"]
    assert len({row["name"] for row in found}) == len(found)
    return {plain(row["name"]): row for row in found}


def test_every_dependency_of_every_extra_has_its_row() -> None:
    """Checks that `accel doctor` lists every extra of pyproject.toml, and each dependency under the right extra. Also
    checks that the list has every dependency for this machine and every package in ``ONNX2TF``."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    rows = parts()
    named = {}
    for extra in extras.keys() - NOT_PARTS:
        wanted = [Requirement(line) for line in extras[extra]]
        names = [plain(r.name) for r in wanted if r.marker is None or r.marker.evaluate()]
        missing = [name for name in names if name not in rows]
        assert not missing, f"accel doctor doesn't know {missing} of [{extra}]"
        named[extra] = names
    for extra, names in named.items():
        assert any(row["extra"] == extra for row in rows.values()), extra
        assert all(rows[name]["extra"] in named for name in names)
    for name, row in rows.items():
        assert row["brings"]
        if row["extra"] is not None:
            assert name in named[row["extra"]]
    assert {plain(word.partition("==")[0]) for word in ONNX2TF.split() if "==" in word} <= rows.keys()


def test_a_missing_part_and_a_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that accel gives an install command for a missing dependency, and for a dependency that has metadata but
    no code. Also fails if accel gives an install command for a working dependency."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find(name, *a))
    found = parts()
    assert found["onnx"]["installed"] is True
    assert found["onnx"]["install"] is None
    for row in found.values():
        assert (row["install"] is None) == row["installed"]
        if row["extra"] and row["version"] is None:
            assert f"accel-toolchain[{row['extra']}]" in row["install"]
    dist = tmp_path / "ray-2.50.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.50.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    ray = parts()["ray"]
    assert (ray["version"], ray["installed"]) == ("2.50.0", False)
    assert ray["install"] == "pip install --force-reinstall --no-deps ray==2.50.0"


def test_one_command_installs_an_extra() -> None:
    """Fails if doctor, the errors, the README and the pages name different commands for an extra of an installed
    accel. Only the first installation reads a checkout."""
    for row in parts().values():
        if row["extra"] and row["version"] is None:
            assert row["install"] == str(MissingExtra("it", row["extra"])).partition("run: ")[2]
    form = re.compile(r'pip install "accel-toolchain\[[a-z0-9,-]+\]"')
    first = 'pip install -c constraints.txt ".[all-cpu]"'
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = " ".join(page.read_text(encoding="utf-8").split()).replace(first, "")
        assert '".[' not in text, page
        for found in re.finditer(r"pip install [^`]*accel-toolchain", text):
            assert form.match(text, found.start()), f"{page}: {text[found.start() : found.end() + 20]}"


def test_the_command(cli: Any) -> None:
    """Checks that --json prints a single object with the dependencies, all targets and the machine. Also checks that
    the table lists every dependency and target."""
    ran = cli("doctor", "--json")
    assert ran.code == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 1
    body = json.loads(ran.stdout)
    assert body.keys() >= {"python", "parts", "targets", "machine", "cache"}
    assert [row["name"] for row in body["targets"]] == list(TARGETS)
    assert next(row for row in body["targets"] if row["name"] == "ort-cpu")["runs"] is True
    assert body["machine"]["cores"] >= 1
    shown = cli("doctor")
    assert shown.code == 0, shown.stderr
    assert body["python"] in shown.stdout
    for row in (*body["parts"], *body["targets"]):
        assert f" {row['name']} " in shown.stdout


def test_a_long_command_is_shown_once(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the table repeats the command that installs all parts of onnx2tf. Also checks that the table and the
    JSON give a command for every missing part."""
    parts = {"onnx2tf": "onnx2tf", "sng4onnx": "sng4onnx", "tf-keras": "tf_keras", "ray": "ray", "aiohttp": "aiohttp"}
    version, find = importlib.metadata.version, importlib.util.find_spec

    def missing(name: str) -> str:
        if name in parts:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in parts.values() else find(name, *a)
    )
    commands = {row["name"]: row["install"] for row in doctor()["parts"]}
    assert commands["onnx2tf"] == commands["tf-keras"] == commands["sng4onnx"] == ONNX2TF
    shown = cli("doctor").stdout
    assert shown.count("onnx-graphsurgeon==") == 1
    assert shown.count("the command of onnx2tf") >= 2
    for extra in ("ray", "serve"):
        assert f"accel-toolchain[{extra}]" in shown


def test_the_line_of_onnx2tf_is_its_file() -> None:
    """Checks that accel's install command for onnx2tf names the versions that the test suite installs. The versions are
    in onnx2tf.txt and again in the code, because a wheel doesn't contain onnx2tf.txt."""
    lines = (ROOT / "onnx2tf.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.strip() for line in lines if line.strip() and not line.startswith("#")}
    words = ONNX2TF.split()
    assert words[:3] == ["pip", "install", "--no-deps"]
    assert set(words[3:]) == pins
    assert all("==" in pin for pin in pins)
