"""Proves that ``fill`` rebuilds arguments and results from the templates and tensors that ``describe`` returns."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel
from accel.errors import BadFeeds
from accel.sources.structure import arguments_of, describe, fill, tensors_in

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: Any
    hidden: Any


def build(kind: str, items: list[Any]) -> Any:
    if kind == "dict":
        return {f"key{i}": item for i, item in enumerate(items)}
    return tuple(items) if kind == "tuple" else items


LEAVES = st.one_of(
    st.integers(0, 9).map(lambda n: np.full((2,), n)), st.none(), st.booleans(), st.integers(), st.text(max_size=3)
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.builds(build, st.sampled_from(["dict", "tuple", "list"]), st.lists(inner, max_size=3)),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(NESTED)
def test_a_structure_is_put_together_again(value: Any) -> None:
    """Checks that a template keeps the types, the order and the constants of a structure, and can be written as
    JSON."""
    template, tensors = describe(value)
    count = json.dumps(template).count('"tensor"')
    assert count >= len(tensors)
    if count == len(tensors):  # no two tensors share a name
        assert same(fill(json.loads(json.dumps(template)), tensors), value)


@pytest.mark.parametrize(
    "value",
    [Pair(np.ones(2), np.zeros(3)), Output(np.ones(2), None), OrderedDict(a=np.ones(2), b=np.zeros(1))],
    ids=["named tuple", "dataclass", "mapping"],
)
def test_classes(value: Any) -> None:
    """Fails if ``fill`` makes a dataclass, a named tuple or a mapping of the wrong class."""
    template, tensors = describe(value)
    assert type(fill(template, tensors)) is type(value)


def test_a_class_of_a_stranger_is_not_imported() -> None:
    """Fails if a manifest can make a process import a module or call a function."""
    for path in ("antigravity:geohash", "os:system", "subprocess:Popen", "builtins:print"):
        made = fill({"class": path, "fields": [["command", {"value": "true"}]]}, {})
        assert isinstance(made, SimpleNamespace), path


@pytest.mark.parametrize(
    ("given_value", "message"),
    [
        ({"x": np.ones(1), "mode": "slow"}, "mode is 'slow', but was 'fast' when the model was exported"),
        ({"x": np.ones(1), "other": 1}, "exported without the argument 'other'"),
        ({"mode": "fast"}, "'x' is missing"),
        ({"x": [1, 2]}, "give a tensor or an array"),
    ],
)
def test_arguments_that_differ(given_value: dict[str, Any], message: str) -> None:
    """Fails if accel silently accepts a call with arguments that differ from the exported call in their structure or
    constants."""
    templates = {"x": describe(np.ones(1), "x")[0], "mode": describe("fast")[0]}
    with pytest.raises(BadFeeds, match=message):
        tensors_in(templates, given_value)


def test_arguments_by_position_and_name() -> None:
    """Fails if positional arguments, keywords or ``*args`` get the wrong names."""
    assert arguments_of(["a", "b"], (1,), {"b": 2}) == {"a": 1, "b": 2}
    assert arguments_of(["a"], (1, 2, 3), {}, "rest") == {"a": 1, "rest": (2, 3)}
    with pytest.raises(BadFeeds, match="given twice"):
        arguments_of(["a"], (1,), {"a": 2})
    with pytest.raises(BadFeeds, match="2 arguments are given"):
        arguments_of(["a"], (1, 2), {})


KEYS = st.sampled_from(["a", "b", "a_b", "output", "0", "a_2"])
ARRAYS = st.integers(0, 99).map(lambda number: np.full(1, number))


@given(st.recursive(ARRAYS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)))
def test_no_two_tensors_get_one_name(value: Any) -> None:
    """Fails if a tensor replaces another one because their names are the same, as in ``{"a_b": x, "a": {"b": y}}``."""
    template, tensors = describe(value)
    assert fill(template, tensors) == value
    assert tensors_in({"value": template}, {"value": value}) == tensors


def test_a_module_with_names_that_meet() -> None:
    """Fails if an argument or an output of a module is lost because another one has the same name."""

    def both(a: dict[str, torch.Tensor], a_x: torch.Tensor) -> dict[str, Any]:
        return {"less_one": a["x"] - 2 * a_x, "less": {"one": a_x}}

    one, other = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    with accel.load(both, example=({"x": one}, other)) as session:
        torch.testing.assert_close(session({"x": one}, other), {"less_one": one - 2 * other, "less": {"one": other}})
