"""A small GPT trained on the bytes of Python's built-in documentation, in about a minute on two cores."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from accel.signature import TensorSpec
from accel.sources.declare import declare

if TYPE_CHECKING:
    import torch

LENGTH = 64
# The last twentieth of the text is held out for the evaluation.
_HELD_OUT = 20


@cache
def _text() -> torch.Tensor:
    """Returns the text of all topics of Python's help(), with one int64 per byte."""
    from pydoc_data.topics import topics

    import torch

    whole = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()


def _pieces(text: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    starts = range(0, len(text) - LENGTH, LENGTH)
    return [(text[i : i + LENGTH], text[i + 1 : i + LENGTH + 1]) for i in starts]


def _cut() -> int:
    text = _text()
    return len(text) - len(text) // _HELD_OUT


@declare(
    inputs=(TensorSpec("ids", "int64", ("batch", "sequence"), (0, 127)),),
    outputs=("logits",),
    dims={"batch": (1, 1, 8), "sequence": (1, 32, LENGTH)},
)
def model() -> torch.nn.Module:
    """Makes the GPT, which maps bytes int64[batch, sequence] to ``logits`` float32[batch, sequence, 128] of the next
    byte."""
    from .gpt import GPT, GPTConfig

    return GPT(GPTConfig(vocab=128, layers=4, hidden=96, heads=4, seq=LENGTH))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns sequences of 64 bytes as inputs, and the next byte at each position as targets."""
    return _pieces(_text()[: _cut()])


def evaluate(module: torch.nn.Module) -> dict[str, float]:
    """Returns the loss on the held-out text in nats per byte, the perplexity, and the loss of a unigram model."""
    import torch

    text = _text()
    held = _pieces(text[_cut() :])[:256]
    ids, targets = (torch.stack(part) for part in zip(*held, strict=True))
    with torch.inference_mode():
        logits = module(ids).float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    often = torch.bincount(text[: _cut()], minlength=128).double() + 1
    unigram = -(often / often.sum()).log()[targets.flatten()].mean()
    return {"loss": float(loss), "unigram": float(unigram), "perplexity": math.exp(float(loss))}
