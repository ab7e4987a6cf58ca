"""ONNX to ncnn: the program that does it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# In place of pnnx one that says who it is and doesn't end.
CONVERTS = """
import sys
from pathlib import Path

import pnnx

from accel.converters.ncnn_from_onnx import _pnnx
from accel.signature import Signature, TensorSpec

folder = Path(sys.argv[1])
pnnx.__file__ = str(folder / "__init__.py")
_pnnx(folder, Signature((TensorSpec("x", "float32", (1, 4)),), ()), 600.0)
"""


def _alive(pid: int) -> bool:
    """A zombie that nobody waits for isn't."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_pnnx_ends_with_the_command(tmp_path: Path) -> None:
    """Fails if pnnx, which may work for minutes, goes on after its command was killed."""
    (tmp_path / "pnnx").write_text("#!/bin/sh\necho $$ > its.pid\nmv its.pid pid\nexec sleep 600\n")
    (tmp_path / "pnnx").chmod(0o755)
    command = subprocess.Popen([sys.executable, "-c", CONVERTS, str(tmp_path)])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    command.kill()
    command.wait()
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    if _alive(pid):
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("pnnx goes on")
