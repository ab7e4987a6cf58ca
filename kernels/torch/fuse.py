"""Implements ``accel.fuse(module)``, which replaces Linear and Conv2d layers by fused operations. A fused operation can
include a batch norm, an activation and a residual.

Traces the module with torch.fx. A module that can't be traced is fused layer by layer, and each Linear or Conv2d also
takes in the modules that follow in its ``nn.Sequential``. Compares the fused module with the original.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from accel.errors import GateFailed, UnsupportedHere
from torch import fx, nn

from .modules import FusedConv2d, FusedLinear
from .trace import adds_in_place, trace, writes_between
from .verify import LIMITS, verify, verify_layer

ADDS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add)


@dataclass(frozen=True, kw_only=True)
class Match:
    """Describes a fused operation, with its name and its parts. If the operation was verified alone, ``difference`` is
    the difference between the outputs of the fused and the original operation."""

    name: str
    operation: str
    act: str = "none"
    batch_norm: bool = False
    residual: bool = False
    difference: float = 0.0
    limit: float = LIMITS[torch.float32]

    def __str__(self) -> str:
        parts = [self.operation, *(["batch_norm"] if self.batch_norm else [])]
        parts += [*([self.act] if self.act != "none" else []), *(["residual"] if self.residual else [])]
        return f"{self.name}: {' + '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class FuseReport:
    """The report of ``fuse``.

    ``matches`` lists the fused operations. ``left`` has the name of each unfused layer, with the reason. ``traced``
    tells whether torch.fx traced the module. ``difference`` is the largest difference between the outputs of the fused
    and the original module, and ``limit`` is the allowed difference.
    """

    matches: tuple[Match, ...]
    left: tuple[tuple[str, str], ...]
    traced: bool
    difference: float
    limit: float

    def __str__(self) -> str:
        lines = [f"{len(self.matches)} fused, {len(self.left)} left, difference {self.difference:.2g}"]
        return "\n".join([*lines, *(f"  {m}" for m in self.matches), *(f"  left {n}: {why}" for n, why in self.left)])


def fuse(module: nn.Module, example_inputs: Sequence[Any] | torch.Tensor | None = None) -> tuple[nn.Module, FuseReport]:
    """Returns a fused copy of ``module``, and the report. ``module`` itself stays unchanged.

    ``example_inputs`` are the positional inputs on which the copy is verified. Without example inputs, residual sums
    aren't fused, because no shape is known. Without example inputs, each fused layer is verified alone on random
    inputs. A module that can't be traced, for example because of control flow, is fused layer by layer.

    Raises ``UnsupportedHere`` if a submodule is in training mode, and ``GateFailed`` if the outputs differ.
    """
    # No submodule may be in training mode, because a batch norm in training mode updates its statistics. A folded batch
    # norm can't update statistics.
    if training := [name for name, part in module.named_modules() if part.training]:
        what = "a module" if training[0] == "" else f"a module whose {training[0]} is"
        raise UnsupportedHere(f"{what} in training mode can't be fused (batch norms would freeze); call .eval() on it")
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if (traced := trace(copy.deepcopy(module), example_inputs)) is not None:
        left: list[tuple[str, str]] = []
        matches = _fuse_graph(traced, left, example_inputs is None)
        try:
            return _reported(module, traced, matches, left, example_inputs, traced=True)
        except GateFailed:
            if not adds_in_place(module):
                raise
    if example_inputs is not None:
        with contextlib.suppress(GateFailed):  # ``_swapped`` fails if the module calls a Sequential's layers one by one
            return _swapped(module, example_inputs, joined=True)
    return _swapped(module, example_inputs, joined=False)


def _swapped(module: nn.Module, example_inputs: Sequence[Any] | None, *, joined: bool) -> tuple[nn.Module, FuseReport]:
    matches: list[Match] = []
    left: list[tuple[str, str]] = []
    fused = _swap_children(copy.deepcopy(module), "", matches, left, example_inputs is None, joined)
    return _reported(module, fused, matches, left, example_inputs, traced=False)


def _reported(
    module: nn.Module,
    fused: nn.Module,
    matches: list[Match],
    left: list[tuple[str, str]],
    example_inputs: Sequence[Any] | None,
    *,
    traced: bool,
) -> tuple[nn.Module, FuseReport]:
    """Verifies ``fused`` if there are example inputs. Returns ``fused`` and its report."""
    if example_inputs is None:
        worst = max(matches, key=lambda match: match.difference, default=None)
        difference, limit = (worst.difference, worst.limit) if worst else (0.0, LIMITS[torch.float32])
    else:
        difference, limit = verify(module, fused, example_inputs)
    return fused.eval(), FuseReport(
        matches=tuple(matches), left=tuple(left), traced=traced, difference=difference, limit=limit
    )


def _fuse_graph(traced: fx.GraphModule, left: list[tuple[str, str]], alone: bool) -> list[Match]:
    modules = dict(traced.named_modules())
    matches: list[Match] = []
    for node in list(traced.graph.nodes):
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if layer is None or not _operation(layer):
            continue
        if reason := _obstacle(layer):
            left.append((str(node.target), reason))
            continue
        taken, following, act, residual = [node], None, "none", None
        if (after := _only_user(taken[-1])) is not None and isinstance(layer, nn.Conv2d):
            candidate = modules.get(str(after.target)) if after.op == "call_module" else None
            if isinstance(candidate, nn.BatchNorm2d) and candidate.running_var is not None:
                taken, following = [*taken, after], candidate
        if (after := _only_user(taken[-1])) is not None and (name := _act_of_node(after, modules)):
            taken, act = [*taken, after], name
        if (after := _only_user(taken[-1])) is not None and (other := _residual_of(after, taken[-1])) is not None:
            taken, residual = [*taken, after], other
        if writes_between(taken, modules):  # the fused layer would read its inputs after another node wrote to them
            taken, following, act, residual = [node], None, "none", None
        last = taken[-1]
        name = f"fused_{len(matches)}"
        fused = _fused(layer, following, act)
        traced.add_submodule(name, fused)
        with traced.graph.inserting_before(last):
            arguments = (node.args[0], residual) if residual is not None else (node.args[0],)
            new = traced.graph.call_module(name, arguments)
        new.meta = dict(last.meta)
        last.replace_all_uses_with(new)
        for gone in reversed(taken):  # keeps other unused nodes, because they may write to their inputs
            traced.graph.erase_node(gone)
        match = _match(str(node.target), layer, following, act, residual is not None)
        matches.append(_verified(match, layer, following, fused) if alone else match)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return matches


def _swap_children(
    module: nn.Module, path: str, matches: list[Match], left: list[tuple[str, str]], alone: bool, joined: bool
) -> nn.Module:
    """Returns ``module`` with its Linear and Conv2d children replaced.

    ``joined`` allows fusing a layer with the next modules of its Sequential. With ``joined``, the result is wrong if
    other code calls the modules of a Sequential one by one.
    """
    # named_children() would leave out the second occurrence of a module.
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    skip = 0
    for at, (name, child) in enumerate(children):
        where = f"{path}{name}"
        if skip:
            skip -= 1
            continue
        if not _operation(child):
            _swap_children(child, f"{where}.", matches, left, alone, joined)
            continue
        if reason := _obstacle(child):
            left.append((where, reason))
            continue
        rest = [c for _, c in children[at + 1 :]] if joined and type(module) is nn.Sequential else []
        norm = rest[0] if rest and isinstance(child, nn.Conv2d) and isinstance(rest[0], nn.BatchNorm2d) else None
        if norm is not None and norm.running_var is None:
            norm = None
        rest = rest[1:] if norm is not None else rest
        act = (_act_of_module(rest[0]) if rest else None) or "none"
        fused = _fused(child, norm, act)
        setattr(module, name, fused)
        skip = (norm is not None) + (act != "none")
        for gone, _ in children[at + 1 : at + 1 + skip]:
            setattr(module, gone, nn.Identity())
        match = _match(where, child, norm, act, False)
        matches.append(_verified(match, child, norm, fused) if alone else match)
    return module


def _match(name: str, layer: nn.Module, norm: nn.Module | None, act: str, residual: bool) -> Match:
    return Match(name=name, operation=_operation(layer), act=act, batch_norm=norm is not None, residual=residual)


def _verified(match: Match, layer: nn.Module, norm: nn.Module | None, fused: nn.Module) -> Match:
    """Verifies a fused layer alone and returns the match with the measured difference. Raises ``GateFailed`` if the
    outputs differ."""
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    difference, limit = verify_layer(layer, norm, match.act, fused)
    return replace(match, difference=difference, limit=limit)


def _operation(layer: nn.Module) -> str:
    return "linear" if isinstance(layer, nn.Linear) else "conv2d" if isinstance(layer, nn.Conv2d) else ""


def _obstacle(layer: nn.Module) -> str:
    """Returns the reason why ``layer`` can't be replaced, or "" if ``layer`` can be replaced."""
    if type(layer) not in (nn.Linear, nn.Conv2d):
        return f"{type(layer).__name__} is a subclass"
    if torch.nn.utils.parametrize.is_parametrized(layer):
        return "its weights are computed (parametrized)"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has forward hooks"
    if isinstance(layer, nn.Conv2d):
        if layer.groups != 1:
            return f"it has {layer.groups} groups"
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return f"its padding is {layer.padding_mode} {layer.padding}"
    return ""


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _act_of_module(layer: nn.Module | None) -> str | None:
    if isinstance(layer, nn.GELU):
        return "gelu_tanh" if layer.approximate == "tanh" else "gelu_erf"
    return "relu" if type(layer) is nn.ReLU else "silu" if type(layer) is nn.SiLU else None


