"""Reads and checks optimization profiles, which are the shapes that an engine is built for.

Profiles are checked here, because TensorRT silently builds engines with contradictory profiles.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accel.errors import BadInputSpec
from accel.signature import DimRange, Signature
from accel.spelling import is_command_line, option

_SHAPE = re.compile(r"^\d+(x\d+)*$")
_FORM = "write NAME=MIN,OPT,MAX, e.g. input_ids=1x8,8x128,64x512"


@dataclass(frozen=True, kw_only=True)
class InputShapes:
    """Holds the smallest, the most common and the largest shape of an input."""

    name: str
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.min) == len(self.opt) == len(self.max):
            raise BadInputSpec(f"profile {self} has shapes of different ranks; give min, opt and max the same rank")
        for axis, (low, opt, high) in enumerate(zip(self.min, self.opt, self.max, strict=True)):
            if not 1 <= low <= opt <= high:
                raise BadInputSpec(
                    f"profile {self} has the sizes {low}, {opt}, {high} at dim {axis}; "
                    "a profile needs 1 <= min <= opt <= max"
                )

    def __str__(self) -> str:
        return f"{self.name}={','.join('x'.join(map(str, shape)) for shape in (self.min, self.opt, self.max))}"

    def range(self, axis: int, step: int = 1) -> DimRange:
        """Returns a range with the sizes of an axis at min, opt and max. Raises ``BadInputSpec`` if a size is not a
        multiple of ``step``."""
        try:
            return DimRange(self.min[axis], self.opt[axis], self.max[axis], step)
        except BadInputSpec as error:
            raise BadInputSpec(f"profile {self}, dim {axis}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> InputShapes:
        """Reads min, opt and max of an input from a text such as ``input_ids=1x8,8x128,64x512``.

        Raises ``BadInputSpec`` if ``text`` doesn't have this form.
        """
        name, equals, rest = text.strip().rpartition("=")  # a tensor's name may contain "=", but a shape can't
        shapes = rest.split(",")
        if not equals or not name or len(shapes) != 3 or not all(_SHAPE.match(shape) for shape in shapes):
            raise BadInputSpec(f"can't read the profile {text!r}; {_FORM}")
        low, opt, high = (tuple(int(size) for size in shape.split("x")) for shape in shapes)
        return cls(name=name, min=low, opt=opt, max=high)


@dataclass(frozen=True, kw_only=True)
class OptimizationProfile:
    """Holds the shapes of all dynamic inputs in one profile, and the resulting range of each dynamic dim."""

    inputs: tuple[InputShapes, ...]
    dims: dict[str, DimRange]

    def to_json(self) -> dict[str, list[list[int]]]:
        """Returns ``{input: [min, opt, max]}``."""
        return {i.name: [list(i.min), list(i.opt), list(i.max)] for i in self.inputs}


def parse_profiles(texts: Iterable[str], signature: Signature) -> tuple[OptimizationProfile, ...]:
    """Reads profiles from texts such as ``input_ids=1x8,8x128,64x512``. Each text has the shapes of one input in one
    profile. If several texts name the same input, the second text belongs to the second profile, and so on.

    Raises ``BadInputSpec`` for an unknown or missing input, and for a shape of the wrong rank. Also raises
    ``BadInputSpec`` if a fixed dim is changed, if min > opt or opt > max, or if a dim has different ranges in two
    inputs.
    """
    groups: list[dict[str, InputShapes]] = []
    for text in texts:
        shapes = InputShapes.parse(text)
        free = next((group for group in groups if shapes.name not in group), None)
        if free is None:
            groups.append(free := {})
        free[shapes.name] = shapes
    return tuple(checked_profile(tuple(group.values()), signature) for group in groups)


def default_profile(signature: Signature) -> OptimizationProfile | None:
    """Returns the profile with the ranges in ``signature``, or None if the model has no dynamic dims."""
    if not signature.dims:
        return None
    return checked_profile(_shapes_at(signature, signature.dims), signature)


def checked_profile(inputs: Sequence[InputShapes], signature: Signature) -> OptimizationProfile:
    """Returns the profile with the given shapes. Raises ``BadInputSpec`` if the shapes contradict ``signature`` or one
    another."""
    specs = {spec.name: spec for spec in signature.inputs}
    dims: dict[str, DimRange] = {}
    given_by: dict[str, str] = {}
    for shapes in inputs:
        if shapes.name not in specs:
            raise BadInputSpec(f"profile {shapes} names an unknown input; the inputs are {', '.join(specs)}")
        spec = specs[shapes.name]
        if len(shapes.min) != len(spec.shape):
            raise BadInputSpec(
                f"profile {shapes} has shapes of rank {len(shapes.min)}, but the model's input {spec} has rank "
                f"{len(spec.shape)}; give each shape {len(spec.shape)} sizes"
            )
        for axis, dim in enumerate(spec.shape):
            found = shapes.range(axis, signature.dims[dim].step if isinstance(dim, str) else 1)
            if isinstance(dim, int):
                if not found.min == found.max == dim:
                    raise BadInputSpec(
                        f"profile {shapes} has the sizes {_text(found)} at dim {axis}, but this dim of the model's "
                        f"input {spec} is fixed to {dim}; write {dim} for min, opt and max"
                    )
            elif dims.setdefault(dim, found) != found:
                raise BadInputSpec(
                    f"the dim {dim!r} has the sizes {_text(dims[dim])} in the profile of the input {given_by[dim]!r}, "
                    f"but the sizes {_text(found)} in the profile of the input {shapes.name!r}; "
                    "give the dim the same min, opt and max in all inputs"
                )
            else:
                given_by.setdefault(dim, shapes.name)
    _all_covered(signature, given={shapes.name for shapes in inputs}, dims=dims)
    return OptimizationProfile(inputs=tuple(inputs), dims=dims)


def merged_dims(profiles: Sequence[OptimizationProfile]) -> dict[str, DimRange]:
    """Returns the range of each dim over all profiles, with the ``opt`` of the first profile."""
    merged: dict[str, DimRange] = {}
    for profile in profiles:
        for dim, found in profile.dims.items():
            known = merged.get(dim, found)
            merged[dim] = DimRange(min(known.min, found.min), known.opt, max(known.max, found.max), known.step)
    return merged


def _all_covered(signature: Signature, given: set[str], dims: Mapping[str, DimRange]) -> None:
    """Raises ``BadInputSpec`` if a dynamic input isn't in ``given``. The error lists the shapes that the user has to
    add.

    The listed shapes use the ranges in ``dims``, which come from the inputs in ``given``. For a dim that is not in
    ``dims``, the listed shapes use the range in the signature.
    """
    ranges = {**signature.dims, **dims}
    missing = [shapes for shapes in _shapes_at(signature, ranges) if shapes.name not in given]
    if missing:
        names = ", ".join(repr(shapes.name) for shapes in missing)
        texts = [shlex.quote(str(shapes)) if is_command_line() else str(shapes) for shapes in missing]
        several = "s" if len(missing) > 1 else ""
        raise BadInputSpec(
            f"the profile has no shapes for the dynamic input{several} {names}; add {option('profiles', texts)}"
        )


def _shapes_at(signature: Signature, ranges: Mapping[str, DimRange]) -> list[InputShapes]:
    """Returns the shapes of each dynamic input at min, opt and max of ``ranges``."""
    sizes = [{dim: getattr(ranges[dim], end) for dim in signature.dims} for end in ("min", "opt", "max")]
    inputs = []
    for spec in signature.inputs:
        if any(isinstance(dim, str) for dim in spec.shape):
            low, opt, high = (spec.resolve(at) for at in sizes)
            inputs.append(InputShapes(name=spec.name, min=low, opt=opt, max=high))
    return inputs


def _text(found: DimRange) -> str:
    return f"{found.min}..{found.opt}..{found.max}"
