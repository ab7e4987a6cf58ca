"""Builds the kernel library and runs the tests and the benchmark on a machine with an NVIDIA GPU, within ten minutes.

Usage:

    python benchmarks/on_gpu.py                # `make gpu`; writes benchmarks/results/gpu_run.json and .md
    python benchmarks/on_gpu.py --seconds 300  # less time
    python benchmarks/on_gpu.py --out results  # writes all result files to the folder results
    python benchmarks/on_gpu.py --go-on        # adds the rows that the benchmark had no time for in the first run.

Steps run one after another. The commands of a step run in parallel. If a step fails or takes too long, the next step
still runs. The result files are written after each step, so an interrupted run keeps its results. Nothing is
downloaded. The kernel library is $ACCEL_KERNEL_LIBRARY, or else the library in $ACCEL_CACHE_DIR (default: build/gpu).
If there is no kernel library, nvcc builds the library in $ACCEL_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PYTHON = sys.executable
LEAST = 5  # seconds that a step needs to begin
# Shows warnings without failing the tests, because a GPU machine may have other package versions than constraints.txt.
PYTEST = (PYTHON, "-m", "pytest", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider")
# -v prints each test's name as the test runs. pytest's summary also names the failed tests, but the summary is missing
# if pytest crashes or is stopped.
TESTS = (*PYTEST, "-v", "-rfEs", "--durations=5")
FAILURE = re.compile(r"^(\S+\.py::.+?) (?:FAILED|ERROR|Fatal Python error)\b", re.MULTILINE)
PASSED = re.compile(r"\b\d+ passed\b")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the run. ``commands`` is a function that takes the seconds left for the step, and returns the commands
    to run in parallel. All commands are killed after ``limit`` seconds."""

    name: str
    limit: float
    commands: Callable[[float], Sequence[Sequence[str]]]


def run_steps(
    steps: Sequence[Step],
    seconds: float,
    out: Path,
    environment: Callable[[], dict[str, str]] = lambda: dict(os.environ),
) -> list[dict[str, Any]]:
    """Runs each step within its limit, and all steps within ``seconds``. Writes the report after each step and returns
    its rows."""
    end = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    for step in steps:
        started = time.monotonic()
        left = min(step.limit, end - started)
        row: dict[str, Any] = {"step": step.name, "commands": []}
        if left < LEAST:
            row |= {"result": "no time left", "seconds": 0.0}
        else:
            try:
                row["commands"] = _side_by_side(step.commands(left), started + left, environment())
                row["result"] = _result(row["commands"])
            except Exception as error:  # the call of ``step.commands`` may raise any error
                row |= {"result": "FAILED", "commands": [{"command": [], "code": 1, "said": f"{error}", "failed": []}]}
            row["seconds"] = round(time.monotonic() - started, 1)
        rows.append(row)
        print(f"{step.name}: {row['result']} after {row['seconds']:.0f} s", flush=True)
        _write(rows, out)
    return rows


def _result(commands: Sequence[dict[str, Any]]) -> str:
    """Returns the result of a step in words. If pytest skipped every test and exits with 0, the step is "not run"."""
    codes = {command["code"] for command in commands}
    if not codes <= {0}:
        return "cut off" if None in codes else "FAILED"
    tests = [command["said"] for command in commands if "pytest" in command["command"]]
    return "passed" if not tests or any(map(PASSED.search, tests)) else "not run"


def _side_by_side(commands: Sequence[Sequence[str]], end: float, environment: dict[str, str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        # the output goes to files, because a full pipe would block the writing process
        files = [Path(folder) / str(at) for at in range(len(commands))]
        running = [_start(command, file, environment) for command, file in zip(commands, files, strict=True)]
        codes: list[int | None] = []
        try:
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, end - time.monotonic()))
                codes.append(process.returncode)
        finally:
            for process in running:
                _end(process)
        said = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    print("".join(said), end="", flush=True)
    return [
        {"command": list(command), "code": code, "said": text[-6000:], "failed": FAILURE.findall(text)}
        for command, code, text in zip(commands, codes, said, strict=True)
    ]


