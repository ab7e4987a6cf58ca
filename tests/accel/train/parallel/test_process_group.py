"""Proves that a training run works in a process group of one rank, with gloo on the CPU and NCCL on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import accel
from accel.train.config.schema import ParallelConfig, TrainConfig
from accel.train.loop import Trainer
from accel.train.loss import cross_entropy
from accel.train.parallel import pipeline
from accel.train.ranks import Ranks
from tests.accel.train.parallel import rank_bytes
from tests.support.runs import SMALL

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS = 6


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    device = torch.device(request.param)
    kind = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    dist.init_process_group(kind, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
        yield Ranks(rank=0, world=1, device=device, data=mesh, saving=dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


def _config(mode: str, zero: int, **tables: object) -> TrainConfig:
    body = {
        "model": f"{SMALL}:model",
        "data": f"{SMALL}:data",
        "steps": STEPS,
        "global_batch": 8,
        "micro_batch": 4,
        "precision": {"mode": mode, "loss_scale": 1024.0},
        "parallel": {"zero": zero, "recompute": "selective"},
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    return TrainConfig.from_dict({**body, **tables})


def _losses(trainer: Trainer, steps: int) -> list[float]:
    batches = trainer.batches()
    return [trainer.one_step(batches)["loss"] for _ in range(steps)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Returns the losses of one process in float32 on the CPU."""
    return _losses(Trainer(_config("fp32", 0), Path("none"), Ranks(rank=0, world=1, device=torch.device("cpu"))), STEPS)


@pytest.mark.parametrize("ranks", DEVICES, indirect=True)
@pytest.mark.parametrize("mode", ["fp32", "autocast-bf16", "autocast-fp16", "bf16", "fp16"])
@pytest.mark.parametrize("zero", [0, 3])
def test_precision_under_ddp_and_fsdp(ranks: Ranks, mode: str, zero: int, alone: list[float], tmp_path: Path) -> None:
    """Compares the losses on this device, with DDP or ``fully_shard``, to the float32 losses on the CPU. Fails if
    autocast, loss scaling or master weights change the losses by more than the rounding error."""
    got = _losses(Trainer(_config(mode, zero), tmp_path, ranks), STEPS)
    bound = {"fp32": 2e-5 if ranks.device.type == "cpu" else 2e-4}.get(mode, 0.01)
    assert max(abs(a - b) for a, b in zip(got, alone, strict=True)) < bound


@pytest.mark.parametrize("ranks", ["cpu"], indirect=True)
def test_blocks_are_compiled(ranks: Ranks, alone: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ``compile`` skips a block of the sharded model, compiles the rest of the model, or changes the losses.
    In this test, torch.compile traces the blocks but doesn't compile C++. `make proof` also tests blocks that are
    compiled to C++."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    trainer = Trainer(_config("fp32", 3, compile=True), tmp_path, ranks)
    got = _losses(trainer, STEPS)
    seen = rank_bytes.switched_on(trainer)
    assert seen["compiled"] == [True] * 3
    assert seen["frames"] > 0
    assert trainer.module._compiled_call_impl is None
    assert max(abs(a - b) for a, b in zip(got, alone, strict=True)) < 2e-5


def _normed() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


@pytest.mark.parametrize("ranks", DEVICES, indirect=True)
def test_statistics_see_nothing_but_the_samples(ranks: Ranks) -> None:
    """A pipeline finds its tensor shapes in an extra forward pass. Fails if the extra forward pass changes the running
    statistics of a batch norm."""
    data = [(torch.randn(4) + 5, torch.tensor(index % 3)) for index in range(8)]
    config = TrainConfig(global_batch=8, micro_batch=4, parallel=ParallelConfig(pipeline="gpipe"))
    staged = replace(ranks, pp=init_device_mesh(ranks.device.type, (1,), mesh_dim_names=("pp",)))
    module, alone = _normed().to(ranks.device).train(), _normed().to(ranks.device).train()
    stages, _ = pipeline.cut(module, config, staged, cross_entropy, data)
    batches = [torch.utils.data.default_collate(data[start : start + 4]) for start in (0, 4)]
    seen = pipeline.Pipelined(stages, config, staged, cross_entropy).run(batches, 1.0)
    assert seen[1] == 8
    for x, _ in batches:
        alone(x.to(ranks.device))
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), buffer)


@pytest.mark.parametrize("ranks", DEVICES, indirect=True)
def test_packed_documents(ranks: Ranks, tmp_path: Path) -> None:
    """Checks that training on packed documents with attention masks works on this device."""
    losses = _losses(Trainer(_config("autocast-bf16", 3, data=f"{SMALL}:documents", pack=16), tmp_path, ranks), STEPS)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("ranks", DEVICES, indirect=True)
def test_a_run_is_saved_resumed_and_exported(ranks: Ranks, tmp_path: Path) -> None:
    """Fails if a run that resumes from a checkpoint on this device gives other losses. Also fails if the ONNX file
    exported from ``final/`` gives other outputs than the trained model."""
    config = _config("autocast-bf16", 3)
    whole = Trainer(config, tmp_path / "whole", ranks)
    expected = _losses(whole, STEPS)
    half = Trainer(config, tmp_path / "run", ranks)
    assert _losses(half, STEPS // 2) == expected[: STEPS // 2]
    half.save()
    half.checkpoints.wait()
    resumed = Trainer(config, tmp_path / "run", ranks)
    resumed.resume()
    assert _losses(resumed, STEPS // 2) == expected[STEPS // 2 :]
    resumed.finish()
    exported = accel.export(tmp_path / "run", out=tmp_path / "model.onnx", use_cache=False)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        logits = resumed.module(ids.to(ranks.device)).float().cpu().numpy()
    with accel.load(exported.path) as session:
        (found,) = session.run({"ids": ids.numpy()}).values()
    np.testing.assert_allclose(found, logits, atol=1e-3)
