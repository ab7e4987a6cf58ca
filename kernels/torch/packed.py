"""Defines the PyTorch operator ``accel::packed_product``, which multiplies a few rows by packed int4 or int8 weights on
the CPU. Importing this module registers the operator.

``accel kernels build --cpu`` compiles the kernels. Without them, the operator computes the same integers in NumPy, and
is slow.
"""

from __future__ import annotations

import numpy as np

import torch
from accel.errors import BadFeeds

from ..native.cpu import library, reference
from ..native.cpu.build import cpu_library
from ..native.cpu.layout import LANES, Packed

Tensor = torch.Tensor

torch.library.define(
    "accel::packed_product",
    "(Tensor x, Tensor weights, Tensor scales, int[] sizes, int bits, float gain=1.0, bool gated=False, "
    "Tensor? residual=None) -> Tensor[]",
)
packed_product = torch.ops.accel.packed_product.default


def _outputs(x: Tensor, sizes: list[int], gated: bool) -> list[tuple[int, ...]]:
    return [(*x.shape[:-1], size) for size in (sizes[:1] if gated else sizes)]


def _packed(x: Tensor, weights: Tensor, scales: Tensor, sizes: list[int], bits: int, gain: float) -> Packed:
    """Checks the tensors and returns them as a ``Packed`` that shares their memory. Raises ``BadFeeds``."""
    width = weights.shape[1] * 32 // bits if weights.dim() == 4 and bits in (4, 8) else 0
    blocks = scales.shape[1] if scales.dim() == 3 else 0
    groups = sum(-(-size // LANES) for size in sizes)
    if (
        x.dtype != torch.float32
        or weights.dtype != torch.uint8
        or scales.dtype != torch.float16
        or not (0 < len(sizes) <= 3)
        or min(sizes) < 1
        or blocks == 0
        or tuple(weights.shape) != (groups, width * bits // 32, LANES, 4)
        or tuple(scales.shape) != (groups, blocks, LANES)
        or width % blocks
        or not width - width // blocks < x.shape[-1] <= width
    ):
        raise BadFeeds(
            f"x {tuple(x.shape)}, weights {tuple(weights.shape)}, scales {tuple(scales.shape)} and sizes={sizes} "
            "aren't a packed product; pass what accel.kernels.native.cpu.layout.pack returns"
        )
    return Packed(
        weights=weights.contiguous().numpy(),
        scales=scales.contiguous().numpy(),
        sizes=tuple(sizes),
        k=x.shape[-1],
        bits=bits,
        block=width // blocks,
        gain=gain,
    )


@torch.library.impl("accel::packed_product", ("cpu",))
def _product(
    x: Tensor,
    weights: Tensor,
    scales: Tensor,
    sizes: list[int],
    bits: int,
    gain: float = 1.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> list[Tensor]:
    packed = _packed(x, weights, scales, sizes, bits, gain)
    shapes = _outputs(x, sizes, gated)
    if gated and (len(sizes) != 2 or sizes[0] != sizes[1]):
        raise BadFeeds(f"a gated product has two matrices of equal size, not sizes={sizes}; leave out gated")
    if residual is not None and (tuple(residual.shape) != shapes[0] or residual.dtype != torch.float32):
        raise BadFeeds(f"the residual {tuple(residual.shape)} isn't float32 {shapes[0]}; pass one like the output")
    rows = x.reshape(-1, x.shape[-1]).contiguous().numpy()
    added = None if residual is None else residual.reshape(-1, sizes[0]).contiguous().numpy()
    built = cpu_library()
    if len(rows) == 0:
        return [x.new_zeros(shape) for shape in shapes]
    if built is None:
        wide, _ = reference.product(rows, packed, gated=gated, residual=added)
        found = [part.astype(np.float32) for part in wide]
    else:
        found = library.product(built, rows, packed, gated=gated, residual=added, threads=torch.get_num_threads())
    return [torch.from_numpy(part).reshape(shape) for part, shape in zip(found, shapes, strict=True)]


@torch.library.register_fake("accel::packed_product")  # type: ignore[untyped-decorator]
def _product_fake(
    x: Tensor,
    weights: Tensor,  # noqa: ARG001 - torch's signature
    scales: Tensor,  # noqa: ARG001
    sizes: list[int],
    bits: int,  # noqa: ARG001
    gain: float = 1.0,  # noqa: ARG001
    gated: bool = False,
    residual: Tensor | None = None,  # noqa: ARG001
) -> list[Tensor]:
    return [x.new_empty(shape) for shape in _outputs(x, sizes, gated)]
