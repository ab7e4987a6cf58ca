"""Proves on the CPU that the tuner's decisions are right, with a stand-in for the timer and the candidates.

These tests fail if a fast candidate with wrong results wins, or if a lookup ignores the bucket of sizes, the epilogue,
the GPU, the driver or the library. The tests fail if a damaged table raises an error, or if a half-written table
remains. The tests also fail if dispatch uses a tuned configuration that can't run the problem.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from accel.cli.kernels import command
from accel.errors import CannotWrite, UnknownName, UnsupportedHere
from accel.kernels.catalogue import problem, reference
from accel.kernels.catalogue.spec import ACTS, ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.choose import choices, dispatch, tune, tuned
from accel.kernels.choose.tune import Candidate, choose_fastest
from accel.kernels.choose.tuned import Device, Entry, Key, Table, bucket, key_of
from accel.kernels.native import build
from accel.kernels.native import launch as native_launch
from tests.kernels.torch import test_gpu_kernels

DEVICE = Device(gpu="NVIDIA H100", capability=(9, 0), driver="580.65.06", library="abc")
SPEC = tune.specs(["fp16"], ["gelu_erf"], [(48, 40, 56)])[0]
KEY = key_of(SPEC, DEVICE)


def candidate(name: str, times: dict[object, float], micros: float, error: float | Exception) -> Candidate:
    def check() -> float:
        if isinstance(error, Exception):
            raise error
        return error

    def run() -> object:
        return name

    times[run] = micros
    return Candidate(name=name, run=run, error=check)


def test_the_fastest_right_one_wins_and_a_fast_wrong_one_is_refused(tmp_path: Path) -> None:
    times: dict[object, float] = {}
    found = [
        candidate("right but slow", times, 9.0, 0.1),
        candidate("right", times, 5.0, 1.0),
        candidate("wrong", times, 1.0, 1.01),
        candidate("not a number", times, 2.0, float("nan")),
        candidate("crashes when checked", times, 3.0, RuntimeError("CUDA error:\n misaligned address")),
    ]

    def timer(run: object) -> float:
        return times[run]

    table = Table(tmp_path / "tuned.json")
    result = choose_fastest(KEY, found, timer=timer, table=table)
    assert result.entry == Entry(config="right", microseconds=5.0, error=1.0)
    assert result.refused == {
        "wrong": "its error is 1.01 times the bound",
        "not a number": "its error is nan times the bound",
        "crashes when checked": "CUDA error: misaligned address",
    }
    assert Table(table.path).get(KEY) == result.entry


def test_nothing_right_means_nothing_remembered(tmp_path: Path) -> None:
    def timer(run: object) -> float:
        raise UnsupportedHere("not for this GPU")

    table = Table(tmp_path / "tuned.json")
    result = choose_fastest(KEY, [candidate("one", {}, 1.0, 0.0)], timer=timer, table=table)
    assert result.entry is None
    assert result.refused == {"one": "not for this GPU"}
    assert not table.path.exists()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8", "fp8_e4m3", "fp32"])
@pytest.mark.parametrize("act", ACTS)
def test_a_real_result_is_verified_against_the_reference(dtype: str, act: str) -> None:
    """Fails if the tuner rejects the CPU's result. Also fails if the tuner accepts a result with a wrong activation, a
    NaN in the last element, or a missing scale, bias or residual."""
    for spec in tune.specs([dtype], [act], [(300, 40, 56)], added=("bias", "none", "bias+residual")):
        verified(spec, act)


def verified(spec: GemmSpec, act: str) -> None:
    operands = tune.operands_for(spec, torch.device("cpu"))
    a, b, given_ = operands
    right = dispatch.run_gemm(spec, a, b, given_)
    assert tune.largest_error(spec, operands, right) <= 1
    for name in spec.epilogue.operands:
        without = {**given_, name: torch.ones_like(given_[name]) if "scale" in name else given_[name] * 0}
        assert tune.largest_error(spec, operands, dispatch.run_gemm(spec, a, b, without)) > 1, name
    other = replace(spec, epilogue=replace(spec.epilogue, act="relu" if act != "relu" else "none"))
    assert tune.largest_error(spec, operands, dispatch.run_gemm(other, a, b, given_)) > 1
    last = right.clone()
    last[-1, -1] = float("nan")
    assert tune.largest_error(spec, operands, last) == float("inf"), "the last row is among those looked at"
    assert tune.largest_error(spec, operands, right.t()) == float("inf")
    assert tune.largest_error(spec, operands, right.double()) == float("inf")


class NoFloat8Index(TorchDispatchMode):
    """Imitates a version of torch that can't index float8 by a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor and args[0].dtype == torch.float8_e4m3fn:
            raise NotImplementedError("\"index_cuda\" not implemented for 'Float8_e4m3fn'")
        return func(*args, **(kwargs or {}))


