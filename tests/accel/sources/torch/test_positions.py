"""Proves that a module is called the way its example calls it: by position, or by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel


class Less(nn.Module):
    """Returns ``a - 2 * b``, or ``a`` alone."""

    def forward(self, a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return a if b is None else a - 2 * b


class First(nn.Module):
    def forward(self, a: torch.Tensor, /, b: torch.Tensor) -> torch.Tensor:
        return a - 2 * b


class Named(nn.Module):
    def forward(self, **named: torch.Tensor) -> torch.Tensor:
        return named["a"] - 2 * named["b"]


class Outside(Less):
    """Divides what is given by position in ``__call__``, which torch doesn't see as a part of ``forward``."""

    def __call__(self, *args: torch.Tensor, **named: torch.Tensor) -> Any:
        return super().__call__(*(one / 4 for one in args), **named)


def divided(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(one / 4 for one in args)


def doubled(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(one / 4 for one in args), {name: one * 2 for name, one in named.items()}


def hooked(kind: str) -> nn.Module:
    module = Less()
    if kind == "before":
        module.register_forward_pre_hook(divided)
    elif kind == "with names":
        module.register_forward_pre_hook(doubled, with_kwargs=True)
    elif kind == "after":
        module.register_forward_hook(lambda _, args, output: output + sum(args))
    else:
        module.register_forward_hook(lambda _, args, output: output + args[0])
    return module


A, B = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("module", "example"),
    [
        (hooked("before"), A),
        (hooked("before"), (A, B)),
        (hooked("before"), {"a": A, "b": B}),
        (hooked("with names"), (A, B)),
        (hooked("with names"), {"a": A, "b": B}),
        (hooked("after"), (A,)),
        (hooked("first"), (A, B)),
        (First(), (A, B)),
        (First(), {"a": A, "b": B}),
        (Named(), {"a": A, "b": B}),
        (Outside(), (A, B)),
        (Outside(), {"a": A, "b": B}),
    ],
)
def test_a_module_is_called_as_its_example_calls_it(module: nn.Module, example: Any) -> None:
    """Fails if arguments that the example gives by position reach the module's hooks by name, or vice versa."""
    args, named = ((), example) if isinstance(example, dict) else ((example,) if example is A else example, {})
    only = isinstance(module, First) and named
    expected = module(named["a"], b=named["b"]) if only else module(*args, **named)
    with accel.load(module, example=example) as session:
        torch.testing.assert_close(session(*args, **named), expected)


def test_the_exported_module_is_called_as_the_example_calls_it(tmp_path: Path) -> None:
    """Fails if the exported graph lacks what a hook does with the arguments that the example gives by position."""
    module = hooked("before")
    with accel.load(accel.export(module, out=tmp_path / "model.onnx", example=(A, B))) as session:
        torch.testing.assert_close(session(A, B), module(A, B))


FACTORY = """\
import torch
from torch import nn


class Less(nn.Module):
    def forward(self, a, b):
        return a - 2 * b


def hooked():
    module = Less()
    module.register_forward_pre_hook(lambda _, args: tuple(one / 4 for one in args))
    return module


def by_position():
    return hooked(), (torch.ones(2, 3), torch.ones(2, 3))


def by_name():
    return hooked(), {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
"""


@pytest.mark.parametrize(("factory", "scale"), [("hooked", 4), ("by_position", 4), ("by_name", 1)])
def test_the_module_of_a_factory(factory: str, scale: int, tmp_path: Path) -> None:
    """Fails if the hook of a factory's module doesn't see the inputs by position, or if it sees inputs that the
    factory's example gives by name."""
    path = tmp_path / "model.py"
    path.write_text(FACTORY)
    inputs = ["a:float32[batch,3]", "b:float32[batch,3]"] if factory == "hooked" else None
    with accel.load(f"{path}:{factory}", inputs=inputs) as session:
        torch.testing.assert_close(session(a=A, b=B), (A - 2 * B) / scale)


def test_the_parts_of_a_pipeline(tmp_path: Path) -> None:
    """Fails if an argument that a pipeline's function gives by position reaches the part's hook by name, because
    another argument of the call is given by name."""
    both = accel.Pipeline(lambda parts, a, b: parts.less(a, b=b), less=hooked("with names"))
    with accel.load(accel.export(both, out=tmp_path / "out", example=(A, B))) as session:
        torch.testing.assert_close(session(A, B), A / 4 - 4 * B)
