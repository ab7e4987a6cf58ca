"""Proves that the server serves and updates models of remote repositories, in fsspec's in-memory file system and over
HTTP."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from accel.errors import BadRepository
from accel.serve.models.remote import Mirror
from tests.support.serving import WEIGHTS, Served, Start, linear


@pytest.fixture
def memory(tmp_path: Path, own_cache: Path) -> Iterator[Any]:
    """Makes ``memory://models`` with the model ``linear``, version 1."""
    files = fsspec.filesystem("memory")
    put(files, linear(tmp_path / "made"), "/models/linear/1")
    yield files
    files.store.clear()
    files.pseudo_dirs.clear()


def put(files: Any, model: Path, folder: str) -> None:
    """Writes a model and its manifest to the remote repository."""
    for path in (model, model.with_name(model.name + ".manifest.json")):
        if path.exists():
            files.pipe_file(f"{folder}/{path.name}", path.read_bytes())


def asked(process: Any, name: str = "linear", version: str = "") -> np.ndarray:
    given = triton.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(np.ones((1, 4), np.float32))
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        found: np.ndarray = client.infer(name, [given], model_version=version).as_numpy("y")
    return found / WEIGHTS.sum(0)


def downloads(monkeypatch: pytest.MonkeyPatch, files: Any) -> list[str]:
    """Returns a list that records every address that is downloaded from now on."""
    found: list[str] = []
    fetch = type(files).get_file

    def counting(self: Any, address: str, *words: Any, **options: Any) -> Any:
        found.append(address)
        return fetch(self, address, *words, **options)

    monkeypatch.setattr(type(files), "get_file", counting)
    return found


