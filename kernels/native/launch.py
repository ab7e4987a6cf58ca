"""Calls the compiled library with tensors."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch

from accel.errors import AccelError, BadConfig, BadFeeds, UnsupportedHere

from ..catalogue.configs import HAND_WRITTEN
from ..catalogue.problem import NAMES
from ..catalogue.reference import TORCH_DTYPES
from ..catalogue.spec import ConvSpec, GemmSpec
from ..catalogue.units import NATIVE, NativeConfig
from .build import CHOSEN, RECORD, find_library, has_code, units_in
from .library import ACTS, DTYPES, Library, Problem


@lru_cache(maxsize=4)
def installed(capability: tuple[int, int] | None = None) -> Library | None:
    """Returns the library that ``accel kernels build`` made for this compute capability (None for any). Loads the
    library only once.

    Returns None if no library was built from the current sources. Raises ``BadConfig`` if ``$ACCEL_KERNEL_LIBRARY``
    names a file that is not a library.
    """
    path = find_library(capability=capability)
    if path is None:
        return None
    try:
        return Library(path)
    except AccelError as error:
        if os.environ.get(CHOSEN):
            raise BadConfig(
                f"the environment variable {CHOSEN} is {path}, which can't be loaded ({error}); set it to a library "
                "that accel kernels build wrote, or unset it"
            ) from error
        return None  # without a usable library, Triton or the reference runs


def names(capability: tuple[int, int] | None = None) -> frozenset[str]:
    """Returns the names of the library's kernels that a GPU of the compute capability ``capability`` can run. Returns
    all names if ``capability`` is None. Every library has the kernels of ``HAND_WRITTEN``. A library may also have
    tensor-core GEMMs.
    """
    library = installed(capability)
    if library is None:
        return frozenset()
    try:
        stamp = library.path.with_name(RECORD).stat().st_mtime_ns
    except OSError:
        stamp = None
    return _names_in(library.path, stamp, tuple(library.gemms), capability)


@lru_cache(maxsize=8)  # cached, because every launch calls this function and the function reads a file
def _names_in(
    path: Path,
    stamp: int | None,  # noqa: ARG001 - the time of the record is part of the cache key
    compiled: tuple[str, ...],
    capability: tuple[int, int] | None,
) -> frozenset[str]:
    units = units_in(path, capability)
    # If a library has no record, assume that it has code for all architectures of its families.
    gemms = (name for name in compiled if units is None or (name in NATIVE and NATIVE[name].unit.name in units))
    return frozenset(gemms) | (frozenset(HAND_WRITTEN) if has_code(path, capability) else frozenset())


def _library_for(device: torch.device) -> tuple[Library, int]:
    """Returns the library for tensors on ``device``, and the current CUDA stream."""
    on_gpu = device.type == "cuda"
    library = installed(torch.cuda.get_device_capability(device) if on_gpu else None)
    if library is None:
        raise UnsupportedHere("no kernel library was built from these sources; run accel kernels build --arch native")
    return library, int(torch.cuda.current_stream(device).cuda_stream) if on_gpu else 0


def run_gemm(
    spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor], config: NativeConfig
) -> torch.Tensor:
    """Computes ``spec`` with the kernel ``config`` of the installed library. ``a`` (M, K) and the transpose (N, K) of
    ``b`` are dense.

    Raises ``BadFeeds`` if the dtype of the residual differs from the dtype of the output. Dispatch calls this function
    only with a residual in the output's dtype.
    """
    e = spec.epilogue
    residual = operands.get("residual")
    if residual is not None and residual.dtype != TORCH_DTYPES[e.out_dtype]:
        raise BadFeeds(
            f"the kernel {config.name} takes a residual in {e.out_dtype}, but the residual has the dtype "
            f"{residual.dtype}; use another kernel"
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
    # The variable ``workspace`` holds the memory until the call is queued in the stream. Afterwards, torch's allocator
    # reuses the memory only for later calls in the same stream.
    workspace = torch.empty(size, dtype=torch.int8, device=a.device)
    problem.workspace, problem.workspace_bytes = workspace.data_ptr() if size else None, size
    library.gemm(config.name, problem)
    return out


def run_gemv(spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """Computes ``spec`` with the hand-written kernel for at most 16 rows.

    ``a`` (M, K) and the transpose (N, K) of ``b`` are dense and may start at any address. The residual and the output
    have the dtype of ``a``.
    """
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
    """Quantizes rows with the hand-written kernel. Returns the values in the dtype ``dtype`` and the scales in fp32."""
    library, stream = _library_for(x.device)
    if x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        x = x.contiguous()
    rows, columns = x.shape
    # In torch, a matrix with one row can have any row stride.
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
    """Returns the matrix that ``spec.gemm`` multiplies. Each row of the matrix is a patch of ``x`` (NHWC, dense)."""
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
    """Returns ``tensor`` as a dense tensor in the dtype that the C interface takes. The address of the result is a
    multiple of 16."""
    tensor = (tensor if name == "residual" else tensor.to(torch.float32)).contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
