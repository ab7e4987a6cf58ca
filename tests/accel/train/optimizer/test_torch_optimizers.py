"""Proves that a config takes torch's optimizers and schedules, and parameter groups by patterns."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from accel.cli import group, run
from accel.errors import BadConfig
from accel.train.config.rules import check
from accel.train.config.schema import TrainConfig
from accel.train.loop import Trainer
from accel.train.optimizer.schedule import Rates
from accel.train.run.launch import train
from tests.support.runs import SMALL, config_of, logged, trainer_of

_NAMES = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]
_REFUSED = {
    "LBFGS": "runs the model several times a step",
    "SparseAdam": "needs sparse gradients",
    "Muon": r"can't be made \(Muon only supports 2D parameters",
}


def _gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns a dict that holds the gradients of the last step, as the optimizer got them."""
    found: dict[str, torch.Tensor] = {}
    stepped = trainer.optimizer.step

    def noted(factor: float) -> None:
        named = trainer.module.named_parameters()
        found.update({n: p.grad * factor for n, p in named if p.grad is not None})
        stepped(factor)

    trainer.optimizer.step = noted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("name", _NAMES)
def test_every_optimizer_of_torch_is_taken_and_resumed(tmp_path: Path, name: str) -> None:
    """Fails if an optimizer of torch can't be named in a config, takes another step than torch alone, or doesn't resume
    with the same losses. Each optimizer that accel refuses is refused in one sentence."""
    tables: dict[str, Any] = {"optimizer": {"name": f"torch.optim.{name}", "lr": 1e-2}, "steps": 6}
    if name in _REFUSED:
        with pytest.raises(BadConfig, match=_REFUSED[name]):
            trainer_of(tmp_path, **tables)
        return
    whole, first = trainer_of(tmp_path / "none", **tables), trainer_of(tmp_path, **tables)
    own = {n: p.detach().clone().requires_grad_() for n, p in whole.module.named_parameters()}
    alone = getattr(torch.optim, name)(own.values(), lr=1e-2, **({"weight_decay": 0.0} if name == "AdamW" else {}))
    batches = whole.batches()
    gradients = _gradients(whole)
    expected = [whole.one_step(batches)["loss"]]
    for parameter, gradient in zip(own.values(), gradients.values(), strict=True):
        parameter.grad = gradient
    alone.step()
    for parameter_name, parameter in whole.module.named_parameters():
        assert torch.allclose(parameter, own[parameter_name], rtol=0, atol=1e-6), parameter_name
    expected += [whole.one_step(batches)["loss"] for _ in range(5)]
    batches = first.batches()
    for _ in range(3):
        first.one_step(batches)
    first.save()
    again = trainer_of(tmp_path, **tables)
    again.resume()
    batches = again.batches()
    assert [again.one_step(batches)["loss"] for _ in range(3)] == expected[3:]


def test_groups_by_patterns(tmp_path: Path) -> None:
    """Fails if a parameter gets the options of another group, or if the schedule levels the rates of the groups."""
    groups = {"*norm*": {"weight_decay": 0.0}, "*.bias": {"weight_decay": 0.0, "lr": 1e-3}, "head.*": {"lr": 5e-3}}
    optimizer = {"name": "sgd", "lr": 1e-2, "momentum": 0.0, "weight_decay": 0.5, "groups": groups}
    trainer = trainer_of(tmp_path, steps=3, optimizer=optimizer, schedule={"name": "linear"})
    before = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}
    batches = trainer.batches()
    gradients = _gradients(trainer)
    for step in range(2):
        trainer.one_step(batches)
        for name, parameter in trainer.module.named_parameters():
            still = "norm" in name or name.endswith(".bias")
            rate = 1e-2 if "norm" in name else 1e-3 if name.endswith(".bias") else 5e-3 if "head" in name else 1e-2
            rate *= 1 - step / 3
            expected = before[name] - rate * (gradients[name] + (0.0 if still else 0.5) * before[name])
            assert torch.allclose(parameter, expected, rtol=0, atol=1e-6), name
            before[name] = parameter.detach().clone()


