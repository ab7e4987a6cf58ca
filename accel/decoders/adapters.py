"""Finds the LoRA adapters of a decoder whose matrices are inputs, and reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.errors import BadSource, UnknownName
from accel.runtimes.kv.lora import read_lora
from accel.signature import Feeds
from accel.spelling import arguments, option


def adapter_feeds(artifact: Artifact, name: str) -> Feeds:
    """Returns the matrices of the adapter ``name``, by the names of the inputs that take them. Returns no matrices for
    an empty name, which is the base model. Raises ``UnknownName`` if the decoder has no such adapter."""
    if not name:
        return {}
    known = artifact.adapters
    if not known:
        raise UnknownName(
            f"{artifact.path} has no adapters; export its source with "
            f"{arguments(adapters='FOLDER', adapters_as='inputs')}, or leave out {option('adapter')}"
        )
    if name not in known:
        raise UnknownName(f"{artifact.path} has no adapter {name!r}; its adapters are {', '.join(known)}")
    return read_lora(known[name])


def with_adapters(reference: Artifact, candidate: Artifact) -> Iterator[tuple[str, Artifact]]:
    """Yields the name of each adapter of ``candidate``, and the model to compare with: ``reference`` with the adapter
    merged if it is a PyTorch model, or a decoder with an adapter of this name.

    Raises ``BadSource`` if the folder of an adapter is gone or has changed, or if a decoder lacks the adapter.
    """
    if reference.kind != "torch" or reference.manifest is not None:
        for name in candidate.adapters:
            adapter_feeds(reference, name)
            yield name, reference
        return
    from accel.sources.torch.source import adapted

    recorded = recorded_adapters(candidate)
    for name in candidate.adapters:
        folder = Path(recorded[name]["path"])
        if not folder.is_dir():
            raise BadSource(
                f"the adapter {name} of {candidate.path} was made from {folder}, which is gone; restore the folder, or "
                f"verify one adapter with {option('adapters', f'{name}/')}"
            )
        yield name, adapted(reference, folder)


def recorded_adapters(artifact: Artifact) -> Mapping[str, Mapping[str, Any]]:
    """Returns what the manifest says about each adapter: its folder, its rank and the number of its layers."""
    found: Mapping[str, Mapping[str, Any]] = next(
        (record["notes"]["adapters"] for record in artifact.history if "adapters" in record["notes"]), {}
    )
    return found
