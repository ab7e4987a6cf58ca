"""The one command for a machine with a GPU, its steps replaced by short ones.

These fail where a step that fails or hangs takes the rest with it, where a step's processes run on after its limit,
where the report is written only at the end, where the whole outlasts its time, or where a test for a GPU is in no
shard.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "on_gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["on_gpu"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def shell(*texts: str) -> object:
    def commands(_left: float) -> Sequence[Sequence[str]]:
        return [["sh", "-c", text] for text in texts]

    return commands


def test_no_step_takes_the_next_with_it(script: ModuleType, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look(_left: float) -> Sequence[Sequence[str]]:
        seen.append([row["result"] for row in json.loads((tmp_path / "gpu_run.json").read_text())])
        return [["sh", "-c", "echo the last words"]]

    hangs = f"sleep 600 & echo $! > {tmp_path}/pid; echo begun; wait"
    steps = [
        script.Step(name="fails", limit=60, commands=shell("echo right", "echo wrong; exit 3")),
        script.Step(name="hangs", limit=6, commands=shell(hangs)),
        script.Step(name="looks", limit=60, commands=look),
    ]
    rows = script.run_steps(steps, 300, tmp_path)
    assert [row["result"] for row in rows] == ["FAILED", "cut off", "passed"]
    assert seen == [["FAILED", "cut off"]], "the report is there before the next step begins"
    assert [command["code"] for command in rows[0]["commands"]] == [0, 3]
    assert rows[1]["commands"][0]["said"] == "begun\n"
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX", "what it started runs on"
    text = (tmp_path / "gpu_run.md").read_text()
    assert "| fails | FAILED |" in text
    assert "right; wrong" in text
    assert "the last words" in text


def test_a_step_that_finds_nothing_to_run_is_no_end(script: ModuleType, tmp_path: Path) -> None:
    def broken(_left: float) -> Sequence[Sequence[str]]:
        raise subprocess.TimeoutExpired("collect", 90)

    steps = [
        script.Step(name="tests", limit=60, commands=broken),
        script.Step(name="b", limit=60, commands=shell("true")),
    ]
    rows = script.run_steps(steps, 300, tmp_path)
    assert [row["result"] for row in rows] == ["FAILED", "passed"]
    assert "timed out" in (tmp_path / "gpu_run.md").read_text()


def test_all_files_go_where_they_are_wanted(script: ModuleType, tmp_path: Path) -> None:
    """What comes back from a lent machine is one folder."""
    by_name = {step.name: step for step in script.steps(16, tmp_path)}
    (command,) = by_name["benchmark"].commands(100)
    assert command[command.index("--out") + 1] == str(tmp_path)
    assert command[command.index("--seconds") + 1] == "70"
    cases, *warming = by_name["compile what is measured"].commands(60)
    assert cases[-1] == str(Path("tests/kernels/gpu_cases.py")), "what runs under compute-sanitizer is compiled before"
    assert (ROOT / cases[-1]).is_file()
    assert len(warming) == 14
    for command in by_name["compute-sanitizer"].commands(60):
        assert [word for word in command if word.startswith("tests/")] == ["tests/kernels/test_gpu_kernels.py"]


def test_the_whole_has_an_end(script: ModuleType, tmp_path: Path) -> None:
    """The second step gets what the first has left, the third nothing."""
    steps = [script.Step(name=str(at), limit=600, commands=shell("sleep 600")) for at in range(2)]
    started = time.monotonic()
    rows = script.run_steps(steps, 6, tmp_path)
    assert time.monotonic() - started < 120
    assert [row["result"] for row in rows] == ["cut off", "no time left"]


def test_every_test_for_a_gpu_is_in_a_shard(script: ModuleType) -> None:
    files = script.gpu_files()
    assert {"tests/kernels/test_gpu_kernels.py", "tests/accel/test_runtime_tensorrt_gpu.py"} <= set(files)
    assert "tests/kernels/test_on_gpu.py" not in files
    assert script.shards(list("abcdefg"), 3) == [list("adg"), list("be"), list("cf")]
    assert script.shards(["a"], 3) == [["a"]]


def test_a_file_that_cannot_be_imported_is_seen(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails where its tests are just missing among those that passed, or where a folder whose conftest.py lacks a
    package takes the tests of all other folders with it, and the step passes for having nothing to run."""
    mark = "gpu"  # apart, or this file would be taken for one with such tests
    (tmp_path / "test_whole.py").write_text(f"import pytest\n@pytest.mark.{mark}\ndef test_one(): ...\n")
    (tmp_path / "test_broken.py").write_text("import pytest, nothing_of_this_name\n")
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "conftest.py").write_text("import no_package_of_this_name\n")
    (tmp_path / "lacking" / "test_two.py").write_text(f"import pytest\n@pytest.mark.{mark}\ndef test_two(): ...\n")
    files = [str(tmp_path / name) for name in ("test_broken.py", "test_whole.py", "lacking/test_two.py")]
    names, missing = script.collected(files, seconds=300)
    assert [name.rpartition("/")[2] for name in names] == ["test_whole.py::test_one"]
    broken, lacking = missing
    assert broken.startswith(f"not run: {files[0]}: ")
    assert "nothing_of_this_name" in broken
    assert lacking.startswith(f"not run: {files[2]}: ")
    assert "no_package_of_this_name" in lacking
    monkeypatch.setattr(script, "collected", lambda: ([], missing))
    by_name = {step.name: step for step in script.steps(4, tmp_path)}
    with pytest.raises(RuntimeError, match=r"no test for a GPU could be collected: .*no_package_of_this_name"):
        by_name["tests"].commands(60)


@pytest.mark.slow
def test_the_tests_for_a_gpu_are_collected(script: ModuleType) -> None:
    """Fails where one of them can't be imported, or where sanitizer runs land among those that share the GPU."""
    names, missing = script.collected(seconds=600)
    assert missing == []
    functions = {re.sub(r"\[.*", "", name.partition("::")[2]) for name in names}
    wanted = {
        "test_triton_shapes",
        "test_cutlass",
        "test_gemv",
        "test_quantize",
        "test_torch_compile_keeps_the_operator",
    }
    wanted |= {
        "test_cuda_gives_the_same",
        "test_minilm_engine_agrees_with_onnxruntime",
        "test_nccl_collectives_and_shards",
    }
    assert wanted <= functions
    assert not any("sanitizer" in name for name in functions)


def test_without_a_gpu_nothing_is_claimed(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PYTHONPATH": ""}
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "no NVIDIA GPU here: not run"
    assert list(tmp_path.iterdir()) == []
