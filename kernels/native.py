"""The compiled kernels through their C interface (``csrc/c_api.h``): addresses in, a status out."""

from __future__ import annotations

import ctypes
from pathlib import Path

from accel.errors import BadFeeds, BuildFailed, UnsupportedHere

ABI = 1
DTYPES = {"fp32": 0, "fp16": 1, "bf16": 2}
ACTS = {"none": 0, "relu": 1, "gelu_tanh": 2, "gelu_erf": 3, "silu": 4}
BAD_CALLS = (1, 2, 3, 4)
NO_DEVICE = 5

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "accel_quantize_rowwise": [_POINTER, _INT, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER],
    "accel_gemv": [*[_POINTER] * 7, _INT, _INT, _SIZE, _SIZE, _SIZE, _POINTER],
    "accel_im2col": [_POINTER, _POINTER, _INT, _SIZE, _SIZE, _SIZE, _SIZE, ctypes.POINTER(ctypes.c_int32), _POINTER],
}


class Library:
    """A library made by ``accel kernels build``. Loads without a GPU; a call there raises ``UnsupportedHere``.

    Raises ``BuildFailed`` where the file is no such library or has another interface version.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            version = int(self._library.accel_abi_version())
            for name, arguments in _SIGNATURES.items():
                getattr(self._library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise BuildFailed(f"{path} is not a kernel library ({error}); run accel kernels build again") from error
        if version != ABI:
            raise BuildFailed(f"{path} has interface {version}, this accel speaks {ABI}; run accel kernels build again")
        self._library.accel_status_message.restype = ctypes.c_char_p

    def message(self, status: int) -> str:
        """What a status means, with the fix."""
        return str(self._library.accel_status_message(status).decode())

    def quantize_rowwise(
        self, x: int, dtype: str, q: int, scales: int, rows: int, columns: int, row_stride: int, stream: int = 0
    ) -> None:
        """``x`` (rows, columns) to int8 ``q`` and fp32 ``scales``; all are addresses. Raises as ``check`` does."""
        arguments = (x, DTYPES[dtype], q, scales, rows, columns, row_stride, stream)
        self.check(self._library.accel_quantize_rowwise(*arguments))

    def gemv(
        self,
        a: int,
        b: int,
        out: int,
        *,
        bias: int = 0,
        residual: int = 0,
        row_scale: int = 0,
        col_scale: int = 0,
        dtype: str,
        act: str,
        m: int,
        n: int,
        k: int,
        stream: int = 0,
    ) -> None:
        """``a`` (m, k) times ``b`` (n, k) transposed with the epilogue, m <= 16; all operands are addresses."""
        operands = (a, b, out, bias, residual, row_scale, col_scale)
        self.check(self._library.accel_gemv(*operands, DTYPES[dtype], ACTS[act], m, n, k, stream))

    def im2col(
        self,
        x: int,
        columns: int,
        element_size: int,
        shape: tuple[int, int, int, int],
        geometry: tuple[int, int, int, int, int, int, int, int],
        stream: int = 0,
    ) -> None:
        """The patches of ``x`` (NHWC) as rows; ``geometry``: kernel, stride, padding, dilation as (h, w)."""
        numbers = (ctypes.c_int32 * 8)(*geometry)
        self.check(self._library.accel_im2col(x, columns, element_size, *shape, numbers, stream))

    def check(self, status: int) -> None:
        """Nothing for 0; ``BadFeeds`` for a wrong call, ``UnsupportedHere`` without a GPU, else ``BuildFailed``."""
        if status == 0:
            return
        if status in BAD_CALLS:
            raise BadFeeds(self.message(status))
        if status == NO_DEVICE:
            raise UnsupportedHere(self.message(status))
        raise BuildFailed(self.message(status))
