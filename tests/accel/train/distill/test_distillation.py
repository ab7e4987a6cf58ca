"""Proves that a student's loss is what the formulas of distillation give, with a teacher of PyTorch and of ONNX."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto

from accel.api.plan import layout_of_config, plan, spec_of_config
from accel.errors import AccelError
from accel.plan.traffic import flops
from accel.train.build import make_model
from accel.train.config.rules import problems
from accel.train.config.schema import DistillationConfig
from accel.train.distill import ahead
from accel.train.run.launch import train
from tests.support.onnx_builder import artifact, node
from tests.support.runs import SMALL, config_of, logged, rows_of, trainer_of

TEACHER = f"{SMALL}:teacher"


def _states(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Runs the small GPT by hand. Returns the logits, the outputs of its blocks and its attention's probabilities."""
    x = model.embed(ids)
    hidden, attention = [], []
    for block in model.blocks:
        y = block.norm1(x)
        q, k = (p(y).unflatten(-1, (4, 8)).transpose(1, 2) for p in (block.attention.query, block.attention.key))
        scores = q @ k.transpose(-2, -1) / 8**0.5
        mask = torch.ones(16, 16, dtype=torch.bool).tril()
        attention.append(scores.masked_fill(~mask, -torch.inf).softmax(-1))
        x = block(x)
        hidden.append(x)
    return model.head(model.norm(x)), hidden, attention


def test_the_loss_is_the_formulas(tmp_path: Path) -> None:
    """Computes the loss of the first step by hand: the cross entropy, T^2 KL of the logits, the squared difference of
    the hidden states of blocks 1, 2, 3 and 2, 4, 6, and the KL divergence of the attention, each as a mean over the
    counted targets. Fails if a term, a factor or a layer is wrong, or if a position that isn't counted is used."""
    table = {"teacher": TEACHER, "temperature": 3.0, "logits": 0.7, "hidden": 5.0, "attention": 11.0, "targets": 0.4}
    trainer = trainer_of(tmp_path, distillation=table, global_batch=8, micro_batch=8)
    x, y = next(trainer.batches())
    student, teacher = make_model(f"{SMALL}:model", 0), make_model(TEACHER, 0)
    with torch.no_grad():
        own, known = _states(student, x), _states(teacher, x)
    counted = y != -100
    task = F.cross_entropy(own[0].flatten(0, 1), y.flatten())
    p, q = (logits.div(3).softmax(-1) for logits in (known[0], own[0]))
    kl = 9 * (p * (p / q).log()).sum(-1)[counted].mean()
    pairs = [(0, 1), (1, 3), (2, 5)]
    hidden = sum((own[1][a] - known[1][b]).pow(2).mean(-1)[counted].mean() for a, b in pairs)
    attention = sum(
        torch.where(known[2][b] > 0, known[2][b] * (known[2][b] / own[2][a]).log(), 0).sum(-1).mean(1)[counted].mean()
        for a, b in pairs
    )
    far = 0.7 * kl + 5 * hidden + 11 * attention
    found = trainer.one_step(iter([(x, y)]))
    assert found["loss"] == pytest.approx(float(0.4 * task + far), rel=1e-5)
    assert found["task_loss"] == pytest.approx(float(task), rel=1e-5)
    assert found["teacher_loss"] == pytest.approx(float(far), rel=1e-5)
    assert min(float(0.7 * kl), float(5 * hidden), float(11 * attention)) > 1e-3 * float(far)


def test_a_student_comes_near_its_teacher(tmp_path: Path) -> None:
    """Fails if the gradients of the losses against the teacher don't reach the student, or lead away."""
    table = {"teacher": TEACHER, "targets": 0.0, "hidden": 1.0, "attention": 1.0}
    train(config_of(steps=15, distillation=table, optimizer={"lr": 3e-3}), tmp_path)
    found = [row["teacher_loss"] for row in rows_of(tmp_path) if "teacher_loss" in row]
    assert found[-1] < 0.7 * found[0], found


def test_the_plan_counts_the_teacher() -> None:
    """Fails if ``accel plan`` leaves out the teacher's float32 weights, or the FLOPs of its forward pass."""
    config = config_of(shape={"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq": 16})
    layout = layout_of_config(config, 1)
    alone, taught = (
        plan(spec_of_config(replace(config, distillation=told)), layout)
        for told in (DistillationConfig(), DistillationConfig(teacher=TEACHER))
    )
    size = sum(p.numel() for p in make_model(TEACHER, 0).parameters())
    assert taught.memory.total - alone.memory.total == 4 * size
    assert flops(taught.spec, layout) - flops(alone.spec, layout) == 2 * size * 8 * 16
    assert taught.to_json()["teacher_bytes_per_rank"] == 4 * size


def _as_onnx(path: Path, weight: torch.Tensor) -> Path:
    """Writes a teacher of one product, whose first output isn't its logits."""
    nodes = [node("MatMul", "x w", "logits"), node("Softmax", "logits", "p")]
    shape = (TensorProto.FLOAT, ["batch", 4])
    artifact(
        path, nodes, {"x": (TensorProto.FLOAT, ["batch", 3])}, {"p": shape, "logits": shape}, {"w": weight.numpy()}
    )
    return path


