"""Turns image files into a model's input, for ``accel infer``. Decodes, rotates, resizes, transposes and normalizes
images."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel.errors import BadData, MissingExtra, one_line

from ..protocol import messages as proto
from ..protocol.tensors import DATATYPES

ENDINGS = (".png", ".jpg", ".jpeg")
_FORMATS = ("PNG", "JPEG")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_KINDS = ("FP32", "FP16", "UINT8")


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the image files in the list ``paths``. Replaces each folder in ``paths`` by the image files in the
    folder. Returns an empty list if ``paths`` has neither images nor folders.

    Raises ``BadData`` if ``paths`` has both images and other files, or a folder without images.
    """
    images = [path.is_dir() or path.suffix.lower() in ENDINGS for path in paths]
    if not any(images):
        return []
    if not all(images):
        raise BadData("images and arrays can't be sent together; run one command for the images and one for the arrays")
    found = []
    for path in paths:
        inside = sorted(p for p in path.iterdir() if p.suffix.lower() in ENDINGS) if path.is_dir() else [path]
        if not inside:
            raise BadData(f"the folder {path} holds no images; add files that end in {' or '.join(ENDINGS)}")
        found += inside
    return found


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """Describes the image that a model takes.

    ``height`` and ``width`` are in pixels, or None if the model takes any size. ``channels_first`` is True for NCHW and
    False for NHWC. ``batched`` is True if the first dim is the batch. If the model takes floats, pixels are scaled to
    values from 0 to 1, then normalized by ``mean`` and ``std``. ``mean`` and ``std`` hold one number, or one number per
    channel.
    """

    name: str
    datatype: str
    channels: int
    height: int | None
    width: int | None
    channels_first: bool
    batched: bool
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def read(self, path: Path) -> np.ndarray:
        """Reads the image in ``path``. Returns the pixels in the size, layout and dtype that the model takes, without a
        batch dim. Raises ``BadData`` if the file can't be read."""
        pixels = np.asarray(self._decoded(path))
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        if self.datatype != "UINT8":
            scaled = pixels.astype(np.float32) / np.float32(255)
            if self.mean:
                scaled -= np.asarray(self.mean, np.float32)
            if self.std:
                scaled /= np.asarray(self.std, np.float32)
            pixels = scaled.astype(DATATYPES[self.datatype].numpy)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1) if self.channels_first else pixels)

    def _decoded(self, path: Path) -> Any:
        try:
            from PIL import Image, ImageOps
        except ImportError:
            raise MissingExtra("pillow", "serve") from None
        try:
            with warnings.catch_warnings():
                # Refuses a small file that unpacks to a huge image. By default, Pillow only warns about a decompression
                # bomb.
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(path, formats=_FORMATS) as image:
                    turned = ImageOps.exif_transpose(image).convert(_MODES[self.channels])
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, RuntimeWarning) as error:
            raise BadData(f"can't read the image {path} ({one_line(error, 160)}); give PNG or JPEG") from None
        size = (self.width or turned.width, self.height or turned.height)
        return turned if turned.size == size else turned.resize(size, Image.Resampling.BILINEAR)


def image_input(metadata: Any, config: Any, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()) -> ImageInput:
    """Returns the image input of a model, from its ``ModelMetadataResponse`` and ``ModelConfig``.

    Raises ``BadData`` if the model doesn't take exactly one image, or ``mean`` and ``std`` don't fit the model.
    """
    found = []
    formats = {tensor.name: proto.enum_name("ModelInput.Format", tensor.format) for tensor in config.input}
    for tensor in metadata.inputs:
        shape = tuple(tensor.shape)
        if tensor.datatype in _KINDS and len(shape) in (3, 4):
            first = _channels_first(shape[-3:], formats.get(tensor.name, ""))
            if first is not None:
                found.append((tensor, shape[-3:], first, len(shape) == 4))
    if len(metadata.inputs) != 1 or len(found) != 1:
        given = ", ".join(f"{t.name} {t.datatype} {list(t.shape)}" for t in metadata.inputs)
        raise BadData(
            f"model '{metadata.name}' takes {given}, but images need a model with a single input, "
            f"which has 1, 3 or 4 channels as the first or last dim and the dtype {' or '.join(_KINDS)}; send the "
            "arrays as .npz"
        )
    tensor, shape, first, batched = found[0]
    channels, height, width = shape if first else (shape[2], shape[0], shape[1])
    for option, values in (("the mean of --normalize", mean), ("the deviation of --normalize", std)):
        if values and tensor.datatype == "UINT8":
            raise BadData(f"{option} is for models that take floats, but model '{metadata.name}' takes UINT8 pixels")
        if len(values) not in (0, 1, channels):
            raise BadData(
                f"{option} needs 1 number, or {channels} numbers for {channels} channels, but has {len(values)}"
            )
    if any(value <= 0 for value in std):
        raise BadData("the deviation of --normalize has to be above 0 for every channel; correct --normalize")
    return ImageInput(
        name=tensor.name,
        datatype=tensor.datatype,
        channels=channels,
        height=height if height > 0 else None,
        width=width if width > 0 else None,
        channels_first=first,
        batched=batched,
        mean=mean,
        std=std,
    )


def _channels_first(shape: tuple[int, ...], declared: str) -> bool | None:
    """Returns True if the channels are the first of the three dims, and False if the channels are the last dim. Returns
    None if both dims or neither dim can be the channels."""
    if declared != "FORMAT_NONE" and declared:
        return declared == "FORMAT_NCHW" if shape[0 if declared == "FORMAT_NCHW" else 2] in _MODES else None
    for channels in (3, 1, 4):  # tries 3 channels first, because a dim of size 1 or 4 may be a height or a width
        if (shape[0] == channels) != (shape[2] == channels):
            return shape[0] == channels
    return None
