"""Proves that fp8 products round their operands as torch's fp8 types do, and that a run in fp8 learns like one in
bf16."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel.errors import BadConfig, MissingExtra
from accel.train.config.rules import problems
from accel.train.config.schema import PrecisionConfig
from accel.train.precision.fp8 import convert, rounded
from tests.support.runs import config_of, rows_of, trainer_of

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 17), nn.Linear(17, 16))


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_rounding_is_torchs(form: torch.dtype) -> None:
    """Fails if a value isn't the nearest value of the format, or if the largest value of a tensor or row overflows. The
    rows differ by a factor of 10^12, so one scale for all would lose the small rows."""
    torch.manual_seed(1)
    value = torch.randn(6, 40) * torch.tensor([1.0, 1e-9, 1e3, 1e-3, 1.0, 0.0])[:, None]
    grid = torch.arange(256, dtype=torch.uint8).view(form).float()
    grid = grid[grid.isfinite()]
    for dim in (None, 1):
        scale = torch.finfo(form).max / (value.abs().amax() if dim is None else value.abs().amax(1, keepdim=True))
        scale = scale.clamp(max=2.0**60)
        if dim is not None:
            scale = 2 ** scale.log2().floor()
        nearest = grid[(value[..., None] * scale[..., None] - grid).abs().argmin(-1)] if dim is not None else None
        found = rounded(value, form, dim)
        if nearest is not None:
            torch.testing.assert_close(found * scale, nearest, rtol=0, atol=0)
        relative = ((found - value).abs() / value.abs().clamp(min=1e-30))[0]
        assert float(relative[value[0].abs() > 1e-2].max()) < 2 ** -(3 if form == E4M3 else 2) / 1.9
    assert int((rounded(value, form, None)[1] != 0).sum()) == 0
    assert int((rounded(value, form, 1)[1] != 0).sum()) == 40


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_both_passes_multiply_rounded_operands(kind: str) -> None:
    """Computes the output and both gradients of a layer from rounded operands. Fails if an operand isn't rounded, has
    the wrong format, or has its scales along the wrong dim."""
    rows = kind == "rowwise"
    model = _model()
    weight, bias = (p.detach().clone() for p in model[0].parameters())
    convert(model, PrecisionConfig(fp8=kind), CPU)
    x = torch.randn(2, 5, 32) * torch.logspace(-3, 1, 32)
    leaf = x.clone().requires_grad_()
    gradient = torch.randn(2, 5, 48) * torch.logspace(-2, 2, 48)
    output = model[0](leaf)
    output.backward(gradient)
    flat, g = x.flatten(0, 1), gradient.flatten(0, 1)
    low = E4M3 if rows else E5M2
    across, along = (1, 0) if rows else (None, None)
    wanted = rounded(flat, E4M3, across) @ rounded(weight, E4M3, across).T + bias
    torch.testing.assert_close(output.flatten(0, 1), wanted)
    to_x = rounded(g, low, across) @ rounded(weight, E4M3, along)
    torch.testing.assert_close(leaf.grad.flatten(0, 1), to_x)  # type: ignore[union-attr]
    torch.testing.assert_close(model[0].weight.grad, rounded(g, low, along).T @ rounded(flat, E4M3, along))
    torch.testing.assert_close(model[0].bias.grad, g.sum(0))
    assert (output.flatten(0, 1) - (flat @ weight.T + bias)).abs().max() > 1e-3


def test_what_stays_high_is_said(tmp_path: Path) -> None:
    """Fails if a layer that matches a pattern, or whose sizes aren't multiples of 16, runs in fp8, or isn't named."""
    said, _ = convert(_model(), PrecisionConfig(fp8="rowwise"), CPU)
    assert said == "1 of 3 linear layers compute in fp8; these don't: 1, 2"
    said, _ = convert(_model()[:1], PrecisionConfig(fp8="rowwise"), CPU)
    assert said.endswith("; if 0 makes the model's output, precision.fp8_keep = '0' is more exact")
    with pytest.raises(BadConfig, match="no linear layer for fp8"):
        convert(_model(), PrecisionConfig(fp8="rowwise", fp8_keep="0, x"), CPU)
    table = {"mode": "autocast-bf16", "fp8": "rowwise", "fp8_keep": "head, *.down"}
    trainer_of(tmp_path, steps=1, precision=table).run()
    (note,) = (row["note"] for row in rows_of(tmp_path) if "fp8" in row.get("note", ""))
    assert note == (
        "15 of 19 linear layers compute in fp8; these don't: blocks.0.down, blocks.1.down, blocks.2.down, head"
    )


def test_a_gpu_computes_with_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if torchao gets other layers or another recipe than the config says, or if its absence isn't said."""
    asked: list[Any] = []

    def converted(module: nn.Module, config: Any, module_filter_fn: Any) -> None:
        asked.append((config, [name for name, part in module.named_modules() if module_filter_fn(part, name)]))

    kind = SimpleNamespace(from_recipe_name=lambda name: f"recipe {name}")
    stand_in = SimpleNamespace(convert_to_float8_training=converted, Float8LinearConfig=kind)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=stand_in))
    monkeypatch.setitem(sys.modules, "torchao.float8", stand_in)
    convert(_model(), PrecisionConfig(fp8="tensorwise"), torch.device("cuda"))
    assert asked == [("recipe tensorwise", ["0"])]
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingExtra, match=r"torchao is not installed.*\[fp8\]"):
        convert(_model(), PrecisionConfig(fp8="tensorwise"), torch.device("cuda"))


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_torchao_rounds_the_same(kind: str) -> None:
    """Compares output and gradients with torchao's own emulation on a CPU, if torchao is installed."""
    float8 = pytest.importorskip("torchao.float8")
    from dataclasses import replace

    own, other = _model(), _model()
    convert(own, PrecisionConfig(fp8=kind), CPU)
    recipe = replace(float8.Float8LinearConfig.from_recipe_name(kind), emulate=True)
    float8.convert_to_float8_training(other, config=recipe, module_filter_fn=lambda _, name: name == "0")
    x = torch.randn(8, 32)
    for model in (own, other):
        model[0](x).pow(2).sum().backward()
    torch.testing.assert_close(own[0](x), other[0](x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own[0].weight.grad, other[0].weight.grad, rtol=1e-5, atol=1e-4)


_NOISY = """
import torch

def data():
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 61, (4000, 16), generator=generator)
    noise = torch.randint(0, 61, ids.shape, generator=generator)
    kept = torch.rand(ids.shape, generator=generator) < 0.5
    return list(zip(ids, torch.where(kept, (ids * 3 + 1) % 61, noise)))
"""


def _learned(folder: Path, fp8: str) -> float:
    """Returns the mean loss of the last 50 of 500 steps in bf16, with or without products in fp8."""
    folder.mkdir()
    (folder / "noisy.py").write_text(_NOISY)
    words = {"data": f"{folder / 'noisy.py'}:data", "optimizer": {"lr": 3e-3}, "steps": 500}
    trainer = trainer_of(folder / "run", precision={"mode": "bf16", "fp8": fp8}, **words)
    batches = trainer.batches()
    return sum([trainer.one_step(batches)["loss"] for _ in range(500)][-50:]) / 50


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Returns the loss in bf16, with which the test compares each kind of fp8."""
    return _learned(tmp_path_factory.mktemp("noisy") / "bf16", "none")


@pytest.mark.proof(seconds=40)
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "delayed"])
def test_fp8_learns_like_bf16(tmp_path: Path, in_bf16: float, kind: str) -> None:
    """Fails if the loss of the small GPT after 500 steps differs by more than 1% from the loss in bf16. Half of the
    targets are random, so the loss stays near 2.7, and no sample is seen twice."""
    assert _learned(tmp_path / kind, kind) == pytest.approx(in_bf16, rel=0.01)
    assert 2 < in_bf16 < 3.5


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"precision": {"fp8": "blockwise"}}, "use one of none, tensorwise, rowwise, delayed"),
        ({"precision": {"fp8": "rowwise", "mode": "fp16"}}, "a bf16 precision.mode"),
        ({"precision": {"fp8": "rowwise"}, "parallel": {"pp": 2}}, "tp 1, pp 1"),
    ],
)
def test_configs_that_are_refused(tables: dict[str, object], said: str) -> None:
    """Fails if a config that can't run in fp8 is accepted."""
    assert any(said in problem for problem in problems(config_of(**tables), 2))
