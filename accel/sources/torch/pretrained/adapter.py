"""Merges a LoRA adapter into its base model, and proves each merged layer against the layer with the adapter beside it.

As in PEFT, merged weights are W + scaling * B A, with scaling = alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from accel.errors import BadSource, GateFailed, UnsupportedHere
from accel.spelling import option
from accel.tables.limits import EXPORT_LIMITS

from ...checkpoints.checkpoint import LazyTensor
from ..arguments import uncalled
from ..found import Found
from .adapter_folder import Adapter, Pair, read_adapter

_CONVOLUTIONS = {
    torch.nn.Conv1d: functional.conv1d, torch.nn.Conv2d: functional.conv2d, torch.nn.Conv3d: functional.conv3d,
}  # fmt: skip
_LIMITS = {torch.float16: EXPORT_LIMITS["fp16"], torch.bfloat16: EXPORT_LIMITS["bf16"]}
_ROWS = 8


def with_adapter(found: Found, folder: Path) -> tuple[Found, dict[str, Any]]:
    """Merges the adapter in ``folder`` into the opened model. Returns the model, and the facts for the manifest.

    Raises the errors of ``read_adapter``, ``BadSource`` if the adapter is of another base model, and
    ``UnsupportedHere`` if it adapts a layer that can't be merged.
    """
    adapter = read_adapter(folder)
    if isinstance(found.module, torch.jit.ScriptModule):
        raise UnsupportedHere(f"{found.path} has no layers to merge an adapter into; give the folder of the base model")
    module = uncalled(found.module)
    check_ties(module, adapter)
    with torch.no_grad():
        for name, tensor in adapter.replaced.items():
            _replace(module, adapter, name, tensor)
        errors = [_merge(layer_of(module, adapter, name), name, pair, folder) for name, pair in adapter.pairs.items()]
    facts = {
        "path": str(folder), "modules": len(adapter.pairs), "replaced": len(adapter.replaced),
        "rel_l2": max(errors, default=0.0),
    }  # fmt: skip
    return replace(found, files=(*found.files, *adapter.files)), facts


def check_ties(module: torch.nn.Module, adapter: Adapter) -> None:
    """Raises ``UnsupportedHere`` if an adapter was trained with tied layers that PEFT saves only once."""
    if adapter.keeps_ties and len(dict(module.named_parameters())) < len(
        dict(module.named_parameters(remove_duplicate=False))
    ):
        raise UnsupportedHere(
            f"the adapter {adapter.folder} has ensure_weight_tying, and its base model ties weights; merge it with "
            "PEFT's merge_and_unload, and give the merged model"
        )


def layer_of(module: torch.nn.Module, adapter: Adapter, name: str) -> torch.nn.Module:
    """Returns the layer ``name``. Raises ``BadSource`` if the model has no such layer."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise other_base(adapter, f"adapts the layer {name}, which the model doesn't have") from None


def other_base(adapter: Adapter, why: str) -> BadSource:
    """Returns the error for an adapter of another base model."""
    return BadSource(f"the adapter {adapter.folder} {why}; give the base model that the adapter was trained on")


def _replace(module: torch.nn.Module, adapter: Adapter, name: str, tensor: LazyTensor) -> None:
    place, _, own = name.rpartition(".")
    layer = layer_of(module, adapter, place) if place else module
    before = getattr(layer, own, None)
    if not isinstance(before, torch.Tensor):
        raise other_base(adapter, f"has the weights {name}, which the model doesn't have")
    if tuple(before.shape) != tensor.shape:
        raise other_base(adapter, f"has {name} with the shape {list(tensor.shape)}, not {list(before.shape)}")
    _set(layer, own, tensor.read())


