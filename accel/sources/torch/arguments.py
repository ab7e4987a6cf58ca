"""Derives the arguments for a call of a module in memory from example inputs."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel.errors import BadFeeds, BadInputSpec, shortened
from accel.sources.structure import PLAIN, Template, arguments_of, describe, fill, is_array, items_of_template


class Wrapper(torch.nn.Module):
    """A module whose ``forward`` takes any arguments and passes them on."""

    def signature(self) -> inspect.Signature:
        """Returns the signature of the wrapped call."""
        raise NotImplementedError


class Function(Wrapper):
    """Wraps a function of tensors as a module. If the function is a method of a module, the wrapper also holds that
    module with its weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            self.owner = owner

    def signature(self) -> inspect.Signature:
        try:
            return inspect.signature(self.function)
        except ValueError:  # functions in C, such as torch.sin, tell no signature
            kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            return inspect.Signature(list(map(inspect.Parameter, ("inputs", "named"), kinds)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, as an example that gives some by position and some by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Called(torch.nn.Module):
    """A module that takes tensors in the order of ``names``, builds the arguments of ``module`` from the tensors, and
    calls ``module``.

    ``by_position`` is the number of arguments that the example gave by position. If it is None, all arguments are given
    by position that can be. The others are given by name.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        templates: Mapping[str, Template],
        names: Sequence[str],
        by_position: int | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.templates = dict(templates)
        self.names = self._own_names = tuple(names)
        self.rest = positional_parameters(module)[1]
        self.positional = leading(module, self.templates)[:by_position]

    def rename(self, names: Sequence[str]) -> None:
        """Renames the tensors. ``names`` has the order of the old names."""
        self.names = tuple(names)

    def forward(self, *tensors: torch.Tensor) -> Any:
        named = dict(zip(self._own_names, tensors, strict=True))
        given = {name: fill(template, named) for name, template in self.templates.items()}
        args = [given.pop(name) for name in self.positional]
        return self.module(*args, *given.pop(self.rest, ()), **given)


def callable_as(
    module: torch.nn.Module, templates: Mapping[str, Template], by_position: int | None = None
) -> torch.nn.Module:
    """Returns ``module`` itself if each of its arguments is a single tensor, and if ``NamedModule`` calls the module as
    the example does. Otherwise, returns a module that builds the arguments from tensors (see ``Called``)."""
    plain = all(template == {"tensor": name} for name, template in templates.items())
    if plain and not isinstance(module, Function) and called_as_usual(module, list(templates), by_position):
        return module
    return Called(module, templates, names_in(templates), by_position)


def leading(module: torch.nn.Module, names: Collection[str]) -> list[str]:
    """Returns the first parameters of ``forward`` that may be given by position, up to the first one that isn't in
    ``names``."""
    return list(itertools.takewhile(lambda name: name in names, positional_parameters(module)[0]))


def usually_by_position(module: torch.nn.Module, names: Collection[str]) -> list[str]:
    """Returns the parameters that are given by position if no example says how the module is called. A hook of a module
    sees arguments by position, unless it asks for the others. Models of transformers are called by name."""
    found = leading(module, names)
    return found[: _positional_only(module)] if hasattr(module, "main_input_name") else found


def called_as_usual(module: torch.nn.Module, names: Sequence[str], by_position: int | None) -> bool:
    """Tells whether a call of ``module`` that gives the first ``by_position`` of its arguments by position is the same
    as the call that ``usually_by_position`` tells."""
    if not set(names) <= set(parameters_of(module)):  # the names are keys of **kwargs
        return by_position is None
    usual = usually_by_position(module, names)
    return by_position in (None, len(usual)) or not _sees_the_call(module)


def _sees_the_call(module: torch.nn.Module) -> bool:
    """Tells whether code around ``forward`` may tell an argument by position from an argument by name: a hook, a
    decorator or a ``__call__`` of the class. The decorators of transformers take both for the same."""
    if module._forward_pre_hooks or module._forward_hooks or type(module).__call__ is not torch.nn.Module.__call__:
        return True
    return hasattr(module.forward, "__wrapped__") and not hasattr(module, "main_input_name")


def _positional_only(module: torch.nn.Module) -> int:
    """Returns the number of parameters of ``forward`` that can't be given by name."""
    if isinstance(module, torch.jit.ScriptModule):
        return 0
    kinds = [parameter.kind for parameter in _signature(module).parameters.values()]
    return kinds.count(inspect.Parameter.POSITIONAL_ONLY)


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
        return parameters_of(module), ""
    parameters = _signature(module).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    return [p.name for p in parameters if p.kind in kinds], rest


def parameters_of(module: torch.nn.Module) -> list[str]:
    """Returns the names of the parameters of ``forward`` that stand for one argument each."""
    if isinstance(module, torch.jit.ScriptModule):
        forward: Any = module.forward
        return [argument.name for argument in forward.schema.arguments[1:]]
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in _signature(module).parameters.items() if one.kind not in several]


def _signature(module: torch.nn.Module) -> inspect.Signature:
    return module.signature() if isinstance(module, Wrapper) else inspect.signature(module.forward)


def arguments_of_example(
    module: torch.nn.Module, example: Any, *, may_be_empty: bool = False
) -> tuple[dict[str, Template], dict[str, Any], int]:
    """Returns two dicts and a number: one dict maps each parameter to a template of its argument, the other maps names
    to the tensors in the arguments. The number tells how many parameters get their arguments by position.

    ``example`` is a tuple of positional arguments, a dict of keyword arguments, both (see ``Arguments``), or a single
    argument, which is a tensor or a dict. Returns empty dicts if ``example`` is None. Raises ``BadInputSpec`` if
    ``forward`` can't be called with ``example``, or if ``example`` holds no tensor, unless it ``may_be_empty``.
    """
    if example is None:
        return {}, {}, 0
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, Arguments):
        args, kwargs = example.args, dict(example.kwargs)
    elif isinstance(example, Mapping):
        kwargs = {str(name): value for name, value in example.items()}
        if _mismatch(module, args, kwargs) and not _mismatch(module, (kwargs,), {}):
            args, kwargs = (kwargs,), {}
        else:
            alone = positional_parameters(module)[0][: _positional_only(module)]
            args = tuple(kwargs.pop(name) for name in itertools.takewhile(lambda name: name in kwargs, alone))
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
    taken: set[str] = set()
    for name, value in given.items():
        single = len(given) == 1 and isinstance(value, Mapping)  # its keys are names enough
        try:
            templates[name], found = describe(value, "" if single else name, strict=True, taken=taken)
        except BadFeeds as error:
            raise BadInputSpec(f"the example can't be recorded: {error}") from error
        tensors |= found
    if not tensors and not may_be_empty:
        raise BadInputSpec("the example holds no tensor; give the arguments of forward, such as example=(x,)")
    return templates, tensors, min(len(args), len(positional))


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
