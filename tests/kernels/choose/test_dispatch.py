"""Proves that dispatch chooses only shipped implementations that can run the problem, and explains the choice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs the extra [kernels]")

from accel.cli.kernels import command
from accel.errors import BadFeeds
from accel.kernels.catalogue.configs import CONFIGS, HAND_WRITTEN, Config, rows
from accel.kernels.catalogue.spec import BYTES, IN_DTYPES, ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.catalogue.units import NATIVE, NativeConfig
from accel.kernels.choose import choices, dispatch
from accel.kernels.native import launch as native_launch
from accel.kernels.torch.gemm import fused_gemm

# Dispatch uses these configurations for sizes that aren't multiples of 16, because other tiles would spill registers.
FOR_ANY = ("gemm_64x64", "gemm_16x64_split", "conv2d_64x64", "quantize_8192")
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
    """Fails if CUTLASS runs although the residual and the output have different dtypes. CUTLASS would read the residual
    as fp16, in which 1e5 is infinite."""
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
    """Fails if the operator rounds the residual before dispatch. The product is -1e5 and the residual is 1e5. The sum
    of product and residual is 0, but in fp16 the residual would be infinite."""
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
    assert compiled == "cutlass sm90_fp16_cooperative_256x128: 512 tiles of 256x128, not tuned"
    odd = dispatch.why(replace(spec, n=4095), (9, 0), tma_layout=True, native=())
    assert odd.startswith("triton gemm_64x64: N, K, a stride or an address is not a multiple of 16")
    assert "gemm_128x128" in dispatch.why(spec, (9, 0), vectors=True, native=())
    few = dispatch.why(GemmSpec(m=64, n=512, k=64), (9, 0), tma_layout=True, native=list(NATIVE))
    assert few.startswith("cutlass sm90_fp16_swapped_64x16: 32 tiles")
    more = dispatch.why(GemmSpec(m=64, n=4096, k=64), (9, 0), tma_layout=True, native=list(NATIVE))
    assert more.startswith("cutlass sm90_fp16_pingpong_64x64: 64 tiles"), "256 tiles of 16 rows are slower"
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
    """Checks that each listed configuration is a candidate for at least one problem, and that each candidate is
    listed."""
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
