"""Proves that the Triton kernels are correct in the interpreter, compile for every architecture and are dispatched.

These tests fail if a kernel differs from the reference on ragged shapes, or if a planted mistake isn't caught. The
tests fail if a configuration loses its tensor-core instruction, spills or overruns shared memory. The tests also fail
if dispatch chooses an implementation that does not exist for the problem.
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
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs the extra [kernels]")

from accel.cli.kernels import command
from accel.errors import BadFeeds
from accel.kernels.catalogue.configs import ARCHS, CONFIGS, HAND_WRITTEN, SHARED_LIMIT, Config, get, rows, shipped
from accel.kernels.catalogue.spec import BYTES, IN_DTYPES, ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.catalogue.units import NATIVE, NativeConfig
from accel.kernels.choose import choices, dispatch
from accel.kernels.native import build
from accel.kernels.native import launch as native_launch
from accel.kernels.native.library import Library
from accel.kernels.proof import check, interpret
from accel.kernels.torch.gemm import fused_gemm
from accel.kernels.triton import cross
from accel.kernels.triton import kernels as triton_kernels
from accel.kernels.triton.launch import row_config

# Triton 3.9 warns although the option is set, because the option's default will change.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
SOURCE = Path(triton_kernels.__file__)


@pytest.mark.proof
def test_every_configuration_is_right_in_the_interpreter() -> None:
    """Fails if a configuration is wrong. The bound of a product is ``gemm_bound``, which is proven per element. The
    bound of a convolution is 1e-4 of the largest element. Quantization has to be exact."""
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
    """Fails if a row of at most 8192 elements is read twice. The planted second read is wrong and may change only the
    longer rows."""
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
    """Fails if an fp16 product doesn't compile to the architecture's own tensor-core instruction (mma.sync, wgmma,
    tcgen05.mma)."""
    compiles("gemm_64x64", "fp16", arch)


Wanted = tuple[str, str, int, bool]
# Dispatch uses the configurations in FOR_ANY if no size is a multiple of 16, because the other tiles then spill.
FOR_ANY = ("gemm_64x64", "gemm_16x64_split", "conv2d_64x64", "quantize_8192")


def wanted() -> Iterator[Wanted]:
    """Yields each configuration with the dtypes and architectures for which dispatch uses the configuration. For the
    configurations in ``FOR_ANY``, also yields the unaligned case of the dtypes that compile differently."""
    for config, dtype, arch in shipped():
        yield config.name, dtype, arch, True
        if config.name in FOR_ANY and dtype in ("fp16", "int8", "fp8_e4m3"):
            yield config.name, dtype, arch, False


@pytest.fixture(scope="module")
def on_every_core(request: pytest.FixtureRequest) -> Iterator[dict[Wanted, Future[cross.Compiled]]]:
    """Compiles the kernels for the selected tests in processes on all cores. The keys are name, dtype, architecture and
    whether the sizes are aligned."""
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
    """Fails if an activation, operand or output dtype doesn't compile."""
    made = cross.compile_config(get("gemm_64x64"), "fp16", arch, epilogue=epilogue)
    assert made.problem == ""


@pytest.mark.parametrize(("name", "dtype"), [("gemm_64x64", "int8"), ("gemm_16x64_split", "fp8_e4m3")])
def test_small_tiles_take_any_size_without_spills(name: str, dtype: str) -> None:
    """Fails if a small tile spills on an unaligned problem, as the same tile with four warps does."""
    assert cross.compile_config(get(name), dtype, 90, aligned=False).problem == ""
    assert "spilled" in cross.compile_config(replace(get(name), warps=4), dtype, 90, aligned=False).problem


