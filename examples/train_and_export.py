"""Trains a model on two processes, and exports the trained model.

Run ``python examples/train_and_export.py``. The example needs accel-toolchain[train].
"""

import subprocess
import sys
from pathlib import Path

import torch

import accel

CONFIG = f"""
model = "{Path(__file__).resolve()}:model"
data = "{Path(__file__).resolve()}:data"
loss = "accel.train.loss:squared_error"
steps = 200
global_batch = 64
micro_batch = 16

[optimizer]
lr = 0.01

[parallel]
zero = 2
"""


def model() -> torch.nn.Module:
    """Returns the network to train. Every rank calls this factory after setting the same seed."""
    return torch.nn.Sequential(torch.nn.Linear(3, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the samples. The input of a sample is three numbers. The target is a price computed from the numbers."""
    generator = torch.Generator().manual_seed(0)
    rides = torch.rand((512, 3), generator=generator)
    prices = 2 + rides @ torch.tensor([[3.0], [1.0], [-1.0]])
    return list(zip(rides, prices, strict=True))


if __name__ == "__main__":
    Path("taxi.toml").write_text(CONFIG)
    # Running the same command again resumes the run.
    subprocess.run([sys.executable, "-m", "accel", "train", "taxi.toml", "--nproc", "2", "--out", "run"], check=True)

    artifact = accel.export("run", out="taxi.onnx")
    with accel.load(artifact) as session:
        rides = session.example_inputs(batch=4)
        print("prices:", next(iter(session.run(rides).values())).ravel())
