"""Defines the names of a decoder's inputs and outputs, and finds the KV cache in a signature.

The names are those of onnxruntime-genai, openvino-genai and optimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .signature import Signature
from .spec import TensorSpec, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

IDS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
PARTS = ("key", "value")
# The beginning of the name of each cached input.
PAST_PREFIX = "past_key_values."
# The order of the rows of a cache that the runtime keeps. Only stateful decoders have this input.
BEAMS = "beam_idx"
# The dims of a decoder's inputs: the tokens in the cache, the new tokens, and both together.
PAST, SEQUENCE = "past", "sequence"
TOTAL = f"{PAST}+{SEQUENCE}"


def past_name(layer: int | str, part: str) -> str:
    """Returns the name of the input with the cached keys or values (``part``) of a layer."""
    return f"{PAST_PREFIX}{layer}.{part}"


def present_name(layer: int | str, part: str) -> str:
    """Returns the name of the output with the keys or values (``part``) of a layer."""
    return f"present.{layer}.{part}"


def cache_names(layers: int) -> list[tuple[str, str]]:
    """Returns the input and the output of each part of the cache, in order."""
    return [(past_name(n, part), present_name(n, part)) for n in range(layers) for part in PARTS]


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The KV cache of a decoder. ``past`` has the inputs, and ``presents`` maps each input to its output. An input has
    the shape [batch, kv_heads, past, head_dim]."""

    past: tuple[TensorSpec, ...]
    presents: Mapping[str, str]

    @classmethod
    def of(cls, signature: Signature) -> Cache | None:
        """Returns the KV cache of the model with this signature, or None if the model is no decoder with a cache."""
        inputs = {spec.name: spec for spec in signature.inputs}
        outputs = {spec.name for spec in signature.outputs}
        pairs = cache_names(sum(name.startswith(PAST_PREFIX) for name in inputs) // len(PARTS))
        if not pairs or IDS not in inputs or LOGITS not in outputs:
            return None
        if any(past not in inputs or present not in outputs for past, present in pairs):
            return None
        return cls(past=tuple(inputs[past] for past, _ in pairs), presents=dict(pairs))

    @property
    def layers(self) -> int:
        """Returns the number of layers with a cache."""
        return len(self.past) // len(PARTS)

    @property
    def heads(self) -> int:
        """Returns the number of heads of the first layer's keys."""
        return _size(self.past[0], 1)

    @property
    def head_dim(self) -> int:
        """Returns the size of a head of the first layer's keys."""
        return _size(self.past[0], 3)

    def empty(self, rows: int) -> dict[str, np.ndarray]:
        """Returns the cache before the first token, for a batch of ``rows`` rows."""
        import numpy as np

        return {
            spec.name: np.zeros((rows, _size(spec, 1), 0, _size(spec, 3)), numpy_dtype(spec.dtype))
            for spec in self.past
        }

    def after(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the cache for the next step from the outputs of this step."""
        return {past: outputs[present] for past, present in self.presents.items()}

    def bytes_a_token(self) -> int:
        """Returns the number of bytes that the cache grows by for each token of a row."""
        return sum(_size(spec, 1) * _size(spec, 3) * numpy_dtype(spec.dtype).itemsize for spec in self.past)


def precision_name(dtype: str) -> str:
    """Returns accel's name for the precision of a cache with values of ``dtype``, such as fp16 for float16."""
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(dtype, dtype)


def is_stateful(signature: Signature) -> bool:
    """Tells whether the model is a decoder whose runtime keeps the KV cache between runs."""
    inputs, outputs = ({spec.name for spec in specs} for specs in (signature.inputs, signature.outputs))
    return {IDS, BEAMS} <= inputs and LOGITS in outputs


def is_decoder(signature: Signature) -> bool:
    """Tells whether the model is a decoder with a KV cache, as inputs and outputs or in the runtime."""
    return Cache.of(signature) is not None or is_stateful(signature)


def step_sizes(signature: Signature, new: int, past: int) -> dict[str, int]:
    """Returns the sizes of the dims for a step with ``new`` tokens and ``past`` tokens in the cache. Other tools may
    give the length of the mask a name of its own."""
    cache = Cache.of(signature)
    assert cache is not None, "the model is a decoder"
    ids, after = signature.input(IDS).shape[1], cache.past[0].shape[2]
    total = next((spec.shape[1] for spec in signature.inputs if spec.name == MASK), TOTAL)
    sizes = {after: past, ids: new, total: past + new}
    return {dim: size for dim, size in sizes.items() if isinstance(dim, str) and dim in signature.dims}


def _size(spec: TensorSpec, axis: int) -> int:
    """Returns the size of an axis that is the same in every run."""
    dim = spec.shape[axis]
    assert isinstance(dim, int), f"the axis {axis} of {spec} is fixed"
    return dim


def reordered(cache: Mapping[str, np.ndarray], rows: Iterable[int]) -> dict[str, np.ndarray]:
    """Returns the cache with the rows in a new order, as a beam search needs it."""
    order = list(rows)
    return {name: value[order] for name, value in cache.items()}
