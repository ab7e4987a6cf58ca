"""A block with a mixture of experts, and the search for such blocks in a model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Router(nn.Module):
    """Chooses ``top_k`` of ``experts`` experts for each token."""

    def __init__(self, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns logits float[t, experts], weights float32[t, top_k] and indices int64[t, top_k] for float[t, hidden].

        The weights of a token are its largest probabilities, divided by their sum (Jiang et al. 2024, "Mixtral of
        Experts", section 2.1).
        """
        logits = F.linear(tokens, self.weight)
        weights, indices = logits.float().softmax(-1).topk(self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), indices


class Experts(nn.Module):
    """The MLPs of all experts, with SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer") and stacked weights."""

    def __init__(self, hidden: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=0.02)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted sum of the chosen experts' outputs, float[t, hidden]."""
        if torch.compiler.is_exporting():  # the number of tokens of an expert isn't known in an exported graph
            return self._dense(hidden_states, top_k_index, top_k_weights)
        found = torch.zeros_like(hidden_states)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            token, place = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], gate_up).chunk(2, -1)
            output = F.linear(F.silu(gate) * up, down) * top_k_weights[token, place, None]
            found = found.index_add(0, token, output.to(found.dtype))
        return found

    def _dense(self, tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Runs every expert on every token."""
        count = self.gate_up_proj.shape[0]
        chosen = (F.one_hot(indices, count) * weights[..., None]).sum(1).to(tokens.dtype)
        gate, up = torch.einsum("th,efh->tef", tokens, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("tef,ehf,te->th", F.silu(gate) * up, self.down_proj, chosen)


class MixtureOfExperts(nn.Module):
    """A mixture of ``experts`` MLPs of width ``inner``, of which each token uses ``top_k``: float[..., hidden] from
    float[..., hidden]."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int = 2) -> None:
        super().__init__()
        self.gate = Router(hidden, experts, top_k)
        self.experts = Experts(hidden, inner, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        _, weights, indices = self.gate(tokens)
        found: torch.Tensor = self.experts(tokens, indices, weights)
        return found.view(x.shape)


def mixtures(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks of ``module`` with a router and stacked experts, by name."""
    return {name: part for name, part in module.named_modules() if _is_mixture(part)}


def _is_mixture(part: nn.Module) -> bool:
    experts, gate = getattr(part, "experts", None), getattr(part, "gate", None)
    stacked = (getattr(experts, name, None) for name in ("gate_up_proj", "down_proj"))
    return isinstance(gate, nn.Module) and all(isinstance(w, nn.Parameter) and w.ndim == 3 for w in stacked)


def expert_count(part: nn.Module) -> int:
    """Returns the number of experts of a mixture, over all ranks."""
    return part.get_submodule("experts").get_parameter("gate_up_proj").shape[0]


def expert_parameters(module: nn.Module) -> int:
    """Returns the number of parameters of all experts."""
    return sum(p.numel() for part in mixtures(module).values() for p in part.get_submodule("experts").parameters())
