"""A small GPT, used by the plans, the parity checks and the text example."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a ``GPT``. ``seq`` is the length of the longest sequence."""

    vocab: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq: int = 128


class Attention(nn.Module):
    """Computes causal self-attention, float[b, s, h] from float[b, s, h].

    Q, K and V are separate matrix products, so that tensor parallelism can split each product.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.width = config.hidden // config.heads
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], -1, self.width).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: torch.Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return attended


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Embed(nn.Module):
    """Embeds token ids int64[b, s] and their positions as hidden states float[b, s, h].

    ``positions`` is int64[b, s], by default counted from the start of the sequence.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
        x: torch.Tensor = self.tokens(ids) + self.positions(places)
        return x


class GPT(nn.Module):
    """Computes logits float[b, s, vocab] from token ids int64[b, s]."""

    # The modules that ``forward`` runs one after the other. A pipeline may cut the model between two modules of this
    # list.
    pipeline_chain = ("embed", "blocks", "norm", "head")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids, positions)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
