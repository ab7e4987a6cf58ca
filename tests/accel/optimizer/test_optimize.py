"""Proves that accel optimize gates, judges and measures its candidates, and publishes the fastest candidate within the
accuracy budget."""

from __future__ import annotations

import html
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.artifact import Artifact, manifest_path
from accel.cli.optimize import command
from accel.converters.from_torch.operators import order
from accel.errors import CannotWrite, GateFailed, NothingPassed, UnsupportedHere
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.choice import fastest, likeliest
from accel.optimizer.judge.comparison import Judge, Judgement
from accel.sources.source import Source

TOP1 = "accel.examples.digits:top1"


@pytest.fixture(scope="module")
def result(
    digits: Artifact, digits_data: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> accel.api.optimize.Optimization:  # type: ignore[name-defined]
    """Optimizes the trained net for every target that this machine runs, judged by top-1 accuracy on real test
    images."""
    calibration, test = digits_data
    return accel.optimize(
        digits.path,
        out=tmp_path_factory.mktemp("optimized") / "out",
        data=calibration,
        eval_data=test,
        metric=TOP1,
        rounds=5,
    )


def test_every_candidate_is_gated_judged_and_measured(result: Any) -> None:
    """Checks that each accepted candidate was judged and timed, and that the remaining candidates have a reason. Also
    checks that every runtime has a candidate."""
    rows = {row.name: row for row in result.candidates}
    assert {"source", "ort-cpu int8 static", "ort-cpu int8 dynamic", "openvino fp32", "openvino int8"} <= set(rows)
    for row in rows.values():
        if row.status in ("chosen", "passed"):
            assert row.measured["median_ms"] > 0
            assert row.judgement.metric > 0.95
            assert row.judgement.drop <= result.max_drop
        else:
            assert row.reason
    assert [row.status for row in result.candidates].count("chosen") == 1


def test_the_choice_is_the_fastest_and_never_slower_than_the_source(result: Any) -> None:
    """Checks that the chosen candidate is the fastest accepted candidate, and isn't slower than the source."""
    rows = {row.name: row for row in result.candidates}
    chosen = rows[result.chosen]
    if result.chosen != "source":
        assert chosen.measured["verdict"] == "faster"
        faster = [r for r in rows.values() if r.status == "passed" and r.measured["verdict"] == "faster"]
        # The test ignores candidates that were not in the last measurement. The test also ignores session options that
        # are no faster than the default options.
        bases = {r.base for r in rows.values() if r.base}
        faster = [r for r in faster if r.base or r.name in bases or not bases]
        faster = [r for r in faster if not r.reason.startswith("not measurably faster than")]
        assert all(chosen.measured["speedup"] >= r.measured["speedup"] for r in faster)


def test_what_is_published(result: Any) -> None:
    """Checks that accel.load loads the folder with the chosen runtime, and that optimize.json and the manifest agree
    with the choice."""
    folder = result.artifact.path.parent
    body = json.loads((folder / "optimize.json").read_text())
    assert body["chosen"] == {"name": result.chosen, "file": result.artifact.path.name}
    with accel.load(folder) as session:
        runtime = result.artifact.manifest.session["runtime"]
        assert type(session).__module__ == f"accel.runtimes.{runtime}"
        outputs = session.run(session.example_inputs(batch=3))
        assert outputs["logits"].shape == (3, 10)
    assert accel.inspect(folder, check=True).intact


def test_the_page_of_a_real_run(result: Any) -> None:
    """Fails if the page lacks a candidate, the command, or the hash of a stage of the chosen model. Also fails if the
    page loads a file."""
    page = (result.artifact.path.parent / "report.html").read_text(encoding="utf-8")
    for row in result.candidates:
        assert html.escape(row.name) in page
    for record in result.artifact.history:
        assert record["output"][0][:12] in page
    assert f"--metric {TOP1}" in page
    assert 'id="pareto"' in page
    assert 'id="latency"' in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)