def test_fp8_rows_are_taken_without_indexing_float8() -> None:
    spec = tune.specs(["fp8_e4m3"], ["silu"], [(300, 40, 56)])[0]
    operands = a, b, given_ = tune.operands_for(spec, torch.device("cpu"))
    right = dispatch.run_gemm(spec, a, b, given_)
    error = tune.largest_error(spec, operands, right)
    with NoFloat8Index():
        assert tune.largest_error(spec, operands, right) == error <= 1
        strided = torch.empty(56, 300, dtype=torch.float8_e4m3fn).t()
        strided.copy_(a)
        assert tune.largest_error(spec, (strided, b, given_), right) == error, "of any strides"


@given(m=st.integers(1, 100_000))
def test_buckets(m: int) -> None:
    found = bucket(m)
    assert found & (found - 1) == 0
    assert found == 8192 if m > 4096 else m <= found < 2 * m


def test_a_key_is_everything_the_choice_depends_on() -> None:
    epilogue = SPEC.epilogue
    others = [
        key_of(replace(SPEC, m=65), DEVICE),
        key_of(replace(SPEC, n=48), DEVICE),
        key_of(replace(SPEC, k=64), DEVICE),
        key_of(replace(SPEC, epilogue=replace(epilogue, act="silu")), DEVICE),
        key_of(replace(SPEC, epilogue=replace(epilogue, residual=True)), DEVICE),
        key_of(replace(SPEC, epilogue=replace(epilogue, out_dtype="fp32")), DEVICE),
        key_of(replace(SPEC, in_dtype="bf16"), DEVICE),
        key_of(SPEC, replace(DEVICE, gpu="NVIDIA L4")),
        key_of(SPEC, replace(DEVICE, capability=(8, 9))),
        key_of(SPEC, replace(DEVICE, driver="580.82.07")),
        key_of(SPEC, replace(DEVICE, library="abd")),
    ]
    sizes = {"images": 1, "height": 8, "width": 6, "c_in": 56, "c_out": 40}
    others += [key_of(ConvSpec(**sizes, kernel=(1, 1), stride=s, epilogue=epilogue), DEVICE) for s in ((1, 1), (2, 1))]
    assert len({key.text for key in [KEY, *others]}) == len(others) + 1
    assert key_of(replace(SPEC, m=64), DEVICE) == KEY, "the same bucket"


def test_the_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "tuned.json"
    table, other = Table(path), Table(path)
    entry = Entry(config="a", microseconds=1.0, error=0.5)
    table.put(KEY, entry)
    second = replace(KEY, n=1)
    other.put(second, entry)  # ``other`` read the file before ``table`` wrote it
    assert set(Table(path).entries) == {KEY.text, second.text}
    before = path.read_bytes()

    def fails(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(CannotWrite, match="No space left"):
        table.put(replace(KEY, n=2), entry)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 1, "entries": {"x": {}}}', '{"format": 1, "entries": []}'],
)
def test_a_damaged_file_is_an_empty_table(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    table = Table(path)
    assert table.damaged
    assert table.get(KEY) is None
    table.put(KEY, Entry(config="a", microseconds=1.0, error=0.5))
    assert Table(path).get(KEY) is not None


def test_a_file_of_another_format_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"format": 2, "entries": {KEY.text: {"config": "a"}}}))
    assert Table(path).entries == {}


