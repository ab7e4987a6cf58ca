"""Proves that accel exports models that compute with complex numbers inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import BadInputSpec, ExportFailed


class Weighted(nn.Module):
    """Passes an input and a complex weight to a function."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*shape, dtype=torch.cfloat, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.weight)


def _in_one_dim(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    low = torch.fft.rfft(x)[:, :, :5]
    out = torch.zeros(x.shape[0], 4, x.shape[-1] // 2 + 1, dtype=torch.cfloat)
    out[:, :, :5] = torch.einsum("bim,iom->bom", low, w)
    return torch.fft.irfft(out, n=x.shape[-1])


def _in_two_dims(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    found = torch.fft.rfft2(x, norm="ortho")
    out = torch.zeros_like(found)
    out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", found[:, :, :3, :3], w)
    out[:, :, -3:, :3] = torch.einsum("bixy,ioxy->boxy", found[:, :, -3:, :3], w.conj())
    return torch.fft.irfft2(out, s=x.shape[-2:], norm="ortho")


def _in_all_frequencies(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = torch.fft.ifft2(torch.fft.fftshift(torch.fft.fft2(x) * w, dim=(-2, -1)), norm="forward")
    return found.real, found.imag, torch.view_as_real(found)


def _in_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.view_as_complex(torch.stack([x, x + 1], -1))
    z = torch.bmm(z @ w, z.mT.contiguous()) + torch.addmm(w[0], z[0], w)[:, : x.shape[1]]
    return torch.cat([z.abs(), z.angle(), z.mH.real, (z.conj() / (z + 2j)).imag], -1)


def _in_powers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.exp(1j * torch.arange(6) * w[0]) * torch.polar(x.abs(), x) + torch.complex(x, -x)
    return torch.view_as_real(torch.log(z.reciprocal()) + z**2 - 3 / z.sqrt() + torch.sgn(z).cumsum(-1)).flatten(1)


LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "a Fourier layer in one dim": (_in_one_dim, (4, 4, 5), (4, 31)),
    "a Fourier layer in two dims": (_in_two_dims, (4, 4, 3, 3), (4, 12, 9)),
    "all frequencies": (_in_all_frequencies, (6, 10), (2, 6, 10)),
    "products": (_in_products, (5, 5), (3, 5)),
    "powers": (_in_powers, (6,), (6,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name: str, tmp_path: Path) -> None:
    """Fails if export refuses the layer, or if the file's outputs differ from PyTorch's outputs in float64 at another
    batch size by more than the rounding of float32."""
    function, weight, size = LAYERS[name]
    model = Weighted(function, *weight)
    made = accel.export(model, example=(torch.randn(2, *size),), out=tmp_path / "m.onnx", simplify=False)
    x = torch.randn(5, *size)
    with accel.load(made) as session, torch.no_grad():
        _assert_close(session(x), model(x))


@pytest.mark.parametrize("size", [1, 2, 33, 512, 1000, 1031])
def test_a_transform(size: int, tmp_path: Path) -> None:
    """Fails if a transform of an even, odd, split or prime size is wrong or loses precision."""

    def transform(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.fft.rfft(x, dim=1)
        return torch.view_as_real(found), torch.fft.irfft(found * found, n=size, dim=1)

    made = accel.export(transform, example=(torch.randn(2, size, 3),), out=tmp_path / "m.onnx", simplify=False)
    x = torch.randn(5, size, 3)
    with accel.load(made) as session:
        _assert_close(session(x), transform(x.double()))


def test_a_dynamic_size(tmp_path: Path) -> None:
    """Fails if the file of a Fourier layer is wrong at a size that differs from the example's size."""
    model = Weighted(_in_one_dim, 4, 4, 5)
    dynamic = {"x": {0: "batch", 2: "n"}}
    made = accel.export(
        model, example=(torch.randn(2, 4, 32),), dynamic=dynamic, out=tmp_path / "m.onnx", simplify=False
    )
    with accel.load(made) as session, torch.no_grad():
        for size in (20, 45):
            x = torch.randn(3, 4, size)
            _assert_close(session(x), model(x))


def test_an_operator_without_a_rule(tmp_path: Path) -> None:
    """Fails if the error doesn't name the operator, or doesn't name the fix."""

    def inverse(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(torch.complex(x, x.mT)).real

    with pytest.raises(ExportFailed, match=r"linalg_inv.* of complex numbers .* torch.view_as_real gives$"):
        accel.export(inverse, example=(torch.randn(2, 3, 3),), out=tmp_path / "m.onnx")


def _assert_close(found: Any, wanted: Any) -> None:
    for one, right in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert one.shape == right.shape
        assert (one - right).norm() <= 1e-6 * right.norm(), (one - right).norm() / right.norm()


def test_sizes_that_the_model_does_not_take(tmp_path: Path) -> None:
    """Fails if the error blames the Fourier transform for an export that fails only at the smallest size."""

    class Modes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x)[:, :6] * self.weight, n=10)

    given = {"inputs": ["x:float32[batch,n]"], "dims": {"n": "4:16:32"}}
    with pytest.raises(BadInputSpec, match="the model's n is at least 10: give dims="):
        accel.export(Modes(), **given, out=tmp_path / "m.onnx")
    accel.export(Modes(), **{**given, "dims": {"n": "10:16:32"}}, out=tmp_path / "m.onnx")
