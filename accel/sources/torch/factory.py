"""Calls a function of the user, such as ``package.module:factory`` or ``file.py:factory``, and opens the PyTorch module
that the function returns."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel.errors import AccelError, BadSource
from accel.signature import Signature, TensorSpec

from ..declare import Declaration, input_example
from ..pipeline import Pipeline
from ..python_object import load_object, raised
from .arguments import called_as_usual, parameters_of
from .call import NamedModule, flatten, run_named
from .found import Found
from .live import capture, found_called, open_captured
from .probe.integer_bounds import with_table_ranges
from .weights import load_weights

# The largest number of runs that look for a suggestion. Runs with unsuitable inputs mostly fail at the first layer.
_TRIES = 64


class MadeByTensorFlow(BadSource):
    """Raised if a factory returns a TensorFlow model although the factory's file doesn't look like TensorFlow code."""


def open_factory(spec: str, weights: Path | None, weights_dtype: str = "") -> Found:
    """Calls the factory that ``spec`` names and loads ``weights`` into the module that the factory returns. Rounds the
    weights to ``weights_dtype``.

    Raises ``BadSource`` if the factory does not exist, raises an error, or returns no module.
    """
    code, factory = load_object(spec, "factory")
    declaration: Declaration | None = getattr(factory, "__accel__", None)
    made = call_factory(factory, spec)
    example: Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor | None = None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module):
        made, example = made
    if any(kind.__module__.startswith(("keras.", "tensorflow.")) for kind in type(made).__mro__):
        raise MadeByTensorFlow(f"the factory {spec} returned {type(made).__name__}, which is a model of TensorFlow")
    if not isinstance(made, torch.nn.Module):
        raise BadSource(
            f"the factory {spec} returned {type(made).__name__}; return an nn.Module, or an nn.Module and its example "
            "inputs"
        )
    path = Path(getattr(code, "__file__", "") or spec)
    files = [path] if path.is_file() else []
    checkpoint = load_weights(made, weights, weights_dtype) if weights is not None else None
    if checkpoint is not None:
        files = [*checkpoint.files, *files]
    if declaration and declaration.weights:
        files = [*(Path(f) for f in declaration.weights()), *files]
    if isinstance(made, Pipeline):
        return _found_pipeline(made, example, spec, tuple(dict.fromkeys(files)), declaration)
    folder = getattr(getattr(made, "config", None), "_name_or_path", "")
    if folder and Path(folder).is_dir():  # the path of a transformers model that the factory loaded
        files = [*sorted(Path(folder).glob("*.safetensors")), *files]
    if example is not None and not _is_plain(made, example, declaration):
        called = found_called(made, example, path)
        return _declared(replace(called, files=tuple(dict.fromkeys(files)), checkpoint=checkpoint), declaration)
    tensors = {} if declaration else example_tensors(made, example)
    inputs = declaration.inputs if declaration else specs_from_example(tensors)
    return Found(
        module=made,
        path=path,
        files=tuple(dict.fromkeys(files)),
        inputs=inputs,
        outputs=declaration.outputs if declaration else (),
        dims=declaration.dims if declaration else None,
        checkpoint=checkpoint,
        tensors=tensors,
    )


def _found_pipeline(
    pipeline: Pipeline, example: Any, spec: str, files: tuple[Path, ...], declaration: Declaration | None
) -> Found:
    """Opens the pipeline that a factory returned. The factory also has to return example arguments, because a
    pipeline's function may take any arguments."""
    if example is None:
        raise BadSource(
            f"{spec} returned a pipeline without an example; return the pipeline and its example arguments: "
            "return pipeline, (x,)"
        )
    return _declared(replace(open_captured(capture(pipeline, example)), files=files), declaration)


def _declared(found: Found, declaration: Declaration | None) -> Found:
    """Puts the inputs, outputs and dims that the factory declares into ``found``."""
    if declaration is None:
        return found
    forms: tuple[Signature, ...] = () if declaration.inputs else found.forms
    return replace(found, forms=forms, inputs=declaration.inputs, outputs=declaration.outputs, dims=declaration.dims)


def _is_plain(module: torch.nn.Module, example: Any, declaration: Declaration | None) -> bool:
    """Tells whether the example holds one tensor for each of the first parameters of ``forward``, or tensors by the
    names of parameters, and whether ``NamedModule`` calls the module as the example does. A single tensor of another
    name is plain too, unless ``forward`` takes it in a dict. An example isn't needed if the factory declares parameters
    of ``forward``."""
    if isinstance(example, torch.Tensor):
        return True
    if declaration and {spec.name for spec in declaration.inputs} <= set(forward_parameters(module)):
        return True
    if not isinstance(example, Mapping | list | tuple):
        return False
    values = list(example.values() if isinstance(example, Mapping) else example)
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    names = forward_parameters(module)
    if not isinstance(example, Mapping):
        return len(values) <= len(names) and called_as_usual(module, names[: len(values)], len(values))
    if set(example) <= set(names):
        return called_as_usual(module, list(example), 0)
    if len(values) > 1:
        return False
    with contextlib.suppress(Exception), torch.inference_mode():  # a model may raise any type of error
        module.eval()(*(value.clone() for value in values))
        return True
    return False