def test_a_large_tile_spills_without_vectors() -> None:
    """Fails if the large tile no longer spills without vector loads. Dispatch could then use the large tile for
    unaligned problems."""
    assert "spilled" in cross.compile_config(get("gemm_128x128"), "fp16", 90, aligned=False).problem


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("dtype", "arch"), [("fp16", 80), ("int8", 90), ("bf16", 120)])
def test_the_sum_of_a_split_k_compiles(dtype: str, arch: int, aligned: bool) -> None:
    made = cross.compile_config(get("gemm_16x64_split"), dtype, arch, sums=True, aligned=aligned)
    assert (made.kernel, made.instruction, made.problem) == ("sum_parts", "", "")
    assert made.registers > 0


@pytest.mark.parametrize("name", ["gemm_128x128", "conv2d_64x64"])
def test_fp8_sums_are_added_up_in_fp32_on_hopper(name: str) -> None:
    """Fails if the tensor cores sum all of K themselves, Triton's default on Hopper. Sums inside the tensor cores have
    only 14 bits."""
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
    instruction reveals the widening."""
    made = cross.compile_config(get("gemm_64x64"), dtype, 90)
    assert made.instruction == f"wgmma {word}"
    assert made.problem == ""


KINDS = ("triton", "cutlass", "cuda")


@settings(max_examples=500, deadline=None)
@given(
    m=st.integers(1, 9000),
    n=st.integers(1, 9000),
    k=st.integers(1, 9000) | st.integers(1, 500).map(lambda sixteens: 16 * sixteens),
    dtype=st.sampled_from(IN_DTYPES),
    capability=st.sampled_from(
        [None, (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
    ),
    tma=st.booleans(),
    vectors=st.booleans(),
    native=st.sampled_from([(), tuple(NATIVE), tuple(name for name in NATIVE if name.startswith("sm80"))]),
    triton=st.booleans(),
)
def test_dispatch_takes_only_what_is_shipped(
    m: int,
    n: int,
    k: int,
    dtype: str,
    capability: tuple[int, int] | None,
    tma: bool,
    vectors: bool,
    native: tuple[str, ...],
    triton: bool,
) -> None:
    spec = GemmSpec(
        m=m, n=n, k=k, in_dtype=dtype, epilogue=EpilogueSpec(out_dtype="bf16" if dtype == "bf16" else "fp16")
    )
    conv = ConvSpec(images=1, height=m, width=1, c_in=k, c_out=n, kernel=(1, 1), in_dtype=dtype)
    arch = choices.family(capability) if capability else None
    for problem in (spec, conv):
        given = {"tma_layout": tma, "vectors": vectors, "triton_installed": triton}
        choice = choices.choose(problem, capability, native=native, **given)
        assert choice.reason
        if choice.config is None:
            assert arch is None or (dtype == "fp8_e4m3" and arch < 89) or not triton
        elif isinstance(choice.config, NativeConfig):
            assert capability is not None
            assert choice.config.runs_on(capability)
            assert choice.config.unit.dtype == dtype
            assert choice.config.unit.out_dtype == spec.epilogue.out_dtype
            assert choice.config.name in native
            assert tma
            assert k * BYTES[dtype] % 16 == 0
            assert n * 2 % 16 == 0
        else:
            assert triton
            assert arch is not None
            assert choice.config.supports(dtype, arch)
            if "tma" in choice.config.name:
                assert tma
                assert n % 16 == k * BYTES[dtype] % 16 == 0
            elif choice.config.name not in FOR_ANY:
                assert n % 16 == k % 16 == 0
                assert vectors or (tma and problem is spec)


def test_large_tiles_are_for_what_is_loaded_in_vectors() -> None:
    def chosen(spec: GemmSpec | ConvSpec, major: int = 8, **given: bool) -> str:
        config = choices.choose(spec, (major, 0), **given).config
        return config.name if config else ""

    even = GemmSpec(m=4097, n=1008, k=2048)
    assert chosen(even, vectors=True) == chosen(even, tma_layout=True) == "gemm_128x128", "rows may be any number"
    assert chosen(even, 9, vectors=True, tma_layout=True) == "gemm_tma_128x128"
    assert chosen(replace(even, k=1032), 9, tma_layout=True) == "gemm_tma_128x128", "rows of 16 bytes"
    assert chosen(replace(even, k=1032), 8, tma_layout=True) == "gemm_64x64"
    assert chosen(replace(even, n=1000), 9, tma_layout=True) == "gemm_64x64"
    assert chosen(replace(even, k=1023), 9, vectors=True) == "gemm_64x64"
    assert chosen(even) == "gemm_64x64", "of strides that are not known"
    assert chosen(replace(even, m=16, n=1001)) == "gemm_16x64_split"
    conv = ConvSpec(images=8, height=56, width=57, c_in=64, c_out=128, kernel=(3, 3))
    assert chosen(conv, vectors=True) == "conv2d_128x64"
    for odd in (replace(conv, c_in=63), replace(conv, c_out=100)):
        assert chosen(odd, vectors=True) == "conv2d_64x64"
    assert chosen(conv, tma_layout=True) == "conv2d_64x64", "the image's address is not known"


def test_what_can_be_loaded_in_vectors() -> None:
    a, b = torch.zeros(64, 48), torch.zeros(48, 80)
    assert dispatch.in_vectors(a, b)
    assert dispatch.in_vectors(a, torch.zeros(80, 48).t())
    assert dispatch.in_vectors(torch.zeros(48, 64).t()[:7], b)
    assert not dispatch.in_vectors(torch.zeros(64, 49)[:, :48], b), "rows begin anywhere"
    assert not dispatch.in_vectors(torch.zeros(64, 48 * 16)[:, ::16], b), "no two elements are neighbours"
    assert not dispatch.in_vectors(a, torch.zeros(48 * 80 + 1)[1:].view(48, 80)), "an address of 4 bytes more"
    image, weight = torch.zeros(2, 9, 9, 16), torch.zeros(32, 3, 3, 16)
    assert dispatch.in_vectors(image, weight)
    assert dispatch.in_vectors(torch.zeros(2, 9, 9, 17)[..., 1:], weight), "is made dense"
    assert not dispatch.in_vectors(torch.zeros(image.numel() + 1)[1:].view(image.shape), weight)


def test_a_residual_of_another_dtype_is_never_rounded() -> None:
    """Fails if CUTLASS gets a residual of another dtype than the output. CUTLASS would read an fp32 1e5 as infinite in
    fp16."""
    spec = GemmSpec(m=512, n=512, k=512, epilogue=EpilogueSpec(residual=True))

    def kinds(spec: GemmSpec, residual: str | None) -> set[type]:
        found = choices.candidates(spec, (8, 0), tma_layout=True, native=list(NATIVE), residual_dtype=residual)
        tuned = "sm80_fp16_streamk_64x64"
        choice = choices.choose(
            spec, (8, 0), tma_layout=True, native=list(NATIVE), residual_dtype=residual, tuned_name=tuned
        )
        assert type(choice.config) in {type(config) for config in found}
        return {type(config) for config in found}

    assert kinds(spec, "fp16") == kinds(spec, None) == {Config, NativeConfig}
    assert kinds(spec, "fp32") == kinds(spec, "bf16") == {Config}
    assert kinds(GemmSpec(m=512, n=512, k=512), "fp32") == {Config, NativeConfig}, "there is no residual"
    a = torch.zeros(512, 512, dtype=torch.float16)
    with pytest.raises(BadFeeds, match="takes a residual in fp16"):
        native_launch.run_gemm(spec, a, a.t(), {"residual": a.float()}, NATIVE["sm80_fp16_streamk_64x64"])


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_residual_reaches_dispatch(residual: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the operator rounds the residual before dispatch. The sum of 1e5 in fp32 and -1e5 from the product is 0,
    not infinite."""
    seen = []
    right = dispatch.choose_for

    def spy(spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor]) -> choices.Choice:
        seen.append(operands["residual"].dtype)
        return right(spec, a, b, operands)

    monkeypatch.setattr(dispatch, "choose_for", spy)
    a, b = torch.full((4, 10), -100.0, dtype=torch.float16), torch.full((10, 4), 100.0, dtype=torch.float16)
    out = fused_gemm(a, b, residual=torch.full((4, 4), 1e5, dtype=residual))
    assert seen == [residual]
    assert float(out.float().abs().max()) <= (0 if residual is torch.float32 else 1e5 * 2.0**-8)


