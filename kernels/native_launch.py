"""From tensors to a call of the compiled library."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from accel.errors import AccelError, BadConfig, BadFeeds
from accel.kernels.build import CHOSEN, find_library, units_in
from accel.kernels.native import ACTS, DTYPES, Library, Problem
from accel.kernels.reference import TORCH_DTYPES
from accel.kernels.spec import GemmSpec
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


def gemm_names(capability: tuple[int, int] | None = None) -> frozenset[str]:
    """The tensor-core GEMMs that can be called on a GPU of this compute capability (None: that are there)."""
    library = installed(capability)
    if library is None:
        return frozenset()
    units = units_in(library.path, capability)
    # Without the record of its build a library is taken for one with all the architectures of its families.
    return frozenset(
        name for name in library.gemms if units is None or (name in NATIVE and NATIVE[name].unit.name in units)
    )


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
    library = installed(torch.cuda.get_device_capability(a.device))
    assert library is not None
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
        stream=torch.cuda.current_stream(a.device).cuda_stream,
    )
    size = library.gemm_workspace(config.name, problem)
    # Held until the call is in the stream; torch's allocator gives the memory to others only behind it.
    workspace = torch.empty(size, dtype=torch.int8, device=a.device)
    problem.workspace, problem.workspace_bytes = workspace.data_ptr() if size else None, size
    library.gemm(config.name, problem)
    return out


def _operand(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Dense, in the dtype that the interface takes, at an address of a multiple of 16."""
    tensor = (tensor if name == "residual" else tensor.to(torch.float32)).contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
