"""Derives the arguments for a call of a module in memory from example inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accel.errors import BadFeeds, BadInputSpec, shortened
from accel.sources.structure import PLAIN, Template, arguments_of, describe, fill, is_array, items_of_template


class Function(torch.nn.Module):
    """Wraps a function of tensors as a module. If the function is a method of a module, the wrapper also holds that
    module with its weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            self.owner = owner

    def signature(self) -> inspect.Signature:
        """Returns the signature of ``forward``."""
        return inspect.signature(self.function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Called(torch.nn.Module):
    """A module that takes tensors in the order of ``names``, builds the arguments of ``module`` from the tensors, and
    calls ``module``."""

    def __init__(self, module: torch.nn.Module, templates: Mapping[str, Template], names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.templates = dict(templates)
        self.names = tuple(names)
        self.positional, self.rest = positional_parameters(module)

    def forward(self, *tensors: torch.Tensor) -> Any:
        named = dict(zip(self.names, tensors, strict=True))
        given = {name: fill(template, named) for name, template in self.templates.items()}
        args = [given.pop(name) for name in self.positional if name in given] if self.rest in given else []
        return self.module(*args, *given.pop(self.rest, ()), **given)


def callable_as(module: torch.nn.Module, templates: Mapping[str, Template]) -> torch.nn.Module:
    """Returns ``module`` itself if each of its arguments is a single tensor, else a module that builds the
    arguments from tensors."""
    plain = all(template == {"tensor": name} for name, template in templates.items())
    if plain and not isinstance(module, Function):
        return module
    return Called(module, templates, names_in(templates))


def uncalled(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module that ``callable_as`` wrapped, or ``module`` itself."""
    return module.module if isinstance(module, Called) else module


def names_in(templates: Mapping[str, Template]) -> list[str]:
    """Returns the names of the tensors in ``templates``, in the order of the arguments."""
    found: list[str] = []

    def walk(template: Template) -> None:
        if "tensor" in template:
            found.append(template["tensor"])
        for _, item in items_of_template(template):
            walk(item)

    for template in templates.values():
        walk(template)
    return found


def positional_parameters(module: torch.nn.Module) -> tuple[list[str], str]:
    """Returns the names of the parameters of ``forward`` that may be given by position. Also returns the name of a
    ``*args`` parameter, or "" if ``forward`` has no ``*args``."""
    if isinstance(module, torch.jit.ScriptModule):
        forward: Any = module.forward
        return [argument.name for argument in forward.schema.arguments[1:]], ""
    parameters = _signature(module).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    return [p.name for p in parameters if p.kind in kinds], rest


def _signature(module: torch.nn.Module) -> inspect.Signature:
    return module.signature() if isinstance(module, Function) else inspect.signature(module.forward)


def arguments_of_example(module: torch.nn.Module, example: Any) -> tuple[dict[str, Template], dict[str, Any]]:
    """Returns two dicts: one maps each parameter to a template of its argument, the other maps names to the tensors in
    the arguments.

    ``example`` is a tuple of positional arguments, a dict of keyword arguments, or a single argument, which is a tensor
    or a dict. Returns empty dicts if ``example`` is None. Raises ``BadInputSpec`` if ``forward`` can't be called with
    ``example``.
    """
    if example is None:
        return {}, {}
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, Mapping):
        kwargs = {str(name): value for name, value in example.items()}
        if _mismatch(module, args, kwargs) and not _mismatch(module, (kwargs,), {}):
            args, kwargs = (kwargs,), {}
    else:
        args = (example,) if is_array(example) else tuple(example)
    if why := _mismatch(module, args, kwargs):
        raise BadInputSpec(
            f"the example doesn't fit {class_name(module)}.forward: {why}; give arguments that forward takes"
        )
    positional, rest = positional_parameters(module)
    given = arguments_of(positional, args, kwargs, rest)
    templates: dict[str, Template] = {}
    tensors: dict[str, Any] = {}
    for name, value in given.items():
        alone = len(given) == 1 and isinstance(value, Mapping)  # its keys are names enough
        try:
            templates[name], found = describe(value, "" if alone else name, strict=True)
        except BadFeeds as error:
            raise BadInputSpec(f"the example can't be recorded: {error}") from error
        tensors |= found
    if not tensors:
        raise BadInputSpec("the example holds no tensor; give the arguments of forward, such as example=(x,)")
    return templates, tensors


def defaults_replaced(module: torch.nn.Module, templates: Mapping[str, Template]) -> dict[str, str]:
    """Returns the defaults of ``forward`` that the example replaced with other constants, as texts by the parameter's
    name. A call without such an argument means the default, which the exported model doesn't compute with."""
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    found = {}
    for name, parameter in _signature(module).parameters.items():
        if name not in templates or parameter.default is parameter.empty or names_in({name: templates[name]}):
            continue
        if describe(parameter.default, name)[0] != templates[name]:
            found[name] = shortened(repr(parameter.default), 40)
    return found


def left_out(module: torch.nn.Module, templates: Mapping[str, Template]) -> dict[str, Any]:
    """Returns the facts about arguments that aren't in ``templates``, or an empty dict if there are none.

    ``left_out`` maps the parameters of ``forward`` to their defaults, which the exported model computes with. Defaults
    that JSON can't hold are left out. ``order`` lists the parameters that may be given by position, if ``templates``
    has them in another order.
    """
    inner = uncalled(module)
    if isinstance(inner, torch.jit.ScriptModule):
        return {}
    parameters = _signature(inner).parameters
    if not set(templates) <= set(parameters):  # they are passed by position, so their parameters are unknown
        return {}
    found: dict[str, Template] = {}
    for name, parameter in parameters.items():
        default = parameter.default
        infinite = isinstance(default, float) and not math.isfinite(default)
        if name not in templates and isinstance(default, PLAIN) and not infinite:
            found[name] = describe(default)[0]
    order = [name for name in positional_parameters(inner)[0] if name in templates or name in found]
    order += [name for name in templates if name not in order]
    return {**({"left_out": found} if found else {}), **({"order": order} if order != list(templates) else {})}


def _mismatch(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the reason why ``forward`` can't take these arguments, or "" if ``forward`` can take them."""
    if isinstance(module, torch.jit.ScriptModule):
        return ""
    try:
        _signature(module).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def unwrapped(model: Any) -> torch.nn.Module:
    """Returns the module inside the wrappers of torch.compile and data parallelism. A function is wrapped as a
    module."""
    while True:
        if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):  # from torch.compile
            model = model._orig_mod
        else:
            return model if isinstance(model, torch.nn.Module) else Function(model)


def class_name(module: torch.nn.Module) -> str:
    """Returns the name of the module's class, or the name of the function that the module wraps."""
    if isinstance(module, Function):
        return getattr(module.function, "__qualname__", type(module.function).__qualname__).rpartition(">.")[2]
    if isinstance(module, torch.jit.ScriptModule):
        return str(getattr(module, "original_name", "ScriptModule"))
    return type(module).__qualname__.rpartition(">.")[2]
