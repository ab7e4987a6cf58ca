"""Proves that accel optimize publishes a first result early, and then goes on for a limited time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.artifact import Artifact
from accel.optimizer import budget as budget_module
from accel.optimizer import first_result, run
from accel.optimizer.budget import IMPROVING_SECONDS, Budget
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.first_result import FirstResult
from accel.optimizer.recipes.order import Expected
from accel.optimizer.recipes.recipe import Recipe
from accel.tables.target import TARGETS
from tests.support.fake_sessions import FakeClock


class Glances:
    """Replaces the search. Returns the row called ``faster``, or the source if no row has this name."""

    def __init__(self, faster: str) -> None:
        self.faster, self.seen, self.source = faster, list[str](), CandidateResult(name="source")

    def glance(self, rows: list[CandidateResult]) -> CandidateResult:
        self.seen += [row.name for row in rows]
        for row in rows:
            row.measured = {"speedup": 2.0 if row.name == self.faster else 1.0}
        return next((row for row in rows if row.name == self.faster), self.source)


def row(name: str) -> CandidateResult:
    recipe = Recipe(name=name, target=TARGETS["ort-cpu"], precision="int8", stages=())
    return CandidateResult(name=name, recipe=recipe)


def looking(
    clock: FakeClock,
    faster: str,
    seconds: float | None = None,
    *,
    thorough: bool = False,
    expected: dict[str, float] | None = None,
    left: float = 100.0,
) -> tuple[Any, ...]:
    budget, published = Budget(seconds, clock, thorough=thorough), list[str]()
    search: Any = Glances(faster)
    first = FirstResult(
        search=search,
        budget=budget,
        publish=lambda one: published.append(one.name),
        expected={name: Expected(speedup=speedup, seconds=0) for name, speedup in (expected or {}).items()}
        | {"later": Expected(speedup=1.0, seconds=left)},
    )
    return budget, published, search, first


def spend(budget: Budget, clock: FakeClock, seconds: float) -> None:
    with budget.spending("a: quantize"):
        clock.now += seconds


def test_the_first_faster_candidate_is_published() -> None:
    """Fails if a slow candidate is published, if candidates are measured again and again, or if a second candidate is
    published as a first result."""
    clock = FakeClock()
    budget, published, search, first = looking(clock, "b")
    rows = []
    for name in ("a", "b", "c"):
        rows.append(row(name))
        spend(budget, clock, 20.0)
        first.look(rows)
    assert published == ["b"]
    assert search.seen == ["a", "b"]


@pytest.mark.parametrize(("faster", "published"), [("a", ["a", "a"]), ("", ["a", "source"])])
def test_a_candidate_that_is_surely_faster_is_published_at_once(faster: str, published: list[str]) -> None:
    """Fails if the user waits for a measurement although a candidate is right and its kind is much faster on this
    machine. Also fails if the candidate stays published although it turns out not to be faster."""
    clock = FakeClock()
    budget, found, _, first = looking(clock, faster, expected={"a": 2.0})
    spend(budget, clock, 20.0)
    first.look([row("a")])
    assert found == published
    assert (first.published is not None) == (faster == "a")


def test_a_quick_search_has_no_first_result() -> None:
    """Fails if a small model is measured twice, although all its candidates take a few seconds."""
    clock = FakeClock()
    budget, published, search, first = looking(clock, "a", left=5.0)
    spend(budget, clock, 2.0)
    first.look([row("a")])
    assert not published
    assert not search.seen
    assert not budget.limited


@pytest.mark.parametrize(("took", "more"), [(20.0, IMPROVING_SECONDS), (1000.0, 2000.0)])
def test_the_search_goes_on_for_a_limited_time(took: float, more: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the search goes on without a limit, or if a large model gets too little time to make a second result."""
    monkeypatch.setattr(budget_module, "IMPROVING_SECONDS", IMPROVING_SECONDS)
    clock = FakeClock()
    budget, _, _, first = looking(clock, "a")
    assert not budget.limited
    spend(budget, clock, took)
    first.look([row("a")])
    assert budget.left == more
    note = budget.note(["b"])
    assert "thorough=True tries all candidates" in note
    assert "budget" not in note


@pytest.mark.parametrize(("seconds", "thorough"), [(300.0, False), (None, True)])
def test_the_users_limit_stays(seconds: float | None, thorough: bool) -> None:
    """Fails if a first result changes the limit that the user gives."""
    clock = FakeClock()
    budget, published, _, first = looking(clock, "a", seconds, thorough=thorough)
    spend(budget, clock, 20.0)
    first.look([row("a")])
    assert published == ["a"]
    assert budget.seconds == seconds


def test_the_published_folder_is_whole_at_once(
    digits: Artifact, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the folder can't be loaded while the search goes on, or if the folder keeps the first result although
    the search finds a faster candidate. In this test, the search ends with an error after the first result."""
    monkeypatch.setattr(first_result, "_LONG_SECONDS", 0.0)
    monkeypatch.setattr(first_result, "_SOON_SECONDS", 0.0)
    out = tmp_path / "out"
    feeds = digits.signature.example_inputs(batch=1)
    np.savez(tmp_path / "data.npz", **{name: np.repeat(value, 8, axis=0) for name, value in feeds.items()})

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CandidateResult, "is_faster", property(lambda row: row.measured is not None))
        patch.setattr(run, "_choose", interrupted)
        with pytest.raises(KeyboardInterrupt):
            accel.optimize(digits.path, data=tmp_path / "data.npz", out=out, target="ort-cpu", vary_session=False)
    body = json.loads((out / "optimize.json").read_text())
    assert body["chosen"]["name"].startswith("ort-cpu int8")
    assert any("first result" in note for note in body["notes"])
    with accel.load(out) as session:
        assert session.run(feeds)["logits"].shape == (1, 10)
    words: dict[str, Any] = {"target": "ort-cpu", "thorough": True, "vary_session": False}
    made = accel.optimize(digits.path, data=tmp_path / "data.npz", out=out, **words)
    assert not any("first result" in note for note in made.notes)
    assert json.loads((out / "optimize.json").read_text())["chosen"]["name"] == made.chosen


def test_thorough_and_a_limit_contradict_each_other(digits: Artifact, tmp_path: Path) -> None:
    """Fails if accel ignores one of two options that contradict each other."""
    with pytest.raises(accel.AccelError, match="a thorough search has no time limit"):
        accel.optimize(digits.path, out=tmp_path / "out", thorough=True, budget_seconds=5)
