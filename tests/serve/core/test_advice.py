"""Proves that errors and warnings explain three problems: requests that the model can't run, NaN inputs and wrong
ports."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import accel
from accel.artifact import Manifest, manifest_path
from accel.signature import DimRange
from tests.support import onnx_builder as build
from tests.support.serving import FLOAT, INT64, linear, plain

TABLE = np.arange(22, dtype=np.float32).reshape(11, 2)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Makes two models. The model ``words`` looks tokens up in a table of 11 rows. The model ``later`` adds three to
    each token before the lookup."""
    root = tmp_path / "models"
    for name, nodes in (
        ("words", [build.node("Gather", "table ids", "y")]),
        ("later", [build.node("Add", "ids three", "n"), build.node("Gather", "table n", "y")]),
    ):
        (root / name / "1").mkdir(parents=True)
        build.artifact(
            root / name / "1" / "model.onnx",
            nodes,
            {"ids": (INT64, ["batch", "n"])},
            {"y": (FLOAT, ["batch", "n", 2])},
            {"table": TABLE, "three": np.array(3)},
        )
    return root


def test_a_token_that_the_vocabulary_does_not_have(words: Path, start: Any) -> None:
    """Checks that a request with a token id outside the vocabulary causes a client error. If the model itself computes
    a wrong index, the error must be a server error."""
    process = start(words, http_port=0)

    def ask(model: str, *ids: int) -> np.ndarray:
        given = triton.InferInput("ids", [1, len(ids)], "INT64")
        given.set_data_from_numpy(np.array([ids], np.int64))
        with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
            found: np.ndarray = client.infer(model, [given]).as_numpy("y")
            return found

    np.testing.assert_array_equal(ask("words", 10, 0), TABLE[[[10, 0]]])
    with pytest.raises(InferenceServerException, match=r"input 'ids' holds 11, it takes 0\.\.10") as caught:
        ask("words", 1, 11)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    body = {"inputs": [{"name": "ids", "shape": [1, 1], "datatype": "INT64", "data": [99]}]}
    status, answer = plain(process, "/v2/models/words/infer", json.dumps(body).encode())
    assert (status, b"it takes 0..10" in answer) == (400, True)
    with pytest.raises(InferenceServerException, match="data bounds") as caught:
        ask("later", 9)
    assert caught.value.status() == "StatusCode.INTERNAL"


