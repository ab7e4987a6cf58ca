"""From tensors to a call of the compiled library."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch

from accel.errors import AccelError, BadConfig, BadFeeds, UnsupportedHere
from accel.kernels.build import CHOSEN, RECORD, find_library, has_code, units_in
from accel.kernels.configs import HAND_WRITTEN
from accel.kernels.native import ACTS, DTYPES, Library, Problem
from accel.kernels.problem import NAMES
from accel.kernels.reference import TORCH_DTYPES
from accel.kernels.spec import ConvSpec, GemmSpec
from accel.kernels.units import NATIVE, NativeConfig


@lru_cache(maxsize=4)
def installed(capability: tuple[int, int] | None = None) -> Library | None:
    """The library of ``accel kernels build`` for a GPU of this compute capability (None: any), loaded once; None where
    none was built for these sources. Raises ``BadConfig`` where ``$ACCEL_KERNEL_LIBRARY`` names no library."""
    path = find_library(capability=capability)
    if path is None:
        return None
    try:
        return Library(path)
    except AccelError as error:
        if os.environ.get(CHOSEN):
            raise BadConfig(
                f"{CHOSEN} is {path}, which can't be loaded ({error}); set it to a library that accel kernels build "
                "wrote, or unset it"
            ) from error
        return None  # damaged: Triton and the reference are there


def names(capability: tuple[int, int] | None = None) -> frozenset[str]:
    """The kernels that can be called on a GPU of this compute capability (None: that are there): the tensor-core GEMMs
    and, in every library, those of ``HAND_WRITTEN``."""
    library = installed(capability)
    if library is None:
        return frozenset()
    try:
        stamp = library.path.with_name(RECORD).stat().st_mtime_ns
    except OSError:
        stamp = None
    return _names_in(library.path, stamp, tuple(library.gemms), capability)


@lru_cache(maxsize=8)  # asked before every launch, and the record of the build is a file
def _names_in(
    path: Path,
    stamp: int | None,  # noqa: ARG001 - the time of the record is part of the key
    compiled: tuple[str, ...],
    capability: tuple[int, int] | None,
) -> frozenset[str]:
    units = units_in(path, capability)
    # Without the record of its build a library is taken for one with all the architectures of its families.
    gemms = (name for name in compiled if units is None or (name in NATIVE and NATIVE[name].unit.name in units))
    return frozenset(gemms) | (frozenset(HAND_WRITTEN) if has_code(path, capability) else frozenset())


def _library_for(device: torch.device) -> tuple[Library, int]:
    """The library for tensors on ``device`` and the stream that its kernels go into."""
    on_gpu = device.type == "cuda"
    library = installed(torch.cuda.get_device_capability(device) if on_gpu else None)
    if library is None:
        raise UnsupportedHere("no kernel library of these sources here; run accel kernels build --arch native")
    return library, int(torch.cuda.current_stream(device).cuda_stream) if on_gpu else 0


def run_gemm(
    spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor], config: NativeConfig
) -> torch.Tensor:
    """``spec`` by ``config`` of the installed library: ``a`` (M, K) and ``b`` (N, K) transposed, both dense.

    Raises ``BadFeeds`` for a residual that isn't in the output's dtype (dispatch hands in none).
    """
    e = spec.epilogue
    residual = operands.get("residual")
    if residual is not None and residual.dtype != TORCH_DTYPES[e.out_dtype]:
        raise BadFeeds(
            f"{config.name} takes a residual in {e.out_dtype}, this is {residual.dtype}; take another kernel"
        )
    library, stream = _library_for(a.device)
    out = torch.empty(spec.m, spec.n, dtype=TORCH_DTYPES[e.out_dtype], device=a.device)
    given = {name: _operand(name, tensor) for name, tensor in operands.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in given.items()}
    problem = Problem(
        a=a.data_ptr(),
        b=b.data_ptr(),
        out=out.data_ptr(),
        **addresses,
        m=spec.m,
        n=spec.n,
        k=spec.k,
        dtype=DTYPES[spec.in_dtype],
        out_dtype=DTYPES[e.out_dtype],
        act=ACTS[e.act],
        stream=stream,
    )
    size = library.gemm_workspace(config.name, problem)
    # Held until the call is in the stream; torch's allocator gives the memory to others only behind it.
    workspace = torch.empty(size, dtype=torch.int8, device=a.device)
    problem.workspace, problem.workspace_bytes = workspace.data_ptr() if size else None, size
    library.gemm(config.name, problem)
    return out


def run_gemv(spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """``spec`` by the hand-written kernel for at most 16 rows: ``a`` (M, K) and ``b`` (N, K) transposed, both dense, at
    any address; the residual in the output's dtype, which is that of ``a``."""
    library, stream = _library_for(a.device)
    out = torch.empty(spec.m, spec.n, dtype=a.dtype, device=a.device)
    given = {name: _operand(name, tensor) for name, tensor in operands.items()}
    library.gemv(
        a.data_ptr(),
        b.data_ptr(),
        out.data_ptr(),
        **{name: tensor.data_ptr() for name, tensor in given.items()},
        dtype=spec.in_dtype,
        act=spec.epilogue.act,
        m=spec.m,
        n=spec.n,
        k=spec.k,
        stream=stream,
    )
    return out


def run_quantize(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-wise quantization by the hand-written kernel: values in ``dtype`` and fp32 scales."""
    library, stream = _library_for(x.device)
    if x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        x = x.contiguous()
    rows, columns = x.shape
    # torch gives a matrix of one row whatever stride it was cut out with.
    row_stride = columns if rows == 1 else x.stride(0)
    q = torch.empty(x.shape, dtype=TORCH_DTYPES[dtype], device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    library.quantize_rowwise(
        x.data_ptr(),
        NAMES[x.dtype],
        q.data_ptr(),
        dtype,
        scales.data_ptr(),
        rows,
        columns,
        row_stride,
        stream,
    )
    return q, scales


def im2col(spec: ConvSpec, x: torch.Tensor) -> torch.Tensor:
    """The patches of ``x`` (NHWC, dense) as the rows of a matrix: what ``spec.gemm`` multiplies."""
    library, stream = _library_for(x.device)
    columns = torch.empty(spec.gemm.m, spec.gemm.k, dtype=x.dtype, device=x.device)
    library.im2col(
        x.data_ptr(),
        columns.data_ptr(),
        x.element_size(),
        (spec.images, spec.height, spec.width, spec.c_in),
        (*spec.kernel, *spec.stride, *spec.padding, *spec.dilation),
        stream,
    )
    return columns


def _operand(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Dense, in the dtype that the interface takes, at an address of a multiple of 16."""
    tensor = (tensor if name == "residual" else tensor.to(torch.float32)).contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
