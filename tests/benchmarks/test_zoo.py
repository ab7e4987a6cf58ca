"""Proves that the model zoo benchmark classifies the export of each model, enforces its limits, and resumes after an
interruption."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import ROOT


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("zoo")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("zoo", "zoo_models"):
            del sys.modules[name]


def toys(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Makes a family of three models. The first model works, the second model draws random numbers, and the third model
    returns no tensor."""
    case = importlib.import_module("zoo_models.case")

    class Noise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(x.shape)

    class Nothing(torch.nn.Module):
        def forward(self, _: torch.Tensor) -> None:
            return None

    modules = {"linear": torch.nn.Linear(3, 2), "noise": Noise(), "nothing": Nothing()}
    family = ModuleType("toys")
    family.__dict__.update(
        names=lambda: list(modules),
        make=lambda name: case.Case(modules[name], lambda batch, _: (torch.randn(batch, 3),)),
    )
    monkeypatch.setitem(sys.modules, "zoo_models.toys", family)
    monkeypatch.setitem(case.FAMILIES, "toys", "zoo_models.toys")
    return case


@pytest.mark.usefixtures("zoo")
@pytest.mark.filterwarnings("ignore")
def test_the_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checks how the zoo classifies a model that can be exported, a model that accel has to refuse, and a model that
    can't be made. Also checks that an exported file is classified as wrong if its outputs differ from the model's
    outputs."""
    toys(monkeypatch)
    trial = importlib.import_module("zoo_models.trial")
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(trial.simplify, "run_in_child", trial._here)

    def tried(name: str, tool: str) -> dict[str, Any]:
        found: dict[str, Any] = trial.outcome("toys", name, tool, 0.0, tmp_path)
        return found

    for tool in ("accel", "torch.onnx"):
        worked = tried("linear", tool)
        assert worked["class"] == "first", worked
        assert worked["error"] < 1e-5
    noise = tried("noise", "accel")
    assert (noise["class"], "random numbers" in noise["message"]) == ("refused", True)
    assert tried("nothing", "accel")["class"] == "not made"
    other = torch.nn.Linear(3, 2)
    monkeypatch.setattr("accel.load", lambda _: other)
    monkeypatch.setattr(torch.nn.Linear, "__enter__", lambda self: self, raising=False)
    monkeypatch.setattr(torch.nn.Linear, "__exit__", lambda *_: None, raising=False)
    wrong = tried("linear", "accel")
    assert (wrong["class"], "batch 2: the relative error" in wrong["message"]) == ("wrong", True)


@pytest.mark.usefixtures("zoo")
@pytest.mark.filterwarnings("ignore")
def test_a_file_of_another_exporter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if the zoo can't write or export an ONNX file of an old opset, or compares the export with another file."""
    trial = importlib.import_module("zoo_models.trial")
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = trial.outcome("files", "onnx-upsample-opset9", "accel", 0.0, tmp_path)
    assert (found["class"], found["error"] < 1e-5) == ("first", True), found


def test_what_a_message_asks_for(zoo: ModuleType) -> None:
    """Checks that the zoo finds the arguments that an error message suggests, and treats no other words of the message
    as arguments."""
    trial = importlib.import_module("zoo_models.trial")
    assert zoo.CLASSES
    text = "try one size: inputs=['x:float32[2,3]', 'n:int64[2]'] or dims={'n': '1:2:3'}; pass limit=0.002."
    assert trial._advice(text) == {
        "inputs": ["x:float32[2,3]", "n:int64[2]"], "dims": {"n": "1:2:3"}, "limit": 0.002,
    }  # fmt: skip
    assert trial._advice("raise its eps; inputs= for each input") == {}


def child(kind: str, out: str) -> None:
    """Runs in a child process. ``kind`` determines whether the process works, hangs, fills the memory or dies."""
    if kind == "works":
        Path(out).write_text(json.dumps({"class": "first"}))
    elif kind == "hangs":
        time.sleep(60)
    elif kind == "fills":
        kept = [bytearray(10_000_000) for _ in range(20)]
        time.sleep(60)
        del kept
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_limits_of_a_child(zoo: ModuleType) -> None:
    """Checks that a child process that hangs, fills the memory or dies is recorded as a crash, and doesn't end the
    run."""
    context = multiprocessing.get_context("fork")  # with spawn, each child would import torch again

    def result(kind: str, seconds: float, memory: float = 4000.0) -> tuple[str, str]:
        started = zoo.Child(context, child, (kind,), zoo.Limits(seconds, memory))
        while (found := started.result()) is None:
            started.process.join(0.05)
        assert found["wall"] < seconds + 5
        return found["class"], found.get("message", "")

    assert result("works", 20.0) == ("first", "")
    assert result("dies", 20.0) == ("crashed", "the process ended with SIGKILL")
    assert result("hangs", 1.0) == ("crashed", "no end after 1 s")
    assert result("fills", 30.0, memory=1.0) == ("crashed", "more than 1 MiB of memory")


