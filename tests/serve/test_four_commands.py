"""Proves that the four commands at the top of docs/how-to/serving.md work."""

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

import accel
from accel.artifact import Artifact
from tests.support import ROOT

PAGE = (ROOT / "docs" / "how-to" / "serving.md").read_text(encoding="utf-8")


def free_ports() -> tuple[str, str]:
    """Returns two different free ports."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1]), str(other.getsockname()[1])


@pytest.mark.slow
def test_four_commands(my_model: Path, cli: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that each of the four commands in serving.md works as written on free ports."""
    monkeypatch.chdir(my_model.parent)
    np.savez("samples.npz", x=np.random.default_rng(0).standard_normal((24, 3, 32, 32)).astype(np.float32))
    assert cli("export", "my_model.py:make", "--input", "x:float32[batch,3,32,32]", "-o", "my.onnx", "-q").code == 0
    section = PAGE.partition("## Four commands")[2].partition("\n## ")[0]
    commands = [
        line[2:] for block in re.findall(r"```console\n(.*?)```", section, re.DOTALL) for line in block.splitlines()
    ]
    words = [shlex.split(command) for command in commands]
    assert [w[:2] for w in words] == [["accel", "optimize"], ["accel", "serve"], ["accel", "infer"], ["python", "-c"]]

    ran = cli(*words[0][1:], "--rounds", "5", "--fixed-session", "-q")
    assert ran.code == 0, ran.stderr
    # the ports are chosen after ``accel optimize`` ends, because other programs could take free ports while it runs
    ports = dict(zip(("8001", "8000"), free_ports(), strict=True))
    serve_it, infer, ask = ([re.sub(r"\b800[01]\b", lambda m: ports[m[0]], w) for w in ws] for ws in words[1:])
    served = serve(*serve_it[2:], free=False)
    served.wait_for("all processes serve")
    ran = cli(*infer[1:], "-q")
    assert ran.code == 0, ran.stderr
    assert next(iter(json.loads(ran.stdout)["outputs"].values()))["shape"] == [24, 5]
    done = subprocess.run([sys.executable, *ask[1:]], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("True ")
    assert 'datatype: "FP32"' in done.stdout
    assert "count: 3" in done.stdout  # the requests form three batches of eight


@pytest.mark.nightly  # the search takes minutes
def test_the_four_commands_with_a_real_model(
    minilm: Artifact, minilm_data: Path, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the four documented commands for optimizing, serving and querying need additional options for a text
    model. Also fails if the embeddings differ from the original model's embeddings by more than `accel optimize`
    allows."""
    monkeypatch.chdir(tmp_path)
    source = minilm.copy_to(tmp_path / "minilm.onnx")
    (tmp_path / "calib.npz").write_bytes(minilm_data.read_bytes())
    with np.load(minilm_data) as file:
        given = {name: file[name][:4] for name in file.files}
    np.savez("inputs.npz", **given)  # type: ignore[arg-type]

    def run(*words: str) -> str:
        ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=900, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    run("-m", "accel", "optimize", "minilm.onnx", "--data", "calib.npz", "-o", "models/minilm/1")
    grpc, http = free_ports()
    served = serve("models", "--grpc-port", grpc, "--http-port", http, "--processes", "2", free=False)
    served.wait_for("all processes serve")
    said = run("-m", "accel", "infer", "minilm", "--url", f"127.0.0.1:{grpc}", "--input", "inputs.npz", "--json")
    answer = json.loads(said)["outputs"]["embedding"]
    with accel.load(source) as session:
        wanted = session.run(given)["embedding"]
    found = np.array(answer["data"], np.float32).reshape(answer["shape"])
    near = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
    assert near.min() > 0.95
    asking = (
        f"import tritonclient.grpc as t; c = t.InferenceServerClient('127.0.0.1:{grpc}'); "
        "print(c.is_server_ready(), c.get_model_metadata('minilm'), c.get_inference_statistics('minilm'))"
    )
    said = run("-c", asking)
    assert said.startswith("True ")
    assert 'name: "attention_mask"' in said
    assert "success" in said
