# mypy: ignore-errors
"""Contains the GEMM and the convolution with the parameters of TensorRT's quick plugins. The parameters are tensor
inputs, scalars and the output.

TensorRT passes exactly the inputs that a plugin has, so there is a separate kernel for each number of operands. All
operands are dense. Operands come in this order: bias, row scale, column scale, residual. With ``TRANSPOSED``
(``gemm_nt``), b is (N, K). Images and weights are channels first, as in ONNX.
"""

import triton
import triton.language as tl

from .kernels import conv2d, gemm


@triton.jit
def dense(
    a, b, bias, row, col, residual, M, N, K, out,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr, INTEGER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    gemm(a, b, out, bias, residual, row, col, M, N, K, K, 1, 1 if TRANSPOSED else N, K if TRANSPOSED else 1,
         ACT, HAS_BIAS, HAS_RESIDUAL, HAS_ROW, HAS_COL, BM, BN, BK, GROUP, 1, INTEGER, UPCAST)  # fmt: skip


@triton.jit
def gemm_plugin_0(
    a, b, M, N, K, out,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr, INTEGER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    dense(a, b, a, a, a, a, M, N, K, out, ACT, HAS_BIAS, HAS_ROW, HAS_COL, HAS_RESIDUAL, TRANSPOSED, INTEGER,
          BM, BN, BK, GROUP, UPCAST)  # fmt: skip


@triton.jit
def gemm_plugin_1(
    a, b, x, M, N, K, out,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr, INTEGER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``x`` is the only operand of the epilogue."""
    dense(a, b, x, x, x, x, M, N, K, out, ACT, HAS_BIAS, HAS_ROW, HAS_COL, HAS_RESIDUAL, TRANSPOSED, INTEGER,
          BM, BN, BK, GROUP, UPCAST)  # fmt: skip


@triton.jit
def gemm_plugin_2(
    a, b, x, y, M, N, K, out,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr, INTEGER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``x`` and ``y`` are two of the operands bias, row scale, column scale and residual, in this order."""
    row = y if HAS_BIAS else x
    col = y if HAS_BIAS or HAS_ROW else x
    dense(a, b, x, row, col, y, M, N, K, out, ACT, HAS_BIAS, HAS_ROW, HAS_COL, HAS_RESIDUAL, TRANSPOSED, INTEGER,
          BM, BN, BK, GROUP, UPCAST)  # fmt: skip


@triton.jit
def gemm_plugin_3(
    a, b, x, y, z, M, N, K, out,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr, INTEGER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``x``, ``y`` and ``z`` are three of the operands bias, row scale, column scale and residual, in this order."""
    row = y if HAS_BIAS else x
    col = y if HAS_RESIDUAL else z
    dense(a, b, x, row, col, z, M, N, K, out, ACT, HAS_BIAS, HAS_ROW, HAS_COL, HAS_RESIDUAL, TRANSPOSED, INTEGER,
          BM, BN, BK, GROUP, UPCAST)  # fmt: skip


@triton.jit
def gemm_plugin_4(
    a, b, bias, row, col, residual, M, N, K, out,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr, INTEGER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    dense(a, b, bias, row, col, residual, M, N, K, out, ACT, HAS_BIAS, HAS_ROW, HAS_COL, HAS_RESIDUAL, TRANSPOSED,
          INTEGER, BM, BN, BK, GROUP, UPCAST)  # fmt: skip


@triton.jit
def convolve(
    x, weight, bias, residual, M, N, C, H, W, OH, OW, out,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    conv2d(x, weight, out, bias, residual, x, x, M, N, C, H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW,
           ACT, HAS_BIAS, HAS_RESIDUAL, False, False, BM, BN, BK, GROUP, False, UPCAST, True)  # fmt: skip


@triton.jit
def conv_plugin_0(
    x, weight, M, N, C, H, W, OH, OW, out,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    convolve(x, weight, x, x, M, N, C, H, W, OH, OW, out, KH, KW, SH, SW, PH, PW, DH, DW, ACT, HAS_BIAS, HAS_RESIDUAL,
             BM, BN, BK, GROUP, UPCAST)  # fmt: skip


@triton.jit
def conv_plugin_1(
    x, weight, y, M, N, C, H, W, OH, OW, out,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``y`` is the bias or the residual, whichever exists."""
    convolve(x, weight, y, y, M, N, C, H, W, OH, OW, out, KH, KW, SH, SW, PH, PW, DH, DW, ACT, HAS_BIAS, HAS_RESIDUAL,
             BM, BN, BK, GROUP, UPCAST)  # fmt: skip


@triton.jit
def conv_plugin_2(
    x, weight, bias, residual, M, N, C, H, W, OH, OW, out,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    convolve(x, weight, bias, residual, M, N, C, H, W, OH, OW, out, KH, KW, SH, SW, PH, PW, DH, DW, ACT, HAS_BIAS,
             HAS_RESIDUAL, BM, BN, BK, GROUP, UPCAST)  # fmt: skip
