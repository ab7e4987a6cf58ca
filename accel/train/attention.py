"""Replaces ``F.scaled_dot_product_attention`` in a forward pass without touching the model's code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from accel.plan.measure import blocks


class AroundAttention(TorchFunctionMode, ABC):
    """A context in which ``F.scaled_dot_product_attention`` calls ``attention`` instead."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = False

    @abstractmethod
    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor:
        """Computes attention from the arguments that the model's code passes.

        Inside this method, ``F.scaled_dot_product_attention`` is not replaced.
        """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or self._inside:
            return func(*args, **(kwargs or {}))
        self._inside = True  # a nested context must not replace the call again
        try:
            return self.attention(*args, **(kwargs or {}))
        finally:
            self._inside = False

    def wrap(self, module: nn.Module, parts: Sequence[nn.Module] = ()) -> None:
        """Wraps ``module`` in place, so that ``module`` always runs in this context.

        The blocks of ``module`` get the context too, because recomputation runs each block alone, and so do ``parts``
        of the model that also run alone.
        """
        for inner in dict.fromkeys((*blocks(module), *parts, module)):
            # The signature of ``forward`` stays visible, because it tells what a model takes.
            inner.forward = update_wrapper(partial(self._under, inner.forward), inner.forward)

    def _under(self, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self:
            return forward(*arguments, **named)
