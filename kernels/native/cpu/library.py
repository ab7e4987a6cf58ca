"""Calls the CPU kernels through their C interface (``csrc/packed_product.h``)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.errors import BadFeeds, BuildFailed, UnknownName, UnsupportedHere

from ..library import is_whole
from .layout import Packed

Float32 = npt.NDArray[np.float32]

ABI = 1
_MOST_PARTS = 3
_STATUS = {
    1: "an address is NULL; pass arrays that exist",
    2: "a size is zero, negative or 2**31 or more; pass sizes from 1 on",
    3: "the kernels have no such form; use 4 or 8 bits, blocks of 32, 64, 128 or 256, and up to 3 matrices",
}


class Product(ctypes.Structure):
    """Mirrors the C struct ``accel_cpu_product``."""

    _fields_: ClassVar[Any] = [
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p * _MOST_PARTS),
        ("rows", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * _MOST_PARTS),
        ("parts", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("gain", ctypes.c_float),
    ]


class CpuLibrary:
    """Loads a library that ``build_for_cpu`` made. Raises ``BuildFailed`` if the file is not such a library."""

    def __init__(self, path: Path) -> None:
        again = "run accel kernels build --cpu again"
        if not is_whole(path):
            raise BuildFailed(f"{path} is not a complete library of CPU kernels; {again}")
        try:
            self._library = ctypes.CDLL(str(path))
            version = int(self._library.accel_cpu_abi())
        except (OSError, AttributeError) as error:
            raise BuildFailed(f"{path} is not a library of CPU kernels ({error}); {again}") from error
        if version != ABI:
            raise BuildFailed(f"the library {path} has interface version {version}, accel needs {ABI}; {again}")
        self._library.accel_cpu_kernel_name.restype = ctypes.c_char_p
        self._library.accel_cpu_run.argtypes = [ctypes.POINTER(Product), ctypes.c_int, ctypes.c_int]
        names = [self._library.accel_cpu_kernel_name(at).decode() for at in range(self._library.accel_cpu_kernels())]
        self.kernels: tuple[str, ...] = tuple(names)
        """The names of the kernels in the library, the best first."""
        self.runs: tuple[str, ...] = tuple(n for at, n in enumerate(names) if self._library.accel_cpu_runs(at))
        """The names of the kernels that this CPU can run."""

    def run(self, product: Product, *, kernel: str | None = None, threads: int = 1) -> None:
        """Computes ``product`` with ``threads`` threads and the best kernel, or the kernel called ``kernel``.

        Raises ``BadFeeds`` for a wrong call, ``UnknownName`` for an unknown kernel, and ``UnsupportedHere`` if this CPU
        lacks the instructions of the kernel.
        """
        name = kernel or self.runs[0]
        if name not in self.kernels:
            raise UnknownName(f"unknown kernel {name!r}; use one of {', '.join(self.kernels)}")
        status = self._library.accel_cpu_run(ctypes.byref(product), self.kernels.index(name), threads)
        if status == 4:
            raise UnsupportedHere(f"this CPU can't run the kernel {name}; use one of {', '.join(self.runs)}")
        if status == 5:
            raise MemoryError("no memory for the quantized rows; pass fewer rows at once")
        if status:
            raise BadFeeds(_STATUS[status])


def product(
    library: CpuLibrary,
    x: Float32,
    packed: Packed,
    *,
    gated: bool = False,
    residual: Float32 | None = None,
    kernel: str | None = None,
    threads: int = 1,
) -> list[Float32]:
    """Returns ``x`` [rows, k] times the transpose of each matrix of ``packed``, [rows, size] each.

    The rows are rounded to int8 with one scale for 32 numbers. If ``gated``, the matrices are a gate and an up
    projection of equal size, and the only result is silu(x @ gate) * (x @ up). ``residual`` is added to the first
    result, whose shape it has. Raises ``BadFeeds`` if the shapes don't fit, and the errors of ``CpuLibrary.run``.
    """
    rows, k = x.shape
    sizes = packed.sizes[:1] if gated else packed.sizes
    if k != packed.k or (residual is not None and residual.shape != (rows, sizes[0])):
        shape = None if residual is None else residual.shape
        raise BadFeeds(f"x {x.shape} and the residual {shape} don't fit k={packed.k} and sizes={packed.sizes}")
    x = np.ascontiguousarray(x, np.float32)
    added = None if residual is None else np.ascontiguousarray(residual, np.float32)
    out = [np.empty((rows, size), np.float32) for size in sizes]
    call = Product(
        x=x.ctypes.data,
        weights=packed.weights.ctypes.data,
        scales=packed.scales.ctypes.data,
        residual=None if added is None else added.ctypes.data,
        rows=rows,
        k=k,
        parts=len(packed.sizes),
        bits=packed.bits,
        block=packed.block,
        gated=gated,
        gain=packed.gain,
    )
    for at, one in enumerate(out):
        call.out[at] = one.ctypes.data
    for at, size in enumerate(packed.sizes[:_MOST_PARTS]):
        call.sizes[at] = size
    library.run(call, kernel=kernel, threads=threads)
    return out