def test_the_command_does_the_same(result: Any) -> None:
    """Checks that accel accepts the command in the report. Also fails if the command has another metric, target, file
    name or number of rounds than the search."""
    words = shlex.split(result.command)
    assert words[:2] == ["accel", "optimize"]
    asked = command.make_context("optimize", words[2:]).params
    assert (asked["metric"], asked["rounds"], asked["target"]) == (TOP1, 5, ("auto",))
    assert Path(asked["model"]).name == "digits.onnx"
    assert asked["data"].name == "digits_calib.npz"


def test_the_second_run_does_no_work(
    result: Any, digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a second run with the same arguments makes, judges or measures a candidate again."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("worked again")

    monkeypatch.setattr("accel.stage._make", never)
    monkeypatch.setattr("accel.timing.paired.measure", never)
    monkeypatch.setattr(Judge, "judge", never)
    # By default, accel measures again if noise decided the verdict (see measure/test_noise.py).
    monkeypatch.setattr("accel.optimizer.measure.timing.outcome_is_open", lambda _: False)
    calibration, test = digits_data
    again = accel.optimize(digits.path, out=tmp_path / "out", data=calibration, eval_data=test, metric=TOP1, rounds=5)
    assert again.chosen == result.chosen
    assert again.artifact.digest == result.artifact.digest


def test_an_engine_is_built_without_a_gpu(
    cli: Any, digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path
) -> None:
    """Checks that accel publishes an engine without a GPU, and that the engine's chain of hashes includes the weights.
    The report must say that the engine was not measured."""
    out = tmp_path / "engine"
    words = ["--target", "tensorrt-rtx", "--precision", "fp16", "--compute-capability", "8.6"]
    ran = cli("optimize", digits.path, *words, "--profile", "image=1x1x8x8,8x1x8x8,64x1x8x8", "-o", out, "--json")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["chosen"] == {"name": "tensorrt-rtx fp16", "file": "model.engine"}
    assert "built, not measured" in body["notes"][0]
    shown = cli("inspect", out, "--check", "--json")
    assert shown.code == 0, shown.stderr
    chain = json.loads(shown.stdout)
    assert chain["intact"] is True
    assert any(link["path"].endswith("digits.safetensors") and link["status"] == "ok" for link in chain["chain"])
    assert [s["name"] for s in chain["stages"]][-2:] == ["cast", "engine_from_onnx"]
    assert chain["stages"][-1]["gates"][0]["passed"] is None


def test_a_form_that_cannot_be_made_is_a_row(digits: Artifact, tmp_path: Path) -> None:
    """Fails if the whole run ends because one precision is impossible for the model. Also checks that the candidate's
    row in the report names the fix."""
    result = accel.optimize(digits.path, out=tmp_path / "out", target="tensorrt-rtx", compute_capabilities=["8.6"])
    rows = {row.precision: row for row in result.candidates[1:]}
    assert rows["bf16"].status == "rejected"
    assert "opset=22" in rows["bf16"].reason
    assert rows["fp16"].status == "chosen"
    assert rows["int8"].status == "not tried"
    assert "pass data=" in rows["int8"].reason


def test_no_candidate_within_the_budget(digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks that accel raises an error and publishes no engine if no candidate is within the accuracy budget."""

    with accel.load(digits.path) as session:
        images = np.load(digits_data[1])["image"]
        exact = session.run({"image": images})["logits"]

    def same(outputs: dict[str, np.ndarray], data: dict[str, np.ndarray]) -> float:
        return float(np.abs(outputs["logits"] - exact).max() < 1e-5)

    common: dict[str, Any] = {"data": digits_data[0], "eval_data": digits_data[1], "metric": same, "max_drop": 0.0}
    with pytest.raises(NothingPassed, match="raise max_drop="):
        accel.optimize(digits.path, out=tmp_path / "a", target="tensorrt-rtx", precision="fp16", **common)
    assert not (tmp_path / "a" / "model.engine").exists()


def test_other_peoples_files_are_left_alone(digits: Artifact, tmp_path: Path) -> None:
    """Fails if accel overwrites a model that accel did not make, or the source itself."""
    (tmp_path / "model.onnx").write_bytes(b"mine")
    with pytest.raises(CannotWrite, match="not made by accel"):
        accel.optimize(digits.path, out=tmp_path, target="ort-cpu", rounds=5)
    assert (tmp_path / "model.onnx").read_bytes() == b"mine"
    own = digits.copy_to(tmp_path / "own" / "model.onnx")
    with pytest.raises(CannotWrite, match="is the model to optimize"):
        accel.optimize(own.path, out=own.path.parent, target="ort-cpu", rounds=5)


def test_a_new_choice_replaces_the_old_one(digits: Artifact, tmp_path: Path) -> None:
    """Fails if the chosen model of an earlier run stays beside the new model, because loading the folder would be
    ambiguous."""
    out = tmp_path / "out"
    digits.copy_to(out / "model.onnx")
    words = {"target": "tensorrt-rtx", "precision": "fp32", "compute_capabilities": ["8.6"]}
    accel.optimize(digits.path, out=out, **words)  # type: ignore[arg-type]
    assert sorted(p.name for p in out.iterdir()) == [
        "model.engine",
        "model.engine.manifest.json",
        "optimize.json",
        "report.html",
    ]
    assert Source(out).open().kind == "engine"


def test_a_tf32_engine_is_judged_with_its_rounding(digits: Artifact, tmp_path: Path) -> None:
    """Fails if a TF32 engine is built as an fp32 engine, or judged on products that aren't rounded. Without a GPU, the
    judge runs the engine's graph. A GPU without TF32 is refused."""
    words = {"target": "tensorrt-rtx", "precision": ["fp32", "tf32"], "compute_capabilities": ["8.6"]}
    result = accel.optimize(digits.path, out=tmp_path / "out", **words)  # type: ignore[arg-type]
    rows = {row.name: row for row in result.candidates}
    exact, rounded = (rows[f"tensorrt-rtx {precision}"] for precision in ("fp32", "tf32"))
    assert [row.artifact.properties["precision"] for row in (exact, rounded)] == ["fp32", "tf32"]
    assert "onnx-rounded" not in exact.judgement.judged_on
    assert "onnx-rounded" in rounded.judgement.judged_on
    assert 0 < rounded.judgement.max_abs_diff < 1
    assert rounded.judgement.max_abs_diff > 10 * exact.judgement.max_abs_diff
    words |= {"precision": ["tf32"], "compute_capabilities": ["7.5"]}
    result = accel.optimize(digits.path, out=tmp_path / "b", **words)  # type: ignore[arg-type]
    (refused,) = (row for row in result.candidates if row.name == "tensorrt-rtx tf32")
    assert "compute capability 7.5 has no tf32; use fp32 or build for 8.0" in refused.reason


def test_precision_of_another_target(digits: Artifact, tmp_path: Path) -> None:
    """Fails if accel silently replaces an unsupported precision."""
    with pytest.raises(UnsupportedHere, match="openvino has no fp16"):
        accel.optimize(digits.path, out=tmp_path / "out", target="openvino", precision="fp16")


def test_judged_without_a_metric(digits: Artifact, digits_data: tuple[Path, Path]) -> None:
    """Fails if a judge without a metric finds a difference between a model and itself."""
    judge = Judge(Source(digits.path).open(), digits_data[0], None)
    same = judge.judge(digits, {})
    assert same.drop < 1e-12
    assert same.max_abs_diff == 0


def test_a_judgement_survives_json() -> None:
    """Checks that an infinite accuracy drop is written as null, because JSON has no infinity."""
    bad = Judgement(drop=float("inf"), metric=None, reference_metric=None, max_abs_diff=1.0, judged_on="x")
    assert bad.to_json()["drop"] is None


def _row(name: str, ms: float, verdict: str) -> Any:
    return CandidateResult(name=name, measured={"median_ms": ms, "speedup": 10.0 / ms, "verdict": verdict})


def test_the_rule_of_choice() -> None:
    """Checks that accel never chooses a rejected or slower candidate, or a candidate that only seems faster because of
    noise."""
    source = _row("source", 10.0, "baseline")
    noisy, slower = _row("noisy", 9.9, "no measurable difference"), _row("slower", 20.0, "slower")
    wrong = replace(_row("wrong", 1.0, "faster"), status="rejected", reason="drop")
    good, best = _row("good", 6.0, "faster"), _row("best", 5.0, "faster")
    assert fastest(source, [noisy, slower, wrong]) is source
    assert fastest(source, [good, noisy, best, wrong]) is best
    assert good.reason == "slower than best"


def test_unmeasured_targets_prefer_fp16() -> None:
    """Without measurements, accel must choose fp16 before int8 and int8 before fp32. Fails if accel uses another order,
    or chooses a rejected candidate."""
    rows = [replace(_row(p, 1.0, ""), precision=p) for p in ("fp32", "int8", "fp16")]
    assert likeliest(rows).precision == "fp16"
    rows[2].status = "rejected"
    assert likeliest(rows).precision == "int8"


def test_the_manifest_holds_the_measurement(result: Any) -> None:
    """Checks that the published manifest records how the model was judged and measured."""
    session = json.loads(manifest_path(result.artifact.path).read_text())["session"]
    assert session["judgement"]["metric"] == pytest.approx(session["judgement"]["reference_metric"], abs=0.02)
    assert session["measured"]["median_ms"] > 0


SCORES = """
import torch

class Net(torch.nn.Module):
    def __init__(self, decide):
        super().__init__()
        self.decide = decide

    def forward(self, x):
        scores = torch.logcumsumexp(x, 1)
        return (scores > 0).long() if self.decide else scores

def scores():
    return Net(False)

def decisions():
    return Net(True)
"""


def _optimize_scores(factory: str, scale: float, folder: Path, precision: str = "fp32") -> Any:
    (folder / "net.py").write_text(SCORES)
    x = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32) * scale
    np.savez(folder / "data.npz", x=x)
    spec, data = f"{folder / 'net.py'}:{factory}", folder / "data.npz"
    return accel.optimize(
        spec,
        inputs=["x:float32[batch,8]"],
        data=data,
        target="ort-cpu",
        precision=precision,
        rounds=5,
        vary_session=False,
        out=folder / "out",
    )


@pytest.fixture
def exported_wrongly(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away accel's own translation of logcumsumexp. The translation of torch's exporter is wrong for large
    inputs."""
    monkeypatch.setattr(order, "translation_table", dict)


@pytest.mark.proof
@pytest.mark.usefixtures("exported_wrongly")
def test_a_source_that_is_another_on_the_users_data(tmp_path: Path) -> None:
    """Fails if accel makes candidates from an ONNX export that differs from the source on the user's data. In this
    test, the export is right on the gate's inputs, but wrong on the user's large inputs."""
    with pytest.raises(GateFailed, match=r"on samples 0 to 7 of .*data.npz the ONNX form of .*net.py:scores"):
        _optimize_scores("scores", 300, tmp_path)
    assert not (tmp_path / "out").exists()
    assert _optimize_scores("scores", 1, tmp_path).warnings == ()


@pytest.mark.proof
@pytest.mark.usefixtures("exported_wrongly")
def test_decisions_that_differ_on_the_users_data(tmp_path: Path) -> None:
    """On the user's data, an integer output of the ONNX export differs from the source. Checks that accel gives a
    warning instead of an error. Rounding can change an integer output, such as the index of one of two equal scores.
    The test runs twice, because the warning must also appear when the results come from the cache."""
    for _ in range(2):
        (warning,) = _optimize_scores("decisions", 300, tmp_path).warnings
        assert re.search(
            r"the ONNX form differs from its source by \S+ in 'output' on samples \d+ to \d+ of .*data.npz", warning
        )


@pytest.mark.proof
def test_a_precision_that_nothing_came_of(tmp_path: Path) -> None:
    """Checks that accel gives a warning if a user requests int8 and accel publishes the source. The model of this test
    has no layer to quantize."""
    found = _optimize_scores("scores", 1, tmp_path, "int8")
    assert (found.chosen, found.artifact.properties["precision"]) == ("source", "fp32")
    assert found.warnings[0].startswith(
        "no candidate in int8 is right and measurably faster: the source itself was taken"
    )
