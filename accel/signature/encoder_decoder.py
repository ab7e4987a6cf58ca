"""Defines the names of the two files of an encoder-decoder, and finds the caches in the decoder's signature.

The names are those of optimum. The decoder is its ``decoder_with_past_model.onnx``, which also begins a text here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .decoder import IDS, LOGITS, MASK, PARTS, fixed_size
from .signature import Signature
from .spec import TensorSpec, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

ENCODER_FILE, DECODER_FILE = "encoder_model.onnx", "decoder_with_past_model.onnx"
FEATURES, HIDDEN, SOURCE_MASK = "input_features", "last_hidden_state", "encoder_attention_mask"
SOURCE = "source"  # the dim of the encoder's tokens
SELF, CROSS = "decoder", "encoder"


def past(layer: int, attention: str, part: str) -> str:
    """Returns the name of the input with the cached keys or values of an attention, ``SELF`` or ``CROSS``."""
    return f"past_key_values.{layer}.{attention}.{part}"


def present(layer: int, attention: str, part: str) -> str:
    """Returns the name of the output with the keys or values of an attention."""
    return f"present.{layer}.{attention}.{part}"


def pairs(layers: int, attention: str) -> dict[str, str]:
    """Maps each input of a cache to its output, in order."""
    return {past(n, attention, part): present(n, attention, part) for n in range(layers) for part in PARTS}


@dataclass(frozen=True, kw_only=True)
class Caches:
    """The caches of a decoder that reads an encoder. ``own`` maps the inputs with the decoder's keys and values to its
    outputs. ``cross`` maps the inputs with the encoder's keys and values to the encoder's outputs."""

    own: dict[str, TensorSpec]
    cross: dict[str, str]
    presents: dict[str, str]

    @classmethod
    def of(cls, signature: Signature) -> Caches | None:
        """Returns the caches, or None if the model doesn't read an encoder in this form."""
        inputs = {spec.name: spec for spec in signature.inputs}
        layers = sum(name.startswith("past_key_values.") and f".{CROSS}." in name for name in inputs) // len(PARTS)
        own, cross = pairs(layers, SELF), pairs(layers, CROSS)
        outputs = {spec.name for spec in signature.outputs}
        whole = {*own, *cross, IDS} <= set(inputs) and {*own.values(), LOGITS} <= outputs
        return cls(own={name: inputs[name] for name in own}, cross=cross, presents=own) if layers and whole else None

    def empty(self, rows: int) -> dict[str, np.ndarray]:
        """Returns the decoder's own cache before the first token, for a batch of ``rows`` rows."""
        import numpy as np

        return {
            name: np.zeros((rows, fixed_size(spec, 1), 0, fixed_size(spec, 3)), numpy_dtype(spec.dtype))
            for name, spec in self.own.items()
        }

    def bytes_a_token(self) -> int:
        """Returns the number of bytes that the decoder's own cache grows by for each token of a row."""
        rows = self.own.values()
        return sum(fixed_size(spec, 1) * fixed_size(spec, 3) * numpy_dtype(spec.dtype).itemsize for spec in rows)


def takes_text(encoder: Signature) -> bool:
    """Tells whether the encoder takes token ids, not sound."""
    return {spec.name for spec in encoder.inputs} <= {IDS, MASK}
