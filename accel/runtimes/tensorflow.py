"""Runs unconverted TensorFlow and TFLite models as the reference of conversions and the baseline of benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from accel.artifact import Artifact
from accel.signature import Feeds
from accel.sources.tensorflow.process import in_tensorflow, require_tensorflow
from accel.sources.tensorflow.source import TensorFlowSpec

from .base import BaseSession, SessionOptions

if TYPE_CHECKING:
    import numpy as np

    class Candidate(Protocol):
        """The fields of ``accel.timing.blocks.Candidate`` that this module reads."""

        @property
        def artifact(self) -> Artifact: ...

        @property
        def options(self) -> Mapping[str, Any]: ...


class TensorFlowSession(BaseSession):
    """Runs a model in the TensorFlow process over a pipe. ``options.threads`` has no effect."""

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        require_tensorflow()
        self.spec = TensorFlowSpec.of(artifact)

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = in_tensorflow(
            "accel.sources.tensorflow.model:run", spec=self.spec, feeds=dict(feeds)
        )
        return found


def open_here(candidate: Candidate) -> TensorFlowHereSession:
    """Open a candidate in a benchmark's child process. The child process imports TensorFlow itself, so the timing
    doesn't include the pipe."""
    import os

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    return TensorFlowHereSession(candidate.artifact, SessionOptions(**dict(candidate.options)))


class TensorFlowHereSession(TensorFlowSession):
    """Runs a model in the current process, which is a dedicated child process (for example, of a benchmark)."""

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        import tensorflow as tf

        if options.threads:
            tf.config.threading.set_intra_op_parallelism_threads(options.threads)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        from accel.sources.tensorflow.model import load

        self.model = load(self.spec)

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return self.model.call(feeds)