def test_lookup_sees_what_was_tuned_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    assert tuned.lookup(KEY) is None
    Table().put(KEY, Entry(config="a", microseconds=1.0, error=0.5))
    assert tuned.lookup(KEY) == Entry(config="a", microseconds=1.0, error=0.5)
    Table().put(KEY, Entry(config="b", microseconds=0.5, error=0.5))
    stat = tuned.default_path().stat()
    os.utime(tuned.default_path(), ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    entry = tuned.lookup(KEY)
    assert entry is not None
    assert entry.config == "b"


def test_dispatch_takes_the_tuned_one_only_where_it_can_run() -> None:
    spec = GemmSpec(m=512, n=512, k=512)
    native = {"sm90_fp16_pingpong_64x128", "sm90_fp16_swapped_64x16", "sm80_fp16_streamk_64x64"}

    def chosen(name: str, spec: GemmSpec = spec, layout: bool = True, capability: tuple[int, int] = (8, 0)) -> str:
        return str(choices.choose(spec, capability, tma_layout=layout, native=native, tuned_name=name))

    assert chosen("gemm_64x64").startswith("triton gemm_64x64: the fastest")
    assert chosen("sm80_fp16_streamk_64x64").startswith("cutlass sm80_fp16_streamk_64x64: the fastest")
    assert chosen("sm90_fp16_swapped_64x16", capability=(9, 0)).startswith("cutlass sm90_fp16_swapped_64x16: the fast")
    assert "the fastest" not in chosen("sm90_fp16_pingpong_64x128")
    assert "the fastest" not in chosen("sm80_fp16_streamk_64x64", capability=(9, 0)), "it has no code for 9.0"
    assert "the fastest" not in chosen("sm80_fp16_streamk_64x64", layout=False)
    assert "the fastest" not in chosen("sm80_fp16_streamk_64x64", replace(spec, n=511))
    assert "the fastest" not in chosen("a kernel of an older version")
    bf16 = replace(spec, in_dtype="bf16", epilogue=EpilogueSpec(out_dtype="bf16"))
    assert "the fastest" not in chosen("sm80_fp16_streamk_64x64", bf16)


def test_why_explains_the_tuned_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that ``why`` gives the tuner's choice only for the GPU and the sizes that were tuned."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: DEVICE.capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "device_of", lambda _index: DEVICE)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    Table().put(KEY, Entry(config="gemm_64x64", microseconds=1.0, error=0.5))
    told = dispatch.why(SPEC, (9, 0), native=())
    assert told == "triton gemm_64x64: the fastest that accel kernels tune found for this problem"
    assert "the fastest" not in dispatch.why(SPEC, (8, 0), native=()), "that is another GPU"
    assert "the fastest" not in dispatch.why(replace(SPEC, n=48), (9, 0), native=())
    assert "triton gemm_128x128: the fastest" in dispatch.why(SPEC, (9, 0), native=(), tuned_name="gemm_128x128")


def test_what_a_layer_asks_for_is_among_what_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the tuner makes an entry for each key that a layer looks up. Dispatch looks up exact keys. Problems
    without a bias, problems with a residual, and int8 problems with a bf16 output each need an entry."""
    seen: list[GemmSpec] = []

    def tuned_one(spec: GemmSpec, _table: Table) -> tune.Tuned:
        seen.append(spec)
        return tune.Tuned(key=key_of(spec, DEVICE), entry=None, timed={}, refused={})

    monkeypatch.setattr(tune, "tune", tuned_one)
    words = ["tune", "--shape", "64x40x56", "--dtype", "fp16", "--dtype", "int8", "--act", "silu"]
    assert CliRunner().invoke(command, words).exit_code == 0
    made = {key_of(spec, DEVICE).text for spec in seen}
    assert len(made) == len(seen) == 9, "three epilogues, for int8 with two outputs"
    a, b = torch.ones(33, 56, dtype=torch.float16), torch.ones(56, 40, dtype=torch.float16)
    bias, residual = torch.ones(40), torch.ones(33, 40, dtype=torch.float16)
    scales = {"row_scale": torch.ones(33), "col_scale": bias}
    for operands in ({}, {"bias": bias}, {"bias": bias, "residual": residual}):
        spec = problem.gemm_spec(a, b, operands, "silu", None)
        assert key_of(spec, DEVICE).text in made, spec
        for out in (torch.float16, torch.bfloat16):
            spec = problem.gemm_spec(a.to(torch.int8), b.to(torch.int8), operands | scales, "silu", out)
            assert key_of(spec, DEVICE).text in made, spec
    wrong = CliRunner().invoke(command, [*words, "--add", "biases"])
    assert isinstance(wrong.exception, UnknownName)


GEOMETRY = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8", "fp8_e4m3", "fp32"])
def test_a_convolution_is_verified_against_the_reference(dtype: str) -> None:
    """Fails if the tuner rejects the CPU's result. Also fails if the tuner accepts a result with a shifted image, a
    missing operand, a NaN in the last pixel or a wrong shape. The output has more than 256 pixels, so that the tuner
    checks only some pixels."""
    shape = ConvSpec(images=3, height=17, width=12, c_in=5, c_out=7, **GEOMETRY)
    for spec in tune.conv_specs([dtype], ["silu"], [shape], added=("bias+residual",)):
        operands = tune.operands_for(spec, torch.device("cpu"))
        x, w, given_ = operands
        right = dispatch.run_conv2d(spec, x, w, given_)
        assert tune.largest_error(spec, operands, right) <= 1
        for name in spec.epilogue.operands:
            without = {**given_, name: torch.ones_like(given_[name]) if "scale" in name else given_[name] * 0}
            assert tune.largest_error(spec, operands, dispatch.run_conv2d(spec, x, w, without)) > 1, name
        moved = torch.roll(x.float(), 1, 2).to(x.dtype)
        assert tune.largest_error(spec, operands, dispatch.run_conv2d(spec, moved, w, given_)) > 1
        last = right.clone()
        last[-1, -1, -1, -1] = float("nan")
        assert tune.largest_error(spec, operands, last) == float("inf")
        assert tune.largest_error(spec, operands, right.permute(0, 3, 1, 2)) == float("inf")


@pytest.mark.proof
@pytest.mark.parametrize("dtype", test_gpu_kernels.DTYPES)
def test_a_right_kernel_passes_what_the_gpu_is_tested_on(dtype: str) -> None:
    """Fails if the operands of a GPU test overflow the output, or if the bound of a GPU test is too tight. The test
    computes the reference in fp32, which is as accurate as a kernel can be."""
    for sizes in (*test_gpu_kernels.RAGGED, *test_gpu_kernels.ALIGNED):
        for full in (False, True):
            spec = test_gpu_kernels.spec_of(dtype, "silu", sizes, full)
            operands = a, b, given = tune.operands_for(spec, torch.device("cpu"))
            wide = reference.gemm_torch(spec, a, b, given, compute=torch.float32)
            got = wide.to(reference.TORCH_DTYPES[spec.epilogue.out_dtype])
            assert bool(got.isfinite().all()), (sizes, full)
            assert tune.largest_error(spec, operands, got) <= 1, (sizes, full)


def test_what_a_library_has_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if each kernel launch reads the library's build record. Reading the files and JSON of the record takes
    longer than a small kernel."""
    library = SimpleNamespace(path=tmp_path / "library.so", gemms={"sm90_fp16_pingpong_64x128": 0})
    (tmp_path / build.RECORD).write_text(json.dumps({"archs": ["sm_90a"], "files": ["sm90_fp16"]}))
    monkeypatch.setattr(native_launch, "installed", lambda _capability: library)
    assert "sm90_fp16_pingpong_64x128" in dispatch.native_names((9, 0))
    monkeypatch.setattr(build, "_record", lambda path: pytest.fail(f"{path} is read again"))
    assert "sm90_fp16_pingpong_64x128" in dispatch.native_names((9, 0))


PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)  Sun Jul 27\n"
)


