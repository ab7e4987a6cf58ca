"""Joins all translations of operators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import (
    adaptive_pooling,
    exact_integers,
    integers,
    linear_systems,
    losses,
    missing,
    order,
    overlaps,
    python_functions,
    special,
    stable,
    vision,
)

_TABLES = (
    stable,
    missing,
    order,
    special,
    integers,
    exact_integers,
    python_functions,
    adaptive_pooling,
    linear_systems,
    vision,
    overlaps,
    losses,
)


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``.

    A model can hold accel's own operators only after ``accel.kernels.torch.operators`` was imported, because the import
    registers the operators.
    """
    table: dict[Callable[..., Any], Callable[..., Any]] = {}
    for part in _TABLES:
        table |= part.translation_table()
    if "accel.kernels.torch.operators" in sys.modules:
        from accel.kernels.onnx import export as onnx_export

        table |= onnx_export.translation_table()
    return table
