"""Proves that accel correctly exports operators that torch's exporter lacks or translates wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.converters.from_torch import onnx_from_torch
from accel.converters.from_torch.operators import integers
from accel.errors import ExportFailed

ROWS = torch.tensor([0, 2, 2, 1, 2])


def _mean(x: torch.Tensor, include_self: bool) -> torch.Tensor:
    start = torch.full_like(x[:, :4], 0.5)
    index = ROWS[None].expand(x.shape[0], -1)
    return start.scatter_reduce(1, index, x[:, :5], "mean", include_self=include_self)


OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mean by index": lambda x: _mean(x, True),
    "mean by index of the values alone": lambda x: _mean(x, False),
    "largest by index": lambda x: torch.zeros_like(x).scatter_reduce(
        1, ROWS[None].expand(x.shape[0], -1), x[:, :5], "amax"
    ),
    "median": lambda x: x.median(-1),
    "median of an inner dim": lambda x: x[:, None, :].repeat(1, 2, 1).median(1, keepdim=True).values,
    "median of all": lambda x: x.median(),
    "k-th value": lambda x: x.kthvalue(2, -1, keepdim=True),
    "stable sort": lambda x: x.round().sort(dim=-1, descending=True, stable=True),
    "stable argsort of an inner dim": lambda x: x.round()[:, :, None].repeat(1, 1, 2).argsort(dim=1, stable=True),
    "cumulative product": lambda x: x.cumprod(-1),
    "hypotenuse": lambda x: torch.hypot(
        x * torch.tensor([1, 0, 0, 1e30, 1e-30, torch.inf]), x.flip(1) * torch.tensor([1, 0, 1, 1e30, 1e-30, torch.inf])
    ),
    "sign of another": lambda x: 1 / torch.copysign(x, torch.tensor([-0.0, 0.0, -3.0, 3.0, -torch.inf, 1e-40])),
    "places in a sorted sequence": lambda x: (
        torch.searchsorted(torch.tensor([-1.0, 0, 0, 0.5]), x.round()),
        torch.searchsorted(torch.tensor([-1.0, 0, 0, 0.5]), x.round() / x.round(), side="right"),
        torch.searchsorted(x.sort(1).values, x[:, :2].contiguous(), right=True, out_int32=True),
    ),
    "largest and smallest so far": lambda x: (
        *torch.cummax(x.round(), 1),
        *torch.cummin(x.round()[:, None].repeat(1, 3, 1), -2),
        *torch.cummax(torch.where(x > 1, torch.nan, x), -1),
        *torch.cummin(x.round().to(torch.int64), 1),
        torch.logcumsumexp(x * 100, 1),
        torch.logcumsumexp(torch.where(x > 0, -torch.inf, x)[:, None], 2),
    ),
    "median of numbers": lambda x: (
        *torch.where(x > 0.3, torch.nan, x).nanmedian(1),
        torch.where(x > 5, x, torch.nan)[:, None].nanmedian(2, keepdim=True).values,
        torch.where(x > 0, torch.nan, x).nanmedian(),
    ),
    "most frequent": lambda x: (
        x.round().mode(1).values,
        x.round()[:, None].repeat(1, 3, 1).mode(1, keepdim=True).values,
    ),
    "larger and smaller number": lambda x: (
        torch.fmax(torch.where(x > 0, torch.nan, x), x.flip(1)),
        torch.fmin(x.flip(1), torch.where(x > 0, torch.nan, x)),
    ),
    "averages with another divisor": lambda x: (
        torch.nn.functional.avg_pool2d(x[:, None, None], (1, 3), stride=2, divisor_override=2),
        torch.nn.functional.avg_pool2d(x[:, None, None].repeat(1, 1, 4, 1), 3, 1, 1, False, False, 4),
    ),
    "frequencies": lambda x: (
        x * torch.fft.fftfreq(x.shape[1], 0.25),
        x[:, :4] + torch.fft.rfftfreq(6),
        x[:, :1] * torch.fft.fftfreq(7, dtype=torch.float64),
    ),
    "squeeze of sizes other than 1": lambda x: (
        x.squeeze(1),
        x[:, None].squeeze(1),
        x[:, None].squeeze((-1, 1)),
        x[:, None].squeeze((1, 2)),
        x.sum().squeeze(0),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator(name: str, tmp_path: Path) -> None:
    """Fails if export refuses the operator, or if the file's outputs are wrong at a batch size that differs from the
    example's batch size."""
    made = accel.export(OPERATORS[name], example=(torch.randn(2, 6),), out=tmp_path / "m.onnx", simplify=False)
    x = torch.randn(5, 6)
    with accel.load(made) as session:
        found, wanted = (torch.utils._pytree.tree_leaves(one(x)) for one in (session, OPERATORS[name]))
        torch.testing.assert_close(found, wanted, equal_nan=True)