_TINY = """
import torch

def model():
    return torch.nn.Linear(3, 4)

def teacher():
    module = torch.nn.Linear(3, 4, bias=False)
    module.weight.data = WEIGHT.T.contiguous()
    return module

WEIGHT = torch.arange(12.0).reshape(3, 4).sin()

def data():
    x = torch.arange(96.0).reshape(32, 3).cos()
    return [(one, torch.tensor(index % 4)) for index, one in enumerate(x)]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(_TINY)
    return path


def _run(tiny: Path, out: Path, teacher: Path | str, **tables: object) -> list[float]:
    table = {"teacher": str(teacher)}
    train(config_of(model=f"{tiny}:model", data=f"{tiny}:data", distillation=table, **tables), out)
    return logged(out)


def test_a_file_teaches_like_its_module(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a teacher in a file gives other losses than the same teacher in PyTorch: if samples and logits are
    mixed up, or if the wrong output is taken. Also fails if a second run computes the logits again, or if a teacher
    with other weights gets the kept logits."""
    weight = torch.arange(12.0).reshape(3, 4).sin()
    teacher = _as_onnx(tmp_path / "teacher.onnx", weight)
    wanted = _run(tiny, tmp_path / "module", f"{tiny}:teacher")
    assert _run(tiny, tmp_path / "file", teacher) == pytest.approx(wanted, abs=1e-6)
    opened: list[Any] = []
    real: Callable[..., Any] = ahead.open_session
    monkeypatch.setattr(ahead, "open_session", lambda *a: opened.append(a) or real(*a))
    trainer = trainer_of(tmp_path / "file", **_tables(tiny, teacher))
    assert not opened
    kept = trainer.data.logits.copy()
    other = trainer_of(tmp_path / "file", **_tables(tiny, _as_onnx(tmp_path / "other.onnx", 2 * weight)))
    assert opened
    assert np.allclose(other.data.logits, 2 * kept, rtol=1e-5)


def _tables(tiny: Path, teacher: Path) -> dict[str, object]:
    return {"model": f"{tiny}:model", "data": f"{tiny}:data", "distillation": {"teacher": str(teacher)}}


def test_two_ranks_share_the_teachers_work(tiny: Path, tmp_path: Path) -> None:
    """Fails if two ranks leave out samples when they run the teacher ahead, or train on other logits than one rank."""
    teacher = _as_onnx(tmp_path / "teacher.onnx", torch.arange(12.0).reshape(3, 4).sin())
    alone = _run(tiny, tmp_path / "alone", teacher)
    table = {"model": f"{tiny}:model", "data": f"{tiny}:data", "distillation": {"teacher": str(teacher)}}
    train(config_of(**table), tmp_path / "both", nproc=2)
    assert logged(tmp_path / "both") == pytest.approx(alone, abs=1e-6)
    logits = [np.load(tmp_path / name / "teacher" / "logits.npy") for name in ("alone", "both")]
    assert np.array_equal(*logits)
    assert json.loads((tmp_path / "both" / "teacher" / "facts.json").read_text())["samples"] == 32


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"distillation": {"logits": 2.0}}, "names no teacher; give distillation.teacher"),
        ({"distillation": {"teacher": "t", "logits": 0.0}}, "nothing of the teacher is used"),
        ({"distillation": {"teacher": "t"}, "pack": 16}, "use tp 1, pp 1, cp 1 and pack 0"),
        ({"distillation": {"teacher": "t", "hidden": 1.0}, "compile": True}, "use compile = false"),
        (
            {"distillation": {"teacher": "t", "attention": 1.0}, "parallel": {"recompute": "full"}},
            "use parallel.recompute = none",
        ),
        ({"distillation": {"teacher": "t", "temperature": 0.0}}, "distillation.temperature is 0.0"),
    ],
)
def test_configs_that_are_refused(tables: dict[str, object], said: str) -> None:
    """Fails if a config that can't distil is accepted."""
    assert any(said in problem for problem in problems(config_of(**tables), 1))


def test_teachers_that_dont_fit(tiny: Path, tmp_path: Path) -> None:
    """Fails if a teacher of another shape, or without what is compared, isn't refused in one sentence."""
    onnx = _as_onnx(tmp_path / "teacher.onnx", torch.ones(3, 4))
    for table, said in (
        ({"teacher": str(onnx), "hidden": 1.0}, "has the kind onnx, whose hidden states and attention aren't"),
        ({"teacher": f"{SMALL}:model"}, "fails on the student's inputs"),
        ({"teacher": f"{tiny}:teacher", "hidden": 1.0}, "the student has 0 blocks and the teacher 0"),
        ({"teacher": str(tmp_path / "none.onnx")}, "does not exist"),
    ):
        with pytest.raises(AccelError, match=said):
            _first_step(tmp_path / "run", model=f"{tiny}:model", data=f"{tiny}:data", distillation=table)


def _first_step(out: Path, **tables: object) -> None:
    trainer = trainer_of(out, **tables)
    trainer.one_step(trainer.batches())
