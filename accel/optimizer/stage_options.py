"""Defines the options of quantization and casts that a user may choose. In Python, the classes ``QuantizeOptions`` and
``CastOptions`` hold the options. The command line has the options ``--quantize`` and ``--cast``, for example
``--quantize calibration=entropy`` and ``--cast keep-fp32=Softmax``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from accel.converters.quantize.stage import CALIBRATIONS
from accel.errors import BadInputSpec
from accel.key_values import read_key_values, yes_or_no
from accel.spelling import option

if TYPE_CHECKING:
    from accel.artifact import Artifact
    from accel.converters.quantize.stage import QuantizeConfig

# The fields of ``QuantizeConfig`` that each quantization mode reads. accel passes a user's option only to the modes
# that read this option.
_ACTIVATIONS = ("calibration", "percentile", "smooth")
_OF_WEIGHTS = ("keep", "block_size", "smallest")
OPTIONS_BY_MODE = {
    "static": (*_ACTIVATIONS, "per_channel", "ops", "keep"),
    "fp8": (*_ACTIVATIONS, "per_channel", "ops", "keep"),
    "dynamic": ("per_channel", "ops", "keep"),
    "dynamic-outliers": ("per_channel", "ops", "keep"),
    "int8-weights": _OF_WEIGHTS,
    "int4-weights": _OF_WEIGHTS,
    "int4-gptq": _OF_WEIGHTS,
    "int4-awq": _OF_WEIGHTS,
}


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """The options of quantization that a user may choose. The fields mean the same as in ``QuantizeConfig``. A field
    that is None or an empty tuple keeps the default. If ``percentile`` is set and ``calibration`` isn't, the
    calibration method is ``percentile``.

    Raises ``BadInputSpec`` if a value is out of range.
    """

    calibration: str | None = None
    percentile: float | None = None
    samples: int | None = None
    smooth: float | None = None
    per_channel: bool | None = None
    ops: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    block_size: int | None = None
    smallest: int | None = None

    def __post_init__(self) -> None:
        parse_quantize_options(self.words())

    def words(self) -> tuple[str, ...]:
        """Returns each option as ``KEY=VALUE``, as on the command line."""
        return _words(self)

    def to_fields(self) -> dict[str, Any]:
        """Returns the chosen fields of ``QuantizeConfig``."""
        return _with_calibration(_chosen(self))


@dataclass(frozen=True, kw_only=True)
class CastOptions:
    """The options of a cast that a user may choose. The fields mean the same as in ``CastConfig``. A field that is None
    or an empty tuple keeps the default."""

    keep_io: bool | None = None
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parse_cast_options(self.words())

    def words(self) -> tuple[str, ...]:
        """Returns each option as ``KEY=VALUE``, as on the command line."""
        return _words(self)

    def to_fields(self) -> dict[str, Any]:
        """Returns the chosen fields of ``CastConfig``."""
        return _chosen(self)


_Options = TypeVar("_Options", QuantizeOptions, CastOptions)


def options_given(
    kind: type[_Options], name: str, given: _Options | Mapping[str, Any] | Sequence[str] | str
) -> _Options | tuple[str, ...]:
    """Reads the options in the argument ``name``. The user may give a ``kind``, a mapping of its fields, one
    ``KEY=VALUE`` text, or several texts. Raises ``BadInputSpec`` if a mapping has a field that ``kind`` lacks."""
    if isinstance(given, kind):
        return given
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Mapping):
        known = [one.name for one in fields(kind)]
        if unknown := [key for key in given if key not in known]:
            raise BadInputSpec(f"{name} has no option {unknown[0]!r}; choose from {', '.join(known)}")
        values: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in given.items()}
        return kind(**values)
    return tuple(cast("Sequence[str]", given))


def parse_quantize_options(texts: Iterable[str]) -> dict[str, Any]:
    """Returns the fields of ``QuantizeConfig`` that are set by ``KEY=VALUE`` texts. ``keep`` and ``ops`` may be
    repeated, and all their values count. If ``percentile`` is set and ``calibration`` isn't, the calibration method is
    ``percentile``. Raises ``BadInputSpec`` if a text can't be read."""
    return _with_calibration(_parse(option("quantize").removesuffix("="), texts, _QUANTIZE))


def parse_cast_options(texts: Iterable[str]) -> dict[str, Any]:
    """Returns the fields of ``CastConfig`` that are set by ``KEY=VALUE`` texts. ``keep-fp32`` may be repeated, and all
    its values count. Raises ``BadInputSpec`` if a text can't be read."""
    return _parse(option("cast").removesuffix("="), texts, _CAST)


def options_of_mode(config: QuantizeConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that apply to the quantization mode of ``config``."""
    return {name: value for name, value in options.items() if name in OPTIONS_BY_MODE[config.mode]}


def without_effect(src: Artifact, options: Mapping[str, Any]) -> str:
    """Returns a warning about a quantization option that has no effect on ``src`` (kind ``onnx``).

    Returns an empty text if every option has an effect.
    """
    from accel.converters.quantize.stage import is_transformer
    from accel.sources.onnx.file import read_without_weights

    if not options.get("smooth") or is_transformer(read_without_weights(src.path)):
        return ""
    smooth = f"{option('quantize').removesuffix('=')} smooth"
    return (
        f"{smooth} has no effect on {src.path.name}: SmoothQuant is for transformers, which have a softmax between "
        "products of activations; leave it out"
    )


def _chosen(options: QuantizeOptions | CastOptions) -> dict[str, Any]:
    values = {one.name: getattr(options, one.name) for one in fields(options)}
    return {name: value for name, value in values.items() if value is not None and value != ()}


def _words(options: QuantizeOptions | CastOptions) -> tuple[str, ...]:
    return tuple(f"{name.replace('_', '-')}={_text(value)}" for name, value in _chosen(options).items())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _with_calibration(found: dict[str, Any]) -> dict[str, Any]:
    return {"calibration": "percentile", **found} if "percentile" in found else found


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
    """Reads a block size. The operator MatMulNBits requires a block size that is a power of two and at least 16."""
    value = int(text)
    if value < 16 or value & (value - 1):
        raise ValueError(text)
    return value


def _names(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise ValueError(text)
    return found


# Maps each option of a quantize stage to a function that parses the option's value, and to an example value.
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
