"""Loads a TensorFlow model of any file format into a ``Loaded`` object, which can be called and frozen.

Only the child process that runs TensorFlow imports this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from accel.errors import AccelError, BadInputSpec, BadSource, InvalidModel, one_line, whole_sentences
from accel.signature import TensorSpec
from accel.spelling import option

from ..python_object import load_object, raised
from .bare_graph import load_checkpoint, load_graph, load_signature, run_graph
from .folding import training_ops
from .graph import freeze_function, strip_dropout
from .loaded import Frozen, Loaded, Row, dtype_name, plain_name, shape_of
from .source import TensorFlowSpec

if TYPE_CHECKING:
    import numpy as np


def load(spec: TensorFlowSpec) -> Loaded:
    """Loads the model that ``spec`` names. Raises ``BadSource`` or ``InvalidModel`` with the reason if loading
    fails."""
    try:
        loaded = _FORMS[spec.form](spec)
        # The loaders of graphs and checkpoints strip dropout themselves, before pruning the graph to its outputs.
        return _stripped(loaded) if spec.strip and spec.form not in ("graph", "checkpoint") else loaded
    except AccelError:
        raise
    except Exception as error:
        raise InvalidModel(
            f"the model {spec.path} can't be read as {_NAMES[spec.form]} ({whole_sentences(error).rstrip('.')}); save "
            "the model again"
        ) from error


def _stripped(loaded: Loaded) -> Loaded:
    """Freezes the model and removes its dropout. A call of the returned model runs the graph without dropout, so that
    this graph is the reference for conversions."""
    frozen = loaded.freeze()
    if not training_ops(frozen):
        return loaded
    frozen = replace(frozen, graph=strip_dropout(frozen.graph))
    call, _ = run_graph(frozen)
    return Loaded(call=call, inputs=loaded.inputs, outputs=loaded.outputs, freeze=lambda: frozen)


def _saved_model(spec: TensorFlowSpec) -> Loaded:
    try:
        loaded, old = _load_saved_model(spec.path)
    except Exception as first:
        try:
            return load_signature(spec)
        except AccelError:
            raise
        except Exception:
            raise first from None
    if spec.placeholders:
        raise BadSource(f"every placeholder of the model {spec.path} is an input; leave out {option('placeholders')}")
    signatures = dict(loaded.signatures)
    if not signatures:
        raise BadSource(
            f"{spec.path} has no signatures, so its inputs are unknown; save it with tf.saved_model.save(model, path, "
            "signatures=model.call.get_concrete_function(...)) or with Keras' model.export(path)"
        )
    name = spec.signature or ("serving_default" if "serving_default" in signatures else "")
    if not name and len(signatures) == 1:
        name = next(iter(signatures))
    if name not in signatures:
        what = f"has no signature {name!r}" if name else "has several signatures and no serving_default"
        known = ", ".join(signatures)
        raise BadSource(f"the model {spec.path} {what}; choose a signature with {option('signature')}: {known}")
    function = signatures[name]
    taken: Mapping[str, Any] = function.structured_input_signature[1]
    outputs: Mapping[str, Any] = dict(sorted(function.structured_outputs.items()))
    inputs = [(key, dtype_name(t.dtype), shape_of(t.shape)) for key, t in taken.items()]
    if old:
        return _from_old_signature(function, inputs, outputs)
    kinds = [tf.TensorSpec(t.shape, t.dtype, name=f"in_{i}") for i, t in enumerate(taken.values())]

    def call(*tensors: Any) -> Any:
        found = function(**dict(zip(taken, tensors, strict=True)))
        return [found[key] for key in outputs]

    made = _from_call(call, kinds, inputs, list(outputs), keep=loaded)
    made.declared = [(key, dtype_name(t.dtype), shape_of(t.shape)) for key, t in outputs.items()]
    return made


def _from_old_signature(function: Any, inputs: list[Row], outputs: Mapping[str, Any]) -> Loaded:
    """Loads a signature of a TF1 file. The signature is frozen without tracing a call, because the variables of a TF1
    file belong to the file's own graph."""
    places = {t.name: index for index, t in enumerate(function.outputs)}
    names = [name for name, _ in sorted(outputs.items(), key=lambda item: places[item[1].name])]
    starts = [str(name) for name in function._arg_keywords]

    def call(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = function(**{name: tf.constant(feeds[name]) for name in starts})
        return {name: found[name].numpy() for name in names}

    return Loaded(call=call, inputs=inputs, outputs=names, freeze=lambda: freeze_function(function, starts, names))


def _load_saved_model(path: str) -> tuple[Any, bool]:
    """Loads the folder. Returns the loaded object and a flag, which is True if TensorFlow loaded the folder as a TF1
    model."""
    try:
        loaded = tf.saved_model.load(path)
        old = hasattr(loaded, "prune")
    except Exception as first:
        # Old Keras files keep optimizer slots that TensorFlow no longer restores. The loader of TF1 files
        # reads the signatures from the graph and ignores all saved objects, such as optimizer slots.
        from tensorflow.python.saved_model import load_v1_in_v2

        try:
            loaded = load_v1_in_v2.load(path, None)
        except Exception:
            raise first from None
        old = True
    return loaded, old


def _keras(spec: TensorFlowSpec) -> Loaded:
    import keras

    path = Path(spec.path)
    try:
        model = keras.saving.load_model(path, compile=False)
    except Exception as error:
        raise InvalidModel(f"{path} {_keras_problem(error)}") from error
    return _from_keras(model, spec)


def _keras_problem(error: Exception) -> str:
    text, said = one_line(error), whole_sentences(error, 160).rstrip(".")
    if "No model config" in text or "weights-only" in text or "not a valid `.keras`" in text:
        return (
            "holds only weights and no model that Keras can build; write a function that builds the model, loads the "
            "weights and returns the model, and export FILE.py:FUNCTION"
        )
    if "Lambda" in text and ("deserializ" in text or "safe_mode" in text or "unsafe" in text):
        return (
            "holds a Lambda layer, which is code that loading would run; rebuild the model in a function that returns "
            "the model, and export FILE.py:FUNCTION"
        )
    if "Unknown layer" in text or "Could not locate" in text or "Could not deserialize" in text:
        return f"needs Python code that is not in the file ({said}); export a FILE.py:FUNCTION that returns the model"
    return f"can't be read as a Keras model ({said}); save it again with model.save('model.keras')"


def _from_keras(model: Any, spec: TensorFlowSpec) -> Loaded:
    """Loads a Keras model. Inputs keep their names, and outputs get the names of the layers that compute them."""
    where = spec.path
    if not getattr(model, "inputs", None):
        return _subclassed(model, spec)
    inputs = [(plain_name(t.name), dtype_name(tf.as_dtype(t.dtype)), shape_of(t.shape)) for t in model.inputs]
    kinds = [tf.TensorSpec(t.shape, t.dtype, name=f"in_{i}") for i, t in enumerate(model.inputs)]
    result = tf.nest.flatten(model.outputs)
    structure = getattr(model, "_outputs_struct", None)
    if isinstance(structure, dict):
        names = [str(key) for key in structure]
    else:
        names = _distinct([t._keras_history.operation.name for t in result])
    packed = getattr(model, "_inputs_struct", None)

    def call(*tensors: Any) -> Any:
        given: Any = tensors[0] if len(tensors) == 1 else list(tensors)
        if isinstance(packed, dict):
            flat = {t.name: value for t, value in zip(model.inputs, tensors, strict=True)}
            given = {key: flat[t.name] for key, t in packed.items()}
        found = model(given, training=False)
        return [found[key] for key in structure] if isinstance(structure, dict) else tf.nest.flatten(found)

    try:
        return _from_call(call, kinds, inputs, names, keep=model)
    except Exception as error:
        raise _untraceable(where, kinds, inputs, error) from error


def _subclassed(model: Any, spec: TensorFlowSpec) -> Loaded:
    """Loads a Keras model with the inputs that the user declared. A subclass of ``keras.Model`` doesn't know its
    inputs. Calls the model once, because a subclassed model creates its weights at the first call."""
    declared = [TensorSpec.parse(text) for text in spec.declared]
    if not declared:
        raise BadInputSpec(
            f"the Keras model {spec.path} doesn't know its inputs; pass {option('inputs')} for each input, e.g. "
            f"{option('inputs', ['x:float32[batch,224,224,3]'])}"
        )
    shapes = [[None if isinstance(dim, str) else dim for dim in one.shape] for one in declared]
    kinds = [
        tf.TensorSpec(shape, tf.as_dtype(one.dtype), name=f"in_{i}")
        for i, (one, shape) in enumerate(zip(declared, shapes, strict=True))
    ]
    taken = [name for name in inspect.signature(model.call).parameters if name not in ("training", "mask")]

    def run(*tensors: Any) -> Any:
        apart = len(tensors) == 1 or len(taken) >= len(tensors)
        return model(*tensors, training=False) if apart else model(list(tensors), training=False)

    example = [tf.zeros([size or 2 for size in shape], kind.dtype) for shape, kind in zip(shapes, kinds, strict=True)]
    try:
        result = run(*example)
    except Exception as error:
        given, reason = ", ".join(map(str, declared)), one_line(error, 200)
        raise BadInputSpec(
            f"the Keras model {spec.path} fails on the inputs {given}: {reason}; correct {option('inputs')}"
        ) from error
    flat = tf.nest.flatten(result)
    many = [f"output_{i}" for i in range(len(flat))] if len(flat) > 1 else ["output"]
    names = [str(key) for key in sorted(result)] if isinstance(result, Mapping) else many
    inputs: list[Row] = [(one.name, one.dtype, list(shape)) for one, shape in zip(declared, shapes, strict=True)]
    try:
        return _from_call(lambda *tensors: tf.nest.flatten(run(*tensors)), kinds, inputs, names, keep=model)
    except Exception as error:
        raise _untraceable(spec.path, kinds, inputs, error) from error


def _untraceable(where: str, kinds: Sequence[Any], inputs: Sequence[Row], error: Exception) -> BadSource:
    """Returns the error for a model that Keras can run but can't trace, such as a model that has a bilinear
    ``UpSampling2D`` with dynamic sizes."""
    said = whole_sentences(error, 160).rstrip(".")
    if all(kind.shape.rank is None or all(kind.shape[1:].as_list()) for kind in kinds):
        return BadSource(f"Keras can't make a graph of {where} ({said}); take that layer out of the model")
    fix = "build the model with a keras.Input of fixed sizes"
    if len(inputs) == 1 and (shape := inputs[0][2]):
        sizes = ", ".join("SIZE" if size is None else str(size) for size in shape[1:]) + "," * (len(shape) == 2)
        fix = (
            f"fix the sizes: export a FILE.py:FUNCTION that takes x = keras.Input(({sizes}), name={inputs[0][0]!r}) "
            "and returns keras.Model(x, model(x))"
        )
    return BadSource(f"Keras can't make a graph of {where} while its sizes are open ({said}); {fix}")


def _python(spec: TensorFlowSpec) -> Loaded:
    _, made = load_object(spec.path, "factory")
    if not isinstance(made, tf.Module) and not hasattr(made, "get_concrete_function") and callable(made):
        try:
            made = made()
        except AccelError:
            raise
        except Exception as error:
            raise raised(spec.path, error) from error
    if type(made).__module__.startswith(("keras", "tf_keras")) or hasattr(made, "_keras_history") or _is_keras(made):
        return _from_keras(made, spec)
    if hasattr(made, "get_concrete_function"):
        try:
            made = made.get_concrete_function()
        except Exception as error:
            raise BadSource(
                f"{spec.path} is a tf.function without an input_signature; add an input_signature, or return a "
                "concrete function"
            ) from error
    if not hasattr(made, "structured_input_signature"):
        raise BadSource(
            f"the factory {spec.path} returned {type(made).__name__}; return a Keras model or a tf.function"
        )
    function = made
    arguments, keywords = function.structured_input_signature
    if any(not isinstance(t, tf.TensorSpec) for t in (*arguments, *keywords.values())):
        raise BadSource(
            f"the tf.function {spec.path} has arguments that aren't tensors; wrap it in a tf.function that takes only "
            "tensors"
        )
    parameters = [str(name) for name in getattr(function, "_arg_keywords", None) or []]
    names = [t.name or (parameters[i] if i < len(parameters) else f"input_{i}") for i, t in enumerate(arguments)]
    names += list(keywords)
    taken = [*arguments, *keywords.values()]
    inputs = [(n, dtype_name(t.dtype), shape_of(t.shape)) for n, t in zip(names, taken, strict=True)]
    kinds = [tf.TensorSpec(t.shape, t.dtype, name=f"in_{i}") for i, t in enumerate(taken)]
    structure = function.structured_outputs
    flat = tf.nest.flatten(structure)
    if isinstance(structure, Mapping):
        outputs = [str(key) for key in sorted(structure)]
    else:
        outputs = ["output"] if len(flat) == 1 else [f"output_{i}" for i in range(len(flat))]

    def call(*tensors: Any) -> Any:
        split = len(arguments)
        return tf.nest.flatten(function(*tensors[:split], **dict(zip(keywords, tensors[split:], strict=True))))

    return _from_call(call, kinds, inputs, outputs, keep=function)


def _is_keras(made: Any) -> bool:
    import keras

    return isinstance(made, keras.Model)


def _from_call(
    call: Callable[..., Any],
    kinds: Sequence[Any],
    inputs: list[Row],
    outputs: list[str],
    *,
    keep: Any,
) -> Loaded:
    """Traces ``call`` into one function. ``call`` takes a tensor for each of ``inputs`` and returns a tensor for each
    of ``outputs``, in this order. ``keep`` owns the variables, and must stay alive as long as the result."""
    traced = tf.function(call, autograph=False).get_concrete_function(*kinds)
    names = [name for name, _, _ in inputs]

    def by_name(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = traced(*(tf.constant(feeds[name]) for name in names))
        return {name: value.numpy() for name, value in zip(outputs, found, strict=True)}

    def freeze() -> Frozen:
        assert keep is not None
        return freeze_function(traced, names, outputs)

    return Loaded(call=by_name, inputs=inputs, outputs=outputs, freeze=freeze)


def _distinct(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        found.append(name if name not in found else f"{name}_{sum(n.startswith(name) for n in found)}")
    return found


_FORMS: dict[str, Callable[[TensorFlowSpec], Loaded]] = {
    "saved_model": _saved_model,
    "keras": _keras,
    "graph": load_graph,
    "checkpoint": load_checkpoint,
    "python": _python,
}
_NAMES = {
    "saved_model": "a SavedModel",
    "keras": "a Keras model",
    "graph": "a frozen graph",
    "checkpoint": "a TF1 checkpoint",
    "python": "a TensorFlow factory",
}
