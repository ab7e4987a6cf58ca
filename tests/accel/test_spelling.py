"""Proves that messages name an argument to a Python caller, and an option to a user of the command line."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.child import run_in_child
from accel.errors import UnsupportedHere
from accel.spelling import arguments, is_command_line, on_command_line, option, options

CASES = [
    (("opset", 16), "opset=16", "--opset 16"),
    (("weights",), "weights=", "--weights"),
    (("weights", Path("w.pt")), "weights='w.pt'", "--weights w.pt"),
    (("out", "net.onnx"), "out='net.onnx'", "-o net.onnx"),
    (("strip_training_ops", True), "strip_training_ops=True", "--strip-training-ops"),
    (("use_cache", False), "use_cache=False", "--no-cache"),
    (("inputs", ["a:int64[n]", "b:int64[n]"]), "inputs=['a:int64[n]', 'b:int64[n]']",
     "--input a:int64[n] --input b:int64[n]"),
    (("dims", {"height": "16:32:64"}), "dims={'height': '16:32:64'}", "--dim height=16:32:64"),
    (("graph_inputs", ["x:0", "y:0"]), "graph_inputs=['x:0', 'y:0']", "--inputs x:0,y:0"),
    (("placeholders", {"keep": 1.0}), "placeholders={'keep': 1.0}", "--placeholder keep=1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "in_python", "on_the_line"), CASES)
def test_each_option_has_two_spellings(words: tuple[Any, ...], in_python: str, on_the_line: str) -> None:
    """Checks that a message writes an option like ``opset=16`` for a Python caller, and like ``--opset 16`` for a user
    of the command line. After a command has ended, messages must use the Python form again."""
    assert option(*words) == in_python
    with on_command_line():
        assert option(*words) == on_the_line
    assert option(*words) == in_python


def test_several_options() -> None:
    """Checks that a message writes several options in the Python form for a Python caller, and in the command line's
    form for a command."""
    assert options("inputs", "dims") == "inputs= or dims="
    assert arguments(opset=16, to="onnx") == "opset=16, to='onnx'"
    with on_command_line():
        assert options("opset", "inputs", "dims") == "--opset, --input or --dim"
        assert arguments(opset=16, to="onnx") == "--opset 16 --to onnx"


def test_threads_and_child_processes_follow() -> None:
    """Fails if a message from a thread or a child process of a command names a Python argument."""
    found = []
    with on_command_line():
        thread = threading.Thread(target=lambda: found.append(option("opset", 16)))
        thread.start()
        thread.join()
        found.append(run_in_child("accel.spelling:option", name="opset", value=16))
    found.append(run_in_child("accel.spelling:option", name="opset", value=16))
    assert found == ["--opset 16", "--opset 16", "opset=16"]


def test_an_error_names_the_callers_option(cli: Any, tmp_path: Path) -> None:
    """Fails if an error names a command-line option to a Python caller, or a Python argument to a user of the command
    line."""
    with pytest.raises(UnsupportedHere, match=r"pass opset=13 to 23$"):
        accel.export("net.py:make", opset=99, out=tmp_path / "net.onnx")
    ran = cli("export", "net.py:make", "--opset", "99", "-o", tmp_path / "net.onnx")
    assert "pass --opset 13 to 23\n" in ran.stderr
    assert not is_command_line()
