"""Describes a named tensor of a model: its dtype, its shape and the integers that it may hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from accel.errors import BadInputSpec
from accel.spelling import option

from .bounds import Bound, bound_at, dims_of, free_dims, is_sum, parse_bound, size_at, substituted

if TYPE_CHECKING:
    import numpy as np

Dim = int | str

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "string",
)  # fmt: skip

# Random inputs hold any number of these dtypes by default, because their numbers are mostly pixels or samples. The
# integers of a wider dtype are mostly ids, which few models take from the whole range.
_SMALL = ("int8", "uint8")

_SPEC = re.compile(
    r"^(?P<name>[^:\[\]{}]+):(?P<dtype>\w+)(?:\[(?P<shape>[^\]]*)\])?(?:\{(?P<lo>[^{}]+?)\.\.(?P<hi>[^{}]+)\})?$"
)

# Spaces count only between two words.
_BESIDE_SIGNS = re.compile(r" *([:,+.\-\[\]{}]) *")

# Caches the name of each dtype, because numpy computes the name again on every call. Without the cache, a server's
# input checks would spend most of their time on computing dtype names.
dtype_name = lru_cache(maxsize=64)(str)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Returns the numpy dtype for a name from ``DTYPES``. The dtypes bfloat16 and float8 come from ml_dtypes."""
    import ml_dtypes
    import numpy as np

    if dtype == "string":
        return np.dtype(object)
    if hasattr(ml_dtypes, dtype):
        return np.dtype(getattr(ml_dtypes, dtype))  # type: ignore[no-any-return]
    return np.dtype(dtype)


