"""Proves that tensor-parallel plans match the right modules, that wrong plans are refused, and that pipeline stages are
balanced."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel.errors import BadConfig
from accel.examples.gpt import GPT, GPTConfig
from accel.train.optimizer.norm import gradient_norm, share_of_squares
from accel.train.parallel.pipeline import Stage, balance, chain, costs, places
from accel.train.parallel.tensor import check_sequence, match
from accel.train.parallel.tensor_check import attempt, check_heads
from tests.support import small_gpt as small


def _gpt(layers: int = 3) -> GPT:
    return GPT(GPTConfig(vocab=61, layers=layers, hidden=32, heads=4, seq=16))


def test_a_plan_names_modules_by_pattern() -> None:
    """Checks that a ``*`` in a pattern never matches a dot, and that a pattern finds every block. Modules that match no
    pattern must get no parallel style."""
    plan = {"blocks.*.attention.[qkv]*": "column", "blocks.*.attention.out": "row", "*": "sequence"}
    found = match(_gpt(2), {k: v for k, v in plan.items() if k != "*"})
    names = ("query", "key", "value")
    assert found == {
        **{f"blocks.{i}.attention.{name}": "column" for i in range(2) for name in names},
        **{f"blocks.{i}.attention.out": "row" for i in range(2)},
    }
    assert set(match(_gpt(), {"*": "split"})) == {"", "embed", "blocks", "norm", "head"}


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"layers.*.query": "column"}, "matches no module of the model; the modules are embed, "),
        ({"head": "column", "he*": "row"}, "gives the module head both the styles column and row; keep one"),
        ({"norm": "row"}, "norm is a LayerNorm, but the style row needs a Linear"),
        ({"norm": "vocabulary"}, "the style vocabulary needs a Linear or an Embedding"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: dict[str, str], says: str) -> None:
    """Checks that accel refuses a plan for another model, and a plan that splits an unsuitable module."""
    with pytest.raises(BadConfig) as caught:
        match(_gpt(), plan)
    assert says in str(caught.value)


def test_columns_of_a_sequence_that_nothing_splits_are_refused() -> None:
    """Under sequence parallel, a column-parallel layer gathers the sequence that an earlier module has split. If no
    earlier module splits the sequence, accel must refuse the plan before torch raises an error about shapes. Accel must
    accept a plan if its embedding splits the sequence."""
    columns = {"blocks.*.attention.[qkv]*": "column", "blocks.*.attention.out": "row", "head": "vocabulary"}
    model = _gpt()
    with pytest.raises(
        BadConfig, match=r"blocks\.0\.attention\.query would gather .* --parallel.sequence_parallel=false"
    ):
        check_sequence(model, match(model, columns))
    for more in ({"embed.tokens": "vocabulary"}, {"embed.positions": "split"}):
        check_sequence(model, match(model, {**columns, **more}))
    check_sequence(model, match(model, {"blocks.*.attention.out": "row"}))


def test_heads_that_ranks_would_share_are_refused() -> None:
    """If a plan splits an attention head between ranks, accel must refuse the plan before torch raises an error about
    shapes. Accel must accept a plan that gives each rank whole heads. The check must not leave hooks in the model or
    change the model's mode."""
    model, ids = _gpt(), torch.randint(0, 61, (1, 16))
    found = attempt(model, ids, []).attentions
    assert [(one.module, list(one.query)) for one in found] == [
        (f"blocks.{i}.attention", [1, 4, 16, 8]) for i in range(3)
    ]
    assert model.training
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    plan = match(model, {"blocks.*.attention.[qkv]*": "column", "blocks.*.up": "column"})
    for tp in (2, 4):
        check_heads(model, plan, found, tp)
    for tp in (3, 8):
        with pytest.raises(BadConfig, match=rf"blocks.0.attention.query makes 4 heads of .* tp {tp} .* that divides 4"):
            check_heads(model, plan, found, tp)
    check_heads(model, match(model, {"blocks.*.up": "column"}), found, 8)  # attention isn't cut
    grouped = small.decoder()
    plan = match(grouped, {"layers.*.[qkv]": "column", "layers.*.up": "column"})
    seen = attempt(grouped, ids, []).attentions
    check_heads(grouped, plan, seen, 2)
    with pytest.raises(BadConfig, match=r"layers.0.k makes 2 heads of width 8, but tp 4 .* use a --tp that divides 2"):
        check_heads(grouped, plan, seen, 4)


