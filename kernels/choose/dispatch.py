"""Runs a problem on its tensors with the implementation that ``choices`` chooses for this GPU.

The choice depends on the GPU, the compiled library and the tuned table.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from ..catalogue import reference
from ..catalogue.configs import Config, HandWritten
from ..catalogue.problem import NAMES
from ..catalogue.reference import TORCH_DTYPES
from ..catalogue.spec import BYTES, ConvSpec, GemmSpec
from ..catalogue.units import NativeConfig
from . import tuned
from .choices import AnyConfig, Choice, choose, choose_quantize, of_patches

# A convolution processes its images in groups. The patches of one group take about PATCH_BYTES bytes.
PATCH_BYTES = 256 << 20


def why(
    spec: GemmSpec | ConvSpec,
    capability: tuple[int, int] | None,
    *,
    tma_layout: bool = False,
    dense: bool = False,
    native: Collection[str] | None = None,
    residual_dtype: str | None = None,
    tuned_name: str | None = None,
    vectors: bool = False,
) -> str:
    """Says in one sentence which implementation would run, and why. ``choose`` explains the arguments.

    If ``native`` is None, the kernels of the built library are used. If ``tuned_name`` is None and the current GPU has
    the compute capability ``capability``, the tuner's choice for the current GPU is used.
    """
    if native is None:
        native = native_names(capability)
    if tuned_name is None and torch.cuda.is_available() and capability == torch.cuda.get_device_capability():
        tuned_name = _tuned_name(spec, torch.device("cuda"))
    choice = choose(
        spec,
        capability,
        tma_layout=tma_layout,
        dense=dense,
        triton_installed=has_triton(),
        native=native,
        residual_dtype=residual_dtype,
        tuned_name=tuned_name,
        vectors=vectors,
    )
    return str(choice)


def run_gemm(spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """Computes ``spec`` with the chosen implementation."""
    config = choose_for(spec, a, b, operands).config
    if config is None:
        wide = reference.gemm_torch(spec, a, b, operands, compute=_sums(spec, a.device))
        return wide.to(TORCH_DTYPES[spec.epilogue.out_dtype])
    with _on(a.device):
        return run_config(spec, a, b, operands, config)


def run_conv2d(
    spec: ConvSpec, x: torch.Tensor, weight: torch.Tensor, operands: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Computes ``spec`` with the chosen implementation. ``x`` and the result are NHWC."""
    config = choose_for(spec, x, weight, operands).config
    if config is None:
        wide = reference.conv2d_torch(spec, x, weight, operands, compute=_sums(spec, x.device))
        return wide.to(TORCH_DTYPES[spec.epilogue.out_dtype]).contiguous()
    with _on(x.device):
        return run_config(spec, x, weight, operands, config)


def _sums(spec: GemmSpec | ConvSpec, device: torch.device) -> torch.dtype:
    """Returns the dtype in which the reference sums products. For fp32 operands on a GPU, the reference sums in
    float64, because torch may multiply fp32 in tf32."""
    return torch.float64 if spec.in_dtype == "fp32" and device.type == "cuda" else torch.float32


def run_config(
    spec: GemmSpec | ConvSpec,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: dict[str, torch.Tensor],
    config: AnyConfig,
) -> torch.Tensor:
    """Computes ``spec`` with the configuration ``config`` on the current GPU.

    For a convolution, ``a`` is the image and ``b`` the weights.
    """
    if isinstance(config, Config):
        from ..triton import kernels as triton_kernels
        from ..triton import launch as triton_launch

        if isinstance(spec, ConvSpec):
            return triton_launch.run_conv2d(spec, a, b, operands, config, triton_kernels)
        return triton_launch.run_gemm(spec, a, b, operands, config, triton_kernels)
    if isinstance(spec, ConvSpec):
        return _by_patches(spec, a, b, operands)
    from ..native import launch as native_launch

    if isinstance(config, NativeConfig):
        return native_launch.run_gemm(spec, a, b, operands, config)
    return native_launch.run_gemv(spec, a, b, operands)