@pytest.mark.parametrize("wrong", [-1, 8, 99])
def test_a_declared_range(tmp_path: Path, start: Any, wrong: int) -> None:
    """Checks that the server refuses a request whose integer is outside the manifest's range. The manifest's range is 0
    to 7. The model itself would accept the integer 8, because its table has 11 rows. For a negative integer, the model
    would count the rows from the end of the table."""
    (tmp_path / "words" / "1").mkdir(parents=True)
    made = build.artifact(
        tmp_path / "words" / "1" / "model.onnx",
        [build.node("Gather", "table ids", "y")],
        {"ids": (INT64, ["batch", "n"])},
        {"y": (FLOAT, ["batch", "n", 2])},
        {"table": TABLE},
    )
    declared = replace(made.signature, inputs=(replace(made.signature.inputs[0], values=(0, 7)),))
    source = {**made.source, "kind": "torch"}
    Manifest(kind="onnx", signature=declared, files=made.hashes(), source=source).write(manifest_path(made.path))
    with triton.InferenceServerClient(f"127.0.0.1:{start(tmp_path).ports['grpc']}") as client:
        given = triton.InferInput("ids", [1, 2], "INT64")
        given.set_data_from_numpy(np.array([[7, 0]]))
        np.testing.assert_array_equal(client.infer("words", [given]).as_numpy("y"), TABLE[[[7, 0]]])
        given.set_data_from_numpy(np.array([[3, wrong]]))
        with pytest.raises(InferenceServerException, match=rf"input 'ids' holds {wrong}, it takes 0\.\.7") as caught:
            client.infer("words", [given])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_file_of_torchs_exporter_refuses_negative_ids(words: Path, start: Any, tmp_path: Path) -> None:
    """Fails if the server answers an id of -1 with the last row where PyTorch's embedding refuses it, although the file
    has no manifest. Also fails if the advice of docs/how-to/serving.md doesn't let the model take negative indices."""
    file = words / "words" / "1" / "model.onnx"
    model = onnx.load(file)
    model.producer_name = "pytorch"
    onnx.save(model, file)
    process = start(words, http_port=0)
    for wrong in (-1, 11):
        body = {"inputs": [{"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [10, wrong]}]}
        status, answer = plain(process, "/v2/models/words/infer", json.dumps(body).encode())
        assert (status, f"input 'ids' holds {wrong}, it takes 0..10" in answer.decode()) == (400, True)
    made = accel.export(file, inputs=["ids:int64[batch,n]{-11..10}"], out=tmp_path / "declared.onnx")
    with accel.load(made) as session:
        np.testing.assert_array_equal(session.run({"ids": np.array([[-1]])})["y"], TABLE[[[-1]]])


def test_a_request_that_is_longer_than_the_model_goes(tmp_path: Path, start: Any) -> None:
    """Checks that the server accepts a size outside the manifest's range if the model can run with this size. If the
    model fails for a size outside the range, the error must be a client error. If the model fails for a size within the
    range, the error must be a server error."""
    for name, declared in (("places", DimRange(1, 4, 8)), ("promised", DimRange(1, 4, 64))):
        (tmp_path / name / "1").mkdir(parents=True)
        made = build.artifact(
            tmp_path / name / "1" / "model.onnx",
            [
                build.node("Shape", "x", "n", start=1, end=2),
                build.node("Slice", "table zero n", "rows"),  # the model fails if n exceeds the table's 11 rows
                build.node("Add", "x rows", "y"),
            ],
            {"x": (FLOAT, ["batch", "n", 2])},
            {"y": (FLOAT, ["batch", "n", 2])},
            {"table": TABLE, "zero": np.array([0])},
            dims={"n": declared},
        )
        Manifest(kind="onnx", signature=made.signature, files=made.hashes(), source=made.source).write(
            manifest_path(made.path)
        )
    url = f"127.0.0.1:{start(tmp_path).ports['grpc']}"

    def ask(model: str, length: int) -> np.ndarray:
        given = triton.InferInput("x", [1, length, 2], "FP32")
        given.set_data_from_numpy(np.zeros((1, length, 2), np.float32))
        with triton.InferenceServerClient(url) as client:
            found: np.ndarray = client.infer(model, [given]).as_numpy("y")
            return found

    np.testing.assert_array_equal(ask("places", 10), TABLE[None, :10])
    with pytest.raises(
        InferenceServerException, match=r"model 'places' failed: .*n is 12, beyond its range 1\.\.8: give"
    ) as caught:
        ask("places", 12)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="model 'promised' failed") as caught:
        ask("promised", 12)
    assert caught.value.status() == "StatusCode.INTERNAL"


def test_nan_is_sent_and_said(repository: Path, start: Any, cli: Any, tmp_path: Path) -> None:
    """Checks that NaN in a file causes a warning, and that a file without NaN causes no warning. NaN isn't refused,
    because some models accept NaN."""
    url = f"127.0.0.1:{start(repository).ports['grpc']}"
    x = np.ones((3, 4), np.float32)
    np.savez(tmp_path / "good.npz", x=x)
    x[1, 2] = np.nan
    np.savez(tmp_path / "nan.npz", x=x)
    (tmp_path / "nan.json").write_text('{"x": [[1, 1, 1, 1], [1, 1, NaN, Infinity]]}')
    for file, count in (("nan.npz", 1), ("nan.json", 2)):
        ran = cli("infer", "linear", "--url", url, "--input", tmp_path / file, "--json", "-q")
        assert ran.code == 0, ran.stderr
        assert f"warning: input 'x' holds {count} NaN or infinite values of" in ran.stderr
        assert "the first at [1, 2]" in ran.stderr
        assert json.loads(ran.stdout)["outputs"]["y"]["data"][3] is None
    assert cli("infer", "linear", "--url", url, "--input", tmp_path / "good.npz", "-q").stderr == ""


def test_the_wrong_port(repository: Path, start: Any, cli: Any, tmp_path: Path) -> None:
    """Checks that `accel infer` explains the mistake if the user gives the REST port or an http:// address. If another
    program listens on the port, the error must not say that no server answers."""
    process = start(repository, http_port=0)
    np.savez(tmp_path / "x.npz", x=np.ones((1, 4), np.float32))

    def ask(url: str) -> tuple[int, str]:
        ran = cli("infer", "linear", "--url", url, "--input", tmp_path / "x.npz", "-q", "--timeout", "30")
        return ran.code, ran.stderr

    code, said = ask(f"127.0.0.1:{process.ports['http']}")
    assert (code, "speaks HTTP, not gRPC; give the server's gRPC port" in said) == (1, True), said
    code, said = ask(f"http://127.0.0.1:{process.ports['grpc']}")
    assert (code, "no gRPC address; give HOST:PORT" in said) == (2, True), said
    assert ask(f"grpc://127.0.0.1:{process.ports['grpc']}") == (0, "")
    with socket.create_server(("127.0.0.1", 0)) as mute:  # this program closes every connection

        def hang_up() -> None:
            while True:
                try:
                    mute.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        code, said = ask(f"127.0.0.1:{mute.getsockname()[1]}")
        mute.shutdown(socket.SHUT_RDWR)
    assert code == 1
    assert "no server answers" not in said


def test_check_says_what_a_run_found(words: Path, cli: Any) -> None:
    """Checks that --check warns about a model that refused the inputs of the warm-up, and still counts the model as
    ready."""
    linear(words / "linear" / "1")
    (words / "tall" / "1").mkdir(parents=True)
    build.artifact(
        words / "tall" / "1" / "model.onnx",
        [build.node("Add", "ids nine", "n"), build.node("Gather", "table n", "y")],
        {"ids": (INT64, ["batch", 2])},
        {"y": (FLOAT, ["batch", 2, 2])},
        {"table": TABLE[:5], "nine": np.array(9)},
    )
    ran = cli("serve", words, "--check", "--json", "-q")
    assert ran.code == 0, ran.stderr
    found = {m["name"]: m for m in json.loads(ran.stdout)["models"]}
    assert {m["state"] for m in found.values()} == {"READY"}
    assert "random inputs failed" in found["tall"]["warning"]
    assert "data bounds" in found["tall"]["warning"]
    assert found["linear"]["warning"] == ""
    assert "data bounds" in cli("serve", words, "--check", "-q").stdout
