"""Proves that tensor-parallel plans match the right modules, that wrong plans are refused, and that pipeline stages are
balanced."""

from __future__ import annotations

import functools
import inspect
import random
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from accel.cli import group, run
from accel.errors import BadConfig
from accel.examples.gpt import GPT, GPTConfig
from accel.train.config.schema import ParallelConfig
from accel.train.data.packing import OwnDocument
from accel.train.optimizer.norm import share_of_squares
from accel.train.parallel import split
from accel.train.parallel.context import split_names
from accel.train.parallel.pipeline import Stage, Turn, balance, chain, costs, places, turns
from accel.train.parallel.split import Times, best, step_seconds
from accel.train.parallel.tensor import check_sequence, match
from accel.train.parallel.tensor_check import attempt, check_heads
from accel.train.run.launch import train
from accel.train.simulate import fake_world
from tests.support import small_gpt as small
from tests.support.runs import config_of, rows_of


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


def test_the_modules_of_a_cut_are_named_by_pattern() -> None:
    """Fails if a pattern of ``cp_split`` doesn't find every block, or if a name that matches nothing is passed over."""
    names = split_names(_gpt(2), ParallelConfig(cp=2, cp_split="embed, blocks.*.norm1"))
    assert names == ["embed", "blocks.0.norm1", "blocks.1.norm1"]
    with pytest.raises(BadConfig, match=r"no module 'blocks.\*.rope', which parallel.cp_split names"):
        split_names(_gpt(2), ParallelConfig(cp=2, cp_split="embed, blocks.*.rope"))


def test_a_wrapped_forward_shows_its_parameters() -> None:
    """Fails if a model whose attention is replaced no longer shows what its ``forward`` takes. The command that exports
    a trained decoder depends on it."""
    model = _gpt(1)
    shown = inspect.signature(model.forward)
    OwnDocument().wrap(model)
    assert inspect.signature(model.forward) == shown


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
    accept a plan if its embedding splits the sequence. Context parallel has to cut the sequence first, so accel must
    refuse a module that would split it before."""
    columns = {"blocks.*.attention.[qkv]*": "column", "blocks.*.attention.out": "row", "head": "vocabulary"}
    model = _gpt()
    with pytest.raises(
        BadConfig, match=r"blocks\.0\.attention\.query would gather .* --parallel.sequence_parallel=false"
    ):
        check_sequence(model, match(model, columns))
    for more in ({"embed.tokens": "vocabulary"}, {"embed.positions": "split"}):
        check_sequence(model, match(model, {**columns, **more}))
    check_sequence(model, match(model, {"blocks.*.attention.out": "row"}))
    plan = match(model, {**columns, "embed.tokens": "vocabulary", "embed.positions": "split"})
    for first in (["embed"], ["embed.positions", "embed.tokens"]):
        check_sequence(model, plan, first)
    with pytest.raises(BadConfig, match=r"embed.positions splits the .* cuts it after embed.tokens; add embed.positi"):
        check_sequence(model, plan, ["embed.tokens"])


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
    check_heads(model, plan, found, 2, cp=2)
    with pytest.raises(BadConfig, match=r"query makes 4 heads, of which tp 2 leaves 2 on a rank, and cp 4 can't share"):
        check_heads(model, plan, found, 2, cp=4)
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


@functools.cache
def _order(pp: int, schedule: str, batches: int) -> list[list[Turn]]:
    with fake_world(pp):
        return turns(pp, schedule, batches)


@st.composite
def _nets(draw: st.DrawFn) -> tuple[Times, list[list[Turn]], int]:
    """Draws the times of a small net, the order of passes and the number of stages."""
    schedule, pp = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"])), draw(st.integers(2, 4))
    order = _order(pp, schedule, pp * draw(st.integers(1, 3)))
    stages = sum(map(len, places(pp, schedule)))
    count = stages + draw(st.integers(0, 4))
    seconds = st.one_of(st.just(0.0), st.floats(0.01, 1), st.floats(1, 10))
    forward, backward, links = (
        draw(st.lists(seconds, min_size=size, max_size=size)) for size in (count, count, count - 1)
    )
    return Times(forward=forward, backward=backward, links=links), order, stages


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_nets())
def test_a_measured_split_of_a_small_net_is_the_best(net: tuple[Times, list[list[Turn]], int]) -> None:
    """Fails if a cut loses or reorders a module, or if another cut of a small net has a shorter step."""
    times, order, stages = net
    found = best(times, order, stages)
    assert [i for run in found for i in run] == list(range(len(times.forward)))
    assert all(found)
    assert step_seconds(found, times, order) == _least(times, order, stages)


def _least(times: Times, order: list[list[Turn]], stages: int) -> float:
    count = len(times.forward)
    cuts = combinations(range(1, count), stages - 1)
    return min(step_seconds([range(a, b) for a, b in pairwise((0, *cut, count))], times, order) for cut in cuts)


def test_the_search_for_a_split_is_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the search that larger nets need finds a step that is more than 5% longer than the shortest. The times
    of the modules span three orders of magnitude."""
    monkeypatch.setattr(split, "_ALL", 0)
    draw = random.Random(0)
    for _ in range(60):
        schedule, pp = draw.choice([("gpipe", 4), ("1f1b", 3), ("1f1b", 4), ("interleaved", 2), ("zero-bubble", 3)])
        order, stages = _order(pp, schedule, 2 * pp), sum(map(len, places(pp, schedule)))
        count = stages + draw.randint(2, 4)
        forward, backward, links = ([10 ** draw.uniform(-2, 1) for _ in range(count)] for _ in range(3))
        times = Times(forward=forward, backward=backward, links=links[1:])
        assert step_seconds(best(times, order, stages), times, order) <= 1.05 * _least(times, order, stages)


