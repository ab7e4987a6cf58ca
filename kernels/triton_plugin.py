# mypy: ignore-errors
"""The GEMM as TensorRT calls a quick plugin's kernel: tensor inputs, then the scalars, then the output.

TensorRT passes exactly the inputs that a plugin has, so there is one kernel a number of operands. All are dense; ``nt``
(``TRANSPOSED``) is b as (N, K).
"""

import triton
import triton.language as tl

from accel.kernels.triton_kernels import gemm


@triton.jit
def gemm_plugin_0(
    a, b, M, N, K, out,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    gemm(a, b, out, a, a, a, a, M, N, K, K, 1, 1 if TRANSPOSED else N, K if TRANSPOSED else 1,
         ACT, HAS_BIAS, HAS_RESIDUAL, False, False, BM, BN, BK, GROUP, 1, False, UPCAST)  # fmt: skip


@triton.jit
def gemm_plugin_1(
    a, b, added, M, N, K, out,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``added`` is the bias or the residual, whichever there is."""
    gemm(a, b, out, added, added, a, a, M, N, K, K, 1, 1 if TRANSPOSED else N, K if TRANSPOSED else 1,
         ACT, HAS_BIAS, HAS_RESIDUAL, False, False, BM, BN, BK, GROUP, 1, False, UPCAST)  # fmt: skip


@triton.jit
def gemm_plugin_2(
    a, b, bias, residual, M, N, K, out,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    gemm(a, b, out, bias, residual, a, a, M, N, K, K, 1, 1 if TRANSPOSED else N, K if TRANSPOSED else 1,
         ACT, HAS_BIAS, HAS_RESIDUAL, False, False, BM, BN, BK, GROUP, 1, False, UPCAST)  # fmt: skip