@dataclass(frozen=True)
class TensorSpec:
    """A named tensor. ``dtype`` is a name from ``DTYPES``. In ``shape``, a dynamic dim is a string (``"batch"``). The
    string may be a sum of other dims (``"past+sequence"``).

    ``values`` is the range of valid integers, such as token ids, or the range of the floats that example inputs hold. A
    bound of ``values`` may be a sum of dims, as in ``(1, "length")`` for the lengths of sequences. ``seen`` is the
    range of the integers in the user's example, or the integers that every column of an input takes. Integers outside
    ``seen`` may be valid too. Example inputs are drawn from ``seen``, or else from ``values``. ``optional`` is True if
    the model has a default for this input. ``sample`` holds the integers of the user's example as nested tuples, if the
    model doesn't accept random integers. An example are boxes, whose second corner may not be left of the first corner.
    Example inputs then repeat ``sample``. ``columns`` holds the largest valid integer of each column, if the columns of
    an input select rows of tables of different sizes. It is nested tuples that NumPy broadcasts to the input's shape.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    values: tuple[Bound, Bound] | None = None
    optional: bool = False
    seen: tuple[int, int] | None = None
    sample: tuple[Any, ...] | None = None
    columns: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.values is not None:
            low, high = (parse_bound(bound, fractions=self.is_float) for bound in self.values)
            object.__setattr__(self, "values", (low, high))
            if not isinstance(low, str) and not isinstance(high, str) and low > high:
                raise BadInputSpec(f"input {self.name!r} has an empty range of values {low}..{high}; give low..high")
        if self.dtype not in DTYPES:
            parts = "give its real and imaginary parts instead, as torch.view_as_real does"
            fix = parts if self.dtype.startswith("complex") else f"use one of {', '.join(DTYPES)}"
            raise BadInputSpec(f"tensor {self.name!r} has the unknown dtype {self.dtype!r}; {fix}")
        for dim in self.shape:
            if isinstance(dim, int) and dim < 0:
                raise BadInputSpec(
                    f"input {self.name!r} has the negative dim {dim}; write a name such as batch instead"
                )

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Parses a text such as ``x:float32[batch,3,32,32]``, or ``ids:int64[batch,sequence]{0..30521}`` with a range
        of numbers. A bound may be a sum of dims, as in ``lengths:int64[batch]{1..sequence}``. The range of floats may
        have fractions, as in ``scale:float32[]{0.5..2}``.

        Raises ``BadInputSpec`` if the text can't be read.
        """
        match = _SPEC.match(_BESIDE_SIGNS.sub(r"\1", text.strip()))
        if match is None:
            raise BadInputSpec(f"can't read input {text!r}; write name:dtype[dim,...], e.g. x:float32[batch,3,32,32]")
        shape: list[Dim] = []
        for part in (match["shape"] or "").split(","):
            if not part:
                if match["shape"]:
                    raise BadInputSpec(f"input {text!r} has an empty dim; write a number or a name between the commas")
                continue
            if not (part.lstrip("-").isdigit() or part.isidentifier() or is_sum(part)):
                name, _, limits = part.partition(":")
                like = f"{name}, and its range apart, as {option('dims', {name: limits})}" if limits else "batch"
                like += ", with commas between the dims" if " " in part else ""
                raise BadInputSpec(f"input {text!r} has the invalid dim {part!r}; write a number or a name like {like}")
            shape.append(int(part) if part.lstrip("-").isdigit() else part)
        values = (match["lo"], match["hi"]) if match["lo"] is not None else None
        return cls(match["name"], match["dtype"], tuple(shape), values).checked()

    def checked(self) -> TensorSpec:
        """Returns the spec. Raises ``BadInputSpec`` if the dtype can't hold a bound of ``values``."""
        limits = self.dtype_range
        if self.values is None or limits is None:
            return self
        low, high = (
            min(max(int(bound), limits[0]), limits[1]) if not isinstance(bound, str) else bound for bound in self.values
        )
        if (low, high) != self.values:
            fits = option("inputs", [replace(self, values=(low, high))])
            raise BadInputSpec(
                f"the range of {self} is beyond {self.dtype}, which holds {limits[0]}..{limits[1]}; declare {fits}, or "
                "a wider dtype"
            )
        return self

    @property
    def dtype_range(self) -> tuple[int, int] | None:
        """Returns the smallest and the largest integer of the dtype, or None if the dtype doesn't hold integers."""
        if not self.dtype.startswith(("int", "uint")):
            return None
        import numpy as np

        limits = np.iinfo(self.dtype)
        return int(limits.min), int(limits.max)

    def __str__(self) -> str:
        values = f"{{{self.values[0]}..{self.values[1]}}}" if self.values else ""
        return f"{self.name}:{self.dtype}[{','.join(map(str, self.shape))}]{values}"

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape after replacing each dynamic dim by its size in ``sizes``. Raises ``BadInputSpec`` if a
        size is missing."""
        missing = [name for dim in self.shape for name in free_dims(dim) if name not in sizes]
        if missing:
            raise BadInputSpec(f"no size given for the dim {missing[0]!r} of {self.name!r}")
        return tuple(size_at(dim, sizes) for dim in self.shape)

    def range_at(self, sizes: Mapping[str, int]) -> tuple[int, int] | None:
        """Returns the smallest and the largest valid integer for the dims' ``sizes``. Returns None if the input holds
        no integers, if it has no ``values``, or if a bound names a dim that ``sizes`` lacks."""
        found = None if self.is_float else self.span_at(sizes)
        return None if found is None else (int(found[0]), int(found[1]))

    def span_at(self, sizes: Mapping[str, int]) -> tuple[float, float] | None:
        """Returns the smallest and the largest number of an example input for the dims' ``sizes``, or None if the input
        has no ``values``, or if a bound names a dim that ``sizes`` lacks."""
        if self.values is None or not self.bound_dims <= sizes.keys():
            return None
        low, high = self.values
        return bound_at(low, sizes), bound_at(high, sizes)

    def drawn_at(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Returns the smallest and the largest integer of an example input for the dims' ``sizes``: ``seen`` inside
        ``values``, or else all integers of a dtype of 8 bits, or else 0 and 1."""
        valid = self.range_at(sizes)
        if valid is None or self.seen is None:
            known = valid or self.seen
            return known or (self.dtype_range if self.draws_all else None) or (0, 1)
        low, high = max(valid[0], self.seen[0]), min(valid[1], self.seen[1])
        return (low, high) if low <= high else valid

    @property
    def draws_all(self) -> bool:
        """Tells whether random inputs hold all integers of the dtype, because it has 8 bits and no range is known."""
        return self.dtype in _SMALL and self.values is None and self.seen is None

    @property
    def is_float(self) -> bool:
        """Tells whether the tensor holds floats."""
        return self.dtype.startswith(("float", "bfloat"))

    def repeated(self, shape: Sequence[int], start: int = 0) -> np.ndarray:
        """Returns ``sample``, repeated or cut to ``shape``. Begins with the row ``start``. Along an axis on which the
        integers are sorted, such as the offsets of bags, repeats only the last integer, and begins with the first.
        """
        import numpy as np

        value = np.array(self.sample, numpy_dtype(self.dtype))
        for axis, size in enumerate(shape):
            have, at = value.shape[axis], np.arange(size)
            steps = np.diff(value, axis=axis)
            if (steps >= 0).all() and (steps > 0).any():
                value = np.take(value, np.minimum(at, have - 1), axis=axis)
            else:
                value = np.take(value, (at + (0 if axis else start)) % have, axis=axis)
        return value

    @property
    def bound_dims(self) -> frozenset[str]:
        """Returns the names of the dims in the bounds of ``values``."""
        return frozenset[str]().union(*map(dims_of, self.values or ()))

    def with_dims(self, dims: Mapping[str, Dim]) -> TensorSpec:
        """Returns the spec after replacing each dynamic dim by its size or new name in ``dims``."""
        low_high = tuple(substituted(bound, dims) for bound in self.values or ())
        shape = tuple(
            substituted(dim, dims) if is_sum(dim) else dims.get(dim, dim) if isinstance(dim, str) else dim
            for dim in self.shape
        )
        return replace(self, shape=shape, values=low_high or None)  # type: ignore[arg-type]


def as_tuples(nested: Any) -> Any:
    """Returns nested lists as nested tuples, and any other object unchanged."""
    return tuple(map(as_tuples, nested)) if isinstance(nested, list | tuple) else nested


def new_names(old: Iterable[TensorSpec], new: Iterable[TensorSpec]) -> dict[str, Dim]:
    """Maps each dynamic dim of ``old`` to its size or name in ``new``. Tensors of ``old`` and ``new`` are matched by
    name."""
    shapes = {spec.name: spec.shape for spec in new}
    pairs = [pair for spec in old for pair in zip(spec.shape, shapes.get(spec.name, ()), strict=False)]
    return {one: other for one, other in pairs if isinstance(one, str) and not is_sum(one)}


def with_values_of(specs: Iterable[TensorSpec], known: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Returns ``specs`` with ``values``, ``seen`` and ``sample`` of the inputs of the same name in ``known``."""
    specs = tuple(specs)
    names = new_names(known, specs)
    takes = {spec.name: spec.with_dims(names) for spec in known}
    own = [takes.get(spec.name, TensorSpec(spec.name, spec.dtype, ())) for spec in specs]
    return tuple(
        replace(spec, values=one.values, seen=one.seen, sample=one.sample, columns=one.columns)
        for spec, one in zip(specs, own, strict=True)
    )
