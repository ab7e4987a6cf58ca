"""Which implementation a problem gets, and why.

Compute capability and layout say what can run it; of those the tuned one is taken, else one by size; what no kernel
takes is computed by the reference, in the same dtype semantics. The dtype of a problem is never changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from accel.errors import UnsupportedHere
from accel.kernels import reference, tuned
from accel.kernels.configs import ARCHS, CONFIGS, FIRST_FP8, HAND_WRITTEN, TMA_ARCHS, Config, HandWritten, get
from accel.kernels.problem import NAMES
from accel.kernels.reference import TORCH_DTYPES
from accel.kernels.spec import BYTES, ConvSpec, GemmSpec
from accel.kernels.units import NATIVE, NativeConfig

SMALL_M = 16
# A tile is large enough where this many of them fill the chip: the multiprocessors of the smallest data-centre GPU.
ENOUGH_TILES = 108
# The patches of so many bytes are multiplied at a time, where a convolution is computed from its patches.
PATCH_BYTES = 256 << 20
AnyConfig = Config | NativeConfig | HandWritten


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An implementation, its configuration (None: the reference) and the reason it was taken."""

    config: AnyConfig | None
    reason: str

    def __str__(self) -> str:
        if self.config is None:
            return f"reference: {self.reason}"
        kind = {NativeConfig: "cutlass", HandWritten: "cuda"}.get(type(self.config), "triton")
        return f"{kind} {self.config.name}: {self.reason}"


def family(capability: tuple[int, int]) -> int | None:
    """The architecture whose configurations run on this compute capability; None under 8.0."""
    number = capability[0] * 10 + capability[1]
    fitting = [arch for arch in ARCHS if arch <= number]
    return fitting[-1] if fitting else None


def native_arch(capability: tuple[int, int]) -> str:
    """What a library for a GPU of this compute capability is compiled for: ``sm_90a`` for 9.0.

    Raises ``UnsupportedHere`` below 8.0.
    """
    arch = family(capability)
    if arch is None:
        raise UnsupportedHere(f"compute capability {capability[0]}.{capability[1]} is below 8.0; no kernel is for it")
    # From 9.0 on the tensor cores are the architecture's own, and what uses them runs on no later one.
    return f"sm_{arch}" + ("a" if arch >= 90 and capability == divmod(arch, 10) else "")


def candidates(
    spec: GemmSpec | ConvSpec,
    capability: tuple[int, int],
    *,
    tma_layout: bool = False,
    dense: bool = False,
    triton_installed: bool = True,
    native: Collection[str] = (),
    residual_dtype: str | None = None,
) -> list[AnyConfig]:
    """Every configuration that computes ``spec`` on this compute capability; the arguments are those of ``choose``."""
    arch = family(capability)
    if arch is None:
        return []
    op = "conv2d" if isinstance(spec, ConvSpec) else "gemm"
    found: list[AnyConfig] = []
    if triton_installed:
        found += [c for c in CONFIGS if c.op == op and c.supports(spec.in_dtype, arch)]
    # The compiled kernels read a residual in the output's dtype; rounding another one to that would lose what the sum
    # keeps.
    own_residual = residual_dtype in (None, spec.epilogue.out_dtype) or not spec.epilogue.residual
    if isinstance(spec, ConvSpec):
        if "im2col" in native and _of_patches(spec, capability, tma_layout, native, residual_dtype).config is not None:
            found.append(HAND_WRITTEN["im2col"])
        return found
    aligned = _is_aligned(spec, tma_layout)
    found = [c for c in found if aligned or not isinstance(c, Config) or c.kernel != "gemm_tma"]
    if aligned and own_residual and spec.n * BYTES[spec.epilogue.out_dtype] % 16 == 0:
        here = (NATIVE[name] for name in sorted(native) if name in NATIVE)
        pair = (spec.in_dtype, spec.epilogue.out_dtype)
        found += [c for c in here if (c.unit.dtype, c.unit.out_dtype) == pair and c.runs_on(capability)]
    gemv = HAND_WRITTEN["gemv"]
    own_dtype = spec.in_dtype in gemv.dtypes and spec.epilogue.out_dtype == spec.in_dtype
    if gemv.name in native and own_dtype and own_residual and spec.m <= gemv.tile[0] and (dense or tma_layout):
        found.append(gemv)
    return found


def _is_aligned(spec: GemmSpec, tma_layout: bool) -> bool:
    """Whether every row of both operands starts at a multiple of 16 bytes."""
    return tma_layout and spec.k * BYTES[spec.in_dtype] % 16 == 0


