"""Proves that a factory may return the same example arguments that the Python functions take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import accel
from accel import Source
from accel.errors import BadInputSpec
from accel.sources.torch.source import module_of

NESTED = """\
import dataclasses
import torch
from torch import nn


@dataclasses.dataclass
class Batch:
    left: torch.Tensor
    right: torch.Tensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.free = lambda x: x + 1  # can't be pickled by name

    def forward(self, batch, scale=1.0):
        left, right = (batch.left, batch.right) if isinstance(batch, Batch) else self.pair(batch)
        return self.linear(self.free(left)) - scale * right.sum(1, keepdim=True)

    def pair(self, batch):
        return (batch["left"], batch["inner"]["right"]) if isinstance(batch, dict) else batch


def inner_dict():
    return Net(), {"batch": {"left": torch.ones(2, 3), "inner": {"right": torch.zeros(2, 4)}}, "scale": 3.0}


def whole_dict():
    return Net(), {"left": torch.ones(2, 3), "inner": {"right": torch.zeros(2, 4)}}


def pair():
    return Net(), ([torch.ones(2, 3), torch.zeros(2, 4)], 3.0)


def dataclass():
    return Net(), (Batch(torch.ones(2, 3), torch.zeros(2, 4)),)


class Only(nn.Module):
    def forward(self, batch):
        return batch["image"] * 2


def only():
    return Only(), {"image": torch.ones(2, 3)}


class Rest(nn.Module):
    def forward(self, *tensors):
        return tensors[0] - tensors[1]


def rest():
    return Rest(), (torch.ones(2, 3), torch.zeros(2, 3))
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "nested.py"
    path.write_text(NESTED)
    return f"{path}:"


@pytest.mark.parametrize(
    ("factory", "names"),
    [
        ("inner_dict", "batch_left batch_inner_right"),
        ("whole_dict", "left inner_right"),
        ("pair", "batch_0 batch_1"),
        ("dataclass", "batch_left batch_right"),
        ("only", "image"),
        ("rest", "tensors_0 tensors_1"),
    ],
)
def test_nested_examples(spec: str, factory: str, names: str) -> None:
    """Fails if an example with a dict, a list or a dataclass in an argument is refused, or if its constants or its
    order get lost."""
    found = Source(spec + factory).open()
    assert [one.name for one in found.signature.inputs] == names.split()
    assert found.signature.batch_dim == "batch"
    assert set(found.source["call"]["arguments"]) <= {"batch", "scale", "tensors"}
    with accel.load(found) as session:
        feeds = session.example_inputs(batch=3)
        made = module_of(found)

        (output,) = session.run(feeds).values()
        expected = made(*(torch.from_numpy(feeds[name]) for name in names.split())).detach().numpy()
    np.testing.assert_allclose(output, expected)


def test_the_factory_is_the_provenance(spec: str) -> None:
    """Fails if the source keeps its hash although the factory's file or a constant of the example has changed."""
    found = Source(spec + "inner_dict").open()
    path = Path(spec.rstrip(":"))
    assert found.path == path
    assert [one["path"] for one in found.source["files"]] == [str(path)]
    path.write_text(NESTED.replace('"scale": 3.0', '"scale": 4.0'))
    assert Source(spec + "inner_dict").open().source["sha256"] != found.source["sha256"]


def test_inputs_in_another_order(spec: str) -> None:
    """Fails if inputs that are declared in another order than the example's tensors are mixed up, or if unknown names
    are accepted."""
    inputs = ["tensors_1:float32[batch,3]", "tensors_0:float32[batch,3]"]
    with accel.load(Source(spec + "rest", inputs=inputs).open()) as session:
        feeds: dict[str, Any] = session.example_inputs(batch=2)
        (output,) = session.run(feeds).values()
    np.testing.assert_array_equal(output, feeds["tensors_0"] - feeds["tensors_1"])
    with pytest.raises(BadInputSpec, match="the example's tensors are called tensors_0, tensors_1"):
        Source(spec + "rest", inputs=["a:float32[batch,3]", "b:float32[batch,3]"]).open()
