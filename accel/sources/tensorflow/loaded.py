"""A loaded TensorFlow model of any form, as data: how it is called, and what it takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel.errors import InvalidModel

if TYPE_CHECKING:
    import numpy as np

# Name, dtype and shape of a tensor. An open dim is None, and so is a shape of unknown rank.
Row = tuple[str, str, list[int | None] | None]

_DTYPES = {"float": "float32", "double": "float64", "half": "float16"}


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A GraphDef without variables. ``inputs`` and ``outputs`` give the tensor names (``x:0``) by the user's names."""

    graph: Any
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(kw_only=True)
class Loaded:
    """A model that can be called and converted.

    ``call``: takes arrays by input name and returns arrays by output name. ``inputs``: a row for each input.
    ``outputs``: the names of the outputs. ``freeze``: returns the graph with its weights as constants. ``declared``: a
    row for each output if the file states its outputs, else empty.
    """

    call: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
    inputs: list[Row]
    outputs: list[str]
    freeze: Callable[[], Frozen]
    declared: Sequence[Row] = ()


def plain_name(name: str) -> str:
    """Returns the user's name of a tensor: ``x`` for ``x:0``, ``x_1`` for ``x:1``."""
    operation, _, index = name.partition(":")
    return operation if index in ("", "0") else f"{operation}_{index}"


def dtype_name(kind: Any) -> str:
    """Returns the dtype of a ``tf.DType`` as a ``TensorSpec`` has it.

    Raises ``InvalidModel`` if ONNX has no such dtype (resource, variant, complex, quantized).
    """
    name = str(_DTYPES.get(kind.name, kind.name))
    if name in ("resource", "variant") or name.startswith(("complex", "q")):
        raise InvalidModel(
            f"an input or output has the dtype {name}, which ONNX does not have; export a signature of plain tensors"
        )
    return name
