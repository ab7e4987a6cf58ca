"""How much does `accel train` cost over the same model in a bare torch loop?

    python benchmarks/train_overhead.py            # writes benchmarks/results/train_overhead.json

Two gloo ranks, one thread each, a GPT of 10.7 M parameters, AdamW, float32. Accel's step and the bare loop's take turns
in one process group, so that whatever else the machine does meets both. The bare loop is DDP at ZeRO 0 and FSDP2 by
block at ZeRO 3, with the mean of the batch as its loss, no clipping and no log. The figure is the median over the turns
of accel's time divided by the bare loop's time in the same turn. Run it on a quiet machine:
with other work on the cores the quartiles are wider than the figure.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel.examples.gpt import GPT, GPTConfig

RESULT = Path(__file__).parent / "results" / "train_overhead.json"
TURNS, STEPS, BATCH, LENGTH = 15, 2, 8, 128
SHAPE = GPTConfig(vocab=4096, layers=4, hidden=384, heads=6, seq=LENGTH)


def model() -> torch.nn.Module:
    return GPT(SHAPE)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(ids, ids) for ids in torch.randint(0, SHAPE.vocab, (256, LENGTH), generator=generator)]


def accel_step(zero: int, folder: Path) -> Callable[[], None]:
    from accel.train.config import TrainConfig
    from accel.train.layout import join
    from accel.train.loop import Trainer

    here = f"{Path(__file__).absolute()}"
    body: dict[str, Any] = {
        "model": f"{here}:model",
        "data": f"{here}:data",
        "steps": 10**6,
        "parallel": {"zero": zero},
    }
    config = TrainConfig.from_dict({**body, "global_batch": BATCH, "micro_batch": BATCH // 2})
    trainer = Trainer(config, folder, join(config))
    batches = trainer.batches()

    def step() -> None:
        trainer.one_step(batches)

    return step


def bare_step(zero: int) -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = called = model()
    if zero:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        called = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)

    def endless() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from torch.utils.data.DataLoader(data(), batch_size=BATCH // 2, shuffle=True)

    batches = endless()

    def step() -> None:
        x, y = next(batches)
        torch.nn.functional.cross_entropy(called(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rank_main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for zero in (0, 3):
        steps = {"accel": accel_step(zero, out), "bare": bare_step(zero)}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(TURNS + 2):
            order = sorted(steps, reverse=bool(turn % 2))
            for name in order:
                dist.barrier()
                began = time.perf_counter()
                for _ in range(STEPS):
                    steps[name]()
                dist.barrier()
                if turn >= 2:
                    seconds[name].append((time.perf_counter() - began) / STEPS)
        ratios = [a / b for a, b in zip(seconds["accel"], seconds["bare"], strict=True)]
        found["DDP" if zero == 0 else "FSDP2"] = {
            "overhead": statistics.median(ratios) - 1,
            "quartiles": [q - 1 for q in statistics.quantiles(ratios, n=4)],
            **{f"{name}_ms": 1e3 * statistics.median(values) for name, values in seconds.items()},
            **{f"{name}_p99_ms": 1e3 * max(values) for name, values in seconds.items()},
        }
    if dist.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *line], env=environment, check=True)
        found = json.loads((Path(folder) / "found.json").read_text())
    cpu = next(
        (s.split(":")[1].strip() for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s), ""
    )
    body = {
        "hardware": {"cpu": cpu, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "configuration": {
            "ranks": 2,
            "threads": 1,
            "turns": TURNS,
            "steps_a_turn": STEPS,
            "batch": BATCH,
            "length": LENGTH,
        },
        "results": found,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(body, indent=2) + "\n")
    print(json.dumps(body, indent=2))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_main(Path(sys.argv[1]))
    else:
        main()
