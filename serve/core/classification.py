"""Implements the classification extension, which replaces an output by its k largest values with their indices and
labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..protocol.tensors import invalid


def classify(value: np.ndarray, count: int, labels: Sequence[str], batched: bool) -> np.ndarray:
    """Returns the ``count`` largest values, largest first, as ``bytes`` such as ``"value:index"`` or
    ``"value:index:label"``.

    ``value`` has the shape ``[batch, ...]`` if ``batched`` is True. All dims after the batch are flattened into one
    list of classes. The result has the shape ``[batch, count]`` or ``[count]``. If the tensor has fewer than ``count``
    classes, the result has all classes. Raises ``ServeError`` INVALID_ARGUMENT if ``value`` does not hold numbers.
    """
    if value.dtype.kind not in "iufb" and value.dtype.name != "bfloat16":
        raise invalid(f"class result not available for output due to unsupported type '{value.dtype}'")
    rows = value.reshape(value.shape[0] if batched else 1, -1)
    count = min(count, rows.shape[1])
    wide = rows.astype(np.float64) if rows.dtype.kind not in "iub" else rows.astype(np.int64)
    # A stable sort puts the lower index first if two values are equal.
    order = np.argsort(-wide, axis=1, kind="stable")[:, :count]
    made: np.ndarray = np.empty((len(rows), count), dtype=object)
    form = "%d:%d" if wide.dtype.kind == "i" else "%f:%d"
    for row, indices in enumerate(order):
        for place, index in enumerate(indices):
            text = form % (wide[row, index], index)
            if index < len(labels):
                text += f":{labels[index]}"
            made[row, place] = text.encode()
    return made if batched else made[0]