def _of_patches(
    spec: ConvSpec,
    capability: tuple[int, int],
    tma_layout: bool,
    native: Collection[str],
    residual_dtype: str | None,
) -> Choice:
    """What multiplies a convolution's patches: a kernel of the compiled library, or none."""
    return choose(
        spec.gemm,
        capability,
        tma_layout=tma_layout,
        dense=True,
        triton_installed=False,
        native=native,
        residual_dtype=residual_dtype,
    )


def choose(
    spec: GemmSpec | ConvSpec,
    capability: tuple[int, int] | None,
    *,
    tma_layout: bool = False,
    dense: bool = False,
    triton_installed: bool = True,
    native: Collection[str] = (),
    residual_dtype: str | None = None,
    tuned_name: str | None = None,
    vectors: bool = False,
) -> Choice:
    """The implementation of ``spec`` on a device of this compute capability (None: the CPU).

    ``dense``: ``a`` is (M, K) and ``b`` (N, K) transposed, both dense. ``tma_layout``: so, and both at addresses of a
    multiple of 16; of a convolution, its weights are. ``native``: the kernels of the compiled library, CUTLASS's and
    ``HAND_WRITTEN``. ``residual_dtype``: None for that of the output. ``tuned_name``:
    what the tuner found for this problem. ``vectors``: of each operand one stride is 1, the others and the address are
    multiples of 16; see ``in_vectors``.
    """
    if capability is None:
        return Choice(config=None, reason="the CPU runs the reference")
    arch = family(capability)
    if arch is None:
        return Choice(config=None, reason=f"compute capability {capability[0]}.{capability[1]} is below 8.0")
    if spec.in_dtype == "fp8_e4m3" and arch < FIRST_FP8:
        return Choice(config=None, reason=f"sm_{arch} has no fp8 products; they begin with sm_89")
    usable = candidates(
        spec,
        capability,
        tma_layout=tma_layout,
        dense=dense,
        triton_installed=triton_installed,
        native=native,
        residual_dtype=residual_dtype,
    )
    by_name = {config.name: config for config in usable}
    if tuned_name in by_name:
        return Choice(config=by_name[tuned_name], reason="the fastest that accel kernels tune found for this problem")
    if not triton_installed and not usable:
        return Choice(config=None, reason='Triton is not installed; run: pip install "accel-toolchain[kernels]"')
    if isinstance(spec, ConvSpec):
        if not triton_installed:
            product = _of_patches(spec, capability, tma_layout, native, residual_dtype)
            reason = f"Triton, which takes a convolution whole, is not installed; its patches by {product}"
            return Choice(config=HAND_WRITTEN["im2col"], reason=reason)
        large = spec.gemm.m >= 4096 and spec.gemm.n >= 64 and spec.in_dtype != "fp32"
        large = large and vectors and spec.c_in % 16 == spec.c_out % 16 == 0  # else a large tile spills
        name = "conv2d_128x64" if large else "conv2d_64x64"
        return Choice(config=get(name), reason=f"{spec.gemm.m} output pixels x {spec.c_out} channels on sm_{arch}")
    compiled = [config for config in usable if isinstance(config, NativeConfig)]
    if compiled and (spec.m > SMALL_M or not triton_installed):
        return _by_tiles(spec, compiled)
    if "gemv" in by_name and (reason := _why_gemv(spec, tma_layout, triton_installed)):
        return Choice(config=by_name["gemv"], reason=f"M = {spec.m} <= {SMALL_M}, {reason}")
    if spec.in_dtype == "fp32":
        return Choice(config=get("gemm_64x64"), reason="fp32 products run on the plain cores, never as tf32")
    if spec.m <= SMALL_M:
        return Choice(config=get("gemm_16x64_split"), reason=f"M = {spec.m} <= {SMALL_M}: K is split over the chip")
    if min(spec.m, spec.n) < 128:
        return Choice(config=get("gemm_64x64"), reason="M or N is below 128")
    if "gemm_tma_128x128" in by_name and arch in TMA_ARCHS and spec.n % 16 == 0:
        return Choice(config=get("gemm_tma_128x128"), reason=f"sm_{arch}, dense operands with rows of 16 bytes")
    if spec.n % 16 or spec.k % 16 or not (vectors or tma_layout):
        odd = "N, K, a stride or an address is no multiple of 16"
        return Choice(config=get("gemm_64x64"), reason=f"{odd}: a larger tile spills its registers")
    return Choice(config=get("gemm_128x128"), reason=f"sm_{arch}, M and N of at least 128")