def test_a_stage_sends_what_lies_in_one_piece() -> None:
    """A stage may end in a transpose, like a ViT's patch embedding. Fails if a stage that ends in a transpose returns a
    view, because a view can't be sent."""

    class Patches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(2).transpose(1, 2)

    image = torch.randn(2, 3, 4, 4)
    assert not Patches()(image).is_contiguous()
    found = Stage({"embed": Patches()}, "fp32")(image)
    assert found.is_contiguous()
    assert torch.equal(found, Patches()(image))


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 5))
def test_stages_are_balanced(weights: list[int], stages: int) -> None:
    """Fails if balancing loses, duplicates or reorders a module, or if a stage is empty. Also fails if another split
    into stages would make the most expensive stage cheaper."""
    if len(weights) < stages:
        with pytest.raises(BadConfig, match="use a smaller pp"):
            balance(weights, stages)
        return
    found = balance(weights, stages)
    assert [i for run in found for i in run] == list(range(len(weights)))
    assert all(found)
    cuts = combinations(range(1, len(weights)), stages - 1)
    dearest = min(max(sum(weights[a:b]) for a, b in zip((0, *cut), (*cut, len(weights)), strict=True)) for cut in cuts)
    assert max(sum(weights[i] for i in run) for run in found) == dearest


def test_every_stage_has_one_place() -> None:
    """Checks that every schedule has all stages, and that the zero-bubble schedule places its stages in a V shape."""
    for schedule, each in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)):
        assert sorted(i for rank in places(3, schedule) for i in rank) == list(range(3 * each))
    assert places(3, "zero-bubble") == [[0, 5], [1, 4], [2, 3]]


def test_a_chain_is_the_model() -> None:
    """Checks that the modules of the chain cover the whole model, and that equal blocks have equal costs."""
    model = _gpt()
    names = chain(model)
    assert names == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    found = costs(model, names, torch.randint(0, 61, (1, 16)))
    assert found[1] == found[2] == found[3] > found[5] > 0
    assert model.training
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert chain(plain) == ["0", "1", "2"]
    assert costs(plain, chain(plain), torch.ones(1, 3)) == [24, 0, 16]


def test_a_chain_that_is_not_the_model_is_refused() -> None:
    """Checks that accel refuses a pipeline that gives other outputs than the model, or leaves out parameters."""
    inputs = torch.randint(0, 61, (1, 16))
    for wrong, says in (
        (("embed", "blocks", "head"), "norm.weight is in no part of the pipeline's chain"),
        (("embed", "blocks", "norm", "norm", "head"), "the output of the pipeline's chain differs from the model's"),
        (("norm", "embed", "blocks", "head"), "can't be run"),
        (("embed", "layers"), "lists layers, which is not a module of the model"),
    ):
        model = _gpt()
        model.pipeline_chain = wrong  # type: ignore[assignment]
        nn.init.normal_(model.norm.weight)
        with pytest.raises(BadConfig, match=says):
            costs(model, chain(model), inputs)
    with pytest.raises(BadConfig, match="doesn't say where a pipeline may cut"):
        chain(nn.Linear(2, 2))


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5), st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_parts_of_gradients_add_up(shapes: list[list[int]], ranks: int) -> None:
    """Several ranks hold the same gradients. Checks that the ranks together count every element exactly once in the
    norm."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters[1:]:
        parameter.grad = torch.randn(parameter.shape)
    added = sum(float(share_of_squares(parameters, rank, ranks)) for rank in range(ranks))
    assert added == pytest.approx(float(gradient_norm(parameters)) ** 2, rel=1e-5)
