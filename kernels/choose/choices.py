"""Chooses the implementation that computes a problem.

The GPU's compute capability and the layout of the operands decide which kernels can run. The tuner's choice is
preferred. Without a tuner's choice, the sizes of the problem decide which kernel runs. If no kernel can run, the
reference computes the problem. The output has the same dtype in every implementation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from accel.errors import MissingExtra, UnsupportedHere

from ..catalogue.configs import ARCHS, CONFIGS, FIRST_FP8, HAND_WRITTEN, TMA_ARCHS, Config, HandWritten, get
from ..catalogue.spec import BYTES, ConvSpec, GemmSpec
from ..catalogue.units import NATIVE, NativeConfig

SMALL_M = 16
# A problem needs at least ENOUGH_TILES tiles to fill a GPU. The smallest data-center GPU has 108 multiprocessors. A
# tile size that gives fewer than ENOUGH_TILES tiles is too large for the problem. Of a small tile, half as many are
# enough, because a still smaller tile reads its operands more often. On an H200 that takes longer.
ENOUGH_TILES = 108
SMALL_TILE = 64 * 64
AnyConfig = Config | NativeConfig | HandWritten


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Holds the configuration of the chosen implementation (None for the reference) and the reason for the choice."""

    config: AnyConfig | None
    reason: str

    def __str__(self) -> str:
        if self.config is None:
            return f"reference: {self.reason}"
        kind = {NativeConfig: "cutlass", HandWritten: "cuda"}.get(type(self.config), "triton")
        return f"{kind} {self.config.name}: {self.reason}"


def family(capability: tuple[int, int]) -> int | None:
    """Returns the architecture whose configurations run on this compute capability, or None below 8.0."""
    number = capability[0] * 10 + capability[1]
    fitting = [arch for arch in ARCHS if arch <= number]
    return fitting[-1] if fitting else None


def native_arch(capability: tuple[int, int]) -> str:
    """Returns the architecture to compile for this compute capability, such as ``sm_90a`` for 9.0.

    Raises ``UnsupportedHere`` for a compute capability below 8.0.
    """
    arch = family(capability)
    if arch is None:
        raise UnsupportedHere(f"compute capability {capability[0]}.{capability[1]} is below 8.0; use a newer GPU")
    # Code for the tensor cores of compute capability 9.0 or above does not run on later architectures.
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
    """Returns every configuration that computes ``spec`` on this compute capability. ``choose`` explains the
    arguments."""
    arch = family(capability)
    if arch is None:
        return []
    op = "conv2d" if isinstance(spec, ConvSpec) else "gemm"
    found: list[AnyConfig] = []
    if triton_installed:
        found += [c for c in CONFIGS if c.op == op and c.supports(spec.in_dtype, arch)]
    # The compiled kernels read a residual in the output's dtype. Rounding a residual of another dtype would lose
    # precision.
    own_residual = residual_dtype in (None, spec.epilogue.out_dtype) or not spec.epilogue.residual
    if isinstance(spec, ConvSpec):
        if "im2col" in native and of_patches(spec, capability, tma_layout, native, residual_dtype).config is not None:
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
    """Tells whether every row of both operands starts at a multiple of 16 bytes."""
    return tma_layout and spec.k * BYTES[spec.in_dtype] % 16 == 0


def of_patches(
    spec: ConvSpec,
    capability: tuple[int, int],
    tma_layout: bool,
    native: Collection[str],
    residual_dtype: str | None,
) -> Choice:
    """Chooses the kernel of the compiled library that multiplies a convolution's patches by its weights."""
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
    """Chooses the implementation of ``spec`` on a device of this compute capability (None for the CPU).

    ``dense`` is True if ``a`` (M, K) and the transpose (N, K) of ``b`` are dense. ``tma_layout`` is True if both
    operands are dense and their addresses are multiples of 16. For a convolution, only the weights count. ``native``
    names the kernels of the compiled library, which are CUTLASS kernels and kernels of ``HAND_WRITTEN``.
    ``residual_dtype`` is None if the residual has the output's dtype. ``tuned_name`` is the tuner's choice for this
    problem. ``vectors`` is True if Triton can load both operands in vectors (see ``in_vectors``). Triton loads an
    operand in vectors if one stride of the operand is 1, and the address and the other stride are multiples of 16.
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
        return Choice(config=None, reason=str(MissingExtra("Triton", "kernels")))
    if isinstance(spec, ConvSpec):
        if not triton_installed:
            product = of_patches(spec, capability, tma_layout, native, residual_dtype)
            reason = f"Triton, which computes whole convolutions, is not installed; patches multiplied by {product}"
            return Choice(config=HAND_WRITTEN["im2col"], reason=reason)
        large = spec.gemm.m >= 4096 and spec.gemm.n >= 64 and spec.in_dtype != "fp32"
        # Without aligned vector loads, a large tile spills registers.
        large = large and vectors and spec.c_in % 16 == spec.c_out % 16 == 0
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
        odd = "N, K, a stride or an address is not a multiple of 16"
        return Choice(config=get("gemm_64x64"), reason=f"{odd}: a larger tile spills its registers")
    return Choice(config=get("gemm_128x128"), reason=f"sm_{arch}, M and N of at least 128")


def _why_gemv(spec: GemmSpec, tma_layout: bool, triton_installed: bool) -> str:
    """Returns the reason why gemv (one block per output column) suits the problem, or "" if a tiled kernel is
    better."""
    if not triton_installed:
        return "and Triton is not installed"
    if spec.in_dtype == "fp32":
        return "fp32 products run on the plain cores, never as tf32"
    return "" if _is_aligned(spec, tma_layout) else "rows that don't start at a multiple of 16 bytes"


def _by_tiles(spec: GemmSpec, compiled: list[NativeConfig]) -> Choice:
    """Chooses a tile size of this GPU's family. Takes the largest tile size that gives enough tiles (see
    ``ENOUGH_TILES``), or else the smallest tile size."""
    newest = max(config.unit.family.least for config in compiled)
    own = [config for config in compiled if config.unit.family.least == newest]

    def tiles(config: NativeConfig) -> int:
        return -(-spec.m // config.block_m) * -(-spec.n // config.block_n)

    by_size = sorted(own, key=lambda config: (config.block_m * config.block_n, config.name))
    # A tile taller than M computes useless rows.
    fitting = [config for config in by_size if config.block_m < 2 * spec.m] or by_size[:1]
    enough = [c for c in fitting if tiles(c) >= ENOUGH_TILES / (2 if c.block_m * c.block_n <= SMALL_TILE else 1)]
    chosen = enough[-1] if enough else fitting[0]
    return Choice(config=chosen, reason=f"{tiles(chosen)} tiles of {chosen.block_m}x{chosen.block_n}, not tuned")


def choose_quantize(
    dtype: str, capability: tuple[int, int] | None, *, triton_installed: bool = True, native: Collection[str] = ()
) -> Choice:
    """Chooses the kernel that quantizes rows to ``dtype`` on a device of this compute capability (None for the CPU)."""
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
