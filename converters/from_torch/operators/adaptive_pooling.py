"""Translates adaptive pooling to ONNX, for images of any size.

The output of size O of a dim of size L pools, at place i, the values from floor(i L / O) to ceil((i + 1) L / O). The
source is ``start_index`` and ``end_index`` in ATen's native/AdaptivePooling.h. An average over a rectangle is the
average of the averages of its rows, so each dim is a product with a matrix of its own. torch's own decomposition builds
the windows of the example into the graph. The maxima are taken from a slice for each place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from .opset import ints, operators


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    aten = torch.ops.aten
    return {
        aten.adaptive_avg_pool1d.default: _averages,
        aten.adaptive_avg_pool2d.default: _averages,
        aten.adaptive_avg_pool3d.default: _averages,
        aten._adaptive_avg_pool2d.default: _averages,
        aten._adaptive_avg_pool3d.default: _averages,
        aten.adaptive_max_pool1d.default: _maxima,
        aten.adaptive_max_pool2d.default: _maxima,
        aten.adaptive_max_pool3d.default: _maxima,
    }


def _averages(x: Any, output_size: Sequence[Any]) -> Any:
    """Averages the last dims of ``x`` to ``output_size``, which holds numbers, and values of the graph for dynamic
    sizes."""
    op, rank = operators(), len(x.shape)
    wanted = {rank - len(output_size) + place: size for place, size in enumerate(output_size)}
    sizes = {axis: x.shape[axis] for axis in wanted}
    left = {axis: size for axis, size in wanted.items() if not _is_size_of(size, x, axis)}
    whole = [axis for axis, size in left.items() if isinstance(size, int) and size == 1]
    if whole:
        x = op.ReduceMean(x, ints(*(axis - rank for axis in whole)), keepdims=1)
    even = [axis for axis in left if axis not in whole and _divides(left[axis], sizes[axis])]
    if even and rank == 2 + len(wanted):
        windows = [sizes[axis] // wanted[axis] if axis in even else 1 for axis in wanted]
        x = op.AveragePool(x, kernel_shape=windows, strides=windows)
    else:
        even = []
    for axis in left:
        if axis not in (*whole, *even):
            x = _averaged_along(x, axis, rank, left[axis])
    return op.Identity(x) if not left else x


def _averaged_along(x: Any, axis: int, rank: int, wanted: Any) -> Any:
    """Averages one dim of ``x`` to the size ``wanted`` by a product with a matrix."""
    op = operators()

    def integer(value: int) -> Any:
        return op.Constant(value_int=value)

    one, size = integer(1), op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
    count = integer(wanted) if isinstance(wanted, int) else op.Squeeze(wanted)
    places = op.Range(integer(0), count, one)
    first = op.Div(op.Mul(places, size), count)
    end = op.Div(op.Add(op.Mul(op.Add(places, one), size), op.Sub(count, one)), count)
    first, end = op.Unsqueeze(first, ints(0)), op.Unsqueeze(end, ints(0))
    column = op.Unsqueeze(op.Range(integer(0), size, one), ints(1))
    inside = op.And(op.GreaterOrEqual(column, first), op.Less(column, end))
    # The matrix has a row for each value of ``x`` and a column for each average.
    matrix = op.Div(op.CastLike(inside, x), op.CastLike(op.Sub(end, first), x))
    if axis == rank - 1:
        return op.MatMul(x, matrix)
    if axis == rank - 2:
        return op.MatMul(op.Transpose(matrix, perm=[1, 0]), x)
    swapped = [*range(rank)]
    swapped[axis], swapped[-1] = swapped[-1], swapped[axis]
    return op.Transpose(op.MatMul(op.Transpose(x, perm=swapped), matrix), perm=swapped)


def _maxima(x: Any, output_size: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the maxima of the windows of the last dims of ``x``, and the place of each in these dims flattened.

    Raises NotImplementedError if a size isn't a number.
    """
    op = operators()
    if not all(isinstance(size, int) for size in output_size):
        raise NotImplementedError(f"adaptive max pooling to the sizes {output_size} of the graph")
    axes = list(range(len(x.shape) - len(output_size), len(x.shape)))
    sizes, leading = op.Shape(x, start=axes[0]), op.Shape(x, start=0, end=axes[0])
    wanted, flat = ints(*output_size), op.Concat(leading, ints(-1), axis=0)
    maxima, places = [], []
    for window in product(*map(range, output_size)):
        first = op.Div(op.Mul(ints(*window), sizes), wanted)
        after = op.Mul(ints(*(place + 1 for place in window)), sizes)
        end = op.Div(op.Add(after, ints(*(size - 1 for size in output_size))), wanted)
        values = op.Reshape(op.Slice(x, first, end, ints(*axes)), flat)
        maxima.append(op.ReduceMax(values, ints(-1), keepdims=1))
        place = op.ArgMax(values, axis=-1, keepdims=1)
        places.append(_place_outside(place, first, op.Sub(end, first), sizes, len(axes)))
    shape = op.Concat(leading, wanted, axis=0)
    return op.Reshape(op.Concat(*maxima, axis=-1), shape), op.Reshape(op.Concat(*places, axis=-1), shape)


def _place_outside(place: Any, first: Any, window: Any, sizes: Any, rank: int) -> Any:
    """Returns the flat place in ``rank`` dims of ``sizes`` of the flat ``place`` in a window that begins at
    ``first``."""
    op = operators()
    found, step = ints(0), ints(1)
    for axis in reversed(range(rank)):
        at = ints(axis)
        length = op.Gather(window, at)
        found = op.Add(found, op.Mul(op.Add(op.Mod(place, length), op.Gather(first, at)), step))
        place, step = op.Div(place, length), op.Mul(step, op.Gather(sizes, at))
    return found


def _divides(wanted: Any, size: Any) -> bool:
    return isinstance(wanted, int) and isinstance(size, int) and size % wanted == 0


def _is_size_of(wanted: Any, x: Any, axis: int) -> bool:
    """Tells whether ``wanted`` is the size of ``x`` along ``axis``, so that there is nothing to average."""
    if isinstance(wanted, int):
        return bool(x.shape[axis] == wanted)
    node = wanted.producer()
    while node is not None and node.op_type in ("Squeeze", "Reshape", "Cast", "Identity"):
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Shape" or node.inputs[0] is not x:
        return False
    start = node.attributes.get("start")
    return start is not None and start.as_int() % len(x.shape) == axis
