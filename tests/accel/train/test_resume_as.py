"""Proves that a run goes on in another precision where the user asks for it, and only then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accel.cli import group, run
from accel.errors import BadCheckpoint
from accel.train.loop import Trainer
from accel.train.run.launch import train
from tests.support.runs import SMALL, config_of, rows_of, trainer_of

_TIED = """

class Tied(GPT):
    def __init__(self):
        super().__init__(GPTConfig(vocab=VOCABULARY, layers=1, hidden=32, heads=4, seq=LENGTH))
        self.head.weight = self.embed.tokens.weight
"""


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.optimizer.weights(trainer.module).items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp16"), ("autocast-bf16", "bf16"), ("fp16", "bf16-only")],
)
def test_the_exact_weights_and_moments_go_on(tmp_path: Path, before: str, after: str) -> None:
    """Fails if a conversion rounds the weights although the new mode can hold them, loses the moments, or takes over a
    loss scale of a mode that scales nothing. Also fails if a run is converted without being asked."""
    source = tmp_path / "source.py"
    source.write_text(SMALL.read_text() + _TIED)
    common = {"model": f"{source}:Tied", "optimizer": {"lr": 1e-2}}
    first = trainer_of(tmp_path, **common, precision={"mode": before, "loss_scale": 256.0})
    batches = first.batches()
    for _ in range(3):
        first.one_step(batches)
    first.save()
    precision = {"mode": after, "loss_scale": 64.0}
    with pytest.raises(BadCheckpoint, match=f"the run began in {before}, .*pass --resume-as {after} to go on"):
        trainer_of(tmp_path, **common, precision=precision).resume()
    again = trainer_of(tmp_path, **common, precision=precision, checkpoint={"convert": True})
    again.resume()
    exact, taken = _weights(first), _weights(again)
    assert exact.keys() == taken.keys()
    for name, value in exact.items():
        assert torch.equal(taken[name], value.to(taken[name].dtype)), name
    for name, parameter in again.module.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, exact[name].to(parameter.dtype)), name
    moments, kept = first.optimizer.state_dict(), again.optimizer.state_dict()
    for name in (n for n in moments if n.endswith(("exp_avg", "exp_avg_sq", "step"))):
        assert torch.equal(kept[name], moments[name].to(kept[name].dtype)), name
    assert again.scale.scale == {"fp16": 64.0}.get(after, 1.0)
    losses = [one.one_step(one.batches())["loss"] for one in (first, again)]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


def test_two_ranks_go_on_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if ``--resume-as`` doesn't convert a sharded run, or if the converted run can't be resumed in turn."""
    out, file = tmp_path / "run", tmp_path / "run.toml"
    file.write_text(config_of(parallel={"zero": 3}, checkpoint={"every": 2}).to_toml())
    train(config_of(steps=2), out)
    line = ["train", str(file), "--nproc", "2", "--out", str(out), "-q"]
    assert run(group, [*line, "--precision", "bf16"]) == 1
    assert "the run began in fp32, and precision.mode is bf16 now; pass --resume-as bf16" in capsys.readouterr().err
    assert run(group, [*line, "--resume-as", "bf16", "--precision", "fp16"]) == 2
    assert "leave out --precision fp16" in capsys.readouterr().err
    assert run(group, [*line, "--resume-as", "bf16"]) == 0
    assert {"note": "resumed from step 2, which was trained in fp32"} in rows_of(out)
    assert run(group, [*line, "--precision", "bf16", "--steps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 5
