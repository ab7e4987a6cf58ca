"""Defines the classes for a loaded TensorFlow model of any file format and for its frozen graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel.errors import InvalidModel

if TYPE_CHECKING:
    import numpy as np

# Name, dtype and shape of a tensor. None stands for a dynamic dim. A shape of unknown rank is None as a whole.
Row = tuple[str, str, list[int | None] | None]

_DTYPES = {"float": "float32", "double": "float64", "half": "float16"}


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A GraphDef without variables. ``inputs`` and ``outputs`` map the user's names to tensor names (``x:0``)."""

    graph: Any
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(kw_only=True)
class Loaded:
    """A model that can be called and converted.

    ``call`` takes arrays by input name and returns arrays by output name. ``inputs`` has the name, dtype and shape of
    each input. ``outputs`` names the outputs. ``freeze`` returns the graph with its weights as constants. ``declared``
    has the name, dtype and shape of each output, or is empty if the file doesn't declare its outputs. ``placeholders``
    has the name and the value of each placeholder that was set.
    """

    call: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
    inputs: list[Row]
    outputs: list[str]
    freeze: Callable[[], Frozen]
    declared: Sequence[Row] = ()
    placeholders: Mapping[str, str] = field(default_factory=dict)


def plain_name(name: str) -> str:
    """Returns the name that users see for a tensor, such as ``x`` for ``x:0`` and ``x_1`` for ``x:1``."""
    operation, _, index = name.partition(":")
    return operation if index in ("", "0") else f"{operation}_{index}"


def dtype_name(kind: Any) -> str:
    """Returns the name that a ``TensorSpec`` uses for a ``tf.DType``.

    Raises ``InvalidModel`` for a dtype that ONNX does not have (resource, variant, complex, quantized).
    """
    name = str(_DTYPES.get(kind.name, kind.name))
    if name in ("resource", "variant") or name.startswith(("complex", "q")):
        raise InvalidModel(
            f"an input or output has the dtype {name}, which ONNX does not have; export a signature of plain tensors"
        )
    return name


def shape_of(shape: Any) -> list[int | None] | None:
    """Returns the dims of a TensorFlow or Keras shape, or None if the rank is unknown."""
    import tensorflow as tf

    shape = tf.TensorShape(shape)
    return None if shape.rank is None else list(shape.as_list())
