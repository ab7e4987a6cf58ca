"""Proves that exported programs are opened with the arguments of their export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export, save

import accel
from accel.signature import DimRange


class Sum(nn.Module):
    def forward(self, named: dict[str, torch.Tensor]) -> torch.Tensor:
        return named["x"] - 2 * named["y"]


class Pairs(nn.Module):
    def forward(self, pair: Any, flag: bool, *rest: torch.Tensor, k: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"less": pair[0] - 2 * pair[1]["u"] if flag else pair[0], "more": rest[0] + 3 * k}


A, B = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_program_that_takes_a_dict(in_memory: bool, tmp_path: Path) -> None:
    """Fails if a program with a dict as its argument can't be opened, from a file or in memory, if its dims get lost,
    or if the items of the dict are mixed up."""
    batch = {0: Dim("n", min=1, max=64)}
    program = export(Sum(), ({"x": A, "y": B},), dynamic_shapes=({"x": batch, "y": batch},))
    path = tmp_path / "sum.pt2"
    save(program, path)
    made = accel.export(program if in_memory else path, out=tmp_path / "sum.onnx")
    assert made.signature.dims == {"batch": DimRange(1, 2, 32)}
    x, y = torch.rand(5, 3), torch.rand(5, 3)
    with accel.load(made) as session:
        torch.testing.assert_close(session({"y": y, "x": x}), x - 2 * y)


def test_nested_arguments_and_constants() -> None:
    """Fails if a program's nested arguments, constants, further arguments or arguments by name get lost."""
    program = export(Pairs(), ((A, {"u": B}), True, A + 1), {"k": B + 1})
    with accel.load(program) as session:
        assert [spec.name for spec in session.signature.inputs] == ["pair_0", "pair_1_u", "rest_0", "k"]
        found = session((A, {"u": B}), True, B, k=A)
    torch.testing.assert_close(found, {"less": A - 2 * B, "more": B + 3 * A})


def test_inputs_in_another_order() -> None:
    """Fails if inputs that are declared in another order than the program's are mixed up."""
    with accel.load(export(nn.Bilinear(3, 3, 1), (A, B)), inputs=["input2:float32[2,3]", "input1:float32[2,3]"]) as one:
        found = one(input1=A, input2=B)
        swapped = one(input1=B, input2=A)
    assert not torch.equal(found, swapped)
    torch.testing.assert_close(found, one.module.module.module.program(A, B))  # type: ignore[attr-defined]
