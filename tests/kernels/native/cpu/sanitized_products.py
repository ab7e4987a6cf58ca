"""Runs random products on buffers of exact size, in a process that has loaded a sanitizer.

The command line is ``python sanitized_products.py LIBRARY``.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np

from accel.kernels.native.cpu import layout, reference
from accel.kernels.native.cpu.library import CpuLibrary, Product

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]


def buffer(array: np.ndarray[Any, Any]) -> int:
    """Copies ``array`` into memory from malloc, because the sanitizer knows the bounds of memory from malloc."""
    address = LIBC.malloc(array.nbytes)
    ctypes.memmove(address, array.ctypes.data, array.nbytes)
    return int(address)


def main() -> None:
    library, draw = CpuLibrary(Path(sys.argv[1])), np.random.default_rng(0)
    for number in range(150):
        bits, block = (4, 8)[number % 2], layout.BLOCKS[number // 2 % 4]
        gated, rows, k = number % 3 == 0, int(draw.integers(1, 18)), int(draw.integers(1, 300))
        sizes = (int(draw.integers(1, 40)),) * 2 if gated else tuple(map(int, draw.integers(1, 40, number % 3)))
        matrix = draw.standard_normal((sum(sizes), k)).astype(np.float32)
        weights, scales = layout.quantize(matrix, bits=bits, block=block)
        packed = layout.pack(weights, scales, k=k, bits=bits, sizes=sizes)
        x = draw.standard_normal((rows, k)).astype(np.float32)
        x[0, 0] = (1.0, np.nan, np.inf, 1e10)[number % 4]
        residual = draw.standard_normal((rows, sizes[0])).astype(np.float32)
        wanted, bounds = reference.product(x, packed, gated=gated, residual=residual)
        for kernel in library.runs:
            out = [np.zeros((rows, size), np.float32) for size in (sizes[:1] if gated else sizes)]
            arrays = [x, packed.weights, packed.scales, residual, *out]
            addresses = [buffer(array) for array in arrays]
            call = Product(*addresses[:4], rows=rows, k=k, parts=len(sizes), bits=bits, block=block, gated=gated)
            call.gain = packed.gain
            for at, size in enumerate(sizes):
                call.sizes[at] = size
            for at, address in enumerate(addresses[4:]):
                call.out[at] = address
            library.run(call, kernel=kernel, threads=1 + number % 3)
            for got, address, want, bound in zip(out, addresses[4:], wanted, bounds, strict=True):
                ctypes.memmove(got.ctypes.data, address, got.nbytes)
                finite = np.isfinite(want)
                assert np.all(np.abs(got - want)[finite] <= bound[finite]), (number, kernel)
            for address in addresses:
                LIBC.free(address)
    print("150 products")


if __name__ == "__main__":
    main()
