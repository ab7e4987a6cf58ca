"""Defines the base class of all sessions and the table of runtimes."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from accel.artifact import Artifact, combined_sha256
from accel.errors import (
    BadFeeds,
    BadSource,
    MissingExtra,
    RunFailed,
    SizeBeyond,
    UnknownName,
    UnsupportedHere,
    UsageError,
    ValuesOutOfRange,
)
from accel.machine import cpu_limit, has_nvidia_gpu
from accel.signature import Feeds, IntegerRanges, Signature
from accel.signature.bounds import free_dims, size_at
from accel.signature.conditions import Condition, broken
from accel.spelling import option
from accel.tables.kinds import KINDS

if TYPE_CHECKING:
    import numpy as np


CACHE_PRECISIONS = ("fp32", "bf16", "fp16", "int8")
GRAPH_LEVELS = ("none", "basic", "extended", "all")


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """The options for loading a model. A runtime ignores an option that it doesn't have.

    ``threads`` is the total number of threads. With ``threads=0``, the runtime chooses the number of threads.
    ``precision`` is the precision in which the runtime computes float32 models: ``fp32``, ``bf16`` if the machine
    supports bfloat16, or ``tf32`` on a GPU. ``streams`` is the number of concurrent runs, which share the threads.
    ``graph_level``, one of ``GRAPH_LEVELS``, selects the graph optimizations of ONNX Runtime. ``spinning`` makes idle
    threads of ONNX Runtime busy-wait, which speeds up the model and slows down other work on the machine.
    ``cuda_graph`` launches an engine's kernels as one CUDA graph. ``cache_precision``, one of ``CACHE_PRECISIONS``, is
    the precision of a KV cache. OpenVINO chooses it when it loads a model, by default ``precision``. In ONNX it is part
    of the file, and any other precision is refused.
    """

    threads: int = 0
    precision: str = "fp32"
    streams: int = 1
    graph_level: str = "all"
    spinning: bool = True
    cuda_graph: bool = False
    cache_precision: str = ""

    def __post_init__(self) -> None:
        if self.streams < 1 or self.threads < 0:
            raise UsageError(
                f"{self.streams} streams can't run on {self.threads} threads; use at least 1 stream, and a "
                "positive number of threads or 0 for the runtime's default"
            )
        if self.graph_level not in GRAPH_LEVELS:
            raise UnknownName(f"unknown graph level {self.graph_level!r}; use one of {', '.join(GRAPH_LEVELS)}")
        if self.cache_precision not in ("", *CACHE_PRECISIONS):
            raise UnknownName(
                f"unknown precision {self.cache_precision!r} of a KV cache; use one of {', '.join(CACHE_PRECISIONS)}"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SessionOptions:
        """Returns the options from a mapping. Raises ``UnknownName`` for an unknown option."""
        known = [f.name for f in fields(cls)]
        if other := sorted(set(given) - set(known)):
            raise UnknownName(f"unknown session option {other[0]!r}; the options are {', '.join(known)}")
        return cls(**given)


@runtime_checkable
class Session(Protocol):
    """A loaded model. PyTorch's eager mode is a session too, so one loop verifies or times all runtimes."""

    @property
    def signature(self) -> Signature: ...

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Returns the outputs by name. Raises ``BadFeeds`` if ``feeds`` don't fit ``signature``."""
        ...

    def example_inputs(self, *, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


# The runtime that rounds after every node, as a GPU does for 16-bit floats.
ROUNDED = "onnx-rounded"


class BaseSession(ABC):
    """The base class of all sessions, which checks feeds, makes example inputs and works in a ``with`` statement."""

    # True if several threads may call ``run`` at the same time and concurrent calls raise the throughput.
    concurrent: ClassVar[bool] = False
    closed: bool = False
    runtime: str | None = None  # the name of the runtime that opened the session
    # The form of the last feeds that were found right, because most feeds have the form of the last ones. Feeds of this
    # form need no other dtype, and have no empty dim.
    _form: list[tuple[str, Any, Any]] | None = None

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        self.artifact = artifact
        self.options = options
        self._pool: ThreadPoolExecutor | None = None

    @property
    def streams(self) -> int:
        """Returns the number of concurrent runs."""
        return self.options.streams if self.concurrent else 1

    @property
    def signature(self) -> Signature:
        return self.artifact.signature

    @cached_property
    def _integers(self) -> IntegerRanges:
        """Returns the ranges to which ``check_feeds`` holds the integer inputs."""
        return self.artifact.integer_ranges

    @cached_property
    def _conditions(self) -> tuple[Condition, ...]:
        return self.artifact.conditions

    def check_open(self) -> None:
        """Raises ``UsageError`` if the session is closed."""
        if self.closed:
            raise UsageError(f"the session of {self.artifact.path} is closed; open it again with accel.load")

    def check_feeds(self, feeds: Feeds) -> dict[str, int]:
        """Returns the size of each dynamic dim in ``feeds``.

        Raises ``UsageError`` if the session is closed. Raises ``BadFeeds`` if ``feeds`` don't fit the signature, if a
        dim is empty that the source takes only with at least one entry, or if the graph differs from the source at a
        size. Raises ``ValuesOutOfRange``, a kind of ``BadFeeds``, for an integer outside its range, because a runtime
        may silently read another row of a table.
        """
        self.check_open()
        sizes = self.signature.check_feeds(feeds)
        if 0 in sizes.values():
            for dim, reason in self.artifact.not_empty.items():
                if sizes.get(dim) == 0:
                    raise BadFeeds(f"the dim {dim!r} has size 0, at which {reason}; give 1 or more")
        beyond = self._conditions and not all(self.signature.dims[dim].holds(size) for dim, size in sizes.items())
        if beyond and (condition := broken(self._conditions, sizes)):
            fitting = {dim: f"{sizes[dim]}:{sizes[dim]}:{sizes[dim]}" for dim in sorted(condition.dims)}
            where = ", ".join(f"{dim}={sizes[dim]}" for dim in fitting)
            if condition.fault:
                raise BadFeeds(
                    f"{where} is beyond {condition.text}, for which this file holds, and beyond it the source itself "
                    f"fails ({condition.fault}); give sizes for which this holds"
                )
            raise BadFeeds(
                f"at {where} the source does something else than this file, which holds for {condition.text}; give "
                f"other sizes, or export the source with {option('dims', fitting)}"
            )
        self._check_integers(feeds)
        return sizes

    def _check_integers(self, feeds: Feeds) -> None:
        if found := self._integers.first_outside(feeds):
            raise ValuesOutOfRange(
                f"{found}; correct the values, or export the model with the right range for this input"
            )

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Returns the outputs by name. Arrays of a narrower dtype are converted (see ``Signature.widened``). Raises
        ``BadFeeds`` if ``feeds`` don't fit the signature, and ``UsageError`` if the session is closed."""
        form = form_of(feeds)
        if form is not None and form == self._form:
            self.check_open()
            self._check_integers(feeds)
            return self._run(feeds)
        wide = self.signature.widened(feeds)
        sizes = self.check_feeds(wide)
        if wide is feeds and 0 not in sizes.values():
            self._form = form
        outputs = self._run(wide)
        return self._empty_as_declared(outputs, sizes) if 0 in sizes.values() else outputs

    def integers_alone(self, feeds: Feeds) -> frozenset[str]:  # noqa: ARG002
        """Returns the names of the outputs that hold integers or bools, and that the model computes from ``feeds``
        without a float. Every correct form of the model gives these outputs exactly. If a runtime can't tell, the
        result is empty."""
        return frozenset()

    def _run_error(self, failed: str, fix: str, feeds: Feeds) -> RunFailed:
        """Makes the error for a run that failed on ``feeds``. If a dim of ``feeds`` is beyond its range, the error
        names the dim. Otherwise the error ends with ``fix``."""
        with suppress(BadFeeds):
            if beyond := self.signature.beyond(feeds):
                return SizeBeyond(f"{failed}; {beyond}: give smaller inputs, for which the model was verified")
        return RunFailed(f"{failed}{fix}")

    def _empty_as_declared(self, outputs: dict[str, np.ndarray], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Gives empty outputs the shapes of the signature. From empty inputs, some kernels make other shapes: ONNX
        Runtime's ArgMax keeps the dim that it reduces."""
        for spec in self.signature.outputs:
            value = outputs.get(spec.name)
            if value is not None and not value.size and all(n in sizes for d in spec.shape for n in free_dims(d)):
                shape = tuple(size_at(dim, sizes) for dim in spec.shape)
                if 0 in shape:
                    outputs[spec.name] = value.reshape(shape)
        return outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model with the arguments that the source model takes. Returns the result in the structure that the
        source model returns (see ``accel.runtimes.call``)."""
        from .call import call

        return call(self, args, kwargs)

    def __repr__(self) -> str:
        runtime = type(self).__name__.removesuffix("Session")
        return f"<accel session of {self.artifact.path.name} on {runtime}: {self.signature}>"

    def run_many(self, requests: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
        """Returns the outputs of each request, in the order of the requests. Runs ``streams`` requests concurrently."""
        if self.streams == 1:
            return [self.run(feeds) for feeds in requests]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.streams, thread_name_prefix="accel-stream")
        return list(self._pool.map(self.run, requests))

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets a session be pickled or copied. The copy opens the artifact's files again, so they have to stay."""
        kind = KINDS.get(self.artifact.kind)
        source = self.artifact.manifest is None and kind is not None and kind.framework
        return opened_again, (self.artifact, "" if source else self.artifact.content_digest, self.runtime, self.options)

    @abstractmethod
    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Returns the outputs for checked feeds."""

    def example_inputs(self, *, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
        """Returns random inputs that the model accepts. A keyword such as ``batch=2`` sets a dynamic dim."""
        return self.signature.example_inputs(seed=seed, **sizes)

    def close(self) -> None:
        """Free the model. A closed session can't run."""
        self.closed = True
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A runtime. ``session`` is the import string of a subclass of ``BaseSession``. ``module`` is the module that the
    session imports."""

    name: str
    session: str
    module: str
    extra: str | None = None
    needs_gpu: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Returns the kinds of artifacts that the runtime opens."""
        return tuple(kind.name for kind in KINDS.values() if self.name in kind.runtimes)

    @property
    def installed(self) -> bool:
        """Tells whether the runtime's module is installed, without importing it."""
        return importlib.util.find_spec(self.module) is not None

    def runnable(self) -> bool:
        """Tells whether the runtime is installed and this machine has the required GPU. Doesn't import the runtime."""
        return self.installed and (not self.needs_gpu or has_nvidia_gpu())

    def open(self, artifact: Artifact, options: SessionOptions) -> BaseSession:
        """Load ``artifact``. Raises ``UnsupportedHere`` for an artifact of a wrong kind, and ``MissingExtra`` if a
        library is missing."""
        if artifact.kind not in self.kinds:
            raise UnsupportedHere(
                f"runtime {self.name} runs artifacts of kind {' and '.join(self.kinds)}, but {artifact.path} has the "
                f"kind {artifact.kind}"
            )
        if not self.installed:
            raise MissingExtra(self.module, self.extra or "all-cpu")
        module, name = self.session.split(":")
        session: BaseSession = getattr(importlib.import_module(module), name)(artifact, options)
        session.runtime = self.name
        return session


# The table ``accel.tables.kinds`` lists the artifact kinds that each runtime opens.
RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime(name="torch", session="accel.runtimes.torch_eager:TorchSession", module="torch"),
        Runtime(name="torch-compile", session="accel.runtimes.torch_compile:TorchCompileSession", module="torch"),
        Runtime(
            name="tensorflow",
            session="accel.runtimes.tensorflow:TensorFlowSession",
            module="tensorflow",
            extra="tensorflow",
        ),
        Runtime(
            name="tflite",
            session="accel.runtimes.tensorflow:TensorFlowSession",
            module="tensorflow",
            extra="tensorflow",
        ),
        Runtime(name="onnxruntime", session="accel.runtimes.onnxruntime:OnnxRuntimeSession", module="onnxruntime"),
        Runtime(
            name="onnxruntime-cuda",
            session="accel.runtimes.onnxruntime:OnnxRuntimeCudaSession",
            module="onnxruntime",
            extra="cuda",
            needs_gpu=True,
        ),
        Runtime(name=ROUNDED, session="accel.runtimes.onnx_rounded:RoundedSession", module="onnxruntime"),
        Runtime(
            name="openvino", session="accel.runtimes.openvino:OpenVinoSession", module="openvino", extra="openvino"
        ),
        Runtime(name="pipeline", session="accel.runtimes.pipeline.session:PipelineSession", module="torch"),
        Runtime(name="ncnn", session="accel.runtimes.ncnn:NcnnSession", module="ncnn", extra="ncnn"),
        Runtime(
            name="tensorrt",
            session="accel.runtimes.tensorrt:TensorRTSession",
            module="tensorrt",
            extra="tensorrt",
            needs_gpu=True,
        ),
        Runtime(
            name="tensorrt-rtx",
            session="accel.runtimes.tensorrt:TensorRTSession",
            module="tensorrt_rtx_bindings",
            extra="tensorrt-rtx",
            needs_gpu=True,
        ),
    )
}


