"""Proves that ``accel bench`` and ``accel.bench`` compare artifacts and sources, and report mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact, Manifest, manifest_path
from accel.errors import BadData, BadSource, UnknownName, UsageError
from accel.machine import available_cores
from accel.sources.source import Source

QUICK = ("--rounds", "5", "--block-seconds", "0.01", "--budget-seconds", "0")
FAST: dict[str, Any] = {"rounds": 5, "block_seconds": 0.01, "budget_seconds": 0}
WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
FACTORY = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12.).reshape(4, 3) / 12)

    def forward(self, x):
        return {"y": x @ self.weight}

make = Net
"""


def save(path: Path, *, output: str = "y", offset: float = 0.0, kind: int = TensorProto.FLOAT) -> Path:
    """Saves the model ``y = cast(x) @ w + offset``. The input x has the dtype ``kind`` and the shape [batch, 4], and is
    cast to float32."""
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["wide", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], [output]),
    ]
    weights = [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(np.float32(offset), "b")]
    x = helper.make_tensor_value_info("x", kind, ["batch", 4])
    y = helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def record(path: Path, **session: Any) -> Artifact:
    """Writes a manifest for the ONNX file, with ``session`` as its session options."""
    artifact = Source(path).open()
    manifest = Manifest(
        kind="onnx",
        signature=artifact.signature,
        files=artifact.hashes(),
        properties=artifact.properties,
        session=session,
    )
    manifest.write(manifest_path(path))
    return replace(artifact, manifest=manifest)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Saves the same model twice, with 0.25 added to the outputs of the second model."""
    return save(tmp_path / "a.onnx"), save(tmp_path / "b.onnx", offset=0.25)


def test_json_is_one_object_and_progress_goes_to_stderr(
    two: tuple[Path, Path], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """Checks that stdout holds one JSON object with the documented fields, and that the report file holds the same
    object."""
    out = tmp_path / "report.json"
    ran = cli("bench", *two, *QUICK, "--sizes", "batch=3", "--threads", "1", "--json", "-o", out)
    assert ran.code == 0
    body = json.loads(ran.stdout)
    assert json.loads(out.read_text()) == body
    first, second = body["results"]
    assert (first["name"], second["name"]) == ("a.onnx (onnxruntime)", "b.onnx (onnxruntime)")
    assert {"median_ms", "p90_ms", "p99_ms", "speedup", "ci95", "verdict"} <= set(second)
    assert second["max_abs_diff"] == pytest.approx(0.25)
    assert first["verdict"] == "baseline"
    assert body["baseline"] == first["name"]
    assert body["sizes"] == {"batch": 3}
    assert body["environment"]["threads"] == 1
    assert "bench: round" in ran.stderr


def test_the_table_names_every_candidate(two: tuple[Path, Path], cli: Callable[..., Any]) -> None:
    """Checks that the table shows every candidate, the verdicts and the noise floor, and that ``--quiet`` prints only
    the table."""
    ran = cli("bench", two[1], "--against", two[0], *QUICK, "--quiet")
    assert ran.code == 0
    assert ran.stderr == ""
    for word in ("a.onnx", "b.onnx", "baseline", "noise floor", "0.25"):
        assert word in ran.stdout


def test_a_noisy_machine_is_said(two: tuple[Path, Path], cli: Callable[..., Any], monkeypatch: Any) -> None:
    """Checks that only a noisy benchmark gives a warning. The warning comes if the measured noise is above a limit. One
    run has a limit that is always exceeded, and one run has a limit that is never exceeded."""
    for least, noisy in ((0.0, True), (float("inf"), False)):
        monkeypatch.setattr("accel.timing.report.NOISY_FLOOR", least)
        ran = cli("bench", two[0], *QUICK, "--json")
        body = json.loads(ran.stdout)
        wanted = [f"differences under {body['noise_floor']:.1%} can't be seen"] if noisy else []
        assert [w for w in wanted if w not in "".join(body["warnings"])] == []
        # Beside other work, a further warning says that the fastest runs are compared.
        assert any("can't be seen" in warning for warning in body["warnings"]) is noisy
        assert ("accel: warning: the machine is noisy" in ran.stderr) is noisy
        # Without --json, the table alone has the warning.
        shown = cli("bench", two[0], *QUICK)
        text = " ".join(f"{shown.stdout} {shown.stderr}".split())
        assert text.count("the machine is noisy") == noisy


@pytest.mark.slow
def test_pytorch_is_one_more_candidate(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks that a source can be the baseline, that the user can declare the source's inputs, and that torch.compile
    can be a candidate."""
    source = tmp_path / "my_bench_model.py"
    source.write_text(FACTORY)
    report = accel.bench(
        [two[0]], against=f"{source}:make", also=["torch-compile"], inputs=["x:float32[batch,4]"], **FAST
    )
    assert [row.name for row in report.rows] == ["eager", "torch.compile", "a.onnx (onnxruntime)"]
    assert [row.runtime for row in report.rows] == ["torch", "torch-compile", "onnxruntime"]
    assert [row.error for row in report.rows] == [None, None, None]
    assert all(row.max_abs_diff < 1e-5 for row in report.rows)
    assert report.row("torch.compile").first_run_ms > report.row("eager").first_run_ms


