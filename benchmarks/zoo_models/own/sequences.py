"""Defines recurrent networks, decoders, and networks for signals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..case import Case


class Tagger(nn.Module):
    """A bidirectional recurrent net that labels each token of a packed sequence."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, layers: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.rnn = kind(16, 12, layers, batch_first=True, bidirectional=True)
        self.out = nn.Linear(24, 5)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.table(tokens), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.out(hidden)


class LastState(nn.Module):
    """Classifies a sequence by the LSTM's output at the sequence's last token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.out = nn.Embedding(50, 16), nn.LSTM(16, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.table(tokens))
        return self.out(hidden.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, 12)).squeeze(1))


class PackedState(nn.Module):
    """Classifies a packed sequence by the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][-1])


class Cells(nn.Module):
    """Runs an LSTMCell in a loop over the time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(6, 10), nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = (x.new_zeros(x.shape[0], 10), x.new_zeros(x.shape[0], 10))
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.out(state[0])


class WithState(nn.Module):
    """A GRU that takes and returns its state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(6, 10, 2, batch_first=True), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        y, state = self.rnn(x, state)
        return self.out(y), state


class Seq2Seq(nn.Module):
    """A model with an encoder, attention, and a greedy decoder with a fixed number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.encoder = nn.Embedding(40, 16), nn.GRU(16, 16, batch_first=True)
        self.cell, self.out = nn.GRUCell(32, 16), nn.Linear(16, 40)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        memory, state = self.encoder(self.table(source))
        h, token = state[0], torch.zeros_like(source[:, 0])
        logits = []
        for _ in range(4):
            weight = (memory @ h[:, :, None]).softmax(1)
            h = self.cell(torch.cat([self.table(token), (memory * weight).sum(1)], -1), h)
            logits.append(self.out(h))
            token = logits[-1].argmax(-1)
        return torch.stack(logits, 1)


class TemporalConv(nn.Module):
    """Causal dilated convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, dilation=2**i) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x + layer(nn.functional.pad(x, (2 ** (i + 1), 0))).relu()
        return x


class RmsNorm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Applies rotary position embeddings to ``x``, whose axes are batch, heads, length and size."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)[None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def rotated_as_complex(x: torch.Tensor) -> torch.Tensor:
    """Applies rotary position embeddings to ``x`` with complex numbers, as the first Llama does."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[-2]).float(), 10000.0 ** (-torch.arange(half) / half))
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], half, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


class Block(nn.Module):
    """A decoder layer with RMSNorm, grouped-query attention with RoPE, and SwiGLU."""

    def __init__(self, rotate: Any = rotated) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RmsNorm(32) for _ in range(2))
        self.q, self.kv, self.o = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.rotate = rotate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        h = self.norms[0](x)
        q = self.q(h).view(b, n, 4, 8).transpose(1, 2)
        k, v = self.kv(h).view(b, n, 2, 2, 8).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        h = nn.functional.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).reshape(b, n, 32))
        h = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """A small Llama."""

    def __init__(self, rotate: Any = rotated) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 32)
        self.blocks = nn.ModuleList(Block(rotate) for _ in range(2))
        self.norm = RmsNorm(32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.table.weight.T


@dataclass
class Output:
    """The result of ``Gpt``."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    loss: torch.Tensor | None = None


class Gpt(nn.Module):
    """A GPT with learned positions and a causal mask in a buffer. Returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(60, 32), nn.Embedding(64, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 60)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).bool())

    def forward(self, tokens: torch.Tensor) -> Output:
        n = tokens.size(1)
        x = self.table(tokens) + self.positions(torch.arange(n, device=tokens.device))
        q, k, v = self.qkv(x).split(32, -1)
        scores = (q @ k.transpose(1, 2) / math.sqrt(32)).masked_fill(~self.mask[:n, :n], float("-inf"))
        h = x + scores.softmax(-1) @ v
        return Output(self.out(h), (x, h))


class Encoder(nn.Module):
    """torch's own transformer encoder with a padding mask and sinusoidal positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True, activation="gelu")
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 2)
        place = torch.arange(64)[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)
        self.register_buffer("place", torch.stack([place.sin(), place.cos()], -1).flatten(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) + self.place[: tokens.shape[1]]
        empty = tokens == 0
        h = self.encoder(x, src_key_padding_mask=empty)
        keep = (~empty).unsqueeze(-1)
        return self.out((h * keep).sum(1) / keep.sum(1).clamp(min=1))


class FullTransformer(nn.Module):
    """nn.Transformer with a causal target mask."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.net(source, target, tgt_mask=mask)


class Fourier(nn.Module):
    """Mixes tokens by the real part of a 2-D FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + torch.fft.fft2(x).real)
        return x + self.ff(x).relu()


