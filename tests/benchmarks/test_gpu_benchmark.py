"""Proves without a GPU that the GPU benchmark orders its rows, judges its goals and writes its files correctly.

These tests check that the most important rows are measured first. The tests also fail if a goal's ratio is inverted or
judged on the wrong rows. If a measurement fails, the report must still be written. A second run must add its results to
the first run's results, but not to results of another GPU. A run without a GPU must not report results.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_gemm.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_gemm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        spec.loader.exec_module(module)
    return module


def test_the_rows_are_those_of_the_question_and_the_cubes_come_first(script: ModuleType) -> None:
    wanted = [spec for spec, _ in script.problems()]
    assert [(s.m, s.in_dtype) for s in wanted[:8]] == [
        (m, dtype) for dtype in ("bf16", "fp16", "int8", "fp8_e4m3") for m in (4096, 8192)
    ]
    assert {s.m for s in wanted} == {1, 8, 16, 64, 128, 512, 4096, 8192}
    layers = {*script.BERT, *script.LLAMA}
    for m in (1, 8, 16, 64, 128, 512):
        assert {(s.n, s.k) for s in wanted if s.m == m and s.in_dtype == "bf16"} == layers, m
    for dtype in ("fp16", "int8", "fp8_e4m3"):
        assert {1, 16, 64, 512} <= {s.m for s in wanted if s.in_dtype == dtype}, dtype
    assert sum(with_compile for _, with_compile in script.problems()) > 8
    assert all(s.in_dtype == "bf16" for s, with_compile in script.problems() if with_compile)
    assert len({(s.m, s.n, s.k, s.in_dtype) for s in wanted}) == len(wanted)


def row(m: int, n: int, k: int, dtype: str, **us: float) -> dict[str, Any]:
    out = "fp16" if dtype in ("int8", "fp8_e4m3") else dtype
    scales = "+row_scale+col_scale" if dtype in ("int8", "fp8_e4m3") else ""
    return {
        "shape": [m, n, k],
        "dtype": dtype,
        "epilogue": f"none+bias{scales}:{out}",
        "chosen": "cutlass x: tuned",
        "us": {name.replace("_", " "): value for name, value in us.items()},
    }


def test_goals(script: ModuleType) -> None:
    rows = [
        row(4096, 4096, 4096, "bf16", fused=200.0, cublaslt_with_bias=188.0, unfused=230.0),
        row(4096, 4096, 4096, "int8", fused=120.0, cublaslt_product_only=118.0, unfused=131.0),
        row(16, 4096, 4096, "bf16", fused=20.0, cublaslt_with_bias=1.0, unfused=22.0),
        row(64, 64, 64, "bf16", unfused=1.0),
    ]
    cube, int8, decode, failed = script.judged(rows, copy=2000.0)
    assert cube["goals"] == {"cublaslt": [0.94, False], "unfused": [1.15, True]}
    assert cube["tflops"] == pytest.approx(2 * 4096**3 / 200e-6 / 1e12)
    assert int8["goals"] == {"cublaslt": [0.983, True], "unfused": [1.092, False], "bf16": [1.667, True]}
    moved = 4096 * 4096 * 2 + 16 * 4096 * 2 * 2 + 4096 * 4
    assert decode["goals"]["copy"] == [round(moved / 20e-6 / 1e9 / 2000, 3), True]
    assert set(decode["goals"]) == {"copy", "unfused"}
    assert failed["goals"] == {}


def test_what_is_written(script: ModuleType, tmp_path: Path) -> None:
    rows = [row(16, 4096, 4096, "bf16", fused=20.0, unfused=21.0), row(64, 64, 64, "bf16", unfused=1.0)]
    body = {"gpu": "G", "driver": 1, "torch": "2", "copy_gb_s": 2e3, "date": "d", "left": 3}
    body["rows"] = script.judged(rows, 2e3)
    script.write(body, tmp_path)
    assert json.loads((tmp_path / "gpu_gemm.json").read_text()) == json.loads(json.dumps(body))
    text = (tmp_path / "gpu_gemm.md").read_text()
    assert "| 16, 4096, 4096 |" in text
    assert "unfused 1.05x MISSED" in text
    assert "3 of 5 rows" in text
    assert "Not timed with torch.compile, the time was over: 16, 4096, 4096 bf16.\n" in text
    timed = row(16, 4096, 4096, "bf16", fused=20.0, **{"torch.compile": 19.0})
    failed = row(16, 11008, 4096, "bf16", fused=20.0) | {"errors": {"torch.compile": "refused"}}
    text = script.markdown({**body, "rows": script.judged([timed, failed], 2e3)})
    assert "Not timed with torch.compile" not in text
    assert "bf16, torch.compile: refused" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu_gemm.json", "gpu_gemm.md"]


# This code replaces the benchmark script. The benchmark's second problem raises an error, the third problem aborts the
# process, the fifth problem hangs, and the GPU is lost after the sixth problem.
STAND_IN = """
import argparse, importlib.util, os, pathlib, sys, time
sys.path.insert(0, os.path.dirname({script!r}))
spec = importlib.util.spec_from_file_location("gpu_gemm", {script!r})
gpu_gemm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_gemm)
def measure(spec, table):
    at = len(rows)
    rows.append(spec)
    if at == 2:
        os.abort()
    if at == 4:
        time.sleep(600)
    if at == 1:
        raise RuntimeError("out of\\nmemory")
    if lost:
        raise RuntimeError("the GPU is lost")
    return gpu_gemm.named(spec) | {{"us": {{"fused": 1.0}}}}
