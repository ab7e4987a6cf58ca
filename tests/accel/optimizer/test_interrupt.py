"""Proves that Ctrl-C during accel optimize publishes the best candidate so far. A second Ctrl-C ends the command at
once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.cancel import Terminated
from accel.progress import watched_by


def pressing(*moments: str, error: type[BaseException] = KeyboardInterrupt) -> Callable[[str, float | None], None]:
    """Returns a function that receives progress messages. For each string in ``moments``, in order, the function raises
    ``error`` at the first message that contains the string."""
    left = list(moments)

    def watch(message: str, _: float | None) -> None:
        if left and left[0] in message:
            del left[0]
            raise error

    return watch


def optimized(out: Path, **options: Any) -> Any:
    """Optimizes a file that isn't simplified, with two candidates: ort-cpu fp32, then ort-cpu int8 dynamic."""
    source = accel.export(model(), example=(torch.ones(2, 4),), simplify=False, out=out.with_suffix(".onnx"))
    return accel.optimize(source, out=out, rounds=5, target="ort-cpu", **options)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))


def test_before_any_candidate_is_made(tmp_path: Path) -> None:
    """Fails if Ctrl-C loses the export of a module. The simplified export is the only fp32 candidate."""
    with watched_by(pressing("int8 dynamic: judging")):
        result = accel.optimize(
            model(), example=(torch.ones(2, 4),), out=tmp_path / "out", rounds=5, target="ort-cpu", vary_session=False
        )
    assert [row.status for row in result.candidates if row.name == "ort-cpu int8 dynamic"] == ["not tried"]
    assert result.chosen == "source"
    assert accel.inspect(tmp_path / "out", check=True).intact


def test_while_candidates_are_made(tmp_path: Path) -> None:
    """Fails if Ctrl-C loses a finished candidate, or publishes an unmeasured candidate."""
    with watched_by(pressing("int8 dynamic: judging")):
        result = optimized(tmp_path / "out", vary_session=False)
    rows = {row.name: row for row in result.candidates}
    assert rows["ort-cpu int8 dynamic"].status == "not tried"
    assert rows["ort-cpu int8 dynamic"].reason == "Ctrl-C came before it was judged"
    assert rows["ort-cpu fp32"].measured is not None
    assert rows[result.chosen].measured is not None
    assert any(note.startswith("Ctrl-C came before ort-cpu int8 dynamic") for note in result.notes)
    assert accel.inspect(tmp_path / "out", check=True).intact


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the search vary session options although other tests use the cores."""
    monkeypatch.setattr("accel.optimizer.search.disturbed", lambda *_: "")


@pytest.mark.usefixtures("quiet_machine")
def test_session_options_are_left_out(tmp_path: Path) -> None:
    """Fails if a search that was ended goes on with other session options."""
    with watched_by(pressing("int8 dynamic: judging")):
        result = optimized(tmp_path / "out")
    reasons = [row.reason for row in result.candidates if row.base]
    assert reasons
    assert set(reasons) == {"Ctrl-C came before its session options were tried"}


@pytest.mark.usefixtures("quiet_machine")
def test_while_session_options_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if Ctrl-C during the last measurement loses the results of the first measurement."""
    import accel.optimizer.search as search

    calls: list[int] = []
    original = search.measured

    def measured(*args: Any) -> Any:
        calls.append(len(args[1]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(search, "measured", measured)
    result = optimized(tmp_path / "out")
    assert len(calls) >= 2
    assert {row.name: row for row in result.candidates}[result.chosen].measured is not None


@pytest.mark.parametrize(
    ("watcher", "error"),
    [
        (pressing("fp32: judging"), KeyboardInterrupt),
        (pressing("int8 dynamic: judging", "interrupted: measuring"), KeyboardInterrupt),
        (pressing("int8 dynamic: judging", error=Terminated), Terminated),
    ],
    ids=["nothing is made", "twice", "SIGTERM"],
)
def test_it_ends(tmp_path: Path, watcher: Callable[[str, float | None], None], error: type[BaseException]) -> None:
    """Checks that a run publishes no result if Ctrl-C comes before the first candidate is finished, if Ctrl-C comes
    twice, or if the run gets SIGTERM."""
    with watched_by(watcher), pytest.raises(error):
        optimized(tmp_path / "out")
    assert not (tmp_path / "out").exists()
