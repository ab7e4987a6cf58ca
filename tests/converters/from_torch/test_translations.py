"""Proves that the list of translations to ONNX is made once, belongs to one export, and knows operators that come
later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.converters.from_torch.shortcuts import translations
from accel.converters.from_torch.shortcuts.translations import kept_translations

registration = pytest.importorskip("torch.onnx._internal.exporter._registration")
ADD = torch.ops.aten.add.Tensor


def table() -> Any:
    """Returns the table of translations as PyTorch's exporter gets it within accel's export."""
    with kept_translations():
        return registration.ONNXRegistry.from_torchlib(opset_version=18)


def contents(one: Any) -> dict[Any, list[Any]]:
    return {
        operator: [(found.onnx_function, found.is_custom, found.is_complex) for found in every]
        for operator, every in one.functions.items()
    }


def test_exports_do_not_list_the_translations_again(
    my_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if an export lists the translations again, which takes half a second. The first export may list them
    twice, because it imports modules that add operators to PyTorch."""
    lists, own = [], registration.ONNXRegistry.from_torchlib.__func__

    def listed(*arguments: Any, **named: Any) -> Any:
        lists.append(named)
        return own(*arguments, **named)

    monkeypatch.setattr(registration.ONNXRegistry, "from_torchlib", classmethod(listed))
    for width in (8, 16, 32):
        before = len(lists)
        inputs = [f"x:float32[batch,3,{width},8]"]
        accel.export(f"{my_model}:make", inputs=inputs, out=tmp_path / f"{width}.onnx", simplify=False)
    assert len(lists) == before
    assert registration.ONNXRegistry.from_torchlib.__func__ is listed


def test_the_list_is_pytorchs_own() -> None:
    """Fails if the kept list differs from the one that PyTorch makes, or if PyTorch's own method isn't restored."""
    table()
    kept, own = table(), registration.ONNXRegistry.from_torchlib(opset_version=18)
    assert contents(kept) == contents(own)
    assert kept.opset_version == own.opset_version == 18
    assert registration.ONNXRegistry.from_torchlib.__func__.__module__ == registration.__name__


def test_a_translation_of_one_export_is_not_used_by_the_next() -> None:
    """Fails if a translation that one export adds stays in the list."""
    first, before = table(), contents(table())
    first.register_op(ADD, torch.add)
    assert contents(first) != before
    assert contents(table()) == before


def test_another_opset_has_a_list_of_its_own() -> None:
    """Fails if an export to one opset gets the translations of another opset."""
    table()
    with kept_translations():
        newest = registration.ONNXRegistry.from_torchlib(opset_version=23)
    assert contents(newest) == contents(registration.ONNXRegistry.from_torchlib(opset_version=23))
    assert contents(newest) != contents(table())


def test_an_operator_that_a_library_adds_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an operator that is added to PyTorch after the first export has no translation, such as torchvision's
    operators after ``import torchvision``."""
    from onnxscript.function_libs.torch_lib import registration as listed

    every = dict(listed.default_registry.items())
    name = "accel_test_late::twice"
    monkeypatch.setattr(listed.default_registry, "_registry", {**every, name: every["aten::relu"]})
    monkeypatch.setattr(translations, "_tables", {})
    assert name not in table().functions
    with torch.library._scoped_library("accel_test_late", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        assert name in table().functions
