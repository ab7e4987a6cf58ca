"""Reads a LoRA adapter in a folder that PEFT wrote, with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.errors import BadSource, InvalidModel
from accel.spelling import option

from ...checkpoints.checkpoint import LazyTensor
from ...checkpoints.file import read
from .folder import ADAPTER_CONFIG, read_json

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.(weight|bias))?")
# Fields that change what an adapter computes, so that a product of two matrices isn't all of it.
_UNSUPPORTED = (
    "use_dora", "use_qalora", "use_bdlora", "layer_replication", "target_parameters", "alora_invocation_tokens",
    "trainable_token_indices", "arrow_config", "kasa_config", "monteclora_config", "megatron_config",
)  # fmt: skip
# PEFT changes the base model itself for any other way to begin a training.
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
# The patterns in a config come from outside. A group that repeats can take forever to match.
_LONGEST_PATTERN, _MOST_REPEATS = 200, 3


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The matrices A and B of one module. The adapter adds ``scaling`` * B A to the module's weights. ``bias`` is the
    bias of B, if it has one."""

    a: LazyTensor
    b: LazyTensor
    scaling: float
    bias: LazyTensor | None = None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter. ``pairs`` maps names of modules to their matrices. ``replaced`` maps names of weights to the weights
    that the training saved whole."""

    folder: Path
    files: tuple[Path, ...]
    pairs: Mapping[str, Pair]
    replaced: Mapping[str, LazyTensor]
    keeps_ties: bool


def read_adapter(folder: Path) -> Adapter:
    """Reads the adapter in ``folder``. Runs no code from the folder.

    Raises ``BadSource`` if a file is missing or holds more than weights, or if the adapter is of a kind that can't be
    merged. Raises ``InvalidModel`` if a file is damaged.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        raise BadSource(
            f"{folder} has no {ADAPTER_CONFIG}; give the folder that PEFT's save_pretrained wrote with "
            f"{option('adapters')}"
        )
    config = read_json(folder / ADAPTER_CONFIG, dict)
    _check_kind(folder, config)
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise BadSource(f"{folder} has no {_WEIGHTS[0]}; save the adapter again with PEFT's save_pretrained")
    pairs, replaced = _sorted(folder, config, read(weights).tensors)
    return Adapter(
        folder=folder,
        files=(folder / ADAPTER_CONFIG, weights),
        pairs=pairs,
        replaced=replaced,
        keeps_ties=bool(config.get("ensure_weight_tying")),
    )


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    begun = config.get("init_lora_weights", True)
    found = (
        f"is of the type {kind}" if kind != "LORA"
        else f"has {name}" if (name := next((name for name in _UNSUPPORTED if config.get(name)), None))
        else f"began with init_lora_weights={begun!r}, which changes the base model," if begun not in _STARTS
        else ""
    )  # fmt: skip
    if found:
        raise BadSource(
            f"the adapter {folder} {found} and can't be merged by accel; merge it with PEFT's merge_and_unload, save "
            f"the model, and give that folder without {option('adapters')}"
        )


def _sorted(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]
) -> tuple[dict[str, Pair], dict[str, LazyTensor]]:
    """Returns the pairs of matrices by module, and the other weights by name."""
    parts: dict[str, dict[str, LazyTensor]] = {}
    replaced: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(_PREFIX):
            raise BadSource(
                f"the adapter {folder} has the tensor {name!r}, whose name doesn't begin with {_PREFIX}; save the "
                "adapter with PEFT's save_pretrained"
            )
        own = name.removeprefix(_PREFIX)
        if found := _LORA.fullmatch(own):
            part = found[2].removeprefix("lora_").removeprefix("embedding_")
            parts.setdefault(found[1], {})[f"{part}.bias" if found[3] == "bias" else part] = tensor
        elif ".lora_" in own:
            raise BadSource(
                f"the adapter {folder} has the tensor {name!r}, which is more than LoRA's A and B; merge it with "
                "PEFT's merge_and_unload, and give the merged model"
            )
        else:
            replaced[own.replace(".base_layer.", ".")] = tensor
    if not parts and not replaced:
        raise InvalidModel(f"the adapter {folder} has no weights; save it again with PEFT's save_pretrained")
    return {module: _pair(folder, config, module, found) for module, found in parts.items()}, replaced


def _pair(folder: Path, config: Mapping[str, Any], module: str, found: Mapping[str, LazyTensor]) -> Pair:
    if not {"A", "B"} <= set(found) or "A.bias" in found:
        raise InvalidModel(f"the adapter {folder} has {' and '.join(found)} of {module}, not A and B; save it again")
    a, b = found["A"], found["B"]
    rank = a.shape[0] if a.shape else 0
    said = _of_module(folder, config, "rank_pattern", "r", module)
    if len(a.shape) < 2 or len(b.shape) < 2 or b.shape[1] != rank or rank != said or rank < 1:
        raise InvalidModel(
            f"the adapter {folder} has A {list(a.shape)} and B {list(b.shape)} of {module}, but {ADAPTER_CONFIG} says "
            f"rank {said:g}; copy both files of the same training"
        )
    alpha = _of_module(folder, config, "alpha_pattern", "lora_alpha", module)
    # Rank-stabilized LoRA: https://arxiv.org/abs/2312.03732
    return Pair(
        a=a, b=b, scaling=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), bias=found.get("B.bias")
    )


def _of_module(folder: Path, config: Mapping[str, Any], patterns: str, usual: str, module: str) -> float:
    """Returns the number that ``patterns`` of the config gives for ``module``, or else the field ``usual``."""
    rows = config.get(patterns) or {}
    value = config.get(usual, 8)
    if not isinstance(rows, Mapping):
        raise InvalidModel(f"{patterns} in {folder / ADAPTER_CONFIG} is no table; save the adapter again")
    for pattern, other in rows.items():
        if _matches(folder, patterns, pattern, module):
            value = other
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidModel(f"{usual} of {module} in {folder / ADAPTER_CONFIG} is no number; save the adapter again")
    return value


def _matches(folder: Path, where: str, pattern: str, module: str) -> bool:
    """Tells whether a pattern fits the end of a module's name, as PEFT reads patterns."""
    repeats: Sequence[str] = re.findall(r"[*+{]", pattern)
    if len(pattern) > _LONGEST_PATTERN or len(repeats) > _MOST_REPEATS or re.search(r"\)[*+{]", pattern):
        raise BadSource(f"{where} in {folder / ADAPTER_CONFIG} has too complex a pattern; write names of modules there")
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise InvalidModel(
            f"{where} in {folder / ADAPTER_CONFIG} has the invalid pattern {pattern!r}; save the adapter again"
        ) from error
