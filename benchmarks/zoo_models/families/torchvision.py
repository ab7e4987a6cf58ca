"""Makes models of torchvision's families: classification, segmentation, video, optical flow, detection."""

from __future__ import annotations

import torch

from ..case import Case, NotMade

_SIZES = {"inception_v3": 96, "maxvit_t": 224, "vit_b_16": 224, "vit_b_32": 224}
NAMES = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vgg11_bn",
    "vit_b_32",
    "wide_resnet50_2",
    "segmentation/deeplabv3_mobilenet_v3_large",
    "segmentation/fcn_resnet50",
    "segmentation/lraspp_mobilenet_v3_large",
    "video/r3d_18",
    "video/mc3_18",
    "video/r2plus1d_18",
    "video/s3d",
    "video/mvit_v2_s",
    "video/swin3d_t",
    "optical_flow/raft_small",
    "detection/ssdlite320_mobilenet_v3_large",
    "detection/retinanet_resnet50_fpn",
    "detection/fasterrcnn_mobilenet_v3_large_320_fpn",
    "detection/fcos_resnet50_fpn",
]


def make(name: str) -> Case:
    """Returns the model with random weights. The zoo can't make detectors, which need torchvision's C++ operators."""
    import torchvision

    part, _, model_name = name.rpartition("/")
    if part == "detection":
        raise NotMade("torchvision's C++ operators need another build of torch")
    place = getattr(torchvision.models, part) if part else torchvision.models
    options = {"weights_backbone": None} if part == "segmentation" else {}
    if model_name in ("googlenet", "inception_v3"):
        options |= {"init_weights": True}
    model = getattr(place, model_name)(weights=None, **options).eval()
    size = _SIZES.get(model_name, 64)
    if part == "video":
        frames, size = (16, 224) if model_name == "mvit_v2_s" else (14, 64)
        return Case(model, lambda b, _: (torch.randn(b, 3, frames, size, size),))
    if part == "optical_flow":
        return Case(model, lambda b, _: (torch.rand(b, 3, 128, 128), torch.rand(b, 3, 128, 128)))
    return Case(model, lambda b, _: (torch.randn(b, 3, size, size),))
