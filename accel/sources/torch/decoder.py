"""Gives a generative model a KV cache that consists of plain tensors, so that it can be exported with its cache."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from accel.errors import BadSource, UnsupportedHere, one_line
from accel.signature import BATCH, DimRange, TensorSpec
from accel.signature.decoder import IDS, LOGITS, MASK, PARTS, PAST, POSITIONS, SEQUENCE, TOTAL, cache_names
from accel.spelling import option

from ..output_specs import farthest
from .arguments import uncalled
from .found import Found

_PAST = "past_key_values"
# The largest numbers of tokens that gates run. Longer texts would take too long.
_LONGEST_PAST, _LONGEST_SEQUENCE = 448, 64
# The attributes of a config that give the largest number of tokens, in the order in which models read them.
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def takes_cache(module: torch.nn.Module) -> bool:
    """Tells whether ``module`` looks like a decoder: a causal language model of transformers, or another module with
    the parameters that ``CachedDecoder`` needs. Doesn't run the module."""
    takes = inspect.signature(module.forward).parameters
    if IDS not in takes or _PAST not in takes:
        return False
    own = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("transformers.")]
    if not own:
        return True
    from .pretrained.transformers_folder import generates

    return any(map(generates, own))


class CachedDecoder(torch.nn.Module):
    """Calls the decoder ``model`` with a KV cache of plain tensors.

    ``model`` is a causal language model of transformers. It may also be any module with the parameters ``input_ids``
    and ``past_key_values`` that returns the logits and the new ``past_key_values``. ``past_key_values`` is then None or
    a (key, value) pair for each layer, with the shape [batch, kv_heads, past, head_dim]. The module may also take
    ``attention_mask`` [batch, past + sequence] and ``position_ids`` [batch, sequence].

    Raises ``UnsupportedHere`` if the model keeps another state than keys and values.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        takes = inspect.signature(model.forward).parameters
        self.of_transformers = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
        if IDS not in takes or _PAST not in takes:
            if self.of_transformers:
                raise _other_state(type(model).__name__)
            raise BadSource(
                f"the forward of {type(model).__name__} has no parameters {IDS} and {_PAST}, which a decoder needs; "
                f"add them, or export one pass without a cache with {option('decoder', False)}"
            )
        self.takes = tuple(name for name in (MASK, POSITIONS) if name in takes)
        self.layers = self._probed()
        self.names = cache_names(len(self.layers))

    def _probed(self) -> Pairs:
        """Runs the model on three tokens without a cache, and returns the keys and values of each layer."""
        name = type(self.model).__name__
        ids = torch.zeros((1, 3), dtype=torch.int64)
        try:
            with torch.no_grad():
                logits, pairs = self._call(ids, torch.ones_like(ids), torch.arange(3)[None], None)
        except UnsupportedHere:
            raise
        except Exception as error:  # a model may raise any type of error
            raise BadSource(
                f"the decoder {name} fails in PyTorch on three tokens without a cache: {one_line(error, 200)}; correct "
                f"its forward, or pass {option('decoder', False)}"
            ) from error
        if logits.ndim != 3 or logits.shape[1] != 3:
            raise BadSource(
                f"the decoder {name} returns logits of the shape {list(logits.shape)} for three tokens; return the "
                "logits of every token, [batch, sequence, vocabulary]"
            )
        for pair in pairs:
            if any(part.ndim != 4 or part.shape[2] != 3 for part in pair):
                raise UnsupportedHere(
                    f"{name} keeps a cache with the shapes {[list(part.shape) for part in pair]} instead of [batch, "
                    f"kv_heads, past, head_dim]; export one pass without a cache with {option('decoder', False)}"
                )
        return [(key.detach(), value.detach()) for key, value in pairs]

    @cached_property
    def context(self) -> int:
        """Returns the largest number of tokens that the model takes. Runs the model on as many tokens as the gates will
        run, because a table of positions may have fewer rows than the config says, and a module without a config tells
        nothing."""

        def runs(length: int) -> bool:
            try:
                self.whole(torch.zeros((1, length), dtype=torch.int64))
            except Exception:  # a model may raise any type of error
                return False
            return True

        config = getattr(self.model, "config", None)
        found = (getattr(config, name, None) for name in _CONTEXTS)
        most = _LONGEST_PAST + _LONGEST_SEQUENCE
        said = next((value for value in found if isinstance(value, int) and value > 1), most)
        longest = min(said, most)
        return said if runs(longest) else farthest(runs, 3, longest)

    def specs(self, vocabulary: int) -> tuple[TensorSpec, ...]:
        """Returns the inputs of ``forward``, in order. Token ids are below ``vocabulary``."""
        known = {
            MASK: TensorSpec(MASK, "int64", (BATCH, TOTAL)),
            POSITIONS: TensorSpec(POSITIONS, "int64", (BATCH, SEQUENCE), (0, f"{TOTAL}-1")),
        }
        found = [TensorSpec(IDS, "int64", (BATCH, SEQUENCE), (0, vocabulary - 1)), *(known[n] for n in self.takes)]
        tensors = [part for pair in self.layers for part in pair]
        for (past, _), part in zip(self.names, tensors, strict=True):
            dtype = str(part.dtype).removeprefix("torch.")
            found.append(TensorSpec(past, dtype, (BATCH, part.shape[1], PAST, part.shape[3])))
        return tuple(found)

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Takes the tensors of ``specs`` in order. Returns the logits [batch, sequence, vocabulary], and the cache
        after these tokens."""
        ids, *rest = tensors
        given = dict(zip(self.takes, rest, strict=False))
        past = rest[len(self.takes) :]
        pairs = list(zip(past[:: len(PARTS)], past[1 :: len(PARTS)], strict=True))
        logits, presents = self._call(ids, given.get(MASK), given.get(POSITIONS), pairs)
        parts = (part for pair in presents for part in pair)
        return {LOGITS: logits, **{present: part for (_, present), part in zip(self.names, parts, strict=True)}}

    def whole(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the logits of whole texts [batch, length] in one pass without a cache, as the model computes them by
        itself."""
        with torch.inference_mode():
            if self.of_transformers:
                found: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
                return found
            every = {MASK: torch.ones_like(ids), POSITIONS: torch.arange(ids.shape[1]).expand_as(ids)}
            result = self.model(**{IDS: ids}, **{name: every[name] for name in self.takes})
            return _parts(result)[0]

    def _call(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, past: Pairs | None
    ) -> tuple[torch.Tensor, Pairs]:
        given = {MASK: mask, POSITIONS: positions}
        arguments: dict[str, Any] = {IDS: ids, **{name: given[name] for name in self.takes}}
        if not self.of_transformers:
            logits, presents = _parts(self.model(**arguments, **{_PAST: past}))
            return logits, presents
        from transformers import DynamicCache

        # A plain cache keeps all tokens of a layer with a sliding window, so that all layers have the same length. The
        # mask hides the tokens outside the window.
        result = self.model(**arguments, past_key_values=None if past is None else DynamicCache(past), use_cache=True)
        return result.logits, _pairs_of(result, type(self.model).__name__)


def _parts(result: Any) -> tuple[torch.Tensor, Pairs]:
    """Returns the logits and the new cache in the result of a module that isn't of transformers."""
    if isinstance(result, Mapping):
        return result[LOGITS], result[_PAST]
    if hasattr(result, LOGITS):
        return result.logits, result.past_key_values
    logits, presents = result
    return logits, presents


def _pairs_of(result: Any, name: str) -> Pairs:
    """Returns the keys and values in the result of a model of transformers. Raises ``UnsupportedHere`` if a layer keeps
    another state."""
    from transformers.cache_utils import DynamicLayer

    cache = getattr(result, _PAST, None)
    layers = getattr(cache, "layers", None)
    if not layers or any(not isinstance(layer, DynamicLayer) or layer.keys is None for layer in layers):
        raise _other_state(name, ", ".join(sorted({type(layer).__name__ for layer in layers or ()})))
    return [(layer.keys, layer.values) for layer in layers]


def _other_state(name: str, kinds: str = "") -> UnsupportedHere:
    return UnsupportedHere(
        f"{name} keeps another state than keys and values{f' ({kinds})' if kinds else ''}, which accel can't export; "
        f"export one pass without a cache with {option('decoder', False)}"
    )


def as_decoder(found: Found) -> Found:
    """Returns the opened model with a KV cache. Raises ``UnsupportedHere`` if the model keeps another state than keys
    and values, and ``BadSource`` if it is no decoder."""
    model = uncalled(found.module).eval()
    decoder = CachedDecoder(model)
    sequence = min(_LONGEST_SEQUENCE, max(1, decoder.context // 2))
    past = min(_LONGEST_PAST, decoder.context - sequence)
    dims = {
        BATCH: DimRange(1, 1, 8),
        SEQUENCE: DimRange(1, min(8, sequence), sequence),
        PAST: DimRange(0, min(16, past), past),
    }
    names = (LOGITS, *(present for _, present in decoder.names))
    specs = decoder.specs(_vocabulary(decoder))
    return replace(found, module=decoder, inputs=specs, outputs=names, dims=dims, forms=(), tensors={})


def _vocabulary(decoder: CachedDecoder) -> int:
    """Returns the number of token ids: the rows of the embedding of ids, or else the size of the logits."""
    get = getattr(decoder.model, "get_input_embeddings", None)
    table = get() if callable(get) else None
    if isinstance(table, torch.nn.Embedding):
        return table.num_embeddings
    return int(decoder.whole(torch.zeros((1, 2), dtype=torch.int64)).shape[-1])


def about_decoder(decoder: CachedDecoder, with_configs: bool) -> dict[str, Any]:
    """Returns the facts that the manifest records about a decoder: its type, context length, sizes and special token
    ids. With ``with_configs``, also returns the configs of a model of transformers, by the names of their files."""
    config = getattr(decoder.model, "config", None)
    generation = getattr(decoder.model, "generation_config", None)

    def token(name: str) -> Any:
        value = getattr(generation, name, None)
        return value if value is not None else getattr(config, name, None)

    eos = token("eos_token_id")
    return {
        "type": getattr(config, "model_type", ""),
        "context": decoder.context,
        "hidden": getattr(config, "hidden_size", None),
        "heads": getattr(config, "num_attention_heads", None),
        "bos": token("bos_token_id"),
        "eos": list(eos) if isinstance(eos, list | tuple) else [] if eos is None else [eos],
        "pad": token("pad_token_id"),
        **({"configs": _configs(decoder)} if with_configs else {}),
    }


def _configs(decoder: CachedDecoder) -> dict[str, Any]:
    """Returns what transformers' ``save_pretrained`` would write, for other tools that read the decoder's folder.
    Returns no configs for a module that isn't of transformers."""
    if not decoder.of_transformers:
        return {}
    kinds = (kind.__name__ for kind in type(decoder.model).__mro__ if kind.__module__.startswith("transformers."))
    model: Any = decoder.model
    config = json.loads(model.config.to_json_string())
    config.pop("_name_or_path", None)  # where the weights came from, which doesn't change the model
    found = {"config.json": {**config, "architectures": [next(kinds)]}}
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        found["generation_config.json"] = json.loads(generation.to_json_string())
    return found