def test_it_is_served_and_followed(memory: Any, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a remote model is served, that polling finds new, changed and removed models, and that an unchanged
    file isn't downloaded again."""
    process = start("memory://models", mode="poll", poll_seconds=3600.0)
    repository = process.server.repository
    np.testing.assert_allclose(asked(process), 1, rtol=1e-5)
    fetched = downloads(monkeypatch, memory)
    first = repository.get("linear")

    repository.poll_once()
    assert fetched == []
    assert repository.get("linear") is first

    put(memory, linear(tmp_path / "two", scale=2), "/models/linear/2")
    repository.poll_once()
    np.testing.assert_allclose(asked(process), 2, rtol=1e-5)
    assert fetched
    assert all("/linear/2/" in address for address in fetched)

    put(memory, linear(tmp_path / "three", scale=3), "/models/linear/2")
    put(memory, linear(tmp_path / "other", scale=4), "/models/other/1")
    repository.poll_once()
    np.testing.assert_allclose(asked(process), 3, rtol=1e-5)
    np.testing.assert_allclose(asked(process, "other"), 4, rtol=1e-5)

    memory.rm("/models/linear", recursive=True)
    repository.poll_once()
    with pytest.raises(InferenceServerException, match="unknown model: 'linear'"):
        asked(process)
    assert sorted(repository.loaded()) == ["other"]


def test_an_outage_takes_no_model_with_it(
    memory: Any, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a model is unloaded because the store can't be read, looks empty, or interrupts a download. Also checks
    that an interrupted download is repeated later."""
    process = start("memory://models", mode="poll", poll_seconds=3600.0)
    repository = process.server.repository
    kept = dict(memory.store)
    memory.store.clear()
    with pytest.raises(BadRepository, match="can't read the repository memory://models"):
        repository.poll_once()
    memory.pipe_file("/models/readme", b"nothing else")
    with pytest.raises(BadRepository, match="holds no folders of models"):
        repository.poll_once()
    np.testing.assert_allclose(asked(process), 1, rtol=1e-5)
    memory.store.update(kept)

    put(memory, linear(tmp_path / "two", scale=2), "/models/linear/2")
    fetch = type(memory).get_file

    def broken(self: Any, address: str, path: str, **options: Any) -> None:
        Path(path).write_bytes(b"half")
        raise ConnectionError("it broke off")

    monkeypatch.setattr(type(memory), "get_file", broken)
    repository.poll_once()
    np.testing.assert_allclose(asked(process), 1, rtol=1e-5)
    reasons = {row.reason for row in repository.index() if row.name == "linear"}
    assert "ConnectionError: it broke off" in reasons
    monkeypatch.setattr(type(memory), "get_file", fetch)
    repository.poll_once()
    np.testing.assert_allclose(asked(process), 2, rtol=1e-5)
    assert [(row.version, row.state) for row in repository.index()] == [("2", "READY")]


def test_a_file_that_changes_under_the_download(
    memory: Any, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the downloaded files of a model come from two different states of the store."""
    mirror = Mirror("memory://models")
    fetch = type(memory).get_file

    def overtaken(self: Any, address: str, path: str, **options: Any) -> None:
        fetch(self, address, path, **options)
        self.pipe_file(address, b"newer and of another size")

    monkeypatch.setattr(type(memory), "get_file", overtaken)
    assert "changed while it was downloaded" in mirror.refresh()["linear"]
    assert list(mirror.folder.iterdir()) == []
    assert list((own_cache / "repositories").rglob("*.part")) == []


@pytest.mark.parametrize(
    "hostile", ["/models/evil/../../../escaped/x", "/models/evil/1/..", "/models/evil/1/a\\..\\b", "/models/evil/./x"]
)
def test_hostile_names(memory: Any, own_cache: Path, hostile: str) -> None:
    """Fails if a remote file name is accepted unchecked, writes outside the model's folder, or breaks other models."""
    memory.store[hostile] = memory.store["/models/linear/1/model.onnx"]
    mirror = Mirror("memory://models")
    failed = mirror.refresh()
    assert list(failed) == ["evil"]
    assert "no plain file name" in failed["evil"]
    assert [path.name for path in mirror.folder.iterdir()] == ["linear"]
    assert (mirror.folder / "linear" / "1" / "model.onnx").is_file()
    inside = {path.name for path in own_cache.parent.rglob("*")}
    assert not inside & {"escaped", "x", "evil", "a\\..\\b"}


def test_explicit_fetches_what_it_is_told(
    memory: Any, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that explicit mode downloads only models that a command names, and that loading a model downloads the
    model's changes."""
    put(memory, linear(tmp_path / "other", scale=4), "/models/other/1")
    fetched = downloads(monkeypatch, memory)
    process = start("memory://models", mode="explicit", models=("linear",))
    assert all("/linear/" in address for address in fetched)
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        client.load_model("other")
        np.testing.assert_allclose(asked(process, "other"), 4, rtol=1e-5)
        put(memory, linear(tmp_path / "newer", scale=5), "/models/other/1")
        client.load_model("other")
        np.testing.assert_allclose(asked(process, "other"), 5, rtol=1e-5)
        for name, says in (("nothing", "failed to poll"), ("../other", "be a model's name")):
            with pytest.raises(InferenceServerException, match=says):
                client.load_model(name)


def test_old_states_go(memory: Any, tmp_path: Path, own_cache: Path) -> None:
    """Fails if old copies of a model stay on the disk forever, or if a copy that may still be in use is removed."""
    mirror = Mirror("memory://models")
    mirror.refresh()
    (old,) = (own_cache / "repositories").glob("*/store/*")
    put(memory, linear(tmp_path / "two", scale=2), "/models/linear/2")
    mirror.refresh()
    assert old.is_dir()
    os.utime(old, (0, 0))
    mirror.refresh()
    assert not old.exists()
    assert (mirror.folder / "linear" / "2" / "model.onnx").is_file()


@pytest.fixture
def web(tmp_path: Path, own_cache: Path) -> Iterator[tuple[Path, str]]:
    """Returns a folder and its address on an HTTP server that lists folders."""
    folder = tmp_path / "web"
    linear(folder / "models" / "linear" / "1")

    class Listing(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Listing, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}/models"
    server.shutdown()
    thread.join()
    server.server_close()


def test_from_an_http_server(web: tuple[Path, str], serve: Callable[..., Served], cli: Any) -> None:
    """Fails if ``accel serve http://...`` or ``--check`` behaves differently than with a local folder. Also checks that
    a new version is noticed, and that an encoded file name can't escape from the folder."""
    folder, address = web
    ran = cli("serve", address, "--check", "--json")
    assert ran.code == 0, ran.stderr
    assert '"state": "READY"' in ran.stdout
    served = serve(address, "--mode", "poll", "--poll-seconds", "0.2")
    ports = served.wait_for("serving")["ports"]
    np.testing.assert_allclose(asked(_At(ports)), 1, rtol=1e-5)
    # The test writes each file to another folder and then moves it. The server looks for changes five times a second,
    # and could otherwise find a half-written file.
    evil = linear(folder / "making" / "evil" / "1")
    evil.rename(evil.with_name("..\\..\\escaped"))
    (folder / "making" / "evil").rename(folder / "models" / "evil")
    linear(folder / "making" / "2", scale=2)
    (folder / "making" / "2").rename(folder / "models" / "linear" / "2")
    assert served.wait_for("model loaded", 2)["version"] == "2"
    np.testing.assert_allclose(asked(_At(ports)), 2, rtol=1e-5)
    assert "no plain file name" in served.wait_for("model not fetched")["reason"]
    assert served.end() == 0


class _At:
    def __init__(self, ports: dict[str, int]) -> None:
        self.ports = ports


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("nowhere://x", "use a folder, s3://, gs:// or http"),
        ("memory://nothing", "check the address"),
        ("http://127.0.0.1:1/models", "can't read the repository http://127.0.0.1:1/models"),
    ],
)
def test_what_cannot_be_read(own_cache: Path, cli: Any, address: str, says: str) -> None:
    """Fails if an unreadable repository address causes a traceback, or if the server starts without models."""
    ran = cli("serve", address, "--grpc-port", "0", "--no-http")
    assert ran.code == 2
    assert says in ran.stderr
    assert len(ran.stderr.splitlines()) <= 2


def test_the_extra_is_named(own_cache: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a missing fsspec package causes a traceback."""
    import sys

    monkeypatch.setitem(sys.modules, "fsspec", None)
    ran = cli("serve", "s3://bucket/models", "--grpc-port", "0", "--no-http")
    assert ran.code == 2
    assert 'pip install "accel-toolchain[serve-remote]"' in ran.stderr
