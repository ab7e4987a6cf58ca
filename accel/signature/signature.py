"""Defines the signature of a model: its named inputs and outputs, and the range of each dynamic dim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from accel.errors import BadFeeds, BadInputSpec
from accel.spelling import option

from .bounds import free_dims, is_sum, size_at
from .dim_range import BATCH, DimRange, merged_ranges
from .other_sizes import other_sizes
from .spec import TensorSpec, as_tuples, dtype_name, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

_Number = TypeVar("_Number", int, float)

Feeds = Mapping[str, "np.ndarray"]

# Sizes are small if their product is at most this.
_SMALL = 256


def shapes_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the names and shapes of ``arrays`` for a message, such as ``x [2, 3], mask [2]``."""
    return ", ".join(f"{name} {list(value.shape)}" for name, value in arrays.items())


@dataclass(frozen=True)
class Signature:
    """The named inputs and outputs of a model, in order, and the range of each dynamic dim of the inputs.

    ``optional`` lists further inputs that a run may leave out, such as the matrices of an adapter. Their defaults are
    empty and change nothing. Example inputs, gates and measurements leave them out, and their dims have no ranges.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...] = ()
    dims: Mapping[str, DimRange] = field(default_factory=dict)
    optional: tuple[TensorSpec, ...] = ()

    def __post_init__(self) -> None:
        names = [spec.name for spec in (*self.inputs, *self.optional)]
        if len(set(names)) != len(names):
            raise BadInputSpec(f"two inputs have the same name: {', '.join(names)}; give each its own name")
        known = self.dynamic_dims
        for dim in self.dims:
            if dim not in known:
                has = ", ".join(known) or "none"
                raise BadInputSpec(f"no input has a dim called {dim!r}; the dynamic dims are: {has}")
        first = {spec.shape[0] for spec in self.inputs if spec.shape}
        for dim, bounds in self.dims.items():
            if not bounds.min and dim in first:
                raise BadInputSpec(
                    f"the dim {dim!r} is the first of an input and can't be empty, but has the range {bounds}; such a "
                    "range needs 1 <= min <= opt <= max"
                )
        for spec in self.inputs:
            if unknown := sorted(spec.bound_dims.difference(known)):
                has = ", ".join(known) or "none"
                raise BadInputSpec(
                    f"the range of input {spec} contains the name {unknown[0]!r}, which is not a dim of an input; the "
                    f"dims are: {has}"
                )
        object.__setattr__(self, "dims", {d: self.dims.get(d) or DimRange.default(d) for d in known})

    def __str__(self) -> str:
        return f"{self.describe_inputs()} -> {', '.join(map(str, self.outputs))}"

    @property
    def dynamic_dims(self) -> tuple[str, ...]:
        """Returns the names of the dynamic dims of the inputs, in order of appearance. Sums of dims are left out."""
        return tuple(dict.fromkeys(name for spec in self.inputs for dim in spec.shape for name in free_dims(dim)))

    @property
    def batch_dim(self) -> str | None:
        """Returns the dim called ``batch``. If no dim has this name, returns the dynamic dim on axis 0 of all inputs,
        or None."""
        if BATCH in self.dims:
            return BATCH
        first = {spec.shape[0] for spec in self.inputs if spec.shape}
        only = next(iter(first)) if len(first) == 1 else None
        return only if isinstance(only, str) and only in self.dims else None

    @property
    def fixed_batch(self) -> int | None:
        """Returns the size of axis 0 of the first input with a fixed axis 0, or None if axis 0 of all inputs is
        dynamic."""
        return next((s.shape[0] for s in self.inputs if s.shape and isinstance(s.shape[0], int)), None)

    @property
    def batch_unit(self) -> int:
        """Returns a number that divides every batch size: the fixed batch size, or else the batch dim's step, or else
        1."""
        batch = self.batch_dim
        return self.fixed_batch or (self.dims[batch].step if batch else 1)

    def input(self, name: str) -> TensorSpec:
        """Returns the input called ``name``. Raises ``StopIteration`` if no input has this name."""
        return next(spec for spec in self.inputs if spec.name == name)

    def with_dims(self, dims: Mapping[str, DimRange]) -> Signature:
        """Returns the signature after updating its ranges with ``dims`` (see ``DimRange.over``)."""
        return replace(self, dims=merged_ranges(self.dims, dims))

    def in_order(self, inputs: Iterable[str], outputs: Iterable[str]) -> Signature:
        """Returns the signature with the tensors that ``inputs`` and ``outputs`` list first, in this order."""

        def ordered(specs: Iterable[TensorSpec], names: Iterable[str]) -> tuple[TensorSpec, ...]:
            place = {name: number for number, name in enumerate(names)}
            return tuple(sorted(specs, key=lambda spec: place.get(spec.name, len(place))))

        return replace(self, inputs=ordered(self.inputs, inputs), outputs=ordered(self.outputs, outputs))

    def sizes(self, **given: int) -> dict[str, int]:
        """Returns a size for every dynamic dim: the given size, or else the most usual size of the dim's range."""
        self.known(given)
        return {d: given.get(d, r.opt) for d, r in self.dims.items()}

    def known(self, given: Mapping[str, int]) -> Mapping[str, int]:
        """Returns ``given``.

        Raises ``BadInputSpec`` for an unknown dim, a size below 1, or a size that isn't a multiple of the dim's step.
        """
        for dim, size in given.items():
            if dim not in self.dims:
                raise BadInputSpec(f"no input has a dim called {dim!r}; the dims are: {', '.join(self.dims) or 'none'}")
            if size < (least := min(1, self.dims[dim].min)):
                raise BadInputSpec(f"the dim {dim!r} can't have the size {size}; sizes start at {least}")
            if size % (sizes := self.dims[dim]).step:
                raise BadInputSpec(
                    f"the dim {dim!r} can't have the size {size}, because its sizes are multiples of {sizes.step}; use "
                    f"{sizes.beside(size)}"
                )
        return given

    def cases(self, largest_batch: int | None = None) -> list[dict[str, int]]:
        """Returns the combinations of dim sizes at which every gate runs. The batch dim has its smallest size, size 2,
        or its largest size. The other dims have their min, opt or max size. The largest other sizes are combined with
        the smallest batch, and the largest batch with the smallest other sizes, because a run at the largest sizes of
        all dims may take minutes. If the usual other sizes are small, the largest batch is combined with them.
        ``largest_batch`` is an upper limit for the batch, and is first rounded up to a multiple of the batch dim's
        step.
        """
        if not self.dims:
            return [{}]
        batch = self.batch_dim

        def case(batch_size: int | None, pick: str) -> dict[str, int]:
            return {d: (batch_size or r.opt) if d == batch else getattr(r, pick) for d, r in self.dims.items()}

        low, high = (self.dims[batch].min, self.dims[batch].max) if batch else (None, None)
        if batch and high and largest_batch:
            high = min(high, self.dims[batch].up(largest_batch))
        two = max(low, min(2, high)) if low and high else None
        largest = case(high, "opt")
        if math.prod(largest.values()) > _SMALL:
            largest = case(high, "min")
        found = [case(low, "opt"), case(two, "min"), case(two, "opt"), case(low, "max"), largest]
        return [c for i, c in enumerate(found) if c not in found[:i]]

    def inputs_at(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Returns random inputs at ``sizes``. Every case of ``cases`` has inputs of its own, so that gates and other
        checks run a model on the same inputs, and can share the outputs (see ``accel.kept_outputs``)."""
        cases = self.cases()
        return self.example_inputs(seed=cases.index(dict(sizes)) if sizes in cases else 0, **sizes)

    def repeated_inputs(self, number: int, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Returns random inputs for the run with the ``number`` 1, 2, 3... at ``sizes`` that follows the runs of
        ``cases``. No case has these inputs. In the first run, every mask holds ones, because models leave such a mask
        out, and may then compute something else than with a mask."""
        import numpy as np

        feeds = self.example_inputs(seed=len(self.cases()) - 1 + number, **sizes)
        masks = [spec.name for spec in self.inputs if _is_mask(spec) and spec.name in feeds] if number == 1 else []
        return {**feeds, **{name: np.ones_like(feeds[name]) for name in masks}}

    def example_inputs(self, *, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
        """Returns random inputs that the model accepts. Equal seeds give equal inputs. ``sizes`` sets the sizes of
        dynamic dims.

        Floats are uniform in the input's range ``values``, or else normally distributed. Integers are drawn from
        ``seen`` inside ``values``, or else from the whole range of a dtype of 8 bits, or else from 0 and 1 (see
        ``TensorSpec.drawn_at``). The largest integer of a column is that in ``columns``, if the input has ``columns``.
        An input with a ``sample`` repeats this sample. An input whose name ends in ``mask`` holds ones followed by
        zeros, with a random count of ones in each row. Optional inputs are left out.

        Raises ``BadInputSpec`` if an input has no valid number at ``sizes``.
        """
        import numpy as np

        rng = np.random.default_rng(seed)
        resolved = self.sizes(**sizes)
        feeds: dict[str, np.ndarray] = {}
        for spec in self.inputs:
            if spec.optional:
                continue
            shape = spec.resolve(resolved)
            kind = numpy_dtype(spec.dtype)
            if spec.dtype == "string":
                feeds[spec.name] = np.full(shape, "accel", dtype=object)
            elif _is_mask(spec):
                lengths = rng.integers((shape[-1] + 1) // 2, shape[-1] + 1, size=(*shape[:-1], 1))
                feeds[spec.name] = (np.arange(shape[-1]) < lengths).astype(kind)
            elif spec.sample is not None:
                feeds[spec.name] = spec.repeated(shape, seed)
            elif spec.dtype.startswith(("int", "uint")):
                low, high = _not_empty(spec, spec.drawn_at(resolved), resolved)
                highs = high if spec.columns is None else np.array(spec.columns)
                feeds[spec.name] = rng.integers(low, highs, size=shape, endpoint=True).astype(kind)
            elif spec.dtype == "bool":
                feeds[spec.name] = rng.integers(0, 2, size=shape).astype(bool)
            elif spec.values is not None:
                least, most = _not_empty(spec, spec.span_at(resolved) or (0.0, 1.0), resolved)
                feeds[spec.name] = rng.uniform(least, most, shape).astype(kind)
            else:
                feeds[spec.name] = rng.standard_normal(shape).astype(kind)
        return feeds

    @property
    def unknown_integers(self) -> tuple[TensorSpec, ...]:
        """Returns the integer inputs with an unknown range of valid integers, for which ``example_inputs`` draws 0 or
        1."""
        return tuple(
            spec
            for spec in self.inputs
            if spec.dtype.startswith(("int", "uint")) and spec.values is None and spec.seen is None
            if not spec.draws_all
            if not spec.optional and not (spec.name.endswith("mask") and spec.shape)
        )

    def widened(self, feeds: Feeds) -> Feeds:
        """Returns the feeds with arrays of a narrower dtype converted to the input's dtype, such as int32 ids for an
        int64 input. PyTorch takes such tensors too. Only integers (and bools) become integers, and floats floats, so
        no number changes."""
        wider: dict[str, Any] = {}
        for spec in self.inputs:
            value = feeds.get(spec.name)
            if value is not None and _is_narrower(value, spec):
                wider[spec.name] = value.astype(numpy_dtype(spec.dtype))
        return {**feeds, **wider} if wider else feeds

    def check_feeds(self, feeds: Feeds) -> dict[str, int]:
        """Returns the size of each dynamic dim in ``feeds``. Raises ``BadFeeds`` if the feeds don't match the model's
        inputs."""
        want = {spec.name for spec in self.inputs}
        missing = want - set(feeds)
        self._check_optional(feeds)
        if missing and (missing := missing - {spec.name for spec in self.inputs if spec.optional}):
            raise BadFeeds(f"missing input {sorted(missing)[0]!r}; the inputs are: {self.describe_inputs()}")
        if extra := set(feeds) - want - {spec.name for spec in self.optional}:
            raise BadFeeds(f"unknown input {sorted(extra)[0]!r}; the inputs are: {self.describe_inputs()}")
        sizes: dict[str, int] = {}
        for spec in self.inputs:
            if spec.optional and spec.name not in feeds:
                continue
            value = feeds[spec.name]
            _check_kind(spec, value)
            for dim, size in zip(spec.shape, value.shape, strict=True):
                if isinstance(dim, int) and dim != size:
                    raise BadFeeds(
                        f"input {spec.name!r} has shape {list(value.shape)}, but the model takes {spec}; "
                        f"{other_sizes(spec, value.shape, self.inputs, self.dims)}"
                    )
                if isinstance(dim, str) and not is_sum(dim) and sizes.setdefault(dim, size) != size:
                    raise BadFeeds(
                        f"the dim {dim!r} has size {sizes[dim]} in one input, but size {size} in input {spec.name!r}"
                    )
        for spec, axis, dim in self._sums:
            known = all(name in sizes for name in free_dims(dim))
            if spec.name in feeds and known and (size := feeds[spec.name].shape[axis]) != size_at(dim, sizes):
                raise BadFeeds(
                    f"the dim {dim!r} of input {spec.name!r} has size {size}, but has to be {size_at(dim, sizes)}"
                )
        for dim, stepped in self._stepped.items():
            if (size := sizes.get(dim, 0)) % stepped.step:
                raise BadFeeds(
                    f"the dim {dim!r} has size {size}, but the model takes multiples of {stepped.step}; pad or cut it "
                    f"to {stepped.beside(size)}"
                )
        return sizes

    def _check_optional(self, feeds: Feeds) -> None:
        """Raises ``BadFeeds`` if an optional input in ``feeds`` doesn't fit its spec, or if two of them disagree about
        the size of a dim, such as the rank of an adapter."""
        sizes: dict[str, int] = {}
        for spec in self.optional:
            if spec.name not in feeds:
                continue
            value = feeds[spec.name]
            _check_kind(spec, value)
            for dim, size in zip(spec.shape, value.shape, strict=True):
                if (dim if isinstance(dim, int) else sizes.setdefault(dim, size)) != size:
                    raise BadFeeds(f"input {spec.name!r} has shape {list(value.shape)}, but the model takes {spec}")

    def row_of(self, feeds: Feeds, row: int) -> dict[str, np.ndarray]:
        """Returns the feeds of one row of the batch. Optional inputs, which have no rows, stay whole."""
        whole = {spec.name for spec in self.optional}
        return {name: value if name in whole else value[row : row + 1] for name, value in feeds.items()}

    def beyond(self, feeds: Feeds) -> str:
        """Returns a phrase such as "sequence is 600, beyond its range 1..512" if a dim of ``feeds`` is larger than its
        range allows. Otherwise returns "".

        ``check_feeds`` also accepts feeds beyond the range, because a range only tells which sizes were verified.
        """
        found = ((dim, size) for dim, size in self.check_feeds(feeds).items() if size > self.dims[dim].max)
        return next(
            (f"{dim} is {size}, beyond its range {self.dims[dim].min}..{self.dims[dim].max}" for dim, size in found), ""
        )

    @cached_property
    def _stepped(self) -> Mapping[str, DimRange]:
        """Returns the dims whose step isn't 1. The result is cached, because a server needs it at every request."""
        return {dim: found for dim, found in self.dims.items() if found.step != 1}

    @cached_property
    def _sums(self) -> tuple[tuple[TensorSpec, int, str], ...]:
        """Returns the input, the axis and the dim for each dim of an input that is a sum of other dims."""
        return tuple(
            (spec, axis, dim)
            for spec in self.inputs
            for axis, dim in enumerate(spec.shape)
            if isinstance(dim, str) and is_sum(dim)
        )

    def describe_inputs(self) -> str:
        """Returns the inputs for a message, each in the notation of ``TensorSpec.parse``."""
        return ", ".join(map(str, self.inputs))

    def to_json(self) -> dict[str, Any]:
        def spec_json(spec: TensorSpec) -> dict[str, Any]:
            body: dict[str, Any] = {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
            body |= {"values": list(spec.values)} if spec.values else {}
            body |= {"seen": list(spec.seen)} if spec.seen else {}
            body |= {"sample": spec.sample} if spec.sample is not None else {}
            body |= {"columns": spec.columns} if spec.columns is not None else {}
            return body | ({"optional": True} if spec.optional else {})

        return {
            "inputs": [spec_json(spec) for spec in self.inputs],
            "outputs": [spec_json(spec) for spec in self.outputs],
            "dims": {name: r.to_json() for name, r in self.dims.items()},
            **({"optional": [spec_json(spec) for spec in self.optional]} if self.optional else {}),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Signature:
        def specs(rows: Iterable[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
            return tuple(
                TensorSpec(
                    r["name"],
                    r["dtype"],
                    tuple(r["shape"]),
                    tuple(r["values"]) if r.get("values") else None,
                    bool(r.get("optional")),
                    tuple(r["seen"]) if r.get("seen") else None,
                    as_tuples(r["sample"]) if r.get("sample") else None,
                    as_tuples(r["columns"]) if r.get("columns") else None,
                )
                for r in rows
            )

        dims = {name: DimRange(*r) for name, r in body["dims"].items()}
        return cls(specs(body["inputs"]), specs(body["outputs"]), dims, specs(body.get("optional", ())))


def _is_mask(spec: TensorSpec) -> bool:
    """Tells whether an input is a mask of ones and zeros, by its name."""
    return bool(spec.name.endswith("mask") and spec.dtype not in ("float32", "float16", "bfloat16") and spec.shape)


def _is_narrower(value: Any, spec: TensorSpec) -> bool:
    """Tells whether ``value`` is an array of a narrower dtype than that of ``spec``, and of the same kind."""
    import numpy as np

    if not isinstance(value, np.ndarray | np.generic) or dtype_name(value.dtype) == spec.dtype:
        return False
    if spec.dtype == "string" or value.dtype.kind in "OUS":
        return False
    wanted = numpy_dtype(spec.dtype)
    whole = [kind in "iub" for kind in (value.dtype.kind, wanted.kind)]
    return whole[0] == whole[1] and np.can_cast(value.dtype, wanted, "safe")


def _wrong_type(spec: TensorSpec, value: Any) -> BadFeeds:
    """Returns the error for a feed of another dtype, or for a tensor of a framework instead of a NumPy array."""
    import numpy as np

    if not isinstance(value, np.ndarray | np.generic) and hasattr(value, "numpy"):
        # A tensor of PyTorch with a gradient, or on a GPU, has to be copied.
        copied = getattr(value, "requires_grad", False) or getattr(value, "is_cuda", False)
        return BadFeeds(
            f"input {spec.name!r} is a tensor of {type(value).__module__.partition('.')[0]}, but run takes NumPy "
            f"arrays; give {spec.name}.numpy({'force=True' if copied else ''}), or call the session itself with the "
            "tensor"
        )
    cast = f"cast the input to {spec.dtype}"
    if spec.dtype == "float32":
        cast += f" with {spec.name}.float(), or with {spec.name}.astype('float32') for a NumPy array,"
    return BadFeeds(
        f"input {spec.name!r} has dtype {value.dtype}, but the model takes {spec.dtype}; {cast} if that loses no number"
    )


def _check_kind(spec: TensorSpec, value: Any) -> None:
    """Raises ``BadFeeds`` if ``value`` is no array with the dtype and the number of dims of ``spec``."""
    if not hasattr(value, "dtype"):
        raise BadFeeds(f"input {spec.name!r} has the type {type(value).__name__}; give a numpy array of {spec.dtype}")
    if dtype_name(value.dtype) != spec.dtype and not (spec.dtype == "string" and value.dtype.kind in "OUS"):
        raise _wrong_type(spec, value)
    if len(value.shape) != len(spec.shape):
        raise BadFeeds(f"input {spec.name!r} has shape {list(value.shape)}, but the model takes {spec}")


def _not_empty(spec: TensorSpec, found: tuple[_Number, _Number], sizes: Mapping[str, int]) -> tuple[_Number, _Number]:
    """Returns the range ``found``. Raises ``BadInputSpec`` if it holds no number at ``sizes``."""
    if found[0] > found[1]:
        at = ", ".join(f"{dim} {sizes[dim]}" for dim in sorted(spec.bound_dims))
        raise BadInputSpec(
            f"input {spec} has an empty range at the size {at}; allow only larger sizes with {option('dims')}"
        )
    return found
