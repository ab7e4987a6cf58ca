"""Checks that ``accel serve`` serves the models that the command line names, and tells how to ask them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from accel.artifact import Manifest, manifest_path
from accel.errors import AccelError, UsageError
from accel.serve.models.places import NamedModels, read_words, why_empty
from accel.serve.process.serving import ServingProcess
from accel.signature import Signature, TensorSpec
from tests.support import onnx_builder as build
from tests.support.certificates import certificate
from tests.support.serving import FLOAT, INT64, STRING, Served, Start, linear, scale


def _run(lines: list[str]) -> tuple[str, str]:
    """Runs the printed line for curl in a shell, and the three printed lines in Python. Returns the two outputs."""
    command, code = lines[2], "\n".join(lines[4:7])
    # The answer may hold raw bytes.
    said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, errors="replace", check=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return said.stdout, done.stdout


def test_the_printed_lines_get_an_answer(tmp_path: Path, serve: Callable[..., Served]) -> None:
    """Fails if a named file or folder isn't served under its name, or if the printed lines don't work as they are."""
    linear(tmp_path / "out")
    linear(tmp_path / "other")
    (tmp_path / "other" / "model.onnx").rename(tmp_path / "other" / "my net.onnx")
    (tmp_path / "other" / "model.onnx.manifest.json").unlink(missing_ok=True)
    served = serve(str(tmp_path / "out"), f"b={tmp_path / 'other' / 'my net.onnx'}", "--processes", "2")
    lines = served.wait_for_print(7)
    assert lines[0] == "Ask the model b (the server also has out), in a shell or in Python:"
    said, done = _run(lines)
    wanted = {"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [0.0, 0.0, 0.0]}
    assert json.loads(said)["outputs"] == [wanted]
    assert json.dumps(wanted, separators=(",", ":")) in done
    assert served.end() == 0


def test_a_folder_without_a_model(tmp_path: Path, serve: Callable[..., Served]) -> None:
    """Fails if a server without a model starts without a word on what it looks for."""
    (tmp_path / "notes.txt").touch()
    served = serve(str(tmp_path))
    served.wait_for("serving")
    said = [line["message"] for line in served.log if "has no model" in line["message"]]
    assert said == [
        f"accel: warning: the folder {tmp_path} has no model: a repository has a subfolder for each model, with the "
        "model's file or its numbered versions in it; add one and start the server again, or name a model file\n"
    ]
    assert "add one, which the server then finds, or" in why_empty(str(tmp_path), polled=True)
    (tmp_path / "net").mkdir()
    assert why_empty(str(tmp_path), polled=False) == why_empty("s3://bucket/models", polled=False) == ""


def _asked(process: ServingProcess) -> list[str]:
    return process.first_request().splitlines()


def test_large_and_binary_inputs_are_asked_for_too(tmp_path: Path, start: Start) -> None:
    """Fails if the lines don't work for a model with several inputs, strings, half floats and many numbers."""
    half = TensorProto.FLOAT16
    build.artifact(
        tmp_path / "model.onnx",
        [build.node("Identity", name, f"same_{name}") for name in ("image", "ids", "text")],
        {"image": (half, ["batch", 3, "height", 64]), "ids": (INT64, ["batch"]), "text": (STRING, ["batch", 1])},
        {"same_image": (half, ["batch", 3, "height", 64]), "same_ids": (INT64, ["batch"]),
         "same_text": (STRING, ["batch", 1])},
    )  # fmt: skip
    process = start("", named=(f"all={tmp_path}",), http_port=0)
    for answer in _run(_asked(process)):
        assert "same_image" in answer, answer
        assert "error" not in answer


