"""Runs a rewritten loop as a scan if its length is dynamic. Rewritten functions call the functions of this file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# One step of a loop: takes the step's number or item, the carried tensors, and the parts of tensors that the step
# reads. Returns the new carried tensors and the results of the step.
StepFunction = Callable[[Any, tuple[Any, ...], tuple[Any, ...]], tuple[tuple[Any, ...], tuple[Any, ...]]]


@dataclass(frozen=True)
class Loop:
    """The steps of a ``for`` loop: the numbers from ``start`` to ``stop``, or the items of ``values``. ``dynamic``
    tells whether the number of steps is a symbol of ``torch.export``."""

    start: Any
    stop: Any
    values: Iterable[Any] | None = None

    @property
    def dynamic(self) -> bool:
        return isinstance(self.start, torch.SymInt) or isinstance(self.stop, torch.SymInt)

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.start, self.stop) if self.values is None else self.values)

    def scan(
        self, step: StepFunction, carried: Sequence[torch.Tensor], read: Sequence[tuple[torch.Tensor, int]]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Returns the carried tensors after the last step, and the results of all steps, stacked along axis 0.

        ``carried`` has the tensors before the first step. ``read`` has the tensors from which a step reads a part, each
        with the axis along which the step's number selects the part.
        """
        from torch._higher_order_ops.scan import scan

        # ONNX Runtime can't run a scan without steps. A loop that doesn't begin at 0 may have no steps. Its scan gets
        # one more step at the beginning, and the results of this step are dropped.
        more = isinstance(self.start, int) and self.start > 0
        begin = self.start - int(more)
        rows = [tensor.movedim(axis, 0) for tensor, axis in read]
        rows = [row[begin : self.stop] if self._leaves_out(row) else row for row in rows]
        device = next((one.device for one in (*carried, *rows)), None)
        numbers = torch.arange(begin, self.stop, device=device)
        # torch's scan needs at least one carried tensor and one result, so it also counts the steps. Its results must
        # not share memory with its arguments.
        count = torch.zeros((), dtype=torch.int64, device=device)

        def combined(before: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            after, results = step(row[0], tuple(before[1:]), tuple(row[1:]))
            if more:
                pairs = zip(after, before[1:], strict=True)
                after = tuple(torch.where(row[0] >= self.start, new, old) for new, old in pairs)
            return [before[0] + 1, *map(torch.clone, after)], [before[0].clone(), *map(torch.clone, results)]

        first = numbers if self.values is None else self.values
        after, results = scan(combined, [count, *map(torch.clone, carried)], [first, *rows])
        return tuple(after[1:]), tuple(result[int(more) :] for result in results[1:])

    def put(self, target: torch.Tensor, results: torch.Tensor, axis: int) -> torch.Tensor:
        """Returns ``target`` with the results of the steps, each at the number of its step along ``axis``."""
        whole = target.movedim(axis, 0)
        results = results.to(target.dtype).expand(results.shape[0], *whole.shape[1:])
        if self._leaves_out(whole):
            results = torch.cat([whole[: self.start], results, whole[self.stop :]])
        return results.movedim(0, axis)

    def _leaves_out(self, row: torch.Tensor) -> bool:
        """Tells whether the loop may leave out elements of ``row``."""
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return not (isinstance(self.start, int) and self.start == 0 and guard_or_false(row.shape[0] == self.stop))


def numbers(*bounds: Any) -> Loop:
    """Returns the loop ``for i in range(*bounds)``."""
    return Loop(0, *bounds) if len(bounds) == 1 else Loop(*bounds)


def items(values: Any) -> Loop:
    """Returns the loop ``for item in values``."""
    dynamic = isinstance(values, torch.Tensor) and values.ndim
    return Loop(0, values.shape[0] if dynamic else 0, values)


def unbound(tensor: Any, dim: int = 0) -> Loop:
    """Returns the loop ``for item in tensor.unbind(dim)``."""
    dynamic = isinstance(tensor, torch.Tensor) and isinstance(tensor.shape[dim], torch.SymInt)
    return items(tensor.movedim(dim, 0)) if dynamic else Loop(0, 0, tensor.unbind(dim))


class Results:
    """A list to which each step of a scan appended a tensor. ``before`` has the elements from before the loop, and
    ``made`` has the tensors of all steps, stacked along axis 0."""

    def __init__(self, before: Sequence[torch.Tensor], made: torch.Tensor) -> None:
        self.before, self.made = list(before), made

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 0:
            raise TypeError("a list of a dynamic length can only be read from its end")
        return self.made[index]


def stack(tensors: Any, dim: int = 0) -> torch.Tensor:
    """Returns ``torch.stack(tensors, dim)``. ``tensors`` may be ``Results``."""
    if not isinstance(tensors, Results):
        return torch.stack(tensors, dim)
    made = torch.cat([torch.stack(tensors.before), tensors.made]) if tensors.before else tensors.made
    return made.movedim(0, dim)


def cat(tensors: Any, dim: int = 0) -> torch.Tensor:
    """Returns ``torch.cat(tensors, dim)``. ``tensors`` may be ``Results``."""
    if not isinstance(tensors, Results):
        return torch.cat(tensors, dim)
    dim %= tensors.made.ndim - 1
    return torch.cat([*tensors.before, tensors.made.movedim(0, dim).flatten(dim, dim + 1)], dim)
