"""Tests the argument ``dynamic``, which names the dynamic axes of example inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim

import accel
from accel.errors import BadInputSpec
from accel.sources.dynamic import named_axes
from accel.sources.structure import describe


@dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Sum(nn.Module):
    """Adds up two tensors of ``batch``, which may be of any container, and ``x``."""

    def forward(self, batch: Any, x: torch.Tensor) -> torch.Tensor:
        if isinstance(batch, dict):
            first, second = batch.values()
        elif isinstance(batch, Batch):
            first, second = batch.ids, batch.mask
        else:
            first, second = batch
        return (first + second) * x.mean()


T, X = torch.ones(2, 5), torch.ones(2, 3)
_CONTAINERS = {
    "dict": ({"ids": T, "mask": T}, ["batch_ids", "batch_mask"], ["ids", "mask"]),
    "list": ([T, T], ["batch_0", "batch_1"], [0, 1]),
    "dataclass": (Batch(T, T), ["batch_ids", "batch_mask"], ["ids", "mask"]),
    "named tuple": (Pair(T, T), ["batch_left", "batch_right"], ["left", "right"]),
}
LENGTH = {1: "length"}


@pytest.mark.parametrize("container", _CONTAINERS)
@pytest.mark.parametrize("form", ["torch's", "flat", "in order"])
def test_inputs_in_containers(container: str, form: str) -> None:
    """Fails if ``dynamic`` can't name a tensor in a container by torch's nested form and by the name accel prints."""
    batch, flat, keys = _CONTAINERS[container]
    dynamic: dict[str, Any] = {
        "torch's": {"batch": dict.fromkeys(keys, LENGTH)},
        "flat": dict.fromkeys(flat, LENGTH),
        "in order": {"batch": [LENGTH, LENGTH], "x": None},
    }[form]
    shapes = {
        spec.name: spec.shape
        for spec in accel.Source(Sum(), example=(batch, X), dynamic=dynamic).open().signature.inputs
    }
    assert shapes == {flat[0]: ("batch", "length"), flat[1]: ("batch", "length"), "x": ("batch", 3)}


def test_the_file_takes_other_sizes_of_a_nested_input(tmp_path: Any) -> None:
    """Fails if an export keeps the size of a nested input that ``dynamic`` names."""
    source = accel.Source(Sum(), example=(Batch(T, T), X), dynamic={"batch": Batch(LENGTH, LENGTH)})  # type: ignore[arg-type]
    session = accel.load(accel.export(source, out=tmp_path / "sum.onnx"))
    wider = torch.rand(3, 9)
    result = session(Batch(wider, wider), torch.ones(3, 3))
    torch.testing.assert_close(result, 2 * wider)


def _named(argument: Any, dynamic: Any) -> Any:
    template, tensors = describe(argument, "batch", strict=True)
    return named_axes(dynamic, {"batch": template}, {name: tuple(one.shape) for name, one in tensors.items()})


@pytest.mark.parametrize(
    ("argument", "dynamic", "names"),
    [
        ([T], {"batch": {0: "rows"}}, {"batch": {0: "rows"}}),  # the only tensor of a list has the list's name
        ([T], {"batch": [{0: "rows"}]}, {"batch": {0: "rows"}}),
        ({0: T, 1: T}, {"batch": {1: {-1: "width"}}}, {"batch_1": {1: "width"}}),
        ({"a": [T, {"b": T}]}, {"batch": {"a": [None, {"b": ["n", None]}]}}, {"batch_a_1_b": {0: "n"}}),
        (T, ({0: "rows"},), {"batch": {0: "rows"}}),  # by position
        (T, {"batch": {0: Dim.STATIC, 1: Dim.AUTO}}, {"batch": {1: "batch_1"}}),
        (T, {"batch": (Dim.DYNAMIC, 5)}, {"batch": {0: "batch_0"}}),
        ({"a": T, "b": T}, {"batch": None}, {}),
    ],
)
def test_forms_of_dynamic(argument: Any, dynamic: Any, names: Any) -> None:
    """Fails if a form of ``dynamic`` that torch takes names other axes."""
    assert _named(argument, dynamic).names == names


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"y": {0: "n"}}, "'y', which is not an input; the inputs are batch_ids, batch_mask, batch$"),
        ({"batch": {"idz": {0: "n"}}}, r"batch\['idz'\], but batch has only 'ids', 'mask'; .* batch_ids, batch_mask$"),
        ({"batch": {0: "n"}}, "axes for batch, which is no tensor; name the tensors in it: batch_ids, batch_mask$"),
        ({"batch": "n"}, "gives 'n' for batch; give the axes of the tensors in it: batch_ids, batch_mask$"),
        ({"batch": {"ids": "n"}}, "gives 'n' for the input batch_ids, which is one tensor"),
        ({"batch": [LENGTH] * 3}, "lists 3 items for batch, but the example has 2"),
        ({"batch_ids": LENGTH, "batch": {"ids": LENGTH}}, "names the input batch_ids twice"),
        (
            {"batch": {"ids": {2: "n"}}},
            "the axis 2 of the input batch_ids, which has only 2 axes; give an axis in 0..1$",
        ),
        (
            {"batch": {"ids": {-1: 9}}},
            r"axis -1 of the input batch_ids the size 9, but the size in the example is \d; give a name, as in "
            r"\{-1: 'batch_ids_1'\}, for an axis of any size, or an example of size 9$",
        ),
        ({"batch": {"mask": [None, 0]}}, "axis 1 of the input batch_mask the size 0, but"),
    ],
)
def test_wrong_names(dynamic: Any, message: str) -> None:
    """Fails if a wrong name in ``dynamic`` raises another error than one sentence with the names there are."""
    with pytest.raises(BadInputSpec, match=message):
        _named({"ids": T, "mask": T}, dynamic)


def test_a_container_of_constants() -> None:
    """Fails if a name in ``dynamic`` for an argument without tensors is ignored."""
    with pytest.raises(BadInputSpec, match="names batch, which holds no tensor; leave batch out"):
        _named([1, 2], {"batch": [{0: "n"}]})
