"""Finds the ranges of integer inputs without a declared range.

For example, a token id has to be less than the number of rows of the embedding, and an input that holds a sequence's
length may be at most the size of the sequence dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel.signature import Bound, Feeds, Signature, TensorSpec, as_tuples
from accel.spelling import option

if TYPE_CHECKING:
    import numpy as np

# The largest batch size in the runs of the model. A larger batch would take longer and use the same embedding tables.
_LARGEST_BATCH = 3
# The largest number of integers of a sample. A manifest holds the sample.
_LARGEST_SAMPLE = 1 << 14
# Stands for the number of rows where an integer selects no row of a table.
_NO_TABLE = torch.iinfo(torch.int64).max
_COPIES = ("_to_copy", "to", "clone", "contiguous", "reshape")
_LOOKUPS = ("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")


@dataclass(frozen=True)
class _Tables:
    """The number of rows of the smallest and of the largest table from which an input selects rows. ``whole`` tells
    whether every integer of the input selects a row. ``rows`` has the number of rows of the table of each integer, in
    the shape of the input."""

    smallest: int
    largest: int
    whole: bool
    rows: np.ndarray


class _Lookups(TorchDispatchMode):
    """Records the tables from which the inputs select rows. An input may be cast, copied or viewed before the
    selection, and each of its columns may have its own table."""

    def __init__(self, feeds: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self._rows: dict[str, list[int]] = {}
        self._least = {name: torch.full((array.size,), _NO_TABLE) for name, array in feeds.items()}
        self._shapes = {name: array.shape for name, array in feeds.items()}
        # Maps the address of a tensor to the name of its input, and to the place in the input of each of its integers.
        self._places = {array.ctypes.data: (name, torch.arange(array.size)) for name, array in feeds.items()}
        self._copies: list[torch.Tensor] = []  # keeps the copies alive, so that new tensors get other addresses

    @property
    def tables(self) -> dict[str, _Tables]:
        """Maps the names of the inputs that select rows to their tables."""
        return {
            name: _Tables(
                smallest=min(rows),
                largest=max(rows),
                whole=bool((self._least[name] < _NO_TABLE).all()),
                rows=self._least[name].reshape(self._shapes[name]).numpy(),
            )
            for name, rows in self._rows.items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket.__name__
        if operator in _COPIES and (found := self._find(args[0])):
            if result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr():
                return result  # a view
            name, places = found
            copied = torch.zeros(result.untyped_storage().nbytes() // result.element_size(), dtype=torch.int64)
            copied.as_strided(result.shape, result.stride(), result.storage_offset()).copy_(places.view(result.shape))
            self._places[result.untyped_storage().data_ptr()] = name, copied
            self._copies.append(result)
        elif operator in _LOOKUPS and (found := self._find(args[1])):
            name, places = found
            chosen = places.flatten()
            self._least[name][chosen] = self._least[name][chosen].clamp(max=len(args[0]))
            self._rows.setdefault(name, []).append(len(args[0]))
        return result

    def _find(self, tensor: object) -> tuple[str, torch.Tensor] | None:
        """Returns the name of the input that ``tensor`` comes from, and the place in the input of each integer."""
        if not isinstance(tensor, torch.Tensor):
            return None
        found = self._places.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return None
        return found[0], found[1].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def with_table_ranges(
    signature: Signature, run: Callable[[Feeds], object], watched: Callable[[Feeds], object] | None = None
) -> Signature:
    """Returns ``signature`` with a range for each integer input that selects rows of an embedding. The range is 0 to
    the index of the last row.

    Sets the input's ``values`` to this range. In recommenders, each column of an input may have its own table. Sets
    ``values`` to the range of the largest table then, ``columns`` to the largest integer of each column, and ``seen``
    to the range of the smallest table. If some column selects no row, only sets ``seen``, because the column may hold
    any integers. Keeps declared ``values``. Returns ``signature`` unchanged if ``run`` works with the old ranges but
    fails with the new ranges. ``run`` may return kept outputs. ``watched`` really runs the model, and is ``run`` by
    default.
    """
    free = {spec.name for spec in signature.inputs if _is_free(spec)}
    if not free:
        return signature
    case = signature.cases(_LARGEST_BATCH)[0]
    # The tables are recorded only as far as the model runs, and every table has a first row.
    feeds = _with_inputs(signature, map(_cautious, signature.inputs)).example_inputs(**case)
    with suppress(Exception), _Lookups({name: feeds[name] for name in free if feeds[name].size}) as lookups:
        (watched or run)(feeds)  # a model may raise any type of error
    tables = lookups.tables
    if not tables:
        return signature
    inputs = tuple(_ranged(spec, tables.get(spec.name)) for spec in signature.inputs)
    ranged = replace(signature, inputs=inputs)
    return ranged if _takes(ranged, case, run) or not _takes(signature, case, run) else signature


def smaller_tables(signature: Signature, run: Callable[[Feeds], object]) -> str:
    """Returns the advice for declared ``values`` beyond the rows of an embedding, or "" if no table is too small."""
    undeclared = (replace(spec, values=None, seen=None) if _is_integer(spec) else spec for spec in signature.inputs)
    found = with_table_ranges(replace(signature, inputs=tuple(undeclared)), run)
    sizes = signature.sizes()
    fitting, largest = [], []
    for spec, own in zip(signature.inputs, found.inputs, strict=True):
        declared, rows = spec.range_at(sizes), own.seen or own.values
        if declared is None or rows is None or declared[1] <= int(rows[1]):
            fitting.append(spec)
            continue
        fitting.append(replace(spec, values=(min(max(declared[0], 0), int(rows[1])), rows[1])))
        largest.append(f"{spec.name} takes at most {rows[1]}")
    if not largest:
        return ""
    return f"; {' and '.join(largest)}: declare {option('inputs', list(map(str, fitting)))}"


def _ranged(spec: TensorSpec, tables: _Tables | None) -> TensorSpec:
    if tables is None:
        return spec
    limit = spec.dtype_range or (0, _NO_TABLE)
    common = (0, min(tables.smallest - 1, limit[1]))
    if not tables.whole:
        return replace(spec, seen=common)
    if tables.smallest == tables.largest:
        return replace(spec, values=common, seen=None)
    largest = int(tables.rows.max())
    if largest == tables.smallest:  # every integer selects a row of the smallest table
        return replace(spec, values=common, seen=None)
    return replace(spec, values=(0, min(largest - 1, limit[1])), seen=common, columns=_columns(spec, tables.rows - 1))


def _columns(spec: TensorSpec, highs: np.ndarray) -> tuple[Any, ...] | None:
    """Returns the largest valid integer of each column (see ``TensorSpec.columns``). Returns None if a dynamic axis has
    different tables, because its size isn't known."""
    for axis, dim in enumerate(spec.shape):
        first = highs.take([0], axis)
        if (highs == first).all():
            highs = first
        elif isinstance(dim, str):
            return None
    while highs.ndim > 1 and len(highs) == 1:
        highs = highs[0]
    return as_tuples(highs.tolist()) if highs.size <= _LARGEST_SAMPLE else None


