"""From tensors to a call of the compiled library."""

from __future__ import annotations

from functools import lru_cache

import torch

from accel.errors import AccelError
from accel.kernels.build import find_library
from accel.kernels.native import ACTS, DTYPES, Library, Problem
from accel.kernels.reference import TORCH_DTYPES
from accel.kernels.spec import GemmSpec
from accel.kernels.units import NativeConfig


@lru_cache(maxsize=1)
def installed() -> Library | None:
    """The library of ``accel kernels build``, loaded once; None where none was built for these sources."""
    path = find_library()
    try:
        return Library(path) if path is not None and path.is_file() else None
    except AccelError:  # of another version: Triton and the reference are there
        return None


def gemm_names() -> frozenset[str]:
    """The tensor-core GEMMs that can be called."""
    library = installed()
    return frozenset(library.gemms) if library else frozenset()


def run_gemm(
    spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor], config: NativeConfig
) -> torch.Tensor:
    """``spec`` by ``config`` of the installed library: ``a`` (M, K) and ``b`` (N, K) transposed, both dense."""
    library = installed()
    assert library is not None
    e = spec.epilogue
    out = torch.empty(spec.m, spec.n, dtype=TORCH_DTYPES[e.out_dtype], device=a.device)
    given = {name: _operand(name, tensor, out.dtype) for name, tensor in operands.items()}
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


def _operand(name: str, tensor: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Dense, in the dtype that the interface takes, at an address of a multiple of 16."""
    tensor = tensor.to(out_dtype if name == "residual" else torch.float32).contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
