"""Proves that training on one NVIDIA GPU works with NCCL, and gives the losses of the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.runs import SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("fresh_interpreters"),
]

ONE_RANK = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(0)
dist.init_process_group("cuda:nccl,cpu:gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
x = torch.arange(8, device="cuda", dtype=torch.bfloat16)
total, parts, mine = x.clone(), torch.empty_like(x), torch.empty_like(x)
dist.all_reduce(total)
dist.all_gather_into_tensor(parts, x)
dist.reduce_scatter_tensor(mine, x)
assert torch.equal(total, x) and torch.equal(parts, x) and torch.equal(mine, x)
layer = torch.nn.Linear(8, 4, device="cuda")
plain = torch.nn.Linear(8, 4, device="cuda")
plain.load_state_dict(layer.state_dict())
fully_shard(layer, mesh=init_device_mesh("cuda", (1,)))
for one in (layer, plain):
    one(torch.ones(3, 8, device="cuda")).square().sum().backward()
assert torch.equal(layer.weight.grad.full_tensor(), plain.weight.grad)
dist.destroy_process_group()
"""


OFFLOADED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from accel.examples.gpt import GPT, GPTConfig
from accel.train.config.schema import OptimizerConfig
from accel.train.optimizer.master import MasterOptimizer
from accel.train.parallel.zero import shard

device = sys.argv[2]
dist.init_process_group("cuda:nccl,cpu:gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = init_device_mesh(device, (1,))
ids = torch.randint(0, 61, (4, 16), device=device)
runs = []
for host in (device, "cpu"):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=61, layers=2, hidden=32, heads=4, seq=16)).to(device)
    called = shard(model, mesh, 3, offload=host == "cpu")
    optimizer = MasterOptimizer(model, OptimizerConfig(lr=0.01), "fp32")
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(called(ids).flatten(0, 1), ids.flatten())
        assert loss.device.type == device
        loss.backward()
        kept = [t for p in model.parameters() for t in (p, p.grad)]
        assert {t.device.type for t in kept} == {host}, host
        assert torch.isfinite(optimizer.share_of_squares(0, 1))
        optimizer.step()
        optimizer.zero_grad()
        assert {t.device.type for t in optimizer.tensors()} == {host}, host
        losses.append(loss.item())
    runs.append(losses)
assert max(abs(a - b) for a, b in zip(*runs)) < 1e-3 < runs[0][0] - runs[0][-1], runs
dist.destroy_process_group()
"""


def test_offloaded_shards_lie_on_the_host(tmp_path: Path) -> None:
    """Fails if a parameter, a gradient or an optimizer state stays on the GPU between steps under CPU offload. Also
    fails if the passes run on the CPU, or if the losses differ from the losses without offload."""
    command = [sys.executable, "-c", OFFLOADED, str(tmp_path / "store"), "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_nccl_collectives_and_shards(tmp_path: Path) -> None:
    """Checks that NCCL starts with the installed torch and driver, and that FSDP2 doesn't change the gradients of a
    layer."""
    command = [sys.executable, "-c", ONE_RANK, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_run_learns_what_it_learns_on_the_cpu(tmp_path: Path) -> None:
    """Fails if the loss after four fp32 steps on the GPU differs from the loss on the CPU by more than 1e-3. Matrix
    products don't use TF32 by default."""
    body = (
        f'model = "{SMALL}:model"\ndata = "{SMALL}:data"\nsteps = 4\nglobal_batch = 8\nmicro_batch = 4\nlog_every = 1\n'
    )
    (tmp_path / "run.toml").write_text(body)
    losses = {}
    for name, environment in (("cuda", {}), ("cpu", {"CUDA_VISIBLE_DEVICES": ""})):
        out = tmp_path / name
        command = [
            sys.executable,
            "-m",
            "accel",
            "train",
            str(tmp_path / "run.toml"),
            "--out",
            str(out),
            "--json",
            "-q",
        ]
        inherited = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            command, env=inherited | environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        losses[name] = json.loads(done.stdout)["loss"]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)
