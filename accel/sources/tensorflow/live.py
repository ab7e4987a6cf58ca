"""Writes a live Keras or TensorFlow model to the cache as a SavedModel.

This module runs in the caller's process, which has loaded TensorFlow already.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accel.artifact import canonical_json, text_sha256
from accel.cache import StageCache
from accel.errors import BadInputSpec, BadSource, one_line
from accel.sources.structure import describe, fill, is_array
from accel.spelling import option

from ..dynamic import Dynamic, named_axes
from ..live import FACTS

# The size of every dynamic dim in an example that ``_made_up`` creates.
_ANY_SIZE = 2


def capture(model: Any, example: Any = None, dynamic: Dynamic | None = None) -> Path:
    """Writes ``model`` to the cache as a SavedModel and returns the path of the SavedModel's folder.

    ``example`` holds the arguments of a call: a tuple, a single tensor, or a dict of the inputs by name. A Keras model
    that knows its inputs needs no example. ``dynamic`` names the dynamic axes of the inputs. Without ``dynamic`` and
    ``example``, the axes without a fixed size in the Keras model are dynamic. With ``example`` alone, the first axis is
    dynamic if the model runs with another batch size. Calls the model once, because a model creates its variables in
    its first call.

    Raises ``BadInputSpec`` if the inputs are unknown, and ``BadSource`` if the model fails on the example or can't be
    saved.
    """
    known = list(getattr(model, "inputs", None) or [])
    given = _made_up(model, known) if example is None else example
    if given is None:
        raise BadInputSpec(f"the inputs of {_name(model)} are unknown; pass example arguments with {option('example')}")
    given = (given,) if is_array(given) else given
    template, tensors = describe(given, strict=True)
    names = dict(zip(tensors, _input_names(model, known, given, list(tensors)), strict=True))
    arrays = {names[name]: np.asarray(value) for name, value in tensors.items()}

    def call(values: Sequence[Any]) -> Any:
        arguments = fill(template, dict(zip(tensors, values, strict=True)))
        mode = {"training": False} if _is_keras(model) else {}
        return model(*arguments, **mode) if isinstance(arguments, tuple) else model(arguments, **mode)

    try:
        result = call(list(arrays.values()))
    except Exception as error:  # a model may raise any type of error
        raise BadSource(
            f"the model {_name(model)} fails on its example: {one_line(error, 200)}; correct the model, or give other "
            f"arguments with {option('example')}"
        ) from error
    arguments = describe(given, strict=True, names=names)[0]
    results = _output_names(model, result)
    parts = dict(zip(_parameters(model), arguments.get("tuple", [arguments]), strict=False))
    axes: Mapping[str, Iterable[int]]
    if dynamic is not None:
        named = named_axes(dynamic, parts, {name: value.shape for name, value in arrays.items()})
        axes = named.names
        if named.open_batch and not any(0 in found for found in axes.values()):
            firsts = _batch_axes(call, arrays)
            axes = {name: [*firsts.get(name, []), *axes.get(name, [])] for name in {**axes, **firsts}}
    elif known and example is None:
        axes = {
            name: [i for i, size in enumerate(one.shape) if size is None]
            for name, one in zip(arrays, known, strict=True)
        }
    else:
        axes = _batch_axes(call, arrays)
    shapes = {
        name: [None if axis in axes.get(name, ()) else size for axis, size in enumerate(value.shape)]
        for name, value in arrays.items()
    }
    cache = StageCache()
    kinds = {name: str(value.dtype) for name, value in arrays.items()}
    key = _key(model, canonical_json([shapes, kinds, results]))
    path: Path = cache.entry(key) / _name(model)
    if not path.is_dir():
        returns, outputs = describe(result, names=results)
        dtypes = {name: value.dtype for name, value in arrays.items()}
        with cache.scratch() as folder:
            _save(model, lambda values: describe(call(values), names=results)[1], shapes, dtypes, folder / path.name)
            # A SavedModel keeps its inputs and outputs in no order.
            order = {"inputs": list(arrays), "outputs": list(outputs)}
            facts = {"class": _name(model), "note": "", "call": {"arguments": parts, "result": returns}, **order}
            (folder / FACTS).write_text(json.dumps(facts))
            cache.keep(key, folder)
    return path


def _parameters(model: Any) -> list[str]:
    """Returns the names of the parameters that a call of the model takes."""
    return list(inspect.signature(model.call if _is_keras(model) else model.__call__).parameters)


def _name(model: Any) -> str:
    return type(model).__qualname__.rpartition(">.")[2]


def _is_keras(model: Any) -> bool:
    return any(kind.__module__.startswith("keras.") for kind in type(model).__mro__)


def _made_up(model: Any, known: Sequence[Any]) -> Any:
    """Returns zeros for the inputs that a Keras model knows, or None if the model knows no inputs."""
    if not known:
        return None
    zeros = [np.zeros([size or _ANY_SIZE for size in one.shape], str(one.dtype)) for one in known]
    whole = getattr(model, "input", None)
    if isinstance(whole, Mapping):
        return {name: next(z for z, one in zip(zeros, known, strict=True) if one is of) for name, of in whole.items()}
    return zeros[0] if len(zeros) == 1 else (zeros,)


def _input_names(model: Any, known: Sequence[Any], given: Any, found: Sequence[str]) -> list[str]:
    """Returns a name for each tensor of the example: the name of a Keras input, a key of the dict, or the name of a
    parameter."""
    if isinstance(given, Mapping):
        return list(found)
    own = [str(getattr(one, "name", "")) for one in known]
    if len(own) == len(found) and all(own):
        return own
    parameters = [name for name in _parameters(model) if name not in ("training", "mask")]
    return parameters[: len(found)] if len(parameters) >= len(found) == len(given) else list(found)


def _output_names(model: Any, result: Any) -> dict[str, str]:
    """Returns the name of its layer for each output of a functional Keras model, as the model's file names it. Returns
    an empty dict if the model names its outputs itself, by the keys of a dict, or if two outputs have one name."""
    own = getattr(model, "output_names", None) or []
    found = [] if isinstance(result, Mapping) else list(describe(result)[1])
    return dict(zip(found, own, strict=True)) if len(set(own)) == len(own) == len(found) else {}


def _batch_axes(call: Callable[[Sequence[Any]], Any], arrays: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Runs the model with a batch that is one row larger. Returns a dict that maps each input with a batch axis to the
    list ``[0]``, or an empty dict if the model fails on the larger batch."""
    size = next((value.shape[0] for value in arrays.values() if value.ndim), 0)
    batched = [name for name, value in arrays.items() if value.ndim and value.shape[0] == size]
    rows = np.arange(size + 1) % max(size, 1)
    try:
        call([value[rows] if name in batched else value for name, value in arrays.items()])
    except Exception:  # a model may raise any type of error
        return {}
    return {name: [0] for name in batched}