def compiled(spec, sets):
    if spec.m == 3:
        os.abort()
    return int
parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float)
parser.add_argument("--go-on", action="store_true")
options = parser.parse_args()
folder = pathlib.Path({folder!r})
rows = list(gpu_gemm.read(folder).get("rows", ())) if options.go_on else []
lost = []
gpu_gemm.measure = measure
gpu_gemm.torch.cuda.current_device = lambda: 0
gpu_gemm.gpu_answers = lambda: len(rows) != 6 or lost.append(1)
gpu_gemm.dispatch.device_of = lambda _: argparse.Namespace(gpu="G", driver=1, library="", capability=(9, 0))
gpu_gemm.copy_gigabytes_per_second = lambda: 1.0
gpu_gemm.compiled = compiled
gpu_gemm.tune.rotated_operands = lambda *_: []
gpu_gemm.tune.microseconds = lambda _: 2.0
gpu_gemm.problems = lambda: iter([(gpu_gemm.spec_of(m, 8, 8, "bf16", "silu"), m > 1) for m in range(1, 9)])
gpu_gemm.run(options.seconds, folder, options.go_on)
"""


@pytest.mark.proof
@pytest.mark.slow
def test_a_row_that_kills_or_hangs_its_process_is_one_row(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a row that crashes or hangs loses the result of another row. The test has eight rows. The second row
    raises an error, the third row kills its process, the fifth row hangs, and the GPU is lost after the sixth row. The
    third row also kills its process under torch.compile."""
    wanted = [(script.spec_of(m, 8, 8, "bf16", "silu"), m > 1) for m in range(1, 9)]
    monkeypatch.setattr(script, "problems", lambda: iter(wanted))
    out = tmp_path / "out"
    (tmp_path / "stand_in.py").write_text(STAND_IN.format(script=str(SCRIPT), folder=str(out)))
    out.mkdir()
    (out / "gpu_gemm.json").write_text('{"rows": [1, 2, 3], "left": 0}')
    code = script.supervise([sys.executable, str(tmp_path / "stand_in.py")], 600, out, stalled=12)
    assert code == 0
    body = json.loads((out / "gpu_gemm.json").read_text())
    assert [row["shape"][0] for row in body["rows"]] == list(range(1, 9))
    errors = {at: row["errors"]["row"] for at, row in enumerate(body["rows"]) if "errors" in row}
    assert errors == {1: "out of memory", 2: "its process died with status -6", 4: "no answer in 12 s"}
    assert body["left"] == 0
    assert body["rows"][2]["errors"]["torch.compile"] == "its process died with status -6"
    assert [row["us"].get("torch.compile") for row in body["rows"]] == [None, 2.0, None, *[2.0] * 5]
    text = (out / "gpu_gemm.md").read_text()
    assert "- 5, 8, 8 bf16, row: no answer in 12 s" in text


