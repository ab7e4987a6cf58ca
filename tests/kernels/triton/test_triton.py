"""Proves that the Triton kernels are correct in the interpreter and compile for every architecture.

These tests fail if a kernel differs from the reference on sizes that don't fill a tile, or if the comparison misses a
deliberate mistake in a kernel. The tests check that each configuration compiles to its tensor-core instruction, spills
no registers and fits into shared memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("triton", reason="needs the extra [kernels]")

from accel.cli.kernels import command
from accel.kernels.catalogue.configs import ARCHS, CONFIGS, SHARED_LIMIT, get, shipped
from accel.kernels.catalogue.spec import EpilogueSpec
from accel.kernels.native import build
from accel.kernels.native.library import Library
from accel.kernels.proof import check, interpret
from accel.kernels.triton import cross
from accel.kernels.triton import kernels as triton_kernels
from accel.kernels.triton.launch import row_config
from tests.kernels.choose.test_dispatch import FOR_ANY

# Triton 3.9 warns about TRITON_DEFAULT_FP_FUSION although accel sets the option.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
SOURCE = Path(triton_kernels.__file__)


@pytest.mark.proof
def test_every_configuration_is_right_in_the_interpreter() -> None:
    """Fails if a kernel configuration gives wrong results. The error bound of a product is ``gemm_bound``, which is
    proven per element. The error bound of a convolution is 1e-4 of the largest element. Quantization has to be
    exact."""
    found = interpret.run()
    assert {name for name, value in found.items() if not value <= 1} == set()
    for config in CONFIGS:
        for dtype in config.dtypes if config.op != "quantize_rowwise" else ():
            assert f"{config.name} {dtype} shipped tile" in found
            assert sum(name.startswith(f"{config.name} {dtype}") for name in found) > 1


MISTAKES = {
    "wrong index": (
        "acts none",
        "cols.to(tl.int64)[None, :] * stride_bn",
        "(cols ^ 1).to(tl.int64)[None, :] * stride_bn",
    ),
    "mask of K lost": ("gemm_64x64 fp16", "here = steps < K - k", "here = steps < K + BK"),
    "part lost": ("gemm_16x64_split fp16", "for part in range(SPLIT)", "for part in range(1, SPLIT)"),
    "missing scale": ("acts relu", "if HAS_ROW:", "if False:"),
    "wrong activation": ("acts gelu_erf", "0.7071067811865476", "0.7"),
    "tile transposed": ("gemm_tma_128x128 fp16", "[tile_n * BN, block * BK]", "[tile_m * BM, block * BK]"),
    "padding ignored": ("conv2d_64x64 fp16", "% OH * SH - PH", "% OH * SH"),
    "truncation": ("quantize fp16 int8", "r = (r + 12582912.0) - 12582912.0", "r = r"),
}


@pytest.mark.proof
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught_in_the_interpreter(mistake: str, tmp_path: Path) -> None:
    case, right, wrong = MISTAKES[mistake]
    text = SOURCE.read_text()
    assert right in text
    planted = tmp_path / "planted.py"
    planted.write_text(text.replace(right, wrong))
    found = interpret.run(planted, case)
    assert found
    assert any(not value <= 1 for value in found.values()), found


@pytest.mark.proof
def test_a_row_is_read_once(tmp_path: Path) -> None:
    """Checks that the kernel reads a row of at most 8192 elements only once. The test plants a mistake in the code that
    reads a row for the second time. The planted mistake may change only the results of rows with more than 8192
    elements."""
    text = SOURCE.read_text()
    right = "again = tl.load(start + (k + steps)"
    assert right in text
    planted = tmp_path / "planted.py"
    planted.write_text(text.replace(right, "again = tl.load(start + (k + steps - 1)"))
    found = interpret.run(planted, "quantize fp16 int8")
    assert set(found) == {f"quantize fp16 int8 {columns}" for columns in (37, 2100, 9000)}
    assert [name for name, value in found.items() if value > 0] == ["quantize fp16 int8 9000"]


@pytest.mark.parametrize(
    ("columns", "block", "warps"), [(1, 1024, 4), (1025, 2048, 4), (4096, 4096, 8), (8192, 8192, 16), (9000, 8192, 16)]
)
def test_a_row_is_held_in_as_many_registers_as_it_needs(columns: int, block: int, warps: int) -> None:
    config = row_config(columns, "int8")
    assert (config.block_k("int8"), config.warps) == (block, warps)
    made = cross.compile_config(config, "int8", 90, epilogue=EpilogueSpec(out_dtype="fp32"), aligned=False)
    assert (made.kernel, made.problem) == ("quantize_rowwise", "")


def compiles(name: str, dtype: str, arch: int) -> None:
    made = cross.compile_config(get(name), dtype, arch)
    assert made.problem == ""
    assert made.shared <= SHARED_LIMIT[arch]
    assert made.spilled == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_one_configuration_an_architecture_compiles(arch: int) -> None:
    """Checks that an fp16 product compiles to the architecture's own tensor-core instruction (mma.sync, wgmma,
    tcgen05.mma)."""
    compiles("gemm_64x64", "fp16", arch)


Wanted = tuple[str, str, int, bool]


def wanted() -> Iterator[Wanted]:
    """Yields each configuration with the dtypes and architectures for which dispatch uses the configuration. For the
    configurations in ``FOR_ANY``, also yields unaligned sizes with fp16, int8 and fp8, because each of these dtypes
    compiles differently."""
    for config, dtype, arch in shipped():
        yield config.name, dtype, arch, True
        if config.name in FOR_ANY and dtype in ("fp16", "int8", "fp8_e4m3"):
            yield config.name, dtype, arch, False


@pytest.fixture(scope="module")
def on_every_core(request: pytest.FixtureRequest) -> Iterator[dict[Wanted, Future[cross.Compiled]]]:
    """Compiles the kernels for the selected tests in processes on all cores. Each key consists of the configuration's
    name, the dtype, the architecture, and a flag for aligned sizes."""
    wanted: list[Wanted] = [
        tuple(item.callspec.params[name] for name in ("name", "dtype", "arch", "aligned"))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_every_configuration_compiles"
    ]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawned) as pool:
        yield {key: pool.submit(cross.compile_config, get(key[0]), *key[1:3], aligned=key[3]) for key in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "dtype", "arch", "aligned"),
    [pytest.param(*key, id="-".join(map(str, key[:3])) + "-any" * (not key[3])) for key in wanted()],
)
def test_every_configuration_compiles(
    name: str, dtype: str, arch: int, aligned: bool, on_every_core: dict[Wanted, Future[cross.Compiled]]
) -> None:
    made = on_every_core[name, dtype, arch, aligned].result()
    assert (made.config, made.dtype, made.arch) == (name, dtype, arch)
    assert made.problem == ""
    assert made.shared <= SHARED_LIMIT[arch]
    assert made.spilled == 0


EPILOGUES = [
    EpilogueSpec(out_dtype="fp32"),
    EpilogueSpec(act="relu", bias=True),
    EpilogueSpec(act="gelu_tanh", bias=True, residual=True, out_dtype="bf16"),
    EpilogueSpec(act="silu", row_scale=True, col_scale=True, out_dtype="bf16"),
]


@pytest.mark.proof
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda epilogue: epilogue.key)
def test_other_epilogues_compile(epilogue: EpilogueSpec, arch: int) -> None:
    """Checks that the kernel compiles with a bias, an activation, a residual, scales and another output dtype."""
    made = cross.compile_config(get("gemm_64x64"), "fp16", arch, epilogue=epilogue)
    assert made.problem == ""


@pytest.mark.parametrize(("name", "dtype"), [("gemm_64x64", "int8"), ("gemm_16x64_split", "fp8_e4m3")])
def test_small_tiles_take_any_size_without_spills(name: str, dtype: str) -> None:
    """Checks that a small tile spills no registers on an unaligned problem. With four warps, the small tile would spill
    registers."""
    assert cross.compile_config(get(name), dtype, 90, aligned=False).problem == ""
    assert "spilled" in cross.compile_config(replace(get(name), warps=4), dtype, 90, aligned=False).problem


def test_a_large_tile_spills_without_vectors() -> None:
    """Checks that the large tile spills registers for unaligned problems, which can't use vector loads. Once the large
    tile spills no registers, dispatch can use this tile for unaligned problems."""
    assert "spilled" in cross.compile_config(get("gemm_128x128"), "fp16", 90, aligned=False).problem


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("dtype", "arch"), [("fp16", 80), ("int8", 90), ("bf16", 120)])
def test_the_sum_of_a_split_k_compiles(dtype: str, arch: int, aligned: bool) -> None:
    made = cross.compile_config(get("gemm_16x64_split"), dtype, arch, sums=True, aligned=aligned)
    assert (made.kernel, made.instruction, made.problem) == ("sum_parts", "", "")
    assert made.registers > 0


@pytest.mark.parametrize("name", ["gemm_128x128", "conv2d_64x64"])
def test_fp8_sums_are_added_up_in_fp32_on_hopper(name: str) -> None:
    """Fails if the tensor cores add up all of K. On Hopper, Triton lets the tensor cores add up all of K by default,
    but sums inside the tensor cores have only 14 bits."""
    made = cross.compile_config(get(name), "fp8_e4m3", 90)
    assert (made.imprecise, made.problem) == (get(name).block_k("fp8_e4m3"), "")
    assert "14 bits" in replace(made, imprecise=1 << 30).problem


def test_a_bad_build_is_named() -> None:
    right = cross.Compiled(
        config="gemm_128x128", dtype="fp16", arch=90, shared=1000, registers=99, spilled=0, instruction="wgmma f16"
    )
    assert right.problem == ""
    assert "instead of wgmma f16" in replace(right, instruction="mma.sync f16").problem
    assert "wgmma f16 instead of wgmma s8" in replace(right, dtype="int8").problem, "widened: half the speed"
    assert "instead of wgmma e4m3" in replace(right, dtype="fp8_e4m3").problem
    assert "wgmma f16, wgmma s8 instead of" in replace(right, dtype="int8", instruction="wgmma f16, wgmma s8").problem
    assert "no tensor-core" in replace(right, instruction="").problem
    assert "spilled" in replace(right, spilled=8).problem
    assert "shared memory" in replace(right, shared=300_000).problem


PTX = {
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1};": "mma.sync bf16",
    "@%p1 mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 {%r1};": "mma.sync s8",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%r1};": "mma.sync e4m3",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1};": "mma.sync tf32",
    "wgmma.fence.sync.aligned;\n wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%r1};": "wgmma e4m3",
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1};": "wgmma f16",
    "@p tcgen05.mma.cta_group::1.kind::f8f6f4 [ %r1 + 0 ], %rd1;": "tcgen05.mma kind::f8f6f4",
    "tcgen05.mma.cta_group::1.kind::i8 [ %r1 ];\nmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1};": (
        "mma.sync f16, tcgen05.mma kind::i8"
    ),
    "// mma.sync in a comment\nfma.rn.f32 %f1;": "",
}


@pytest.mark.parametrize("ptx", PTX)
def test_the_type_of_the_operands_is_read_from_the_ptx(ptx: str) -> None:
    assert cross._instruction(f"\t{ptx}\n") == PTX[ptx]


@pytest.mark.parametrize(("dtype", "word"), [("int8", "s8"), ("fp8_e4m3", "e4m3"), ("bf16", "bf16")])
def test_the_operands_are_multiplied_in_their_own_type(dtype: str, word: str) -> None:
    """Fails if fp8 or int8 operands are widened to fp16, which gives the same result at half the speed. The type in the
    tensor-core instruction shows whether the operands were widened."""
    made = cross.compile_config(get("gemm_64x64"), dtype, 90)
    assert made.instruction == f"wgmma {word}"
    assert made.problem == ""


@pytest.mark.proof
def test_check_proves_what_it_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checks that `accel kernels check` runs without a GPU, passes the proofs that need no GPU, and reports the GPU
    proof as not run. Also checks that the command reports a failed proof."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    everything = interpret.run  # another test covers interpret.run
    monkeypatch.setattr(interpret, "run", lambda: everything(case="acts"))
    result = CliRunner().invoke(command, ["check", "--json", "--quiet"])
    assert result.exit_code == 0, result.output
    proofs = {row["what"]: row for row in json.loads(result.output)["proofs"]}
    assert proofs["interpreter, ragged shapes"]["passed"] is True
    assert all(proofs[f"cross-compilation for sm_{arch}"]["passed"] for arch in ARCHS)
    if build.find_nvcc() is not None:
        assert proofs["hand-written kernels, compiled"]["passed"] is True
    if shutil.which("g++") is not None:
        assert proofs["hand-written kernels, run on the CPU"]["passed"] is True
    assert proofs["ONNX bodies in ONNX Runtime"]["passed"] is True
    assert proofs["tensor-core GEMMs (CUTLASS)"]["passed"] is None, "what check builds has no GEMM: nothing is proven"
    assert build.find_library() is None, "what check builds is not what dispatch runs"
    monkeypatch.setattr(Library, "gemv", lambda *_operands, **_named: None)
    assert check._on_host(lambda _message, _fraction: None).passed in (False, None)
    monkeypatch.setattr(interpret, "run", lambda: {"a case": float("nan")})
    failed = CliRunner().invoke(command, ["check", "--quiet"])
    assert "don't use the kernels" in str(failed.exception)
