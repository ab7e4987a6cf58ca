"""Makes one small architecture of each model family of timm."""

from __future__ import annotations

import torch

from ..case import Case, NotMade


def names() -> list[str]:
    """Returns the name of one architecture for each model family, if possible a small one."""
    import timm

    found: dict[tuple[str, str], str] = {}
    small = ("nano", "pico", "femto", "atto", "tiny", "xxs", "xs", "small", "b0", "18", "s0", "s")
    for name in sorted(timm.list_models(), key=lambda n: (not any(part in small for part in n.split("_")), len(n), n)):
        module = timm.models.model_entrypoint(name).__module__
        found.setdefault((module, name.split("_")[0].rstrip("0123456789.")), name)
    return sorted(found.values())


def make(name: str) -> Case:
    """Returns the architecture with 10 classes, for images of 64 x 64 pixels if possible."""
    import timm

    reasons = []
    for size in (64, 0):
        try:
            with torch.device("meta"):
                probe = timm.create_model(name, num_classes=10, **({"img_size": size} if size else {}))
            options = {"img_size": size}
        except Exception as error:  # most convolutional networks take any image size and have no option img_size
            reasons.append(str(error)[:100])
            with torch.device("meta"):
                probe = timm.create_model(name, num_classes=10)
            options = {}
        if (count := sum(p.numel() for p in probe.parameters())) > 60_000_000:
            raise NotMade(f"{count / 1e6:.0f} million parameters")
        model = timm.create_model(name, num_classes=10, **(options if size else {})).eval()
        channels, *own = model.default_cfg["input_size"]
        side = size if size and (options or not model.default_cfg.get("fixed_input_size")) else own[0]
        try:
            with torch.no_grad():
                model(torch.randn(2, channels, side, side))
            return Case(model, lambda b, _, c=channels, s=side: (torch.randn(b, c, s, s),))
        except Exception as error:  # the size may not fit
            reasons.append(str(error)[:100])
    raise NotMade("; ".join(reasons))
