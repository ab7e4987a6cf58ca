"""What a repository knows about a model, and how its index shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .model import ServedModel

READY, UNAVAILABLE, LOADING = "READY", "UNAVAILABLE", "LOADING"
UNLOADED = "unloaded"  # the index gives this reason for a model that a command unloaded


@dataclass(frozen=True)
class IndexRow:
    """An entry of the repository's index. ``version`` and ``state`` are empty if the model was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass
class Entry:
    """The state of one model. ``seen`` holds the fingerprints of the files at the last attempt to load, so that polling
    doesn't try unchanged files again. ``lacks_step`` is True if the model is an ensemble and the model of a step is
    missing. The ensemble is tried again after other models are loaded."""

    versions: dict[str, ServedModel] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # the reason for each failed version; "" means all versions
    seen: Any = None
    loading: bool = False
    lacks_step: bool = False

    def rows(self, name: str, unfetched: str | None) -> list[IndexRow]:
        """Returns the rows of the index. ``unfetched`` is the reason why the model can't be fetched, or None."""
        if self.loading and not self.versions:
            return [IndexRow(name, "", LOADING)]
        found = [IndexRow(name, version, READY) for version in self.versions]
        found += [
            IndexRow(name, version, UNAVAILABLE, reason)
            for version, reason in self.failed.items()
            if version not in self.versions or reason != UNLOADED
        ]
        if unfetched is not None:
            found.append(IndexRow(name, "", UNAVAILABLE, unfetched))
        return found or [IndexRow(name)]
