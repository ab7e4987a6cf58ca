"""TensorFlow and TFLite as they are: the reference of their conversions, and the baseline of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from accel.artifact import Artifact
from accel.runtimes.base import BaseSession, SessionOptions
from accel.signature import Feeds
from accel.sources.tensorflow_process import in_tensorflow, require_tensorflow
from accel.sources.tensorflow_source import TensorFlowSpec

if TYPE_CHECKING:
    import numpy as np

    class Candidate(Protocol):
        """What a benchmark hands over (``accel.bench.blocks.Candidate``)."""

        @property
        def artifact(self) -> Artifact: ...

        @property
        def options(self) -> Mapping[str, Any]: ...


class TensorFlowSession(BaseSession):
    """A model in the TensorFlow process; inputs and outputs cross to it and back. ``options.threads`` has no effect."""

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        require_tensorflow()
        self.spec = TensorFlowSpec.of(artifact)

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = in_tensorflow(
            "accel.sources.tensorflow_model:run", spec=self.spec, feeds=dict(feeds)
        )
        return found


def open_here(candidate: Candidate) -> TensorFlowHereSession:
    """The opener of a benchmark: its child process may well import TensorFlow, and no pipe is timed along."""
    import os

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    return TensorFlowHereSession(candidate.artifact, SessionOptions(**dict(candidate.options)))


class TensorFlowHereSession(TensorFlowSession):
    """The same inside this process: for a child process that does nothing else, such as a benchmark's."""

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        import tensorflow as tf

        if options.threads:
            tf.config.threading.set_intra_op_parallelism_threads(options.threads)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        from accel.sources.tensorflow_model import load

        self.model = load(self.spec)

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return self.model.call(feeds)
