# mypy: ignore-errors
"""Contains the Triton source of all kernels, which share one epilogue.

The kernels are a pointer GEMM (with split-K), a persistent GEMM on TMA descriptors, an implicit-GEMM convolution, and
row-wise quantization. For a missing operand, the caller passes any pointer and turns off the ``HAS_`` flag. Upper-case
arguments of type ``constexpr`` are compile-time constants. With ``UPCAST``, kernels multiply in fp32. The interpreter
needs ``UPCAST``, because the interpreter's dot products of bfloat16 and float8 are wrong.
"""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)  # keeps NaN
    elif ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "gelu_erf":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":  # 0.5 x (1 + tanh u) equals x sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def finish(
    acc, rows, cols, M, N, out, bias, residual, row_scale, col_scale,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    PIXELS=1, FIRST: tl.constexpr = False,
):  # fmt: skip
    """Applies scales, bias, activation and residual in fp32 to a tile of the product. Rounds once, and stores only the
    elements inside the output.

    With ``FIRST``, the output is stored as channels-first images of ``PIXELS`` pixels, and a row of the tile is a
    pixel.
    """
    x = acc.to(tl.float32)
    if HAS_ROW:
        x = x * tl.load(row_scale + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    if HAS_COL:
        x = x * tl.load(col_scale + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        x = x + tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    x = activate(x, ACT)
    if FIRST:
        at = ((rows // PIXELS).to(tl.int64)[:, None] * N + cols[None, :]) * PIXELS + (rows % PIXELS)[:, None]
    else:
        at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    if HAS_RESIDUAL:
        x = x + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiply(x, y, acc, UPCAST: tl.constexpr):
    if UPCAST:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    if x.dtype.is_fp8():
        # Hopper's tensor cores keep 14 bits of an fp8 sum, so each step of K is added up in fp32.
        return tl.dot(x, y, acc, max_num_imprecise_acc=x.shape[1], out_dtype=acc.dtype)
    return tl.dot(x, y, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def tile_of(pid, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Returns the indices of the tile that a program computes. Programs take GROUP rows of tiles at a time, so that
    neighboring programs share operands in the L2 cache."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    per_group = GROUP * tiles_n
    first = (pid // per_group) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    return first + (pid % per_group) % size, (pid % per_group) // size


@triton.jit
def gemm(
    a, b, out, bias, residual, row_scale, col_scale, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    INTEGER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes the GEMM for any strides and alignment.

    With SPLIT > 1, ``out`` is (SPLIT, M, N), and each program writes the sum over its part of K to ``out[part]``.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    part = tl.program_id(1)
    rows = tile_m * BM + tl.arange(0, BM)
    cols = tile_n * BN + tl.arange(0, BN)
    steps = tl.arange(0, BK)
    a_at = a + rows.to(tl.int64)[:, None] * stride_am + steps[None, :].to(tl.int64) * stride_ak
    b_at = b + steps[:, None].to(tl.int64) * stride_bk + cols.to(tl.int64)[None, :] * stride_bn
    acc = tl.zeros((BM, BN), dtype=tl.int32 if INTEGER else tl.float32)
    blocks = tl.cdiv(K, BK)
    for block in range(part, blocks, SPLIT):
        k = block * BK
        here = steps < K - k
        x = tl.load(a_at + k.to(tl.int64) * stride_ak, mask=(rows < M)[:, None] & here[None, :], other=0.0)
        y = tl.load(b_at + k.to(tl.int64) * stride_bk, mask=here[:, None] & (cols < N)[None, :], other=0.0)
        acc = multiply(x, y, acc, UPCAST)
    if SPLIT == 1:
        finish(acc, rows, cols, M, N, out, bias, residual, row_scale, col_scale,
               ACT, HAS_BIAS, HAS_RESIDUAL, HAS_ROW, HAS_COL)  # fmt: skip
    else:
        at = (part * M + rows).to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(out + at, acc, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def sum_parts(
    parts, out, bias, residual, row_scale, col_scale, M, N,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Does the second half of a split-K GEMM: sums the parts in a fixed order, then applies the epilogue."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    acc = tl.zeros((BM, BN), dtype=parts.dtype.element_ty)
    for part in range(SPLIT):
        acc += tl.load(parts + (part * M + rows).to(tl.int64)[:, None] * N + cols[None, :], mask=inside, other=0)
    finish(acc, rows, cols, M, N, out, bias, residual, row_scale, col_scale,
           ACT, HAS_BIAS, HAS_RESIDUAL, HAS_ROW, HAS_COL)  # fmt: skip


@triton.jit
def gemm_tma(
    a, b, out, bias, residual, row_scale, col_scale, M, N, K, PROGRAMS,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    INTEGER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes the persistent GEMM, in which ``PROGRAMS`` programs share the tiles.

    ``a`` is stored as (M, K), and ``b`` as (N, K). The row lengths of both matrices are multiples of 16 bytes.
    """
    a_tiles = tl.make_tensor_descriptor(a, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    b_tiles = tl.make_tensor_descriptor(b, shape=[N, K], strides=[K, 1], block_shape=[BN, BK])
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for pid in tl.range(tl.program_id(0), tiles, PROGRAMS):
        tile_m, tile_n = tile_of(pid, M, N, BM, BN, GROUP)
        acc = tl.zeros((BM, BN), dtype=tl.int32 if INTEGER else tl.float32)
        for block in range(tl.cdiv(K, BK)):
            x = a_tiles.load([tile_m * BM, block * BK])
            y = b_tiles.load([tile_n * BN, block * BK])
            acc = multiply(x, y.T, acc, UPCAST)
        rows = tile_m * BM + tl.arange(0, BM)
        cols = tile_n * BN + tl.arange(0, BN)
        finish(acc, rows, cols, M, N, out, bias, residual, row_scale, col_scale,
               ACT, HAS_BIAS, HAS_RESIDUAL, HAS_ROW, HAS_COL)  # fmt: skip


@triton.jit
def conv2d(
    x, weight, out, bias, residual, row_scale, col_scale, M, N, C, H, W, OH, OW,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    INTEGER: tl.constexpr, UPCAST: tl.constexpr, FIRST: tl.constexpr = False,
):  # fmt: skip
    """Computes the convolution as an implicit GEMM: the rows are output pixels, and the columns are output channels.

    K runs over the channels of each kernel tap, one tap after the other. The layouts are NHWC for images and OHWI for
    weights. With ``FIRST``, the layouts are NCHW and OIHW.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    cols = tile_n * BN + tl.arange(0, BN)
    steps = tl.arange(0, BK)
    image = rows // (OH * OW)
    top = (rows // OW) % OH * SH - PH
    left = rows % OW * SW - PW
    acc = tl.zeros((BM, BN), dtype=tl.int32 if INTEGER else tl.float32)
    blocks = tl.cdiv(C, BK)
    for step in range(KH * KW * blocks):
        tap = step // blocks
        channels = step % blocks * BK + steps
        y_at = top + tap // KW * DH
        x_at = left + tap % KW * DW
        seen = (rows < M) & (y_at >= 0) & (y_at < H) & (x_at >= 0) & (x_at < W)
        if FIRST:
            p_at = ((image.to(tl.int64) * C * H + y_at) * W + x_at)[:, None] + channels.to(tl.int64)[None, :] * H * W
            w_at = (cols.to(tl.int64)[None, :] * C + channels[:, None]) * (KH * KW) + tap
        else:
            p_at = (((image * H + y_at).to(tl.int64) * W + x_at) * C)[:, None] + channels[None, :]
            w_at = ((cols.to(tl.int64) * (KH * KW) + tap) * C)[None, :] + channels[:, None]
        p = tl.load(x + p_at, mask=seen[:, None] & (channels < C)[None, :], other=0.0)
        w = tl.load(weight + w_at, mask=(channels < C)[:, None] & (cols < N)[None, :], other=0.0)
        acc = multiply(p, w, acc, UPCAST)
    finish(acc, rows, cols, M, N, out, bias, residual, row_scale, col_scale,
           ACT, HAS_BIAS, HAS_RESIDUAL, HAS_ROW, HAS_COL, OH * OW, FIRST)  # fmt: skip


@triton.jit
def store_quotients(v, scale, q, at, K, QMAX: tl.constexpr, INTEGER: tl.constexpr):
    r = tl.math.div_rn(v, tl.zeros_like(v) + scale)
    if INTEGER:
        r = tl.where(r != r, 0.0, tl.minimum(tl.maximum(r, -QMAX), QMAX))
        r = (r + 12582912.0) - 12582912.0  # adding 1.5 * 2**23 in fp32 rounds to an integer (half to even)
    else:
        r = tl.where(r != r, r, tl.minimum(tl.maximum(r, -QMAX), QMAX))
    tl.store(q + at, r.to(q.dtype.element_ty), mask=at < K)


@triton.jit
def quantize_rowwise(x, q, scales, K, stride_m, stride_k, QMAX: tl.constexpr, INTEGER: tl.constexpr, BK: tl.constexpr):
    """Quantizes one row per program. Finds the row's largest magnitude, then divides the elements by the scale.

    A NaN in the row makes the scale NaN. The first BK elements stay in registers. If a row is longer than BK, the
    elements after the first BK are read twice.
    """
    row = tl.program_id(0).to(tl.int64)
    steps = tl.arange(0, BK)
    start = x + row * stride_m
    first = tl.load(start + steps.to(tl.int64) * stride_k, mask=steps < K, other=0.0).to(tl.float32)
    nans = (first != first).to(tl.int32)
    largest = tl.where(first != first, 0.0, tl.abs(first))
    for k in range(BK, K, BK):
        v = tl.load(start + (k + steps).to(tl.int64) * stride_k, mask=k + steps < K, other=0.0).to(tl.float32)
        nans = nans | (v != v).to(tl.int32)
        largest = tl.maximum(largest, tl.where(v != v, 0.0, tl.abs(v)))
    top = tl.max(largest, axis=0)
    scale = tl.maximum(tl.math.div_rn(top, QMAX), 1.1754943508222875e-38)
    scale = tl.where(top == 0.0, 1.0, scale)
    scale = tl.where(tl.max(nans, axis=0) > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    store_quotients(first, scale, q + row * K, steps, K, QMAX, INTEGER)
    for k in range(BK, K, BK):
        again = tl.load(start + (k + steps).to(tl.int64) * stride_k, mask=k + steps < K, other=0.0).to(tl.float32)
        store_quotients(again, scale, q + row * K, k + steps, K, QMAX, INTEGER)
