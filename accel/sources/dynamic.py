"""Reads the argument ``dynamic``, which names the dynamic axes of a live model's example inputs.

Axes are a dict such as ``{0: "batch"}``, or a sequence with one item for each axis. An item is a name, a
``torch.export.Dim``, or None or the example's size for a static axis. The axes of a tensor inside a container are found
by the tensor's own name (``{"batch_ids": {0: "batch"}}``), or by the structure of the argument, as in torch
(``{"batch": {"ids": {0: "batch"}}}``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel.errors import BadInputSpec, shortened

from .structure import Template, items_of, items_of_template

Dynamic = Mapping[str, Any] | Sequence[Any]
Axes = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True)
class NamedAxes:
    """The axes that the user names. ``names`` maps each input to the names of its axes, ``ranges`` has the smallest and
    the largest size of each dim that the user gave as a ``torch.export.Dim``. ``open_batch`` tells whether accel may
    make first axes dynamic, because the user says nothing about them."""

    names: Axes
    ranges: Mapping[str, list[int]]
    open_batch: bool


def named_axes(
    dynamic: Dynamic | None, templates: Mapping[str, Template], shapes: Mapping[str, Sequence[int]]
) -> NamedAxes:
    """Returns the axes that ``dynamic`` names. ``templates`` describes the arguments, and ``shapes`` has the shape of
    each input in the example.

    Raises ``BadInputSpec`` if ``dynamic`` doesn't fit the arguments.
    """
    given = dict(_by_input(dynamic, templates, shapes)) if dynamic else {}
    names: dict[str, dict[int, str]] = {}
    ranges: dict[str, list[int]] = {}
    for name, axes in given.items():
        rank = len(shapes[name])
        for axis, dim in axes.items() if isinstance(axes, Mapping) else enumerate(axes):
            if not -rank <= axis < rank:
                if dim is None:
                    continue
                raise BadInputSpec(
                    f"the argument dynamic has the axis {axis} of the input {name}, which has only {rank} axes; give "
                    f"an axis in 0..{rank - 1}"
                )
            if isinstance(dim, int) and dim != shapes[name][axis]:
                raise BadInputSpec(
                    f"the argument dynamic gives axis {axis} of the input {name} the size {dim}, but the size in the "
                    f"example is {shapes[name][axis]}; give a name, as in {{{axis}: {f'{name}_{axis % rank}'!r}}}, for "
                    f"an axis of any size, or an example of size {dim}"
                )
            if _is_static(dim):
                continue
            label = dim if isinstance(dim, str) else getattr(dim, "__name__", f"{name}_{axis % rank}")
            names.setdefault(name, {})[axis % rank] = label
            low, high = getattr(dim, "min", None), getattr(dim, "max", None)
            if isinstance(low, int) and isinstance(high, int):  # a Dim without a limit has an infinity of sympy
                ranges[label] = [low, high]
    # An empty ``dynamic`` says that no axis is dynamic.
    silent = all(isinstance(axes, Mapping) and 0 not in axes for axes in given.values())
    return NamedAxes(names, ranges, dynamic is None or (bool(dynamic) and silent))


def _by_input(
    dynamic: Dynamic, templates: Mapping[str, Template], inputs: Iterable[str]
) -> Iterator[tuple[str, Mapping[int, Any] | Sequence[Any]]]:
    """Returns the name and the axes of each input that ``dynamic`` names."""
    pairs = dynamic.items() if isinstance(dynamic, Mapping) else _in_order(dynamic, templates, "dynamic")
    seen: set[str] = set()
    for name, given in pairs:
        flat = name in inputs and (_are_axes(given) or name not in templates)
        if not flat and name not in templates:
            others = ", ".join(dict.fromkeys([*inputs, *templates]))
            raise BadInputSpec(f"the argument dynamic names {name!r}, which is not an input; the inputs are {others}")
        found = [(name, given)] if flat else _inside(templates[name], given, str(name))
        for one, axes in found:
            if axes is None:
                continue
            if not _are_axes(axes):
                raise BadInputSpec(
                    f"the argument dynamic gives {shortened(repr(axes), 60)} for the input {one}, which is one tensor; "
                    f"give the names of its axes, as in {{0: 'batch'}}"
                )
            if one in seen:
                raise BadInputSpec(f"the argument dynamic names the input {one} twice; name it once")
            seen.add(one)
            yield one, axes


def _inside(template: Template, given: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Returns the name and the axes of each tensor in the argument ``where``."""
    if "tensor" in template:
        yield template["tensor"], given
        return
    if given is None:
        return
    items = dict(items_of_template(template))
    names = [name for name, _ in _tensors(template)]
    if not names:
        raise BadInputSpec(f"the argument dynamic names {where}, which holds no tensor; leave {where} out")
    if _are_axes(given) and given:
        raise BadInputSpec(
            f"the argument dynamic gives axes for {where}, which is no tensor; name the tensors in it: "
            f"{', '.join(names)}"
        )
    pairs = _in_order(given, items, where) if isinstance(given, list | tuple) else items_of(given)
    if pairs is None:
        raise BadInputSpec(
            f"the argument dynamic gives {shortened(repr(given), 60)} for {where}; give the axes of the tensors in it: "
            f"{', '.join(names)}"
        )
    for key, axes in pairs:
        if key not in items:
            raise BadInputSpec(
                f"the argument dynamic names {where}[{key!r}], but {where} has only {', '.join(map(repr, items))}"
                f"; name one of these, or one of the inputs {', '.join(names)}"
            )
        yield from _inside(items[key], axes, f"{where}[{key!r}]")


def _in_order(given: Sequence[Any], items: Mapping[Any, Any], where: str) -> list[tuple[Any, Any]]:
    """Returns the pairs of the keys of ``items`` and the axes that ``given`` lists in the same order."""
    if len(given) > len(items):
        raise BadInputSpec(
            f"the argument dynamic lists {len(given)} items for {where}, but the example has {len(items)}; give one "
            "item for each, or None"
        )
    return list(zip(items, given, strict=False))


def _tensors(template: Template) -> Iterator[tuple[str, Template]]:
    if "tensor" in template:
        yield template["tensor"], template
        return
    for _, item in items_of_template(template):
        yield from _tensors(item)


def _are_axes(given: Any) -> bool:
    """Tells whether ``given`` names the axes of one tensor, rather than the tensors of a container."""
    if given is None:
        return True
    if isinstance(given, Mapping):
        return all(isinstance(axis, int) and _is_dim(dim) for axis, dim in given.items())
    return isinstance(given, list | tuple) and all(map(_is_dim, given))


def _is_dim(dim: Any) -> bool:
    return dim is None or not isinstance(dim, Mapping | list | tuple)


def _is_static(dim: Any) -> bool:
    """Tells whether ``dim`` leaves an axis static: None, a number, or torch's ``Dim.STATIC``."""
    hint = getattr(getattr(dim, "type", None), "name", "")
    return dim is None or isinstance(dim, int) or hint == "STATIC"