def test_two_ranks_with_shards(tmp_path: Path) -> None:
    """Fails if groups or an optimizer of torch give other losses with shards. An optimizer that needs whole matrices
    has to refuse shards, and to work without."""
    optimizer: dict[str, Any] = {"name": "torch.optim.RMSprop", "lr": 1e-3, "options": {"alpha": 0.9, "momentum": 0.5}}
    optimizer["groups"] = {"*.bias": {"weight_decay": 0.1, "lr": 1e-4}}
    tables = {"optimizer": optimizer, "schedule": {"name": "torch.optim.lr_scheduler.ExponentialLR"}}
    tables["schedule"]["options"] = {"gamma": 0.5}
    train(config_of(**tables, parallel={"zero": 3}), tmp_path / "two", nproc=2)
    train(config_of(**tables), tmp_path / "one")
    assert logged(tmp_path / "two") == pytest.approx(logged(tmp_path / "one"), abs=1e-4)
    whole = {"optimizer": {"name": "torch.optim.Adafactor"}, "steps": 1}
    with pytest.raises(BadConfig, match=r"Adafactor needs whole parameters, .* use parallel.zero = 0"):
        train(config_of(**whole, parallel={"zero": 3}), tmp_path / "shards", nproc=2)
    assert train(config_of(**whole), tmp_path / "whole", nproc=2)["steps"] == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StepLR", {"step_size": 2, "gamma": 0.5}),
        ("MultiStepLR", {"milestones": [2, 5]}),
        ("ConstantLR", {}),
        ("LinearLR", {"total_iters": 4}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("PolynomialLR", {"total_iters": 6, "power": 2.0}),
        ("CosineAnnealingLR", {"T_max": 5}),
        ("CosineAnnealingWarmRestarts", {"T_0": 3}),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 2}),
        ("OneCycleLR", {"max_lr": 0.5, "total_steps": 10}),
        ("LambdaLR", {"lr_lambda": "SOURCE:halved"}),
        ("MultiplicativeLR", {"lr_lambda": "SOURCE:slower"}),
    ],
)
def test_every_schedule_of_torch_is_taken(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Fails if a schedule gives other rates than torch, before or after a resume, or if the warm-up shifts it."""
    source = tmp_path / "rates.py"
    source.write_text("def halved(step):\n    return 0.5**step\n\ndef slower(step):\n    return 0.9\n")
    given = {k: v.replace("SOURCE", str(source)) if isinstance(v, str) else v for k, v in options.items()}
    schedule = {"name": f"torch.optim.lr_scheduler.{name}", "options": given}
    config = config_of(optimizer={"name": "sgd", "lr": 1.0}, schedule=schedule, steps=10)
    check(config, 1)
    assert TrainConfig.from_dict(tomllib.loads(config.to_toml())) == config
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    functions: dict[str, Any] = {}
    exec(source.read_text(), functions)
    own = {k: functions[v.partition(":")[2]] if isinstance(v, str) else v for k, v in given.items()}
    own |= {"cycle_momentum": False} if name in ("CyclicLR", "OneCycleLR") else {}
    made, expected = getattr(lr_scheduler, name)(optimizer, **own), []
    for _ in range(9):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    rates = Rates(config)
    assert [rates.at(step) for step in range(9)] == expected
    assert [Rates(config).at(6), rates.at(4), rates.at(7)] == [expected[6], expected[4], expected[7]]
    warm = config_of(optimizer={"name": "sgd", "lr": 1.0}, schedule={**schedule, "warmup": 2}, steps=10)
    found = [Rates(warm).at(step) for step in range(5)]
    assert found == pytest.approx([expected[0] / 2, *expected[:1], *expected[:3]])


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"optimizer": {"name": "rmsprop"}}, "use one of adamw, adam, sgd, or a class such as torch.optim.RMSprop"),
        (
            {"optimizer": {"name": "torch.optim.adamm"}},
            r"torch.optim has no adamm; did you mean torch.optim.Adam( or torch.optim.\w+)+\?$",
        ),
        (
            {"optimizer": {"name": "torch.optim.Nothing"}},
            "torch.optim has no Nothing; use adamw, adam, sgd, or a class such as torch.optim.RMSprop$",
        ),
        (
            {"optimizer": {"name": "torch.optimizers.Adam"}},
            "which is no optimizer .* use adamw, adam, sgd, or a class such",
        ),
        (
            {"schedule": {"name": "torch.optim.lr_scheduler.CosineAnealingLR"}},
            r"did you mean torch.optim.lr_scheduler.CosineAnnealingLR( or [\w.]+)*\?$",
        ),
        ({"optimizer": {"name": "torch.nn.Linear"}}, "which is no optimizer; use a class such as torch.optim.RMSprop"),
        ({"optimizer": {"options": {"rho": 1}}}, "adamw has no option rho; its options are: lr, betas"),
        ({"optimizer": {"options": {"amsgrad": True, "betas": 3}}}, r"adamw can't be made .*; correct the table optim"),
        ({"optimizer": {"groups": {"*.bias": {"speed": 1}}}}, "has no option speed"),
        (
            {"optimizer": {"groups": {"bias": {"lr": 1.0}}}},
            "'bias', which matches no parameter; the parameters are called",
        ),
        (
            {"optimizer": {"name": "torch.optim.Rprop", "weight_decay": 1.0}},
            "has no weight decay; use --optimizer.weight",
        ),
        ({"schedule": {"name": "step"}}, "or a class such as torch.optim.lr_scheduler.StepLR"),
        ({"schedule": {"name": "torch.optim.lr_scheduler.StepLR"}}, r"can't be made .*step_size.*schedule.options"),
        ({"schedule": {"name": "torch.optim.lr_scheduler.StepLR", "options": {"steps": 1}}}, "has no option steps"),
        ({"schedule": {"name": "torch.optim.lr_scheduler.ReduceLROnPlateau"}}, "follows a metric, .*LambdaLR"),
        ({"schedule": {"name": "torch.optim.lr_scheduler.SequentialLR"}}, "is made of other schedules"),
        ({"schedule": {"options": {"gamma": 1.0}}}, "are for a schedule of torch, not for constant"),
        ({"schedule": {"name": "torch.optim.SGD"}}, "which is no schedule; use e.g."),
    ],
)
def test_wrong_names_and_options(tmp_path: Path, tables: dict[str, Any], says: str) -> None:
    """Checks that a wrong optimizer, schedule or option is refused in one sentence that names the fix."""
    with pytest.raises(BadConfig, match=says):
        trainer_of(tmp_path, **tables)  # also checks the config


def test_the_documented_tables_and_options(tmp_path: Path) -> None:
    """Fails if the example in docs/how-to/training.md or an option on the command line isn't understood."""
    text = (Path(__file__).parents[4] / "docs" / "how-to" / "training.md").read_text()
    (example,) = re.findall(r"```text\n(\[optimizer\].*?)```", text, flags=re.DOTALL)
    file = tmp_path / "run.toml"
    file.write_text(
        f'model = "{SMALL}:model"\ndata = "{SMALL}:data"\nsteps = 1\nmicro_batch = 4\nglobal_batch = 8\n{example}'
    )
    words = f"train {file} --out {tmp_path / 'run'} -q --optimizer.options.alpha=0.5 --schedule.options.gamma=0.1"
    assert run(group, shlex.split(words)) == 0
    config = TrainConfig.from_dict(json.loads((tmp_path / "run" / "train.json").read_text()))
    assert (config.optimizer.options, config.schedule.options) == ({"alpha": 0.5}, {"step_size": 100, "gamma": 0.1})
    assert list(config.optimizer.groups) == ["*norm*", "*.bias", "head.*"]
