"""Proves that accel works in the kernel of a notebook: progress is shown, an interrupt keeps the best candidate so far,
results are shown as tables and plots, and nothing is written to the current folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

BEGIN = """
import os, signal, threading
import numpy as np
import torch
import accel
import pytest
from tests.short_measurements import shorten

shorten(pytest.MonkeyPatch())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
x = torch.ones(2, 4)
judged = []

def metric(outputs, data):  # judges the source, and keeps the first candidate waiting until the interrupt comes
    judged.append(outputs)
    if len(judged) > 1:
        print("waiting", flush=True)
        threading.Event().wait(100)
    return 1.0

class Deaf(torch.nn.Module):
    interrupts = True

    def forward(self, x):  # swallows an interrupt during the export, as some exporters do
        if self.interrupts and torch.compiler.is_exporting():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(100)
            except KeyboardInterrupt:
                pass
        return x * 2
"""
OPTIMIZE = "fast = accel.optimize(model, example=(x,), target='ort-cpu', rounds=5, vary_session=False"


@dataclass
class Cell:
    """What a cell showed: its texts by stream, the forms of its result by MIME type, and the name of its error."""

    texts: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    result: dict[str, str] = field(default_factory=dict)
    error: str = ""


class Notebook:
    """A kernel of IPython, in the empty folder ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "current"
        self.folder.mkdir()
        self.kernel = KernelManager(connection_file=str(folder / "kernel.json"))
        path = os.pathsep.join(filter(None, sys.path))
        hidden = {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder)}
        environment = {name: value for name, value in os.environ.items() if name != "ACCEL_QUIET"}
        self.kernel.start_kernel(cwd=str(self.folder), env={**environment, **hidden, "PYTHONPATH": path})
        self.client = self.kernel.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=100)

    def run(self, code: str, interrupt_at: str = "") -> Cell:
        """Runs ``code``, and interrupts the kernel as soon as the cell prints ``interrupt_at``."""
        cell = Cell()

        def shown(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                cell.texts[content["name"]] += content["text"]
                if interrupt_at and interrupt_at in content["text"]:
                    self.kernel.interrupt_kernel()
            elif message["msg_type"] == "execute_result":
                cell.result = content["data"]

        reply = self.client.execute_interactive(code, output_hook=shown, timeout=300)
        cell.error = reply["content"].get("ename", "")
        return cell

    def close(self) -> None:
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, _one_cache: None) -> Iterator[Notebook]:
    made = Notebook(tmp_path_factory.mktemp("notebook"))
    try:
        assert made.run(BEGIN).error == ""
        yield made
    finally:
        made.close()


def test_a_result(notebook: Notebook) -> None:
    """Fails if the progress isn't one line that vanishes, if the result has no table or plot, or if the model of a cell
    can't be optimized."""
    shown = notebook.run(f"{OPTIMIZE})").texts["stderr"]
    steps, _, rest = shown.rpartition("\r")
    assert "\raccel: " in shown
    assert "\n" not in steps
    assert steps.rpartition("\r")[2].strip() == ""
    assert not rest or rest.startswith("accel: warning: ")
    html = notebook.run("fast").result["text/html"]
    assert html.startswith("<pre>")
    assert "median ms" in html
    assert "<svg" in html
    assert notebook.run("fast(x).shape").result["text/plain"] == "torch.Size([2, 3])"
    assert list(notebook.folder.iterdir()) == []


def test_an_interrupt_keeps_the_best_so_far(notebook: Notebook) -> None:
    """Fails if an interrupt ends the cell with an error, or ends the next call."""
    data = "data={'input': np.ones((16, 4), np.float32)}, metric=metric"
    cell = notebook.run(f"{OPTIMIZE}, {data})", interrupt_at="waiting")
    assert cell.error == "", cell
    said = notebook.run("print(fast.chosen, *fast.notes, sep='\\n')").texts["stdout"]
    assert said.startswith("source\n")
    assert "\nCtrl-C came before " in said
    assert notebook.run("accel.verify(model, fast, example=(x,)).passed").result["text/plain"] == "True"
    assert list(notebook.folder.iterdir()) == []


def test_a_swallowed_interrupt_ends_the_call(notebook: Notebook) -> None:
    """Fails if an export goes on after an interrupt that a library swallowed, or if the next call ends, too."""
    assert notebook.run("accel.export(Deaf(), example=(x,))").error == "KeyboardInterrupt"
    assert notebook.run("Deaf.interrupts = False; accel.export(Deaf(), example=(x,)).kind").result == {
        "text/plain": "'onnx'"
    }
