"""OpenVINO on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.artifact import Artifact
from accel.runtimes.base import BaseSession, SessionOptions
from accel.signature import Feeds

if TYPE_CHECKING:
    pass


class OpenVinoSession(BaseSession):
    """One infer request."""

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        import openvino as ov

        super().__init__(artifact, options)
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[options.precision],
            "PERFORMANCE_HINT": "LATENCY",
        }
        if options.threads:
            settings["INFERENCE_NUM_THREADS"] = options.threads
        self._model = ov.Core().compile_model(str(artifact.path), "CPU", settings)
        self._request = self._model.create_infer_request()
        names = {s.name for s in artifact.signature.outputs}
        self._outputs = {next(iter(names & p.get_names())): i for i, p in enumerate(self._model.outputs)}

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        self._request.infer(dict(feeds), share_inputs=True)
        return {name: self._request.get_output_tensor(i).data.copy() for name, i in self._outputs.items()}
