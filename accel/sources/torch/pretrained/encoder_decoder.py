"""Splits an encoder-decoder of transformers into two modules of plain tensors, so that both can be exported.

The encoder also computes the keys and values that the decoder's cross-attention reads, once for each text. The decoder
takes them as inputs, and so needs no other form for its first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from accel.errors import BadSource, UnsupportedHere, one_line
from accel.signature import BATCH, DimRange, TensorSpec
from accel.signature.decoder import IDS, LOGITS, MASK, PARTS, PAST, SEQUENCE
from accel.signature.encoder_decoder import CROSS, FEATURES, HIDDEN, SELF, SOURCE, SOURCE_MASK, pairs
from accel.spelling import option

from ...output_specs import farthest
from ..found import Found

ENCODER, DECODER = "encoder", "decoder"
# The largest numbers of tokens that gates run.
_LONGEST_SOURCE, _LONGEST_PAST, _LONGEST_SEQUENCE = 64, 96, 32
_CONTEXTS = ("max_position_embeddings", "n_positions")

Layers = list[tuple[torch.Tensor, torch.Tensor]]


class EncoderDecoder:
    """Calls a model of transformers with an encoder and a decoder, with caches of plain tensors.

    Raises ``UnsupportedHere`` if the model has no encoder and decoder in transformers' usual form.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model: Any = model
        takes = inspect.signature(model.forward).parameters
        name = type(model).__name__
        needed = {"decoder_input_ids", "encoder_outputs", "past_key_values"}
        if not needed <= set(takes) or not ({IDS, FEATURES} & set(takes)) or not hasattr(model, "get_encoder"):
            raise UnsupportedHere(
                f"{name} has no encoder and decoder for text or sound in transformers' usual form; export one pass "
                f"without a cache with {option('decoder', False)}"
            )
        self.takes_text = IDS in takes
        config = model.config
        size = getattr(config, "d_model", None) or getattr(config, "hidden_size", None)
        self.hidden_size: int = int(size) if isinstance(size, int) else 0
        try:
            self.layers = self._probed()
        except UnsupportedHere:
            raise
        except Exception as error:  # a model may raise any type of error
            raise BadSource(
                f"the encoder-decoder {name} fails in PyTorch on three tokens: {one_line(error, 200)}; correct the "
                f"model, or pass {option('decoder', False)}"
            ) from error

    def _probed(self) -> dict[str, Layers]:
        """Runs both parts, and returns the keys and values of each attention after one token."""
        with torch.no_grad():
            given = self.sample()
            _, own, cross = self.decode(
                torch.zeros((1, 1), dtype=torch.int64), self.encode(*given), given[1:], None, None
            )
        for layers in (own, cross):
            if any(part.ndim != 4 for pair in layers for part in pair):
                raise UnsupportedHere(
                    f"{type(self.model).__name__} keeps another cache than [batch, heads, tokens, head_dim]; export "
                    f"one pass without a cache with {option('decoder', False)}"
                )
        return {SELF: own, CROSS: cross}

    def sample(self) -> tuple[torch.Tensor, ...]:
        """Returns an input of the encoder: three tokens and their mask, or silence."""
        if self.takes_text:
            return torch.zeros((1, 3), dtype=torch.int64), torch.ones((1, 3), dtype=torch.int64)
        config = self.model.config
        return (torch.zeros((1, config.num_mel_bins, 2 * config.max_source_positions)),)

    def encode(self, given: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the hidden states of the encoder, [batch, source, hidden]."""
        encoder = self.model.get_encoder()
        result = encoder(input_ids=given, attention_mask=mask) if self.takes_text else encoder(given)
        found: torch.Tensor = result.last_hidden_state
        return found

    def decode(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        mask: Sequence[torch.Tensor],
        own: Layers | None,
        cross: Layers | None,
    ) -> tuple[torch.Tensor, Layers, Layers]:
        """Returns the logits of the decoder's tokens ``ids``, and the keys and values of both attentions."""
        from transformers import DynamicCache, EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        cache = EncoderDecoderCache(DynamicCache(own), DynamicCache(cross))
        more = {MASK: mask[0]} if mask else {}
        result = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden), decoder_input_ids=ids, past_key_values=cache,
            use_cache=True, **more,
        )  # fmt: skip
        found = result.past_key_values
        if not isinstance(found, EncoderDecoderCache):
            raise UnsupportedHere(
                f"{type(self.model).__name__} keeps another state than the keys and values of two attentions; export "
                f"one pass without a cache with {option('decoder', False)}"
            )
        return result.logits, _layers(found.self_attention_cache), _layers(found.cross_attention_cache)

    def whole(self, given: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Returns the logits of whole texts ``ids`` [batch, length] without a cache, as the model computes them by
        itself. ``given`` has the encoder's inputs."""
        names = (IDS, MASK) if self.takes_text else (FEATURES,)
        with torch.inference_mode():
            every: dict[str, torch.Tensor] = dict(zip(names, given, strict=True))
            found: torch.Tensor = self.model(**every, decoder_input_ids=ids, use_cache=False).logits
            return found

    @cached_property
    def context(self) -> int | None:
        """Returns the largest number of tokens of the decoder, or None if there is none, as with relative positions.
        Runs the model, because its config may name a limit that it doesn't have, or none that it has."""

        def runs(length: int) -> bool:
            try:
                self.whole(self.sample(), torch.zeros((1, length), dtype=torch.int64))
            except Exception:  # a model may raise any type of error
                return False
            return True

        return self._limit(runs, ("max_target_positions", *_CONTEXTS), _LONGEST_PAST + _LONGEST_SEQUENCE)

    def _limit(self, runs: Callable[[int], bool], names: Sequence[str], most: int) -> int | None:
        values = (getattr(self.model.config, name, None) for name in names)
        said = next((value for value in values if isinstance(value, int) and value > 1), most)
        if not runs(min(said, most)):
            return farthest(runs, 2, min(said, most))
        return None if runs(said + 1) else said

    @cached_property
    def source(self) -> int | None:
        """Returns how many tokens of a text the encoder reads, or None if there is no limit."""

        def runs(length: int) -> bool:
            try:
                with torch.inference_mode():
                    self.encode(torch.zeros((1, length), dtype=torch.int64), torch.ones((1, length), dtype=torch.int64))
            except Exception:  # a model may raise any type of error
                return False
            return True

        return self._limit(runs, _CONTEXTS, _LONGEST_SOURCE) if self.takes_text else None


class EncoderPart(torch.nn.Module):
    """The encoder. Returns its hidden states, and the keys and values of the cross-attention of each layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.parts = EncoderDecoder(model)

    def forward(self, *given: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.parts.encode(*given)
        start = torch.zeros((hidden.shape[0], 1), dtype=torch.int64)
        _, _, cross = self.parts.decode(start, hidden, given[1:], None, None)
        names = pairs(len(cross), CROSS).values()
        return {HIDDEN: hidden, **dict(zip(names, (part for pair in cross for part in pair), strict=True))}


class DecoderPart(torch.nn.Module):
    """The decoder. Takes its new tokens, the mask of the encoder's tokens, its own keys and values, and those of the
    encoder. Returns the logits, and its own keys and values after these tokens."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.parts = EncoderDecoder(model)

    def forward(self, ids: torch.Tensor, *rest: torch.Tensor) -> dict[str, torch.Tensor]:
        masks = 1 if self.parts.takes_text else 0
        tensors = rest[masks:]
        half = len(tensors) // 2
        own, cross = (_pairs(tensors[part]) for part in (slice(half), slice(half, None)))
        # The keys and values of the encoder are known, so only the length of its hidden states matters.
        key = cross[0][0]
        hidden = key.new_zeros((key.shape[0], key.shape[2], self.parts.hidden_size))
        logits, presents, _ = self.parts.decode(ids, hidden, rest[:masks], own, cross)
        names = pairs(len(presents), SELF).values()
        return {LOGITS: logits, **dict(zip(names, (part for pair in presents for part in pair), strict=True))}


def _pairs(tensors: Sequence[torch.Tensor]) -> Layers:
    return list(zip(tensors[:: len(PARTS)], tensors[1 :: len(PARTS)], strict=True))


def _layers(cache: Any) -> Layers:
    return [(layer.keys, layer.values) for layer in cache.layers]


def as_part(found: Found, part: str) -> Found:
    """Returns the opened model as its encoder or its decoder alone. Raises the errors of ``EncoderDecoder``."""
    module = (EncoderPart if part == ENCODER else DecoderPart)(found.module.eval())
    parts = module.parts
    specs, names = (_encoder_specs if part == ENCODER else _decoder_specs)(parts)
    source = min(parts.source or _LONGEST_SOURCE, _LONGEST_SOURCE) if parts.takes_text else 0
    context = parts.context or _LONGEST_PAST + _LONGEST_SEQUENCE
    sequence = min(_LONGEST_SEQUENCE, max(1, context // 2))
    past = min(_LONGEST_PAST, context - sequence)
    known = {
        BATCH: DimRange(1, 1, 8),
        SOURCE: DimRange(1, min(16, source), source) if source else None,
        SEQUENCE: DimRange(1, min(8, sequence), sequence),
        PAST: DimRange(0, min(16, past), past),
    }
    used = {dim for spec in specs for dim in spec.shape}
    dims = {name: limits for name, limits in known.items() if limits is not None and name in used}
    return replace(found, module=module, inputs=specs, outputs=names, dims=dims, forms=(), tensors={})


def _encoder_specs(parts: EncoderDecoder) -> tuple[tuple[TensorSpec, ...], tuple[str, ...]]:
    names = (HIDDEN, *pairs(len(parts.layers[CROSS]), CROSS).values())
    if not parts.takes_text:
        return (TensorSpec(FEATURES, "float32", (BATCH, *parts.sample()[0].shape[1:])),), names
    return (_ids(parts, SOURCE, encoder=True), TensorSpec(MASK, "int64", (BATCH, SOURCE))), names


def _decoder_specs(parts: EncoderDecoder) -> tuple[tuple[TensorSpec, ...], tuple[str, ...]]:
    own, cross = parts.layers[SELF], parts.layers[CROSS]
    length = SOURCE if parts.takes_text else cross[0][0].shape[2]
    found = [_ids(parts, SEQUENCE, encoder=False)]
    if parts.takes_text:
        found.append(TensorSpec(SOURCE_MASK, "int64", (BATCH, SOURCE)))
    for attention, layers, dim in ((SELF, own, PAST), (CROSS, cross, length)):
        tensors = (part for pair in layers for part in pair)
        for name, part in zip(pairs(len(layers), attention), tensors, strict=True):
            dtype = str(part.dtype).removeprefix("torch.")
            found.append(TensorSpec(name, dtype, (BATCH, part.shape[1], dim, part.shape[3])))
    return tuple(found), (LOGITS, *pairs(len(own), SELF).values())


def _ids(parts: EncoderDecoder, dim: str, *, encoder: bool) -> TensorSpec:
    part = parts.model.get_encoder() if encoder else parts.model.get_decoder()
    rows = part.get_input_embeddings().num_embeddings
    return TensorSpec(IDS, "int64", (BATCH, dim), (0, rows - 1))


def about_pair(parts: EncoderDecoder) -> dict[str, Any]:
    """Returns the facts that the manifest records about an encoder-decoder: its type, context and special tokens."""
    config, generation = parts.model.config, getattr(parts.model, "generation_config", None)

    def fact(name: str) -> Any:
        value = getattr(generation, name, None)
        return value if value is not None else getattr(config, name, None)

    eos, start = fact("eos_token_id"), fact("decoder_start_token_id")
    forbidden = [one[0] for one in fact("bad_words_ids") or () if len(one) == 1]
    return {
        "type": config.model_type,
        "context": parts.context,
        "source": parts.source,
        "start": start if start is not None else fact("bos_token_id"),
        "forced_first": fact("forced_bos_token_id"),
        "eos": list(eos) if isinstance(eos, list | tuple) else [] if eos is None else [eos],
        "suppressed": sorted({*(fact("suppress_tokens") or ()), *forbidden}),
    }