def meeting(_: str, name: str, tool: str, __: float, apart: bool, out: str) -> None:
    """Runs in a child process. The tries of the models ``a`` and ``b`` wait for each other."""
    met = Path(os.environ["MEETING"])
    (met / f"{name} {tool}").touch()
    other = met / f"{'b' if name == 'a' else 'a'} accel"
    until = time.monotonic() + 20
    while name in "ab" and not other.exists() and time.monotonic() < until:
        time.sleep(0.01)
    if name == "c" and not apart:
        os.kill(os.getpid(), signal.SIGKILL)
    kind = "not made" if name == "d" else "first"
    Path(out).write_text(json.dumps({"class": kind, "met": other.exists(), "apart": apart}))


def test_tries_at_the_same_time(zoo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if two children don't run at the same time, if a result is lost or assigned to another model, if a crash
    isn't tried again, or if a model that can't be made is tried with a second tool."""
    monkeypatch.setattr("zoo_models.trial.run", meeting)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: multiprocessing.context.ForkContext())
    monkeypatch.setenv("MEETING", str(tmp_path))
    wanted = [("own", name, tool) for name in "abcd" for tool in ("accel", "torch.onnx")]
    zoo.try_all(wanted, tmp_path / "zoo.jsonl", zoo.Limits(40.0, 4000.0), 0.0, children=2)
    found = zoo.read(tmp_path / "zoo.jsonl")
    assert set(found) == set(wanted) - {("own", "d", "torch.onnx")}
    assert [found["own", name, "accel"]["class"] for name in "abcd"] == ["first", "first", "first", "not made"]
    assert all(found["own", name, tool]["met"] for name in "ab" for tool in ("accel", "torch.onnx"))
    assert [found["own", name, "accel"]["apart"] for name in "abc"] == [False, False, True]


def row(name: str, kind: str, tool: str = "accel") -> dict[str, Any]:
    return {"family": "own", "name": name, "tool": tool, "class": kind, "message": "a | b"}


def test_an_interrupted_run_goes_on(zoo: ModuleType, tmp_path: Path) -> None:
    """Fails if a resumed run repeats a model that already has a result, or leaves out a model without a result. Also
    fails if the run ends because an interruption left an incomplete line in the results."""
    path = tmp_path / "zoo.jsonl"
    lines = [json.dumps(row("a", "failed")), json.dumps(row("b", "not made")), json.dumps(row("a", "first"))]
    path.write_text("\n".join(lines) + '\n{"family": "own", "na')
    done = zoo.read(path)
    assert done["own", "a", "accel"]["class"] == "first"  # the last one counts
    tools = ("accel", "torch.onnx")
    names = ["a", "b", "c"]
    assert zoo.pending("own", names, tools, done, "") == [
        ("own", "a", "torch.onnx"), ("own", "c", "accel"), ("own", "c", "torch.onnx"),
    ]  # fmt: skip
    assert ("own", "a", "accel") in zoo.pending("own", names, tools, done, "failed,first")


def test_what_is_not_optimized_yet(zoo: ModuleType) -> None:
    """Fails if a run with ``--optimize`` repeats an optimized model, leaves out a model that was only exported, or
    tries one that can't be exported. Also fails if a model that wasn't measured can't be tried again."""
    kinds = {"a": "first", "b": "followed", "c": "refused", "d": "first", "e": "not made"}
    done = {("own", name, "accel"): row(name, kind) for name, kind in kinds.items()}
    done |= {("own", "a", "torch.onnx"): row("a", "first", "torch.onnx")}
    done["own", "d", "accel"]["optimize"] = "failed"
    for tools in (["accel"], ["accel", "torch.onnx"]):
        found = zoo.pending("own", [*kinds, "f"], tools, done, "", optimize=True)
        assert [name for _, name, tool in found if tool == "accel"] == ["a", "b", "f"]
        assert ("own", "a", "torch.onnx") not in found
    done["own", "a", "accel"]["optimize"] = "unmeasured"
    again = zoo.pending("own", kinds, ["accel"], done, "unmeasured", optimize=True)
    assert [name for _, name, _ in again] == ["a", "b"]


def test_a_sample_of_the_exported_models(zoo: ModuleType) -> None:
    """Fails if the sample contains a model that isn't exported, has another size, or changes with the other models'
    order."""
    names = [f"m{number}" for number in range(9)]
    done = {("own", name, "accel"): row(name, "first") for name in names[:8]}
    done["own", "m7", "accel"] = row("m7", "refused")
    found = zoo.drawn("own", names, done, 5, 20)
    assert found == zoo.drawn("own", reversed(names), done, 5, 20)
    assert (len(set(found)), set(found) & {"m7", "m8"}) == (5, set())
    assert len(zoo.drawn("own", names, done, 50, 20)) == 7


@pytest.mark.usefixtures("zoo")
def test_a_wrong_result_of_the_optimizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a result of the optimizer with other outputs than the model's counts as a result, or if a right result
    counts as wrong. Also fails if a result doesn't tell whether other work disturbed its measurement."""
    case = toys(monkeypatch)
    trial = importlib.import_module("zoo_models.trial")
    made = case.make("toys", "linear")
    calls = trial._calls(made)
    fast = SimpleNamespace(artifact=SimpleNamespace(signature=SimpleNamespace(dims={"batch": 1})))
    fast.chosen, fast.speedup, fast.candidates, fast.environment = "int8", 2.0, [], {"statistic": "cpu time"}
    monkeypatch.setattr("accel.optimize", lambda *_, **__: fast)
    for net, wanted in ((made.module, "2.00"), (lambda *given: -made.module(*given), "wrong")):
        monkeypatch.setattr("accel.load", lambda _, net=net: nullcontext(net))
        assert trial._optimized(made, calls, 20.0, tmp_path)["optimize"] == wanted
    fast.chosen = "source"
    monkeypatch.setattr("accel.load", lambda _: nullcontext(made.module))
    assert trial._optimized(made, calls, 20.0, tmp_path)["busy"]
    fast.environment = {"statistic": "median"}
    assert "busy" not in trial._optimized(made, calls, 20.0, tmp_path)
    fast.speedup = None
    assert trial._optimized(made, calls, 20.0, tmp_path)["optimize"] == "unmeasured"


def test_the_page(zoo: ModuleType) -> None:
    """Fails if the page counts a model that the zoo can't make, or leaves out a model whose export failed."""
    rows = [row("a", "first"), row("b", "failed"), row("c", "not made"), row("a", "failed", "torch.onnx")]
    rows += [row("d", "first") | {"optimize": "unmeasured"}]
    rows[0] |= {"optimize": "4.00", "optimize_seconds": 20.2}
    rows[1] |= {"optimize": "failed", "optimize_message": "no candidate"}
    read = {(r["family"], r["name"], r["tool"]): r for r in rows}
    text = zoo.page(read, {"cpu": "a CPU", "cores": 2, "date": "2026-11-24T00", "versions": {"torch": "2.13"}})
    assert "| own | accel | 3 | 2 (67%) | 0 | 0 | 1 | 0 | 0 |" in text
    assert "| own | torch.onnx | 1 | 0 (0%) | 0 | 0 | 1 | 0 | 0 |" in text
    assert "| own/b | failed | a \\| b | - |" in text
    assert "| own | 3 | 1 | 0 | 1 | 1 | 4.00 | 20 |" in text
    assert "| all | 3 | 1 | 0 | 1 | 1 | 4.00 | 20 |" in text
    assert "- own/b: no candidate" in text
    assert "can't make them from a small config (1): own/c." in text


@pytest.mark.usefixtures("zoo")
def test_a_message_is_followed_in_a_copy_of_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if the zoo rewrites a line that the message doesn't name, or a model whose message has no such advice. Also
    fails if the rewritten model isn't made from the copy, or has other weights or outputs."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    case = importlib.import_module("zoo_models.case")
    changes = importlib.import_module("zoo_models.rewritten")
    name = ("own", "branch-on-values")
    original = case.make(*name)
    advice = changes.REWRITES[name].advice
    for message in ("at control.py:46", f"at control.py:3 {advice}", f"at other.py:46 {advice}"):
        assert changes.rewritten(*name, original, message, tmp_path) is None
    lines = Path(sys.modules["zoo_models.own.control"].__file__ or "").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "if x.mean() > 0" in text)
    found = changes.rewritten(*name, original, f"at control.py:{line} {advice}", tmp_path)
    assert "torch.where(x.mean() > 0" in (tmp_path / "control_rewritten.py").read_text()
    assert type(found.module).__module__ == "control_rewritten"
    for sign in (1, -1):
        x = sign * torch.rand(3, 6)
        assert torch.equal(found.module(x), original.module(x))
    del sys.modules["control_rewritten"]
