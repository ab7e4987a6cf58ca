"""Proves that accel imports fast, shows its help fast, and documents its public names."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest

import accel
from tests.support import ROOT


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_light() -> None:
    """Fails if ``import accel`` imports a heavy package, or takes 60 ms or more."""
    code = (
        "import sys, time; a = time.perf_counter(); import accel; b = time.perf_counter();"
        "heavy = [m for m in ('torch', 'onnxruntime', 'onnx', 'numpy', 'click', 'rich') if m in sys.modules];"
        "import json; print(json.dumps([b - a, heavy]))"
    )
    runs = [json.loads(_python(code)) for _ in range(8)]
    assert runs[0][1] == []
    assert min(seconds for seconds, _ in runs) < 0.060


def test_help_is_fast() -> None:
    """Fails if listing the commands imports a command or a heavy package."""
    command = [sys.executable, "-X", "importtime", "-m", "accel", "--help"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "optimize" in ran.stdout
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert {"accel.cli", "click"} <= imported
    assert not [name for name in imported if name.startswith("accel.cli.")]
    assert not imported & {"torch", "onnxruntime", "onnx", "numpy", "rich"}


def test_help_is_there_at_once() -> None:
    """Fails if ``accel --help`` takes 0.3 s of CPU time or more, including the interpreter's own start. The test
    measures CPU time because other processes on the machine affect the wall time more."""
    seconds = []
    for _ in range(8):
        before = os.times()
        subprocess.run([sys.executable, "-m", "accel", "--help"], check=True, capture_output=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.3, seconds


def test_public_names_exist_and_are_few() -> None:
    """Checks that every public name can be imported and has documentation, and that accel has at most 21 public
    names."""
    assert len(accel.__all__) <= 21
    for name in accel.__all__:
        assert getattr(accel, name).__doc__, name


def test_every_public_name_is_called_with_its_types() -> None:
    """Fails if tests/typed_calls.py, which mypy and pyright check, lacks a public name."""
    source = (ROOT / "tests" / "typed_calls.py").read_text(encoding="utf-8")
    named = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert set(accel.__all__) <= named


def test_fuse_is_there_without_an_import_of_its_own() -> None:
    """Checks that ``import accel`` suffices for ``accel.fuse(module)``, and that the import alone doesn't load
    torch."""
    code = (
        "import sys, json, accel; before = 'torch' in sys.modules;"
        "print(json.dumps([before, callable(accel.fuse), accel.fuse is accel.fuse]))"
    )
    assert json.loads(_python(code)) == [False, True, True]


def test_unknown_name() -> None:
    """Checks that an unknown name of accel raises AttributeError."""
    with pytest.raises(AttributeError, match="no attribute 'exprot'"):
        _ = accel.exprot


def test_folders_are_reached_through_accel_only() -> None:
    """Fails if a top-level `converters`, `kernels` or `serve` is installed beside accel."""
    code = (
        "import os; os.chdir('/'); import accel.converters.graph.simplify, importlib.util as u;"
        "print([n for n in ('converters', 'serve', 'kernels') if u.find_spec(n)])"
    )
    assert _python(code).strip() == "[]"


def test_the_names_of_version_0_1_0() -> None:
    """Checks that ``accel.benchmark`` is ``accel.bench``, and that ``accel.compare`` is ``accel.verify``. Version 0.1.0
    used the names ``benchmark`` and ``compare``."""
    assert accel.benchmark is accel.bench
    assert accel.compare is accel.verify
    assert not {"benchmark", "compare"} & set(accel.__all__)
