"""Notes and warnings about an opened source."""

from __future__ import annotations

from collections.abc import Mapping

from accel.artifact import Artifact
from accel.spelling import option


def renaming_note(artifact: Artifact) -> str | None:
    """Returns a note if an input isn't named like its parameter of ``forward``, else None."""
    renamed: Mapping[str, str] = artifact.source.get("renamed") or {}
    for name, own in renamed.items():
        return f"forward calls its input {own!r}; the artifact calls it {name!r}, as {option('inputs')} does"
    return None


def batch_note(artifact: Artifact) -> str | None:
    """Returns a note about the batch dim of a live model, which was found by a run with another batch size, else
    None."""
    return (artifact.source.get("live") or {}).get("note") or None


def training_note(artifact: Artifact) -> str | None:
    """Returns a warning if layers run in training mode although accel set the model to evaluation mode, else None."""
    layers = artifact.source.get("in_training")
    if not layers:
        return None
    return f"{layers}; until then the output of a sample depends on the other samples in its batch"