def test_why_says_why() -> None:
    spec = GemmSpec(m=4096, n=4096, k=4096, epilogue=EpilogueSpec(act="silu"))
    assert dispatch.why(spec, (9, 0), tma_layout=True, native=()).startswith("triton gemm_tma_128x128: sm_90")
    compiled = dispatch.why(spec, (9, 0), tma_layout=True, native=list(NATIVE))
    assert compiled == "cutlass sm90_fp16_cooperative_128x256: 512 tiles of 128x256, not tuned"
    odd = dispatch.why(replace(spec, n=4095), (9, 0), tma_layout=True, native=())
    assert odd.startswith("triton gemm_64x64: N, K, a stride or an address is not a multiple of 16")
    assert "gemm_128x128" in dispatch.why(spec, (9, 0), vectors=True, native=())
    few = dispatch.why(GemmSpec(m=64, n=512, k=64), (9, 0), tma_layout=True, native=list(NATIVE))
    assert few.startswith("cutlass sm90_fp16_swapped_64x16: 32 tiles")
    assert "M = 1 <= 16" in dispatch.why(GemmSpec(m=1, n=64, k=64), (8, 0), native=())
    assert "fp8 products" in dispatch.why(GemmSpec(m=64, n=64, k=64, in_dtype="fp8_e4m3"), (8, 0))
    assert dispatch.why(spec, None) == "reference: the CPU runs the reference"
    bare = choices.choose(spec, (9, 0), triton_installed=False)
    assert "accel-toolchain[kernels]" in str(bare)


