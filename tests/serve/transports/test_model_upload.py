"""Proves that clients can send a model with the command to load it, where the server allows that."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.support.serving import WEIGHTS, Served, Start, ask, client, linear, pids, plain

CONFIG = '{"backend": "onnxruntime", "max_batch_size": 8}'


@pytest.fixture
def twice(tmp_path: Path) -> bytes:
    """Returns the file of a model that gives twice the numbers of ``linear``."""
    return linear(tmp_path / "elsewhere", scale=2.0).read_bytes()


@pytest.fixture
def process(repository: Path, start: Start) -> Any:
    return start(repository, mode="explicit", models=("*",), http_port=0, allow_model_upload=True)


def loader(process: Any, kind: str) -> Any:
    if kind == "http":
        return triton_http.InferenceServerClient(f"127.0.0.1:{process.ports['http']}")
    return triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}")


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_sent_model(process: Any, kind: str, twice: bytes, repository: Path, tmp_path: Path) -> None:
    """Fails if a sent model isn't served, changes the repository, or stays after it is loaded without files."""
    files = {"file:1/model.onnx": twice}
    before = sorted(repository.rglob("*"))
    with loader(process, kind) as made, client(process.ports["grpc"]) as asking:
        with pytest.raises(InferenceServerException, match="failed to load 'linear', failed to poll from model repo"):
            made.load_model("linear", files=files)
        np.testing.assert_allclose(ask(asking), [WEIGHTS.sum(0)], rtol=1e-5)
        made.load_model("sent", config=CONFIG, files=files)
        made.load_model("linear", config=CONFIG, files=files)
        for model in ("sent", "linear"):
            np.testing.assert_allclose(ask(asking, model), [2 * WEIGHTS.sum(0)], rtol=1e-5)
        made.load_model("linear")
        np.testing.assert_allclose(ask(asking), [WEIGHTS.sum(0)], rtol=1e-5)
        folder = process.server.local.uploads._folders["sent"]
        assert folder.is_dir()
        made.unload_model("sent")
        assert not folder.exists()
        with pytest.raises(InferenceServerException, match="failed to load 'sent', failed to poll"):
            made.load_model("sent")
    assert sorted(repository.rglob("*")) == before


def test_a_broken_model_leaves_the_old_one(process: Any, twice: bytes) -> None:
    """Fails if a file that can't be loaded replaces a model that serves."""
    with loader(process, "grpc") as made, client(process.ports["grpc"]) as asking:
        made.load_model("linear", config=CONFIG, files={"file:1/model.onnx": twice})
        with pytest.raises(InferenceServerException, match="failed to load 'linear' version 1: ") as raised:
            made.load_model("linear", config=CONFIG, files={"file:1/model.onnx": twice[:-20]})
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
        np.testing.assert_allclose(ask(asking), [2 * WEIGHTS.sum(0)], rtol=1e-5)
        assert process.server.local.uploads.files("linear") == {"1/model.onnx": twice}


@pytest.mark.parametrize(
    "path", ["../x", "/tmp/x", "1/../../x", "..", "", "1/" * 6 + "x", "a\0b", "1\\..\\..\\x", "x" * 2000]
)
def test_paths_that_leave_the_folder(process: Any, twice: bytes, path: str) -> None:
    """Fails if a client can write a file outside of the folder for its model."""
    given = {"config": CONFIG, f"file:{path}": base64.b64encode(twice).decode()}
    body = json.dumps({"parameters": given}).encode()
    status, text = plain(process, "/v2/repository/models/linear/load", body)
    assert (status, b"failed to load 'linear', the file path" in text) == (400, True), text


def test_a_name_that_no_file_can_have(process: Any, twice: bytes) -> None:
    """Fails if a file that can't be stored leaves a folder, or gets another status than Triton's clients expect."""
    with loader(process, "grpc") as made:
        with pytest.raises(InferenceServerException, match="failed to poll from model repository") as raised:
            made.load_model("linear", config=CONFIG, files={"file:" + "A" * 256: twice})
        assert raised.value.status() == "StatusCode.INTERNAL"
        with pytest.raises(InferenceServerException, match="failed to load 'linear', can't read the config"):
            made.load_model("linear", config='"parameters": {')
    assert process.server.local.uploads._folders == {}


def test_only_where_it_is_allowed(repository: Path, start: Start, twice: bytes) -> None:
    """Fails if a server takes models from clients although nobody allowed it."""
    process = start(repository, mode="explicit", models=("*",), http_port=0)
    for kind in ("http", "grpc"):
        with loader(process, kind) as made, pytest.raises(InferenceServerException, match="--allow-model-upload"):
            made.load_model("linear", config=CONFIG, files={"file:1/model.onnx": twice})
    body = json.dumps({"parameters": {"config": CONFIG, "file:1/model.onnx": "not base64!"}}).encode()
    assert plain(process, "/v2/repository/models/linear/load", body)[0] == 403


def test_what_is_not_base64(process: Any) -> None:
    """Fails if broken content ends in an internal error."""
    body = json.dumps({"parameters": {"config": CONFIG, "file:1/model.onnx": "not base64!"}}).encode()
    status, text = plain(process, "/v2/repository/models/linear/load", body)
    assert (status, b"is not base64" in text) == (400, True), text


def test_all_processes_get_the_model(repository: Path, serve: Callable[..., Served], twice: bytes) -> None:
    """Fails if a process that starts later than the others lacks a model that a client sent."""
    served = serve(str(repository), "--processes", "2", "--mode", "explicit", "--allow-model-upload", "--no-http")
    port = served.wait_for("all processes serve")["ports"]["grpc"]
    with client(port) as made:
        made.load_model("sent", config=CONFIG, files={"file:1/model.onnx": twice})
    old = pids(served)
    os.kill(old[0], signal.SIGKILL)
    served.wait_for("serving", 3)
    os.kill(old[1], signal.SIGKILL)
    served.wait_for("serving", 4)
    with client(port) as made:
        np.testing.assert_allclose(ask(made, "sent"), [2 * WEIGHTS.sum(0)], rtol=1e-5)


def test_the_name_of_the_server(repository: Path, start: Start) -> None:
    """Fails if a client that looks for Triton isn't told what the operator chose."""
    process = start(repository, http_port=0, server_name="triton", extensions=("classification", "cuda_shared_memory"))
    with loader(process, "http") as made:
        found = made.get_server_metadata()
    assert (found["name"], found["extensions"]) == ("triton", ["classification", "cuda_shared_memory"])
