"""Finds the lines at which a model's outputs depend on the order of equal scores.

PyTorch doesn't define the order in which ``topk`` and an unstable ``sort`` return equal scores. The order of nearly
equal scores depends on rounding.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The largest rounding error of a score, in multiples of the dtype's eps times the largest score.
_ROUNDING = 8


class OtherOrder(TorchDispatchMode):
    """Within the ``with`` block, ``topk``, ``sort`` and ``argsort`` swap equal and nearly equal scores.

    If ``odd`` is false, ranks 0 and 1 are swapped, then ranks 2 and 3, and so on. If ``odd`` is true, ranks 1 and 2 are
    swapped, then ranks 3 and 4, and so on. ``places`` lists the calls whose result changed, such as
    ``topk at net.py:12``.
    """

    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        self.odd = odd
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        aten = torch.ops.aten
        if func not in (aten.topk.default, aten.sort.default, aten.argsort.default):
            return result
        scores: torch.Tensor = args[0]
        if not scores.is_floating_point() or not scores.ndim or not scores.numel():
            return result
        names = (argument.name for argument in func._schema.arguments)
        dim = {**dict(zip(names, args, strict=False)), **kwargs}.get("dim", -1)
        swapped = func(self._swapped(scores, dim), *args[1:], **kwargs)
        before, indices = (result, swapped) if func is aten.argsort.default else (result[1], swapped[1])
        if torch.equal(indices, before):
            return result
        self.places.append(f"{func.overloadpacket.__name__}{_where()}")
        return indices if func is aten.argsort.default else (scores.gather(dim, indices), indices)

    def _swapped(self, scores: torch.Tensor, dim: int) -> torch.Tensor:
        """Adds or subtracts a few rounding errors, so that equal and nearly equal scores change their order."""
        ranks = scores.sort(stable=True, dim=dim, descending=True)[1].argsort(dim)
        largest = scores.abs().nan_to_num(posinf=0).amax(dim, keepdim=True)
        change = _ROUNDING * torch.finfo(scores.dtype).eps * largest
        return torch.where(ranks % 2 == int(self.odd), scores - change, scores + change)


def _where() -> str:
    """Returns the file and line of the model's code that calls an operator, or "" if a layer of torch calls it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    own = frame.f_globals.get("__name__", "").startswith("accel.sources.")
    return "" if own else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
