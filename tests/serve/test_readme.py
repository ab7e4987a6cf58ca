"""The README's section on serving does what it says."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def free_ports() -> tuple[str, str]:
    """Two that differ."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1]), str(other.getsockname()[1])


@pytest.mark.slow
def test_four_commands(my_model: Path, cli: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if one of the README's four commands, on other ports, doesn't work as written."""
    monkeypatch.chdir(my_model.parent)
    np.savez("samples.npz", x=np.random.default_rng(0).standard_normal((24, 3, 32, 32)).astype(np.float32))
    assert cli("export", "my_model.py:make", "--input", "x:float32[batch,3,32,32]", "-o", "my.onnx", "-q").code == 0
    section = README.partition("## Serving")[2].partition("\n## ")[0]
    commands = [
        line[2:] for block in re.findall(r"```console\n(.*?)```", section, re.DOTALL) for line in block.splitlines()
    ]
    words = [shlex.split(command) for command in commands]
    assert [w[:2] for w in words] == [["accel", "optimize"], ["accel", "serve"], ["accel", "infer"], ["python", "-c"]]

    ran = cli(*words[0][1:], "--rounds", "5", "-q")
    assert ran.code == 0, ran.stderr
    ports = dict(zip(("8001", "8000"), free_ports(), strict=True))  # now: optimize takes a while, and they are let go
    serve_it, infer, ask = ([re.sub(r"\b800[01]\b", lambda m: ports[m[0]], w) for w in ws] for ws in words[1:])
    served = serve(*serve_it[2:], free=False)
    served.wait_for("all processes serve")
    ran = cli(*infer[1:], "-q")
    assert ran.code == 0, ran.stderr
    assert next(iter(json.loads(ran.stdout)["outputs"].values()))["shape"] == [24, 5]
    done = subprocess.run([sys.executable, *ask[1:]], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("True ")
    assert 'datatype: "FP32"' in done.stdout
    assert "count: 3" in done.stdout  # three batches of eight
