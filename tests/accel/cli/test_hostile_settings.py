"""Proves that contradictory or nonsensical settings give a one-line error, and that unusual paths and misbehaving user
code do no harm. ``test_bad_input.py`` and ``test_bench_command.py`` test more settings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from tests.accel.cli import hostile_files as make

CODE = """
import os, sys
from pathlib import Path

def ends(outputs, data): sys.exit(0)
def forever(outputs, data): return forever(outputs, data)
def word(outputs, data): return "good"
def array(outputs, data): return outputs["y"]
def nothing(outputs, data): return None
def infinite(outputs, data): return float("inf")
def lines(outputs, data): raise ValueError("one\\ntwo\\nthree")
def stops(outputs, data): raise KeyboardInterrupt

def factory_ends(): sys.exit(3)
def factory_raises(): raise RuntimeError("first\\nsecond")
def factory_none(): return None
"""
SYNTAX = "def metric(outputs, data:\n"
LEAVES = "import sys\nsys.exit(0)\n"


def two_inputs() -> onnx.ModelProto:
    """Makes the model ``y = a @ w + b``, where a and b are float32[batch, 4]."""
    value = helper.make_tensor_value_info
    names = ("a", "b")
    return make.small(
        inputs=[value(name, TensorProto.FLOAT, ["batch", 4]) for name in names],
        nodes=[helper.make_node("MatMul", ["a", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])],
        weights=[numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, _one_cache: None) -> Path:
    """Makes a folder of valid files for commands with bad settings."""
    here = tmp_path_factory.mktemp("settings")
    onnx.save(make.small(), here / "m.onnx")
    onnx.save(two_inputs(), here / "two.onnx")
    (here / "code.py").write_text(CODE)
    (here / "syntax.py").write_text(SYNTAX)
    (here / "leaves.py").write_text(LEAVES)
    (here / "a file").write_text("in the way")
    np.savez(here / "d.npz", x=np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32))
    os.mkfifo(here / "pipe.onnx")
    os.mkfifo(here / "pipe.npz")
    os.mkfifo(here / "pipe.pt")
    (here / "loop.onnx").symlink_to("loop.onnx")
    (here / "zero.onnx").symlink_to("/dev/zero")
    (here / "zero.npz").symlink_to("/dev/zero")
    (here / "dangling.onnx").symlink_to("nowhere.onnx")
    (here / "folder.onnx").mkdir()
    (here / "folder").mkdir()
    accel.optimize(here / "m.onnx", target="ort-cpu", precision="fp32", out=here / "out", rounds=5, vary_session=False)
    return here


OPTIMIZE = ("optimize", "{d}/m.onnx", "--target", "ort-cpu", "-o", "{d}/out")
ENGINE = ("optimize", "{d}/two.onnx", "--target", "tensorrt-rtx", "--precision", "fp32", "-o", "{d}/out")
BENCH = ("bench", "{d}/m.onnx")
EXPORT = ("export", "{d}/m.onnx", "-o", "{d}/o.onnx")
METRIC = (*OPTIMIZE, "--data", "{d}/d.npz", "--metric")

# Each row holds the arguments, the exit code, and a pattern for the message.
SETTINGS: list[tuple[tuple[str, ...], int, str]] = [
    ((*OPTIMIZE, "--rounds", "-1"), 2, "x>=5"),
    ((*OPTIMIZE, "--rounds", "many"), 2, "not a valid integer"),
    ((*OPTIMIZE, "--threads", "-3"), 2, "threads"),
    ((*OPTIMIZE, "--max-drop", "nan"), 2, "give e.g. 0.01 for one percent"),
    ((*OPTIMIZE, "--max-drop", "-0.1"), 2, "give e.g. 0.01 for one percent"),
    ((*OPTIMIZE, "--max-drop", "inf"), 2, "give e.g. 0.01 for one percent"),
    ((*OPTIMIZE, "--sizes", "batch=-1"), 2, "write NAME=SIZE"),
    ((*OPTIMIZE, "--sizes", "batch=0"), 2, "sizes start at 1"),
    ((*OPTIMIZE, "--sizes", "batch=²"), 2, "write NAME=SIZE"),
    ((*OPTIMIZE, "--sizes", "batch=1=2"), 2, "write NAME=SIZE"),
    ((*OPTIMIZE, "--sizes", "batch=100000000000000"), 1, "memory"),
    ((*OPTIMIZE, "--dim", "batch=0:1:2"), 2, "1 <= min <= opt <= max"),
    ((*OPTIMIZE, "--dim", "batch=1:2"), 2, "write min:opt:max"),
    ((*OPTIMIZE, "--dim", "batch=a:b:c"), 2, "write min:opt:max"),
    ((*OPTIMIZE, "--dim", "batch"), 2, "write NAME=MIN:OPT:MAX"),
    ((*OPTIMIZE, "--dim", "batch=1:1:100000000000000"), 1, "memory"),
    ((*OPTIMIZE, "--labels", "{d}/d.npz", "--metric", "{d}/code.py:ends"), 2, "give either --metric or --labels"),
    ((*OPTIMIZE, "--label-metric", "top1"), 2, "pass the labels with --labels"),
    ((*OPTIMIZE, "--precision", ""), 2, "unknown precision"),
    ((*ENGINE, "--compute-capability", "ninety"), 2, "write major.minor"),
    ((*OPTIMIZE, "--weights", "{d}/w.pt"), 2, "leave out --weights"),
    ((*OPTIMIZE, "--input", "x"), 2, "write name:dtype"),
    ((*OPTIMIZE, "--input", "x:float31[batch,4]"), 2, "unknown dtype"),
    ((*OPTIMIZE, "--input", "x:float32[batch,5]"), 2, "doesn't fit the model"),
    ((*OPTIMIZE, "--input", "x:float32[batch,,4]"), 2, "empty dim"),
    ((*OPTIMIZE, "--input", "x:int64[batch,4]{{9..1}}"), 2, "empty range"),
    ((*ENGINE, "--profile", "a=1x4,2x4,8x4"), 2, "profile"),
    ((*ENGINE, "--profile", "a=8x4,2x4,1x4", "--profile", "b=1x4,1x4,1x4"), 2, "1 <= min <= opt <= max"),
    ((*ENGINE, "--profile", "a=1x4,2x4,8x4", "--profile", "b=1x4,2x4,9x4"), 2, "batch"),
    ((*ENGINE, "--profile", "a=1x4,2x4,8x4", "--profile", "c=1x4,2x4,8x4"), 2, "c"),
    ((*ENGINE, "--profile", "a=1x5,2x5,8x5", "--profile", "b=1x4,2x4,8x4"), 2, "a"),
    ((*ENGINE, "--profile", "a=1x4x1,2x4x1,8x4x1", "--profile", "b=1x4,2x4,8x4"), 2, "rank|dims|shape"),
    ((*ENGINE, "--profile", "a=1x4,2x4"), 2, "NAME=MIN,OPT,MAX"),
    ((*ENGINE, "--profile", "a=0x4,2x4,8x4", "--profile", "b=0x4,2x4,8x4"), 2, "1 <= min <= opt <= max"),
    ((*ENGINE, "--compute-capability", "3.5"), 2, "use one of the capabilities"),
    ((*BENCH, "--sizes", "batch=100000000000000"), 1, "memory"),
    ((*BENCH, "--seed", "-1"), 2, "seed"),
    ((*BENCH, "--block-seconds", "nan"), 2, "block|range"),
    ((*BENCH, "--block-seconds", "-1"), 2, "range"),
    ((*BENCH, "--budget-seconds", "nan"), 2, "budget|range"),
    ((*BENCH, "--threads", "0"), 2, "range"),
    ((*BENCH, "--data", "{d}/pipe.npz"), 2, "check --data"),
    ((*BENCH, "--data", "{d}/zero.npz"), 2, "check --data"),
    (("bench", ""), 2, "give a path"),
    ((*EXPORT, "--opset", "99"), 2, "pass an opset from 13 to 23 with --opset"),
    ((*EXPORT, "--opset", "-1"), 2, "pass an opset from 13 to 23 with --opset"),
    ((*EXPORT, "--limit", "nan"), 2, "limit"),
    ((*EXPORT, "--limit", "0"), 2, "limit"),
    ((*EXPORT, "--to", "word"), 2, "unknown format"),
    (("export", "{d}/code.py:factory_ends", "--input", "x:float32[1]", "-o", "{d}/o.onnx"), 2, "SystemExit"),
    (("export", "{d}/code.py:factory_raises", "--input", "x:float32[1]", "-o", "{d}/o.onnx"), 2, "first second"),
    (("export", "{d}/code.py:factory_none", "--input", "x:float32[1]", "-o", "{d}/o.onnx"), 2, "returned NoneType"),
    (("export", "{d}/code.py", "-o", "{d}/o.onnx"), 2, "needs the name of a factory"),
    (("export", "{d}/syntax.py:net", "-o", "{d}/o.onnx"), 2, "SyntaxError"),
    (("export", "{d}/leaves.py:net", "-o", "{d}/o.onnx"), 2, "SystemExit"),
    (("verify", "{d}/m.onnx", "{d}/m.onnx", "--limit", "nan"), 2, "limit"),
    (("verify", "{d}/m.onnx", "{d}/m.onnx", "--limit", "-1"), 2, "limit"),
    (("verify", "{d}/m.onnx", "{d}/m.onnx", "--samples", "0", "--data", "{d}/d.npz"), 2, "samples"),
    (("verify", "{d}/m.onnx", "{d}/m.onnx", "--samples", "-5", "--data", "{d}/d.npz"), 2, "samples"),
    (("verify", "{d}/m.onnx", "{d}/two.onnx"), 2, "different inputs: x and a, b; give two versions"),
    (("inspect", "{d}/m.onnx", "--sizes", "batch=0"), 2, "sizes start at 1"),
    (("inspect", "{d}/m.onnx", "--against", "{d}/m.onnx"), 2, "--graph"),
    ((*METRIC, "{d}/code.py:ends"), 2, "SystemExit"),
    ((*METRIC, "{d}/code.py:forever"), 2, "RecursionError"),
    ((*METRIC, "{d}/code.py:word"), 2, "word"),
    ((*METRIC, "{d}/code.py:array"), 2, "array"),
    ((*METRIC, "{d}/code.py:nothing"), 2, "nothing"),
    ((*METRIC, "{d}/code.py:infinite"), 2, "finite number"),
    ((*METRIC, "{d}/code.py:lines"), 2, "one two three"),
    ((*METRIC, "{d}/code.py:stops"), 1, "interrupted"),
    ((*METRIC, "{d}/syntax.py:metric"), 2, "SyntaxError"),
    ((*METRIC, "{d}/leaves.py:metric"), 2, "SystemExit"),
    ((*METRIC, "no_such_module:metric"), 2, "is no importable metric; give file.py:METRIC"),
    (("inspect", "{d}/pipe.onnx"), 2, "check the path"),
    (("inspect", "{d}/loop.onnx"), 2, "check the path"),
    (("inspect", "{d}/zero.onnx"), 2, "check the path"),
    (("inspect", "{d}/dangling.onnx"), 2, "check the path"),
    (("inspect", "{d}/folder.onnx"), 2, "check the path|give a path|holds"),
    (("inspect", "{d}/folder"), 2, "give a path|holds|folder"),
    (("inspect", "/dev/null"), 2, "give a path"),
    (("inspect", "{d}/line\nbreak.onnx"), 2, "check the path"),
    (("inspect", "{d}/" + "n" * 300 + ".onnx"), 1, "too long"),
    (("inspect", "{d}/\udcff.onnx"), 2, "rename the file"),
    (("inspect", ""), 2, "give a path"),
    (("optimize", "{d}/m.onnx", "-o", "{d}/\udcff"), 2, "rename the file"),
    (("export", "{d}/pipe.pt", "-o", "{d}/o.onnx"), 2, "check the path"),
    (("optimize", "{d}/m.onnx", "-o", "{d}/a file/out"), 1, "choose another -o"),
    (("optimize", "{d}/m.onnx", "-o", "{d}/" + "n" * 300), 1, "too long"),
    (("optimize", "{d}/m.onnx", "-o", "/dev/null"), 1, "give a folder"),
    (("optimize", "{d}/m.onnx", "-o", "{d}/loop.onnx/out"), 1, "loop.onnx: a link that leads nowhere; choose another"),
    (("optimize", "{d}/m.onnx", "-o", "{d}/dangling.onnx/out"), 1, "a link that leads nowhere; choose another -o"),
    (("export", "{d}/two.onnx", "--opset", "19", "-o", "{d}/loop.onnx/o.onnx"), 1, "a link that leads nowhere; choose"),
    (("optimize", "{d}/folder.onnx", "-o", "{d}/out"), 2, "check the path|give a path|holds"),
    ((*BENCH, "-o", "{d}/a file/report.json"), 1, "choose another -o"),
    ((*BENCH, "-o", "{d}/folder"), 1, "choose another -o|is a folder"),
]


@pytest.mark.timeout(120, func_only=True)  # the fixture ``folder`` doesn't count toward the time limit
@pytest.mark.parametrize(
    ("words", "code", "says"), SETTINGS, ids=lambda v: " ".join(v[1:]) if isinstance(v, tuple) else ""
)
def test_hostile_setting(cli: Any, folder: Path, words: tuple[str, ...], code: int, says: str) -> None:
    """Checks that a bad setting gives the right exit code and a one-line message with a fix. Also checks that the
    command makes and changes no files."""
    before = _snapshot(folder)
    ran = cli(*(word.format(d=folder) for word in words), "-q")
    assert ran.code == code, ran.stderr
    lines = ran.stderr.strip().splitlines()
    if lines[0].startswith("Usage: "):  # click prints three lines: the usage, a hint to use --help, and the mistake
        lines = [line for line in lines if line.startswith("Error: ")]
    else:
        assert lines[0].startswith("accel: error: "), ran.stderr
        assert re.search(r"; \S", ran.stderr), f"no fix: {ran.stderr}"
    assert len(lines) == 1, ran.stderr
    assert re.search(says, lines[0]), ran.stderr
    assert "should not have happened" not in ran.stderr
    assert _snapshot(folder) == before


def _snapshot(folder: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" not in path.parts:
            regular = path.is_file() and not path.is_symlink()
            found[str(path.relative_to(folder))] = path.read_bytes() if regular else "something else"
    return found


NAMES = [
    "a name with spaces.onnx",
    "ünïcödé-模型-🚀.onnx",
    "line\nbreak.onnx",
    "-dash.onnx",
    "[bold]x[red].onnx",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_as_people_give_them(cli: Any, folder: Path, tmp_path: Path, name: str) -> None:
    """Checks that accel can read, make, record and show a model if a file or folder has an unusual name."""
    (tmp_path / name).write_bytes((folder / "m.onnx").read_bytes())
    out = tmp_path / f"out {name}"
    words = ["--target", "ort-cpu", "--precision", "fp32", "--rounds", "5", "-o", out, "-q"]
    ran = cli("optimize", tmp_path / name, *words)
    assert ran.code == 0, ran.stderr
    assert cli("inspect", out, "--check", "-q").code == 0
    shown = cli("inspect", tmp_path / name, "--json", "-q")
    assert shown.code == 0, shown.stderr


WRITES = """
from pathlib import Path

def metric(outputs, data):
    (Path(__file__).parent / "notes.txt").write_text("seen")
    print("a metric that talks")
    data["x"][...] = 0
    outputs["y"][...] = 0
    return 1.0
"""


def test_a_metric_that_writes(cli: Any, folder: Path, tmp_path: Path) -> None:
    """Checks that a metric that prints and overwrites its arrays changes neither accel's output nor the published
    model."""
    (tmp_path / "m.py").write_text(WRITES)
    words = ["--target", "ort-cpu", "--precision", "fp32", "--data", folder / "d.npz", "--rounds", "5"]
    out = tmp_path / "out"
    ran = cli("optimize", folder / "m.onnx", *words, "--metric", f"{tmp_path}/m.py:metric", "-o", out, "--json", "-q")
    assert ran.code == 0, ran.stderr
    import json

    assert json.loads(ran.stdout)["candidates"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["m.py", "notes.txt", "out"]
    assert cli("verify", folder / "m.onnx", out, "-q").code == 0