def opened_again(artifact: Artifact, digest: str, runtime: str | None, options: SessionOptions) -> BaseSession:
    """Opens the copy of a session. Raises ``BadSource`` unless the files still have ``digest``, if it isn't empty."""
    there = all(path.is_file() for path in artifact.files)
    if digest and not (there and combined_sha256(list(artifact.hashes().values())) == digest):
        gone = "has changed" if there else "is gone"
        raise BadSource(f"the file {artifact.path} of a copied session {gone}; keep it until the copy is open")
    return open_session(artifact, runtime, options)


def form_of(feeds: Feeds) -> list[tuple[str, Any, Any]] | None:
    """Returns the names, dtypes and shapes of ``feeds``, or None if a feed is no array."""
    try:
        return [(name, value.dtype, value.shape) for name, value in feeds.items()]
    except AttributeError:
        return None


def get_runtime(name: str) -> Runtime:
    """Returns the runtime called ``name``.

    Raises ``UnknownName`` with a list of the runtimes if no runtime has this name.
    """
    if name not in RUNTIMES:
        raise UnknownName(f"unknown runtime {name!r}; use one of {', '.join(RUNTIMES)}")
    return RUNTIMES[name]


def default_runtime(artifact: Artifact) -> Runtime:
    """Returns the runtime that the manifest names. If the manifest names no runtime, returns the first runtime that
    takes artifacts of this kind and can run on this machine. If none can run on this machine, returns the first runtime
    that takes artifacts of this kind. An ONNX model in bfloat16 runs in ``onnx-rounded``, because the CPU provider of
    ONNX Runtime has almost no kernels for bfloat16."""
    chosen = (artifact.manifest.session if artifact.manifest else {}).get("runtime")
    if chosen:
        return get_runtime(chosen)
    if toolkit := artifact.properties.get("toolkit"):  # an engine only runs on the toolkit that built it
        return get_runtime(toolkit)
    if artifact.kind == "onnx" and "bfloat16" in artifact.properties.get("floats", ()):
        return RUNTIMES[ROUNDED]
    kind = KINDS.get(artifact.kind)
    fitting = [RUNTIMES[name] for name in kind.runtimes] if kind is not None else []
    if not fitting:
        raise UnsupportedHere(f"no runtime can run artifacts of kind {artifact.kind}, such as {artifact.path}")
    return next((r for r in fitting if r.runnable()), fitting[0])


