"""Proves that accel downloads models from a hub, and explains each failure in one sentence. The tests use a fake
hub."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.errors import AccelError, BadSource, CannotWrite
from accel.progress import watched_by
from accel.sources.hub import download
from accel.sources.source import Source
from tests.support.hub.fake_hub import COMMIT, FakeHub, into_cache

LARGE = b"0123456789abcdef" * 4096


def forget() -> None:
    download._located.clear()


def test_only_the_files_that_are_read(hub: FakeHub, cache: Path, bert: dict[str, bytes]) -> None:
    """Checks that accel downloads only the weight files that it reads. Also fails if a second run downloads the model
    again, or asks the hub for a commit that is in the cache."""
    hub.files["org/bert"] = {**bert, "model.onnx": LARGE, "pytorch_model.bin": LARGE, "x.gguf": LARGE, "a.py": b""}
    reports: list[tuple[str, float | None]] = []
    with watched_by(lambda message, done: reports.append((message, done))):
        source = Source("org/bert").open().source
    assert source["hub"] == {"id": "org/bert", "revision": "main", "commit": COMMIT}
    snapshot = cache / "models--org--bert" / "snapshots" / COMMIT
    assert {path.name for path in snapshot.iterdir()} == {"config.json", "model.safetensors"}
    assert ("download org/bert", None) in reports
    forget()
    hub.asked.clear()
    assert Source(source["spec"]).open().source["sha256"] == source["sha256"]
    assert not hub.asked
    hub.server_close()  # the cache also records the commit of the main branch
    assert Source("org/bert").open().source["spec"] == source["spec"]


def test_an_interrupted_download_goes_on(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an interrupted download starts again at the first byte."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    hub.files["org/net"] = {"net.onnx": LARGE}
    hub.cut = "net.onnx"
    assert download.locate(download.ModelId("org/net")).path.read_bytes() == LARGE
    ranges = [range for request, range in hub.asked if request.startswith("GET /org/net/resolve") and range]
    assert ranges == [f"bytes={len(LARGE) // 2}-"]


def test_a_download_that_breaks_off(
    hub: FakeHub, cache: Path, bert: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the error about an interrupted download names a fix, and that accel notices an incomplete model in
    the cache."""
    hub.files["org/bert"] = bert
    get = "huggingface_hub.file_download.http_get"

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("connection reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(get, breaks)
        with pytest.raises(
            BadSource, match=r"download of org/bert broke off \(connection reset.*try again to continue the download"
        ):
            Source("org/bert").open()
    into = cache / "models--org--bert" / "snapshots" / COMMIT
    into.mkdir(parents=True, exist_ok=True)
    (into / "config.json").write_bytes(bert["config.json"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        BadSource, match=r"only a part of org/bert@\w+ \(model.safetensors is missing\); unset HF_HUB_OFFL"
    ):
        Source(f"org/bert@{COMMIT}").open()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert Source("org/bert").open().source["hub"]["commit"] == COMMIT


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            errno.ENOSPC,
            r"can't write org/bert to .*hub \(No space left on device\); free some space, or set HF_HUB_CACHE",
        ),
        (errno.EACCES, r"can't write org/bert to .*hub \(Permission denied\); free .* that you may write"),
    ],
)
def test_a_cache_that_cannot_be_written(
    hub: FakeHub, bert: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, kind: int, words: str
) -> None:
    """Fails if the error blames the network for a full disk or a folder without permission to write."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(kind, os.strerror(kind))

    hub.files["org/bert"] = bert
    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(CannotWrite, match=words):
        Source("org/bert").open()


NOWHERE = r"'org/x' is no file or folder here, and the Hugging Face Hub "


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ((404, "RepoNotFound"), NOWHERE + "has no public model of this name; .*run hf auth login or set HF_TOKEN"),
        ((401, "RepoNotFound"), NOWHERE + "has no public model of this name"),
        ((401, ""), NOWHERE + "has no public model of this name"),
        ((403, "GatedRepo"), "org/x is gated: ask for access on its page, then run hf auth login or set HF_TOKEN"),
        (
            (500, ""),
            NOWHERE + r"can't look up a model of this name \(the hub answers 500\); check the path, or the network",
        ),
    ],
)
def test_what_the_hub_refuses(
    hub: FakeHub, cli: Callable[..., Any], tmp_path: Path, refused: tuple[int, str], words: str
) -> None:
    """Fails if an error status from the hub ends in a traceback, or in a message without a fix."""
    hub.refused["org/x"] = refused
    with pytest.raises(BadSource, match=words):
        Source("org/x").open()
    ran = cli("export", "org/x", "-o", tmp_path / "out.onnx")
    assert (ran.code, ran.stderr.count("\n")) == (2, 1), ran.stderr


def test_files_that_the_hub_refuses(hub: FakeHub, bert: dict[str, bytes]) -> None:
    """Checks that the error says "gated" if the hub lists a repository but refuses to send the repository's files. Also
    checks that the error names an unknown revision."""
    hub.files["org/bert"] = bert
    hub.gated.add("org/bert")
    with pytest.raises(BadSource, match="org/bert is gated"):
        Source("org/bert").open()
    with pytest.raises(BadSource, match="org/bert has no revision 'v9'; give a branch, a tag or a full commit hash"):
        Source("org/bert@v9").open()


def test_a_model_in_the_cache_needs_no_access(hub: FakeHub, cache: Path, bert: dict[str, bytes]) -> None:
    """Fails if accel refuses a model in the cache because the token has expired."""
    into_cache(cache, "org/bert", bert)
    hub.refused["org/bert"] = (401, "RepoNotFound")
    assert Source("org/bert").open().source["hub"]["commit"] == COMMIT


def test_no_network(hub: FakeHub) -> None:
    """Checks that the error says that the hub is unreachable. Also checks that the error asks the user to check the
    path or the network."""
    hub.server_close()
    words = r"'models/net' is no file or folder here, and the .* can't look up .*Connection.*check the path, or"
    with pytest.raises(BadSource, match=words):
        Source("models/net").open()


def test_offline(cache: Path, cli: Callable[..., Any], tmp_path: Path) -> None:
    """Checks that the error about a model outside the cache names offline mode, and that a mistyped path doesn't count
    as an id."""
    words = (
        r"'models/net' is no file or folder here, and the local cache .* no such model; check the path, or unset HF_HUB"
    )
    with pytest.raises(BadSource, match=words):
        Source("models/net").open()
    for command in (["optimize", "models/net", "-o", "out"], ["bench", "models/net"], ["inspect", "models/net"]):
        ran = cli(*command)
        assert (ran.code, "no file or folder here" in ran.stderr) == (2, True), ran.stderr
    with pytest.raises(AccelError, match=r"models/net.onnx does not exist"):
        Source("models/net.onnx").open()
    with pytest.raises(BadSource, match="this can't be the name of a model of the Hugging Face Hub"):
        Source("models/a--b").open()


def test_a_path_is_no_id(cache: Path, tmp_path: Path) -> None:
    """Fails if accel asks the hub for a missing ``pathlib.Path``."""
    with pytest.raises(BadSource, match="no file, folder or importable module"):
        Source(Path("models/net")).open()


def test_without_huggingface_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If huggingface_hub isn't installed, the error for a mistyped path must name huggingface_hub, and must have no
    traceback."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    words = (
        r"'models/net' is no file or folder here, and huggingface_hub has to be installed .*; .*toolchain\[examples\]"
    )
    with pytest.raises(BadSource, match=words):
        Source("models/net").open()
