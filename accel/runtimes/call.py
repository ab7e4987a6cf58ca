"""Calls a session with the arguments of the module that the session was made from, and returns the outputs in the
module's structure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import BadFeeds
from accel.sources.structure import arguments_of, fill, is_array, tensors_in

if TYPE_CHECKING:
    from accel.artifact import Artifact

    from .base import BaseSession


def call(session: BaseSession, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs the model with the arguments that the source model takes, and returns the result.

    If the arguments are PyTorch tensors, the result has PyTorch tensors on the device of the first tensor. If the
    arguments are TensorFlow tensors or arrays, the result has TensorFlow tensors or arrays. If the manifest doesn't
    record the arguments of the source model, the model's inputs are passed by position or by name. If the manifest
    doesn't record the structure of the result, a single output is returned as a tensor, and several outputs are
    returned as a dict. Raises ``BadFeeds`` if the arguments don't fit.
    """
    tensors = tensors_given(session.artifact, args, kwargs)
    outputs = session.run({name: _argument(name, value) for name, value in tensors.items()})
    like = next(iter(tensors.values()))
    made = {name: _like(value, like) for name, value in outputs.items()}
    result = (session.artifact.source.get("call") or {}).get("result")
    if result is not None and set(_names(result)) <= set(made):
        return fill(result, made)
    return next(iter(made.values())) if len(made) == 1 else made


def tensors_given(artifact: Artifact, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors in the source model's arguments, by input name. Raises ``BadFeeds`` if the arguments don't
    fit."""
    recorded: Mapping[str, Any] = artifact.source.get("call") or {}
    names = [spec.name for spec in artifact.signature.inputs]
    templates = dict(recorded.get("arguments") or {name: {"tensor": name} for name in names})
    rest = next((name for name, template in templates.items() if name == recorded.get("rest")), "")
    if len(args) == 1 and not kwargs and isinstance(feeds := args[0], Mapping) and _only_tensors(templates):
        args, kwargs = (), feeds
    left_out = recorded.get("left_out") or {}
    names = [name for name in templates if name != rest]
    order = names if rest else recorded.get("order") or names
    if any(name in left_out and is_array(value) for name, value in zip(order, args, strict=False)):
        order = names  # a tensor by position skips the arguments that the example left out
    try:
        given = arguments_of(order, args, kwargs, rest)
        tensors = tensors_in(templates, given, recorded.get("defaults"), left_out)
    except BadFeeds as error:
        if "decoder" not in artifact.source:
            raise
        folder = repr(str(artifact.path.parent)) if artifact.manifest else "the same model"
        raise BadFeeds(
            f"{error}; to generate text, give {folder} and token ids to accel.generate, which keeps the KV cache"
        ) from error
    if not tensors:
        raise BadFeeds(f"no tensor is given; the model takes {artifact.signature.describe_inputs()}")
    return tensors


def _only_tensors(templates: Mapping[str, Any]) -> bool:
    return all("tensor" in template for template in templates.values()) and len(templates) > 1


def _names(template: Any) -> list[str]:
    """Returns the names of the tensors in a template."""
    if isinstance(template, Mapping):
        if "tensor" in template:
            return [template["tensor"]]
        return [name for inner in template.values() for name in _names(inner)]
    return [name for inner in template for name in _names(inner)] if isinstance(template, list) else []


def _argument(name: str, value: Any) -> np.ndarray:
    try:
        return as_array(value)
    except BadFeeds as error:
        raise BadFeeds(f"the argument {name} can't be read: {error}") from error


def as_array(value: Any) -> np.ndarray:
    """Converts a tensor of any framework to a NumPy array."""
    if isinstance(value, np.ndarray):
        return value
    if _is_torch(value):
        from accel.sources.torch.call import to_array

        return to_array(value)
    return np.asarray(value)


def _like(value: np.ndarray, like: Any) -> Any:
    """Converts ``value`` to the type of ``like``: an array, or a tensor of PyTorch or TensorFlow."""
    if _is_torch(like):
        from accel.sources.torch.call import to_tensor

        return to_tensor(value).to(like.device)
    if type(like).__module__.startswith("tensorflow."):
        return sys.modules["tensorflow"].convert_to_tensor(value)
    return value


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
