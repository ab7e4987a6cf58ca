"""Lets exporters record dynamic sizes that PyTorch's own functions take as plain numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def size_arguments() -> Iterator[None]:
    """Within the ``with`` block, ``torch.linspace`` takes a dynamic number of steps, and ``torch.istft`` a dynamic
    length. Otherwise, both would turn the size into that of the example. Other calls reach PyTorch's own functions."""
    import torch

    linspace, istft = torch.linspace, torch.istft

    def steps(start: Any, end: Any, steps: Any = None, **options: Any) -> Any:
        dtype = options.get("dtype") or torch.get_default_dtype()
        if isinstance(steps, torch.SymInt) and "out" not in options and not dtype.is_complex:
            return _evenly(start, end, steps, options)
        return linspace(start, end, steps, **options)

    def inverse(x: Any, n_fft: int, *args: Any, **named: Any) -> Any:
        names = ("hop_length", "win_length", "window", "center", "normalized", "onesided", "length", "return_complex")
        given = {**dict(zip(names, args, strict=False)), **named}
        length = given.get("length")
        if isinstance(length, torch.SymInt):
            start = n_fft // 2 if given.get("center", True) else 0
            whole = istft(x, n_fft, **{**given, "center": False, "length": None})[..., start:]
            # The signal may be shorter than the length, and then ends with zeros.
            zeros = whole.new_zeros((*whole.shape[:-1], length))
            return torch.cat([whole, zeros], -1)[..., :length]
        return istft(x, n_fft, **given)

    with mock.patch.object(torch, "linspace", steps), mock.patch.object(torch, "istft", inverse):
        yield


def _evenly(start: Any, end: Any, steps: Any, options: dict[str, Any]) -> Any:
    """Computes ``torch.linspace`` as PyTorch does: the first half from ``start``, the second half from ``end``."""
    import torch

    dtype = options.pop("dtype", None) or torch.get_default_dtype()
    wide = dtype if dtype.is_floating_point else torch.float64
    index = torch.arange(steps, **options)
    first, last = index.to(wide), (steps - 1 - index).to(wide)
    step = (end - start) / torch.clamp(torch.scalar_tensor(steps, dtype=torch.int64) - 1, min=1).to(wide)
    found = torch.where(2 * index < steps, start + step * first, end - step * last)
    return (found if dtype.is_floating_point else found.trunc()).to(dtype)
