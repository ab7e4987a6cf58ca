"""Records the hidden states and the attention of a model's blocks while the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from accel.plan.measure import blocks

from ..attention import AroundAttention


class Recorder:
    """Records a model. ``hidden`` has the output of each block, and ``attention`` the log-probabilities of each
    attention, float[batch, heads, queries, keys]. Both are filled during ``running`` only."""

    def __init__(self, module: nn.Module, *, hidden: bool, attention: bool) -> None:
        self.hidden: list[torch.Tensor] = []
        self.attention: list[torch.Tensor] = []
        self._attention = attention
        self._running = False
        for block in blocks(module) if hidden else ():
            block.register_forward_hook(self._keep)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Opens the context in which the model runs. Forgets what an earlier run recorded."""
        self.hidden, self.attention, self._running = [], [], True
        try:
            with ExitStack() as stack:
                if self._attention:
                    stack.enter_context(_Probabilities(self.attention))
                yield
        finally:
            self._running = False  # the backward pass may run blocks again

    def _keep(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._running:
            self.hidden.append(output[0] if isinstance(output, tuple) else output)


class _Probabilities(AroundAttention):
    """A context in which each attention appends its log-probabilities to ``found``."""

    def __init__(self, found: list[torch.Tensor]) -> None:
        super().__init__()
        self.found = found

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor:
        self.found.append(_log_probabilities(query, key, *rest, **named))
        return F.scaled_dot_product_attention(query, key, value, *rest, **named)


def _log_probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.float() @ key.float().transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        # A finite number instead of minus infinity, because the loss subtracts two log-probabilities.
        low = torch.finfo(torch.float32).min / 2
        scores = scores.masked_fill(~attn_mask, low) if attn_mask.dtype == torch.bool else scores + attn_mask.clamp(low)
    return scores.log_softmax(-1)
