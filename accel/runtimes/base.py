"""A model loaded to run, and the table of what can run one."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from accel.artifact import Artifact
from accel.errors import MissingExtra, UnknownName, UnsupportedHere
from accel.signature import Feeds, Signature

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """What may be chosen when a model is loaded. A runtime ignores what it has no such thing for.

    ``threads``: 0 leaves the number to the runtime. ``precision``: what the runtime computes float32 in
    (``fp32``, or ``bf16`` where the machine has it). ``optimize_graph``: the runtime's own graph optimisations.
    ``cuda_graph``: launch an engine's kernels as one CUDA graph.
    """

    threads: int = 0
    precision: str = "fp32"
    optimize_graph: bool = True
    cuda_graph: bool = False


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

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        self.artifact = artifact
        self.options = options

    @property
    def signature(self) -> Signature:
        return self.artifact.signature

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name. ``BadFeeds`` where names, dtypes or shapes don't fit the signature."""
        self.signature.check_feeds(feeds)
        return self._run(feeds)

    @abstractmethod
    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Run feeds that are known to fit."""

    def example_inputs(self, *, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
        """Random inputs that the model accepts; ``batch=2`` sets a dynamic dim."""
        return self.signature.example_inputs(seed=seed, **sizes)

    def close(self) -> None:  # noqa: B027 - most sessions hold nothing that Python doesn't free
        """Give back what the session holds; running it afterwards is an error."""

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


# In the order accel.load tries them for a kind.
RUNTIMES: dict[str, Runtime] = {
    r.name: r
    for r in (
        Runtime(
            name="torch",
            session="accel.runtimes.torch_eager:TorchSession",
            kinds=("torch",),
            module="torch",
            extra=None,
        ),
        Runtime(
            name="torch-compile",
            session="accel.runtimes.torch_compile:TorchCompileSession",
            kinds=("torch",),
            module="torch",
            extra=None,
        ),
        Runtime(
            name="tensorflow",
            session="accel.runtimes.tensorflow:TensorFlowSession",
            kinds=("tensorflow",),
            module="tensorflow",
            extra="tensorflow",
        ),
        Runtime(
            name="tflite",
            session="accel.runtimes.tensorflow:TensorFlowSession",
            kinds=("tflite",),
            module="tensorflow",
            extra="tensorflow",
        ),
        Runtime(
            name="onnxruntime",
            session="accel.runtimes.onnxruntime:OnnxRuntimeSession",
            kinds=("onnx",),
            module="onnxruntime",
            extra=None,
        ),
        Runtime(
            name="onnxruntime-cuda",
            session="accel.runtimes.onnxruntime:OnnxRuntimeCudaSession",
            kinds=("onnx",),
            module="onnxruntime",
            extra="cuda",
            needs_gpu=True,
        ),
        Runtime(
            name="onnx-rounded",
            session="accel.runtimes.onnx_rounded:RoundedSession",
            kinds=("onnx",),
            module="onnxruntime",
            extra=None,
        ),
        Runtime(
            name="openvino",
            session="accel.runtimes.openvino:OpenVinoSession",
            kinds=("openvino",),
            module="openvino",
            extra="openvino",
        ),
        Runtime(
            name="ncnn",
            session="accel.runtimes.ncnn:NcnnSession",
            kinds=("ncnn",),
            module="ncnn",
            extra="ncnn",
        ),
        Runtime(
            name="tensorrt",
            session="accel.runtimes.tensorrt:TensorRTSession",
            kinds=("engine",),
            module="tensorrt",
            extra="tensorrt",
            needs_gpu=True,
        ),
        Runtime(
            name="tensorrt-rtx",
            session="accel.runtimes.tensorrt:TensorRTSession",
            kinds=("engine",),
            module="tensorrt_rtx_bindings",
            extra="tensorrt-rtx",
            needs_gpu=True,
        ),
    )
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


def open_session(
    artifact: Artifact, runtime: str | None = None, options: Mapping[str, Any] | SessionOptions | None = None
) -> BaseSession:
    """Load ``artifact``; options that aren't given come from its manifest."""
    found = get_runtime(runtime) if runtime else default_runtime(artifact)
    if not isinstance(options, SessionOptions):
        recorded = (artifact.manifest.session if artifact.manifest else {}).get("options", {})
        options = SessionOptions(**{**recorded, **(options or {})})
    if found.needs_gpu and not has_nvidia_gpu():
        raise UnsupportedHere(f"{artifact.path} needs an NVIDIA GPU and this machine has none; run it where one is")
    return found.open(artifact, options)
