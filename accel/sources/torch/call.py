"""Calls a module by input names and returns its outputs by name, for any signature of ``forward``."""

from __future__ import annotations

import contextlib
import inspect
import math
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel import kept_outputs
from accel.errors import BadFeeds, BadInputSpec, BadSource, one_line
from accel.kept_outputs import Run
from accel.signature import Feeds, Signature, TensorSpec, shapes_of
from accel.sources.python_object import place_in_user_code
from accel.sources.structure import Template, constants_in, describe
from accel.spelling import options

from ..output_specs import far_runs, output_specs, probe_cases, same_output, step_advice
from .arguments import Called, parameters_of, usually_by_position
from .probe.changed_state import changes_words
from .probe.checked_bags import checked_bags
from .probe.fitting_inputs import axes_of_one_size, fitting_inputs
from .probe.gradients import computes_gradients
from .probe.integer_bounds import smaller_tables
from .probe.random_draws import random_draws
from .probe.readable import unreadable

if TYPE_CHECKING:
    import numpy as np

# The number of additional random inputs for a model whose output sizes may depend on the values of its inputs. The gate
# of an export runs the model on the first inputs, too. The other inputs are small, because a large model may take a
# second for each run.
_SEEDS = 8
_OF_THE_GATE = 2
_SMALL_SIZE = 8

# Layers that use batch statistics or random numbers in training mode only.
_OTHER_IN_TRAINING = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)


def to_tensor(value: np.ndarray) -> torch.Tensor:
    """Returns the array as a tensor. If the array is contiguous, the tensor shares the array's memory. A bfloat16
    tensor has the same bits as the array."""
    import numpy as np

    value = np.asarray(value, order="C")  # np.ascontiguousarray would add a dim to a scalar
    if str(value.dtype) == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    if not value.flags.writeable:  # torch warns about read-only arrays, but no caller writes to the tensor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.from_numpy(value)
    return torch.from_numpy(value)


def to_array(value: torch.Tensor) -> np.ndarray:
    """Returns the tensor as a NumPy array. A bfloat16 tensor becomes an array with the bfloat16 dtype of ml_dtypes.
    Raises ``BadFeeds`` for a tensor without values, and for a tensor that isn't dense."""
    import ml_dtypes

    try:
        dense = value.detach().cpu().contiguous()
        bits: np.ndarray = (dense.view(torch.int16) if dense.dtype == torch.bfloat16 else dense).numpy()
    except RuntimeError as error:
        if why := unreadable(value):
            raise BadFeeds(why) from error
        raise
    return bits.view(ml_dtypes.bfloat16) if dense.dtype == torch.bfloat16 else bits


