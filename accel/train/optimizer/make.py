"""Makes the optimizer that the config names, with parameter groups by the names of the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from accel.errors import BadConfig, one_line

from ..config.schema import OPTIMIZERS, OptimizerConfig
from .named import load_named

_BUILT_IN = dict(zip(OPTIMIZERS, ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD"), strict=True))
# Optimizers that update each element of a parameter from this element's gradients alone. Shards are updated as the
# whole parameter would be.
_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
# The factor of a group's learning rate, which the schedule doesn't change.
FACTOR = "factor"


def make(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    config: OptimizerConfig,
    *,
    parts: bool = False,
    cut: bool = False,
) -> torch.optim.Optimizer:
    """Returns the optimizer of ``config`` for the parameters ``tensors``, which are called ``names``. ``parts`` tells
    whether the optimizer will update some of the parameters at a time, and ``cut`` whether a tensor is a shard.

    Raises ``BadConfig`` if there is no such optimizer, if it doesn't take the options, or if it can't update shards.
    """
    kind = _kind(config.name)
    if parts and kind.__name__ not in _ELEMENTWISE:
        raise BadConfig(
            f"{config.name} may need all parameters at once, which states on the disk can't give; leave out "
            "parallel.disk, or use an optimizer such as adamw"
        )
    if cut and kind.__name__ not in _ELEMENTWISE:
        raise BadConfig(
            f"{config.name} needs whole parameters, but this layout cuts them into shards; use parallel.zero = 0 and "
            "tp 1 with it, or an optimizer such as adamw"
        )
    taken = inspect.signature(kind).parameters
    given: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "foreach": True}
    if config.name == "sgd":
        given["momentum"] = config.momentum
    elif config.name in OPTIMIZERS:
        given |= {"betas": config.betas, "eps": config.eps}
    if config.weight_decay and "weight_decay" not in taken:
        raise BadConfig(f"{config.name} has no weight decay; use --optimizer.weight-decay=0 with it")
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in config.options.items()}
    if {"foreach", "fused"} & set(options):
        del given["foreach"]
    for name in (*options, *(name for group in config.groups.values() for name in group)):
        if name not in taken or name in ("params", "self"):
            known = ", ".join(n for n in taken if n not in ("params", "self"))
            raise BadConfig(f"the optimizer {config.name} has no option {name}; its options are: {known}")
    arguments = {name: value for name, value in given.items() if name in taken} | options
    try:
        return kind(_groups(names, tensors, config), **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadConfig(
            f"the optimizer {config.name} can't be made ({one_line(error, 200)}); correct the table optimizer"
        ) from error


def check_groups(names: Iterable[str], config: OptimizerConfig) -> None:
    """Raises ``BadConfig`` if a pattern of ``optimizer.groups`` matches none of the model's parameters ``names``."""
    known = list(names)
    for pattern in config.groups:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise BadConfig(
                f"optimizer.groups has the pattern {pattern!r}, which matches no parameter; the parameters are called "
                f"{', '.join(known[:3])} and so on"
            )


def _kind(name: str) -> type[torch.optim.Optimizer]:
    kind = load_named(
        _BUILT_IN.get(name, name),
        what="optimizer",
        name=name,
        known=OPTIMIZERS,
        example="torch.optim.RMSprop",
        base=torch.optim.Optimizer,
    )
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        raise BadConfig(f"optimizer.name is {name!r}, which is no optimizer; use a class such as torch.optim.RMSprop")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise BadConfig(
            f"{name} runs the model several times a step, which accel can't do; use an optimizer such as adamw"
        )
    if kind is torch.optim.SparseAdam:
        raise BadConfig("torch.optim.SparseAdam needs sparse gradients, which accel doesn't make; use adamw")
    return kind


def _groups(names: Sequence[str], tensors: Sequence[torch.Tensor], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Returns a parameter group for each pattern. A parameter belongs to the first pattern that matches its name."""
    found: dict[str | None, list[torch.Tensor]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        pattern = next((pattern for pattern in config.groups if fnmatchcase(name, pattern)), None)
        found.setdefault(pattern, []).append(tensor)
    return [{"params": same, **_options(config, pattern)} for pattern, same in found.items()]


def _options(config: OptimizerConfig, pattern: str | None) -> Mapping[str, Any]:
    if pattern is None:
        return {}
    given = config.groups[pattern]
    options: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return {**options, FACTOR: options.get("lr", config.lr) / config.lr}