def test_a_folder_stands_for_what_is_in_it(tmp_path: Path) -> None:
    """Checks that bench times only the chosen model if the folder was made by accel optimize. In any other folder,
    bench must time every artifact. Bench must not time a file without a manifest, such as a rejected candidate."""
    chosen = record(save(tmp_path / "out" / "model.onnx"), runtime="onnxruntime", options={"threads": 1})
    for name in ("fp32", "other"):
        record(save(tmp_path / "several" / f"{name}.onnx"))
    save(tmp_path / "several" / "stray.onnx")
    report = accel.bench([chosen.path.parent, tmp_path / "several"], **FAST)
    names = ["out/model.onnx (onnxruntime)", "fp32.onnx (onnxruntime)", "other.onnx (onnxruntime)"]
    assert [row.name for row in report.rows] == names
    assert {row.error for row in report.rows} == {None}


def test_the_baseline_also_runs_with_the_threads_of_the_candidate(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Fails if a candidate with one thread is compared only with a baseline on all cores, or if the table doesn't say
    which row ran with how many threads."""
    if available_cores() < 2:
        pytest.skip("this process has a single core")
    chosen = record(save(tmp_path / "out" / "model.onnx"), runtime="onnxruntime", options={"threads": 1})
    report = accel.bench([chosen.path.parent], against=two[0], **FAST)
    names = ["a.onnx (onnxruntime)", "a.onnx (onnxruntime), 1 thread", "out/model.onnx (onnxruntime)"]
    assert [row.name for row in report.rows] == names
    assert [row.options["threads"] for row in report.rows] == [available_cores(), 1, 1]
    assert f"{available_cores()} threads" in report.table()
    assert "1 thread" in report.table()
    for same in ({"threads": 1}, {"threads": available_cores()}):
        assert len(accel.bench([chosen.path.parent], against=two[0], **same, **FAST).rows) == 2


def test_fewer_rounds_than_asked_are_said(two: tuple[Path, Path]) -> None:
    """Fails if the budget ends the rounds early without a note."""
    few = accel.bench(list(two), rounds=200, block_seconds=0.01, budget_seconds=0.5)
    done = len(few.order)
    assert 5 <= done < 200
    assert few.notes == (f"{done} rounds instead of 200, because a round takes long; budget_seconds= allows more",)
    assert accel.bench(list(two), **FAST).notes == ()


def test_the_same_file_twice_gets_two_names(two: tuple[Path, Path]) -> None:
    """Checks that a model can be compared with itself, and that two candidates from one file get different names."""
    report = accel.bench([two[0], two[0], Source(two[0]).open()], **FAST)
    assert len({row.name for row in report.rows}) == 3


def test_inputs_of_another_width_are_cast(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks that bench can compare the float16 version of a model with the float32 version."""
    half = save(tmp_path / "half.onnx", kind=TensorProto.FLOAT16)
    row = accel.bench([two[0], half], **FAST).rows[1]
    assert row.error is None
    assert 0 < row.max_abs_diff < 0.01


def test_exit_code_is_1_where_nothing_could_be_compared(
    two: tuple[Path, Path], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """Checks that the exit code is 0 if at least one candidate can be compared, and otherwise 1."""
    other = save(tmp_path / "other.onnx", output="logits")
    ran = cli("bench", two[0], other, *QUICK, "--json", "-q")
    assert ran.code == 1
    assert "the outputs of this model are logits" in json.loads(ran.stdout)["results"][1]["error"]
    assert cli("bench", *two, other, *QUICK, "-q").code == 0


def test_the_users_data_is_run_in_whole_batches(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks that bench runs the user's data instead of random inputs, and that a shorter last batch doesn't change the
    batch size. The data are numbers from 100 to 101."""
    data = tmp_path / "data.npz"
    np.savez(data, x=np.random.default_rng(0).uniform(100, 101, (10, 4)).astype(np.float32))
    far = save(tmp_path / "far.onnx", offset=1000.0)
    report = accel.bench([two[0], far], data=data, sizes={"batch": 4}, **FAST)
    assert report.sizes == {"batch": 4}
    assert report.rows[1].max_abs_diff == pytest.approx(1000, rel=1e-3)
    # Each input is between 100 and 101, so each output is 100 to 101 times the sum of a column of the weights.
    assert 1000 / (101 * WEIGHT.sum(0).max()) < report.rows[1].max_rel_diff < 1000 / (100 * WEIGHT.sum(0).min())
    with pytest.raises(BadData, match="less than one batch of 8"):
        accel.bench(list(two), data=_few(tmp_path), sizes={"batch": 8}, **FAST)


def _few(folder: Path) -> Path:
    path = folder / "few.npz"
    np.savez(path, x=np.ones((3, 4), np.float32))
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{d}/gone.onnx",), "does not exist"),
        (("{d}/empty",), "holds no model"),
        (("{d}/a.onnx", "--sizes", "batch"), "can't read --sizes 'batch'"),
        (("{d}/a.onnx", "--sizes", "batch=0"), "sizes start at 1"),
        (("{d}/a.onnx", "--sizes", "length=3"), "no input has a dim called 'length'"),
        (("{d}/a.onnx", "--also", "torch-compile"), "name a source with --against"),
        (("{d}/a.onnx", "--also", "openvino"), "doesn't run PyTorch sources"),
        (("{d}/a.onnx", "--also", "nonsense"), "unknown runtime"),
        (("{d}/a.onnx", "--rounds", "2"), "5"),
        (("{d}/a.onnx", "--data", "{d}/gone.npz"), "gone.npz does not exist"),
        (("{d}/a.onnx", "--data", "{d}/few.npz", "--sizes", "length=3"), "comes from the samples in"),
        ((), "Missing argument"),
    ],
)
def test_wrong_words_end_in_one_line(
    two: tuple[Path, Path], tmp_path: Path, cli: Callable[..., Any], words: tuple[str, ...], message: str
) -> None:
    """Checks that a wrong argument gives exit code 2 and a message that names the mistake, without a traceback."""
    assert two[0].is_file()
    (tmp_path / "empty").mkdir()
    _few(tmp_path)
    ran = cli("bench", *(w.format(d=tmp_path) for w in words), "-q")
    assert ran.code == 2
    assert message in ran.stderr
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr


def test_python_raises_what_the_command_prints(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks that the Python API finds the same mistakes as the command."""
    with pytest.raises(UsageError, match="nothing to time"):
        accel.bench([])
    with pytest.raises(UnknownName):
        accel.bench([two[0]], also=["nonsense"])
    with pytest.raises(BadSource, match="does not exist"):
        accel.bench([tmp_path / "gone.onnx"])


def test_nothing_is_timed_when_the_report_cant_be_written(two: tuple[Path, Path], cli: Callable[..., Any]) -> None:
    """Checks that bench refuses a wrong ``-o`` before it starts to time."""
    ran = cli("bench", *two, *QUICK, "-o", two[0].parent)
    assert ran.code == 1
    assert "round" not in ran.stderr


def test_ctrl_c_promises_nothing_to_go_on_with(
    cli: Any, digits: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that Ctrl-C during a benchmark writes no report. The message must not promise that the next run continues
    the benchmark."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("accel.api.bench.measure", interrupted)
    ran = cli("bench", digits.path, "-o", tmp_path / "r.md")
    assert (ran.code, ran.stdout) == (1, "")
    assert "interrupted, no report was written; run the same command again" in ran.stderr
    assert "goes on" not in ran.stderr
    assert not (tmp_path / "r.md").exists()
