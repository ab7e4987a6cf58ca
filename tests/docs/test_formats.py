"""Proves that the Python code and the commands in tensorflow.md and formats.md work in the order in which they
appear."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel.tables.kinds import export_formats
from tests.support import ROOT

DOCS = ROOT / "docs" / "how-to"
PAGES = ("tensorflow.md", "formats.md")


def test_every_route_has_an_example() -> None:
    """Checks that tensorflow.md or formats.md has a command for each input and output format. ``test_the_page`` runs
    the commands."""
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    exported = re.findall(r"^\$ accel export (\S+)(.*)$", text, flags=re.MULTILINE)
    endings = {Path(source).suffix or "a SavedModel" for source, _ in exported} | {
        "code" for source, _ in exported if ".py:" in source
    }
    assert {".keras", ".h5", ".pb", ".meta", ".tflite", ".onnx", "a SavedModel", "code"} <= endings
    assert any("get_concrete_function" in block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    tensorflow = ("--signature", "--strip-training-ops", "--placeholder", "--limit", "--channels")
    for option in (*tensorflow, "--normalize", "--layout", "--resize", "--dim", "--opset"):
        assert any(f"{option} " in words for _, words in exported), option
    for name in export_formats():
        assert name == "onnx" or any(f"--to {name} " in words for _, words in exported), name
    inspected = " ".join(re.findall(r"^\$ accel inspect (\S+)", text, flags=re.MULTILINE))
    for source in ("model.keras", "frozen.pb", "model.tflite", "openvino_dir/", "ncnn_dir/", "torch_dir/", ".onnx"):
        assert source in inspected, source


class Reader:
    """Runs all Python blocks of a page in one interpreter, so that a block can use the imports and variables of earlier
    blocks."""

    def __init__(self, log: Path) -> None:
        self._log = log
        loop = (
            "import json, sys\nfor line in sys.stdin:\n exec(json.loads(line), globals())\n print('\\n>>>', flush=True)"
        )
        with log.open("wb") as errors:
            self._python = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", loop],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, block: str) -> None:
        assert self._python.stdin
        assert self._python.stdout
        self._python.stdin.write(json.dumps(block) + "\n")
        self._python.stdin.flush()
        assert any(line == ">>>\n" for line in self._python.stdout), self._log.read_text(errors="replace")[-1500:]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._python.kill()
        self._python.communicate()


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_page(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    """Checks that the Python blocks run without errors, and that the commands work as written."""
    monkeypatch.chdir(tmp_path)
    ran = 0
    with Reader(tmp_path / "reader.log") as reader:
        for language, block in re.findall(r"```(python|console)\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL):
            if language == "python":
                reader.run(block)
                continue
            for line in block.splitlines():
                words = shlex.split(line.removeprefix("$ "))
                assert words[0] == "accel"
                few = ["--rounds", "5", "--block-seconds", "0.01", "--budget-seconds", "0"]
                done = cli(*words[1:], *(few if words[1] == "bench" else []), "-q")
                assert done.code == 0, f"{line}: {done.stderr}"
                ran += 1
    assert ran >= 8
