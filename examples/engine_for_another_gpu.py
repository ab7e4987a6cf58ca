"""Builds a TensorRT engine for a GPU that this machine does not have.

Run ``python examples/engine_for_another_gpu.py 8.6``. The number 8.6 is the compute capability of an RTX 3090. A T4 has
compute capability 7.5, and an RTX 4090 has 8.9. The example needs accel-toolchain[tensorrt-rtx]. This machine can't run
the engine, so accel runs the ONNX model with the rounding of fp16 to check the accuracy. Measure the speed of the
engine on the other GPU.
"""

import sys

import numpy as np
import torch

import accel


def make() -> torch.nn.Module:
    """Returns the model to build an engine from."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 10),
    )


if __name__ == "__main__":
    capability = sys.argv[1] if len(sys.argv) > 1 else "8.6"
    inputs = {"image": ("float32", ("batch", 3, 32, 32))}
    model = accel.export(f"{__file__}:make", inputs=inputs, dims={"batch": (1, 8, 32)}, out="net.onnx")
    np.savez("images.npz", image=np.random.default_rng(0).standard_normal((64, 3, 32, 32)).astype("float32"))

    result = accel.optimize(
        model,
        target="tensorrt-rtx",
        compute_capabilities=[capability],
        precision=["fp16"],
        data="images.npz",
        out="engine",
    )
    for row in result.candidates:
        print(f"{row.name:24} {row.status}")
    print(result.artifact.path)
    print("on the GPU: accel bench engine/ --against net.onnx")
