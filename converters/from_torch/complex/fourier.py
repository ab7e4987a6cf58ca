"""Computes discrete Fourier transforms with matrix products, which every runtime has.

ONNX has an operator DFT, but ONNX Runtime's kernel for this operator is slow and inaccurate at sizes that aren't powers
of 2. At size 1000, the relative error of the kernel is 8e-5, and the relative error of the matrix product is 3e-7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Up to this size, a transform is a product with one matrix. A larger transform is split into two smaller transforms.
_DIRECT = 512
# The largest size at which a transform that can't be split is a product with one matrix. A larger transform becomes
# ONNX's operator DFT, because the matrix would take too much memory.
_LARGEST = 4096


@dataclass(frozen=True)
class Pair:
    """The real part and the imaginary part of a complex tensor, as two real tensors of the same shape."""

    real: torch.Tensor
    imag: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
        """Applies ``function`` to both parts."""
        return Pair(function(self.real), function(self.imag))


def from_real(x: torch.Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Pair:
    """Computes ``aten._fft_r2c``, the transform of a real tensor. If ``onesided`` is true, the result has no negative
    frequencies along the last dim in ``dims``."""
    *others, last = dims
    sizes = [x.shape[dim] for dim in dims]
    kept = sizes[-1] // 2 + 1 if onesided else sizes[-1]
    real, imag = _transform(x.movedim(last, -1), None, sizes[-1], -1, kept)
    found = Pair(real, imag).map(lambda part: part.movedim(-1, last))
    return _scaled(_along(found, others, -1), sizes, normalization)


def of_pair(x: Pair, dims: Sequence[int], normalization: int, forward: bool) -> Pair:
    """Computes ``aten._fft_c2c``, the transform of a complex tensor, or the inverse transform."""
    return _scaled(_along(x, dims, -1 if forward else 1), [x.real.shape[dim] for dim in dims], normalization)


def to_real(x: Pair, dims: Sequence[int], normalization: int, size: Any) -> torch.Tensor:
    """Computes ``aten._fft_c2r``, the inverse transform to a real tensor.

    Along the last dim in ``dims``, ``x`` has only the frequencies from 0 to ``size // 2``, and the result has ``size``
    elements.
    """
    import torch

    *others, last = dims
    sizes = [*(x.real.shape[dim] for dim in others), size]
    found = _along(x, others, 1).map(lambda part: part.movedim(last, -1))
    # Each left-out frequency is the conjugate of a frequency in ``x``, and adds the same real part to the result.
    frequency = torch.arange(size // 2 + 1, device=x.real.device)
    alone = (frequency == 0) | (2 * frequency == size)
    count = torch.where(alone, 1.0, 2.0).to(x.real.dtype)
    real, _ = _transform(found.real * count, found.imag * count, size, 1, size)
    return _scaled(Pair(real, real), sizes, normalization).real.movedim(-1, last)


def _along(x: Pair, dims: Sequence[int], sign: int) -> Pair:
    """Transforms ``x`` along each dim in ``dims``, without normalization."""
    for dim in dims:
        real, imag = (part.movedim(dim, -1) for part in (x.real, x.imag))
        x = Pair(*_transform(real, imag, real.shape[-1], sign, real.shape[-1]))
        x = x.map(lambda part, dim=dim: part.movedim(-1, dim))  # type: ignore[misc]
    return x


def _scaled(x: Pair, sizes: Sequence[Any], normalization: int) -> Pair:
    """Divides ``x`` by the square root of the number of elements (``normalization`` 1) or by the number (2)."""
    import torch

    if normalization == 0:
        return x
    count = torch.scalar_tensor(math.prod(sizes), dtype=x.real.dtype, device=x.real.device)
    divisor = count.sqrt() if normalization == 1 else count
    return x.map(lambda part: part / divisor)


def _transform(
    real: torch.Tensor, imag: torch.Tensor | None, size: Any, sign: int, kept: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the real part and the imaginary part of the transform along the last dim. The result has the first
    ``kept`` elements.

    Element ``k`` is the sum of ``x[j] * exp(sign * 2 pi i * j * k / size)`` over ``j``. If the last dim of ``x`` has
    fewer than ``size`` elements, the missing elements are 0. ``imag=None`` stands for zeros.
    """
    import torch

    factor = _factor(size)
    if factor == 1:
        cos, sin = _waves(real, real.shape[-1], kept, size, sign)
        if imag is None:
            return real @ cos, real @ sin
        return real @ cos - imag @ sin, imag @ cos + real @ sin
    imag = torch.zeros_like(real) if imag is None else imag
    missing = size - real.shape[-1]
    real, imag = (torch.nn.functional.pad(part, (0, missing)) for part in (real, imag))
    transform = _split if factor else _by_operator
    return tuple(part.narrow(-1, 0, kept) for part in transform(real, imag, size, sign))  # type: ignore[return-value]


def _factor(size: Any) -> int:
    """Returns the smaller size into which a transform is split, 1 for a transform that is a single matrix product, or 0
    for a transform that is too large for a matrix."""
    if not isinstance(size, int):  # a dynamic size
        return int(size.node.has_hint() and size.node.hint <= _LARGEST)
    if size <= _DIRECT:
        return 1
    factor = next(factor for factor in range(math.isqrt(size), 0, -1) if size % factor == 0)
    if factor == 1:
        return int(size <= _LARGEST)
    return factor if _factor(size // factor) else 0


def _split(real: torch.Tensor, imag: torch.Tensor, size: int, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a transform as many transforms of two smaller sizes (the Cooley-Tukey algorithm)."""
    first = _factor(size)
    second = size // first
    real, imag = (part.unflatten(-1, (first, second)).transpose(-1, -2) for part in (real, imag))
    real, imag = _transform(real, imag, first, sign, first)
    cos, sin = _waves(real, second, first, size, sign)
    real, imag = real * cos - imag * sin, imag * cos + real * sin
    real, imag = (part.transpose(-1, -2) for part in (real, imag))
    real, imag = _transform(real, imag, second, sign, second)
    return real.transpose(-1, -2).flatten(-2), imag.transpose(-1, -2).flatten(-2)


def _by_operator(real: torch.Tensor, imag: torch.Tensor, _: Any, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a transform with PyTorch's operator, which the exporter translates to ONNX's operator DFT."""
    import torch

    found = torch.ops.aten._fft_c2c(torch.complex(real, imag), [real.ndim - 1], 0, sign == -1)
    both = torch.view_as_real(found)
    return both.select(-1, 0), both.select(-1, 1)


def _waves(like: torch.Tensor, rows: Any, columns: Any, size: Any, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the matrices of cos(2 pi j k / size) and sign * sin(2 pi j k / size), in the dtype of ``like``.

    The product ``j * k`` is reduced as an integer, because a large angle in float32 is inaccurate.
    """
    import torch

    row, column = (torch.arange(count, device=like.device) for count in (rows, columns))
    period = torch.scalar_tensor(size, dtype=torch.int64, device=like.device)  # torch.onnx can't divide by a symbol
    turn = torch.tensor(2 * math.pi, dtype=like.dtype, device=like.device)  # torch.onnx rounds a number to float32
    angle = (row[:, None] * column % period).to(like.dtype) * turn / period.to(like.dtype)
    return angle.cos(), sign * angle.sin()