def flatten(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Maps names to the tensors in a result of ``forward`` (see ``accel.sources.structure.describe``)."""
    return {name: one for name, one in describe(value, prefix)[1].items() if isinstance(one, torch.Tensor)}


class NamedModule(torch.nn.Module):
    """A module that takes tensors in the order of ``inputs`` and returns a tuple in the order of ``outputs``.

    If ``forward`` has parameters with the names of all inputs, passes the first ones by position and the others by
    keyword (see ``usually_by_position``). Otherwise, passes all inputs by position. Raises ``BadInputSpec`` if there
    are several inputs and ``forward`` has no parameter for one of them.
    """

    def __init__(self, module: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str] = ()) -> None:
        super().__init__()
        self.module = module
        self.names = tuple(inputs)
        self.outputs = tuple(outputs)
        keywords = _by_keyword(module, self.names)
        # The inputs that are passed by position, in order.
        self.order = module.names if isinstance(module, Called) and len(self.names) > 1 else self.names
        if keywords:
            self.order = tuple(usually_by_position(module, self.names))
        # True if forward writes to its inputs, or None before the first run.
        self.writes_inputs: bool | None = None

    def call(self, *tensors: torch.Tensor) -> Any:
        """Calls the module and returns its result unchanged, for example a dataclass."""
        named = dict(zip(self.names, tensors, strict=True))
        return self.module(*[named.pop(name) for name in self.order], **named)

    def by_name(self, result: Any) -> dict[str, torch.Tensor]:
        """Maps names to the tensors in ``result``, which ``call`` returned."""
        found = flatten(result)
        return dict(zip(self.outputs, found.values(), strict=False)) if self.outputs else found

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.by_name(self.call(*tensors)).values())


def _by_keyword(module: torch.nn.Module, names: Sequence[str]) -> bool:
    """Tells whether all inputs are parameters of ``forward``, so that they can be passed by keyword.

    A single input may have any name and is passed by position. Several inputs are passed by position only if
    ``forward`` takes ``*args``. Raises ``BadInputSpec`` if one of several inputs matches no parameter of ``forward``,
    because inputs in an unknown order could be mixed up.
    """
    if isinstance(module, torch.jit.ScriptModule):
        known, anything = parameters_of(module), False
    elif isinstance(module, Called):
        if len(names) > 1 and set(names) != set(module.names):
            raise BadInputSpec(
                f"the inputs are called {', '.join(names)}, but the example's tensors are called "
                f"{', '.join(module.names)}; declare the inputs by these names"
            )
        return False
    else:
        parameters = inspect.signature(module.forward).parameters
        known = parameters_of(module)
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
    """Runs one forward pass without gradients on NumPy arrays, and returns NumPy arrays (see ``run_own``)."""
    with torch.inference_mode():
        return {name: to_array(value) for name, value in module.by_name(run_own(module, signature, feeds)).items()}


def run_own(module: NamedModule, signature: Signature, feeds: Mapping[str, np.ndarray]) -> Any:
    """Runs one forward pass without gradients and returns the module's result unchanged. A model that writes to its
    inputs (``x -= mean``) gets copies, so ``feeds`` never change."""
    with torch.inference_mode(False):  # an inference tensor has no ``_version`` (the number of writes)
        tensors = [to_tensor(feeds[spec.name]) for spec in signature.inputs]
        if module.writes_inputs is not False:
            tensors = [tensor.clone() for tensor in tensors]
    before = [tensor._version for tensor in tensors]
    small = any(tensor.numel() <= 1 for tensor in tensors)  # the checks of larger inputs would slow down a benchmark
    with torch.inference_mode(), checked_bags(module) if small else contextlib.nullcontext():
        result = module.call(*tensors)
        module.writes_inputs = module.writes_inputs or [tensor._version for tensor in tensors] != before
        return result


class Runs:
    """Runs a module that has no sha256 yet, and keeps the outputs for later runs on the same inputs (see
    ``accel.kept_outputs``)."""

    def __init__(self) -> None:
        self.name = f"opened {uuid.uuid4().hex}"

    def of(
        self, module: NamedModule, signature: Signature, *, again: bool = False
    ) -> Callable[[Feeds], dict[str, np.ndarray]]:
        """Returns a function that runs ``module`` on inputs of ``signature`` (see ``run_named``). With ``again``, the
        function runs the module even if the outputs are known, so that the run can be watched."""

        def run(feeds: Feeds) -> dict[str, np.ndarray]:
            known = Run.of(self.name, "torch", feeds)
            found = None if again else kept_outputs.find(known)
            if found is None:
                with checked_bags(module):
                    found = run_named(module, signature, feeds)
                kept_outputs.keep(known, found)
            return found

        return run


def in_training(module: torch.nn.Module) -> str:
    """Returns a message about dropout and batch norm layers that run in training mode although ``module`` was set to
    evaluation mode. Returns "" if no layer runs in training mode."""
    names = [name for name, part in module.named_modules() if part.training and isinstance(part, _OTHER_IN_TRAINING)]
    if not names:
        return ""
    first = names[0].removeprefix("module.") or type(module).__name__
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{first!r}{more} ({type(module.get_submodule(names[0])).__name__}) runs in training mode, because the model "
        "calls train() itself; take that call out of forward, so that eval() holds"
    )


class ByValue(TorchDispatchMode):
    """Sets ``seen`` if an operator returns a Python number (like ``item``), or a tensor with a size that depends on
    values (like ``nonzero``). Also sets ``seen`` if an operator of a library other than torch runs, or an operator that
    takes functions (like ``torch.cond``)."""

    supports_higher_order_operators = True
    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
        own = func.namespace in ("aten", "prim", "prims")
        self.seen = self.seen or not own or any(tag in func.tags for tag in tags)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class DiscoveredOutputs:
    """The outputs of a module. ``specs`` has their names, dtypes and dims, and ``result`` the structure of the module's
    result."""

    specs: tuple[TensorSpec, ...]
    result: Template


def discover_outputs(
    module: torch.nn.Module, signature: Signature, names: Sequence[str], where: str, kept: Runs
) -> DiscoveredOutputs:
    """Runs the module at several sizes, and returns its outputs. ``names`` lists the names that the user gave to the
    outputs, in order. ``where`` names the source in messages. ``kept`` has the outputs of earlier runs.

    Raises ``BadSource`` if the module fails at a size of the signature, has random outputs or returns no tensor.
    """
    named = NamedModule(module, [spec.name for spec in signature.inputs])
    run = kept.of(named, signature)
    cases = probe_cases(signature)
    inputs, runs = [], []
    for sizes in cases:
        feeds = signature.inputs_at(sizes)
        inputs.append(feeds)
        try:
            runs.append(run(feeds))
        except BadFeeds as error:
            raise BadSource(f"an output of the model {where} can't be read: {error}") from error
        except Exception as error:
            shapes = shapes_of(feeds)
            reason = one_line(error, 200)
            tensors = [to_tensor(value).clone() for value in feeds.values()]
            if computes_gradients(lambda tensors=tensors: named.call(*tensors)):  # type: ignore[misc]
                raise BadSource(
                    f"the model {where} computes gradients in forward{place_in_user_code(error)}, which PyTorch can't "
                    "export; write the gradient with other operators, or return what it is computed from"
                ) from error
            if training := in_training(module):
                raise BadSource(
                    f"the model {where} fails in PyTorch on the inputs {shapes}: {reason}; {training}"
                ) from error
            fix = smaller_tables(signature, run) or step_advice(signature, run)
            fix = fix or fitting_inputs(module, signature, run) or axes_of_one_size(signature, run)
            raise BadSource(
                f"the model {where} fails in PyTorch on the inputs {shapes}: {reason}"
                f"{fix or '; correct ' + options('inputs', 'dims')}"
            ) from error
    far, found = far_runs(signature, run)
    first = runs[0]
    with ByValue() as by_value:
        result = run_own(named, signature, inputs[0])
    if by_value.seen:  # the size of an output may depend on the values of the inputs
        for number in range(1, _SEEDS + 1):
            sizes = cases[0] if number <= _OF_THE_GATE else _small(signature)
            with contextlib.suppress(Exception):  # the gates report an error
                found.append(run(signature.repeated_inputs(number, sizes)))
                far.append(sizes)
    again = {name: to_array(value) for name, value in named.by_name(result).items()}
    for name, value in first.items():
        if not same_output(value, again[name]):
            lines = random_draws(lambda: run_named(named, signature, inputs[0]))
            changes = "" if lines else changes_words(module, lambda: run_named(named, signature, inputs[0]))
            drawn = (
                f"forward draws random numbers at {lines}; make them an input of forward, or take them out of the "
                "model, for example a dropout with training=True"
                if lines
                else "forward draws random numbers, or changes a buffer that it computes with; take that out of the "
                "model, for example a dropout with training=True"
            )
            why = in_training(module) or changes or drawn
            raise BadSource(f"the output {name!r} of {where} differs from run to run on the same inputs: {why}")
    if not first:
        raise BadSource(
            f"the model {where} returns no tensor; let forward return a tensor, or a tuple or dict of tensors"
        )
    if names and len(names) != len(first):
        raise BadInputSpec(
            f"the model {where} returns {len(first)} tensors ({', '.join(first)}), but {len(names)} names are given; "
            "give one name for each tensor"
        )
    # A model may return an input as an output, as sentence-transformers models do. The output then needs a name that
    # differs from the input's name.
    taken = {spec.name for spec in signature.inputs}
    renamed = dict(zip(first, names, strict=False)) or {name: f"{name}_out" for name in first if name in taken}
    structure = describe(result, names=renamed)[0]
    _check_constants(named, signature, structure, where)
    specs = output_specs(signature, [*cases, *far], [*runs, *found], where, renamed)
    return DiscoveredOutputs(specs=specs, result=structure)


def _check_constants(named: NamedModule, signature: Signature, result: Template, where: str) -> None:
    """Raises ``BadSource`` if a constant in ``result``, such as a Python number, is another at other sizes or values
    of the inputs, because an exported model always returns the same constant. Also raises for NaN and infinity."""
    constants = constants_in(result)
    if not constants:
        return
    usual, *others = probe_cases(signature)
    found = constants
    for feeds in [*(signature.inputs_at(sizes) for sizes in others), signature.repeated_inputs(1, usual)]:
        with contextlib.suppress(Exception):  # the gates report an error
            found = constants_in(describe(run_own(named, signature, feeds))[0])
        for name, value in constants.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
                raise BadSource(
                    f"the output {name!r} of {where} is the Python value {value}, which a manifest can't hold; return "
                    f"torch.tensor(float('{value}')), or leave this output out"
                )
            if (other := found.get(name)) != value:
                raise BadSource(
                    f"the output {name!r} of {where} is the Python value {value!r} on one input and {other!r} on "
                    f"another ({shapes_of(feeds)}), but an exported model always returns the same; return a tensor, "
                    "such as torch.tensor(x.shape[0]) for a size, or leave this output out"
                )


def _small(signature: Signature) -> dict[str, int]:
    """Returns a small size for each dim. A size of 1 may hide that the values determine an output's size."""
    return {dim: min(r.opt, r.up(max(r.min, _SMALL_SIZE))) for dim, r in signature.dims.items()}