def test_the_seconds_of_a_step_are_those_of_the_schedule() -> None:
    """Checks the simulated step against formulas. Two stages of 1 s and 2 s a pass run m micro-batches in
    (m + p - 1) (1 + 2) s. A link of 4 s delays the second stage's first pass by 4 s, and the last gradient by 4 s."""
    even = Times(forward=[1.0, 1.0], backward=[2.0, 2.0], links=[0.0])
    for schedule in ("gpipe", "1f1b"):
        for batches in (2, 4):
            assert step_seconds([range(1), range(1, 2)], even, _order(2, schedule, batches)) == 3 * (batches + 1)
    far = Times(forward=[1.0, 1.0], backward=[2.0, 2.0], links=[4.0])
    assert step_seconds([range(1), range(1, 2)], far, _order(2, "gpipe", 4)) == 3 * 5 + 8
    # In the V of zero-bubble, the two stages in the middle are on one rank, so that their link takes no time.
    middle = Times(forward=[1.0] * 4, backward=[2.0] * 4, links=[0.0, 100.0, 0.0])
    assert step_seconds([range(i, i + 1) for i in range(4)], middle, _order(2, "zero-bubble", 4)) < 100


_SLOW = """
import torch

class Slow(torch.nn.Module):
    def forward(self, x):
        for _ in range(1000):
            x = x.sin()
        return x

def model():
    layers = [torch.nn.Linear(8, 8) for _ in range(6)]
    return torch.nn.Sequential(Slow(), *layers)

def data():
    return [(torch.ones(8) * i, torch.tensor(i)) for i in range(8)]
"""


def test_stages_are_cut_by_measured_times(tmp_path: Path) -> None:
    """The first module takes most of the time and has no FLOPs. Fails if the second stage doesn't begin as early as it
    can. The first module has no parameters, so the first stage needs the next module too."""
    source = tmp_path / "slow.py"
    source.write_text(_SLOW)
    named = {"model": f"{source}:model", "data": f"{source}:data", "micro_batch": 2, "steps": 1}
    train(config_of(**named, parallel={"pp": 2, "pipeline_split": "measured"}), tmp_path / "run", nproc=2)
    assert any("the pipeline is cut before 2: " in row.get("note", "") for row in rows_of(tmp_path / "run"))


def test_context_parallel_has_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if ``accel train --cp`` doesn't set the number of ranks that share sequences, beside ``--tp``."""
    (tmp_path / "run.toml").write_text("global_batch = 8\nmicro_batch = 1\n[shape]\nparams = 1000\n")
    line = ["train", str(tmp_path / "run.toml"), "--nproc", "4", "--dry-run", "-o", str(tmp_path / "run")]
    assert run(group, [*line, "--cp", "3"]) == 2
    assert "tp 1 x pp 1 x cp 3; use a multiple of 3 ranks" in capsys.readouterr().err
    assert run(group, [*line, "--cp", "2", "--tp", "4"]) == 2
    assert "tp 4 x pp 1 x cp 2; use a multiple of 8 ranks" in capsys.readouterr().err


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
    squares = sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None)
    assert added == pytest.approx(squares, rel=1e-5)
