"""Provides a small GPT with a vocabulary of 61 tokens, which the distributed checks train. The samples have different
numbers of targets."""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.nn.functional as F

from accel.examples.gpt import GPT, Attention, GPTConfig
from accel.train.experts.block import MixtureOfExperts

VOCABULARY, LENGTH, SAMPLES = 61, 16, 96


def model() -> torch.nn.Module:
    return GPT(GPTConfig(vocab=VOCABULARY, layers=3, hidden=32, heads=4, seq=LENGTH))


class _Mixture(torch.nn.Module):
    """A block whose MLP is a mixture of four experts."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(config.hidden), torch.nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp = MixtureOfExperts(config.hidden, 16, experts=4, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def moe() -> torch.nn.Module:
    """Makes a model with experts, whose routers don't choose all experts equally often."""
    config = GPTConfig(vocab=VOCABULARY, layers=2, hidden=32, heads=4, seq=LENGTH)
    made = GPT(config)
    made.blocks = torch.nn.ModuleList(_Mixture(config) for _ in range(2))
    for block in made.blocks:
        torch.nn.init.normal_(block.mlp.gate.weight, std=0.5)
        torch.nn.init.normal_(block.mlp.experts.gate_up_proj, std=0.3)
        torch.nn.init.normal_(block.mlp.experts.down_proj, std=0.3)
    return made


def teacher() -> torch.nn.Module:
    """Makes a model with twice the blocks of ``model``, and weights so large that its outputs aren't all alike."""
    made = GPT(GPTConfig(vocab=VOCABULARY, layers=6, hidden=32, heads=4, seq=LENGTH))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)
    return made


def deep() -> torch.nn.Module:
    """Makes a model deep enough for a pipeline of four ranks with two stages each."""
    return GPT(GPTConfig(vocab=VOCABULARY, layers=7, hidden=32, heads=4, seq=LENGTH))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(SAMPLES):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        targets = (ids * 3 + 1) % VOCABULARY
        targets[: (index * 5) % (LENGTH - 1)] = -100  # the loss ignores the target -100, so 16, 11 or 6 targets count
        found.append((ids, targets))
    return found


class _Rotary(torch.nn.Module):
    """A block of a model that accel doesn't know, with RMS norm, rotary positions, grouped queries and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(torch.nn.Linear, bias=False)
        self.norm_in, self.norm_mid = torch.nn.RMSNorm(32), torch.nn.RMSNorm(32)
        self.q, self.k, self.v, self.o = linear(32, 32), linear(32, 16), linear(32, 16), linear(32, 32)
        self.gate, self.up, self.down = linear(32, 64), linear(32, 64), linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_in(x)
        q, k, v = (part(y).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        angle = torch.arange(q.shape[2])[:, None] / 10.0 ** torch.arange(0, 4)

        def turned(z: torch.Tensor) -> torch.Tensor:
            a, b = z.chunk(2, -1)
            found = torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
            return found.type_as(z)

        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm_mid(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class _Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 32)
        self.layers = torch.nn.ModuleList(_Rotary() for _ in range(2))
        self.norm = torch.nn.RMSNorm(32)
        self.lm_head = torch.nn.Linear(32, VOCABULARY, bias=False)
        torch.nn.init.normal_(self.embed.weight, std=0.1)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def decoder() -> torch.nn.Module:
    """Makes a transformer as a user may write it, with tied embeddings."""
    return _Decoder()


class _Counting(torch.nn.Module):
    """An attention layer that splits its features into heads. ``shape`` contains the number and the width of the heads.
    If ``together`` is true, one product computes the queries, keys and values, instead of three products."""

    def __init__(self, shape: tuple[int, int], *, together: bool = False) -> None:
        super().__init__()
        self.shape = shape
        if together:
            self.qkv = torch.nn.Linear(32, 96)
        else:
            self.query, self.key, self.value = (torch.nn.Linear(32, 32) for _ in range(3))
        self.out = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.reshape(*part.shape[:2], *self.shape).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _counting(*shape: int, together: bool = False) -> torch.nn.Module:
    model = GPT(GPTConfig(vocab=VOCABULARY, layers=1, hidden=32, heads=4, seq=LENGTH))
    model.blocks[0].attention = _Counting(shape, together=together)  # type: ignore[assignment, arg-type]
    return model


class _Masked(torch.nn.Module):
    """An attention layer that gets a mask from the model, which makes the mask from the token ids."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (torch.nn.Linear(32, 32) for _ in range(4))
        self.masks = [model]  # a list, so that the model isn't a part of its own layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, self.masks[0].mask)
        return self.out(y.transpose(1, 2).flatten(2))


