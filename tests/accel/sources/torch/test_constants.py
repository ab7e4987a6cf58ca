"""Proves that constants among the arguments and results of a module stay what the module computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import BadFeeds, BadSource


class Scaled(nn.Module):
    """Takes two tensors and constants of each kind."""

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0, flip: bool = False, how: str = "sum"
    ) -> torch.Tensor:
        both = x + y if how == "sum" else x * y
        return (-both if flip else both) * scale


class Counted(nn.Module):
    """Returns the size of an axis as ``form`` makes it, beside a tensor and a constant."""

    def __init__(self, form: Any, axis: int = 0) -> None:
        super().__init__()
        self.form, self.axis = form, axis

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": x * 2, "n": self.form(x.shape[self.axis]), "kind": "counted"}


class Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return x * 2, x.sum().item()


class Ordered(nn.Module):
    def forward(self, x: torch.Tensor, k: int = 1, y: torch.Tensor | None = None) -> torch.Tensor:
        return x - k * y


def twice(parts: Any, x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return parts.inner(parts.inner(x, y, scale), y, scale)


X, Y = torch.arange(8.0).reshape(2, 4), torch.ones(2, 4)


class Calls(nn.Module):
    """Counts its calls in a buffer. Returns the count, or computes with the count."""

    calls: torch.Tensor

    def __init__(self, returned: bool, in_training: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.returned, self.in_training = returned, in_training

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.training or not self.in_training:
            self.calls += 1
        return (x * 2, self.calls) if self.returned else (x * self.calls,)


@pytest.mark.parametrize("returned", [True, False])
def test_a_module_that_counts_its_calls(returned: bool) -> None:
    """Fails if the error for a module that changes its own buffer gives another reason, such as an edited file. Also
    fails if the advice doesn't help."""
    said = r"differ.* from run to run on the same inputs: forward changes the buffer 'calls', .* only if self\.training"
    with pytest.raises(BadSource, match=said):
        accel.Source(Calls(returned, False), example=(X,)).open()
    assert accel.Source(Calls(returned, True), example=(X,)).open().signature.outputs


def test_another_constant_is_another_model(own_cache: Path) -> None:
    """Fails if an export takes the cached file that was made with other constants, or compares itself with the kept
    outputs of a run with other constants."""
    model = Scaled()
    for scale, use_cache in ((3.0, True), (5.0, True), (7.0, False)):
        with accel.load(accel.export(model, example=(X, Y, scale), use_cache=use_cache)) as session:
            assert torch.equal(session(X, Y, scale), model(X, Y, scale)), scale


def test_a_pipeline_with_another_constant_is_another_model(own_cache: Path) -> None:
    """Fails if a pipeline or its parts keep the constant of an earlier export."""
    pipeline = accel.Pipeline(twice, inner=Scaled())
    for scale in (2.0, 3.0):
        with accel.load(accel.export(pipeline, example=(X, Y, scale))) as session:
            assert torch.equal(session(X, Y, scale), pipeline(X, Y, scale)), scale


@pytest.mark.parametrize("other", [{"scale": 2}, {"scale": 2.0}, {"flip": True}, {"how": "product"}])
def test_constants_are_part_of_the_hash(other: dict[str, Any]) -> None:
    """Fails if two examples that differ in one constant, or only in its type, give one sha256. Also fails if equal
    examples give two."""
    one, again, another = (
        accel.Source(Scaled(), example={"x": X, "y": Y, **constants}).open().source["sha256"]
        for constants in ({"scale": 3}, {"scale": 3}, other)
    )
    assert one == again != another


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Counted(int), r"the output 'n' of Counted is the Python value 2 on one input and 3 on another"),
        (Counted(lambda _: float("inf")), r"value inf, .*; return torch.tensor\(float\('inf'\)\)"),
        (Summed(), r"the output 'output_1' of Summed is the Python value .*; return a tensor, such as torch.tensor"),
    ],
)
def test_a_python_number_that_changes_is_refused(model: nn.Module, message: str) -> None:
    """Fails if an export returns the number of its example for all sizes or values of the inputs."""
    with pytest.raises(BadSource, match=message):
        accel.Source(model, example=(X,)).open()


def test_a_size_is_returned_as_the_advice_says(own_cache: Path) -> None:
    """Fails if the advised tensor doesn't follow the size, or if a constant that never changes is refused or lost."""
    with accel.load(accel.export(Counted(torch.tensor), example=(X,))) as session:
        found = session(torch.ones(7, 4))
    assert (found["n"].item(), found["kind"]) == (7, "counted")
    for axis, dynamic in ((1, None), (0, {})):
        fixed = accel.Source(Counted(int, axis), example=(X,), dynamic=dynamic).open()
        assert ["n", {"value": X.shape[axis]}] in fixed.source["call"]["result"]["dict"]


def test_a_left_out_default_may_be_given(own_cache: Path) -> None:
    """Fails if a call with a default that the example left out is refused, or if another value is taken."""
    model = Scaled()
    for example in ((X, Y), {"x": X, "y": Y, "flip": False}):
        with accel.load(model, example=example) as session:
            for args, kwargs in (((X, Y, 1.0), {}), ((X, Y, 1.0, False, "sum"), {}), ((X,), {"y": Y, "scale": 1.0})):
                assert torch.equal(session(*args, **kwargs), model(X, Y)), (args, kwargs)
            for args, kwargs in (((X, Y, 2.0), {}), ((X, Y), {"scale": 2.0})):
                with pytest.raises(BadFeeds, match=r"scale is 2.0, but was 1.0 when .* give 1.0, or export the model"):
                    session(*args, **kwargs)
            with pytest.raises(BadFeeds, match=r"without the argument 'scale'; .* with an example that has 'scale'"):
                session(X, Y, scale=X)
            with pytest.raises(BadFeeds, match="6 arguments are given, but the model takes only the arguments x, y, s"):
                session(X, Y, 1.0, False, "sum", 3)


def test_positions_are_those_of_the_module() -> None:
    """Fails if the order of a dict decides which argument a position means, or if a tensor can no longer skip an
    argument that the example left out."""
    model = Ordered()
    for example in ({"y": Y, "x": X, "k": 2}, {"y": Y, "x": X}):
        with accel.load(model, example=example) as session:
            wanted = model(X, y=Y, k=example.get("k", 1))
            assert torch.equal(session(X, example.get("k", 1), Y), wanted)
            if "k" not in example:
                assert torch.equal(session(x=X, y=Y), wanted)