def _set(layer: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Gives the layer weights of its own. Weights that other layers share stay as they are, as with PEFT."""
    before = getattr(layer, name)
    new = value.to(before.dtype).clone()
    if isinstance(before, torch.nn.Parameter):
        setattr(layer, name, torch.nn.Parameter(new, requires_grad=before.requires_grad))
    else:
        layer.register_buffer(name, new)


def _merge(layer: torch.nn.Module, name: str, pair: Pair, folder: Path) -> float:
    """Adds the product of the pair to the layer's weights. Returns the relative error of the layer's output against the
    output of the layer and the adapter side by side.

    The product is computed in float32 or better, and is rounded once if the base model has another dtype.
    """
    if not _mergeable(layer):
        raise UnsupportedHere(
            f"the adapter {folder} adapts {name}, a layer of the type {type(layer).__name__} that accel can't merge; "
            "merge it with PEFT's merge_and_unload, and give the merged model"
        )
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    a, b = (tensor.read().to(torch.float64) for tensor in (pair.a, pair.b))
    delta = pair.scaling * (b.flatten(1) @ a.flatten(1))
    if _turned(layer):
        delta = delta.T
    bias = pair.bias.read().to(torch.float64) if pair.bias is not None else None
    if delta.numel() != weight.numel() or (weight.ndim == 2 and delta.shape != weight.shape):
        raise BadSource(
            f"the adapter {folder} has a product of the shape {list(delta.shape)} for {name}, whose weights are "
            f"{list(weight.shape)}; give the base model that the adapter was trained on"
        )
    if bias is not None and getattr(layer, "bias", None) is None:
        raise BadSource(f"the adapter {folder} has a bias for {name}, which has none; give the adapter's base model")
    given = _sample(layer)
    beside = _beside(layer, given, a, b, pair.scaling, bias)
    _set(layer, "weight", weight.to(torch.float64) + delta.reshape(weight.shape))
    if bias is not None:
        _set(layer, "bias", layer.bias.to(torch.float64) + pair.scaling * bias)  # type: ignore[operator]
    merged = _run(layer, given).to(torch.float64)
    error = float((merged - beside).norm() / beside.norm().clamp_min(1e-300))
    if not error <= _LIMITS.get(weight.dtype, EXPORT_LIMITS["fp32"]):
        raise GateFailed(
            f"the layer {name} differs by {error:.3g} from the layer with its adapter beside it; check that the "
            f"weights of {option('adapters', str(folder))} are finite"
        )
    return error


def _mergeable(layer: torch.nn.Module) -> bool:
    if "weight" not in layer._parameters:  # computed from other parameters, as weight_norm does
        return False
    if type(layer) in _CONVOLUTIONS:
        return bool(layer.groups == 1 and layer.padding_mode == "zeros")
    return isinstance(layer, torch.nn.Linear | torch.nn.Embedding) or is_conv1d(layer)


def is_conv1d(layer: torch.nn.Module) -> bool:
    """Tells whether the layer is the Conv1D of transformers, a linear layer whose weights are [inputs, outputs]."""
    return any(
        kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D" for kind in type(layer).__mro__
    )


def _turned(layer: torch.nn.Module) -> bool:
    """Tells whether the layer's weights are [inputs, outputs]. The layer alone decides, as in PEFT, not the field
    fan_in_fan_out of the config."""
    return is_conv1d(layer) or isinstance(layer, torch.nn.Embedding)


def _sample(layer: Any) -> torch.Tensor:
    """Returns random inputs of the layer, or all ids of a small embedding."""
    source = torch.Generator().manual_seed(0)
    weight = layer.weight
    if isinstance(layer, torch.nn.Embedding):
        return torch.randperm(weight.shape[0], generator=source)[:1024]
    if type(layer) in _CONVOLUTIONS:
        sizes = [
            2,
            weight.shape[1],
            *(3 * size * step for size, step in zip(layer.kernel_size, layer.dilation, strict=True)),
        ]
        return torch.randn(sizes, generator=source).to(weight.dtype)
    inputs = weight.shape[0] if is_conv1d(layer) else weight.shape[1]
    return torch.randn(_ROWS, inputs, generator=source).to(weight.dtype)


def _run(layer: Any, given: torch.Tensor) -> torch.Tensor:
    """Runs the layer. Some models scale the result of an embedding, so its table alone is read."""
    found: torch.Tensor = (
        functional.embedding(given, layer.weight) if isinstance(layer, torch.nn.Embedding) else layer(given)
    )
    return found


def _beside(
    layer: Any, given: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns the output of the layer and of the adapter side by side, as the adapter was trained."""
    before = _run(layer, given).to(torch.float64)
    if isinstance(layer, torch.nn.Embedding):
        return before + scaling * (a.T[given] @ b.T)
    exact = given.to(torch.float64)
    if convolve := _CONVOLUTIONS.get(type(layer)):
        inner = convolve(exact, a, None, layer.stride, layer.padding, layer.dilation)
        added = convolve(inner, b)
        return before + scaling * (added if bias is None else added + bias.reshape(-1, *(1,) * (added.ndim - 2)))
    added = exact @ a.T @ b.T
    return before + scaling * (added if bias is None else added + bias)
