"""Loads a model to run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from accel.runtimes.base import BaseSession, open_session
from accel.sources.source import Model, Source, SourceOptions

if TYPE_CHECKING:
    pass


def load(
    model: Model,
    *,
    runtime: str | None = None,
    options: Mapping[str, Any] | None = None,
    **about: Unpack[SourceOptions],
) -> BaseSession:
    """Opens a session for ``model``: an artifact, the folder of an artifact, an ONNX file or any other source.

    ``runtime`` defaults to the runtime that the artifact was optimized for, else to the first installed runtime for
    this kind of model. ``options`` sets fields of ``SessionOptions``, such as ``threads``, and overrides the options
    recorded with the artifact. The other arguments set the fields of
    ``accel.Source``.

    Raises ``BadSource`` if the model can't be opened, ``UnsupportedHere`` if no runtime here can run it.

    >>> with accel.load("out/") as session:                      # doctest: +SKIP
    ...     session.run(session.example_inputs(batch=2))
    """
    source = Source.of(model, **about)
    return open_session(source.open(), runtime, options)
