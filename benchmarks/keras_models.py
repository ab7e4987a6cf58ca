"""Convolutional networks of keras.applications with random weights, as sources for accel. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import keras


def _built(application: Any, size: int) -> Any:
    keras.utils.set_random_seed(0)
    return application(weights=None, input_shape=(size, size, 3))


def mobilenet_v2() -> Any:
    return _built(keras.applications.MobileNetV2, 224)


def efficientnet_b0() -> Any:
    return _built(keras.applications.EfficientNetB0, 224)


def resnet50_v2() -> Any:
    return _built(keras.applications.ResNet50V2, 224)
