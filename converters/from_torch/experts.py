"""Makes the mixture-of-experts models of the transformers library exportable."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def every_expert() -> Iterator[None]:
    """Within the ``with`` block, each expert processes every token. The output of a token uses only the results of its
    chosen experts.

    The library transformers sorts the tokens by expert, which ONNX can't express. Gathering only the weights of the
    chosen experts would copy weights for every token.
    """
    moe = sys.modules.get("transformers.integrations.moe")
    interface = getattr(moe, "ExpertsInterface", None)
    if interface is None:
        yield
        return
    with mock.patch.object(interface, "get_interface", _taken):
        yield


def _taken(*_: Any) -> Any:
    return _forward


def _forward(experts: Any, hidden: Any, chosen: Any, weights: Any) -> Any:
    """Returns the output of the experts. The shape of the output and of ``hidden`` is (tokens, size). The shape of
    ``chosen`` and of ``weights`` is (tokens, top k)."""
    import torch

    def linear(x: Any, name: str) -> Any:
        weight = getattr(experts, name)
        found = x @ (weight if experts.is_transposed else weight.transpose(1, 2))
        return found + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else found

    tokens = hidden.unsqueeze(0)
    if experts.has_gate:
        inner = experts._apply_gate(linear(tokens, "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(tokens, "up_proj"))
    found = linear(inner, "down_proj")
    if experts.has_post_expert_norm:
        found = experts.post_expert_norm(found)
    is_chosen = chosen.unsqueeze(-1) == torch.arange(found.shape[0], device=chosen.device)
    counts = (is_chosen * weights.unsqueeze(-1)).sum(1)
    return (found * counts.t().unsqueeze(-1)).sum(0).to(hidden.dtype)
