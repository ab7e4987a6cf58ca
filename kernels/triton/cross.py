"""Cross-compiles the Triton configurations, to check a GPU's code without that GPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from accel.errors import MissingExtra, UnsupportedHere

from ..catalogue.configs import SHARED_LIMIT, Config, get, product
from ..catalogue.reference import QMAX
from ..catalogue.spec import EpilogueSpec
from ..native.sass import find_cuobjdump
from .launch import GROUP, PARTS_TILE, flags, tile

POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "int8": "*i8", "fp8_e4m3": "*fp8e4nv"}
FULL = EpilogueSpec(act="gelu_erf", bias=True, residual=True, row_scale=True, col_scale=True)
MOST_IMPRECISE = 128  # The largest allowed number of K elements in a 14-bit sum, as in csrc/cutlass/sm90.cu.
# ``OPERANDS`` names the kernel arguments that are multiples of 16 when dispatch chooses a large tile. A stride that is
# always 1 is not in ``OPERANDS``. ``DIVISIBLE`` consists of ``OPERANDS`` and the pointers to memory that the launch
# allocates. Row counts, pixel counts and the addresses of the epilogue's operands need not be multiples of 16.
OPERANDS = frozenset({"a", "b", "x", "weight", "stride_am", "stride_bn", "stride_m", "N", "K", "C"})
DIVISIBLE = OPERANDS | {"out", "q", "scales", "parts"}
CONV = {"KH": 3, "KW": 3, "SH": 1, "SW": 1, "PH": 1, "PW": 1, "DH": 1, "DW": 1, "FIRST": False}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Describes a compiled kernel: its registers, its shared memory and spills in bytes, and its tensor-core
    instructions.

    Each instruction is followed by the type of its operands, as in ``wgmma e4m3``.
    """

    config: str
    dtype: str
    arch: int
    shared: int
    registers: int
    spilled: int
    instruction: str
    kernel: str = ""
    imprecise: int = 0
    """For fp8 products on sm_90: the number of K elements that the tensor cores sum up in 14 bits. After this number,
    the sum continues in fp32."""

    @property
    def problem(self) -> str:
        """Returns the fault of the kernel in words, or "" if there is no fault."""
        if self.shared > SHARED_LIMIT[self.arch]:
            return f"{self.shared} bytes of shared memory, and sm_{self.arch} has {SHARED_LIMIT[self.arch]}"
        if self.spilled:
            return f"{self.spilled} bytes spilled"
        if self.imprecise > MOST_IMPRECISE:
            return f"{self.imprecise} of K are summed in the 14 bits that sm_{self.arch} keeps of fp8"
        wanted = product(get(self.config), self.dtype, self.arch) if self.kernel != "sum_parts" else ""
        if self.instruction != wanted:
            return f"{self.instruction or 'no tensor-core instruction'} instead of {wanted or 'none'}"
        return ""


