"""Defines the names of the two files of an encoder-decoder, and finds the caches in the decoder's signature.

The names are those of optimum. The decoder is its ``decoder_with_past_model.onnx``, which also begins a text here.
"""

from __future__ import annotations

from dataclasses import dataclass

from .decoder import IDS, LOGITS, MASK, PARTS, PAST_PREFIX, Cache
from .signature import Signature

ENCODER_FILE, DECODER_FILE = "encoder_model.onnx", "decoder_with_past_model.onnx"
FEATURES, HIDDEN, SOURCE_MASK = "input_features", "last_hidden_state", "encoder_attention_mask"
SOURCE = "source"  # the dim of the encoder's tokens
SELF, CROSS = "decoder", "encoder"


def past(layer: int, attention: str, part: str) -> str:
    """Returns the name of the input with the cached keys or values of an attention, ``SELF`` or ``CROSS``."""
    return f"{PAST_PREFIX}{layer}.{attention}.{part}"


def present(layer: int, attention: str, part: str) -> str:
    """Returns the name of the output with the keys or values of an attention."""
    return f"present.{layer}.{attention}.{part}"


def pairs(layers: int, attention: str) -> dict[str, str]:
    """Maps each input of a cache to its output, in order."""
    return {past(n, attention, part): present(n, attention, part) for n in range(layers) for part in PARTS}


@dataclass(frozen=True, kw_only=True)
class Caches:
    """The caches of a decoder that reads an encoder: its ``own``, and ``cross``, which maps the inputs with the
    encoder's keys and values to the encoder's outputs."""

    own: Cache
    cross: dict[str, str]

    @classmethod
    def of(cls, signature: Signature) -> Caches | None:
        """Returns the caches, or None if the model doesn't read an encoder in this form."""
        inputs = {spec.name: spec for spec in signature.inputs}
        layers = sum(name.startswith(PAST_PREFIX) and f".{CROSS}." in name for name in inputs) // len(PARTS)
        own, cross = pairs(layers, SELF), pairs(layers, CROSS)
        outputs = {spec.name for spec in signature.outputs}
        if not layers or not {*own, *cross, IDS} <= set(inputs) or not {*own.values(), LOGITS} <= outputs:
            return None
        return cls(own=Cache(past=tuple(inputs[name] for name in own), presents=own), cross=cross)


def takes_text(encoder: Signature) -> bool:
    """Tells whether the encoder takes token ids, not sound."""
    return {spec.name for spec in encoder.inputs} <= {IDS, MASK}