class Translator(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Transformer(8, 2, 1, 1, 8, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        found: torch.Tensor = self.net(source, target, tgt_mask=mask)
        return found


def test_a_transformer_of_torch_with_a_causal_mask(tmp_path: Path) -> None:
    """Fails if torch's own transformer can't be exported because torch checks whether the mask is causal. Torch's check
    reads the mask's values, which aren't known during an export."""
    net = Translator().eval()
    dynamic = {"source": {0: "batch"}, "target": {0: "batch", 1: "length"}}
    example = (torch.randn(2, 4, 8), torch.randn(2, 3, 8))
    made = accel.export(net, example=example, dynamic=dynamic, out=tmp_path / "m.onnx", simplify=False)
    source, target = torch.randn(3, 4, 8), torch.randn(3, 6, 8)
    with accel.load(made) as session, torch.no_grad():
        torch.testing.assert_close(session(source, target), net(source, target), rtol=1e-4, atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


class _Edges(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        probability = x.sigmoid()
        return {
            "angle": torch.atan2(y, x),
            "angle of a complex number": torch.complex(x, y).angle(),
            "sign": torch.signbit(y),
            "log": torch.log1p(y),
            "exp": torch.expm1(x),
            "rest": x % y,
            "rest of a number": x % (2 * math.pi),
            "log of a probability": probability.log(),
            "odds": (probability.clamp(min=1e-30) / (1 - probability)).log()[x < 0],
            "distances": torch.cdist(x[:, None].nan_to_num(0, 9, -9), y.nan_to_num(0, 9, -9)[:, None], p=1),
            "largest distances": torch.cdist(
                x[:, None].nan_to_num(0, 9, -9), y.nan_to_num(0, 9, -9)[:, None], p=math.inf
            ),
        }


def test_the_edges_of_functions(tmp_path: Path) -> None:
    """Fails if a function is wrong by more than rounding at zeros of both signs, at infinity, where digits cancel, or
    far from 0."""
    numbers = [0.0, -0.0, 1e-7, -1e-6, 0.3, -0.7, 1.0, -2.0, 100.3, -17.0, -30.0, 80.0, math.inf, -math.inf, math.nan]
    x = torch.tensor([one for one in numbers for _ in numbers])
    y = torch.tensor([other for _ in numbers for other in numbers])
    made = accel.export(_Edges(), example=(torch.rand(4), torch.rand(4)), out=tmp_path / "m.onnx", simplify=False)
    with accel.load(made) as session:
        found, wanted = session(x, y), _Edges()(x, y)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=2e-6, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


class _WideIntegers(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.maximum(x, y),
            torch.minimum(x, y),
            x.clamp(-3, 3),
            x.clamp(min=0),
            x.clamp(y, y.flip(0)),
            x.clamp(max=2**40),
            x.relu(),
            x.sign(),
            x.amax(1),
            x.amin((0, 1), keepdim=True),
            x.max(),
            *x.min(0),
            *x.max(1, keepdim=True),
            x.sum(),
            x.sum(1),
            x.sum((0, 1), keepdim=True),
            (x > y).sum(1),
            x.prod(1),
            x.prod(),
            x.prod(0, keepdim=True),
            x.cumprod(1),
        )


def test_wide_integers_are_exact(tmp_path: Path) -> None:
    """Fails if an operator computes int64 as floats, or compares only 32 bits of them. Then hashes and times in
    milliseconds are wrong."""
    numbers = [2**31, 1, -5, 2**53 + 1, 3037000500, -3037000500, 7, -(2**53) - 1, 2**40, 2**40 + 1, 2**33, 2**32]
    x = torch.tensor(numbers).reshape(3, 4)
    example = (torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64))
    made = accel.export(_WideIntegers(), example=example, out=tmp_path / "m.onnx")
    with accel.load(made) as session:
        for number, (got, wanted) in enumerate(
            zip(session(x, x.roll(1, 1)), _WideIntegers()(x, x.roll(1, 1)), strict=True)
        ):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=lambda m, n=number: f"output {n}: {m}")


class _Integers(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.where(y == 0, 7, y)
        return (
            *(torch.div(x, by, rounding_mode=mode) for mode in ("trunc", "floor") for by in (y, 7, -7)),
            *(torch.fmod(x, by) for by in (y, 7, -7)),
            *(x // by for by in (y, 7, -7)),
            *(x % by for by in (y, 7, -7)),
            7 // y,
            *(rounded(x) for rounded in (torch.ceil, torch.floor, torch.round, torch.trunc)),
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
def test_integers_are_divided_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    """Fails if the file divides integers as floats, which are exact only up to 2^24 or 2^53, or rounds a negative
    quotient in the wrong direction."""
    most = torch.iinfo(dtype).max
    numbers = [0, 1, 6, 7, 13, 100, 2**24 + 3, 1_999_999_999, 2**53 + 1, 2**62 + 1]
    x = torch.tensor([sign * n for sign in (1, -1) for n in numbers if n <= most], dtype=dtype)
    y = torch.tensor([7, -7, 3, -100, 5, -2, 9] * 3, dtype=dtype)[: len(x)]
    made = accel.export(_Integers(), example=(x, y), out=tmp_path / "m.onnx", simplify=False)
    with accel.load(made) as session:
        for got, wanted in zip(session(x, y), _Integers()(x, y), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


class _Divided(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.div(x, 7, rounding_mode="trunc"), (x.float() / 7).to(torch.int64)


def test_the_gate_asks_for_equal_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an export passes whose integers are only nearly those of PyTorch, or if the advice fails when it is
    followed. The second output rounds floats, and needs no equality. Without accel's translation, the exporter divides
    integers as floats, which is exact for small numbers."""
    monkeypatch.setattr(integers, "translation_table", dict)
    monkeypatch.setitem(onnx_from_torch._RUNGS, "legacy", onnx_from_torch._RUNGS["dynamo"])
    only: Any = {"out": tmp_path / "m.onnx"}
    said = r"output_0 has an error of .*from integers alone.*give their range with inputs=\['x:int64\[n\]\{0..1000\}'\]"
    with pytest.raises(ExportFailed, match=said):
        accel.export(_Divided(), inputs=["x:int64[n]{0..2000000000}"], **only)
    assert accel.export(_Divided(), inputs=["x:int64[n]{0..1000}"], **only).path.is_file()
