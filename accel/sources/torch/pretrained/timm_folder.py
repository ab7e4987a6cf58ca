"""Opens timm folders, which hold weights and a config.json that names the architecture."""

from __future__ import annotations

from pathlib import Path

from accel.errors import InvalidModel, UnsupportedHere, one_line
from accel.signature import BATCH, DimRange, TensorSpec

from ..found import Found
from .folder import weight_files


def open_timm(folder: Path, name: str) -> Found:
    """Opens the model in ``folder``. The folder's config names the architecture and the image size.

    Raises ``InvalidModel`` if timm can't load the folder, and ``UnsupportedHere`` if timm can't be imported.
    """
    weights = weight_files(folder, name)
    try:
        import timm
    except ImportError as error:
        raise UnsupportedHere(f"the model {name} needs timm, which is not installed; run: pip install timm") from error
    except Exception as error:  # torchvision fails if it was built for another torch
        raise UnsupportedHere(
            f"timm can't be imported here ({one_line(error, 120)}); install the torchvision that belongs to torch "
            f"{_torch_version()}"
        ) from error
    try:
        module = timm.create_model(f"local-dir:{folder}", pretrained=True)
        channels, height, width = (int(size) for size in module.pretrained_cfg["input_size"])
    except Exception as error:
        reason = one_line(error, 200)
        raise InvalidModel(f"timm {timm.__version__} can't load {name} ({reason}); update timm") from error
    shape = (BATCH, channels, height, width)
    return Found(
        module=module,
        path=folder / "config.json",
        files=(*weights, folder / "config.json"),
        inputs=(TensorSpec("x", "float32", shape),),
        dims={BATCH: DimRange(1, 1, 8)},
    )


def _torch_version() -> str:
    import torch

    return torch.__version__
