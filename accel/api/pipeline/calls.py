"""Runs a pipeline and records the calls of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from accel.errors import AccelError, BadSource
from accel.progress import report
from accel.sources.structure import Template
from accel.sources.torch.arguments import Arguments, arguments_of_example
from accel.sources.torch.call import to_array

if TYPE_CHECKING:
    import numpy as np

    from accel.signature import Feeds
    from accel.sources.pipeline import Record

# A loop may call a part any number of times. accel records the sizes of all calls, but keeps the values of at most
# ``_MOST_KEPT`` calls.
_MOST_KEPT = 128


@dataclass(kw_only=True)
class Calls:
    """Holds the calls of one part. ``sizes`` holds the size of each axis of each input in every call. A run of the
    pipeline may call the part several times. For each call, ``runs`` holds the sizes of the pipeline's own dims in the
    run that made the call. Of the calls in the first run, ``largest`` holds the arguments of the call with the largest
    inputs."""

    templates: Mapping[str, Template] = field(default_factory=dict)
    sizes: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    runs: list[Mapping[str, int]] = field(default_factory=list)
    kept: list[dict[str, np.ndarray]] = field(default_factory=list)
    largest: Any = None
    elements: int = -1
    _stride: int = 1

    def keep(self, feeds: Callable[[], dict[str, np.ndarray]]) -> None:
        """Keeps the values of every call. If there are too many calls, keeps the values of every second call, then of
        every fourth call, and so on."""
        if (len(self.runs) - 1) % self._stride == 0:
            self.kept.append(feeds())
        if len(self.kept) > _MOST_KEPT:
            self.kept, self._stride = self.kept[::2], 2 * self._stride

    def dynamic(self) -> dict[str, dict[int, str]]:
        """Returns the name of each axis whose size differs between calls. Axes with equal sizes in every call share one
        name. If a dim of the pipeline has the same size as the axes in every call, the axes get the name of this dim.
        If no such dim exists, the first of the axes gives the name. For example, the name ``x_1`` comes from axis 1 of
        the input ``x``."""
        names: dict[tuple[int, ...], str] = {}
        for dim in self.runs[0]:
            names.setdefault(tuple(sizes.get(dim, 0) for sizes in self.runs), dim)
        found: dict[str, dict[int, str]] = {}
        for (name, axis), sizes in self.sizes.items():
            if len(set(sizes)) > 1:
                found.setdefault(name, {})[axis] = names.setdefault(tuple(sizes), f"{name}_{axis}")
        return found


def record_calls(
    parts: Mapping[str, torch.nn.Module],
    recorded_by: Callable[[Record], AbstractContextManager[None]],
    run: Callable[[Feeds], object],
    runs: Iterable[tuple[Mapping[str, int], Feeds]],
) -> dict[str, Calls]:
    """Runs a pipeline on all feeds in ``runs``, and returns the calls of each part. Each entry of ``runs`` holds the
    sizes of the pipeline's dims and the feeds of one run.

    Raises ``BadSource`` if a part is never called, or is called with different kinds of arguments.
    """
    found = {name: Calls() for name in parts}
    for number, (sizes, feeds) in enumerate(runs):
        report(f"pipeline: recording run {number + 1}")

        def record(
            name: str,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            sizes: Mapping[str, int] = sizes,
            first: bool = number == 0,
        ) -> None:
            try:
                _add(found[name], parts[name], args, kwargs, sizes, first)
            except AccelError as error:
                raise named(error, name) from error

        with recorded_by(record):
            run(feeds)
    for name, calls in found.items():
        if not calls.runs:
            raise BadSource(
                f"the function never calls the part {name!r} on the example; call parts.{name}(...) in the "
                "function, give an example that reaches the call, or leave the part out"
            )
    return found


def _add(
    calls: Calls,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: Mapping[str, int],
    first: bool,
) -> None:
    """Adds a call to ``calls``."""
    example = Arguments(args, kwargs)
    templates, tensors, _ = arguments_of_example(module, example)
    shapes = {(name, axis): size for name, one in tensors.items() for axis, size in enumerate(one.shape)}
    if calls.runs and (templates != calls.templates or set(shapes) != set(calls.sizes)):
        raise BadSource(_difference(calls, templates, shapes))
    calls.templates = templates
    calls.runs.append(sizes)
    for axis, size in shapes.items():
        calls.sizes.setdefault(axis, []).append(size)
    elements = sum(one.numel() for one in tensors.values())
    if first and elements > calls.elements:
        calls.elements, calls.largest = elements, Arguments(_copied(args), _copied(kwargs))
    calls.keep(lambda: {name: to_array(_copied(one)) for name, one in tensors.items()})


def _copied(value: Any) -> Any:
    """Returns ``value`` with copies of its tensors, because the function may overwrite the tensors after the call."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_copied(item) for item in value)
    return value


def _difference(calls: Calls, templates: Mapping[str, Template], shapes: Iterable[tuple[str, int]]) -> str:
    """Returns the message for a call that differs from the earlier calls of its part."""
    for name in [*calls.templates, *templates]:
        one, other = calls.templates.get(name), templates.get(name)
        if one == other:
            continue
        if one is not None and other is not None and {"value"} == set(one) == set(other):
            return (
                f"its argument {name!r} is {one['value']!r} in one call and {other['value']!r} in another, and numbers "
                f"become part of the graph; give it as a tensor: torch.tensor({other['value']!r})"
            )
        return (
            f"its argument {name!r} differs in kind between two calls (such as a tensor in one and none in the other); "
            "give the module to the pipeline under two names, one for each kind of call"
        )
    given = dict.fromkeys(name for name, _ in set(shapes) ^ set(calls.sizes))
    return f"its input {next(iter(given))!r} has another number of axes in one of the calls; give the same number"


def named(error: AccelError, name: str) -> AccelError:
    """Returns ``error`` with the name of the part in its message."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"the part {name!r}: {error.args[0]}", *error.args[1:])
    return error