def test_torch_compile_is_asked_for_every_problem(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a result named "torch.compile" comes from an uncompiled function. By default, torch.compile compiles the
    same code at most eight times and then runs it uncompiled."""
    made = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        nonlocal made
        made += 1
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic, **_: real(f, backend=backend, dynamic=dynamic))
    for m in range(3, 14):
        spec = script.spec_of(m, 8, 8, "bf16", "silu")
        script.compiled(spec, [script.tune.operands_for(spec, torch.device("cpu"))])()
    torch._dynamo.reset()
    assert made == 11


def test_int8_of_few_rows_is_compared_too(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that matrices with few rows can be compared with _int_mm, which takes at least 17 rows on a GPU. Also
    fails if the rows added as padding change the result or appear in it."""
    real, seen = torch._int_mm, []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.shape[0] <= 16:
            raise RuntimeError("self.size(0) needs to be greater than 16")
        seen.append(a.shape[0])
        return real(a, b)

    monkeypatch.setattr(torch, "_int_mm", product)
    for m, rows in ((1, 32), (16, 32), (17, 17)):
        spec = script.spec_of(m, 24, 40, "int8", "silu")
        sets = [script.tune.operands_for(spec, torch.device("cpu"), seed) for seed in range(2)]
        ways = script.runs(spec, sets)
        assert ways["cublaslt product only"]().shape[0] == rows
        for operands in sets:
            assert script.tune.largest_error(spec, operands, ways["unfused"]()) <= 1
        assert seen == [rows] * 3
        seen.clear()


def stand_ins(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the GPU and its measurements, so that every measured time is one microsecond. Returns a list to which
    each measurement adds an entry."""
    asked: list[Any] = []
    wanted = [(script.spec_of(m, 8, 8, "bf16", "silu"), m == 1) for m in (1, 2, 3)]
    device = SimpleNamespace(gpu="G", driver="580.1", library="abc", capability=(9, 0))

    def measure(spec: Any, _table: object) -> dict[str, Any]:
        asked.append(spec.m)
        return dict(script.named(spec) | {"us": {"fused": 1.0}})

    def compiled(spec: Any, _sets: object) -> object:
        asked.append(f"compile {spec.m}")
        return int

    monkeypatch.setattr(script, "problems", lambda: iter(wanted))
    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script, "compiled", compiled)
    monkeypatch.setattr(script, "gpu_answers", lambda: True)
    monkeypatch.setattr(script, "copy_gigabytes_per_second", lambda: asked.append("copy") or 1.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(script.dispatch, "device_of", lambda _: device)
    monkeypatch.setattr(script.dispatch, "native_names", lambda _: frozenset())
    monkeypatch.setattr(script.tune, "rotated_operands", lambda *_: [])
    monkeypatch.setattr(script.tune, "microseconds", lambda _: 1.0)
    return asked


def test_a_second_run_adds_what_is_missing(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a second run measures existing rows again, or skips a missing result of torch.compile. Also fails if the
    run adds rows to a results file that comes from another driver or has other rows."""
    asked = stand_ins(script, monkeypatch)
    file = tmp_path / "gpu_gemm.json"
    script.run(30.0, tmp_path, go_on=True)  # measures all rows, but has no time for torch.compile
    assert asked == ["copy", 1, 2, 3]
    assert "torch.compile, the time was over: 1, 8, 8 bf16." in (tmp_path / "gpu_gemm.md").read_text()
    body = json.loads(file.read_text())
    file.write_text(json.dumps(body | {"rows": body["rows"][:2], "left": 1}))
    asked.clear()
    script.run(300.0, tmp_path, go_on=True)
    assert asked == [3, "compile 1"]
    body = json.loads(file.read_text())
    assert [row["shape"][0] for row in body["rows"]] == [1, 2, 3]
    assert body["rows"][0]["us"] == {"fused": 1.0, "torch.compile": 1.0}
    assert "the time was over" not in (tmp_path / "gpu_gemm.md").read_text()
    asked.clear()
    script.run(300.0, tmp_path, go_on=True)
    assert asked == [], "all is there"
    for change, word in (({"driver": "570.1"}, "driver"), ({"rows": body["rows"][1:]}, "rows")):
        other = json.dumps(body | change)
        file.write_text(other)
        with pytest.raises(SystemExit, match=f"because the file has other values of {word};"):
            script.run(300.0, tmp_path, go_on=True)
        assert file.read_text() == other
    script.run(300.0, tmp_path, go_on=False)
    assert len(json.loads(file.read_text())["rows"]) == 3
    assert asked == ["copy", 1, 2, 3, "compile 1"]


def test_going_on_keeps_what_is_there(script: ModuleType, tmp_path: Path) -> None:
    """Fails if a run with ``--go-on`` removes the results of the last run. Also fails if a process that ends before its
    first measurement is recorded as a failed measurement. Without a GPU, a process ends before its first
    measurement."""
    file = tmp_path / "gpu_gemm.json"
    file.write_text('{"rows": [], "left": 70}')
    told = tmp_path / "told"
    dies = f"import sys; open({str(told)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n'); sys.exit(3)"
    assert script.supervise([sys.executable, "-c", dies], 600, tmp_path, go_on=True) == 3
    assert told.read_text() == "--seconds 600 --go-on\n", "once"
    assert file.read_text() == '{"rows": [], "left": 70}'


def test_what_never_measured_anything_is_no_endless_loop(script: ModuleType, tmp_path: Path) -> None:
    assert script.supervise([sys.executable, "-c", "raise SystemExit(3)"], 600, tmp_path) == 3
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_nothing_is_claimed(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr.strip() == "no NVIDIA GPU here: not run"
    assert list(tmp_path.iterdir()) == []
