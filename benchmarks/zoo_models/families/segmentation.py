"""Makes the models of segmentation-models-pytorch."""

from __future__ import annotations

import torch

from ..case import Case

NAMES = [
    "Unet",
    "UnetPlusPlus",
    "MAnet",
    "Linknet",
    "FPN",
    "PSPNet",
    "PAN",
    "DeepLabV3",
    "DeepLabV3Plus",
    "UPerNet",
    "Segformer",
    "DPT",
]


def make(name: str) -> Case:
    """Returns the model with a small encoder and random weights."""
    import segmentation_models_pytorch as smp

    encoder = {"DPT": "tu-vit_tiny_patch16_224"}.get(name, "resnet18")
    model = getattr(smp, name)(encoder, encoder_weights=None, classes=3)
    if name == "DPT":
        return Case(model, lambda b, _: (torch.randn(b, 3, 224, 224),))
    return Case(
        model,
        lambda b, s: (torch.randn(b, 3, s, s),),
        {"x": {0: "batch"}},
        (64,),
    )
