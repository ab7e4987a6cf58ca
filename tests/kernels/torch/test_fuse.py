"""Proves that ``fuse`` replaces the right patterns, reports why other patterns stay, and keeps the outputs.

These tests fail if a pattern is missed. The tests fail if a pattern is fused although a sum broadcasts, an output is
used twice, or a batch norm is in training mode. The tests also fail if batch norm is folded with a wrong formula, or if
the verification accepts a wrong copy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import GateFailed, UnsupportedHere
from accel.kernels.torch import modules
from accel.kernels.torch.fuse import fuse
from accel.kernels.torch.verify import verify


class Block(nn.Module):
    """Computes a block with the patterns conv+bn+silu, conv+bn+relu, linear+gelu and linear+residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 8, 1)
        self.norm2 = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.Linear(8, 16)
        self.back = nn.Linear(16, 8)
        for norm in (self.norm, self.norm2):
            norm.running_mean = torch.rand(8)
            norm.running_var = torch.rand(8) + 0.5
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norm(self.conv(x)))
        x = self.depthwise(self.norm2(self.down(x)).relu())
        x = x.mean((2, 3))
        return x + self.back(nn.functional.gelu(self.up(x), approximate="tanh"))


def test_every_pattern_is_matched_and_reported() -> None:
    """Checks that each pattern is matched and reported, and that each output differs by at most 1e-5 of the largest
    element. The bound of 1e-5 covers the fp32 roundings of fewer than ten layers. The verification inside ``fuse``
    allows 1e-4."""
    torch.manual_seed(0)
    model = Block().eval()
    x = torch.randn(2, 3, 9, 7)
    fused, report = fuse(model, (x,))
    assert sorted(str(m) for m in report.matches) == [
        "back: linear + residual",
        "conv: conv2d + batch_norm + silu",
        "down: conv2d + batch_norm + relu",
        "up: linear + gelu_tanh",
    ]
    assert report.left == (("depthwise", "it has 8 groups"),)
    assert report.traced
    assert report.difference < 1e-5
    longer = torch.randn(5, 3, 12, 9)  # larger than the input that ``fuse`` used for the verification
    wanted = model(longer).detach()
    assert float((fused(longer).detach() - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    assert isinstance(model.up, nn.Linear), "the original must stay as it is"


def test_as_the_readme_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that ``accel.fuse(module)`` works as the README shows, with and without inputs. Without inputs, the shapes
    are unknown, so ``fuse`` doesn't fuse the sum and verifies each layer alone."""
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(2, 3, 9, 7)
    call: Any = accel.fuse
    fused, report = call(model)
    assert sorted(str(m) for m in report.matches) == [
        "back: linear",
        "conv: conv2d + batch_norm + silu",
        "down: conv2d + batch_norm + relu",
        "up: linear + gelu_tanh",
    ]
    assert report.left == (("depthwise", "it has 8 groups"),)
    assert 0 < report.difference < 1e-5, "a fused sum differs in its last bits: zero means nothing was compared"
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)
    assert "back: linear + residual" in [str(m) for m in call(model, (x,))[1].matches]
    right = modules.fused_conv2d
    monkeypatch.setattr(modules, "fused_conv2d", lambda *a, **k: right(*a, **{**k, "act": "none"}))
    with pytest.raises(GateFailed, match="output 0 of the fused module differs from the original by"):
        call(model)


def test_a_broadcasting_sum_and_a_value_used_twice_are_not_taken_in() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            y = self.first(x) + row
            z = self.second(y)
            return z.relu() + z

    x, row = torch.randn(3, 4), torch.randn(4)
    model = Model().eval()
    fused, report = fuse(model, (x, row))
    assert [str(m) for m in report.matches] == ["first: linear", "second: linear"]
    torch.testing.assert_close(fused(x, row), model(x, row), rtol=1e-5, atol=1e-5)


def test_a_module_that_can_not_be_traced_is_swapped_by_its_structure() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.body(x)
            return y if y.sum() > 0 else -y

    model, x = Model().eval(), torch.randn(2, 2, 6, 6)
    fused, report = fuse(model, (x,))
    assert not report.traced
    assert [str(m) for m in report.matches] == ["body.0: conv2d + batch_norm + relu", "body.4: linear"]
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)


