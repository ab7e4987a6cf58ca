"""Proves that onnxscript's rules change the same nodes when they are only tried at nodes with their operator."""

from __future__ import annotations

import contextlib
from pathlib import Path

import onnx
import pytest
import torch
from onnxscript.rewriter._matcher import SimplePatternMatcher

import accel
from accel.converters.from_torch import exporters
from accel.converters.from_torch.shortcuts.rules_by_operator import rules_by_operator


class Rewritten(torch.nn.Module):
    """Has what onnxscript's rules rewrite: a padded convolution with a batch norm, chained clips, casts that do
    nothing, transposes and reshapes in a row, slices of everything, and an addition of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = torch.nn.ZeroPad2d(1)
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(self.pad(image))).relu().clamp(0, 6).clamp(-1, 5)
        x = (x.float().transpose(2, 3).transpose(2, 3) + 0.0) * 1.0
        x = x.reshape(-1, 4, 64).unsqueeze(1).squeeze(1)[:, :, :].flatten(1).reshape(-1, 32, 8)
        return self.attention(x, x, x)[0]


def graph_of(folder: Path) -> list[str]:
    """Exports the net with PyTorch's exporter, and returns the graph's nodes and constants as text."""
    torch.manual_seed(0)
    made = accel.export(
        Rewritten().eval(),
        inputs={"image": "float32[batch,3,8,8]"},
        simplify=False,
        use_cache=False,
        out=folder / "net.onnx",
    )
    assert made.history[0]["notes"]["rung"] == "dynamo"
    graph = onnx.load(made.path).graph
    nodes = [f"{node.op_type} {node.input} {node.output} {[str(one) for one in node.attribute]}" for node in graph.node]
    return nodes + [f"{one.name} {one.dims} {one.raw_data.hex()}" for one in graph.initializer]


def test_the_graph_is_the_one_of_all_tries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a rule is left out at a node that it would change, or if rules are still tried at every node."""
    tried: list[str] = []
    match = SimplePatternMatcher.match

    def counting(self: SimplePatternMatcher, *args: object, **words: object) -> object:
        tried.append("")
        return match(self, *args, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(SimplePatternMatcher, "match", counting)
    few, quick = graph_of(tmp_path), len(tried)
    tried.clear()
    monkeypatch.setattr(exporters, "rules_by_operator", contextlib.nullcontext)
    whole = graph_of(tmp_path)
    assert few == whole
    assert 0 < quick < len(tried) / 5


def test_onnxscripts_method_is_restored() -> None:
    """Fails if an export leaves onnxscript changed, or if one of two exports changes it back too early."""
    before = SimplePatternMatcher.match
    with rules_by_operator(), rules_by_operator():
        assert SimplePatternMatcher.match is not before
    assert SimplePatternMatcher.match is before
