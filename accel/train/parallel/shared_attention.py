"""The base of ``Ulysses`` and ``Ring``, in which attention sees whole sequences although a rank holds only a part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from accel.errors import BadConfig

from ..attention import AroundAttention


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of ``F.scaled_dot_product_attention`` after query, key and value."""

    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool


class SharedAttention(AroundAttention):
    """A context in which attention sees whole sequences.

    ``attention`` takes and returns float[batch, heads, this rank's positions, width]. The ranks of ``mesh`` hold the
    parts of the same sequences. ``before`` is called before the ranks talk to each other, if it isn't None.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.before: Callable[[], None] | None = None

    @abstractmethod
    def check(self, query: torch.Tensor, key: torch.Tensor, call: Call) -> None:
        """Raises ``BadConfig`` if this rank can't compute a call of attention."""

    @abstractmethod
    def shared(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
        """Computes attention together with the other ranks."""

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = Call(mask=attn_mask, dropout=dropout_p, causal=is_causal, scale=scale, grouped=enable_gqa)
        for tensor in (query, key, value):
            if tensor.ndim != 4:
                raise BadConfig(
                    f"attention gets a tensor of shape {list(tensor.shape)}, but takes only the shape [batch, heads, "
                    "positions, width] under context parallel; use parallel.cp = 1"
                )
        if attn_mask is not None:
            _check_mask(attn_mask, query.shape[2] * self.mesh.size(), is_causal=is_causal)
        self.check(query, key, call)
        if self.before is not None:
            self.before()
        return self.shared(query, key, value, call)


def _check_mask(mask: torch.Tensor, length: int, *, is_causal: bool) -> None:
    """Raises ``BadConfig`` if ``mask`` isn't the mask of a whole sequence of ``length`` positions, if attention is also
    causal by itself, or if the mask is trained."""
    if is_causal:
        raise BadConfig("attention gets a mask and is_causal=True; pass one of the two")
    if mask.requires_grad:
        raise BadConfig("context parallel can't train an attention mask; use a fixed mask, or parallel.cp = 1")
    if mask.ndim < 2 or mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        raise BadConfig(
            f"attention gets a mask of the shape {list(mask.shape)}, but each rank needs the mask of the whole "
            f"sequence, [..., {length} or 1, {length}]; make the mask from the model's inputs, or use parallel.cp = 1"
        )
