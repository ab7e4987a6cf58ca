"""Loads a model to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from accel.errors import UsageError
from accel.runtimes.base import BaseSession, open_session
from accel.sources.source import Model, Source, SourceOptions, known_keywords
from accel.spelling import option


@known_keywords
def load(
    model: Model,
    *,
    runtime: str | None = None,
    options: Mapping[str, Any] | None = None,
    call: Callable[..., Any] | str | None = None,
    **about: Unpack[SourceOptions],
) -> BaseSession:
    """Opens a session for ``model``, which is an artifact, an artifact's folder, an ONNX file or any other source.

    By default, ``runtime`` is the runtime that the artifact was optimized for. If the model isn't an optimized
    artifact, ``runtime`` is by default the first installed runtime for the model's kind. ``options`` sets fields of
    ``SessionOptions``, such as ``threads``, and overrides the options recorded with the artifact. ``call`` is the
    function of a pipeline, or the function's name as ``module:function``. Leave out ``call`` for a pipeline that was
    exported on this machine, because the cache still has the pipeline's function. The other arguments set the fields of
    ``accel.Source``.

    Raises ``BadSource`` if the model can't be opened, or if the function of a pipeline is neither given nor in the
    cache. Raises ``UnsupportedHere`` if no runtime on this machine can run the model.

    >>> with accel.load("out/") as session:                      # doctest: +SKIP
    ...     session.run(session.example_inputs(batch=2))
    """
    source = Source.of(model, **about)
    artifact = source.open()
    if artifact.kind != "pipeline":
        if call is not None:
            raise UsageError(f"the model {source.text} is no exported pipeline; leave out {option('call')}")
        return open_session(artifact, runtime, options)
    from accel.runtimes.pipeline.session import PipelineSession

    session = open_session(artifact, runtime, options)
    assert isinstance(session, PipelineSession)
    if call is not None:
        session.use(call)
    session.check()
    return session
