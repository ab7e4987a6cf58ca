"""Proves that the hash of a live PyTorch module covers everything from which its outputs are computed."""

from __future__ import annotations

import copy
import dataclasses
import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn

from accel.errors import BadSource
from accel.sources.torch.fingerprint import code_and_attributes_sha256
from tests.accel.sources.torch.test_live import Act, Fixed, X, scripted


class Holds(nn.Module):
    """Holds an object that ``pickle`` can't save, or saves without its code or content."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


@dataclasses.dataclass(slots=True)
class Slots:
    number: float


class List(list[float]):
    pass


class Text(str):
    pass


def with_attribute(value: Any, number: float) -> Any:
    value = copy.copy(value)
    value = types.FunctionType(value.__code__, globals()) if callable(value) else value
    value.number = number
    return value


def linear_with_attribute(number: float) -> nn.Module:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    linear.weight.number = number  # type: ignore[attr-defined]
    return linear


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_what_counts_as_another_model() -> None:
    """Fails if the hash of a model stays the same although an attribute, a function or a global changed. Also fails if
    the same model gets two hashes."""
    assert code_and_attributes_sha256(Act(2.0)) == code_and_attributes_sha256(Act(2.0))
    assert code_and_attributes_sha256(scripted(nn.ReLU())) == code_and_attributes_sha256(scripted(nn.ReLU()))
    others: list[nn.Module] = [
        *(Holds(partial(lambda x, by: x * by, by=by)) for by in (2.0, 3.0)),
        *(Holds(Slots(number)) for number in (2.0, 3.0)),
        *(Holds(get_ema_avg_fn(number)) for number in (0.5, 0.25)),
        *(
            Holds(with_attribute(value, number))
            for value in (List(), Text("a"), nn.Parameter(X), lambda x: x)
            for number in (2.0, 3.0)
        ),
        *(Holds(torch.tensor([0.0, number]).to_sparse()) for number in (2.0, 3.0)),
        *(Holds(torch.nested.nested_tensor([torch.tensor([number])])) for number in (2.0, 3.0)),
        *(linear_with_attribute(number) for number in (2.0, 3.0)),
        *(Holds({1: number}.get) for number in (2.0, 3.0)),
        *(Holds(scripted(function)) for function in (nn.functional.silu, nn.functional.mish)),
        *(torch.fx.symbolic_trace(module) for module in (nn.ReLU(), nn.Sigmoid())),
        scripted(nn.ReLU()),
        scripted(nn.Sigmoid()),
        Act(2.0),
        Act(3.0),
        nn.ReLU(),
        nn.Softmax(0),
        nn.Softmax(1),
        Fixed(),
    ]
    assert len({code_and_attributes_sha256(module) for module in others}) == len(others)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(BadSource, match="the attributes of Holds are nested too deeply"):
        code_and_attributes_sha256(Holds(deep))
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda _module, _args, output: output * 2)
    assert code_and_attributes_sha256(hooked) != code_and_attributes_sha256(nn.ReLU())
    before = code_and_attributes_sha256(nn.ReLU())
    everywhere = nn.modules.module.register_module_forward_hook(lambda _module, _args, output: output * 2)
    try:
        assert code_and_attributes_sha256(nn.ReLU()) != before
    finally:
        everywhere.remove()
    assert code_and_attributes_sha256(nn.ReLU()) == before