def _ranged(folder: Path, *inputs: str) -> None:
    """Writes a model that gives each of ``inputs`` back. The manifest has their ranges."""
    folder.mkdir()
    specs = {spec.name: spec for spec in map(TensorSpec.parse, inputs)}
    kinds = {"float32": FLOAT, "float16": TensorProto.FLOAT16, "int16": TensorProto.INT16, "int64": INT64}
    shapes = {name: (kinds[spec.dtype], list(spec.shape)) for name, spec in specs.items()}
    made = build.artifact(
        folder / "model.onnx",
        [build.node("Identity", name, f"same_{name}") for name in specs],
        shapes,
        {f"same_{name}": shape for name, shape in shapes.items()},
    )
    signature = Signature(tuple(specs.values()), made.signature.outputs)
    Manifest(kind="onnx", signature=signature, files=made.hashes()).write(manifest_path(made.path))


SHORT = ("lengths:int64[batch]{1..length}", "x:float32[batch,length]", "scale:float32[batch]{0.5..2}")
LONG = (*SHORT, "ids:int64[batch,length]{37..500}", "half:float16[batch,3]{-2.5..-1}", "low:int16[batch]{-9..-3}")


@pytest.mark.parametrize("inputs", [SHORT, LONG])
def test_the_lines_send_numbers_in_their_ranges(inputs: tuple[str, ...], tmp_path: Path, start: Start) -> None:
    """Fails if the printed lines send a number that the manifest excludes. The server would refuse an integer, and a
    float might be no number for the model. The long request sends raw bytes, among them the byte of a percent sign."""
    _ranged(tmp_path / "ranged", *inputs)
    named = (f"ranged={tmp_path / 'ranged'}",)
    lines = _asked(start("", named=named, http_port=0))
    assert ("binary_data_size" in lines[2]) == (inputs is LONG)
    for answer in _run(lines):
        assert "same_lengths" in answer, answer
        assert "error" not in answer
    found: list[dict[str, np.ndarray]] = []
    exec("\n".join(_asked(start("", named=named))[2:5]), {"print": found.append})
    sent = {name.removeprefix("same_"): np.unique(value).tolist() for name, value in found[0].items()}
    wanted = {"lengths": [1], "x": [0], "scale": [0.5], "ids": [37], "half": [-1], "low": [-3]}
    assert sent == {name: wanted[name] for name in sent}
    assert len(sent) == len(inputs)


def test_without_http_the_lines_use_grpc(tmp_path: Path, start: Start) -> None:
    """Fails if a server without HTTP prints an address that doesn't answer."""
    linear(tmp_path / "out")
    lines = _asked(start("", named=(f"out={tmp_path / 'out'}",)))
    done = subprocess.run([sys.executable, "-c", "\n".join(lines[2:5])], capture_output=True, text=True, check=True)
    assert "array([[0., 0., 0.]], dtype=float32)" in done.stdout