def _why_gemv(spec: GemmSpec, tma_layout: bool, triton_installed: bool) -> str:
    """What speaks for one block a column of the output, element by element; empty where tiles are better."""
    if not triton_installed:
        return "and Triton is not installed"
    if spec.in_dtype == "fp32":
        return "fp32 products run on the plain cores, never as tf32"
    return "" if _is_aligned(spec, tma_layout) else "rows that don't start at a multiple of 16 bytes"


def _by_tiles(spec: GemmSpec, compiled: list[NativeConfig]) -> Choice:
    """The largest tile of which there are enough, in the family made for this GPU; else the smallest that is there."""
    newest = max(config.unit.family.least for config in compiled)
    own = [config for config in compiled if config.unit.family.least == newest]

    def tiles(config: NativeConfig) -> int:
        return -(-spec.m // config.block_m) * -(-spec.n // config.block_n)

    by_size = sorted(own, key=lambda config: (config.block_m * config.block_n, config.name))
    # A tile taller than M computes rows that nobody wants.
    fitting = [config for config in by_size if config.block_m < 2 * spec.m] or by_size[:1]
    enough = [config for config in fitting if tiles(config) >= ENOUGH_TILES]
    chosen = enough[-1] if enough else fitting[0]
    return Choice(config=chosen, reason=f"{tiles(chosen)} tiles of {chosen.block_m}x{chosen.block_n}, not tuned")


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
    """One sentence: what would run and why; the arguments are those of ``choose``.

    ``native``: None for the kernels of the library that is built. ``tuned_name``: None for what the tuner found on the
    current GPU, where that one has this compute capability.
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
    """``spec`` by the chosen implementation."""
    config = choose_for(spec, a, b, operands).config
    if config is None:
        wide = reference.gemm_torch(spec, a, b, operands, compute=_sums(spec, a.device))
        return wide.to(TORCH_DTYPES[spec.epilogue.out_dtype])
    with _on(a.device):
        return run_config(spec, a, b, operands, config)


def run_conv2d(
    spec: ConvSpec, x: torch.Tensor, weight: torch.Tensor, operands: dict[str, torch.Tensor]
) -> torch.Tensor:
    """``spec`` by the chosen implementation."""
    config = choose_for(spec, x, weight, operands).config
    if config is None:
        wide = reference.conv2d_torch(spec, x, weight, operands, compute=_sums(spec, x.device))
        return wide.to(TORCH_DTYPES[spec.epilogue.out_dtype]).contiguous()
    with _on(x.device):
        return run_config(spec, x, weight, operands, config)


def _sums(spec: GemmSpec | ConvSpec, device: torch.device) -> torch.dtype:
    """What the reference sums in. On a GPU torch may multiply fp32 as tf32, which holds every other dtype, not that."""
    return torch.float64 if spec.in_dtype == "fp32" and device.type == "cuda" else torch.float32


def run_config(
    spec: GemmSpec | ConvSpec,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: dict[str, torch.Tensor],
    config: AnyConfig,
) -> torch.Tensor:
    """``spec`` by one configuration, on the current GPU; ``a`` and ``b`` are image and weights of a convolution."""
    if isinstance(config, Config):
        from accel.kernels import triton_kernels, triton_launch

        if isinstance(spec, ConvSpec):
            return triton_launch.run_conv2d(spec, a, b, operands, config, triton_kernels)
        return triton_launch.run_gemm(spec, a, b, operands, config, triton_kernels)
    if isinstance(spec, ConvSpec):
        return _by_patches(spec, a, b, operands)
    from accel.kernels import native_launch

    if isinstance(config, NativeConfig):
        return native_launch.run_gemm(spec, a, b, operands, config)
    return native_launch.run_gemv(spec, a, b, operands)


def _by_patches(
    spec: ConvSpec, x: torch.Tensor, weight: torch.Tensor, operands: dict[str, torch.Tensor]
) -> torch.Tensor:
    """A convolution as the product of its patches, some images at a time: their patches are ``kernel`` times as large
    as they are."""
    from accel.kernels import native_launch

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
    """By the compiled library, as the choice was made; also for the last images, which may be fewer."""
    capability = capability_of(columns)
    assert capability is not None
    native = native_names(capability)
    residual = NAMES[operands["residual"].dtype] if "residual" in operands else None
    config = _of_patches(spec, capability, is_tma_layout(columns, matrix), native, residual).config
    assert config is not None
    return run_config(spec.gemm, columns, matrix, operands, config)


def choose_quantize(
    dtype: str, capability: tuple[int, int] | None, *, triton_installed: bool = True, native: Collection[str] = ()
) -> Choice:
    """What quantizes rows to ``dtype`` on a device of this compute capability (None: the CPU)."""
    if capability is None:
        return Choice(config=None, reason="the CPU runs the reference")
    arch = family(capability)
    if arch is None:
        return Choice(config=None, reason=f"compute capability {capability[0]}.{capability[1]} is below 8.0")
    converts = dtype != "fp8_e4m3" or arch >= FIRST_FP8
    if triton_installed and converts:
        return Choice(config=get("quantize_8192"), reason=f"a program a row on sm_{arch}")
    lacking = "Triton is not installed" if converts else f"sm_{arch} has no fp8 conversion; they begin with sm_89"
    if "quantize_rowwise" in native:
        return Choice(config=HAND_WRITTEN["quantize_rowwise"], reason=f"{lacking}; the compiled library has its own")
    return Choice(config=None, reason=lacking)


def run_quantize(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-wise quantization by the chosen implementation."""
    capability = capability_of(x)
    native = native_names(capability) if capability else ()
    config = choose_quantize(dtype, capability, triton_installed=has_triton(), native=native).config
    if config is None:
        return reference.quantize_rowwise_torch(x, dtype)
    with _on(x.device):
        if isinstance(config, HandWritten):
            from accel.kernels import native_launch

            return native_launch.run_quantize(x, dtype)
        from accel.kernels import triton_kernels, triton_launch

        return triton_launch.run_quantize(x, dtype, triton_kernels)


def choose_for(
    spec: GemmSpec | ConvSpec,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, torch.Tensor] | None = None,
) -> Choice:
    """The implementation of ``spec`` for these tensors; ``operands``: the epilogue's."""
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


