"""Proves that weights, examples, arguments and outputs that hold no readable values are refused in a sentence whose
advice works, and that modules that torch itself can't copy are taken."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import AccelError, BadData, BadFeeds, BadInputSpec, BadSource

X = torch.arange(6.0).reshape(2, 3)


class Multiplied(nn.Module):
    """Multiplies by a matrix, which is a buffer or an attribute."""

    def __init__(self, matrix: torch.Tensor, buffer: bool = True) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("matrix", matrix)
        else:
            self.matrix = matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(self.matrix, x.T).T


EYE = torch.eye(3)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.LazyLinear(4)), "'0.weight' of Sequential has no values before the first call"),
        (nn.Linear(3, 2, device="meta"), "'weight' of Linear is on the device meta"),
        (nn.Sequential(Multiplied(EYE.to_sparse())), "'0.matrix' of Sequential has the layout torch.sparse_coo"),
        (nn.Sequential(Multiplied(EYE.to_sparse(), buffer=False)), "'0.matrix' of Sequential has the layout"),
    ],
)
def test_weights_without_values(module: nn.Module, message: str) -> None:
    """Fails if weights that can't be read end in an error of torch."""
    with pytest.raises(BadSource, match=message):
        accel.load(module, example=(X,))


def test_the_advice_about_weights_works(tmp_path: Path) -> None:
    """Fails if a module is still refused after its first call, after its weights are loaded, or with a dense matrix."""
    lazy = nn.Sequential(nn.LazyLinear(4))
    lazy(X)
    empty = nn.Linear(3, 2, device="meta")
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "weights.pt")
    empty.load_state_dict(torch.load(tmp_path / "weights.pt"), assign=True)
    for module in (lazy, empty, Multiplied(EYE.to_sparse().to_dense())):
        with accel.load(module, example=(X,)) as session:
            torch.testing.assert_close(session(X), module(X).detach())


def test_a_lazy_module_stays_lazy() -> None:
    """Fails if accel calls the user's lazy module, which would draw its weights."""
    module = nn.LazyLinear(4)
    with pytest.raises(BadSource):
        accel.load(module, example=(X,))
    assert module.has_uninitialized_params()


def test_a_factory_of_a_lazy_module(tmp_path: Path) -> None:
    """Fails if each opening of the factory draws other weights for its lazy module."""
    path = tmp_path / "lazy.py"
    path.write_text("import torch\n\ndef make():\n    return torch.nn.LazyLinear(4), (torch.ones(2, 3),)\n")
    with pytest.raises(BadSource, match=r"'weight' of .*lazy.py:make has no values before the first call"):
        accel.load(f"{path}:make")


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that nested tensors are a prototype
        return torch.nested.nested_tensor([X[0], X[1]])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (X.to_sparse(), r"has the layout torch.sparse_coo; make it dense with to_dense\(\)"),
        (X.to("meta"), "on the device meta, which holds no values"),
        (nested(), "is nested; pad it"),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_examples_and_arguments(value: torch.Tensor, message: str) -> None:
    """Fails if a tensor that can't be read ends in an error of torch, as an example or as an argument."""
    with pytest.raises(BadInputSpec, match=f"example's input can't be read.*{message}"):
        accel.load(nn.Linear(3, 2), example=(value,))
    with (
        accel.load(nn.Linear(3, 2), example=(X,)) as session,
        pytest.raises(BadFeeds, match=f"argument input.*{message}"),
    ):
        session(value)


class Plain(torch.Tensor):
    pass


class Doubled(torch.Tensor):
    """Doubles what a linear layer computes."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found * 2 if function is nn.functional.linear else found


def test_examples_of_a_subclass_of_tensors() -> None:
    """Fails if a tensor of a subclass without operators of its own is refused, if one with its own operators is taken,
    which no exported model computes, or if the advice doesn't work."""
    module = nn.Linear(3, 2)
    for example in (X.as_subclass(Plain), nn.Parameter(X), X.as_subclass(Doubled).as_subclass(torch.Tensor)):
        with accel.load(module, example=(example,)) as session:
            torch.testing.assert_close(session(X), module(X).detach())
    with pytest.raises(
        BadInputSpec, match=r"is a Doubled, whose own operators .*give input.as_subclass\(torch.Tensor\)"
    ):
        accel.load(module, example=(X.as_subclass(Doubled),))


@pytest.mark.parametrize("to", [torch.Tensor.to_sparse, partial(torch.Tensor.to, device="meta")])
def test_outputs(to: Any) -> None:
    """Fails if an output that can't be read ends in an error of torch."""
    with pytest.raises(BadSource, match=r"output 'output' .*can't be read: the tensor"):
        accel.load(lambda x: to(x * 2), example=(X,))


def test_sparse_data() -> None:
    """Fails if a sparse batch of the data ends in an error of torch."""
    with pytest.raises(BadData, match="array 'input' of a batch can't be read"):
        accel.verify(nn.Linear(3, 2), nn.Linear(3, 2), example=(X,), data=[{"input": X.to_sparse()}])


def test_both_kinds_of_weight_norm() -> None:
    """Fails if a module can't be copied because it has a parametrization and the computed weight of the old
    weight_norm, or if the copy changes the module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the old weight_norm is deprecated
        first = torch.nn.utils.weight_norm(nn.Linear(3, 3))
    module = nn.Sequential(first, torch.nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))).eval()
    expected = module(X).detach()
    with accel.load(module, example=(X,)) as session:
        torch.testing.assert_close(session(X), expected)
    with torch.no_grad():
        first.weight_g.mul_(2)
    assert not torch.equal(module(X), expected)


@pytest.mark.parametrize(
    ("function", "example"), [(torch.sin, (X,)), (partial(torch.add, alpha=3), (X, X + 1)), (torch.atan2, [X, X + 1])]
)
def test_functions_without_a_signature(function: Any, example: Any, tmp_path: Path) -> None:
    """Fails if a function of torch, or a partial of one, is refused because Python can't tell its parameters."""
    with accel.load(accel.export(function, example=example, out=tmp_path / "function.onnx")) as session:
        torch.testing.assert_close(session(*example), function(*example))


def test_a_wrong_call_of_a_function_without_a_signature() -> None:
    """Fails if too many arguments end in an error of torch."""
    with pytest.raises(AccelError, match="sin"):
        accel.load(torch.sin, example=(X, X))