def compile_config(
    config: Config, dtype: str, arch: int, *, epilogue: EpilogueSpec = FULL, sums: bool = False, aligned: bool = True
) -> Compiled:
    """Compiles ``config`` for ``dtype`` and sm_``arch``.

    By default, ``epilogue`` has every operand and an fp16 output. With ``sums``, compiles the kernel that adds up the
    partial sums of a split-K product. ``aligned`` declares the arguments in ``DIVISIBLE`` to be multiples of 16.
    Without ``aligned``, Triton loads single elements instead of vectors, which takes more registers.

    Raises ``MissingExtra`` without Triton, and ``UnsupportedHere`` if the configuration isn't shipped for ``arch``.
    """
    if importlib.util.find_spec("triton") is None:
        raise MissingExtra("Triton", "kernels")
    if not config.supports(dtype, arch):
        raise UnsupportedHere(
            f"the configuration {config.name} is not shipped for {dtype} on sm_{arch}; accel kernels list shows all "
            "shipped configurations"
        )
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from . import kernels as triton_kernels

    kernel = "sum_parts" if sums else config.kernel
    function = getattr(triton_kernels, kernel)
    constants = _sum_constants(config, epilogue) if sums else _constants(config, dtype, epilogue)
    # TMA needs rows whose length is a multiple of 16 bytes. A row of 8 fp16 elements has 16 bytes, so K need not be a
    # multiple of 16 elements.
    divisible = DIVISIBLE - {"K"} if kernel == "gemm_tma" else DIVISIBLE
    if not aligned:
        divisible = frozenset()
        constants = {name: value for name, value in constants.items() if not name.startswith("stride_")}
    signature, attributes = {}, {}
    for at, name in enumerate(function.arg_names):
        kind = "constexpr" if name in constants else _kind(config, kernel, name, dtype, epilogue)
        signature[name] = kind
        if kind != "constexpr" and name in divisible:
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options: dict[str, Any] = {"enable_fp_fusion": True}
    if not sums:  # ``sum_parts`` is compiled with Triton's default options
        options |= {"num_warps": config.warps, "num_stages": config.stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spilled = _resources(made.asm["cubin"])
    return Compiled(
        config=config.name,
        dtype=dtype,
        arch=arch,
        shared=made.metadata.shared,
        registers=registers,
        spilled=spilled,
        instruction=_instruction(made.asm["ptx"]),
        kernel=kernel,
        imprecise=_imprecise(made.asm["ttgir"]),
    )


def _sum_constants(config: Config, epilogue: EpilogueSpec) -> dict[str, Any]:
    return {**flags(epilogue), **PARTS_TILE, "SPLIT": config.split_k}


def _constants(config: Config, dtype: str, epilogue: EpilogueSpec) -> dict[str, Any]:
    integer = dtype == "int8"
    if config.kernel == "quantize_rowwise":
        return {"QMAX": QMAX[dtype], "INTEGER": integer, "BK": config.block_k(dtype), "stride_k": 1}
    found = {**flags(epilogue), **tile(config, dtype), "GROUP": GROUP, "INTEGER": integer, "UPCAST": False}
    if config.kernel == "gemm":
        found |= {"SPLIT": config.split_k, "stride_ak": 1, "stride_bk": 1}
    return found | (CONV if config.kernel == "conv2d" else {})


def _kind(config: Config, kernel: str, name: str, dtype: str, epilogue: EpilogueSpec) -> str:
    if name in ("a", "b", "weight", "q") or (name == "x" and config.kernel == "conv2d"):
        return POINTERS[dtype]
    if name in ("bias", "row_scale", "col_scale", "scales"):
        return "*fp32"
    if name == "parts" or (name == "out" and config.split_k > 1 and kernel != "sum_parts"):
        return "*i32" if dtype == "int8" else "*fp32"
    return POINTERS[epilogue.out_dtype] if name in ("x", "out", "residual") else "i32"


def _imprecise(ttgir: str) -> int:
    """Reads in Triton's intermediate code how many K elements the fp8 tensor cores sum up in 14 bits."""
    products = [line for line in ttgir.splitlines() if "ttng.warp_group_dot " in line and "f8E4M3" in line]
    return max((int(k) for line in products for k in re.findall(r"maxNumImpreciseAcc = (\d+)", line)), default=0)


def _instruction(ptx: str) -> str:
    """Names each tensor-core product in the PTX, such as ``mma.sync s8`` for
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32.
    """
    found = set()
    for name, rest in re.findall(r"^\s*(?:@\S+ )?(tcgen05\.mma|wgmma\.mma_async|mma\.sync)\.(\S+)", ptx, re.MULTILINE):
        if name == "tcgen05.mma":
            operands = re.findall(r"kind::\w+", rest)
        else:  # the name lists the tile, the layouts, and then the dtypes of the sum, of a and of b
            types = re.findall(r"(?<![a-z0-9_])(?:[usb]\d+|b?f\d+|tf32|e\dm\d)(?![a-z0-9_])", rest)
            operands = sorted(set(types[1:3]))
        found.add(" ".join([name.removesuffix(".mma_async"), *operands]))
    return ", ".join(sorted(found))


def _resources(cubin: bytes) -> tuple[int, int]:
    """Returns the registers per thread and the bytes of local memory (spills) of a cubin, from cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [find_cuobjdump(), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise UnsupportedHere(f"cuobjdump printed nothing about a kernel's registers: {text.strip()[:200]}")
    return int(found[1]), int(found[2]) + int(found[3])
