"""Measures a model of unknown shape. Counts the model's parameters, and runs the model on fake tensors, which take no
memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from .spec import ModelSpec

# The inputs of one sample without a batch dim. A sequence holds the inputs by position, a mapping by name.
Sample = Sequence[Any] | Mapping[str, Any]

# Maps each shape field of ``ModelSpec`` to the names that configs of transformer models use for this field.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "layers"),
    "hidden": ("hidden_size", "n_embd", "hidden"),
    "heads": ("num_attention_heads", "n_head", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "vocab": ("vocab_size", "vocab"),
    "seq": ("max_position_embeddings", "n_positions", "seq"),
}


def spec_of(module: torch.nn.Module, sample: Sample | None = None) -> ModelSpec:
    """Returns the ``ModelSpec`` of ``module``: the number of parameters, the largest block, and the shape, which is
    read from ``module.config``. Shared parameters are counted once. ``sample`` holds the inputs of one sample, without
    a batch dim. A trial run on ``sample`` measures activations and FLOPs.
    """
    shape = _shape(getattr(module, "config", None))
    sizes = [_size(block) for block in blocks(module)]
    params = _size(module)
    largest, outside = max(sizes, default=0), max(0, params - sum(sizes))
    activation, flops = trial(module, sample) if sample is not None else (0, 0.0)
    return ModelSpec(
        params=params,
        largest=min(largest, params),
        outside=outside,
        activation_bytes=activation,
        flops=flops,
        **shape,
    )


def blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the blocks of ``module``. Each block is a submodule that is gathered, compiled or recomputed as a whole.
    All entries of a ``ModuleList`` are blocks. An entry of a ``Sequential`` is a block if the entry contains modules. A
    ``ModuleList`` inside a block belongs to the block.
    """
    found: list[torch.nn.Module] = []
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            found += [entry for entry in child if any(True for _ in entry.parameters())]
        elif isinstance(child, torch.nn.Sequential):
            found += [entry for entry in child if any(e is not None for e in entry.children()) and _size(entry)]
        else:
            found += blocks(child)
    return found


def sample_of(inputs: Any) -> Sample:
    """Returns the ``inputs`` of a training sample as a tuple or dict. A single tensor becomes a tuple with one
    element."""
    if isinstance(inputs, Mapping):
        return inputs
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def trial(module: torch.nn.Module, sample: Sample) -> tuple[int, float]:
    """Returns the bytes kept for the backward pass and the FLOPs of the forward pass, for one sample in float32.
    Measures a batch of two and a batch of four samples, and halves the difference between the two measurements. Costs
    that don't grow with the batch cancel out. Returns (0, 0.0), which means unknown, if the model can't run on fake
    tensors.
    """
    try:
        two, four = (_forward(module, sample, batch) for batch in (2, 4))
    except Exception:  # the user's forward method may read tensor values, but fake tensors have no values
        return 0, 0.0
    return max(0, (four[0] - two[0]) // 2), max(0.0, (four[1] - two[1]) / 2)


def _forward(module: torch.nn.Module, sample: Sample, batch: int) -> tuple[int, float]:
    named = sample if isinstance(sample, Mapping) else {}
    tensors = [torch.as_tensor(value) for value in (named.values() if named else sample)]
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    state: dict[str, torch.Tensor] = {name: mode.from_tensor(value) for name, value in _state(module).items()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        state[name].requires_grad_(parameter.requires_grad)
    with mode, count_flops() as counter:
        inputs = [torch.empty((batch, *value.shape), dtype=value.dtype) for value in tensors]
        with SavedBytes(state.values()) as saved:
            arguments = () if named else tuple(inputs)
            kept = torch.func.functional_call(module, state, arguments, dict(zip(named, inputs, strict=False)))
        held = saved.bytes
        del kept
    return held, float(counter.get_total_flops())


def count_flops() -> FlopCounterMode:
    """Returns torch's FLOP counter, extended to count the CPU's attention operator, which torch leaves out.

    Counts all modules together, because torch's tracker of modules fails on a module that returns a view of its own
    parameter without gradients.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={attention: _attention_flops})
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


class _NoModules(nullcontext[None]):
    """Takes the place of torch's tracker of modules. Counts belong to ``parents``, and torch sums those of "Global"."""

    parents = frozenset({"Global"})


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """A context manager that counts the bytes that autograd saves for the backward pass.

    Counts each storage once. Doesn't count the storages of the tensors in ``leave_out``.
    """

    def __init__(self, leave_out: Any = ()) -> None:
        self.bytes = 0
        self._known: set[int] = {_plain(value).untyped_storage()._cdata for value in leave_out}
        self._alive: list[Any] = []
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> SavedBytes:  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, value: torch.Tensor) -> torch.Tensor:
        storage = _plain(value).untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(storage)  # keeps the storage alive, so that no other storage gets the same address
            self.bytes += storage.nbytes()
        return value

    @staticmethod
    def _unpack(value: torch.Tensor) -> torch.Tensor:
        return value


def _plain(value: Any) -> torch.Tensor:
    """Returns the plain tensor inside a DTensor or inside the result of an asynchronous collective. Returns any other
    ``value`` unchanged."""
    while (inner := getattr(value, "_local_tensor", getattr(value, "elem", None))) is not None:
        value = inner
    found: torch.Tensor = value
    return found


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = dict(module.named_parameters(remove_duplicate=False))
    return {**{n: p.detach() for n, p in named.items()}, **dict(module.named_buffers(remove_duplicate=False))}


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shape(config: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for field, names in _NAMES.items():
        values = [getattr(config, name, None) for name in names]
        value = next((v for v in values if isinstance(v, int)), 0)
        if value:
            found[field] = value
    return found if {"layers", "hidden", "heads"} <= set(found) else {}
