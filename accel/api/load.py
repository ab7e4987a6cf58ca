"""Loads a model to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.runtimes.base import BaseSession, open_session
from accel.sources.source import Model, Source

if TYPE_CHECKING:
    from accel.sources.declare import Dims, Inputs


def load(
    model: Model,
    *,
    runtime: str | None = None,
    options: Mapping[str, Any] | None = None,
    inputs: Inputs | None = None,
    weights: str | Path | None = None,
    dims: Dims | None = None,
    graph_inputs: Sequence[str] = (),
    graph_outputs: Sequence[str] = (),
    signature: str = "",
    strip_training_ops: bool = False,
) -> BaseSession:
    """Opens a session for ``model``: an artifact, the folder of an artifact, an ONNX file or any other source.

    ``runtime`` defaults to the runtime that the artifact was optimized for, else to the first installed runtime for
    this kind of model. ``options`` sets fields of ``SessionOptions``, such as ``threads``, and overrides the options
    recorded with the artifact. The arguments from ``inputs`` to ``strip_training_ops`` set the fields of
    ``accel.Source``.

    Raises ``BadSource`` if the model can't be opened, ``UnsupportedHere`` if no runtime here can run it.

    >>> with accel.load("out/") as session:                      # doctest: +SKIP
    ...     session.run(session.example_inputs(batch=2))
    """
    source = Source.of(
        model,
        inputs=inputs,
        weights=weights,
        dims=dims,
        graph_inputs=graph_inputs,
        graph_outputs=graph_outputs,
        signature=signature,
        strip_training_ops=strip_training_ops,
    )
    return open_session(source.open(), runtime, options)
