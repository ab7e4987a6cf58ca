"""Proves that a file isn't run at sizes at which the model's code does something else than the exported graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import BadFeeds, BadInputSpec


class LastWindow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 512:
            x = x[:, -512:]
        return x.mean(1)


class Chunks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(chunk.mean(0) + 1 for chunk in x.split(32))


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.mean(1) if x.shape[1] + y.shape[1] <= 40 else y.mean(1)


class Sevens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x if x.shape[1] % 7 == 0 else 2 * x


class NoMatter(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if x.shape[1] < 30 else x + x


N = {"x": {0: "batch", 1: "n"}}
TWO = {"x": {0: "batch", 1: "n"}, "y": {0: "batch", 1: "m"}}
MODELS: dict[str, tuple[nn.Module, tuple[tuple[int, ...], ...], Any, tuple[int, ...], tuple[int, ...]]] = {
    # the model, shapes of the example, dynamic dims, sizes of dim 1 (or of the batch) that fit, and that don't
    "a window": (LastWindow(), ((2, 16, 6),), N, (100, 512), (513,)),
    "chunks": (Chunks(), ((4, 6),), None, (9, 32), (33,)),
    "a sum": (Sum(), ((2, 5, 3), (2, 7, 3)), TWO, (20,), (21,)),
}


def _inputs(shapes: Any, size: int) -> list[torch.Tensor]:
    if len(shapes[0]) == 2:
        return [torch.randn(size, 6)]
    return [torch.randn(3, size, shape[2]) for shape in shapes]


@pytest.mark.parametrize("name", MODELS)
def test_sizes_beyond_a_condition_are_refused(name: str, tmp_path: Path) -> None:
    """Fails if a session runs a graph at sizes at which the model's code does something else, or refuses sizes beyond
    the range of a dim at which the graph is right. Also fails if the message's advice doesn't work."""
    model, shapes, dynamic, right, wrong = MODELS[name]
    given = {"example": tuple(map(torch.randn, shapes)), "dynamic": dynamic, "out": tmp_path / "m.onnx"}
    dims = {"n": (2, 5, 10), "m": (2, 7, 10)} if name == "a sum" else {}
    with accel.load(accel.export(model, **given, dims=dims)) as session:
        for size in right:
            inputs = _inputs(shapes, size)
            torch.testing.assert_close(session(*inputs), model(*inputs))
        for size in wrong:
            with pytest.raises(BadFeeds, match="the source does something else") as raised:
                session(*_inputs(shapes, size))
    advised = eval(str(raised.value).rpartition("dims=")[2])
    with accel.load(accel.export(model, **given, dims=dims | advised)) as session:
        inputs = _inputs(shapes, wrong[0])
        torch.testing.assert_close(session(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("model", "example", "dynamic", "dims", "fix"),
    [
        (LastWindow(), (2, 16, 6), N, {"n": (1, 16, 1024)}, "dims={'n': '1:16:512'}"),
        (Chunks(), (64, 6), None, {}, "dims={'batch': '33:64:64'}"),
        (Sevens(), (2, 16), N, {"n": (15, 16, 40)}, "dims={'n': '15:16:20'}"),
    ],
)
def test_a_range_with_two_ways_is_refused(
    model: nn.Module, example: tuple[int, ...], dynamic: Any, dims: Any, fix: str, tmp_path: Path
) -> None:
    """Fails if a file is made although the model's code does something else at a size in the range, also between the
    ends of the range. Also fails if the message names a range that isn't taken."""
    given: Any = {"example": (torch.randn(example),), "dynamic": dynamic, "out": tmp_path / "m.onnx"}
    with pytest.raises(BadInputSpec, match="the model does something else") as raised:
        accel.export(model, **given, dims=dims)
    assert str(raised.value).endswith(f"give {fix}")
    accel.export(model, **given, dims=eval(fix.removeprefix("dims=")))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(80, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows[: x.shape[1]] + x[..., None]


def test_a_slice_of_a_table(tmp_path: Path) -> None:
    """Fails if a session takes more places than a table has, or if the condition is hard to read."""
    made = accel.export(Table(), example=(torch.randn(2, 16),), dynamic=N, out=tmp_path / "m.onnx")
    assert [condition.text for condition in made.conditions] == ["n <= 80"]
    with (
        accel.load(made) as session,
        pytest.raises(BadFeeds, match=r"n=81 is beyond n <= 80, .* the source itself fails"),
    ):
        session(torch.randn(2, 81))


def test_a_condition_that_changes_nothing_is_dropped(tmp_path: Path) -> None:
    """Fails if a right file is refused or held back because of a condition whose two sides compute the same."""
    made = accel.export(NoMatter(), example=(torch.randn(2, 16),), dynamic=N, out=tmp_path / "m.onnx")
    with accel.load(made) as session:
        x = torch.randn(3, 500)
        torch.testing.assert_close(session(x), 2 * x)


class NoMatterBeyond(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 16 and (x.shape[0] * x.shape[1]) % 3 != 1:
            return x + 1
        return 1 + x


def test_a_condition_beyond_the_ranges_that_changes_nothing_is_dropped(tmp_path: Path) -> None:
    """Fails if a file is held back beyond the ranges of its dims, although it was right at a size there."""
    made = accel.export(NoMatterBeyond(), example=(torch.randn(2, 16),), dynamic=N, out=tmp_path / "m.onnx")
    assert not made.conditions
    with accel.load(made) as session:
        x = torch.randn(20, 9)
        torch.testing.assert_close(session(x), 1 + x)


class Frames(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x[:, None].unfold(2, 10, 5)
        return y[:, :, 1:].mean((1, 2)) if y.shape[2] > 1 else y.mean((1, 2))


def test_an_implied_condition_is_left_out(tmp_path: Path) -> None:
    """Fails if the user has to read conditions that another condition implies, or that contradict it."""
    made = accel.export(
        Frames(), example=(torch.randn(2, 60),), dynamic=N, dims={"n": (40, 60, 80)}, out=tmp_path / "m.onnx"
    )
    assert len(made.conditions) == 1, made.conditions
    with accel.load(made) as session, pytest.raises(BadFeeds):
        session(torch.randn(2, 13))


def test_a_guard_of_an_exported_program(tmp_path: Path) -> None:
    """Fails if a session advises to export a program for sizes that the program itself refuses."""
    dims = {"x": {0: torch.export.Dim("batch", max=64)}}
    program = torch.export.export(NoMatter(), (torch.randn(3, 4),), dynamic_shapes=dims)
    made = accel.export(program, out=tmp_path / "m.onnx")
    with accel.load(made) as session, pytest.raises(BadFeeds, match=r"batch=65 .* the source itself fails") as raised:
        session(torch.randn(65, 4))
    assert "dims" not in str(raised.value)


EMPTY = {
    "a mean": lambda x: x.mean(1),
    "a variance": lambda x: (x - x.mean(1, keepdim=True)).square().mean(1),
    "a mean of all": lambda x: x.sum(1) + x.mean(),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_dim_with_other_numbers_is_refused(name: str, tmp_path: Path) -> None:
    """Fails if a session gives 0 for the mean of nothing, which is NaN in PyTorch."""
    made = accel.export(EMPTY[name], example=(torch.randn(2, 4),), dynamic=N, out=tmp_path / "m.onnx")
    with accel.load(made) as session:
        with pytest.raises(BadFeeds, match="gives other numbers than the source; give 1 or more"):
            session(torch.randn(2, 0))
        assert session(torch.randn(2, 1)).shape == EMPTY[name](torch.randn(2, 1)).shape


def test_an_empty_dim_with_the_same_numbers_is_taken(tmp_path: Path) -> None:
    """Fails if an empty dim is refused although the file gives PyTorch's numbers."""
    made = accel.export(lambda x: x.sum(1), example=(torch.randn(2, 4),), dynamic=N, out=tmp_path / "m.onnx")
    with accel.load(made) as session:
        assert session(torch.randn(2, 0)).tolist() == [0.0, 0.0]


def test_the_command_line_says_so(cli: Any, tmp_path: Path) -> None:
    """Fails if the user isn't told the condition when the file is made, or if a chain of stages loses it."""
    code = tmp_path / "net.py"
    code.write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        return x[:, -99:].mean(1) if x.shape[1] > 99 else x.mean(1)\n"
    )
    words = ["export", f"{code}:Net", "--input", "x:float32[batch,n,3]", "-o", tmp_path / "m.onnx"]
    ran = cli(*words)
    assert ran.code == 0, ran.stderr
    assert "n <= 99" in ran.stdout + ran.stderr
    half = accel.optimize(tmp_path / "m.onnx", target="openvino", precision="fp32", out=tmp_path / "out")
    with accel.load(half.artifact) as session, pytest.raises(BadFeeds, match="n <= 99"):
        session.run({"x": torch.randn(1, 100, 3).numpy()})