def columns_words(signature: Signature) -> str:
    """Returns a text about the inputs whose columns select rows of tables of different sizes, or "" if there are
    none."""
    return " and ".join(filter(None, map(_column_words, signature.inputs)))


def _column_words(spec: TensorSpec) -> str:
    if spec.values is None or spec.seen is None or not _is_integer(spec):
        return ""
    least, most = spec.seen[1], int(spec.values[1])
    said = f"{spec.name} selects rows of tables of {least + 1} to {most + 1} rows"
    if spec.columns is None:
        return f"{said}, so {spec.values[0]}..{most} is accepted and random inputs hold {spec.seen[0]}..{least}"
    return f"{said}, and each column takes the rows of its own table"


def find_bounds(signature: Signature, run: Callable[[Feeds], object], tensors: Mapping[str, torch.Tensor]) -> Signature:
    """Finds the integers that ``run`` accepts, if ``run`` doesn't accept random integers. Returns ``signature`` with
    these integers.

    Tries each dim, such as the sequence length, and each dim minus 1, as the largest value. If no dim helps, tries the
    integers of the user's example inputs ``tensors``, and at last 0 and 1 for dtypes of 8 bits. First changes one
    input at a time, and then all inputs together. Returns ``signature`` unchanged if ``run`` already accepts its
    integers, or if nothing helps. Only inputs without declared ``values`` are changed.
    """
    batch = signature.batch_dim
    dims = [dim for dim in signature.dims if dim != batch]
    free = [spec for spec in signature.inputs if _is_free(spec)]
    if not free or _runs(signature, run):
        return signature
    groups = _groups(free)
    bounded = (
        [replace(spec, values=_values(spec, f"{dim}{less}"), seen=None) for spec in group]
        for group, dim, less in product(groups, dims, ("", "-1"))
    )
    cautious = ([_cautious(spec) for spec in group] for group in groups)
    for changed in chain(bounded, _sampled(groups, tensors), cautious):
        tried = _with_inputs(signature, changed)
        if tried != signature and _runs(tried, run):
            return tried
    return signature


