"""Runs a sample before training to check that tensor parallelism hasn't changed the model's output.

The model's own code processes a rank's shard of a linear layer's output. A shard may end in the middle of an attention
head. The model's code may also use a fixed number of heads, or cut query, key and value out of one matrix product. If
the model's code doesn't work on a shard, torch raises an error about shapes, or silently trains a different model with
wrong weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from accel.errors import AccelError, BadConfig, one_line

from ..attention import AroundAttention
from ..batch import call, to_device
from ..config.schema import TrainConfig
from ..precision.modes import parameter_dtype
from ..ranks import Ranks

_HEADS, _WIDTH = 1, 3
_FIX = (
    "a rank has only its share of a column layer's output: let a row layer follow, and let code that counts heads use "
    "view(b, s, -1, width), or use another --tp"
)
_SEQUENCE = (
    "; the sizes of an input (b, s, _ = x.shape) are sizes of a rank's part of the sequence: take them from a column's "
    "output, also for rotary positions, or pass --parallel.sequence_parallel=false"
)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Describes a call of ``F.scaled_dot_product_attention``, with the calling module and the shapes of query and
    key."""

    module: str
    query: torch.Size
    key: torch.Size

    @property
    def has_heads(self) -> bool:
        """Tells whether query and key have the shape [batch, heads, positions, width]."""
        return len(self.query) == len(self.key) == 4


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The result of a forward pass on ``inputs``, with the output on the CPU and the attention calls in order.

    ``output`` is None if the model returned neither a tensor nor an object with logits.
    """

    inputs: Any
    output: torch.Tensor | None
    attentions: tuple[Attention, ...]

    def part(self, cut: Callable[[torch.Tensor], torch.Tensor]) -> Tried:
        """Returns the result of a rank that holds the part ``cut(output)`` of the sequence."""
        return self if self.output is None else replace(self, output=cut(self.output))


def try_whole(
    module: nn.Module, styles: Mapping[str, str], config: TrainConfig, ranks: Ranks, data: Sequence[Any]
) -> Tried:
    """Runs the unsharded ``module`` on the first sample.

    Raises ``BadConfig`` if ``styles`` would split an attention head over several ranks.
    """
    assert ranks.tp is not None
    sample = torch.utils.data.default_collate([data[0]])[0]
    inputs = to_device(sample, ranks.device, parameter_dtype(config.precision.resolved))
    found = attempt(module, inputs, [])
    p = config.parallel
    check_heads(module, styles, found.attentions, p.tp, p.cp if p.cp_method == "ulysses" else 1)
    return found


def check_heads(
    module: nn.Module, styles: Mapping[str, str], attentions: Sequence[Attention], tp: int, cp: int = 1
) -> None:
    """Raises ``BadConfig`` if a column layer in ``styles`` makes attention heads that ``tp`` ranks can't share evenly,
    or that leave heads on a tensor-parallel rank which ``cp`` context-parallel ranks can't share."""
    for seen in (one for one in attentions if one.has_heads):
        inside, width = f"{seen.module}." if seen.module else "", seen.query[_WIDTH]
        for name in (name for name, style in styles.items() if style == "column" and name.startswith(inside)):
            part = module.get_submodule(name)
            for heads in {seen.query[_HEADS], seen.key[_HEADS]}:
                if isinstance(part, nn.Linear) and part.out_features == heads * width and heads % tp:
                    several = "s" if heads > 1 else ""
                    raise BadConfig(
                        f"the layer {name} makes {heads} head{several} of width {width}, but tp {tp} would split a "
                        f"head; use a --tp that divides {heads}"
                    )
            heads = seen.query[_HEADS]
            if isinstance(part, nn.Linear) and part.out_features == heads * width and heads // tp % cp:
                raise BadConfig(
                    f"the layer {name} makes {heads} heads, of which tp {tp} leaves {heads // tp} on a rank, and cp "
                    f"{cp} can't share these; use a smaller tp or cp, or parallel.cp_method = ring"
                )


def check_same(module: nn.Module, whole: Tried, mesh: DeviceMesh, *, exact: bool, sequence: bool) -> None:
    """Raises ``BadConfig`` if ``module``, now sharded over ``mesh``, fails on a sample. Also raises ``BadConfig`` if
    the output of ``module`` differs from ``whole``.

    ``exact`` means that parameters and products are float32. ``sequence`` means that sequence parallelism is on.
    """
    fix = _FIX + _SEQUENCE if sequence else _FIX
    running: list[str] = []
    try:
        found = attempt(module, whole.inputs, running)
    except AccelError:
        raise
    except Exception as error:
        where, reason = running[-1] if running else "", one_line(error, 200)
        seen = next((one for one in whole.attentions if one.module == where and one.has_heads), None)
        heads = f" of {seen.query[_HEADS]} heads" if seen is not None else ""
        part = f"the module {where}{heads}" if where else "the model"
        raise BadConfig(f"with tp {mesh.size()}, {part} can't be run ({reason}); {fix}") from error
    for before, after in zip(whole.attentions, found.attentions, strict=False):
        if before.has_heads and after.has_heads and before.query[_WIDTH] != after.query[_WIDTH]:
            raise BadConfig(
                f"with tp {mesh.size()}, the module {before.module} splits a rank's share of {before.query[_HEADS]} "
                f"heads of width {before.query[_WIDTH]} into {after.query[_HEADS]} heads of width "
                f"{after.query[_WIDTH]}; {fix}"
            )
    limit = 1e-3 if exact else 0.1
    right = whole.output is None or found.output is None or _apart(found.output, whole.output) <= limit
    wrong = torch.tensor(float(not right), device=mesh.device_type)
    dist.all_reduce(wrong, group=mesh.get_group())
    if wrong:
        raise BadConfig(
            f"with tp {mesh.size()}, the model's output for a sample changes; compute query, key and value in "
            "separate layers, let a row layer follow each column layer in [tensor_parallel], or use tp 1"
        )


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the relative distance of ``found`` from ``expected`` in the 2-norm, or 0 if ``expected`` isn't finite."""
    if found.shape != expected.shape:
        return float("inf")
    size = expected.float().norm()
    difference = (found.float() - expected.float()).norm()
    if not size.isfinite() or difference == 0:
        return 0.0
    return float(difference / size)


@torch.no_grad()
def attempt(module: nn.Module, inputs: Any, running: list[str]) -> Tried:
    """Runs ``module`` in ``eval()`` mode. After an exception, the last entry of ``running`` is the module that raised
    the exception."""
    watched = _Watched(running)
    training = [part for part in module.modules() if part.training]
    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(partial(_enter, running, name), prepend=True))
        handles.append(part.register_forward_hook(partial(_leave, running)))
    module.eval()
    try:
        with watched:
            found: Any = call(module, inputs)
    finally:
        for handle in handles:
            handle.remove()
        for part in training:
            part.training = True
    found = getattr(found, "logits", found)
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    output = whole.cpu() if isinstance(whole, torch.Tensor) else None
    return Tried(inputs=inputs, output=output, attentions=tuple(watched.found))


def _enter(running: list[str], name: str, *_: Any) -> None:
    running.append(name)


def _leave(running: list[str], *_: Any) -> None:
    running.pop()


class _Watched(AroundAttention):
    """A context that records every attention call."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()
        self.running = running
        self.found: list[Attention] = []

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor:
        self.found.append(Attention(module=self.running[-1], query=query.shape, key=key.shape))
        return F.scaled_dot_product_attention(query, key, value, *rest, **named)