_choose_again = lru_cache(maxsize=4096)(choose)  # a model asks the same in every layer and every step


def capability_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The compute capability of the GPU that a tensor is on; None on the CPU."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def is_dense(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a`` (M, K) and ``b`` (K, N), transposed, are dense; image and weights are made so where they aren't."""
    return b.dim() == 4 or (a.is_contiguous() and b.t().is_contiguous())


def is_tma_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a`` (M, K) and ``b`` (K, N), or a convolution's weights, lie as TMA wants them: see ``choose``."""
    if b.dim() == 4:  # its patches are memory of their own, and so are weights that have to be made dense
        return not b.is_contiguous() or b.data_ptr() % 16 == 0
    return is_dense(a, b) and a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0


def in_vectors(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether Triton can load ``a`` and ``b`` in vectors; image and weights are made dense where they aren't."""
    if b.dim() == 4:
        return all(not t.is_contiguous() or t.data_ptr() % 16 == 0 for t in (a, b))
    along = all(1 in t.stride() and all(stride == 1 or stride % 16 == 0 for stride in t.stride()) for t in (a, b))
    return along and a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0


@cache
def device_of(index: int) -> tuned.Device:
    """This GPU, its driver and the kernels that are here: what a measurement holds for."""
    from accel.kernels.build import sources_digest

    capability = torch.cuda.get_device_capability(index)
    digest = hashlib.sha256(sources_digest().encode())
    for module in ("triton_kernels", "triton_launch", "configs"):
        digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    versions = [_triton_version(), *sorted(native_names(capability))]
    digest.update(" ".join(versions).encode())
    return tuned.Device(
        gpu=torch.cuda.get_device_name(index),
        capability=capability,
        driver=driver_version(),
        library=digest.hexdigest()[:16],
    )


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Of the driver that is loaded, ``580.65.06``. Where the system doesn't say so, of the CUDA that it offers, 13000,
    which most updates leave as it is; 0 where there is no driver."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^NVRM version: .*?\s(\d+(?:\.\d+)+)\s", file.read_text(), re.MULTILINE):
            return found[1]
    return str(getattr(torch._C, "_cuda_getDriverVersion", int)())


def _triton_version() -> str:
    """Empty where there is none. Builds of PyTorch bring it under other names (pytorch-triton), which the installer's
    records are asked by."""
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
    """The kernels that the compiled library has for a GPU of this compute capability (None: for any), none where there
    is no library."""
    from accel.kernels import native_launch

    return native_launch.names(capability)


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