class Residual(nn.Module):
    """Adds a skip branch with a convolution to a conv + bn + relu block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.skip = nn.Conv2d(3, 8, 1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu() + self.skip(x)


def test_the_residual_of_a_convolution_is_inside_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the report says "+ residual" although the sum still runs as a separate operation after the kernel."""
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(2, 3, 9, 7)
    fused, report = fuse(model, (x,))
    assert sum(match.residual for match in report.matches) == 1
    inside: list[bool] = []
    right = modules.fused_conv2d

    def spy(*a: torch.Tensor, **k: Any) -> torch.Tensor:
        inside.append(k["residual"] is not None)
        return right(*a, **k)

    monkeypatch.setattr(modules, "fused_conv2d", spy)
    longer = torch.randn(5, 3, 12, 10)  # larger than the input that ``fuse`` used for tracing
    torch.testing.assert_close(fused(longer), model(longer), rtol=1e-5, atol=1e-5)
    assert sorted(inside) == [False, True]
    layer = modules.FusedConv2d(torch.randn(4, 3, 3, 2), None, "relu", (2, 1), (1, 2), (2, 1))
    plain = layer(longer[:, :2])
    channels = torch.randn(1, 4, 1, 1)
    # adding ``channels`` needs broadcasting, so the sum is computed by PyTorch and not by the kernel
    torch.testing.assert_close(layer(longer[:, :2], channels), plain + channels)
    assert layer(longer[:, :2], plain.double()).dtype == torch.float64  # PyTorch adds the residual
    assert inside[2:] == [False] * 3
    torch.testing.assert_close(layer(longer[:, :2], plain), 2 * plain)
    assert inside[-1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_linear(dtype: torch.dtype) -> None:
    """Checks that ``fuse`` accepts a half-precision layer. The limit inside ``fuse`` is four times the dtype's rounding
    error. The fused layer rounds once, and the original layer rounds twice."""
    model, x = nn.Sequential(nn.Linear(32, 16), nn.GELU()).to(dtype).eval(), torch.randn(2, 5, 32, dtype=dtype)
    fused, report = fuse(model, (x,))
    assert [str(m) for m in report.matches] == ["0: linear + gelu_erf"]
    assert fused(x).dtype == dtype


def test_a_wrong_copy_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = modules.fused_gemm
    monkeypatch.setattr(modules, "fused_gemm", lambda *a, **k: right(*a, **{**k, "bias": None}))
    with pytest.raises(GateFailed, match="output 0 of the fused module differs from the original by"):
        fuse(nn.Linear(4, 4).eval(), (torch.randn(2, 4),))


def test_training_mode_is_refused() -> None:
    with pytest.raises(UnsupportedHere, match="in training mode"):
        fuse(nn.Linear(4, 4), (torch.randn(2, 4),))


@pytest.mark.parametrize("inputs", [None, (torch.randn(2, 3, 9, 7),)])
def test_a_part_in_training_mode_is_refused(inputs: tuple[torch.Tensor, ...] | None) -> None:
    """Fails if a batch norm in training mode is folded with its running statistics, or if ``fuse`` changes the running
    statistics."""
    model = Residual().eval()
    model.norm.train()
    before = model.norm.running_mean.clone()
    with pytest.raises(UnsupportedHere, match="norm is in training mode"):
        fuse(model, inputs)
    assert torch.equal(model.norm.running_mean, before)


@pytest.mark.parametrize("inside", [torch.float32, torch.bfloat16])
def test_autocast_is_followed(inside: torch.dtype) -> None:
    """Fails if, under autocast, the fused module differs from the original by more than two times the rounding error of
    bf16. The weights are fp32, the inputs are fp32 or bf16, and the output is bf16."""
    torch.manual_seed(0)
    linear, conv = nn.Sequential(nn.Linear(32, 16), nn.GELU()).eval(), Residual().eval()
    for model, x in ((linear, torch.randn(3, 32)), (conv, torch.randn(2, 3, 9, 7))):
        fused, _ = fuse(model, (x,))
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            wanted, got = model(x.to(inside)), fused(x.to(inside))
        assert got.dtype == wanted.dtype == torch.bfloat16
        assert float((got - wanted).float().abs().max()) <= 2.0**-6 * float(wanted.float().abs().max())


class Written(nn.Module):
    """Contains statements whose only effect is to write to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h.masked_fill_(h > 0.5, -2.0)
        first = h[:, :2]
        first += 5
        again = self.down(h)
        torch.relu_(again)
        more = self.up(again)
        self.act(more)
        late = self.down(x)
        x.add_(1)
        return more + h + (late + x)


class Inherited(Written):
    """Inherits ``forward`` from another module."""


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y if mask is None else y * mask


class OneByOne(nn.Module):
    """Calls the layers of its Sequential one by one. The loop depends on tensor values, so the module can't be
    traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.body:
            x = layer(x) if float(x.abs().max()) > 0 else x
            found.append(x.mean())
        return torch.stack(found)


class Twice(nn.Module):
    """Contains the same pooling layer twice in a Sequential, and can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        pool = nn.AvgPool2d(2)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), pool, nn.Conv2d(4, 4, 1), pool, nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y if float(y.sum()) > -1e9 else -y


@torch.no_grad()
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(Written, (3, 6)), (Inherited, (3, 6)), (Optional, (3, 6)), (OneByOne, (2, 3, 12, 12)), (Twice, (2, 3, 12, 12))],
)
def test_what_a_module_does_beside_its_layers_stays(kind: type[nn.Module], shape: tuple[int, ...], given: bool) -> None:
    """Fails if statements that write to their input disappear or run at another time, or if an optional argument is
    ignored. Also checks that ``fuse`` doesn't fuse layers that aren't adjacent, or layers of a Sequential that the
    module calls one by one."""
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(shape)
    wanted = model(x.clone())
    fused, report = fuse(model, (x,) if given else None)
    assert report.matches
    got = fused(x.clone())
    assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    assert not any(part.training for part in fused.modules())
    again, _ = fuse(fused, x if given else None)
    torch.testing.assert_close(again(x.clone()), got, rtol=1e-5, atol=1e-5)
    if kind is Optional:
        mask = torch.zeros(6)
        torch.testing.assert_close(fused(x, mask), model(x, mask))


def test_a_sum_in_place_is_taken_in_where_inputs_show_that_it_may() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.body(x)
            y += x
            return y

    model, x = Model().eval(), torch.randn(3, 6)
    assert [str(match) for match in fuse(model, x)[1].matches] == ["body: linear + residual"]
    assert [str(match) for match in fuse(model)[1].matches] == ["body: linear"]


def test_an_image_without_a_batch() -> None:
    model, x = Residual().eval(), torch.randn(2, 3, 9, 7)
    fused = modules.FusedConv2d(
        model.skip.weight.permute(0, 2, 3, 1).contiguous(), model.skip.bias, "relu", (2, 2), (0, 0), (1, 1)
    )
    torch.testing.assert_close(fused(x[0]), model.skip(x[0]).relu(), rtol=1e-5, atol=1e-5)
    residual = torch.randn_like(fused(x[0]))
    torch.testing.assert_close(fused(x[0], residual), model.skip(x[0]).relu() + residual, rtol=1e-5, atol=1e-5)


def test_an_empty_batch_is_an_empty_result() -> None:
    linear, conv = nn.Sequential(nn.Linear(4, 5), nn.GELU()).eval(), Residual().eval()
    for model, x in ((linear, torch.randn(2, 3, 4)), (conv, torch.randn(2, 3, 9, 7))):
        fused, _ = fuse(model, (x,))
        assert fused(x[:0]).shape == model(x[:0]).shape
        assert fused(x).shape == model(x).shape


def test_hooks_and_parametrizations_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))).eval()
    model[0].register_forward_hook(lambda *_: None)
    _, report = fuse(model, (torch.randn(2, 4),))
    assert not report.matches
    assert [name for name, _ in report.left] == ["0", "1"]


def test_a_module_that_loses_an_output() -> None:
    """Checks the error for a fused module that returns fewer outputs than the original module. The error must advise
    leaving the original module unfused."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    with pytest.raises(GateFailed, match="returns 1 tensors instead of 2; leave this module unfused"):
        verify(Two(), nn.Identity(), (torch.ones(2),))
