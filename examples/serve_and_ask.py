"""Serves a model and sends a request with Triton's client.

Run ``python examples/serve_and_ask.py``. The example needs accel-toolchain[serve] and tritonclient[grpc].
"""

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import tritonclient.grpc as triton

import accel


def make() -> torch.nn.Module:
    """Returns the model that is served."""
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    # Triton's layout has a folder for each model. The folder of a model has a folder for each version.
    Path("models/scores/1").mkdir(parents=True, exist_ok=True)
    inputs = {"x": ("float32", ("batch", 16))}
    accel.export(f"{__file__}:make", inputs=inputs, dims={"batch": (1, 1, 32)}, out="models/scores/1/model.onnx")

    port = free_port()
    words = ["serve", "models", "--grpc-port", str(port), "--http-port", str(free_port())]
    server = subprocess.Popen([sys.executable, "-m", "accel", *words])
    try:
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                if client.is_model_ready("scores"):
                    break
            except triton.InferenceServerException:
                time.sleep(0.2)
        x = triton.InferInput("x", [8, 16], "FP32")
        x.set_data_from_numpy(np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32))
        answer = client.infer("scores", [x])
        scores = answer.as_numpy("output") if answer is not None else None
        assert scores is not None, "a request without a callback has an answer, and the model has this output"
        print("answer:", scores.shape)
    finally:
        server.terminate()
        server.wait(30)