def recorded_options(artifact: Artifact) -> Mapping[str, Any]:
    """Returns the session options that ``accel optimize`` found fastest, or no options if ``accel optimize`` didn't
    make the artifact."""
    found: Mapping[str, Any] = (artifact.manifest.session if artifact.manifest else {}).get("options", {})
    return found


def detached(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns copies of a run's outputs, for callers that keep the outputs longer than the session.

    An output of ONNX Runtime shares the session's memory. The whole memory of the session stays allocated as long as
    one output exists. The session's memory has room for the results of all layers at the largest shape.
    """
    return {name: value.copy() for name, value in outputs.items()}


def open_session(
    artifact: Artifact, runtime: str | None = None, options: Mapping[str, Any] | SessionOptions | None = None
) -> BaseSession:
    """Load ``artifact`` with ``runtime``, by default with the artifact's ``default_runtime``. Missing options come from
    the artifact's manifest."""
    found = get_runtime(runtime) if runtime else default_runtime(artifact)
    if not isinstance(options, SessionOptions):
        given = dict(options or {})
        options = SessionOptions.of({**recorded_options(artifact), **given})
        # By default, runtimes start one thread for each core of the machine. Too many threads slow down runs in a
        # container with fewer cores.
        limit = cpu_limit()
        if limit and not given.get("threads") and not 0 < options.threads <= limit:
            options = replace(options, threads=limit)
    if found.needs_gpu and not has_nvidia_gpu():
        raise UnsupportedHere(f"{artifact.path} needs an NVIDIA GPU and this machine has none; use another machine")
    return found.open(artifact, options)
