"""Proves that a second run of the same request publishes the result of the first run, and that other requests run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import accel
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.quantize.sensitivity import Sensitivity
from accel.optimizer.budget import Budget
from accel.optimizer.candidate import CandidateResult, Status
from accel.optimizer.earlier import Earlier
from accel.optimizer.judge.comparison import Judgement
from accel.optimizer.mixed.trajectory import Trajectory, Try
from accel.optimizer.request import OptimizeRequest
from accel.optimizer.result import Optimization
from accel.sources.source import Source
from accel.stage import run_stage
from tests.support.onnx_builder import FLOAT, artifact, node


@pytest.fixture
def model(tmp_path: Path) -> Artifact:
    """Returns a published ONNX file of one node."""
    from accel.converters.graph.simplify import SimplifyConfig

    taken, given = {"x": (FLOAT, ["n", 4])}, {"y": (FLOAT, ["n", 4])}
    plain = artifact(tmp_path / "m.onnx", [node("Relu", "x", "y")], taken, given)
    return run_stage("simplify", plain, SimplifyConfig(), out=tmp_path / "own" / "model.onnx")


@pytest.fixture
def request_of(model: Artifact, tmp_path: Path) -> Callable[..., OptimizeRequest]:
    """Returns a function that makes a request for ``model`` with some arguments."""
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 4), np.float32))

    def made(**words: object) -> OptimizeRequest:
        return OptimizeRequest(
            source=Source(model.path),
            out=tmp_path / "out",
            data=tmp_path / "data.npz",
            **words,  # type: ignore[arg-type]
        )

    return made


def found(model: Artifact, **words: object) -> Optimization:
    """Returns the result of a run. ``words`` are fields of a candidate that isn't chosen."""
    bad = Judgement(drop=math.inf, metric=None, reference_metric=None, max_abs_diff=1.0, judged_on="", problem="NaN")
    rows = (
        CandidateResult(name="source", artifact=model, runtime="onnxruntime", status=Status.CHOSEN),
        CandidateResult(name="int8", status=Status.REJECTED, reason="NaN", judgement=bad, **words),  # type: ignore[arg-type]
    )
    return Optimization(
        artifact=model, chosen="source", candidates=rows, max_drop=0.01, environment={"cpu": "x"}, notes=("measured",)
    )


def test_the_second_run_publishes_the_result_of_the_first(
    model: Artifact, request_of: Callable[..., OptimizeRequest], tmp_path: Path
) -> None:
    """Fails if a row, a note or the model changes, or if the published file is missing."""
    cache, first = StageCache(tmp_path / "cache"), found(model)
    Earlier.of(request_of(), cache).remember(first, None, Budget(None))
    again = Earlier.of(replace(request_of(), out=tmp_path / "elsewhere"), cache).publish()
    assert again is not None
    result, source = again
    assert source is None
    assert result.artifact.path == tmp_path / "elsewhere" / "model.onnx"
    assert result.artifact.hashes() == model.hashes()
    *notes, earlier_run = result.notes
    assert "the result of an earlier run; " in earlier_run
    assert replace(result, notes=tuple(notes)).to_json() == first.to_json()
    assert json.loads((tmp_path / "elsewhere" / "optimize.json").read_text())["notes"][0] == "measured"


def test_a_search_for_mixed_precision_is_remembered(
    model: Artifact, request_of: Callable[..., OptimizeRequest], tmp_path: Path
) -> None:
    """Fails if a run with a mixed-precision search runs again, or if the record of the search changes."""
    searched = Trajectory(
        base="bf16",
        layers=[Sensitivity("one", "MatMul", math.inf, 0.25, 3.0), Sensitivity("two", "Conv", 0.5)],
        tries=[
            Try(kept=("one",), drop=math.inf, within=False, judged_on="search"),
            Try(kept=("one", "two"), drop=0.001, within=True, judged_on="held out", in_fp32=("two",)),
        ],
        kept=("one", "two"),
        in_fp32=("two",),
        not_confirmed="too few samples",
    )
    cache, first = StageCache(tmp_path / "cache"), found(model, trajectory=searched)
    Earlier.of(request_of(), cache).remember(first, None, Budget(None))
    again = Earlier.of(request_of(), cache).publish()
    assert again is not None
    assert again[0].candidates[1].trajectory == searched
    assert again[0].to_json()["candidates"] == first.to_json()["candidates"]


def test_another_request_runs(model: Artifact, request_of: Callable[..., OptimizeRequest], tmp_path: Path) -> None:
    """Fails if an argument, a sample, the model's file or a change of the cache is overlooked."""
    cache = StageCache(tmp_path / "cache")
    Earlier.of(request_of(), cache).remember(found(model), None, Budget(None))
    for other in (request_of(max_drop=0.02), request_of(thorough=True), request_of(threads=1)):
        assert Earlier.of(other, cache).publish() is None
    assert Earlier.of(request_of(use_cache=False), cache).publish() is None
    assert Earlier.of(request_of(metric="accel.examples.digits:top1"), cache).publish() is None
    np.savez(tmp_path / "data.npz", x=np.ones((4, 4), np.float32))
    assert Earlier.of(request_of(), cache).publish() is None
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 4), np.float32))
    model.path.write_bytes(model.path.read_bytes() + b"\0")
    assert Earlier.of(request_of(), cache).publish() is None


def test_a_result_that_another_run_may_improve_is_not_kept(
    model: Artifact, request_of: Callable[..., OptimizeRequest], tmp_path: Path
) -> None:
    """Fails if the second run repeats a choice that noise, Ctrl-C or the user's budget decided. A search that accel
    ended has nothing more to do."""
    cache, earlier = StageCache(tmp_path / "cache"), Earlier.of(request_of(), StageCache(tmp_path / "cache"))
    by_user, by_accel, stopped = Budget(60.0), Budget(None), Budget(None)
    by_accel.improve()
    stopped.interrupted = True
    seems = {"name": "int8", "verdict": "no measurable difference", "speedup": 1.5, "ci95": [0.9, 2.0]}
    earlier.remember(found(model, measured=seems), None, Budget(None))
    earlier.remember(found(model, out_of_time=True), None, by_user)
    earlier.remember(found(model), None, stopped)
    assert earlier.publish() is None
    earlier.remember(found(model, out_of_time=True), None, by_accel)
    assert Earlier.of(request_of(), cache).publish() is not None


def test_optimize_opens_no_model_twice(model: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if accel.optimize doesn't ask for an earlier result, or doesn't remember its own. Asking whether a model
    with samples is a decoder would import torch."""
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 4), np.float32))
    words = {
        "data": tmp_path / "data.npz",
        "precision": "fp32",
        "target": "ort-cpu",
        "vary_session": False,
        "rounds": 5,
    }
    monkeypatch.setattr("accel.optimizer.earlier.Earlier.publish", lambda _: None)
    kept: list[str] = []
    monkeypatch.setattr("accel.optimizer.earlier.Earlier.remember", lambda _, result, *__: kept.append(result.chosen))
    first = accel.optimize(model.path, out=tmp_path / "one", **words)
    assert kept == [first.chosen]
    monkeypatch.setattr("accel.optimizer.earlier.Earlier.publish", lambda _: (first, None))
    for name in ("_opened", "is_decoder"):
        monkeypatch.setattr(f"accel.api.optimize.{name}", None)
    assert accel.optimize(model.path, out=tmp_path / "two", **words).chosen == first.chosen