def _key(model: Any, facts: str) -> str:
    """Returns a key for the cache. If all layers of the model are Keras' own, the key depends on the model's config,
    its weights and ``facts``. Any other model gets a new key at each call, because its code can't be part of the
    key."""
    layers = getattr(model, "_flatten_layers", None)
    plain = layers is not None and all(type(one).__module__.startswith("keras.src.") for one in layers())
    if not plain:
        return uuid.uuid4().hex
    digest = hashlib.sha256(model.to_json().encode())
    for array in model.get_weights():
        digest.update(np.ascontiguousarray(array).data)
    return text_sha256(f"{digest.hexdigest()} {facts}")


def _save(
    model: Any,
    outputs: Callable[[Sequence[Any]], Mapping[str, Any]],
    shapes: Mapping[str, Sequence[int | None]],
    dtypes: Mapping[str, Any],
    folder: Path,
) -> None:
    tensorflow = sys.modules["tensorflow"]
    specs = [tensorflow.TensorSpec(shape, dtypes[name], name=name) for name, shape in shapes.items()]
    try:
        if _is_keras(model):
            import keras

            archive = keras.export.ExportArchive()
            archive.track(model)
            archive.add_endpoint("serving_default", lambda *values: outputs(values), input_signature=specs)
            archive.write_out(str(folder), verbose=False)
        else:
            traced = tensorflow.function(lambda *values: outputs(values), input_signature=specs)
            tensorflow.saved_model.save(model, str(folder), signatures=traced.get_concrete_function())
    except Exception as error:  # a model may raise any type of error
        raise BadSource(
            f"TensorFlow can't save {_name(model)}: {one_line(error, 200)}; save the model yourself and give its path"
        ) from error
