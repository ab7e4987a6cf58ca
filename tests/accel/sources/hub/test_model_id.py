"""Proves that accel tells ids of the Hugging Face Hub from paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.sources.hub.model_id import ModelId, model_id


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("org/name", ModelId("org/name")),
        ("BAAI/bge-small-en-v1.5", ModelId("BAAI/bge-small-en-v1.5")),
        ("timm/resnet18.a1_in1k", ModelId("timm/resnet18.a1_in1k")),
        ("hf-hub:timm/resnet18.a1_in1k", ModelId("timm/resnet18.a1_in1k")),
        ("org/name@v1.0", ModelId("org/name", "v1.0")),
        ("org/name@refs/pr/3", ModelId("org/name", "refs/pr/3")),
        ("org/name:onnx/model.onnx", ModelId("org/name", file="onnx/model.onnx")),
        ("org/name@main:model.onnx", ModelId("org/name", "main", "model.onnx")),
        ("models/net.onnx", None),
        ("models/net.PT", None),
        ("models/net.pt2", None),
        ("a/b/c", None),
        ("./net", None),
        ("../net", None),
        ("/net", None),
        ("net", None),
        ("models/net/", None),
        ("package/module:make", None),
        ("folder/net.py:make", None),
        ("org/name@../../secret", None),
        ("org/na me", None),
        ("ørg/name", None),
    ],
)
def test_ids_and_paths(spec: str, found: ModelId | None) -> None:
    """Fails if a path counts as an id, or if an id counts as a path."""
    assert model_id(spec) == found


def test_an_existing_path_stays_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the path of an existing folder counts as an id. With the prefix hf-hub:, the same path must count as an
    id."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert model_id("org/name") is None
    assert model_id("hf-hub:org/name") == ModelId("org/name")