def test_list_as_json() -> None:
    result = CliRunner().invoke(command, ["list", "--json"])
    assert result.exit_code == 0, result.output
    listed = json.loads(result.output)["configurations"]
    names = {kind: [row["name"] for row in listed if row["implementation"] == kind] for kind in KINDS}
    assert names["triton"] == [config.name for config in CONFIGS]
    assert names["cutlass"] == list(NATIVE)
    assert names["cuda"] == ["gemv", "quantize_rowwise", "im2col"]
    assert sum(map(len, names.values())) == len(listed)
    assert all({"op", "dtypes", "tile", "archs"} <= set(row) for row in listed)


def test_what_is_listed_can_be_chosen() -> None:
    """Fails if a listed configuration is a candidate for no problem, or if a candidate is missing from the list."""
    native = [*NATIVE, *HAND_WRITTEN]
    quantizers = (choices.choose_quantize("int8", (8, 0), triton_installed=t, native=native) for t in (True, False))
    reached = {choice.config.name for choice in quantizers if choice.config is not None}
    for dtype in IN_DTYPES:
        for out in ("fp16", "bf16", "fp32"):
            spec = GemmSpec(m=16, n=64, k=64, in_dtype=dtype, epilogue=EpilogueSpec(out_dtype=out))
            conv = ConvSpec(images=1, height=8, width=8, c_in=64, c_out=64, kernel=(1, 1), in_dtype=dtype)
            for problem in (spec, conv):
                for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
                    found = choices.candidates(problem, capability, tma_layout=True, native=native)
                    reached |= {config.name for config in found}
    assert reached == {row["name"] for row in rows()}


@pytest.mark.proof
def test_check_proves_what_it_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a proof other than the GPU's fails, if the GPU's proof isn't reported as not run, or if a failed proof
    doesn't exit with 1."""
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
