"""Proves that the documented commands work exactly as written and in order, on a real text model and on a user's
factory."""

from __future__ import annotations

import functools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import transformers

from accel.cli import group
from accel.examples import demo, minilm

MY_MODEL = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(7200, 10))
"""
PYTHON = (
    "import accel; "
    "a = accel.export('my_model.py:make', inputs={'x': ('float32', ('batch', 3, 32, 32))}, out='my.onnx'); "
    "s = accel.load(a); print(s.run(s.example_inputs(batch=2)))"
)


@pytest.mark.proof(seconds=150)
@pytest.mark.timeout(2400)
def test_the_main_job(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that each documented command works as written, and that its JSON is one object with the documented
    fields. To save minutes, the text model has only the first two of its six equal layers, the data has 16 samples, and
    ``accel bench`` measures no extra rounds."""
    whole = transformers.AutoModel.from_pretrained
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", functools.partial(whole, num_hidden_layers=2))
    bench = group.get_command(click.Context(group), "bench")
    assert bench is not None
    (budget,) = (option for option in bench.params if option.name == "budget_seconds")
    monkeypatch.setattr(budget, "default", 0.0)
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(MY_MODEL)
    np.savez("calib.npz", **minilm.calibration_data(16))  # type: ignore[arg-type]

    def run(line: str) -> Any:
        ran = cli(*shlex.split(line, comments=True)[1:])
        assert ran.code == 0, f"{line}: {ran.stderr}"
        if "--json" not in line:
            return None
        assert ran.stdout.count("\n") == 1
        return json.loads(ran.stdout)

    run("accel export accel.examples.minilm:model -o minilm.onnx")
    run("accel export my_model.py:make --input x:float32[batch,3,32,32] -o my.onnx")
    run("accel optimize minilm.onnx --target auto --data calib.npz --max-drop 0.01 -o out/")
    run(
        "accel optimize minilm.onnx --target tensorrt-rtx --precision fp16 --profile input_ids=1x8,8x128,64x512 "
        "--profile attention_mask=1x8,8x128,64x512 --compute-capability 8.6 -o engine/"
    )
    rows = run("accel bench out/ --against accel.examples.minilm:model --json")["results"]
    wanted = {"name", "median_ms", "p99_ms", "speedup", "ci95", "verdict", "max_abs_diff"}
    # If the chosen session has fewer threads than the baseline, the baseline is also timed with as few.
    assert [row["runtime"] == "torch" for row in rows] in ([True, False], [True, True, False])
    assert all(wanted <= set(row) for row in rows)
    assert rows[-1]["max_abs_diff"] is not None
    verified = run("accel verify minilm.onnx out/ --data calib.npz --json")
    assert verified["passed"] is True
    assert set(verified["outputs"]) == set(minilm_outputs())
    chain = run("accel inspect out/ --check --json")
    assert chain["intact"] is True
    assert len(chain["chain"]) >= 3
    engine = run("accel inspect engine/ --check --json")
    assert engine["intact"] is True
    assert engine["properties"]["profiles"][0]["input_ids"] == [[1, 8], [8, 128], [64, 512]]
    assert engine["kernels"]
    found = run("accel doctor --json")
    assert found["parts"]
    ran = subprocess.run([sys.executable, "-c", PYTHON], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "array(" in ran.stdout


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the demo's commands pass only known arguments, time each net against PyTorch, and optimize with a
    task metric, or with held-out text."""
    lines: list[tuple[str, ...]] = []

    def listed(*words: str, folder: Path) -> None:
        assert folder == tmp_path
        lines.append(words)

    monkeypatch.setattr(demo, "prepare", Path.exists)  # this test doesn't need the demo's data
    monkeypatch.setattr(demo, "accel", listed)
    monkeypatch.setattr(demo.writer, "write_texts", lambda _: None)  # no command has made the folder
    demo.main(tmp_path)
    for name, *words in lines:
        command = group.get_command(click.Context(group), name)
        assert command is not None, name
        command.make_context(name, list(words))
    timed = {line[1]: line[line.index("--against") + 1] for line in lines if line[0] == "bench"}
    assert timed == {"digits/": "digits-run/", "minilm/": "accel.examples.minilm:model"}
    assert all({"--metric", "--text"} & set(line) for line in lines if line[0] == "optimize")


def minilm_outputs() -> list[str]:
    """Returns the names of the exported model's outputs."""
    import onnx

    return [output.name for output in onnx.load("minilm.onnx", load_external_data=False).graph.output]
