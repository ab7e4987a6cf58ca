"""Calls a module by input names and returns its outputs by name, for any signature of ``forward``."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel.errors import BadInputSpec, BadSource, one_line
from accel.signature import Signature, TensorSpec, shapes_of
from accel.spelling import options

from ..output_specs import far_runs, output_specs, probe_cases, same_output, step_advice

if TYPE_CHECKING:
    import numpy as np

# Layers that use batch statistics or random numbers in training mode only.
_OTHER_IN_TRAINING = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)


def to_tensor(value: np.ndarray) -> torch.Tensor:
    """Returns the array as a tensor. The tensor shares the memory of a contiguous array. Converts bfloat16 bit by
    bit."""
    import numpy as np

    if str(value.dtype) == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(value).view(np.int16)).view(torch.bfloat16)
    if not value.flags.writeable:  # the warning is hidden, because callers don't write to the tensor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.from_numpy(np.ascontiguousarray(value))
    return torch.from_numpy(np.ascontiguousarray(value))


def to_array(value: torch.Tensor) -> np.ndarray:
    """Returns the tensor as a NumPy array, with bfloat16 as the dtype of ml_dtypes."""
    import ml_dtypes

    value = value.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: np.ndarray = value.numpy()
    return array


def flatten(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Returns the tensors in a result of ``forward`` by name.

    Names are keys of dicts and fields of dataclasses and named tuples. Other results are named ``output``, or
    ``output_0``, ``output_1``... for several tensors. Leaves out None and plain numbers.
    """
    if isinstance(value, torch.Tensor):
        return {prefix or "output": value}
    if isinstance(value, Mapping):  # transformers' ModelOutput is a Mapping
        items = [(str(key), item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = list(zip(value._fields, value, strict=True))
    elif isinstance(value, tuple | list):
        tensors = [v for v in value if v is not None]
        if len(tensors) == 1:
            return flatten(tensors[0], prefix)
        items = [(str(i) if prefix else f"output_{i}", item) for i, item in enumerate(value)]
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for name, item in items:
        if item is not None:
            found |= flatten(item, f"{prefix}_{name}" if prefix else name)
    return found


class NamedModule(torch.nn.Module):
    """A module that takes tensors in the order of ``inputs`` and returns a tuple in the order of ``outputs``.

    Passes inputs by keyword if ``forward`` has parameters with these names, else by position. Raises ``BadInputSpec``
    if one of several inputs has a name that ``forward`` lacks.
    """

    def __init__(self, module: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str] = ()) -> None:
        super().__init__()
        self.module = module
        self.names = tuple(inputs)
        self.outputs = tuple(outputs)
        self.keywords = _by_keyword(module, self.names)
        # Whether forward writes to its inputs, or None before the first run.
        self.writes_inputs: bool | None = None

    def by_name(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        named = dict(zip(self.names, tensors, strict=True))
        found = flatten(self.module(**named) if self.keywords else self.module(*tensors))
        if self.outputs:
            return dict(zip(self.outputs, found.values(), strict=False))
        return found

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.by_name(*tensors).values())


def script_parameters(module: torch.jit.ScriptModule) -> list[str]:
    """Returns the names of the parameters of a TorchScript module's ``forward``."""
    forward: Any = module.forward
    return [argument.name for argument in forward.schema.arguments[1:]]


def _by_keyword(module: torch.nn.Module, names: Sequence[str]) -> bool:
    """Tells whether all inputs are parameters of ``forward``, so that they can be passed by keyword.

    A single input may have any name and is passed by position. Several inputs are passed by position only if
    ``forward`` takes ``*args``. Raises ``BadInputSpec`` if one of several inputs has a name that ``forward`` doesn't
    have, because inputs passed by position could be mixed up.
    """
    if isinstance(module, torch.jit.ScriptModule):
        known, anything = script_parameters(module), False
    else:
        parameters = inspect.signature(module.forward).parameters
        known = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        anything = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())
    if set(names) <= set(known):
        return True
    if len(names) > 1 and not anything:
        wrong = next(name for name in names if name not in known)
        raise BadInputSpec(
            f"forward has no parameter {wrong!r}; "
            f"name the inputs like its parameters: {', '.join(known) or 'there are none'}"
        )
    return False


def run_named(module: NamedModule, signature: Signature, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs one forward pass from numpy to numpy, without gradients. A model that writes to its inputs (``x -= mean``)
    gets copies, so ``feeds`` never change."""
    with torch.inference_mode(False):  # inference tensors don't count writes
        tensors = [to_tensor(feeds[spec.name]) for spec in signature.inputs]
        if module.writes_inputs is not False:
            tensors = [tensor.clone() for tensor in tensors]
    before = [tensor._version for tensor in tensors]
    with torch.inference_mode():
        found = module.by_name(*tensors)
        module.writes_inputs = module.writes_inputs or [tensor._version for tensor in tensors] != before
        return {name: to_array(value) for name, value in found.items()}


def in_training(module: torch.nn.Module) -> str:
    """Returns a message about dropout and batch norm layers that are in training mode after a run, although ``module``
    was set to evaluation mode. Returns "" if no layer is in training mode."""
    names = [name for name, part in module.named_modules() if part.training and isinstance(part, _OTHER_IN_TRAINING)]
    if not names:
        return ""
    first = names[0].removeprefix("module.") or type(module).__name__
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{first!r}{more} ({type(module.get_submodule(names[0])).__name__}) runs in training mode, because the model "
        "calls train() itself; take that call out of forward, so that eval() holds"
    )


def discover_outputs(
    module: torch.nn.Module, signature: Signature, names: Sequence[str], where: str
) -> tuple[TensorSpec, ...]:
    """Runs the module at several sizes and returns the specs of its outputs (names, dtypes and dims). ``names`` lists
    names for the outputs in order. ``where`` names the source in messages.

    Raises ``BadSource`` if the module fails at a size of the signature, has random outputs or returns no tensor.
    """
    named = NamedModule(module, [spec.name for spec in signature.inputs])
    cases = probe_cases(signature)
    runs = []
    for sizes in cases:
        feeds = signature.example_inputs(**sizes)
        try:
            runs.append(run_named(named, signature, feeds))
        except Exception as error:
            shapes = shapes_of(feeds)
            reason = one_line(error, 200)
            if training := in_training(module):
                raise BadSource(f"{where} fails in PyTorch on {shapes}: {reason}; {training}") from error
            fix = step_advice(signature, partial(run_named, named, signature))
            raise BadSource(
                f"{where} fails in PyTorch on {shapes}: {reason}{fix or '; correct ' + options('inputs', 'dims')}"
            ) from error
    far, found = far_runs(signature, partial(run_named, named, signature))
    first = runs[0]
    again = run_named(named, signature, signature.example_inputs(**cases[0]))
    for name, value in first.items():
        if not same_output(value, again[name]):
            why = in_training(module) or (
                "forward draws random numbers, or changes a buffer that it computes with; take that out of the "
                "model, for example a dropout with training=True"
            )
            raise BadSource(f"the output {name!r} of {where} differs from run to run on the same inputs: {why}")
    if not first:
        raise BadSource(f"{where} returns no tensor; let forward return a tensor, or a tuple or dict of tensors")
    if names and len(names) != len(first):
        raise BadInputSpec(
            f"{where} returns {len(first)} tensors ({', '.join(first)}) and {len(names)} names are given; "
            "give one name for each tensor"
        )
    renamed = dict(zip(first, names, strict=False))
    return output_specs(signature, [*cases, *far], [*runs, *found], where, renamed)
