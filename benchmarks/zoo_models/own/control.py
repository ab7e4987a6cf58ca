"""Defines modules with control flow, random numbers, or unusual arguments and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..case import Case


class Cond(nn.Module):
    """Chooses a branch by the input's values, with torch.cond."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: self.a(t).relu(), lambda t: self.b(t).tanh(), (x,))


class LoopOverLength(nn.Module):
    """A loop in Python over the length of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 8)
        for i in range(x.shape[1]):
            h = self.cell(x[:, i], h)
        return h


class Branch(nn.Module):
    """Chooses a branch with ``if`` on the input's values, which a traced graph can't express."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.mean() > 0 else -x


class BranchOnShape(nn.Module):
    """Chooses a branch by a size of the input, with ``if``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return y.mean(1) if x.shape[1] > 4 else y.sum(1)


class Noise(nn.Module):
    """Draws random numbers in evaluation mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class MonteCarlo(nn.Module):
    """Dropout that stays on."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(nn.functional.dropout(x, 0.5, training=True))


class InPlace(nn.Module):
    """Writes to slices of tensors, and to the input tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 0
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1]
        y[:, ::2] += 1
        y[y > 2] = 2
        return y


class Item(nn.Module):
    """Computes with a Python number that is read from a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max().item()
        return x / (scale + 1e-6)


class MaskedSelect(nn.Module):
    """Averages the rows that a mask selects, for each sample."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.stack([row[keep].mean(0) for row, keep in zip(x, mask, strict=True)])


class NonZero(nn.Module):
    """Returns the positions of positive values. The number of result rows depends on the input's values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).nonzero()


class Experts(nn.Module):
    """A mixture of experts that sends each token to its best two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 8)
        weight, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, place = torch.where(chosen == i)
            out.index_add_(0, row, expert(flat[row]) * weight[row, place, None])
        return out.view_as(x)


class Options(nn.Module):
    """Takes three arguments with default values: a number, an optional mask and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(
        self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None, *, both: bool = False
    ) -> Any:
        y = self.a(x) * scale
        y = y if mask is None else y.masked_fill(mask, 0.0)
        return (y, x) if both else y


class Lists(nn.Module):
    """Takes and returns lists of tensors."""

    def forward(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [part.cumsum(-1) for part in parts] + [torch.cat(parts, -1)]


class Sorting(nn.Module):
    """Applies operators that sort or rank: sort, bucketize, median, kthvalue."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.linspace(-2, 2, 9))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        values, order = x.sort(-1)
        return {
            "values": values, "order": order, "bucket": torch.bucketize(x, self.edges), "median": x.median(-1).values,
            "best": x.kthvalue(2, -1).values, "hot": nn.functional.one_hot(order, 6), "logsum": x.logsumexp(-1),
        }  # fmt: skip


class Algebra(nn.Module):
    """Computes norms, distances, cosine similarities, traces and determinants."""

    def forward(self, a: torch.Tensor) -> dict[str, torch.Tensor]:
        spd = a @ a.transpose(1, 2) + 4 * torch.eye(4)
        return {
            "trace": torch.einsum("bii->b", spd), "norm": torch.linalg.matrix_norm(a), "det": torch.linalg.det(spd),
            "cdist": torch.cdist(a, a), "cosine": nn.functional.cosine_similarity(a, spd, dim=-1),
            "kron": torch.kron(a[0, :2, :2], spd[0, :2, :2]) if a.shape[0] == 0 else a.diagonal(dim1=1, dim2=2),
        }  # fmt: skip


class Inverse(nn.Module):
    """Solves a linear system."""

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a @ a.transpose(1, 2) + 4 * torch.eye(4), a)


class Half(nn.Module):
    """Has bfloat16 weights, and float32 inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x.bfloat16()).float()


class Activations(nn.Module):
    """Computes all common activations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = nn.functional
        parts = [
            f.gelu(x), f.gelu(x, approximate="tanh"), f.mish(x), f.silu(x), f.elu(x), f.celu(x), f.selu(x),
            f.hardtanh(x), f.hardsigmoid(x), f.hardswish(x), f.softplus(x), f.softsign(x), f.logsigmoid(x), f.relu6(x),
            f.leaky_relu(x), f.softshrink(x), f.hardshrink(x), f.tanhshrink(x), f.threshold(x, 0.1, 2.0), x.erf(),
            x.expm1(), x.log1p().nan_to_num(),
        ]  # fmt: skip
        return torch.cat([*parts, f.glu(x, -1), f.softmin(x, -1), f.normalize(x, p=1.0)], -1)


def _rows(*shape: int) -> Any:
    return lambda b, _: (torch.randn(b, *shape),)


def _masked(b: int, _: int) -> Any:
    mask = torch.rand(b, 5) > 0.4
    mask[:, 0] = True
    return torch.randn(b, 5, 3), mask


_LONG = {"x": {0: "batch", 1: "length"}}
MODELS = {
    "torch-cond": lambda: Case(Cond(), _rows(6)),
    "loop-over-length-fixed": lambda: Case(LoopOverLength(), _rows(5, 6)),
    "loop-over-length": lambda: Case(LoopOverLength(), lambda b, s: (torch.randn(b, s, 6),), _LONG, (5, 3, 8)),
    "branch-on-values": lambda: Case(Branch(), _rows(6), refusal="write `torch.where(x.mean() > 0"),
    "branch-on-size": lambda: Case(BranchOnShape(), lambda b, s: (torch.randn(b, s, 6),), _LONG, (6, 5, 8)),
    "random-noise": lambda: Case(Noise(), _rows(6)),
    "dropout-on": lambda: Case(MonteCarlo(), _rows(6)),
    "in-place": lambda: Case(InPlace(), _rows(6)),
    "item": lambda: Case(Item(), _rows(6)),
    "masked-rows": lambda: Case(MaskedSelect(), _masked),
    "nonzero": lambda: Case(NonZero(), _rows(6)),
    "experts": lambda: Case(Experts(), _rows(5, 8)),
    "options": lambda: Case(Options(), lambda b, _: {"x": torch.randn(b, 6), "scale": 2.0, "mask": None, "both": True}),
    "lists": lambda: Case(Lists(), lambda b, _: ([torch.randn(b, 4), torch.randn(b, 4)],)),
    "sorting": lambda: Case(Sorting(), _rows(6)),
    "algebra": lambda: Case(Algebra(), _rows(4, 4)),
    "solve": lambda: Case(Inverse(), _rows(4, 4)),
    "bfloat16-weights": lambda: Case(Half(), _rows(8)),
    "activations": lambda: Case(Activations(), _rows(8)),
}
