"""Proves that the CUTLASS tiles match accel's table, compile to tensor-core instructions and reject wrong calls.

These tests check that the C++ sources and accel's table have the same tiles. The tests also check that each family
compiles to its tensor-core instruction, spills no registers, and isn't slowed down by serialized wgmma. The tests also
check that the library loads without a GPU, and that a wrong call returns its error code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accel.errors import BadConfig, BadFeeds, MissingExtra, UnknownName, UnsupportedHere
from accel.kernels.catalogue import configs, units
from accel.kernels.catalogue.configs import HAND_WRITTEN
from accel.kernels.catalogue.units import FAMILIES, NATIVE, UNITS
from accel.kernels.choose import choices, dispatch
from accel.kernels.native import build, sass
from accel.kernels.native import launch as native_launch
from accel.kernels.native.library import ACTS, DTYPES, Library, Problem
from accel.kernels.proof import check
from tests.support import ROOT

# From each family of kernels, the tests compile one source unit. PROVEN maps the name of each tested unit to its GPU
# architecture.
PROVEN = {"sm80_int8_fp16": "sm_80", "sm90_fp16": "sm_90a", "sm100_bf16": "sm_100a", "sm120_fp8_e4m3_bf16": "sm_120a"}


def test_the_table_is_what_the_sources_hold() -> None:
    for family in FAMILIES:
        text = (build.SOURCES / f"cutlass/{family.name}.cu").read_text()
        assert sorted(re.findall(r"^ACCEL_CONFIG\((\w+),", text, re.MULTILINE)) == sorted(family.tiles)
        assert f'"{family.name}_" ACCEL_UNIT' in text
        capabilities = re.search(r"#tile(?:, (\d+), (\d+))?\)", text)
        assert capabilities is not None
        if capabilities[1]:
            assert (int(capabilities[1]), int(capabilities[2])) == (family.least, family.most)
        for unit in (unit for unit in UNITS if unit.family is family):
            assert 1 <= len(unit.tiles) <= 6, "a unit has to compile in a few minutes"
        assert {dtype for dtype, _ in family.pairs} <= set(family.instructions)


def test_every_configuration_is_listed() -> None:
    rows = {row["name"]: row for row in configs.rows()}
    assert set(NATIVE) <= set(rows)
    row = rows["sm90_int8_bf16_swapped_64x16"]
    assert (row["implementation"], row["tile"], row["archs"]) == ("cutlass", [16, 64, 128], ["sm_90a"])


def test_a_library_holds_the_units_of_its_architectures() -> None:
    def names(*archs: str) -> set[str]:
        return {unit.name for unit, _ in units.units_for(archs)}

    assert names("sm_90a") == {u.name for u in UNITS if u.family.name == "sm90"}
    assert names("sm_120a") == {u.name for u in UNITS if u.family.name in ("sm80", "sm120")}
    assert names("sm_90") == set()
    assert {u.name: archs for u, archs in units.units_for(("sm_80", "sm_86"))}["sm80_fp16"] == ("sm_80", "sm_86")


def test_a_configuration_runs_where_it_has_code() -> None:
    """Fails if accel counts a kernel as runnable on a GPU for which the kernel isn't compiled, such as an sm_80 kernel
    on a Hopper GPU."""

    def families(*capability: int) -> set[str]:
        return {c.unit.family.name for c in NATIVE.values() if c.runs_on((capability[0], capability[1]))}

    assert families(8, 0) == families(8, 9) == {"sm80"}
    assert families(9, 0) == {"sm90"}
    assert families(10, 0) == {"sm100"}
    assert families(10, 3) == families(7, 5) == set()
    assert families(12, 0) == {"sm80", "sm120"}
    assert families(12, 1) == {"sm80"}
    for family in FAMILIES:
        # The library's C code checks that a GPU lies between ``family.least`` and ``family.most``.
        if all(arch.endswith("a") for arch in family.archs):
            assert {f"sm_{family.least}a", f"sm_{family.most}a"} == set(family.archs)
    archs = {native: choices.native_arch(native) for native in ((8, 6), (8, 7), (9, 0), (10, 0), (10, 3), (12, 1))}
    assert list(archs.values()) == ["sm_86", "sm_86", "sm_90a", "sm_100a", "sm_100", "sm_120"]
    with pytest.raises(UnsupportedHere, match=r"7\.5 is below 8\.0"):
        choices.native_arch((7, 5))


def test_without_the_headers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtra, match=r"accel-toolchain\[kernels\]"):
        units.cutlass_includes()


def test_a_unit_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownName, match="sm90_fp16"):
        build.build(["sm_90a"], units=["sm90_fp32"])


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> build.Built:
    """Builds a library with one unit of each kernel family, and compiles the units in parallel. The build takes
    minutes, so pytest's cache keeps the last library."""
    if build.find_nvcc() is None:
        pytest.skip("needs nvcc")
    pytest.importorskip("cutlass_library", reason="needs the extra [kernels]")
    kept = getattr(request.config, "cache", None)  # the cache is None if pytest runs with -p no:cacheprovider
    cache = kept.mkdir("cutlass") if kept else tmp_path_factory.mktemp("cutlass")
    made = build.build(list(PROVEN.values()), units=list(PROVEN), cache=cache)
    for folder in cache.iterdir():
        if folder != made.path.parent and not folder.name.startswith("."):  # running builds use hidden folders
            shutil.rmtree(folder)
    return made


