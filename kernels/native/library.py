"""Calls the compiled kernels through their C interface (``csrc/c_api.h``), which takes addresses and returns a
status."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any, ClassVar

from accel.errors import BadFeeds, BuildFailed, UnsupportedHere

ABI = 3
DTYPES = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3, "fp8_e4m3": 4}
ACTS = {"none": 0, "relu": 1, "gelu_tanh": 2, "gelu_erf": 3, "silu": 4}
BAD_CALLS = (1, 2, 3, 4, 7, 8, 10)
NOT_HERE = (5, 9)

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "accel_quantize_rowwise": [_POINTER, _INT, _POINTER, _INT, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER],
    "accel_gemv": [*[_POINTER] * 7, _INT, _INT, _SIZE, _SIZE, _SIZE, _POINTER],
    "accel_gemm_workspace": [_INT, _POINTER, ctypes.POINTER(_SIZE)],
    "accel_gemm": [_INT, _POINTER],
    "accel_gemm_config_name": [_INT],
    "accel_im2col": [_POINTER, _POINTER, _INT, _SIZE, _SIZE, _SIZE, _SIZE, ctypes.POINTER(ctypes.c_int32), _POINTER],
    "accel_widen": [_POINTER, _INT, _POINTER, _SIZE, _POINTER],
}


class Problem(ctypes.Structure):
    """Mirrors the C struct ``accel_gemm_problem``, which holds addresses, sizes and dtypes."""

    _fields_: ClassVar[Any] = [
        *[(name, _POINTER) for name in ("a", "b", "out", "bias", "residual", "row_scale", "col_scale")],
        *[(name, _SIZE) for name in ("m", "n", "k")],
        *[(name, ctypes.c_int32) for name in ("dtype", "out_dtype", "act")],
        ("workspace", _POINTER),
        ("workspace_bytes", _SIZE),
        ("stream", _POINTER),
    ]


class Library:
    """Loads a library that ``accel kernels build`` made. Loading works without a GPU, but the kernels then raise
    ``UnsupportedHere``.

    Raises ``BuildFailed`` if the file is not a kernel library, or has an interface version other than ``ABI``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_whole(path):
            raise BuildFailed(f"{path} is not a complete kernel library; run accel kernels build again")
        try:
            self._library = ctypes.CDLL(str(path))
            version = int(self._library.accel_abi_version())
            for name, arguments in _SIGNATURES.items():
                getattr(self._library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise BuildFailed(f"{path} is not a kernel library ({error}); run accel kernels build again") from error
        if version != ABI:
            raise BuildFailed(
                f"the kernel library {path} has interface version {version}, but accel needs version {ABI}; "
                "run accel kernels build again"
            )
        self._library.accel_status_message.restype = ctypes.c_char_p
        self._library.accel_gemm_config_name.restype = ctypes.c_char_p
        count = int(self._library.accel_gemm_configs())
        names = (self._library.accel_gemm_config_name(number).decode() for number in range(count))
        self.gemms: dict[str, int] = {name: number for number, name in enumerate(names)}
        """Maps the name of each tensor-core GEMM in this library to its number."""

    def message(self, status: int) -> str:
        """Returns the error message for a status code. The message names the fix, too."""
        return str(self._library.accel_status_message(status).decode())

    def quantize_rowwise(
        self,
        x: int,
        dtype: str,
        q: int,
        q_dtype: str,
        scales: int,
        rows: int,
        columns: int,
        row_stride: int,
        stream: int = 0,
    ) -> None:
        """Quantizes each row of ``x`` (rows, columns). Writes the quantized values to ``q`` in ``q_dtype`` (int8 or
        fp8_e4m3), and one fp32 scale per row to ``scales``. ``x``, ``q`` and ``scales`` are addresses.

        Raises the same errors as ``check``.
        """
        arguments = (x, DTYPES[dtype], q, DTYPES[q_dtype], scales, rows, columns, row_stride, stream)
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
        """Multiplies ``a`` (m, k) by the transpose of ``b`` (n, k) and applies the epilogue. The number of rows ``m``
        is at most 16.

        All operands are addresses.
        """
        operands = (a, b, out, bias, residual, row_scale, col_scale)
        self.check(self._library.accel_gemv(*operands, DTYPES[dtype], ACTS[act], m, n, k, stream))

    def widen(self, source: int, dtype: str, to: int, count: int, stream: int = 0) -> None:
        """Converts ``count`` numbers of ``dtype`` at address ``source`` to fp32 at address ``to``."""
        self.check(self._library.accel_widen(source, DTYPES[dtype], to, count, stream))

    def gemm_workspace(self, config: str, problem: Problem) -> int:
        """Returns the bytes of device memory that ``config`` needs for this problem on the current device."""
        size = _SIZE(0)
        self.check(
            self._library.accel_gemm_workspace(self.gemms.get(config, -1), ctypes.byref(problem), ctypes.byref(size))
        )
        return size.value

    def gemm(self, config: str, problem: Problem) -> None:
        """Computes ``problem`` with the tensor-core GEMM ``config``. Raises the same errors as ``check``."""
        self.check(self._library.accel_gemm(self.gemms.get(config, -1), ctypes.byref(problem)))

    def im2col(
        self,
        x: int,
        columns: int,
        element_size: int,
        shape: tuple[int, int, int, int],
        geometry: tuple[int, int, int, int, int, int, int, int],
        stream: int = 0,
    ) -> None:
        """Writes the patches of ``x`` (NHWC) to the rows of ``columns``. ``geometry`` has the height and width of
        kernel, stride, padding and dilation, in this order."""
        numbers = (ctypes.c_int32 * 8)(*geometry)
        self.check(self._library.accel_im2col(x, columns, element_size, *shape, numbers, stream))

    def check(self, status: int) -> None:
        """Raises the error that a status code means, or returns if the status is 0.

        Raises ``BadFeeds`` for a wrong call, ``UnsupportedHere`` without a GPU, and ``BuildFailed`` for any other
        error.
        """
        if status == 0:
            return
        if status in BAD_CALLS:
            raise BadFeeds(self.message(status))
        if status in NOT_HERE:
            raise UnsupportedHere(self.message(status))
        raise BuildFailed(self.message(status))


def is_whole(path: Path) -> bool:
    """Tells whether a shared library is complete. Loading a truncated library kills the process (SIGBUS)."""
    try:
        with path.open("rb") as stream:
            header = stream.read(64)
        size = path.stat().st_size
    except OSError:
        return False
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":  # 64-bit
        return False
    # The section table is at the end of an ELF file. The file's header has the offset of the table, the size of an
    # entry and the number of entries (ELF-64, figure 2).
    (offset,) = struct.unpack_from("<Q", header, 0x28)
    entry, number = struct.unpack_from("<HH", header, 0x3A)
    return bool(offset + entry * number <= size)