def test_another_driver_of_the_same_cuda_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a result tuned with one driver is used with another driver. Several driver versions offer the same CUDA
    version, so the tuner's key contains the driver version. The tuner's key contains the CUDA version only if the
    system doesn't report the driver version."""
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    file = tmp_path / "version"
    for text, version in ((PROPRIETARY, "535.104.05"), (OPEN, "580.65.06"), ("", "13000"), ("NVRM\n", "13000")):
        file.write_text(f"{text}GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1)\n")
        assert dispatch.driver_version(file) == version
    assert dispatch.driver_version(tmp_path / "none") == "13000"
    monkeypatch.delattr(torch._C, "_cuda_getDriverVersion")
    assert dispatch.driver_version(tmp_path / "none") == "0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "G")
    monkeypatch.setattr(dispatch, "native_names", lambda _: [])
    monkeypatch.setattr(dispatch, "driver_version", lambda: "580.65.06")
    assert dispatch.device_of.__wrapped__(0).driver == "580.65.06"


def test_a_triton_without_a_record_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that tuning works if PyTorch's Triton was installed under another package name."""
    triton = pytest.importorskip("triton")

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "G")
    versions: list[str] = []
    monkeypatch.setattr(dispatch, "native_names", lambda _: versions)
    assert dispatch._triton_version() == triton.__version__
    assert dispatch.device_of.__wrapped__(0).gpu == "G"


def test_the_reference_on_a_gpu_has_no_tf32() -> None:
    """Fails if the reference multiplies fp32 numbers in TF32, which has ten mantissa bits and is cuDNN's default. On a
    GPU without Triton, the reference computes the fp32 products."""
    spec = replace(SPEC, in_dtype="fp32")
    assert dispatch._sums(spec, torch.device("cuda")) == torch.float64
    assert dispatch._sums(spec, torch.device("cpu")) == torch.float32
    assert dispatch._sums(SPEC, torch.device("cuda")) == torch.float32, "tf32 holds every fp16"


