"""Proves that TrainConfig keeps all values when it is read, overridden and written. A config that can't run must be
refused in one sentence."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.errors import BadConfig, BadData
from accel.train.config.rules import check
from accel.train.config.schedule import learning_rate
from accel.train.config.schema import TrainConfig
from accel.train.data.samples import MicroBatches, Order, loader
from accel.train.loss import cross_entropy
from accel.train.parallel import layout


def _config(**tables: object) -> TrainConfig:
    return TrainConfig.from_dict({"model": "m:f", "data": "m:d", **tables})


def test_toml_and_overrides(tmp_path: Path) -> None:
    """Fails if an override is lost or read as another type, or if writing and reading a config changes the config."""
    file = tmp_path / "run.toml"
    file.write_text(
        "model = 'm:f'\nsteps = 7\n[optimizer]\nlr = 1\nbetas = [0.8, 0.9]\n"
        "[tensor_parallel]\n'blocks.*.up' = 'column'\n"
    )
    config = TrainConfig.load(file, ["optimizer.lr=2e-3", "parallel.zero=3", "model=a.b:c", "micro-batch=4"])
    assert (config.optimizer.lr, config.parallel.zero, config.model) == (2e-3, 3, "a.b:c")
    assert (config.steps, config.micro_batch, config.optimizer.betas) == (7, 4, (0.8, 0.9))
    assert config.tensor_parallel == {"blocks.*.up": "column"}
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml())
    assert TrainConfig.load(again) == config


@pytest.mark.parametrize(
    ("text", "override", "says"),
    [
        ("stepz = 3", "", "has no key stepz"),
        ("[optimizer]\nlearning = 3", "", "has no key optimizer.learning"),
        ("steps = 'many'", "", "steps is 'many', but has to be a whole number"),
        ("steps = [", "", "is not a TOML file"),
        ("optimizer = 3", "", "optimizer has to be a table"),
        ("tensor_parallel = 'all'", "", "tensor_parallel has to be a table of strings"),
        ("[tensor_parallel]\nhead = 3", "", "tensor_parallel has to be a table of strings"),
        ("", "steps", "write --key=value"),
        ("[optimizer]\nbetas = 3", "", "has to be a list of numbers"),
        ("[optimizer]\nbetas = [1]", "", "has 1 numbers; give two"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, override: str, says: str) -> None:
    """Checks that an unknown key, a wrong type and a broken file are refused, and that the error names the mistake."""
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(BadConfig, match=says):
        TrainConfig.load(file, [override] if override else [])


@pytest.mark.parametrize(
    ("tables", "world", "says"),
    [
        ({"precision": {"mode": "fp12"}}, 1, "precision.mode is 'fp12'; use one of fp32"),
        ({"parallel": {"zero": 4}}, 2, "use stage 0, 1, 2 or 3"),
        ({"global_batch": 30, "micro_batch": 8}, 2, "use --global-batch=16"),
        ({"global_batch": 8, "micro_batch": 8}, 2, "use --global-batch=16"),
        ({"parallel": {"tp": 3}}, 4, "use a multiple of 3 ranks"),
        ({"parallel": {"replicate": 3}}, 4, "can't be divided evenly into 3 replicas"),
        ({"parallel": {"tp": 2}, "shape": {"heads": 3}}, 4, "size 2 has to divide 3 query heads"),
        ({"parallel": {"tp": 4}, "shape": {"heads": 8, "kv_heads": 2}}, 4, "8 query heads and 2 key-value heads"),
        ({"tensor_parallel": {"blocks.*": "diagonal"}}, 2, "is 'diagonal'; use one of column"),
        ({"parallel": {"cp": 2, "tp": 2}, "shape": {"heads": 6}}, 4, "divide 3 query heads that tp 2 leaves on a rank"),
        ({"parallel": {"cp": 3}}, 4, "tp 1 x pp 1 x cp 3; use a multiple of 3 ranks"),
        ({"parallel": {"compression": "int3"}}, 2, "use one of none, bf16, fp16, powersgd"),
        ({"parallel": {"compression": "bf16", "zero": 1}}, 2, "use parallel.zero = 0"),
        ({"parallel": {"compression": "powersgd"}, "precision": {"mode": "O1"}}, 2, "use a bf16 precision.mode"),
        ({"pack": 64, "parallel": {"pp": 2}}, 2, "use pp 1, cp 1 and compile = false with pack"),
        ({"pack": -1}, 1, "pack is -1; it can't be negative"),
        ({"drop_last": False, "parallel": {"pp": 2}}, 2, "use drop_last = true with pp"),
        ({"parallel": {"cp": 4}, "shape": {"heads": 6, "kv_heads": 1}}, 4, "divide 6 query heads"),
        (
            {"parallel": {"cp": 4}, "shape": {"heads": 4, "seq": 30}},
            4,
            "4 has to divide 30 tokens of a sequence evenly; use a divisor of 30",
        ),
        ({"parallel": {"tp": 4}, "shape": {"seq": 30}}, 4, "4 has to divide 30 tokens of a sequence evenly; use a div"),
        ({"parallel": {"tp": 2, "cp": 2}, "shape": {"seq": 30}}, 4, "2 has to divide 15 tokens that cp 2 leaves"),
        ({"compile": True, "parallel": {"tp": 2}}, 2, "use compile = false"),
        ({"parallel": {"zero": 3, "tp": 2, "qwz": True}}, 4, "use tp 1 and cp 1 with hpZ, qwZ and qgZ"),
        ({"parallel": {"zero": 3, "cp": 2, "hpz": 2}}, 8, "use tp 1 and cp 1 with hpZ, qwZ and qgZ"),
        ({"parallel": {"pp": 4}, "global_batch": 8, "micro_batch": 4}, 4, "use --micro-batch=2 --global-batch=8"),
        ({"parallel": {"pp": 2, "pipeline": "interleaved"}, "global_batch": 5, "micro_batch": 1}, 2, "a multiple of 2"),
        ({"parallel": {"pp": 2, "zero": 3}}, 4, "use ZeRO 2 with pp"),
        ({"parallel": {"offload": True}}, 2, "ZeRO 0 doesn't have"),
        ({"steps": 0}, 1, "steps is 0"),
        ({"optimizer": {"lr": float("nan")}}, 1, "optimizer.lr is nan"),
        ({"steps": 5, "schedule": {"warmup": 5}}, 1, "leave steps after the warm-up"),
        ({"precision": {"mode": "O3"}}, 1, "is 0 in float16"),
        ({"checkpoint": {"best": "top1"}}, 1, "nothing measures it; give evaluate, or pass --checkpoint.best= to"),
        ({"evaluate_every": 5}, 1, "evaluate_every is 5, and there is nothing to run; give evaluate a function"),
        ({}, 0, "world is 0; use at least 1"),
    ],
)
def test_impossible_runs_are_refused(tables: dict[str, object], world: int, says: str) -> None:
    """Checks that a config that can't run is refused, and that the one-sentence error names the fix."""
    with pytest.raises(BadConfig) as caught:
        check(_config(**tables), world)
    assert says in str(caught.value)


