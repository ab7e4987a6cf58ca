"""Proves that each script in examples/ runs unchanged in an empty folder and prints the expected result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
# Maps each script to the text that the script prints.
PROMISES = {
    "engine_for_another_gpu": "tensorrt-rtx fp16        chosen",
    "optimize_image": "chosen: ",
    "optimize_text": "ms   1.00x",
    "serve_and_ask": "answer: (8, 4)",
    "train_and_export": "prices: [",
}


def test_there_are_five_short_ones() -> None:
    """Checks that every script has a test and at most 60 lines. The scripts have to be short, because users copy
    them."""
    assert [script.stem for script in SCRIPTS] == sorted(PROMISES)
    for script in SCRIPTS:
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 60, script


@pytest.mark.proof(seconds=30)
@pytest.mark.parametrize("name", PROMISES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """Checks that the script runs without errors and prints its result. Only the measurements of ``accel optimize`` are
    shorter than a user's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "default"}
    script = ROOT / "examples" / f"{name}.py"
    words = [sys.executable, "-m", "tests.short_measurements", str(script)]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert PROMISES[name] in ran.stdout
