"""Splits a dynamic dim by slices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any


def parts_by_slices(node: Any) -> Callable[..., Any] | None:
    """Returns a function that splits a tensor like ``node`` by slices, or None if ``node`` doesn't split a dynamic dim.

    ``node`` is a call in a graph of ``torch.export``, whose number of parts is known. The exporter would translate it
    to a sequence, at whose dynamic sizes onnxscript's optimizer fails.
    """
    import torch

    aten = torch.ops.aten
    by_count = node.target in (aten.chunk.default, aten.unsafe_chunk.default)
    by_size = node.target in (aten.split.Tensor, aten.unsafe_split.Tensor)
    if node.kwargs or not (by_count or by_size):
        return None
    parts = len(node.meta["val"])
    x = node.args[0].meta["val"]
    axis = (node.args[2] if len(node.args) > 2 else 0) % x.ndim
    if isinstance(x.shape[axis], int):
        return None

    def split(x: Any, size: Any, dim: int = 0) -> list[Any]:
        """Splits ``x`` into parts of ``size``, or into ``size`` parts if the number of parts is given."""
        if by_count:
            size = (x.shape[dim] + size - 1) // size
        ends = [*(size * part for part in range(parts)), x.shape[dim]]
        return [x.narrow(dim, begin, end - begin) for begin, end in itertools.pairwise(ends)]

    return split
