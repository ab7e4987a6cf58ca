"""ONNX Runtime on the CPU and on NVIDIA GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnxruntime

from accel.artifact import Artifact
from accel.runtimes.base import BaseSession, SessionOptions
from accel.signature import Feeds

if TYPE_CHECKING:
    import numpy as np


class OnnxRuntimeSession(BaseSession):
    """The CPU execution provider."""

    providers = ("CPUExecutionProvider",)

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = options.threads
        self.session = onnxruntime.InferenceSession(str(artifact.path), settings, providers=list(self.providers))
        self.outputs = [o.name for o in self.session.get_outputs()]

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return dict(zip(self.outputs, self.session.run(None, dict(feeds)), strict=True))
