"""Implements the session of a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accel.artifact import Artifact
from accel.errors import AccelError, BadFeeds, BadSource, one_line
from accel.signature import Feeds, shapes_of
from accel.signature.other_sizes import other_sizes
from accel.sources.pipeline import Pipeline, Record, kept_function
from accel.sources.python_object import load_object, place_in_user_code
from accel.sources.structure import describe, fill
from accel.sources.torch.arguments import callable_as
from accel.sources.torch.call import NamedModule, run_named, to_array, to_tensor
from accel.sources.torch.fingerprint import function_sha256

from ..base import BaseSession, SessionOptions, open_session
from .file import PipelineFile, parts_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class PipelineSession(BaseSession):
    """Runs the function of a pipeline on the sessions of its parts.

    The function comes from this process or from the user's cache. If neither the process nor the cache has the
    function, the caller has to set the function with ``use``. ``options.threads`` applies to every part. Each part
    takes all other options from its own manifest.
    """

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        self._file = PipelineFile.read(artifact.path)
        self._function: Callable[..., Any] | None = None
        self._named: NamedModule | None = None
        given = {"threads": options.threads} if options.threads else None
        with ExitStack() as stack:
            self.parts = {
                name: stack.enter_context(open_session(part, options=given))
                for name, part in parts_of(artifact).items()
            }
            self._stack = stack.pop_all()

    def use(self, function: Callable[..., Any] | str) -> None:
        """Sets the function that calls the parts. Warns if the parts were verified with another function."""
        called: Callable[..., Any] = load_object(function, "function")[1] if isinstance(function, str) else function
        self._function, self._named = called, None
        if function_sha256(called) != self._file.sha256:
            warnings.warn(
                f"{self.artifact.path} was verified with another version of {self._file.function}; export the pipeline "
                "again to verify it with this one",
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"_function": self._function} if self._function else None
        return (*super().__reduce__(), state)

    def check(self) -> None:
        """Raises ``BadSource`` if this machine doesn't have the pipeline's function."""
        assert self.module

    def recorded_by(self, record: Record) -> AbstractContextManager[None]:
        """Inside the ``with`` block, ``record`` receives each call of a part."""
        return self._pipeline.recorded_by(record)

    @property
    def module(self) -> NamedModule:
        """Returns the pipeline as a module that takes and returns named tensors. Raises ``BadSource`` if this machine
        doesn't have the pipeline's function."""
        if self._named is None:
            function = self._function or kept_function(self._file.sha256)
            if function is None:
                name = self._file.function
                raise BadSource(
                    f"the pipeline {self.artifact.path} needs the function {name!r}, which is not on this machine; "
                    f"pass the function to accel.load as call={name}, or open the pipeline's source in the same command"
                )
            pipeline = Pipeline(function, **{name: _callable(session) for name, session in self.parts.items()})
            inputs = [spec.name for spec in self.signature.inputs]
            outputs = [spec.name for spec in self.signature.outputs]
            templates: Mapping[str, Any] = (self.artifact.source.get("call") or {}).get("arguments") or {}
            self._named = NamedModule(callable_as(pipeline, templates), inputs, outputs)
        return self._named

    @property
    def _pipeline(self) -> Pipeline:
        called: Any = self.module.module
        pipeline: Pipeline = called.module
        return pipeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the pipeline's function. A pipeline takes any numbers and strings as arguments. An
        exported module doesn't, because its graph contains the numbers and strings of the export. If the arguments hold
        NumPy arrays, the result holds arrays, too."""
        template, found = describe([list(args), kwargs])
        arrays = {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
        if arrays:
            tensors = {name: to_tensor(value) if name in arrays else value for name, value in found.items()}
            args, kwargs = fill(template, tensors)
        try:
            with torch.no_grad():
                result = self._pipeline(*args, **kwargs)
        except BadFeeds as error:
            if own := self._other_sizes(args, kwargs):
                raise BadFeeds(own) from error
            raise
        if not arrays:
            return result
        template, found = describe(result)
        return fill(template, {name: _as_array(value) for name, value in found.items()})

    def _other_sizes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Returns a message about an argument whose size is fixed in the pipeline. Returns "" if there is none. A part
        that refuses its input names the input of the part, which the caller doesn't know."""
        given = self._pipeline.signature().bind(*args, **kwargs).arguments
        for spec in self.signature.inputs:
            shape = list(getattr(given.get(spec.name), "shape", ()))
            fixed = zip(spec.shape, shape, strict=False)
            if len(shape) == len(spec.shape) and any(isinstance(dim, int) and dim != size for dim, size in fixed):
                return (
                    f"input {spec.name!r} has shape {shape}, but the pipeline takes {spec}; "
                    f"{other_sizes(spec, shape, self.signature.inputs, self.signature.dims)}"
                )
        return ""

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        try:
            return run_named(self.module, self.signature, feeds)
        except AccelError:
            raise
        except Exception as error:  # the function may raise any type of error
            failed = (
                f"the function {self._file.function} of the pipeline {self.artifact.path} fails with the inputs "
                f"{shapes_of(feeds)}{place_in_user_code(error)}: {one_line(error, 200)}"
            )
            raise self._run_error(failed, "; check the inputs' values", feeds) from error

    def close(self) -> None:
        """Frees the parts."""
        super().close()
        self._stack.close()


def _callable(session: BaseSession) -> Callable[..., Any]:
    """Returns a function that calls ``session``, because a session itself can't be a part of a ``Pipeline``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return session(*args, **kwargs)

    return call


def _as_array(value: Any) -> Any:
    return to_array(value) if isinstance(value, torch.Tensor) else value