def _by_patches(
    spec: ConvSpec, x: torch.Tensor, weight: torch.Tensor, operands: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Computes a convolution as the product of its patches and its weights, some images at a time to save memory.

    With a 3x3 kernel, the patches are nine times as large as the images.
    """
    from ..native import launch as native_launch

    x, matrix = x.contiguous(), weight.contiguous().reshape(spec.c_out, -1).t()
    pixels = spec.out_height * spec.out_width
    at_once = max(1, PATCH_BYTES // (pixels * spec.gemm.k * BYTES[spec.in_dtype]))
    parts = []
    for first in range(0, spec.images, at_once):
        images = slice(first, first + at_once)
        part = replace(spec, images=min(at_once, spec.images - first))
        given = dict(operands)
        if "residual" in given:
            given["residual"] = given["residual"][images].reshape(-1, spec.c_out)
        parts.append(_product_of_patches(part, native_launch.im2col(part, x[images]), matrix, given))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(spec.images, spec.out_height, spec.out_width, spec.c_out)


def _product_of_patches(
    spec: ConvSpec, columns: torch.Tensor, matrix: torch.Tensor, operands: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Multiplies the patches of some images by the convolution's weights, with a kernel of the compiled library.

    Chooses the kernel again in each call, because the last group of images may be smaller, and another kernel may suit
    its size.
    """
    capability = capability_of(columns)
    assert capability is not None
    native = native_names(capability)
    residual = NAMES[operands["residual"].dtype] if "residual" in operands else None
    config = of_patches(spec, capability, is_tma_layout(columns, matrix), native, residual).config
    assert config is not None
    return run_config(spec.gemm, columns, matrix, operands, config)


def run_quantize(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows with the chosen implementation."""
    capability = capability_of(x)
    native = native_names(capability) if capability else ()
    config = choose_quantize(dtype, capability, triton_installed=has_triton(), native=native).config
    if config is None:
        return reference.quantize_rowwise_torch(x, dtype)
    with _on(x.device):
        if isinstance(config, HandWritten):
            from ..native import launch as native_launch

            return native_launch.run_quantize(x, dtype)
        from ..triton import kernels as triton_kernels
        from ..triton import launch as triton_launch

        return triton_launch.run_quantize(x, dtype, triton_kernels)


def choose_for(
    spec: GemmSpec | ConvSpec,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, torch.Tensor] | None = None,
) -> Choice:
    """Chooses the implementation of ``spec`` for these tensors. ``operands`` are the operands of the epilogue."""
    residual = (operands or {}).get("residual")
    capability = capability_of(a)
    if capability is None:
        return choose(spec, None)
    return _choose_again(
        spec,
        capability,
        tma_layout=is_tma_layout(a, b),
        dense=is_dense(a, b),
        triton_installed=has_triton(),
        native=frozenset(native_names(capability)),
        residual_dtype=None if residual is None else NAMES[residual.dtype],
        tuned_name=_tuned_name(spec, a.device),
        vectors=in_vectors(a, b),
    )


_choose_again = lru_cache(maxsize=4096)(choose)  # cached, because all layers and steps repeat the same choices


def capability_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Returns the compute capability of the tensor's GPU, or None on the CPU."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def is_dense(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether ``a`` (M, K) and the transpose (N, K) of ``b`` are dense.

    Returns True for a convolution, because a convolution's image and weights are made dense if needed.
    """
    return b.dim() == 4 or (a.is_contiguous() and b.t().is_contiguous())


def is_tma_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether TMA can load ``a`` (M, K) and ``b`` (K, N), or a convolution's weights (see ``choose``)."""
    if b.dim() == 4:  # patches and copied weights are in new memory, which is aligned
        return not b.is_contiguous() or b.data_ptr() % 16 == 0
    return is_dense(a, b) and a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0


def in_vectors(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether Triton can load ``a`` and ``b`` in vectors. The image and weights of a convolution are made dense
    if needed."""
    if b.dim() == 4:
        return all(not t.is_contiguous() or t.data_ptr() % 16 == 0 for t in (a, b))
    along = all(1 in t.stride() and all(stride == 1 or stride % 16 == 0 for stride in t.stride()) for t in (a, b))
    return along and a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0


@cache
def device_of(index: int) -> tuned.Device:
    """Describes a GPU, its driver and its kernels for the tuned table."""
    from ..native.build import sources_digest

    capability = torch.cuda.get_device_capability(index)
    digest = hashlib.sha256(sources_digest().encode())
    for file in ("triton/kernels.py", "triton/launch.py", "catalogue/configs.py"):
        digest.update((Path(__file__).parents[1] / file).read_bytes())
    versions = [_triton_version(), *sorted(native_names(capability))]
    digest.update(" ".join(versions).encode())
    return tuned.Device(
        gpu=torch.cuda.get_device_name(index),
        capability=capability,
        driver=driver_version(),
        library=digest.hexdigest()[:16],
    )


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Returns the version of the loaded driver, such as ``580.65.06``.

    If ``file`` can't be read, returns the driver's CUDA version, such as ``13000``. Most driver updates don't change
    the CUDA version. Returns 0 without a driver.
    """
    with contextlib.suppress(OSError):
        if found := re.search(r"^NVRM version: .*?\s(\d+(?:\.\d+)+)\s", file.read_text(), re.MULTILINE):
            return found[1]
    return str(getattr(torch._C, "_cuda_getDriverVersion", int)())


def _triton_version() -> str:
    """Returns the version of Triton, or "" if Triton isn't installed.

    PyTorch's own builds of Triton have other package names, such as pytorch-triton.
    """
    if not has_triton():
        return ""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module("triton").__version__)


def _tuned_name(spec: GemmSpec | ConvSpec, device: torch.device) -> str | None:
    table = tuned.current()
    if table is None or not table.entries:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    entry = table.get(tuned.key_of(spec, device_of(index)))
    return entry.config if entry else None


def native_names(capability: tuple[int, int] | None = None) -> frozenset[str]:
    """Returns the kernels of the compiled library for this compute capability (None for any).

    Returns an empty set if there is no library.
    """
    from ..native import launch as native_launch

    return native_launch.names(capability)


@cache
def has_triton() -> bool:
    """Tells whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
