"""A model loaded to run, and the table of what can run one."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from accel.artifact import Artifact
from accel.cpu import cpu_limit
from accel.errors import MissingExtra, UnknownName, UnsupportedHere, UsageError
from accel.signature import Feeds, Signature

if TYPE_CHECKING:
    import numpy as np


GRAPH_LEVELS = ("none", "basic", "extended", "all")


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """What may be chosen when a model is loaded. A runtime ignores what it has no such thing for.

    ``threads``: in all; 0 leaves the number to the runtime. ``precision``: what the runtime computes float32 in
    (``fp32``, or ``bf16`` where the machine has it). ``streams``: how many runs may be under way at once, sharing the
    threads. ``graph_level``: which of its own graph optimisations ONNX Runtime makes, one of ``GRAPH_LEVELS``.
    ``spinning``: whether ONNX Runtime's idle threads wait busily: faster for one model alone, slower for neighbours.
    ``cuda_graph``: launch an engine's kernels as one CUDA graph.
    """

    threads: int = 0
    precision: str = "fp32"
    streams: int = 1
    graph_level: str = "all"
    spinning: bool = True
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        if self.streams < 1 or self.threads < 0:
            raise UsageError(f"{self.streams} streams of {self.threads} threads make no sense; use at least 1 and 0")
        if self.graph_level not in GRAPH_LEVELS:
            raise UnknownName(f"unknown graph level {self.graph_level!r}; use one of {', '.join(GRAPH_LEVELS)}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SessionOptions:
        """The options by name; ``UnknownName`` for one that there is not."""
        known = [f.name for f in fields(cls)]
        if other := sorted(set(given) - set(known)):
            raise UnknownName(f"unknown session option {other[0]!r}; the options are {', '.join(known)}")
        return cls(**given)


@runtime_checkable
class Session(Protocol):
    """A loaded model. Native PyTorch is one more session, so verifying and timing are one loop over sessions."""

    @property
    def signature(self) -> Signature: ...

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name. ``BadFeeds`` where names, dtypes or shapes don't fit ``signature``."""
        ...

    def example_inputs(self, *, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class BaseSession(ABC):
    """What every session shares: the check of the feeds, the context manager, example inputs."""

    # Whether ``run`` may be called from several threads at once, and gains by it.
    concurrent: ClassVar[bool] = False

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        self.artifact = artifact
        self.options = options
        self._pool: ThreadPoolExecutor | None = None

    @property
    def streams(self) -> int:
        """How many runs may be under way at once."""
        return self.options.streams if self.concurrent else 1

    @property
    def signature(self) -> Signature:
        return self.artifact.signature

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name. ``BadFeeds`` where names, dtypes or shapes don't fit the signature."""
        self.signature.check_feeds(feeds)
        return self._run(feeds)

    def run_many(self, requests: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
        """The outputs of each of ``requests``, in their order; ``streams`` of them are under way at once."""
        if self.streams == 1:
            return [self.run(feeds) for feeds in requests]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.streams, thread_name_prefix="accel-stream")
        return list(self._pool.map(self.run, requests))

    @abstractmethod
    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Run feeds that are known to fit."""

    def example_inputs(self, *, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
        """Random inputs that the model accepts; ``batch=2`` sets a dynamic dim."""
        return self.signature.example_inputs(seed=seed, **sizes)

    def close(self) -> None:
        """Give back what the session holds; running it afterwards is an error."""
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
    """A row of the table. ``session``: import string of a ``BaseSession``. ``module``: what has to be installed."""

    name: str
    session: str
    kinds: tuple[str, ...]
    module: str
    extra: str | None
    needs_gpu: bool = False

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def runnable(self) -> bool:
        """Installed, and this machine has what it needs. Cheap: nothing heavy is imported."""
        return self.installed and (not self.needs_gpu or has_nvidia_gpu())

    def open(self, artifact: Artifact, options: SessionOptions) -> BaseSession:
        if artifact.kind not in self.kinds:
            raise UnsupportedHere(
                f"runtime {self.name} runs {' and '.join(self.kinds)} artifacts, {artifact.path} is {artifact.kind}"
            )
        if not self.installed:
            raise MissingExtra(self.module, self.extra or "all-cpu")
        module, name = self.session.split(":")
        return getattr(importlib.import_module(module), name)(artifact, options)  # type: ignore[no-any-return]


# In the order accel.load tries them for a kind: name, session (in accel.runtimes), kind, module, extra, needs a GPU.
_TABLE: tuple[tuple[str, str, str, str, str | None, bool], ...] = (
    ("torch", "torch_eager:TorchSession", "torch", "torch", None, False),
    ("torch-compile", "torch_compile:TorchCompileSession", "torch", "torch", None, False),
    ("tensorflow", "tensorflow:TensorFlowSession", "tensorflow", "tensorflow", "tensorflow", False),
    ("tflite", "tensorflow:TensorFlowSession", "tflite", "tensorflow", "tensorflow", False),
    ("onnxruntime", "onnxruntime:OnnxRuntimeSession", "onnx", "onnxruntime", None, False),
    ("onnxruntime-cuda", "onnxruntime:OnnxRuntimeCudaSession", "onnx", "onnxruntime", "cuda", True),
    ("onnx-rounded", "onnx_rounded:RoundedSession", "onnx", "onnxruntime", None, False),
    ("openvino", "openvino:OpenVinoSession", "openvino", "openvino", "openvino", False),
    ("ncnn", "ncnn:NcnnSession", "ncnn", "ncnn", "ncnn", False),
    ("tensorrt", "tensorrt:TensorRTSession", "engine", "tensorrt", "tensorrt", True),
    ("tensorrt-rtx", "tensorrt:TensorRTSession", "engine", "tensorrt_rtx_bindings", "tensorrt-rtx", True),
)

RUNTIMES: dict[str, Runtime] = {
    name: Runtime(
        name=name,
        session=f"accel.runtimes.{session}",
        kinds=(kind,),
        module=module,
        extra=extra,
        needs_gpu=needs_gpu,
    )
    for name, session, kind, module, extra, needs_gpu in _TABLE
}


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA driver shows a GPU here."""
    from pathlib import Path

    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidia0").exists()


def get_runtime(name: str) -> Runtime:
    if name not in RUNTIMES:
        raise UnknownName(f"unknown runtime {name!r}; use one of {', '.join(RUNTIMES)}")
    return RUNTIMES[name]


def default_runtime(artifact: Artifact) -> Runtime:
    """The runtime an artifact was chosen with, else the first that runs its kind; a missing extra is named."""
    chosen = (artifact.manifest.session if artifact.manifest else {}).get("runtime")
    if chosen:
        return get_runtime(chosen)
    if toolkit := artifact.properties.get("toolkit"):  # an engine runs on the toolkit that built it
        return get_runtime(toolkit)
    fitting = [r for r in RUNTIMES.values() if artifact.kind in r.kinds]
    if not fitting:
        raise UnsupportedHere(f"no runtime runs {artifact.kind} artifacts like {artifact.path}")
    return next((r for r in fitting if r.runnable()), fitting[0])


def recorded_options(artifact: Artifact) -> Mapping[str, Any]:
    """The session options that ``accel optimize`` found fastest for it; none where it didn't make it."""
    found: Mapping[str, Any] = (artifact.manifest.session if artifact.manifest else {}).get("options", {})
    return found


def detached(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies of a run's outputs, for who keeps them longer than the session: an output of ONNX Runtime lies in memory
    of its session, all of which (the results of all layers at the largest shape) would stay as long as it."""
    return {name: value.copy() for name, value in outputs.items()}


def open_session(
    artifact: Artifact, runtime: str | None = None, options: Mapping[str, Any] | SessionOptions | None = None
) -> BaseSession:
    """Load ``artifact``; options that aren't given come from its manifest."""
    found = get_runtime(runtime) if runtime else default_runtime(artifact)
    if not isinstance(options, SessionOptions):
        given = dict(options or {})
        options = SessionOptions.of({**recorded_options(artifact), **given})
        # Runtimes count the cores there are: in a container that may use fewer, their other threads are in the way.
        limit = cpu_limit()
        if limit and not given.get("threads") and not 0 < options.threads <= limit:
            options = replace(options, threads=limit)
    if found.needs_gpu and not has_nvidia_gpu():
        raise UnsupportedHere(f"{artifact.path} needs an NVIDIA GPU and this machine has none; run it where one is")
    return found.open(artifact, options)
