"""A small Llama that writes text. ``accel train examples/writer.toml`` trains it on Python's built-in documentation, in
about a minute on two cores."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

CONTEXT = 256
_LENGTH = 128  # tokens of a training sample
_VOCABULARY = 1024
_BEGIN, _END = "<s>", "</s>"
# The last twentieth of the text is held out for the evaluation.
_HELD_OUT = 20


@cache
def _parts() -> tuple[str, str]:
    """Returns the text for the training, and the text that is held out."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    cut = len(whole) - len(whole) // _HELD_OUT
    return whole[:cut], whole[cut:]


@cache
def tokenizer() -> Tokenizer:
    """Returns a byte-level BPE tokenizer of 1,024 tokens, made from the training text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_BEGIN, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([_parts()[0]], trainer)
    return made


def write_texts(folder: Path) -> None:
    """Writes the tokenizer and the held-out text into ``folder``, for ``accel generate`` and ``accel optimize``."""
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "held_out.txt").write_text(_parts()[1], encoding="utf-8")


def model() -> torch.nn.Module:
    """Makes a Llama of 2 M parameters (4 layers of width 192) with random weights."""
    return _llama(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6)


def larger() -> torch.nn.Module:
    """Makes a Llama of 10 M parameters (8 layers of width 320) with random weights."""
    return _llama(hidden_size=320, intermediate_size=864, num_hidden_layers=8, num_attention_heads=10)


def _llama(**shape: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
        **shape,
    )
    return LlamaForCausalLM(config)


def _rows(text: str) -> list[dict[str, Any]]:
    ids = tokenizer().encode(text).ids
    pieces = (ids[start : start + _LENGTH] for start in range(0, len(ids) - _LENGTH, _LENGTH))
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def data() -> list[dict[str, Any]]:
    """Returns samples of 128 tokens. The labels are the tokens, which the model shifts by one itself."""
    return _rows(_parts()[0])


def evaluate(module: torch.nn.Module) -> dict[str, float]:
    """Returns the loss on the held-out text in nats a token, and the perplexity."""
    import torch

    held = torch.tensor([row["input_ids"] for row in _rows(_parts()[1])])
    with torch.inference_mode():
        loss = float(module(input_ids=held, labels=held).loss)
    return {"loss": loss, "perplexity": math.exp(loss)}
