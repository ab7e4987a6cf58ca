"""Proves that export decomposes single operators as PyTorch does when it traces the whole program."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import accel
from accel.converters.from_torch.shortcuts import decompositions


class Encoder(torch.nn.Module):
    """Has views, dropout, casts, operators with several results, and operators without a translation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.all = torch.nn.Linear(8, 24)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        batch, length, width = x.shape
        q, k, v = (part.reshape(batch, length, 2, 4).transpose(1, 2) for part in self.all(x).chunk(3, -1))
        seen = mask.to(device=x.device, dtype=torch.bool)[:, None, None, :] & torch.ones_like(ids).bool()[:, None, None]
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        merged = self.drop(attended.transpose(1, 2).reshape(batch, length, width))
        values, places = merged.sort(-1)
        return torch.nn.functional.huber_loss(values, x, reduction="none") + places.to(x.dtype).frac()


class Convolutions(torch.nn.Module):
    """Has a batch norm, whose operator PyTorch always decomposes, and an adaptive pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Hardswish(), torch.nn.Dropout2d()
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image).mean((2, 3)).flatten(1)


class InPlace(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, 0] = 7
        return y.relu_() + x


NETS: dict[str, tuple[type[torch.nn.Module], dict[str, str]]] = {
    "encoder": (
        Encoder,
        {"ids": "int64[batch,length]{0..19}", "mask": "int64[batch,length]{0..1}"},
    ),
    "convolutions": (Convolutions, {"image": "float32[batch,3,8,8]"}),
    "in_place": (InPlace, {"x": "float32[batch,5]"}),
    "translated": (torch.nn.Tanh, {"x": "float32[batch,5]"}),
}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the programs that PyTorch traces as a whole."""
    counted: Counter[str] = Counter()
    whole = torch.export.ExportedProgram.run_decompositions

    def counting(self: Any, *args: Any, **words: Any) -> Any:
        counted["whole"] += 1
        return whole(self, *args, **words)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counting)
    return counted


def graph_of(name: str, folder: Path) -> tuple[list[str], list[np.ndarray]]:
    """Exports a net with PyTorch's exporter. Returns the operators of the graph, and its outputs at other sizes."""

    torch.manual_seed(0)
    kind, inputs = NETS[name]
    made = accel.export(kind().eval(), inputs=inputs, simplify=False, use_cache=False, out=folder / f"{name}.onnx")
    assert made.history[0]["notes"]["rung"] == "dynamo"
    feeds = made.signature.example_inputs(**dict.fromkeys(made.signature.dims, 3))
    with accel.load(made) as session:
        return [node.op_type for node in onnx.load(made.path).graph.node], list(session.run(feeds).values())


@pytest.mark.parametrize("name", ["encoder", "convolutions"])
def test_the_graph_is_the_one_of_a_whole_trace(
    name: str, traces: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fails if an export traces the program twice, or if the operators of the graph or its outputs differ from those
    of PyTorch's own decomposition."""
    quick, outputs = graph_of(name, tmp_path)
    assert not traces
    monkeypatch.setattr(decompositions, "decomposed", lambda *_: None)
    whole, wanted = graph_of(name, tmp_path)
    assert traces["whole"] == 1
    assert Counter(quick) == Counter(whole)
    for one, other in zip(outputs, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_program_of_translated_operators_needs_no_table(
    traces: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fails if the export of operators that all have a translation makes PyTorch's table of decompositions, or leaves
    the whole program to PyTorch."""
    from torch.onnx._internal.exporter import _decomp

    made: list[Any] = []
    monkeypatch.setattr(_decomp, "create_onnx_friendly_decomposition_table", lambda known: made.append(known) or {})
    operators, _ = graph_of("translated", tmp_path)
    assert operators == ["Tanh"]
    assert not made
    assert not traces


def test_writes_to_tensors_need_a_whole_trace(traces: Counter[str], tmp_path: Path) -> None:
    """Fails if the graph leaves out a write to a tensor."""
    _, (found,) = graph_of("in_place", tmp_path)
    assert traces["whole"] == 1
    assert np.all(found[:, 0] >= 7 - 5)


def test_a_failed_translation_is_tried_again_with_a_whole_trace(
    traces: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fails if an operator that was left without a translation ends the export, although PyTorch's own decomposition
    works."""
    monkeypatch.setattr(decompositions, "_is_unknown", lambda *_: False)
    graph_of("convolutions", tmp_path)
    assert traces["whole"] == 1


def test_torchs_function_is_restored() -> None:
    """Fails if an export leaves PyTorch's exporter changed, or if one of two exports changes it back too early."""
    from torch.onnx._internal.exporter import _fx_passes

    before = _fx_passes.decompose_with_registry
    with decompositions.few_decompositions(), decompositions.few_decompositions():
        assert _fx_passes.decompose_with_registry is not before
    assert _fx_passes.decompose_with_registry is before
