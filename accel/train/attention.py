"""Attention that is changed without touching a model's code: every ``F.scaled_dot_product_attention`` in a forward pass
is handed to somebody else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from accel.plan.measure import blocks


class AroundAttention(TorchFunctionMode, ABC):
    """Inside, ``attention`` is what ``F.scaled_dot_product_attention`` does."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = False

    @abstractmethod
    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor:
        """Called with what the model's code gave; may call the real one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or self._inside:
            return func(*args, **(kwargs or {}))
        self._inside = True  # a block in a model is wrapped twice
        try:
            return self.attention(*args, **(kwargs or {}))
        finally:
            self._inside = False

    def wrap(self, module: nn.Module) -> None:
        """Let ``module`` run inside, in place; its blocks too, which run again alone when they are recomputed."""
        for inner in (*blocks(module), module):
            inner.forward = partial(self._under, inner.forward)

    def _under(self, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self:
            return forward(*arguments, **named)
