"""Proves that loops over a dynamic length are exported, and that the user's functions stay as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.converters.from_torch.loops.as_scans import loops_as_scans
from accel.converters.from_torch.loops.rewritten import rewritten
from accel.converters.from_torch.loops.steps import Loop


def decay(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Writes the results of a recurrence to parts of a tensor."""
    out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = gate[:, t, None] * state
        state += x[:, t]
        out[:, t] = state.tanh()
    return out


class Recurrent(torch.nn.Module):
    """Has a loop of each form: over numbers, over a part of the numbers, over the items of a tensor, and over the
    result of ``unbind``. The loops fill lists, write to tensors, and carry tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = torch.nn.GRUCell(3, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, states = x.new_zeros(x.shape[0], 4), []
        for i in range(x.shape[1]):
            hidden = self.cell(x[:, i, :], hidden)
            states.append(hidden)
            last = hidden * 2
        steps, total = x.clone(), x[:, 0]
        for i in range(1, x.shape[1]):
            total = total + x[:, i] * x[:, i, 1:2]
            steps[:, i] = total
        rows, turned = [total], []
        for row in x.unbind(1):
            rows.append(row.cumsum(-1))
        for row in x.transpose(0, 1):
            turned.append(row.flip(-1))
        joined = torch.cat(turned, dim=-1)
        return torch.stack(states, dim=-1), last, steps, torch.stack(rows, 1), joined, decay(x, x.mean(-1))


def test_loops_over_a_length(tmp_path: Path) -> None:
    """Fails if a loop gives other results at another length, or is written for one length."""
    net = Recurrent().eval()
    own = Recurrent.forward.__code__, decay.__code__
    made = accel.export(
        net, example=(torch.randn(2, 5, 3),), dynamic={"x": {0: "batch", 1: "length"}}, out=tmp_path / "m.onnx"
    )
    assert made.history[0]["notes"]["rung"] == "dynamo"
    assert (Recurrent.forward.__code__, decay.__code__) == own
    with accel.load(made) as session:
        for size in ((3, 9, 3), (1, 2, 3)):
            x = torch.randn(size)
            torch.testing.assert_close(session(x), net(x), rtol=1e-4, atol=1e-5)


def left(x: torch.Tensor) -> torch.Tensor:
    total = x[0]
    for i in range(1, x.shape[0]):
        if total.sum() > 3:
            break
        total = total + x[i]
    return total


def own_results(x: torch.Tensor) -> torch.Tensor:
    rows, out = [x[0]], x.clone()
    for i in range(1, x.shape[0]):
        rows.append(rows[-1] * 0.5 + x[i])
    for i in range(1, x.shape[0]):
        out[i] = out[i - 1] + x[i]
    return torch.stack(rows) + out


def chunks(x: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(())
    for part in x.split(2):
        total = total + part.sum()
    for a, b in zip(x, x, strict=True):
        total = total + (a * b).sum()
    return total


@pytest.mark.parametrize("function", [left, own_results, chunks])
def test_other_loops_stay(function: Any) -> None:
    """Fails if a loop is rewritten that isn't a scan: a loop that ends early, or whose steps read what earlier steps
    wrote."""
    assert rewritten(function) is None


def outer(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def inner(x: torch.Tensor, *, bias: float = 0.5) -> torch.Tensor:
        rows = []
        for i in range(len(x)):
            rows.append(x[i] * scale + bias)
        return torch.stack(rows)

    return inner


def test_a_loop_over_numbers_runs_as_before() -> None:
    """Fails if a rewritten function has other results, loses its closure or its defaults, or names other lines in a
    traceback."""
    function = outer(3.0)
    own = function.__code__
    code = rewritten(function)  # type: ignore[arg-type]
    assert code is not None
    x = torch.randn(4, 2)
    before = function(x)
    function.__code__ = code
    assert torch.equal(function(x), before)
    with pytest.raises(TypeError) as caught:
        function(["text"])  # type: ignore[arg-type]
    assert caught.tb.tb_next is not None
    assert caught.tb.tb_next.tb_lineno == own.co_firstlineno + 3


class Summed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x[:, 0])
        for row in x.unbind(1):
            total = total + row
        return total


def test_exports_at_the_same_time() -> None:
    """Fails if the first of two exports that ends restores the code while the other one still needs it, or if the code
    is never restored."""
    own, entered, ended = Summed.forward.__code__, threading.Event(), threading.Event()

    def other() -> None:
        with loops_as_scans(Summed()):
            entered.set()
            ended.wait(60)

    thread = threading.Thread(target=other)
    with loops_as_scans(Summed()):
        thread.start()
        assert entered.wait(60)
        changed = Summed.forward.__code__
        assert changed is not own
    assert Summed.forward.__code__ is changed
    ended.set()
    thread.join()
    assert Summed.forward.__code__ is own


def test_the_steps_of_a_loop() -> None:
    """Fails if a loop without a symbol has other steps than the user's loop."""
    assert list(Loop(2, 5)) == [2, 3, 4]
    assert not Loop(2, 5).dynamic
    assert list(Loop(0, 0, "ab")) == ["a", "b"]


class Chunks(torch.nn.Module):
    """Computes chunks of at most 128 rows one after the other, like the local attention of CANINE. The range of the
    length allows only one chunk, but ``torch.export`` can't prove that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for start in range(0, x.shape[1], 128):
            parts.append(x[:, start : min(start + 128, x.shape[1])].softmax(1))
        return torch.cat(parts, dim=1)


def test_a_condition_on_a_length_that_torch_cannot_prove(tmp_path: Path) -> None:
    """Fails if a dim becomes fixed only because ``torch.export`` can't prove a condition for the whole range."""
    x = torch.randn(2, 5, 3)
    made = accel.export(Chunks(), example=(x,), dynamic={"x": {0: "batch", 1: "length"}}, out=tmp_path / "m.onnx")
    assert made.history[0]["notes"]["rung"] == "dynamo"
    with accel.load(made) as session:
        for size in ((3, 9, 3), (1, 17, 3)):
            x = torch.randn(size)
            torch.testing.assert_close(session(x), Chunks()(x), rtol=1e-4, atol=1e-5)