def test_the_patches_are_those_of_unfold() -> None:
    spec = ConvSpec(images=2, height=7, width=6, c_in=5, c_out=1, **GEOMETRY, in_dtype="fp32")
    x = torch.randn(2, 7, 6, 5, generator=torch.Generator().manual_seed(0))
    sizes = {("kernel_size" if name == "kernel" else name): pair for name, pair in GEOMETRY.items()}
    unfolded = torch.nn.functional.unfold(x.permute(0, 3, 1, 2), **sizes)  # channels first, then taps
    wanted = unfolded.reshape(2, 5, 6, -1).permute(0, 3, 2, 1).reshape(spec.gemm.m, spec.gemm.k)
    rows = torch.tensor([0, 3, spec.gemm.m - 1])
    assert torch.equal(tune.patches(spec, x, rows), wanted[rows])


def test_every_way_to_a_convolution_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ConvSpec(images=2, height=8, width=8, c_in=16, c_out=24, kernel=(3, 3), padding=(1, 1))
    sets = tune.rotated_operands(spec, torch.device("cpu"))
    assert 2 <= len(sets) <= tune.MOST_SETS
    monkeypatch.setattr(dispatch, "native_names", lambda _capability: {"im2col", "sm80_fp16_streamk_64x64"})
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    names = [candidate.name for candidate in tune.candidates_for(spec, sets, (8, 0))]
    assert names == ["conv2d_128x64", "conv2d_64x64", "im2col"]


def test_a_convolution_that_was_tuned_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ``--conv`` and a layer make different keys for the same convolution, or if ``--conv`` also tunes matrix
    products."""
    seen: list[GemmSpec | ConvSpec] = []

    def tuned_one(spec: GemmSpec | ConvSpec, _table: Table) -> tune.Tuned:
        seen.append(spec)
        return tune.Tuned(key=key_of(spec, DEVICE), entry=None, timed={}, refused={})

    monkeypatch.setattr(tune, "tune", tuned_one)
    words = ["tune", "--conv", "2x9x8x5,7,3x2,2,1x0", "--act", "relu", "--dtype", "fp16", "--dtype", "int8"]
    result = CliRunner().invoke(command, [*words, "--json", "--quiet"])
    assert result.exit_code == 0, result.output
    assert "conv2d 3x2 2x2 1x0 1x1" in result.output
    made = {key_of(spec, DEVICE).text for spec in seen}
    assert len(made) == len(seen) == 9
    x, w = torch.ones(2, 9, 8, 5, dtype=torch.float16), torch.ones(7, 3, 2, 5, dtype=torch.float16)
    geometry = ((2, 2), (1, 0), (1, 1))
    bias = torch.ones(7)
    for operands in ({}, {"bias": bias}, {"bias": bias, "residual": torch.ones(2, 5, 4, 7, dtype=torch.float16)}):
        assert key_of(problem.conv_spec(x, w, operands, geometry, "relu", None), DEVICE).text in made
        scaled = operands | {"col_scale": bias}
        spec = problem.conv_spec(x.to(torch.int8), w.to(torch.int8), scaled, geometry, "relu", torch.bfloat16)
        assert key_of(spec, DEVICE).text in made
    seen.clear()
    # without --json, the command prints the table as well
    assert CliRunner().invoke(command, ["tune", "--add", "bias"]).exit_code == 0
    kinds = [type(spec) for spec in seen]
    assert (kinds.count(GemmSpec), kinds.count(ConvSpec)) == (30, 8)
    for wrong in ("8x56x56,64,3", "8x56x56x64,64", "8x56x56x64,64,3x3x3", "8x56x56x64,64,3,1,1,1,1", "x"):
        refused = CliRunner().invoke(command, ["tune", "--conv", wrong])
        assert isinstance(refused.exception, UnknownName), wrong


def test_without_a_gpu_one_line_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(command, ["tune"])
    assert isinstance(result.exception, UnsupportedHere)
    assert str(result.exception).startswith("no NVIDIA GPU here")
    assert "\n" not in str(result.exception)
    wrong = CliRunner().invoke(command, ["tune", "--shape", "16x16"])
    assert isinstance(wrong.exception, UnknownName)


def test_the_key_in_the_file_is_readable() -> None:
    assert isinstance(KEY, Key)
    assert KEY.text == "NVIDIA H100 | sm_90 | 580.65.06 | abc | gemm | fp16 | gelu_erf+bias:fp16 | n40 | k56 | m64"
    assert reference.SLOPE.keys() == set(ACTS)
