"""Declares the token loop of a decoder with a KV cache, so that it streams tokens without a ``config.pbtxt``."""

from __future__ import annotations

from typing import Any

from accel.artifact import Artifact
from accel.decoders.decoder import special_tokens
from accel.signature.decoder import IDS, LOGITS, MASK, POSITIONS, Cache

from .token_loop import PREFIX, STATE

# A config with one of these fields tells how the model is served.
_CHOOSING = ("input", "output", "model_transaction_policy", "sequence_batching", "response_cache")


def declare_own_loop(config: Any, artifact: Artifact) -> None:
    """Writes the token loop of a decoder into ``config``, in the parameters that ``token_loop`` reads.

    Leaves ``config`` unchanged if it tells how the model is served, if the model has no KV cache, or if neither the
    manifest nor genai_config.json describes the decoder. Raises ``BadSource`` if a recorded special token isn't a token
    id.
    """
    cache = Cache.of(artifact.signature)
    if cache is None or any(field.name in _CHOOSING for field, _ in config.ListFields()):
        return
    if any(key.startswith(PREFIX) for key in config.parameters):
        return
    tokens = special_tokens(artifact)
    if tokens.context is None and not tokens.ends:
        return
    inputs = {spec.name for spec in artifact.signature.inputs}
    found = {"stream_tokens": IDS, "stream_logits": LOGITS}
    found |= {STATE + present: past for past, present in cache.presents.items()}
    found |= {key: name for key, name in (("stream_mask", MASK), ("stream_positions", POSITIONS)) if name in inputs}
    if tokens.ends:
        found["stream_end"] = ",".join(map(str, tokens.ends))
    if tokens.context is not None:
        found["stream_context"] = str(tokens.context)
    config.model_transaction_policy.decoupled = True
    for key, text in found.items():
        config.parameters[key].string_value = text
