"""Proves that ``accel.optimize`` and the command line optimize the parts of a pipeline and judge the whole pipeline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.judge.comparison import Judge, Judgement
from accel.optimizer.search import Search

_MODEL = """
import torch

import accel


def halves(parts, x, rounds=2):
    for _ in range(rounds):
        x = parts.first(x) + x
    return parts.second(x)


def make():
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
    return accel.Pipeline(halves, first=first, second=second), (torch.ones(4, 8),)


def alone():
    return make()[0]
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "halves.py").write_text(_MODEL)
    monkeypatch.chdir(tmp_path)
    return "halves.py:make"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the measurement, because a real measurement takes seconds. Every candidate is reported as twice as fast
    as its source."""

    def best(search: Search, rows: list[CandidateResult]) -> CandidateResult:
        for row in rows:
            row.measured = {"median_ms": 1.0, "speedup": 2.0, "verdict": "faster", "round_medians_ms": [1.0]}
        search.environment = {"sizes": {}}
        return next((row for row in rows if row.passed), search.source)

    monkeypatch.setattr(Search, "best", best)
    monkeypatch.setattr("accel.optimizer.run.find_spec", lambda _: None)  # makes no report page


def _optimize(model: str, tmp_path: Path, **more: Any) -> Any:
    data = [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    return accel.optimize(
        model, data=data, target="ort-cpu", precision="fp32", vary_session=False, out=tmp_path / "fast", **more
    )


def test_the_parts_are_optimized_and_the_whole_is_judged(model: str, measured: None, tmp_path: Path) -> None:
    """Checks that the optimized parts are published together, and that the whole pipeline is judged on the samples."""
    fast = _optimize(model, tmp_path)
    assert fast.chosen == "all parts"
    judgement = fast.candidates[1].judgement
    assert judgement.drop < 1e-6
    assert "batches with pipeline" in judgement.judged_on
    assert [note.partition(":")[0] for note in fast.notes[:2]] == ["the part 'first'", "the part 'second'"]
    x = torch.ones(5, 8)
    assert fast(x, rounds=3).shape == (5, 3)
    with accel.load(tmp_path / "fast") as session:
        torch.testing.assert_close(session(x), accel.load(accel.export(model))(x))
    assert accel.inspect(tmp_path / "fast", check=True).intact
    assert [stage["name"] for stage in fast.artifact.history] == ["pipeline_from_parts"] * 2
    # An exported or optimized folder can be optimized again without its modules.
    words: dict[str, Any] = {"target": "ort-cpu", "precision": "fp32", "vary_session": False, "budget_seconds": 60}
    again = accel.optimize(tmp_path / "fast", out=tmp_path / "again", **words)
    assert again.artifact.kind == "pipeline"


def test_a_part_that_spoils_the_whole_stays_as_it_was(
    model: str, measured: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that accel rejects an optimized part that passes alone but makes the whole pipeline wrong. The
    other parts must still be optimized."""

    def judge(judge: Judge, candidate: accel.Artifact, options: Any, cache: Any) -> Judgement:
        found = judge.judge(candidate, options)
        if candidate.kind != "pipeline":  # the first part has a larger accuracy drop than the second part
            return Judgement(**{**found.to_json(), "drop": 1e-3 if "[batch,3]" in str(candidate.signature) else 2e-3})
        joined = {part["sha256"] for part in candidate.history[-1]["options"]["parts"].values()}
        seen.append(joined)
        return Judgement(**{**found.to_json(), "drop": 0.5 if len(seen) == 1 else 0.0})

    seen: list[set[str]] = []
    monkeypatch.setattr("accel.optimizer.attempt._judgement", judge)
    fast = _optimize(model, tmp_path)
    assert [row.name for row in fast.candidates] == ["source", "all parts", "all but first"]
    assert fast.candidates[1].status == "rejected"
    assert fast.chosen == "all but first"
    assert len(seen[0] & seen[1]) == 1


def test_every_part_says_what_was_chosen_and_why(model: str, measured: None, tmp_path: Path) -> None:
    """Fails if the note about a part names only its choice, without the speedup or the reasons against the others."""
    fast = _optimize(model, tmp_path)
    first = next(note for note in fast.notes if note.startswith("the part 'first'"))
    assert first.startswith("the part 'first': ort-cpu fp32, 2.00 times as fast alone")
    # A budget with enough time beside other work.
    strict: dict[str, Any] = {"precision": "int8", "max_drop": 1e-9, "budget_seconds": 600, "vary_session": False}
    only_int8 = accel.optimize(model, target="ort-cpu", out=tmp_path / "int8", **strict)
    notes = [note for note in only_int8.notes if note.startswith("the part ")]
    assert len(notes) == 2
    assert all("stays as it is, because no candidate is right and measurably faster (" in note for note in notes)
    assert all("is over the budget" in note for note in notes)


def test_a_spent_budget_leaves_the_parts_as_they_are(model: str, tmp_path: Path) -> None:
    """Fails if the time of the export, or of judging and measuring the whole, is given to the parts, if a spent budget
    is an error, or if the notes don't say how much time the whole takes."""
    began = time.monotonic()
    fast = accel.optimize(model, target="ort-cpu", budget_seconds=3, out=tmp_path / "fast")
    assert time.monotonic() - began < 20
    assert fast.chosen == "source"
    notes = [note for note in fast.notes if note.startswith("the part ")]
    for note, name in zip(notes, ("first", "second"), strict=True):
        assert note.startswith(f"the part {name!r} stays as it is: ")
        assert note.endswith("s to judge and measure; give more budget_seconds=")
    torch.testing.assert_close(fast(torch.ones(4, 8)), accel.load(accel.export(model))(torch.ones(4, 8)))


def test_options_of_a_single_model(model: str, tmp_path: Path) -> None:
    """Checks that accel refuses an option that names the inputs of a single model."""
    with pytest.raises(accel.AccelError, match="names the inputs of a single model; leave out"):
        _optimize(model, tmp_path, profiles=["x=1x8,4x8,8x8"])


def test_the_commands(model: str, tmp_path: Path, cli: Any) -> None:
    """Checks that the commands accept a factory that returns a pipeline, and a folder of an exported pipeline."""
    assert "gate pipeline_from_parts" in cli("export", model, "-o", "out").stdout
    assert "same within the limit" in cli("verify", model, "out").stdout
    assert cli("inspect", "out", "--check").code == 0
    assert "pipeline, " in cli("inspect", "out").stdout
    for arguments, message in (
        (("export", model, "-o", "out.onnx"), "several models is exported to a folder; pass e.g. -o out/"),
        (("export", "halves.py:alone", "-o", "out"), "returned a pipeline without an example; return the pipeline"),
        (("inspect", "out", "--graph", "x.html"), "draw one of its parts: out/first/model.onnx"),
    ):
        ran = cli(*arguments)
        assert ran.code
        assert message in ran.stderr
