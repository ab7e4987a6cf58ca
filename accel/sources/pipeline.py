"""Defines ``Pipeline``, a model that consists of several modules and a Python function that calls the modules."""

from __future__ import annotations

import inspect
import keyword
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from accel.artifact import text_sha256
from accel.cache import StageCache
from accel.errors import BadSource, UsageError

from .torch.arguments import Called, Function, unwrapped
from .torch.fingerprint import function_sha256
from .torch.live import by_value

# A callback for each call of a part. The callback gets the part's name and the arguments of the call.
Record = Callable[[str, tuple[Any, ...], dict[str, Any]], None]

_FUNCTION = "function.pkl"
# Maps sha256 values to functions, for all pipelines that this process has opened.
_functions: dict[str, Callable[..., Any]] = {}


class NotInParts(BadSource, AttributeError):
    """Raised when a pipeline's function uses a part or an attribute that the exported pipeline doesn't have."""


class Part:
    """Represents a part inside a pipeline's function. The function can call the part, but can't use the part's
    attributes."""

    def __init__(self, name: str, model: Callable[..., Any], record: Record | None) -> None:
        self._name = name
        self._model = model
        self._record = record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the part's module, or the session of an exported part."""
        if self._record is not None:
            self._record(self._name, args, kwargs)
        return self._model(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise NotInParts(
            f"the function of the pipeline uses the attribute {attribute!r} of the part {self._name!r}, but an "
            f"exported part can only be called; read {attribute!r} outside the function, or make the method a separate "
            "part "
            f"({self._name}_{attribute}=model.{attribute})"
        )


class Parts:
    """Holds each part as an attribute, and is the first argument of a pipeline's function. The pipeline's function
    can't set the attributes of ``Parts``."""

    def __init__(self, models: Mapping[str, Callable[..., Any]], record: Record | None = None) -> None:
        object.__setattr__(self, "_parts", {name: Part(name, model, record) for name, model in models.items()})

    def __getattr__(self, name: str) -> Part:
        if name.startswith("__"):
            raise AttributeError(name)
        parts: dict[str, Part] = vars(self)["_parts"]
        if name not in parts:
            raise NotInParts(f"the pipeline has no part {name!r}; use one of {', '.join(parts)}")
        return parts[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise NotInParts(f"the function of the pipeline sets the part {name!r}; use a local variable instead")


class Pipeline(Function):
    """Makes one model of several modules and a Python function that calls the modules, such as an encoder with a
    decoder, a diffusion loop or a detector.

    A call of the pipeline runs ``function(parts, *args)``, with the parts as the first argument. ``function`` may use
    any Python code, such as loops and conditions. The function can call the parts, but can't use their attributes.
    ``parts`` are modules of PyTorch, methods of modules, or functions of tensors. Every function of accel accepts a
    pipeline in place of a module. ``accel.export`` exports each part and verifies the whole pipeline. The exported
    pipeline is called without the argument ``parts``.

    >>> both = accel.Pipeline(translate, encoder=encoder, decoder=decoder)                  # doctest: +SKIP
    >>> accel.export(both, example=(tokens,), out="out/")                                   # doctest: +SKIP
    >>> accel.load("out/")(tokens)                                                          # doctest: +SKIP
    """

    # The callback that records the calls of the parts, or None while no calls are recorded.
    _record: Record | None = None

    def __init__(self, function: Callable[..., Any], /, **parts: Any) -> None:
        if not callable(function) or isinstance(function, torch.nn.Module):
            raise UsageError(
                f"{type(function).__name__} is no function; begin with the function that calls the parts: "
                "Pipeline(function, encoder=module)"
            )
        if not parts:
            raise UsageError("the pipeline has no parts; give the modules by name: Pipeline(function, encoder=module)")
        if not list(inspect.signature(function).parameters):
            raise UsageError(
                "the function of a pipeline gets the parts as its first argument; add a first parameter called parts"
            )
        for name, part in parts.items():
            _check(name, part)
        super().__init__(function)
        self.names = tuple(parts)
        self.parts = torch.nn.ModuleList(map(unwrapped, parts.values()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the pipeline's function and returns the result."""
        return self.function(Parts(self.by_name(), self._record), *args, **kwargs)

    def by_name(self) -> dict[str, torch.nn.Module]:
        """Returns the modules of the parts by name."""
        return dict(zip(self.names, self.parts, strict=True))

    def signature(self) -> inspect.Signature:
        """Returns the signature of the function without its first parameter."""
        whole = inspect.signature(self.function)
        return whole.replace(parameters=list(whole.parameters.values())[1:])

    @contextmanager
    def recorded_by(self, record: Record) -> Iterator[None]:
        """Inside the ``with`` block, ``record`` receives each call of a part."""
        self._record = record
        try:
            yield
        finally:
            del self._record


def _check(name: str, part: Any) -> None:
    """Raises ``UsageError`` for a name or an object that can't be a part."""
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise UsageError(
            f"{name!r} can't be the name of a part, because the part's folder and attribute get the same "
            "name; use letters, digits and underscores"
        )
    if isinstance(part, torch.nn.Module):
        return
    foreign = any(kind.__module__.startswith(("keras.", "tensorflow.")) for kind in type(part).__mro__)
    if foreign or not callable(part) or isinstance(part, type) or hasattr(part, "artifact"):
        raise UsageError(
            f"the part {name!r} is a {type(part).__name__}; give a PyTorch module, a module's method, or a function "
            "of tensors"
        )


def pipeline_in(module: torch.nn.Module) -> Pipeline | None:
    """Returns ``module`` itself if it is a pipeline, or the pipeline that ``module`` wraps. Returns None for any other
    module."""
    inner = module.module if isinstance(module, Called) else module
    return inner if isinstance(inner, Pipeline) else None


def keep_function(pipeline: Pipeline) -> str:
    """Writes the function of ``pipeline`` to the cache, where later processes find it. Returns the function's sha256.

    A function that can't be pickled is available only in this process.
    """
    digest = function_sha256(pipeline.function)
    _functions[digest] = pipeline.function
    cache, key = StageCache(), _key(digest)
    if not (cache.entry(key) / _FUNCTION).is_file():
        with cache.scratch() as folder, by_value(pipeline):
            try:
                body = cloudpickle.dumps(pipeline.function)
            except Exception:  # pickling an object of the user's function may raise any type of error
                return digest
            (folder / _FUNCTION).write_bytes(body)
            cache.keep(key, folder)
    return digest


def kept_function(digest: str) -> Callable[..., Any] | None:
    """Returns the function with the sha256 ``digest`` from this process or from the user's cache, or else None.
    Functions from other places are never loaded, because a manifest may come from a stranger."""
    if digest not in _functions:
        try:
            _functions[digest] = pickle.loads((StageCache().entry(_key(digest)) / _FUNCTION).read_bytes())
        except Exception:  # the entry is missing, or needs a module that this process can't import
            return None
    return _functions[digest]


def _key(digest: str) -> str:
    return text_sha256(f"function of a pipeline {digest}")
