"""Proves that a repository can't make the server run code, read other folders, or serve a file that differs from its
manifest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.artifact import Manifest, file_sha256, manifest_path
from accel.cache import StageCache
from accel.serve.models.files import Trust, valid_name
from accel.serve.models.loading import Loading
from accel.serve.protocol.inference import Code, ServeError
from accel.sources.onnx.file import PROBED
from tests.support import onnx_builder as build
from tests.support.serving import linear, reasons, scale


def test_a_manifest_that_does_not_hold(tmp_path: Path, opened: Any) -> None:
    """Fails if a file that differs from its manifest is served without --insecure, or is refused with --insecure."""
    path = linear(tmp_path / "linear" / "1")
    found = build.open_onnx(path, probe=False)
    Manifest(kind="onnx", signature=found.signature, files=found.hashes()).write(manifest_path(path))
    repository = opened(tmp_path)
    assert scale(repository) == 1
    path.write_bytes(_scaled(tmp_path, 2.0))
    repository = opened(tmp_path)
    assert "not the file its manifest describes" in reasons(repository)["linear"]
    repository = opened(tmp_path, loading=Loading(trust=Trust(insecure=True)))
    assert scale(repository) == 2


@pytest.mark.parametrize("insecure", [False, True])
def test_a_manifest_is_no_proof(tmp_path: Path, opened: Any, insecure: bool) -> None:
    """Checks that the server doesn't open a file that is known to crash the native parser, even with a valid manifest
    or with --insecure."""
    path = linear(tmp_path / "linear" / "1")
    found = build.open_onnx(path, probe=False)
    files = {path.name: "0" * 64} if insecure else found.hashes()
    Manifest(kind="onnx", signature=found.signature, files=files).write(manifest_path(path))
    crashed = {"error": "it crashes the native parser (SIGSEGV)", "crashed": True}
    StageCache().put_record(PROBED, found.digest, crashed)
    try:
        repository = opened(tmp_path, loading=Loading(trust=Trust(insecure=insecure)))
        assert "it crashes the native parser" in reasons(repository)["linear"]
        StageCache().put_record(PROBED, found.digest, {**crashed, "crashed": False})
        assert scale(opened(tmp_path, loading=Loading(trust=Trust(insecure=insecure)))) == 1
    finally:
        StageCache().put_record(PROBED, found.digest, {"error": None, "crashed": False})


def _scaled(tmp_path: Path, factor: float) -> bytes:
    return linear(tmp_path.parent / f"{tmp_path.name}-other", factor).read_bytes()


class Mark:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self._path),))


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("manifest", [False, True])
def test_pickles_are_not_opened(tmp_path: Path, opened: Any, insecure: bool, manifest: bool) -> None:
    """Fails if a file that may contain pickles is opened without --allow-pickle. The test runs with and without
    --insecure, and with and without a valid manifest."""
    signature = build.open_onnx(linear(tmp_path / "other"), probe=False).signature
    mark = tmp_path / "executed"
    named = {"pt": "model.pt", "pt2": "model.pt2", "pth": "weights.pth", "pkl": "model.pkl", "onnx": "model.onnx"}
    for model, name in named.items():
        path = tmp_path / "models" / model / "1" / name
        path.parent.mkdir(parents=True)
        torch.save(Mark(mark), path)
        (path.parents[1] / "config.pbtxt").write_text(f'default_model_filename: "{name}"')
        if manifest:
            kind = "onnx" if model == "onnx" else "torch"
            Manifest(kind=kind, signature=signature, files={name: file_sha256(path)}).write(manifest_path(path))
        torch.load(path, weights_only=False)  # loading the pickle creates the folder ``mark``
        mark.rmdir()
    loading = Loading(trust=Trust(insecure=insecure))
    found = reasons(opened(tmp_path / "models", loading=loading))
    assert set(found) == set(named)
    assert all("--allow-pickle" in found[model] for model in ("pt", "pt2")), found
    assert not mark.exists()


@pytest.mark.parametrize("name", ["..", "a/b", "../a", "", ".hidden", "a\0b", "a..b", "x" * 300, "a\nb"])
def test_names_that_lead_elsewhere(tmp_path: Path, opened: Any, name: str) -> None:
    """Checks that the server refuses a model name that isn't a plain folder name."""
    assert not valid_name(name)
    linear(tmp_path / "models" / "linear" / "1")
    linear(tmp_path / "a" / "1")
    repository = opened(tmp_path / "models", mode="explicit")
    with pytest.raises(ServeError) as caught:
        repository.load(name)
    assert caught.value.code is Code.INVALID_ARGUMENT