def call_factory(factory: Callable[[], Any], spec: str) -> Any:
    """Calls ``factory`` and returns the result. If ``factory`` is already a module, returns the module itself.

    If the factory raises an error, raises ``BadSource`` with the line of the user's code. Also raises ``BadSource`` if
    the factory needs an argument.
    """
    if isinstance(factory, torch.nn.Module):
        return factory
    if needed := _needed_arguments(factory):
        raise BadSource(
            f"the factory {spec} needs the argument {needed[0]!r}, but accel calls a factory without arguments; give "
            f"{' and '.join(needed)} a default, or write a function without arguments that calls it"
        )
    try:
        return factory()
    except AccelError:
        raise
    except (Exception, SystemExit) as error:
        raise raised(spec, error) from error


def _needed_arguments(factory: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments of ``factory`` that have no default."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some functions in C have no signature
        return []
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is inspect.Parameter.empty and one.kind not in rest]


def example_tensors(module: torch.nn.Module, example: Any) -> Mapping[str, torch.Tensor]:
    """Returns the tensors of the example arguments of ``module`` by name."""
    if example is None:
        return {}
    if isinstance(example, torch.Tensor):
        example = (example,)
    if not isinstance(example, Mapping):
        example = dict(zip(forward_parameters(module), example, strict=False))
    return flatten(example)


def specs_from_example(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Returns the specs of example tensors. The first dim of each tensor is dynamic and called ``batch``."""
    specs = []
    for name, tensor in tensors.items():
        shape = ("batch", *tensor.shape[1:]) if tensor.ndim else ()
        seen = None
        if not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.numel():
            seen = (int(tensor.min()), int(tensor.max()))
        specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), shape, seen=seen))
    return tuple(specs)


def forward_parameters(module: torch.nn.Module) -> list[str]:
    """Returns the names of the parameters of ``forward``."""
    if isinstance(module, torch.jit.ScriptModule):
        return parameters_of(module)
    return [n for n, p in inspect.signature(module.forward).parameters.items() if p.kind is not p.VAR_KEYWORD]


def required_parameters(module: torch.nn.Module) -> list[str]:
    """Returns the names of the parameters of ``forward`` that have no default. If all parameters have defaults, returns
    the first name."""
    names = forward_parameters(module)
    if isinstance(module, torch.jit.ScriptModule):
        return names
    parameters = inspect.signature(module.forward).parameters
    needed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [n for n in names if parameters[n].default is inspect.Parameter.empty and parameters[n].kind in needed]
    return required or names[:1]


def suggested_inputs(module: torch.nn.Module) -> tuple[str, ...]:
    """Returns example declarations of the inputs of ``forward``, for a message.

    Returns the first declarations that fit the layers and let the model run, or declarations with gaps for several
    inputs (see ``input_example``). Tries the first layer for a single input, and all layers for several inputs.
    """
    names = required_parameters(module) or ["x"]
    layers = dict.fromkeys(filter(None, map(_kinds_of_input, module.modules())))
    kinds = next(iter(layers), ()) if len(names) == 1 else tuple(dict.fromkeys(kind for one in layers for kind in one))
    module.eval()
    for given in itertools.islice(itertools.product(kinds, repeat=len(names)), _TRIES):
        specs = (TensorSpec.parse(f"{name}:{kind}") for name, kind in zip(names, given, strict=True))
        signature = Signature(tuple(specs))
        with contextlib.suppress(Exception), torch.inference_mode():  # a model may raise any type of error
            run = partial(run_named, NamedModule(module, names), signature)
            run(signature.example_inputs())
            return tuple(map(str, with_table_ranges(signature, run).inputs))
    if len(names) == 1:
        return (f"{names[0]}:float32[batch,3,224,224]",)
    return tuple(map(input_example, names))


def _kinds_of_input(layer: torch.nn.Module) -> tuple[str, ...]:
    """Returns the usual input dtypes and shapes of a model that begins with the layer ``layer``."""
    if isinstance(layer, torch.nn.Embedding):
        return ("int64[batch,length]", "int64[batch]")
    if isinstance(layer, torch.nn.Conv1d):
        return (f"float32[batch,{layer.in_channels},16000]", "float32[batch,16000]")
    if isinstance(layer, torch.nn.Conv2d):
        return tuple(f"float32[batch,{layer.in_channels},{size},{size}]" for size in (224, 32, 28))
    if isinstance(layer, torch.nn.Conv3d):
        return (f"float32[batch,{layer.in_channels},16,112,112]",)
    if isinstance(layer, torch.nn.Linear):
        return (f"float32[batch,{layer.in_features}]", f"float32[batch,length,{layer.in_features}]")
    if isinstance(layer, torch.nn.RNNBase):
        first, second = ("batch", "length") if layer.batch_first else ("length", "batch")
        return (f"float32[{first},{second},{layer.input_size}]",)
    return ()
