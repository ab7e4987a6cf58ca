"""Trains a small image model, and optimizes the model for this machine.

Run ``python examples/optimize_image.py``. The example needs accel-toolchain[openvino,report] and scikit-learn (for the
images).
"""

import numpy as np
import torch
from sklearn.datasets import load_digits

import accel

images, labels = load_digits(return_X_y=True)
IMAGES = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
TRAIN = 1400  # the rest is the test set


def make() -> torch.nn.Module:
    """Returns the network without trained weights. accel exports this function."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 4 * 4, 10),
    )


def train() -> torch.nn.Module:
    """Returns the network after eight epochs of training."""
    torch.manual_seed(0)
    net, x, y = make(), torch.tensor(IMAGES[:TRAIN]), torch.tensor(labels[:TRAIN])
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(8):
        for part in torch.randperm(TRAIN).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
    return net


if __name__ == "__main__":
    torch.save(train().state_dict(), "weights.pt")
    np.savez("samples.npz", image=IMAGES[:256])  # These samples calibrate int8.
    np.savez("test.npz", image=IMAGES[TRAIN:])  # These images judge the candidates.
    np.savez("labels.npz", labels=labels[TRAIN:])

    inputs = {"image": ("float32", ("batch", 1, 8, 8))}
    model = accel.export(f"{__file__}:make", weights="weights.pt", inputs=inputs, out="digits.onnx")
    result = accel.optimize(
        model, data="samples.npz", eval_data="test.npz", labels="labels.npz", max_drop=0.01, out="digits"
    )
    for row in result.candidates:
        print(f"{row.name:40} {row.status}")
    print("chosen:", result.chosen)