def _cautious(spec: TensorSpec) -> TensorSpec:
    """Returns ``spec`` with 0 and 1 as the integers of its random inputs, if they would hold all integers of its
    dtype."""
    return replace(spec, seen=(0, 1)) if _is_free(spec) and spec.draws_all else spec


def with_samples(
    signature: Signature, run: Callable[[Feeds], object], tensors: Mapping[str, torch.Tensor]
) -> Signature:
    """Returns ``signature`` with the integers of the user's example inputs ``tensors`` as samples, for the inputs that
    need them. Returns ``signature`` unchanged if ``run`` accepts random integers at the usual sizes, or if samples
    don't help."""
    free = [spec for spec in signature.inputs if _is_free(spec)]
    sizes = signature.sizes()
    if not tensors or not free or _takes(signature, sizes, run):
        return signature
    for changed in _sampled(_groups(free), tensors):
        tried = _with_inputs(signature, changed)
        if tried != signature and _takes(tried, sizes, run):
            return tried
    return signature


def _groups(free: list[TensorSpec]) -> list[list[TensorSpec]]:
    """Returns each input alone, and then all inputs together."""
    return [[spec] for spec in free] + ([free] if len(free) > 1 else [])


def _sampled(groups: Iterable[list[TensorSpec]], tensors: Mapping[str, torch.Tensor]) -> Iterator[list[TensorSpec]]:
    return ([_with_sample(spec, tensors.get(spec.name)) for spec in group] for group in groups)


def _with_inputs(signature: Signature, changed: Iterable[TensorSpec]) -> Signature:
    by_name = {spec.name: spec for spec in changed}
    return replace(signature, inputs=tuple(by_name.get(spec.name, spec) for spec in signature.inputs))


def bounds_words(before: Signature, after: Signature) -> str:
    """Returns a text about the bounds that ``find_bounds`` found, or "" if it found no bounds."""
    pairs = tuple(zip(before.inputs, after.inputs, strict=True))
    found = [new for old, new in pairs if old.values != new.values]
    if not found:
        names = " and ".join(new.name for old, new in pairs if old.draws_all and not new.draws_all and not new.sample)
        return f"the model fails on other integers of {names}, so random inputs hold only 0 and 1" if names else ""
    said = " and ".join(f"{spec.name} is in {spec.values[0]}..{spec.values[1]}" for spec in found if spec.values)
    return f"{said}: the model fails on larger integers at some sizes"


def _is_integer(spec: TensorSpec) -> bool:
    return spec.dtype.startswith(("int", "uint")) and not spec.optional and not spec.name.endswith("mask")


def _is_free(spec: TensorSpec) -> bool:
    return spec.values is None and spec.sample is None and _is_integer(spec)


def _values(spec: TensorSpec, high: Bound) -> tuple[Bound, Bound]:
    return (1 if spec.seen is not None and spec.seen[0] > 0 else 0), high


def _with_sample(spec: TensorSpec, tensor: torch.Tensor | None) -> TensorSpec:
    """Returns ``spec`` with the integers of ``tensor`` as its sample. Returns ``spec`` unchanged if it has no such
    tensor, or if the tensor is too large for a manifest."""
    if tensor is None or tensor.ndim != len(spec.shape) or not 0 < tensor.numel() <= _LARGEST_SAMPLE or not tensor.ndim:
        return spec
    return replace(spec, sample=as_tuples(tensor.tolist()))


def _runs(signature: Signature, run: Callable[[Feeds], object]) -> bool:
    """Tells whether ``run`` works at all tested sizes with the smallest, the largest and random integers."""
    return all(_takes(signature, case, run) for case in signature.cases(_LARGEST_BATCH))


def _takes(signature: Signature, case: Mapping[str, int], run: Callable[[Feeds], object]) -> bool:
    for feeds in _draws(signature, case):
        try:
            run(feeds)
        except Exception:  # a model may raise any type of error
            return False
    return True


def _draws(signature: Signature, case: Mapping[str, int]) -> Iterator[dict[str, np.ndarray]]:
    import numpy as np

    feeds = signature.example_inputs(**case)
    yield feeds
    free = [spec for spec in signature.inputs if _is_integer(spec) and spec.sample is None]
    for end in (0, 1):
        ends = {spec.name: spec.drawn_at(signature.sizes(**case))[end] for spec in free}
        yield {name: np.full_like(value, ends[name]) if name in ends else value for name, value in feeds.items()}
