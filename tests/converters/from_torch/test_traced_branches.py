"""Proves that accel tells branches on sizes from branches on values."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import pytest
import torch

import accel
from accel.converters.from_torch.traced_branches import value_branches
from accel.errors import ExportFailed


class Branches(torch.nn.Module):
    """Has branches on sizes of the inputs, and branches that depend on values. A comment names the kind of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[n > 0] = 1
        x = x if x.shape[0] > self.table.size(0) else x + 1  # size
        x = x if torch.cat([x, x]).reshape(-1, 2).shape[0] > 100 else x + 1  # size
        x = x if torch.zeros(x.shape[0]).sum() > 0 else x + 1  # size
        x = x if torch.ones_like(x).sum() > 1000 else x + 1  # size
        x = x if x.sum() > 0 else x + 1  # value
        x = x if x[n > 0].shape[0] > 7 else x + 1  # value
        x = x if x[torch.where(n)[0]].shape[0] > 7 else x + 1  # value
        x = x if torch.repeat_interleave(x, n, dim=0).shape[0] > 7 else x + 1  # value
        x = x if torch.bincount(n).shape[0] > 7 else x + 1  # value
        x = x if torch.cat([x.view(-1), x.masked_select(x > 0)]).numel() > 700 else x + 1  # value
        return x if torch.zeros(x.nonzero().shape[0], 2).sum() > 0 else x + 1  # value


@pytest.mark.filterwarnings("ignore")
def test_branches_on_sizes_and_on_values() -> None:
    """Fails if a branch on a size counts as a branch on values, or the other way round."""
    example = (torch.randn(4, 4), torch.tensor([1, 0, 1, 1]))
    with value_branches() as found:
        torch.onnx.export(Branches(), example, io.BytesIO(), dynamo=False, dynamic_axes={"x": [0]}, input_names=["x"])
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert {file for file, _ in found} == {__file__}
    assert {line for _, line in found} == {line for line, text in enumerate(lines, 1) if text.endswith("# value")}


class Padded(torch.nn.Module):
    """Pads a sequence to a multiple of 8. If a value of the mask is above 1, the output is twice as large."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        padding = (8 - x.shape[1] % 8) % 8
        if padding > 0:
            x = torch.nn.functional.pad(x, (0, padding))
        twice = (mask > 1).any().item()
        return x * 2 if twice else x


def test_only_the_branch_on_values_is_named(tmp_path: Path) -> None:
    """Fails if the error advises to rewrite the branch on a size of a model that also has a branch on values."""
    example = {"x": torch.randn(2, 12), "mask": torch.ones(2, 12, dtype=torch.int64)}
    dynamic = {name: {0: "batch", 1: "sequence"} for name in example}
    with warnings.catch_warnings(), pytest.raises(ExportFailed) as failed:
        accel.export(Padded(), example=example, dynamic=dynamic, out=tmp_path / "m.onnx")
    assert "padding > 0" not in str(failed.value)
    wanted = "compute with the tensor `(mask > 1).any()`, or give True or False, instead of `(mask > 1).any().item()`"
    assert wanted in str(failed.value)