@pytest.mark.parametrize(("hang", "hours"), [(15.0, 0.5), (7200.0, 20.0), (0.0, 365 * 24.0)])
def test_ranks_wait_as_long_as_they_may_take(monkeypatch: pytest.MonkeyPatch, hang: float, hours: float) -> None:
    """Fails if the timeout of the process groups is shorter than ``hang_seconds``. Torch's default timeout of half an
    hour could end a run in which ranks wait for a long evaluation."""
    waits = []

    def noted(*_: object, timeout: timedelta, **__: object) -> None:
        waits.append(timeout)

    monkeypatch.setattr(layout.dist, "init_process_group", noted)
    monkeypatch.setattr(layout.dist, "new_group", noted)
    monkeypatch.setattr(layout, "init_device_mesh", lambda *_, **__: None)
    monkeypatch.setattr(layout.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert layout.join(_config(hang_seconds=hang)).rank == 1
    assert waits == [timedelta(hours=hours)] * 2


def test_apex_names() -> None:
    """Checks that the precision names O0 to O3 mean the same modes as in apex."""
    modes = [_config(precision={"mode": f"O{n}"}).precision.resolved for n in range(4)]
    assert modes == ["fp32", "autocast-fp16", "fp16", "fp16-only"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_global_batch_is_the_same_on_any_world(ranks: int) -> None:
    """Fails if the samples of a step depend on the number of ranks, repeat within an epoch, or change after
    a resume."""

    def steps(count: int, first: int = 0) -> list[list[int]]:
        orders = [iter(Order(50, global_batch=8, rank=rank, ranks=ranks, seed=3, first=first)) for rank in range(ranks)]
        return [[next(order) for order in orders for _ in range(8 // ranks)] for _ in range(count)]

    whole = steps(14)
    alone = iter(Order(50, global_batch=8, rank=0, ranks=1, seed=3))
    assert whole == [[next(alone) for _ in range(8)] for _ in range(14)]
    assert whole[9:] == steps(5, first=9)
    epoch = [index for step in whole[:6] for index in step]
    assert len(set(epoch)) == len(epoch) == 48
    assert whole[6:12] != whole[:6]


def test_the_loader_resumes_exactly() -> None:
    """Fails if a loader that starts at step 7 gives other batches than a loader that ran through the first seven
    steps."""
    data = [(index, -index) for index in range(40)]
    common = {"global_batch": 8, "micro_batch": 2, "rank": 1, "ranks": 2, "seed": 1, "processes": 0}
    through = iter(loader(data, first=0, **common))  # type: ignore[arg-type]
    for _ in range(2 * 7):  # seven steps with two micro-batches each
        next(through)
    resumed = iter(loader(data, first=7, **common))  # type: ignore[arg-type]
    for _ in range(6):
        (x, y), (a, b) = next(through), next(resumed)
        assert x.tolist() == a.tolist() == (-y).tolist() == (-b).tolist()


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(0, 9))
def test_ranks_with_unequal_numbers_of_samples_end_an_epoch_together(
    length: int, each: int, ranks: int, first: int
) -> None:
    """Fails if a rank runs out of micro-batches before another rank. Also fails if an epoch loses or repeats a sample,
    or if a resumed run sees other samples."""
    size = max(1, each // 2)
    batch = size * 2 * ranks

    def epoch(first: int, ranks: int, steps: int) -> list[list[int]]:
        orders = [
            Order(length, global_batch=batch, rank=rank, ranks=ranks, seed=5, first=first, drop_last=False)
            for rank in range(ranks)
        ]
        parts = [iter(MicroBatches(order, size)) for order in orders]
        micro = batch // (ranks * size)
        return [[index for part in parts for _ in range(micro) for index in next(part)] for _ in range(steps)]

    steps = -(-length // batch)
    seen = epoch(0, ranks, 2 * steps)
    for half in (seen[:steps], seen[steps:]):
        assert sorted(index for step in half for index in step) == list(range(length))
    assert epoch(first, ranks, steps) == epoch(0, ranks, first + steps)[first:]
    assert [sorted(step) for step in epoch(0, 1, steps)] == [sorted(step) for step in seen[:steps]]


def test_a_rank_without_samples_only_takes_part() -> None:
    """In the last batch, a rank may have no samples left. Checks that the loader of a rank without samples yields as
    many micro-batches as the loaders of other ranks, with None as targets."""
    data = [(index, -index) for index in range(5)]
    common = {"global_batch": 4, "micro_batch": 1, "ranks": 2, "seed": 1, "processes": 0, "drop_last": False}
    parts = [iter(loader(data, first=1, rank=rank, **common)) for rank in range(2)]  # type: ignore[arg-type]
    targets = [[next(part)[1] for _ in range(2)] for part in parts]
    assert [[y is None for y in part] for part in targets] == [[True, True], [False, True]]


def test_data_shorter_than_a_batch() -> None:
    """Fails if data with too few samples for a batch causes an endless loop instead of BadData."""
    with pytest.raises(BadData, match="the data has only 7 samples, but global_batch is 8"):
        Order(7, global_batch=8, rank=0, ranks=1, seed=0)
    with pytest.raises(BadData, match="the data has only 0 samples"):
        Order(0, global_batch=8, rank=0, ranks=1, seed=0, drop_last=False)


def test_schedules() -> None:
    """Fails if the learning rate's warm-up, the shape of its decay or its floor is wrong."""

    def rates(name: str) -> list[float]:
        config = _config(steps=12, optimizer={"lr": 1.0}, schedule={"name": name, "warmup": 2, "floor": 0.1})
        return [learning_rate(config, step) for step in (0, 1, 2, 7, 11)]

    assert rates("constant") == pytest.approx([0.5, 1, 1, 1, 1])
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.55, 0.19])
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.55, 0.1 + 0.9 * 0.0244717], abs=1e-6)


@pytest.mark.parametrize(
    ("outputs", "targets", "says"),
    [
        (
            {"logits": torch.zeros(2, 3)},
            torch.zeros(2, dtype=torch.int64),
            "the model returns a dict, but the default loss takes a tensor of class scores",
        ),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.float64), "the targets are float64, .*squared_error"),
    ],
)
def test_what_the_loss_of_classes_does_not_take(outputs: Any, targets: torch.Tensor, says: str) -> None:
    """Checks that the default loss raises ``BadConfig`` for unsupported outputs or targets, instead of torch's own
    error."""
    with pytest.raises(BadConfig, match=says):
        cross_entropy(outputs, targets)
