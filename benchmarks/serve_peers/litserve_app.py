"""Serves the ONNX file of the load benchmark with LitServe. Usage: `python litserve_app.py PORT MODEL`. A request body
is LitServe's usual JSON."""

from __future__ import annotations

import sys
from typing import Any

import litserve
import numpy as np
import onnxruntime

DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class OnnxApi(litserve.LitAPI):
    def setup(self, device: str) -> None:  # noqa: ARG002
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(sys.argv[2], options, providers=["CPUExecutionProvider"])
        self.dtypes = {given.name: DTYPES[given.type] for given in self.session.get_inputs()}

    def decode_request(self, request, **_: Any) -> dict[str, np.ndarray]:
        return {name: np.asarray(request[name], dtype) for name, dtype in self.dtypes.items()}

    def predict(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        return self.session.run(None, feeds)[0]

    def encode_response(self, output: np.ndarray) -> dict[str, Any]:
        return {"y": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(OnnxApi(), accelerator="cpu", workers_per_device=2)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
