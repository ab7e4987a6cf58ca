"""What may be said of quantization and of casts on the command line: ``--quantize calibration=entropy``,
``--cast keep-fp32=Softmax``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accel.converters.quantize import CALIBRATIONS
from accel.key_values import read_key_values, yes_or_no

if TYPE_CHECKING:
    from accel.artifact import Artifact
    from accel.converters.quantize import QuantizeConfig

# What a mode of quantization reads of the config; the others it ignores, so they are not given to it.
_ACTIVATIONS = ("calibration", "percentile", "smooth")
_BY_MODE = {
    "static": (*_ACTIVATIONS, "per_channel", "ops", "keep"),
    "fp8": (*_ACTIVATIONS, "per_channel", "ops", "keep"),
    "dynamic": ("per_channel", "ops", "keep"),
}
_OF_WEIGHTS = ("keep", "block_size", "smallest")


def parse_quantize_options(texts: Iterable[str]) -> dict[str, Any]:
    """``KEY=VALUE`` each, as fields of ``QuantizeConfig``; ``keep`` and ``ops`` may come again and add up, and
    ``percentile`` alone asks for that calibration. ``BadInputSpec`` for what is none."""
    found = _parse("--quantize", texts, _QUANTIZE)
    return {"calibration": "percentile", **found} if "percentile" in found else found


def parse_cast_options(texts: Iterable[str]) -> dict[str, Any]:
    """``KEY=VALUE`` each, as fields of ``CastConfig``; ``keep-fp32`` may come again. ``BadInputSpec`` for what is
    none."""
    return _parse("--cast", texts, _CAST)


def options_of_mode(config: QuantizeConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that quantization in the mode of ``config`` reads."""
    known = _BY_MODE.get(config.mode, _OF_WEIGHTS)
    return {name: value for name, value in options.items() if name in known}


def without_effect(src: Artifact, options: Mapping[str, Any]) -> str:
    """What to say of an option for quantization that changes nothing of ``src`` (kind ``onnx``); empty for none."""
    from accel.converters.quantize import is_transformer
    from accel.sources.onnx_file import read_proto

    if not options.get("smooth") or is_transformer(read_proto(src.path)):
        return ""
    return (
        f"--quantize smooth changes nothing of {src.path.name}: SmoothQuant is for transformers, which have a softmax "
        "between products of activations; leave it out"
    )


def _parse(flag: str, texts: Iterable[str], known: Mapping[str, tuple[Callable[[str], Any], str]]) -> dict[str, Any]:
    found = read_key_values(flag, texts, known, underscores=True)
    return {key.replace("-", "_"): value for key, value in found.items()}


def _number(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(text)
        return value

    return read


def _whole(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < low:
            raise ValueError(text)
        return value

    return read


def _block(text: str) -> int:
    """A power of two from 16 on: what MatMulNBits takes."""
    value = int(text)
    if value < 16 or value & (value - 1):
        raise ValueError(text)
    return value


def _names(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise ValueError(text)
    return found


_QUANTIZE: dict[str, tuple[Callable[[str], Any], str]] = {
    "calibration": ({name: name for name in CALIBRATIONS}.__getitem__, " or calibration=".join(CALIBRATIONS)),
    "percentile": (_number(50.0, 100.0), "99.99"),
    "samples": (_whole(1), "512"),
    "smooth": (_number(0.0, 1.0), "0.5"),
    "per-channel": (yes_or_no, "no"),
    "ops": (_names, "MatMul,Gemm"),
    "keep": (_names, "/layer.0/*,Conv"),
    "block-size": (_block, "64"),
    "smallest": (_whole(1), "65536"),
}
_CAST: dict[str, tuple[Callable[[str], Any], str]] = {
    "keep-io": (yes_or_no, "no"),
    "keep-fp32": (_names, "/layer.0/*,Softmax"),
}