@pytest.mark.nightly  # It takes minutes to compile the library.
@pytest.mark.timeout(3600)
def test_every_family_becomes_tensor_core_instructions(library: build.Built) -> None:
    """Checks that each tile has a kernel for each of its architectures, and that each kernel contains its family's
    instruction. Also fails if the assembler reports spills or serialized wgmma instructions. A function call in the
    epilogue can serialize wgmma."""
    assert library.warnings == ()
    found = sass.products(library.path)
    gemms: Counter[tuple[str, str]] = Counter()
    for unit, archs in units.units_for(library.archs):
        if unit.name in PROVEN:
            gemms.update({(arch, unit.family.instructions[unit.dtype]): len(unit.tiles) for arch in archs})
    made = Counter((arch, word) for (arch, kernel), used in found.items() if "cutlass" in kernel for word in used)
    assert made == gemms, "sm80's unit is there twice: sm_120 runs it too"
    kernels = {kernel: used for (_, kernel), used in found.items() if "cutlass" in kernel}
    assert all(kernels.values()), "a GEMM without a matrix instruction"


@pytest.mark.nightly
def test_the_tree_and_a_library_for_hopper_stay_small(library: build.Built) -> None:
    """Fails if the repository and a library for sm_90a together take 60 MB or more. Building all units for sm_90a takes
    many minutes, so the test multiplies the mean size of a built kernel by the number of kernels."""
    root = ROOT
    if not (root / ".git").exists():
        pytest.skip("no git here to say what is tracked")
    words = ["git", "-C", str(root), "ls-files", "-z"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    tracked = [root / name for name in listed if name]
    tree = sum(path.stat().st_size for path in tracked if path.is_file() and not path.is_symlink())
    here = sum(len(unit.tiles) * len(archs) for unit, archs in units.units_for(library.archs) if unit.name in PROVEN)
    hopper = sum(len(unit.tiles) for unit, _ in units.units_for(("sm_90a",)))
    assert hopper >= 18
    assert tree + library.path.stat().st_size / here * hopper < 60e6


@pytest.mark.nightly
def test_the_library_names_what_it_holds(library: build.Built) -> None:
    loaded = Library(library.path)
    assert set(loaded.gemms) == {name for name, config in NATIVE.items() if config.unit.name in PROVEN}
    assert sorted(loaded.gemms.values()) == list(range(len(loaded.gemms)))


@pytest.mark.nightly
def test_check_reads_the_library(library: build.Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if `accel kernels check` approves a library without reading the library file."""
    monkeypatch.setenv("ACCEL_KERNEL_LIBRARY", str(library.path))
    proof = check._tensor_cores(lambda _message, _fraction: None)
    assert proof.passed, proof.detail
    for word in ("HGMMA", "IMMA", "UTCHMMA", "QMMA"):
        assert word in proof.detail
    monkeypatch.setattr(check, "NATIVE", {})
    assert check._tensor_cores(lambda _message, _fraction: None).passed is False
    (tmp_path / "library.so").write_bytes(library.path.read_bytes()[:5000])
    monkeypatch.setenv("ACCEL_KERNEL_LIBRARY", str(tmp_path / "library.so"))
    damaged = check._tensor_cores(lambda _message, _fraction: None)
    assert damaged.passed is False
    assert "run accel kernels build again" in damaged.detail


def problem(**changed: object) -> Problem:
    given = {"a": 16, "b": 16, "out": 16, "m": 8, "n": 8, "k": 8, "dtype": DTYPES["fp16"], "out_dtype": DTYPES["fp16"]}
    return Problem(**{**given, "act": ACTS["silu"], **changed})


@pytest.mark.nightly
def test_a_wrong_call_gets_its_error_code(library: build.Built) -> None:
    """Checks that each wrong field of the problem's struct gives the right error code. The test changes every field to
    find a struct layout that differs between C and Python."""
    loaded = Library(library.path)
    config = "sm90_fp16_pingpong_64x128"
    wrong: list[tuple[dict[str, object], str]] = [
        ({"a": 0}, "NULL"),
        ({"b": 0}, "NULL"),
        ({"out": 0}, "NULL"),
        ({"m": 0}, "sizes start at 1"),
        ({"n": -8}, "sizes start at 1"),
        ({"k": 2**31}, "sizes start at 1"),
        ({"dtype": DTYPES["int8"]}, "no kernel for this dtype"),
        ({"out_dtype": DTYPES["bf16"]}, "no kernel for this dtype"),
        ({"act": 5}, "no such activation"),
        ({"k": 12}, "multiple of 16 bytes"),
        ({"n": 12}, "multiple of 16 bytes"),
        *(
            ({name: 8}, "multiple of 16 bytes")
            for name in ("a", "b", "out", "bias", "residual", "row_scale", "col_scale")
        ),
    ]
    for changed, message in wrong:
        with pytest.raises(BadFeeds, match=message):
            loaded.gemm(config, problem(**changed))
    with pytest.raises(BadFeeds, match="no such configuration"):
        loaded.gemm("sm90_fp16_of_another_library", problem())
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedHere, match="no NVIDIA GPU"):
            loaded.gemm(config, problem())


def test_a_planted_function_call_is_seen() -> None:
    """Fails if the build drops ptxas's warnings about serialized wgmma or spilled registers."""
    said = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    spilled = "ptxas warning : Registers are spilled to local memory in function 'x', 148 bytes spill stores"
    assert build.slow_code(f"x\n{said}\n{spilled}\nptxas info    : Used 168 registers") == [said, spilled]


def test_a_library_of_other_sources_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library "old" was built from older sources of accel than the library "new", but the record file of "old" has a
    # later date.
    for name, sources in (("new", build.sources_digest()), ("old", "0" * 64)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / build.LIBRARY).write_bytes(b"x")
        (folder / build.RECORD).write_text(f'{{"sources": "{sources}", "archs": ["sm_90a"]}}')
    later = (tmp_path / "new" / build.RECORD).stat().st_mtime + 60
    os.utime(tmp_path / "old" / build.RECORD, (later, later))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / build.RECORD).write_text("{")
    assert build.find_library(tmp_path) == tmp_path / "new" / build.LIBRARY
    monkeypatch.setenv("ACCEL_KERNEL_LIBRARY", str(tmp_path / "mine.so"))
    assert build.find_library(tmp_path) == tmp_path / "mine.so"


def recorded(cache: Path, name: str, archs: list[str], files: list[str], age: int) -> Path:
    """Writes a stand-in for a library into the cache, with a record that is ``age`` seconds old, and returns the
    library's path."""
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / build.LIBRARY).write_bytes(b"x")
    body = {"sources": build.sources_digest(), "archs": archs, "files": files}
    (folder / build.RECORD).write_text(json.dumps(body))
    os.utime(folder / build.RECORD, (1_700_000_000 - age, 1_700_000_000 - age))
    return folder / build.LIBRARY