def test_a_token_is_part_of_the_lines(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the printed lines forget the token that the server asks for."""
    linear(tmp_path / "out")
    (tmp_path / "tokens.toml").write_text('[[token]]\nname = "me"\ntoken = "a secret"\n')
    process = start("", named=(f"out={tmp_path / 'out'}",), http_port=0, tokens=str(tmp_path / "tokens.toml"))
    monkeypatch.setenv("ACCEL_TOKEN", "a secret")
    for answer in _run(_asked(process)):
        assert "outputs" in answer, answer


@pytest.mark.parametrize("http_port", [0, None])
def test_the_lines_of_a_server_with_tls(tmp_path: Path, start: Start, http_port: int | None) -> None:
    """Fails if the printed lines don't trust the certificate of the server."""
    linear(tmp_path / "out")
    certificate(tmp_path, "server")
    files = {"tls_certificate": str(tmp_path / "server.pem"), "tls_key": str(tmp_path / "server.key")}
    lines = _asked(start("", named=(f"out={tmp_path / 'out'}",), http_port=http_port, **files))
    if http_port is None:
        done = subprocess.run([sys.executable, "-c", "\n".join(lines[2:5])], capture_output=True, text=True, check=True)
        assert "array([[0., 0., 0.]], dtype=float32)" in done.stdout
    else:
        assert all('"outputs"' in answer for answer in _run(lines))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["my.onnx"], {"my": "my.onnx"}),
        (["out"], {"out": "out"}),
        (["out/model.onnx"], {"out": "out/model.onnx"}),
        (["repository/linear"], {"linear": "repository/linear"}),
        (["repository/linear/1"], {"linear": "repository/linear/1"}),
        (["repository/linear/1/model.onnx"], {"linear": "repository/linear/1/model.onnx"}),
        (["a=out", "b=my.onnx"], {"a": "out", "b": "my.onnx"}),
        (["a=b"], {"a=b": "a=b"}),
    ],
)
def test_words_name_models(
    words: list[str], named: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a model that exists isn't found, or gets a name that nobody expects."""
    monkeypatch.chdir(tmp_path)
    linear(tmp_path / "out")
    linear(tmp_path / "a=b")
    shutil.copy(linear(tmp_path / "repository" / "linear" / "1"), tmp_path / "my.onnx")
    assert read_words(words) == ("", {name: Path(path) for name, path in named.items()})
    assert read_words(["repository"]) == ("repository", {})
    assert read_words(["s3://bucket/a=b"]) == ("s3://bucket/a=b", {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.onnx"], "nothing.onnx does not exist"),
        (["x" * 5000], "does not exist; give a model file"),
        (["a=nothing.onnx"], "nothing.onnx does not exist"),
        (["out", "repository"], "repository is a repository, which is served alone"),
        (["out", "other/out"], "two models have the name 'out'"),
        (["../x=out"], "can't be a model's name"),
        (["wéird=out"], "with a name of the letters a-z and A-Z and of digits"),
        (["a=repository"], "repository holds no model"),
        (["a=s3://bucket"], "takes no name"),
        (["note.txt"], "can't serve note: model 'note': the file note.txt has to end in .onnx"),
    ],
)
def test_words_that_name_no_model(
    words: list[str], said: str, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the server starts although a model that the user named can't be served."""
    monkeypatch.chdir(tmp_path)
    linear(tmp_path / "out")
    linear(tmp_path / "other" / "out")
    linear(tmp_path / "repository" / "linear" / "1")
    Path("note.txt").write_text("a note")

    def begin() -> None:
        _, single = read_words(words)
        start("", named=tuple(f"{name}={path}" for name, path in single.items()))

    with pytest.raises(AccelError, match=re.escape(said)):
        begin()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_broken_model_ends_the_command(processes: str, tmp_path: Path) -> None:
    """Fails if ``accel serve broken.onnx`` goes on without a model, or doesn't say what is wrong with the file."""
    (tmp_path / "broken.onnx").write_bytes(b"\xff" * 100)
    words = ["serve", "broken.onnx", "--grpc-port", "0", "--no-http", "--processes", processes]
    done = subprocess.run(
        [sys.executable, "-m", "accel", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode not in (0, None)
    assert "accel: error: can't serve broken: broken.onnx is not an ONNX file" in done.stderr


def test_a_changed_single_file_is_loaded_again(tmp_path: Path, opened: Any) -> None:
    """Fails if polling doesn't notice a new file, or reads files that don't belong to the model."""
    path = linear(tmp_path / "out")
    repository = opened(NamedModels({"linear": path}), mode="poll", poll_seconds=3600)
    before = repository.get("linear")
    (tmp_path / "out" / "a note.txt").write_text("not part of the model")
    repository.poll_once()
    assert repository.get("linear") is before
    linear(tmp_path / "new", scale=2.0).replace(path)
    Path(f"{path}.manifest.json").unlink(missing_ok=True)
    repository.poll_once()
    assert scale(repository) == 2.0


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a folder without permission ends in a traceback."""

    def refused(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(AccelError, match=r"can't read the folder .* \(Permission denied\); check its permissions"):
        read_words([str(tmp_path)])


def test_two_repositories_are_refused(tmp_path: Path) -> None:
    """Fails if a second repository is dropped in silence."""
    for name in ("one", "two"):
        linear(tmp_path / name / "linear" / "1")
    with pytest.raises(UsageError, match="served alone"):
        read_words([str(tmp_path / "one"), str(tmp_path / "two")])
