"""Proves that the hand-written CUDA kernels are correct on the host under ASan and UBSan, and that nvcc builds them.

These tests fail if a kernel accesses memory past a buffer, overflows an integer, or differs from the reference on sizes
that don't fill a tile. The tests check that the C interface returns the right error code for a wrong call. The tests
also fail if the cache returns an old library for changed sources, or if the error on a machine without nvcc takes more
than one line.
"""

from __future__ import annotations

import _ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from accel.cli.kernels import command
from accel.errors import AccelError, BadFeeds, BuildFailed, UnknownName, UnsupportedHere
from accel.kernels.catalogue import reference
from accel.kernels.catalogue.reference import TORCH_DTYPES
from accel.kernels.catalogue.spec import EpilogueSpec, GemmSpec
from accel.kernels.native import build
from accel.kernels.native.library import ACTS, Library

SCRIPT = Path(__file__).with_name("host_kernels.py")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")
Calls = dict[str, Any]


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns the bits of a tensor as integers, because numpy has no bfloat16."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(bits[tensor.element_size()]).numpy()


def run_on_host(calls: Calls, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    made = build.build_for_host("address,undefined", cache=tmp_path / "cache")
    np.savez(tmp_path / "calls.npz", **calls)
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": asan.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command_line = [sys.executable, SCRIPT, made.path, tmp_path / "calls.npz", tmp_path / "results.npz"]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=200, check=False)
    results = dict(np.load(tmp_path / "results.npz")) if done.returncode == 0 else {}
    return done, results


def add(calls: Calls, case: str, function: str, outputs: list[str], numbers: dict[str, Any], **arrays: Any) -> None:
    body = {"function": function, "outputs": outputs, "numbers": numbers}
    calls |= {f"{case}/call": np.array(json.dumps(body)), **{f"{case}/{name}": a for name, a in arrays.items()}}


def gemv_case(dtype: str, act: str, m: int, n: int, k: int, full: bool) -> tuple[GemmSpec, Any, Any, dict[str, Any]]:
    g = torch.Generator().manual_seed(m * n + k)
    names = ("bias", "residual", "row_scale", "col_scale")
    epilogue = EpilogueSpec(act=act, out_dtype=dtype, **dict.fromkeys(names, full))
    spec = GemmSpec(m=m, n=n, k=k, in_dtype=dtype, epilogue=epilogue)
    made = [torch.randn(s, generator=g) for s in ((m, k), (n, k), (n,), (m, n), (m,), (n,))]
    a, b, residual = (made[at].to(TORCH_DTYPES[dtype]) for at in (0, 1, 3))
    operands = {"bias": made[2], "residual": residual, "row_scale": made[4], "col_scale": made[5]}
    return spec, a, b, operands if full else {}


@pytest.mark.proof
@needs_compiler
def test_hand_written_kernels_on_the_host(tmp_path: Path) -> None:
    """Fails if a kernel that is compiled for the host computes a wrong result. The error of gemv has to be within the
    proven bound, and the results of quantize and im2col have to be exact. The sanitizers end the process at the first
    error."""
    calls: Calls = {}
    gemvs = {}
    for at, act in enumerate(ACTS):
        for dtype in ("fp32", "fp16", "bf16"):
            m, n, k = [(1, 1, 1), (16, 5, 33), (3, 7, 8), (2, 9, 19), (7, 3, 17)][at]
            spec, a, b, operands = gemvs[f"gemv {act} {dtype}"] = gemv_case(dtype, act, m, n, k, at % 2 == 1)
            numbers = {"dtype": dtype, "act": act, "m": m, "n": n, "k": k}
            out = raw(torch.zeros(m, n, dtype=TORCH_DTYPES[dtype]))
            arrays = {name: raw(tensor) for name, tensor in operands.items()}
            add(calls, f"gemv {act} {dtype}", "gemv", ["out"], numbers, a=raw(a), b=raw(b), out=out, **arrays)
    numbers = {"dtype": "fp32", "act": "relu", "m": 2, "n": 3, "k": 4}
    holed = np.ones((2, 4), np.float32)
    holed[0, 2] = np.nan
    arrays = {"a": holed, "b": -np.ones((3, 4), np.float32), "out": np.ones((2, 3), np.float32)}
    add(calls, "gemv of a NaN", "gemv", ["out"], numbers, **arrays)
    far = np.array([[np.inf], [1e30], [-1e30], [np.nan]], np.float32)
    for act in ("gelu_tanh", "gelu_erf", "silu"):
        numbers = {"dtype": "fp32", "act": act, "m": 4, "n": 1, "k": 1}
        arrays = {"a": far, "b": np.ones((1, 1), np.float32), "out": np.ones((4, 1), np.float32)}
        add(calls, f"{act} far from 0", "gemv", ["out"], numbers, **arrays)
    rows = {}
    for dtype in ("fp32", "fp16", "bf16"):
        x = (torch.randn(5, 37, generator=torch.Generator().manual_seed(1)) * 50).to(TORCH_DTYPES[dtype])
        x[1], x[2, 7] = 0, float("nan")
        rows[dtype] = x
        for q_dtype in ("int8", "fp8_e4m3"):
            numbers = {"dtype": dtype, "q_dtype": q_dtype, "rows": 5, "columns": 37, "row_stride": 37}
            outs = {"q": np.zeros((5, 37), np.uint8), "scales": np.zeros(5, np.float32)}
            add(calls, f"quantize {dtype} {q_dtype}", "quantize_rowwise", list(outs), numbers, x=raw(x), **outs)
    image = torch.randn(2, 7, 6, 5, generator=torch.Generator().manual_seed(2))
    geometry = {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
    patches = torch.nn.functional.unfold(image.permute(0, 3, 1, 2), **geometry)  # channels first, then taps
    right = patches.reshape(2, 5, 6, -1).permute(0, 3, 2, 1).reshape(-1, 30)
    numbers = {"element_size": 4, "shape": (2, 7, 6, 5), "geometry": (3, 2, 2, 1, 1, 2, 1, 2)}
    add(calls, "im2col", "im2col", ["columns"], numbers, x=image.numpy(), columns=np.zeros(right.shape, np.float32))

    vectors = {dtype: torch.randn(21).to(TORCH_DTYPES[dtype]) for dtype in ("fp32", "fp16", "bf16")}
    for dtype, vector in vectors.items():
        numbers = {"dtype": dtype, "count": 21}
        add(calls, f"widen {dtype}", "widen", ["to"], numbers, source=raw(vector), to=np.zeros(21, np.float32))

    done, results = run_on_host(calls, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    np.testing.assert_array_equal(results["gemv of a NaN/out"], [[np.nan] * 3, [0] * 3])
    for act in ("gelu_tanh", "gelu_erf", "silu"):
        np.testing.assert_array_equal(results[f"{act} far from 0/out"], np.maximum(far, 0))
    for dtype, vector in vectors.items():
        np.testing.assert_array_equal(results[f"widen {dtype}/to"], vector.float().numpy())
    for case, (spec, a, b, operands) in gemvs.items():
        got = torch.from_numpy(results[f"{case}/out"]).view(TORCH_DTYPES[spec.in_dtype])
        exact = reference.gemm_torch(spec, a, b.t(), operands)
        assert bool(((got.double() - exact).abs() <= reference.gemm_bound(spec, a, b.t(), operands)).all()), case
    for dtype, x in rows.items():
        for q_dtype in ("int8", "fp8_e4m3"):
            q, scale = reference.quantize_rowwise_torch(x, q_dtype)
            got = torch.from_numpy(results[f"quantize {dtype} {q_dtype}/q"]).view(q.dtype)
            np.testing.assert_array_equal(got.float().numpy(), q.float().numpy())  # NaNs count as equal
            np.testing.assert_array_equal(results[f"quantize {dtype} {q_dtype}/scales"], scale.numpy())
    np.testing.assert_array_equal(results["im2col/columns"], right.numpy())


@pytest.mark.proof
@needs_compiler
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("gemv.cu", "i < k; i += kThreads", "i <= k; i += kThreads"),
        ("im2col.cu", "w >= 0 && w < g.width", "w >= 0"),
        ("quantize_rowwise.cu", "&q[row * columns + k]", "&q[row * columns + k + 1]"),
    ],
)
def test_one_element_too_far_is_caught(
    file: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, planted)
    text = (planted / file).read_text()
    assert right in text
    (planted / file).write_text(text.replace(right, wrong))
    monkeypatch.setattr(build, "SOURCES", planted)
    calls: Calls = {}
    _, a, b, _ = gemv_case("fp32", "none", 1, 3, 16, False)
    numbers: dict[str, Any] = {"dtype": "fp32", "act": "none", "m": 1, "n": 3, "k": 16}
    add(calls, "gemv", "gemv", ["out"], numbers, a=raw(a), b=raw(b), out=np.zeros((1, 3), np.float32))
    numbers = {"element_size": 4, "shape": (1, 3, 3, 1), "geometry": (3, 3, 1, 1, 1, 1, 1, 1)}
    image = np.zeros((1, 3, 3, 1), np.float32)
    add(calls, "im2col", "im2col", ["columns"], numbers, x=image, columns=np.zeros((9, 9), np.float32))
    numbers = {"dtype": "fp32", "q_dtype": "int8", "rows": 2, "columns": 16, "row_stride": 16}
    outs = {"q": np.zeros((2, 16), np.int8), "scales": np.zeros(2, np.float32)}
    add(calls, "quantize", "quantize_rowwise", list(outs), numbers, x=np.ones((2, 16), np.float32), **outs)
    done, _ = run_on_host(calls, tmp_path)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the library for one architecture with nvcc, one source file at a time."""
    return build.build(["sm_90a"], units=(), jobs=1, cache=tmp_path_factory.mktemp("kernels")).path


@pytest.mark.proof
@needs_nvcc
def test_the_library_loads_without_a_gpu_and_answers_in_codes(library: Path) -> None:
    loaded = Library(library)
    messages = {loaded.message(status) for status in range(12)}
    assert len(messages) == 12, "every status has a message of its own"
    with pytest.raises(BadFeeds, match="NULL"):
        loaded.quantize_rowwise(0, "fp16", 0, "int8", 0, 1, 1, 1)
    with pytest.raises(BadFeeds, match="sizes start at 1"):
        loaded.quantize_rowwise(16, "fp16", 16, "int8", 16, 0, 1, 1)
    with pytest.raises(BadFeeds, match="no kernel for this dtype"):
        loaded.quantize_rowwise(16, "fp16", 16, "fp16", 16, 1, 1, 1)
    with pytest.raises(BadFeeds, match="at most 16 rows"):
        loaded.gemv(16, 16, 16, dtype="fp16", act="none", m=17, n=1, k=1)
    with pytest.raises(BadFeeds, match="no kernel for this dtype"):
        loaded.im2col(16, 16, 8, (1, 1, 1, 1), (1, 1, 1, 1, 0, 0, 1, 1))
    with pytest.raises(BadFeeds, match="no kernel for this dtype"):
        loaded.widen(16, "int8", 16, 1)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedHere, match="no NVIDIA GPU"):
            loaded.gemv(16, 16, 16, dtype="fp16", act="none", m=1, n=1, k=1)


@pytest.mark.proof
@needs_nvcc
def test_the_cache_follows_the_sources(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = library.parent.parent
    assert build.build(["sm_90a"], units=(), cache=cache).cached
    changed = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, changed)
    (changed / "status.cu").write_text("this is no C++\n")
    monkeypatch.setattr(build, "SOURCES", changed)
    with pytest.raises(BuildFailed, match=r"nvcc failed: .*error"):
        build.build(["sm_90a"], units=(), jobs=1, cache=cache)
    assert [folder for folder in cache.iterdir() if folder.name.startswith(".")] == [], "nothing half-built stays"


def test_no_nvcc_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    result = CliRunner().invoke(command, ["build", "--arch", "sm_90a"])
    assert isinstance(result.exception, AccelError)
    assert "nvcc is not installed here" in str(result.exception)
    assert "\n" not in str(result.exception)
    with pytest.raises(UnknownName, match="use one of sm_80"):
        build.build(["sm_70"])


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    """Fails if accel loads a file that is not accel's library. A truncated library would crash the process in dlopen,
    and another program's library lacks accel's C functions."""
    file = tmp_path / "libaccel_kernels.so"
    other = Path(_ctypes.__file__).read_bytes()
    for content in (b"not a library", b"", other[:20000], other[:-1], other):
        file.write_bytes(content)
        with pytest.raises(BuildFailed, match="run accel kernels build again"):
            Library(file)
    with pytest.raises(BuildFailed, match="run accel kernels build again"):
        Library(tmp_path / "not there.so")
