"""Proves that accel exports the solution of linear systems and the inverse of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.errors import ExportFailed

solve, inverse, triangular = torch.linalg.solve, torch.linalg.inv, torch.linalg.solve_triangular


def _triangle(a: torch.Tensor) -> torch.Tensor:
    return a.tril() / 4 + torch.eye(a.shape[-1])


def _positive(a: torch.Tensor) -> torch.Tensor:
    return _triangle(a) @ _triangle(a).transpose(-1, -2)


SYSTEMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "matrices": solve,
    "vectors": lambda a, b: solve(a, b[..., 0]),
    "from the right": lambda a, b: solve(a, b.transpose(1, 2), left=False),
    "one matrix for all": lambda a, b: solve(a[0], b),
    "inverses": lambda a, b: (inverse(a) @ b, torch.inverse(a)),
    "triangles": lambda a, b: (
        triangular(_triangle(a).transpose(1, 2), b, upper=True),
        triangular(_triangle(a), b.transpose(1, 2), upper=False, left=False),
        triangular(a / 10, b, upper=False, unitriangular=True),
    ),
    "factors": lambda a, b: (
        torch.linalg.cholesky(_positive(a)),
        torch.linalg.cholesky(_positive(a), upper=True),
        torch.cholesky_solve(b, torch.linalg.cholesky(_positive(a))),
        torch.cholesky_solve(b, torch.linalg.cholesky(_positive(a), upper=True), upper=True),
        torch.cholesky_inverse(torch.linalg.cholesky(_positive(a))),
    ),
    "a normal distribution": lambda a, b: torch.distributions.MultivariateNormal(
        b[..., 0], _positive(a), validate_args=False
    ).log_prob(b[..., 1]),
    "one row": lambda a, b: solve(a[:, :1, :1], b[:, :1]),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system(name: str, tmp_path: Path) -> None:
    """Fails if export refuses the system, or if a solution is wrong at another batch size, for matrices with zeros on
    the diagonal, or for matrices whose rows differ by many orders of magnitude."""

    class Solver(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            return SYSTEMS[name](a, b)

    torch.manual_seed(0)
    example = (torch.randn(2, 5, 5), torch.randn(2, 5, 3))
    made = accel.export(Solver(), example=example, out=tmp_path / "m.onnx", simplify=False)
    a, b = torch.randn(4, 5, 5), torch.randn(4, 5, 3)
    a[1] *= 1 - torch.eye(5) if name != "one row" else 1
    a[2] *= torch.tensor([1e-4, 1.0, 1e4, 1.0, 1e-2])[:, None]
    with accel.load(made) as session:
        found, wanted = (torch.utils._pytree.tree_leaves(one(a, b)) for one in (session, Solver()))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_large_system_is_refused(tmp_path: Path) -> None:
    """Fails if a graph of thousands of nodes is written for a large matrix, or if the error doesn't name the limit."""

    class Solver(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return solve(a, a)

    with pytest.raises(ExportFailed, match=r"33 rows.* at most 32"):
        accel.export(Solver(), example=(torch.randn(2, 33, 33),), out=tmp_path / "m.onnx")
