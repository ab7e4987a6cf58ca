"""Loading a model to run it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.runtimes.base import BaseSession, open_session
from accel.sources import open_source

if TYPE_CHECKING:
    from accel.sources.declare import Dims, Inputs


def load(
    model: str | Path | Artifact,
    *,
    runtime: str | None = None,
    options: Mapping[str, Any] | None = None,
    inputs: Inputs | None = None,
    weights: Path | None = None,
    dims: Dims | None = None,
) -> BaseSession:
    """A session for an artifact, the folder it is in, an ONNX file from anywhere, or a PyTorch source.

    ``runtime``: the one it was chosen for where that is not given, else the first that runs its kind here.
    ``options``: fields of ``SessionOptions`` (``threads``...), over those recorded with the artifact.

    >>> with accel.load("out/") as session:                      # doctest: +SKIP
    ...     session.run(session.example_inputs(batch=2))
    """
    return open_session(open_source(model, inputs=inputs, weights=weights, dims=dims), runtime, options)