def test_the_library_is_the_one_with_code_for_the_gpu(tmp_path: Path) -> None:
    """Checks that accel chooses the library that has the most units for a GPU, even if a newer library exists."""
    whole = recorded(tmp_path, "hopper", ["sm_80", "sm_90a"], ["sm80_fp16", "sm90_fp16", "sm90_bf16", "gemv"], age=300)
    ampere = recorded(tmp_path, "ampere", ["sm_80"], ["sm80_fp16", "sm80_bf16", "gemv"], age=200)
    recorded(tmp_path, "bare", ["sm_80", "sm_90a"], ["gemv"], age=100)
    recorded(tmp_path, "host", ["host"], ["gemv"], age=0)
    assert build.find_library(tmp_path, capability=(9, 0)) == whole
    assert build.find_library(tmp_path, capability=(8, 6)) == ampere, "two units with code, the older has one"
    assert build.find_library(tmp_path, capability=(12, 0)) is None
    assert build.find_library(tmp_path) == whole
    newer = recorded(tmp_path, "again", ["sm_90a"], ["sm90_fp16", "sm90_bf16", "quantize_rowwise"], age=50)
    assert build.find_library(tmp_path, capability=(9, 0)) == newer, "of equals the newest"


def test_a_gpu_is_offered_only_what_its_library_has_code_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if accel lets dispatch choose a kernel that the library hasn't compiled for the GPU. The family sm80 also
    supports sm_120, but a library built for sm_80 alone has no code for sm_120."""
    path = recorded(tmp_path, "ampere", ["sm_80"], ["sm80_fp16", "gemv"], age=0)
    native_launch.installed.cache_clear()
    monkeypatch.setenv("ACCEL_KERNEL_LIBRARY", str(path))
    names = dict.fromkeys(["sm80_fp16_streamk_64x64", "a_name_of_another_version"], 0)
    monkeypatch.setattr(native_launch, "Library", lambda path: SimpleNamespace(path=path, gemms=names))
    assert native_launch.names((8, 0)) == {"sm80_fp16_streamk_64x64", *HAND_WRITTEN}
    assert native_launch.names((12, 0)) == set()
    path.with_name(build.RECORD).unlink()
    assert native_launch.names((12, 0)) == {*names, *HAND_WRITTEN}, (
        "a library without a record: dispatch looks at the families"
    )
    native_launch.installed.cache_clear()


@pytest.mark.parametrize("content", [None, b"", b"no library"])
def test_a_wrong_library_in_the_environment_is_an_error(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a wrong file in ACCEL_KERNEL_LIBRARY is an error, so that no other implementation runs silently."""
    path = tmp_path / "mine.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("ACCEL_KERNEL_LIBRARY", str(path))
    native_launch.installed.cache_clear()
    for _ in range(2):  # a failed load must not be cached as "no library"
        with pytest.raises(BadConfig, match=r"ACCEL_KERNEL_LIBRARY is .*mine\.so.*unset it") as caught:
            dispatch.native_names((9, 0))
    assert "\n" not in str(caught.value)
    proof = check._tensor_cores(lambda _message, _fraction: None)
    assert proof.passed is False
    assert str(path) in proof.detail


@pytest.mark.parametrize(
    ("gemms", "kernels", "passed", "said"),
    [
        ([], [], None, "has no GEMM"),
        (["sm80_fp16_streamk_64x64"], [], False, "holds no kernel"),
        (["sm80_fp16_streamk_64x64"], [set()], False, "without a tensor-core product"),
        (["sm80_fp16_streamk_64x64"], [{"HMMA"}], True, "1 configurations, 1 kernels, HMMA"),
    ],
)
def test_no_gemm_is_no_proof(
    gemms: list[str],
    kernels: list[set[str]],
    passed: bool | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCEL_KERNEL_LIBRARY", str(tmp_path / "mine.so"))
    monkeypatch.setattr(check, "Library", lambda _path: SimpleNamespace(gemms=dict.fromkeys(gemms, 0)))
    found = {("sm_80", f"cutlass{at}"): used for at, used in enumerate(kernels)}
    monkeypatch.setattr(check.sass, "products", lambda _path: found)
    proof = check._tensor_cores(lambda _message, _fraction: None)
    assert proof.passed is passed
    assert said in proof.detail