def _act_of_node(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    if node.op == "call_module":
        return _act_of_module(modules.get(str(node.target)))
    functional = nn.functional
    if node.op == "call_function":
        if node.target in (functional.relu, torch.relu):
            return "relu"
        if node.target is functional.silu:
            return "silu"
        if node.target is functional.gelu:
            return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu_erf"
    return "relu" if node.op == "call_method" and node.target in ("relu", "relu_") else None


def _residual_of(node: fx.Node, last: fx.Node) -> fx.Node | None:
    """Returns the tensor that ``node`` adds to ``last``. Returns None if ``node`` isn't a plain sum of two tensors of
    equal shape and dtype."""
    if node.op != "call_function" or node.target not in ADDS or node.kwargs or len(node.args) != 2:
        return None
    if node.target is operator.iadd and node.args[0] is not last:
        return None  # ``iadd`` writes to its first operand, which is not ``last``
    other = node.args[1] if node.args[0] is last else node.args[0]
    mine, theirs = last.meta.get("tensor_meta"), other.meta.get("tensor_meta") if isinstance(other, fx.Node) else None
    if other is last or mine is None or theirs is None or (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return None
    return cast("fx.Node", other)


def _fused(layer: nn.Module, norm: nn.Module | None, act: str) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return FusedLinear(layer.weight, layer.bias, act).eval()
    assert isinstance(layer, nn.Conv2d)
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    if isinstance(norm, nn.BatchNorm2d):
        assert norm.running_var is not None
        assert norm.running_mean is not None
        scale = (norm.running_var.double() + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.detach().double()
        shift = -norm.running_mean.double() if bias is None else bias.double() - norm.running_mean.double()
        shift = shift * scale if norm.bias is None else shift * scale + norm.bias.detach().double()
        weight = (weight.double() * scale[:, None, None, None]).to(layer.weight.dtype)
        bias = shift.to(layer.weight.dtype)
    sizes = cast("Callable[[Any], tuple[int, int]]", tuple)
    return FusedConv2d(
        weight.permute(0, 2, 3, 1).contiguous(),
        bias,
        act,
        sizes(layer.stride),
        sizes(layer.padding),
        sizes(layer.dilation),
    ).eval()