class Spectral(nn.Module):
    """A Fourier neural operator, which multiplies the low frequencies by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 6, dtype=torch.cfloat) * 0.1)
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfft(x)
        low = torch.einsum("bim,iom->bom", f[:, :, :6], self.weight)
        f = torch.cat([low, torch.zeros_like(f[:, :, 6:])], -1)
        return nn.functional.gelu(torch.fft.irfft(f, n=x.shape[-1]) + self.conv(x))


class Mel(nn.Module):
    """A convolution over a log spectrogram from torch.stft."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.register_buffer("bank", torch.rand(33, 8))
        self.conv = nn.Conv1d(8, 4, 3)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        s = torch.stft(sound, 64, 16, window=self.window, return_complex=True)
        return self.conv((s.abs().pow(2).transpose(1, 2) @ self.bank + 1e-3).log().transpose(1, 2))


class Complex(nn.Module):
    """Multiplies complex numbers by complex weights, and returns real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x.roll(1, -1)) @ self.weight
        return torch.cat([z.real, z.imag, z.abs()], -1)


class Scan(nn.Module):
    """A state space model, computed with cumulative sums and products."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.b, self.c = nn.Parameter(torch.rand(8) - 1), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.arange(x.shape[1], dtype=x.dtype)
        kernel = (self.decay[None] * t[:, None]).exp()
        state = torch.cumsum(self.b(x) / kernel, 1) * kernel
        return self.c(state) + torch.cumprod(x.sigmoid(), 1)


def _tagged(batch: int, size: int) -> Any:
    lengths = torch.randint(1, size + 1, (batch,))
    lengths[0] = size
    return torch.randint(1, 50, (batch, size)), lengths


def _tokens(high: int) -> Any:
    return lambda b, s: (torch.randint(1, high, (b, s)),)


_TEXT = {"tokens": {0: "batch", 1: "length"}}
_TAGGED = {**_TEXT, "lengths": {0: "batch"}}
_SOUND = {"x": {0: "batch", 1: "length"}}
MODELS = {
    "lstm-tagger-packed": lambda: Case(Tagger(), _tagged, _TAGGED, (9, 5, 14)),
    "gru-tagger-packed": lambda: Case(Tagger(nn.GRU, 2), _tagged, _TAGGED, (9, 5, 14)),
    "lstm-last-state": lambda: Case(LastState(), _tagged, _TAGGED, (9, 5, 14)),
    "gru-packed-state": lambda: Case(PackedState(), lambda b, _: (torch.randn(b, 9, 8), _tagged(b, 9)[1])),
    "lstm-cells": lambda: Case(Cells(), lambda b, _: (torch.randn(b, 7, 6),)),
    "gru-with-state": lambda: Case(
        WithState(),
        lambda b, s: (torch.randn(b, s, 6), torch.randn(2, b, 10)),
        {"x": {0: "batch", 1: "length"}, "state": {1: "batch"}},
        (7, 5, 12),
    ),
    "gru-without-state": lambda: Case(WithState(), lambda b, s: (torch.randn(b, s, 6),), _SOUND, (7, 5, 12)),
    "seq2seq-greedy": lambda: Case(Seq2Seq(), _tokens(40), {"source": {0: "batch", 1: "length"}}, (8, 5, 11)),
    "temporal-conv": lambda: Case(
        TemporalConv(), lambda b, s: (torch.randn(b, 4, s),), {"x": {0: "batch", 2: "length"}}, (20, 13, 31)
    ),
    "decoder-rope": lambda: Case(Decoder(), _tokens(60), _TEXT, (12, 7, 20)),
    "decoder-rope-complex": lambda: Case(Decoder(rotated_as_complex), _tokens(60), _TEXT, (12, 7, 20)),
    "gpt-dataclass": lambda: Case(Gpt(), _tokens(60), _TEXT, (12, 7, 20)),
    "encoder-padding": lambda: Case(
        Encoder(), lambda b, s: (torch.randint(1, 50, (b, s)) * (torch.arange(s) < s - 2),), _TEXT, (12, 7, 20)
    ),
    "nn-transformer": lambda: Case(
        FullTransformer(),
        lambda b, s: (torch.randn(b, 6, 16), torch.randn(b, s, 16)),
        {"source": {0: "batch"}, "target": {0: "batch", 1: "length"}},
        (5, 3, 8),
    ),
    "fnet-fft2": lambda: Case(Fourier(), lambda b, _: (torch.randn(b, 12, 16),)),
    "fourier-operator": lambda: Case(Spectral(), lambda b, _: (torch.randn(b, 4, 32),)),
    "stft-mel": lambda: Case(
        Mel(), lambda b, s: (torch.randn(b, s),), {"sound": {0: "batch", 1: "n"}}, (640, 512, 800)
    ),
    "complex-linear": lambda: Case(Complex(), lambda b, _: (torch.randn(b, 8),)),
    "state-space-scan": lambda: Case(Scan(), lambda b, s: (torch.randn(b, s, 8),), _SOUND, (9, 5, 14)),
}
