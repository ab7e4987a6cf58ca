"""Proves that torch's transformer layers are exported with the numbers of their fused forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import accel

# The padding of a batch: at the ends of the sequences, a whole sequence, elsewhere, and of one entry.
PADDING = {
    "ends": [[0, 0, 0, 1], [0, 1, 1, 1]],
    "a whole sequence": [[0, 0, 1], [1, 1, 1]],
    "elsewhere": [[1, 0, 0], [0, 0, 1]],
    "one entry": [[1], [0]],
}


class Encoder(nn.Module):
    def __init__(self, nested: bool, norm: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        last = nn.LayerNorm(8, bias=False) if norm else None
        self.encoder = nn.TransformerEncoder(layer, 1, last, enable_nested_tensor=nested)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.encoder(x, src_key_padding_mask=padding)
        return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("nested", "norm"), [(True, False), (True, True), (False, False)])
def test_a_transformer_encoder_with_padding(nested: bool, norm: bool, tmp_path: Path) -> None:
    """Fails if an encoder with padded sequences of a dynamic length is refused, or if it gives other numbers than
    PyTorch for the padding: zeros if PyTorch makes a nested tensor, which it does only for padding at the ends."""
    net = Encoder(nested, norm).eval()
    example = (torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[4], [3], [5]]))
    dynamic = {"x": {0: "batch", 1: "t"}, "padding": {0: "batch", 1: "t"}}
    made = accel.export(net, example=example, dynamic=dynamic, out=tmp_path / "m.onnx", simplify=False)
    with accel.load(made) as session, torch.no_grad():
        for name, rows in PADDING.items():
            padding = torch.tensor(rows).bool()
            x = torch.randn(*padding.shape, 8)
            wanted = net(x, padding)
            torch.testing.assert_close(session(x, padding), wanted, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
    assert torch.backends.mha.get_fastpath_enabled()