def _start(command: Sequence[str], output: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with output.open("wb") as stream:
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and all processes that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _write(rows: list[dict[str, Any]], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = ["# One run on a GPU", "", "| step | result | seconds | last words |", "|---|---|---|---|"]
    for row in rows:
        words = "; ".join(dict.fromkeys(line for command in row["commands"] for line in _words(command)))
        words = words[:300].replace("|", "/")
        lines.append(f"| {row['step']} | {row['result']} | {row['seconds']:.0f} | {words} |")
    for name, text in (("gpu_run.json", json.dumps(rows, indent=1)), ("gpu_run.md", "\n".join(lines))):
        temporary = out / f".{name}.part"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(out / name)


def _words(command: dict[str, Any]) -> list[str]:
    """Returns the lines that sum up a command: its failed tests, the reasons if all tests were skipped, and its last
    line."""
    lines = command["said"].strip().splitlines()
    skipped = [] if PASSED.search(command["said"]) else [line for line in lines if line.startswith("SKIPPED [")]
    return [*command["failed"], *skipped, *lines[-1:]]


def gpu_files(root: Path = ROOT) -> list[str]:
    """Returns only the test files with tests for a GPU, because the other files may need packages that the GPU machine
    lacks."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(root)) for file in files if re.search(r"mark\.gpu\b", file.read_text(encoding="utf-8"))
    ]


def shards(names: Sequence[str], count: int) -> list[list[str]]:
    """Distributes ``names`` over at most ``count`` shards, and leaves no shard empty."""
    return [list(names[at::count]) for at in range(min(count, len(names)))]


def collected(files: Sequence[str] = (), seconds: float = 90.0) -> tuple[list[str], list[str]]:
    """Returns the pytest ids of the GPU tests in ``files`` (default: all test files), without the compute-sanitizer
    tests. Also returns a line for each file that pytest can't collect, for example because a package is missing. Each
    file is collected in a separate process, because pytest prints nothing if a folder's conftest.py can't be
    imported."""
    files = files or gpu_files()
    end = time.monotonic() + seconds
    names: list[str] = []
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / str(at) for at in range(len(files))]
        ways = [[*PYTEST, "-q", "--collect-only", "-k", "not sanitizer", file] for file in files]
        running = [_start(way, output, dict(os.environ)) for way, output in zip(ways, said, strict=True)]
        try:
            for file, process, output in zip(files, running, said, strict=True):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, end - time.monotonic()))
                lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
                names += [line for line in lines if "::" in line and not line.startswith("ERROR")]
                if process.returncode not in (0, 5):  # exit status 5: pytest selected no test
                    reasons = [line.strip() for line in lines if re.match(r"E   +\w+: ", line)]
                    why = "no answer in time" if process.returncode is None else f"exit status {process.returncode}"
                    missing += [f"not run: {file}: {'; '.join(dict.fromkeys(reasons)) or why}"]
        finally:
            for process in running:
                _end(process)
    return names, missing


def environment() -> dict[str, str]:
    """Returns the environment of every step. PYTHONPATH has this checkout first, and then the folders of the caller's
    PYTHONPATH. ACCEL_KERNEL_LIBRARY names the kernel library once the library is built."""
    from accel.kernels.native.build import find_library

    folders = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = {**os.environ, "PYTHONPATH": folders, "PYTHONUNBUFFERED": "1"}
    path = find_library()
    return found | ({"ACCEL_KERNEL_LIBRARY": str(path.absolute())} if path is not None else {})


def steps(cores: int, out: Path, go_on: bool = False) -> list[Step]:
    """Returns the steps, the most informative first. The compilers need every core, and the benchmark needs the GPU to
    itself. The benchmark runs last and gets all the remaining time, because a later run can continue the benchmark. A
    later run can't continue the compute-sanitizer tests."""
    build = [PYTHON, "-m", "accel", "kernels", "build", "--arch", "native"]
    benchmark = [PYTHON, "benchmarks/gpu_gemm.py", "--out", str(out)]
    side_by_side = max(1, min(14, cores - 2))
    # pytest gets only the files with a compute-sanitizer test, because pytest stops at once if it can't import a file.
    checked = [
        file for file in gpu_files() if "def test_compute_sanitizer" in (ROOT / file).read_text(encoding="utf-8")
    ]
    sanitizer = [[*TESTS, "-k", f"sanitizer and {tool}", *checked] for tool in ("memcheck", "racecheck")]

    def tests(_: float) -> list[list[str]]:
        names, missing = collected()
        if not names:  # a step without a command would be reported as passed
            raise RuntimeError(f"no test for a GPU could be collected: {'; '.join(missing) or 'none was found'}")
        told = [[PYTHON, "-c", "import sys; print(*sys.argv[1:], sep='; ')", *missing]] if missing else []
        return told + [[*TESTS, *part] for part in shards(names, side_by_side)]

    def warm(_: float) -> list[list[str]]:
        # The warm-up also compiles the kernels that compute-sanitizer checks, because the time limit of the
        # compute-sanitizer step leaves no time for Triton's compiler.
        cases = [[PYTHON, str(Path(file).with_name("gpu_cases.py"))] for file in checked]
        return [*cases, *([*benchmark, "--warm", f"{at}/{side_by_side}"] for at in range(side_by_side))]

    def measure(left: float) -> list[list[str]]:
        return [[*benchmark, "--seconds", f"{left - 30:.0f}", *(["--go-on"] if go_on else [])]]

    return [
        Step(name="library", limit=200, commands=lambda _: [] if "ACCEL_KERNEL_LIBRARY" in environment() else [build]),
        Step(name="tests", limit=180, commands=tests),
        Step(name="compile what is measured", limit=60, commands=warm),
        Step(name="compute-sanitizer", limit=150, commands=lambda _: sanitizer),
        Step(name="benchmark", limit=math.inf, commands=measure),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=570.0, help="how long all of it may take")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--go-on", action="store_true", help="add to the benchmark's results that are there")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("ACCEL_CACHE_DIR", str(ROOT / "build" / "gpu"))
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU here: not run")
    out = options.out.absolute()
    rows = run_steps(steps(os.cpu_count() or 1, out, options.go_on), options.seconds, out, environment)
    raise SystemExit(any(row["result"] != "passed" for row in rows))


if __name__ == "__main__":
    main()
