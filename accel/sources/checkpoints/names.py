"""Matches the names of a checkpoint with the names of a model, despite wrappers' prefixes and tied weights."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from accel.errors import BadSource

from .checkpoint import Checkpoint, LazyTensor

# Matches the name components that wrappers insert anywhere in a parameter name.
_INSIDE = re.compile(r"(?<![^.])(?:_orig_mod|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Prefixes that wrappers put before every parameter name, in the order of the search.
_FRONT = ("", "module.", "model.", "module.model.", "model.module.", "_original_module.", "net.", "network.")


def fit(checkpoint: Checkpoint, module: torch.nn.Module) -> Checkpoint:
    """Renames the tensors of ``checkpoint`` to the names in the model's ``state_dict``.

    Raises ``BadSource`` if names or shapes differ. The error gives the first unmatched name with similar names, or the
    first shape that differs.
    """
    wanted: Mapping[str, torch.Tensor] = {
        name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)
    }
    found, notes = _unwrapped(checkpoint)
    copies = _copies(wanted)
    prefix = _prefix(checkpoint, found, wanted, copies)
    if prefix:
        outside = sum(1 for name in found if not name.startswith(prefix) and name not in checkpoint.spare)
        notes += (f"{prefix!r} in front of the names was left out",)
        if outside:
            notes += (f"{outside} tensors outside {prefix!r} were left out",)
        found = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
    spare = {name.removeprefix(prefix) for name in checkpoint.spare}
    rounded = {name.removeprefix(prefix) for name in checkpoint.rounded}
    for name in [n for n in wanted if n not in found or n in rounded]:
        same = next((other for other in copies[name] if other in found and other not in rounded), None)
        if same is not None:
            found[name] = found[same]
            notes += (f"{name!r} is tied to {same!r}",)
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted and name not in spare]
    if missing or unexpected:
        raise BadSource(_differ(checkpoint, missing, unexpected, list(found), list(wanted)))
    for name, value in wanted.items():
        if tuple(found[name].shape) != tuple(value.shape):
            raise BadSource(
                f"{checkpoint.path}: the tensor {name!r} has the shape {list(found[name].shape)}, but the model needs "
                f"{list(value.shape)}; give the weights of this factory's model"
            )
    return replace(
        checkpoint,
        tensors={name: found[name] for name in wanted},
        notes=(*checkpoint.notes, *notes),
        spare=frozenset(),
    )


def _unwrapped(checkpoint: Checkpoint) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    found = {_INSIDE.sub("", name): value for name, value in checkpoint.tensors.items()}
    if len(found) < len(checkpoint.tensors):  # two parameters would get the same name
        return dict(checkpoint.tensors), ()
    changed = any(name not in checkpoint.tensors for name in found)
    return found, ("wrappers' names (such as _orig_mod) were left out",) if changed else ()


def _copies(wanted: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Maps each name to the other names of the same tensor. A checkpoint may store tied weights under only one of their
    names."""
    places: dict[tuple[object, ...], list[str]] = {}
    keys = {n: (t.data_ptr() or n, tuple(t.shape), t.stride(), t.dtype) for n, t in wanted.items()}
    for name, key in keys.items():
        places.setdefault(key, []).append(name)
    return {name: [other for other in places[key] if other != name] for name, key in keys.items()}


def _prefix(
    checkpoint: Checkpoint,
    found: Mapping[str, LazyTensor],
    wanted: Mapping[str, torch.Tensor],
    copies: Mapping[str, list[str]],
) -> str:
    """Returns the prefix that the checkpoint puts before the model's names. Returns "" if no prefix fits."""

    def holds(prefix: str) -> bool:
        return all(prefix + name in found or any(prefix + c in found for c in copies[name]) for name in wanted)

    for prefix in _FRONT:
        if holds(prefix):
            return prefix
    if not wanted:
        return ""
    # A LightningModule may keep its model in an attribute of any name, so any prefix that all names share is accepted.
    first = next(iter(wanted))
    ends = [f".{name}" for name in (first, *copies[first])]
    fronts = {n[: len(n) - len(end) + 1] for n in found for end in ends if n.endswith(end)}
    fitting = sorted(front for front in fronts if holds(front))
    if len(fitting) > 1:
        raise BadSource(
            f"{checkpoint.path} holds several copies of this model, under {' and '.join(map(repr, fitting))}; "
            "save only one copy: torch.save(that_model.state_dict(), ...)"
        )
    return fitting[0] if fitting else ""


def _differ(
    checkpoint: Checkpoint, missing: list[str], unexpected: list[str], found: list[str], wanted: list[str]
) -> str:
    name = (missing or unexpected)[0]
    what = f"lacks {name!r}" if missing else f"holds {name!r}, which the model doesn't have"
    close = difflib.get_close_matches(name, unexpected if missing else missing or wanted, n=2, cutoff=0.6)
    nearest = f"; closest in the {'checkpoint' if missing else 'model'}: {', '.join(map(repr, close))}" if close else ""
    front = next((f for f in _FRONT[1:] if all(w.startswith(f) and w.removeprefix(f) in found for w in wanted)), "")
    fix = (
        f"the names fit without the model's {front!r}: let the factory return that part of the model"
        if front
        else "give the weights of this factory's model"
    )
    return f"{checkpoint.path} {what} ({len(missing)} missing, {len(unexpected)} unexpected{nearest}); {fix}"
