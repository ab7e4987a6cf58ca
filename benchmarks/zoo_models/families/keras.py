"""Makes the models of keras.applications for small images, with random weights."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..case import Case

NAMES = [
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Small",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "ResNet50",
    "ResNet50V2",
    "DenseNet121",
    "VGG16",
    "NASNetMobile",
    "Xception",
    "InceptionV3",
    "InceptionResNetV2",
    "ConvNeXtTiny",
]
_LARGER = {"Xception": 96, "InceptionV3": 96, "InceptionResNetV2": 96}


def make(name: str) -> Case:
    """Returns the model with 10 classes."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras

    keras.utils.set_random_seed(0)
    side = _LARGER.get(name, 64)
    model = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3), classes=10)

    def example(batch: int, _: int) -> Any:
        return (torch.rand(batch, side, side, 3).numpy(),)

    return Case(model, example, is_torch=False)