class _MaskedGPT(GPT):
    """A causal GPT that hides every fifth token of the vocabulary from all queries. Heads prefer near positions, each
    to another degree. A query at the start may see no key at all."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        place = torch.arange(ids.shape[1])
        distance = place[:, None] - place
        bias = -distance.abs() * torch.tensor([0.1, 0.2, 0.4, 0.8])[:, None, None]
        hidden = (distance < 0) | (ids % 5 == 0)[:, None, None, :]
        self.mask = bias.expand(len(ids), -1, -1, -1).masked_fill(hidden, -torch.inf)
        return super().forward(ids, positions)


def masked() -> torch.nn.Module:
    model = _MaskedGPT(GPTConfig(vocab=VOCABULARY, layers=2, hidden=32, heads=4, seq=LENGTH))
    for block in model.blocks:
        block.attention = _Masked(model)  # type: ignore[assignment]
        torch.nn.init.normal_(block.attention.value.weight, std=0.3)
        torch.nn.init.normal_(block.attention.out.weight, std=0.3)
    return model


class _Windowed(Attention):
    """An attention layer whose queries see only the last five positions, by a fixed mask of the whole sequence."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        place = torch.arange(LENGTH)
        distance = place[:, None] - place
        self.register_buffer("mask", (distance >= 0) & (distance < 5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, self.mask)
        return self.out(y.transpose(1, 2).flatten(2))


def windowed() -> torch.nn.Module:
    """Makes a model with masks that pipeline stages and tensor-parallel ranks can have."""
    config = GPTConfig(vocab=VOCABULARY, layers=3, hidden=32, heads=4, seq=LENGTH)
    made = GPT(config)
    for block in made.blocks:
        block.attention = _Windowed(config)
        for part in (block.attention.value, block.attention.out):
            torch.nn.init.normal_(part.weight, std=0.3)
    return made


class _Normed(Attention):
    """An attention layer that normalizes the queries and keys of each head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.norm_q, self.norm_k = torch.nn.RMSNorm(8), torch.nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)) for part in (self.query, self.key, self.value))
        q, k, v = (y.transpose(1, 2) for y in (self.norm_q(q), self.norm_k(k), v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def normed() -> torch.nn.Module:
    """Makes a model with norms over heads, whose parameters have a part of their gradient on each tensor-parallel
    rank."""
    config = GPTConfig(vocab=VOCABULARY, layers=2, hidden=32, heads=4, seq=LENGTH)
    made = GPT(config)
    for block in made.blocks:
        block.attention = _Normed(config)
        for part in (block.attention.value, block.attention.out):
            torch.nn.init.normal_(part.weight, std=0.3)
    return made


def llama(heads: int = 1) -> torch.nn.Module:
    """Makes a Llama of transformers with four query heads and ``heads`` key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=heads,
        use_cache=False,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def paired_llama() -> torch.nn.Module:
    """Makes a Llama whose key-value heads two tensor-parallel ranks can share."""
    return llama(2)


def labelled() -> list[dict[str, torch.Tensor]]:
    """Makes samples with labels, from which a model of transformers computes its loss itself."""
    return [{"input_ids": ids, "labels": targets} for ids, targets in data()]


class _Grouped(Attention):
    """An attention layer with two key-value heads for four query heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.key, self.value = torch.nn.Linear(32, 16), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def grouped() -> torch.nn.Module:
    """Makes a model with fewer key-value heads than query heads."""
    config = GPTConfig(vocab=VOCABULARY, layers=3, hidden=32, heads=4, seq=LENGTH)
    made = GPT(config)
    for block in made.blocks:
        block.attention = _Grouped(config)
    return made


def one_head() -> torch.nn.Module:
    return GPT(GPTConfig(vocab=VOCABULARY, layers=1, hidden=32, heads=1, seq=LENGTH))


def all_heads() -> torch.nn.Module:
    """Makes a model whose attention always has four heads. On two ranks, each head has half the width."""
    return _counting(4, -1)


def whole_heads() -> torch.nn.Module:
    """Makes a model whose attention expects four heads of width 8. If two ranks share the attention, each rank has too
    few features for four heads."""
    return _counting(4, 8)


def one_product() -> torch.nn.Module:
    """Makes a model whose attention computes queries, keys and values in one product.

    On two ranks, each rank has half of the joint product, so splitting this half into queries, keys and values is
    wrong.
    """
    return _counting(-1, 8, together=True)


def odd_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Makes sequences of 15 tokens, which can't be split evenly over two ranks."""
    return [(ids[:15], targets[:15]) for ids, targets in data()]


def few() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Makes three batches of 8 and a last batch of 2. Some ranks get no sample of the last batch."""
    return data()[:26]


def documents() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Makes documents of 1 to 16 tokens."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(400):
        size = int(torch.randint(1, LENGTH + 1, (), generator=generator))
        ids = torch.randint(0, VOCABULARY, (size,), generator=generator)
        found.append((ids, (ids * 3 + 1) % VOCABULARY))
    return found


def wrong_chain() -> torch.nn.Module:
    """Makes a model whose ``forward`` does more than call the model's modules one after the other."""

    class Doubled(GPT):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    return Doubled(GPTConfig(vocab=VOCABULARY, layers=3, hidden=32, heads=4, seq=LENGTH))


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the default loss in a user's own code, from logits of the whole vocabulary."""
    assert type(outputs) is torch.Tensor
    assert outputs.shape[-1] == VOCABULARY
    picked = outputs.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    counted = targets != -100
    return -(picked * counted).sum(), counted.sum()


def shifted_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compares each position with the target of the next position, which may be on another rank."""
    return own_loss(outputs[:, :-1], targets[:, 1:])


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the loss from the mean of the logits over all positions, with as many targets as positions."""
    return outputs.mean(1).square().sum(), torch.tensor(targets.numel())


_calls = 0


def overflow_once(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the first loss of the last rank infinite."""
    return _overflow(outputs, targets, 1)


def overflow_second(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the second loss of the last rank infinite."""
    return _overflow(outputs, targets, 2)


def _overflow(outputs: torch.Tensor, targets: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    from accel.train.loss import cross_entropy

    global _calls
    _calls += 1
    total, count = cross_entropy(outputs, targets)
    last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    return (total * float("inf") if _calls == at and last else total), count
