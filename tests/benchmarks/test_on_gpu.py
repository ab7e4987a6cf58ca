"""Proves that on_gpu.py runs and reports all its steps. In these tests, the steps are short commands.

These tests check that a failed or hung step doesn't prevent the next steps, and that all processes of a step end at its
time limit. The tests also fail if the report is written only at the end, or if the whole run exceeds its time limit.
on_gpu.py splits the tests that need a GPU into shards, and must not leave out a test. The report must name each failed
test, and must not count skipped tests as passed.
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

from tests.support import ROOT

SCRIPT = ROOT / "benchmarks" / "on_gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["on_gpu"] = module  # dataclasses need their module in sys.modules
    spec.loader.exec_module(module)
    return module


def shell(*texts: str) -> object:
    def commands(_left: float) -> Sequence[Sequence[str]]:
        return [["sh", "-c", text] for text in texts]

    return commands


@pytest.fixture
def short_steps(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets steps begin that have half a second."""
    monkeypatch.setattr(script, "LEAST", 0.5)


@pytest.mark.usefixtures("short_steps")
def test_no_step_takes_the_next_with_it(script: ModuleType, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look(_left: float) -> Sequence[Sequence[str]]:
        seen.append([row["result"] for row in json.loads((tmp_path / "gpu_run.json").read_text())])
        return [["sh", "-c", "echo the last words"]]

    hangs = f"sleep 600 & echo $! > {tmp_path}/pid; echo begun; wait"
    steps = [
        script.Step(name="fails", limit=60, commands=shell("echo right", "echo wrong; exit 3")),
        script.Step(name="hangs", limit=1.5, commands=shell(hangs)),
        script.Step(name="looks", limit=60, commands=look),
    ]
    rows = script.run_steps(steps, 300, tmp_path)
    assert [row["result"] for row in rows] == ["FAILED", "cut off", "passed"]
    assert seen == [["FAILED", "cut off"]], "the report is written before the next step begins"
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
    """Fails if a step writes a file outside the folder of ``--out``. Users copy only the folder of ``--out`` from the
    GPU machine."""
    by_name = {step.name: step for step in script.steps(16, tmp_path)}
    (command,) = by_name["benchmark"].commands(100)
    assert command[command.index("--out") + 1] == str(tmp_path)
    assert command[command.index("--seconds") + 1] == "70"
    assert "--go-on" not in command
    again = {step.name: step for step in script.steps(16, tmp_path, go_on=True)}["benchmark"]
    assert again.commands(100) == [[*command, "--go-on"]]
    cases, *warming = by_name["compile what is measured"].commands(60)
    assert cases[-1] == str(Path("tests/kernels/torch/gpu_cases.py")), (
        "the file that runs under compute-sanitizer is compiled first"
    )
    assert (ROOT / cases[-1]).is_file()
    assert len(warming) == 14
    for command in by_name["compute-sanitizer"].commands(60):
        assert [word for word in command if word.startswith("tests/")] == ["tests/kernels/torch/test_gpu_kernels.py"]


@pytest.mark.usefixtures("short_steps")
def test_the_whole_has_an_end(script: ModuleType, tmp_path: Path) -> None:
    """Fails if the steps together take longer than the time limit of the run."""
    steps = [script.Step(name=str(at), limit=600, commands=shell("sleep 600")) for at in range(2)]
    started = time.monotonic()
    rows = script.run_steps(steps, 1, tmp_path)
    assert time.monotonic() - started < 120
    assert [row["result"] for row in rows] == ["cut off", "no time left"]


def test_compute_sanitizer_has_its_time(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that compute-sanitizer and the benchmark get at least 150 s each. In this test, the kernel library is
    already built, and all other steps take as long as their limits allow."""
    monkeypatch.setenv("ACCEL_KERNEL_LIBRARY", str(SCRIPT))  # any existing file
    left, granted = 570.0, {}
    for step in script.steps(16, tmp_path):
        granted[step.name] = min(step.limit, left)
        left -= granted[step.name] if step.name != "library" else 0
        assert (step.name == "library") == (step.name != "tests" and step.commands(60) == [])
    assert granted["compute-sanitizer"] >= 150
    assert granted["benchmark"] >= 150
    assert left == 0, "the benchmark gets the time that the other steps don't need"


def test_what_the_caller_brings_is_there(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the steps lose the caller's PYTHONPATH, or if PYTHONPATH lists the caller's folders before this
    repository."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/somewhere", str(tmp_path)]))
    assert script.environment()["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/somewhere", str(tmp_path)]
    for nothing in (lambda: monkeypatch.setenv("PYTHONPATH", ""), lambda: monkeypatch.delenv("PYTHONPATH")):
        nothing()
        assert script.environment()["PYTHONPATH"] == str(ROOT), "an empty entry would be the current folder"


def file_of(script: ModuleType, folder: Path, name: str, text: str) -> list[str]:
    (folder / name).write_text(f"import os, pytest\npytestmark = pytest.mark.{'gpu'}\n{text}")
    return [*script.TESTS, str(folder / name)]


def test_what_was_skipped_is_not_called_passed(script: ModuleType, tmp_path: Path) -> None:
    """Fails if a step counts as passed although pytest skipped all its tests and therefore exited with 0. If at least
    one test ran, the step may pass."""
    skip = "@pytest.mark.skip(reason='needs what is not here')\ndef test_one(): ...\n"
    skipped = file_of(script, tmp_path, "test_skipped.py", skip)
    mixed = file_of(script, tmp_path, "test_mixed.py", skip + "def test_two(): ...\n")
    steps = [
        script.Step(name="a", limit=300, commands=lambda _: [skipped, [sys.executable, "-c", "print('2 passed')"]]),
        script.Step(name="b", limit=300, commands=lambda _: [skipped, mixed]),
    ]
    rows = script.run_steps(steps, 300, tmp_path)
    assert [row["result"] for row in rows] == ["not run", "passed"]
    first = next(line for line in (tmp_path / "gpu_run.md").read_text().splitlines() if line.startswith("| a |"))
    assert "needs what is not here" in first


def test_what_is_cut_off_keeps_the_names_of_its_failures(script: ModuleType, tmp_path: Path) -> None:
    """Checks that the report of a killed or crashed process still names the tests that failed earlier. Also fails if
    the report loses the name of a failed test because the test's output is long."""
    wrong = "@pytest.mark.parametrize('x', ['b c'])\ndef test_wrong(x): assert not x, 'long ' * 5000\n"
    ended = file_of(script, tmp_path, "test_ended.py", f"{wrong}def test_last(): os.kill(os.getpid(), 9)\n")
    crashed = file_of(script, tmp_path, "test_crashed.py", f"{wrong}def test_last(): os.abort()\n")
    failed = file_of(script, tmp_path, "test_failed.py", wrong)
    (row,) = script.run_steps(
        [script.Step(name="a", limit=300, commands=lambda _: [ended, crashed, failed])], 300, tmp_path
    )
    assert [command["code"] for command in row["commands"]] == [-9, -6, 1]
    names = [[name.rpartition("::")[2] for name in command["failed"]] for command in row["commands"]]
    assert names == [["test_wrong[b c]"], ["test_wrong[b c]", "test_last"], ["test_wrong[b c]"]]
    assert row["commands"][0]["said"].strip().endswith("::test_last"), "the report names the last running test"
    assert "test_ended.py::test_wrong[b c];" in (tmp_path / "gpu_run.md").read_text()


def test_every_test_for_a_gpu_is_in_a_shard(script: ModuleType) -> None:
    files = script.gpu_files()
    assert {"tests/kernels/torch/test_gpu_kernels.py", "tests/accel/runtimes/test_tensorrt_gpu.py"} <= set(files)
    assert "tests/benchmarks/test_on_gpu.py" not in files
    assert script.shards(list("abcdefg"), 3) == [list("adg"), list("be"), list("cf")]
    assert script.shards(["a"], 3) == [["a"]]


def test_a_file_that_cannot_be_imported_is_seen(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a test file that can't be imported is skipped without an error. Also fails if pytest collects no tests
    of other folders because one conftest.py can't be imported."""
    mark = "gpu"  # separate from "pytest.mark", so that this file doesn't count as a GPU test
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


@pytest.mark.proof
@pytest.mark.slow
def test_the_tests_for_a_gpu_are_collected(script: ModuleType) -> None:
    """Checks that every test for a GPU can be imported. Also fails if a compute-sanitizer test would run at the same
    time as other tests on the GPU."""
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
        "test_the_engine_of_a_gpt_agrees_with_onnxruntime",
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
