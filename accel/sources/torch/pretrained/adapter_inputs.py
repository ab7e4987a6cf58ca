"""Prepares LoRA adapters whose matrices stay inputs of the exported model, beside the weights of the base model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accel.errors import UnsupportedHere
from accel.spelling import option

from .adapter import check_ties, is_conv1d, layer_of, other_base
from .adapter_folder import Adapter, read_adapter

if TYPE_CHECKING:
    import numpy as np


def matrices(adapter: Adapter) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns A [inputs, rank] and B [rank, outputs] of each layer in float32. The layer with its adapter computes
    base(x) + (x @ A) @ B, so B has the scaling."""
    found = {}
    for name, pair in adapter.pairs.items():
        a, b = (tensor.read().to(torch.float64).T for tensor in (pair.a, pair.b))
        found[name] = (a.float().contiguous().numpy(), (pair.scaling * b).float().contiguous().numpy())
    return found


def layers_of(module: torch.nn.Module, folders: Sequence[Path]) -> dict[str, str]:
    """Returns the sha256 of the weights [inputs, outputs] of each layer that an adapter in ``folders`` adapts. An
    exporter keeps the weights of a layer, but not always its name.

    Raises the errors of ``read_adapter``, ``BadSource`` if an adapter is of another base model, and ``UnsupportedHere``
    if an adapter can only be merged.
    """
    found: dict[str, str] = {}
    for folder in folders:
        adapter = read_adapter(folder)
        check_ties(module, adapter)
        if adapter.replaced:
            raise _only_merged(folder, f"has the whole weights {next(iter(adapter.replaced))}")
        for name in adapter.pairs:
            found[name] = matrix_sha256(_weights(module, adapter, name).numpy())
    alike = Counter(matrix_sha256(_matrix(layer).numpy()) for layer in module.modules() if _is_linear(layer))
    if equal := next((name for name, sha256 in found.items() if alike[sha256] > 1), None):
        raise _only_merged(folders[0], f"adapts {equal}, whose weights are those of another layer")
    return found


def matrix_sha256(weights: np.ndarray) -> str:
    """Returns the sha256 of a layer's weights [inputs, outputs]."""
    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(weights).data).hexdigest()


def _weights(module: torch.nn.Module, adapter: Adapter, name: str) -> torch.Tensor:
    """Returns the weights [inputs, outputs] of the layer ``name``, which the adapter fits."""
    layer, pair, folder = layer_of(module, adapter, name), adapter.pairs[name], adapter.folder
    if not _is_linear(layer):
        raise _only_merged(folder, f"adapts {name}, a layer of the type {type(layer).__name__}")
    if pair.bias is not None:
        raise _only_merged(folder, f"has a bias for {name}")
    weights = _matrix(layer)
    if weights.dtype != torch.float32:
        dtype = str(weights.dtype).removeprefix("torch.")
        raise _only_merged(folder, f"adapts {name}, whose weights are {dtype} instead of float32")
    shape = (pair.a.shape[1], pair.b.shape[0])
    if shape != tuple(weights.shape):
        raise other_base(adapter, f"is for a layer {name} of {shape[0]} inputs and {shape[1]} outputs")
    return weights


def _is_linear(layer: torch.nn.Module) -> bool:
    return isinstance(layer, torch.nn.Linear) or is_conv1d(layer)


def _matrix(layer: torch.nn.Module) -> torch.Tensor:
    """Returns the weights of a linear layer as [inputs, outputs]."""
    weights: torch.Tensor = layer.weight.detach()  # type: ignore[operator]
    return weights if is_conv1d(layer) else weights.T


def _only_merged(folder: Path, why: str) -> UnsupportedHere:
    return UnsupportedHere(
        f"the adapter {folder} {why}, so its matrices can't be inputs; merge it: give it alone, without "
        f"{option('adapters_as', 'inputs')}"
    )
