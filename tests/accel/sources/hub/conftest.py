"""Gives each test its own cache of huggingface_hub, and tiny models for this cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from accel.sources.hub import download
from tests.support.hub.fake_hub import FakeHub, fake_hub, files_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the test an empty cache of huggingface_hub, and turns offline mode on. Child processes read the environment
    variables that the fixture sets. In the test's own process, huggingface_hub has already read the variables, so the
    fixture also sets huggingface_hub's constants."""
    folder = tmp_path / "hf" / "hub"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(folder.parent))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(download, "_located", {})
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Starts a local server that imitates the Hugging Face Hub, and makes huggingface_hub use this server. At first,
    the server has no models."""
    with fake_hub() as server:
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        yield server


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Returns the files of a tiny BERT."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("bert")
    transformers.BertModel(config).save_pretrained(folder)
    return files_of(folder)
