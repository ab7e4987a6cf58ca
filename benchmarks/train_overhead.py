"""Compares the time of a training step in `accel train`, in a bare torch loop and in DeepSpeed, on the same model.

Usage:

    python benchmarks/train_overhead.py            # writes benchmarks/results/train_overhead.json
    python benchmarks/train_overhead.py --deepspeed PATH/bin/python     # also measures DeepSpeed.

Two gloo ranks with one thread each train a GPT of 10.7 million parameters with AdamW in float32. In each turn, every
loop runs two steps, one loop after the other in the same process group. Each turn starts with a different loop, so that
a slowdown of the machine affects all loops alike. A step of accel's loop is complete: it loads data, runs the forward
and backward pass, checks that the gradient is finite, and writes the log. For ZeRO 0, the bare loop uses DDP. For ZeRO
2, the bare loop uses FSDP2 with ``reshard_after_forward=False``. For ZeRO 3, the bare loop uses FSDP2 with
``reshard_after_forward=True``. FSDP2 shards each block separately. The loss of the bare loop is the mean over the
batch. The bare loop doesn't check or clip the gradients, and writes no log. If DeepSpeed is installed, the script also
measures a DeepSpeed loop, with the ZeRO stage and the optimizer of the other loops. DeepSpeed may be installed in a
separate environment that has the Python version of accel's environment. ``--deepspeed`` names the interpreter of the
separate environment. These commands make the environment for DeepSpeed: `python -m venv PATH && PATH/bin/pip install
--no-deps deepspeed==0.19.8 && PATH/bin/pip install hjson py-cpuinfo einops msgpack`. Torch and the other packages come
from accel's environment. This script sets DS_ACCELERATOR=cpu. The overhead of a loop in a turn is the loop's time
divided by the bare loop's time, minus 1. The result is the median overhead over all turns, with a 95% bootstrap
interval. ``cpu`` has the same figures for the processor time of a rank with all its threads, which other work on the
cores changes less. ``thread`` has them for the rank's main thread alone: its passes and its optimizer, but not gloo's
copies, whose time depends on when the other rank sends. Needs a quiet machine: other work on the cores makes the
interval wider than the result.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from accel.examples.gpt import GPT, GPTConfig
from accel.timing.statistics import speedup

RESULT = Path(__file__).parent / "results" / "train_overhead.json"
STEPS, BATCH, LENGTH = 2, 8, 128
# For each ZeRO stage, the name of the plain PyTorch loop that is compared with accel.
LOOPS = {0: "DDP", 2: "FSDP2, parameters kept (ZeRO 2)", 3: "FSDP2"}
_TURNS = "TRAIN_OVERHEAD_TURNS"  # this environment variable passes the number of turns to the ranks
_STAGES = "TRAIN_OVERHEAD_STAGES"  # and this one the ZeRO stages
SHAPE = GPTConfig(vocab=4096, layers=4, hidden=384, heads=6, seq=LENGTH)


def model() -> torch.nn.Module:
    return GPT(SHAPE)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(ids, ids) for ids in torch.randint(0, SHAPE.vocab, (256, LENGTH), generator=generator)]


def accel_step(zero: int, folder: Path) -> Callable[[], None]:
    from accel.train.config.schema import TrainConfig
    from accel.train.log import beat
    from accel.train.loop import Trainer
    from accel.train.parallel.layout import join
    from accel.train.run import watchdog

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
    log = None
    if trainer.ranks.rank == 0:
        watchdog.clear(folder)
        log = trainer._log()

    def step() -> None:
        beat(folder)
        seen = trainer.one_step(batches)
        if log is not None:
            log.step(trainer.step, seen)

    return step


def bare_step(zero: int) -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = called = model()
    if zero:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in module.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3)
        fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3)
    else:
        called = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = adamw(module)
    batches = endless()

    def step() -> None:
        x, y = next(batches)
        torch.nn.functional.cross_entropy(called(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def deepspeed_step(zero: int) -> Callable[[], None]:
    import deepspeed

    torch.manual_seed(0)
    module = model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module), config=config, dist_init_required=False)
    batches = endless()

    def step() -> None:
        x, y = next(batches)
        engine.backward(torch.nn.functional.cross_entropy(engine(x).flatten(0, 1), y.flatten()))
        engine.step()

    return step


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer that accel's config makes by default."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)


def endless() -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH // 2, shuffle=True)
    while True:
        yield from loader


def rank_main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for zero, loop in LOOPS.items():
        if str(zero) not in os.environ[_STAGES]:
            continue
        steps = {"accel": accel_step(zero, out), "bare": bare_step(zero)}
        if importlib.util.find_spec("deepspeed") is not None:
            steps["deepspeed"] = deepspeed_step(zero)
        gc.collect()  # frees garbage before the timing, so that no loop has to free another loop's garbage
        gc.freeze()
        names = list(steps)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        busy: dict[str, list[float]] = {name: [] for name in names}
        alone: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(int(os.environ[_TURNS]) + 2):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                dist.barrier()
                began, used, own = time.perf_counter(), time.process_time(), time.thread_time()
                for _ in range(STEPS):
                    steps[name]()
                dist.barrier()
                if turn >= 2:
                    seconds[name].append((time.perf_counter() - began) / STEPS)
                    busy[name].append((time.process_time() - used) / STEPS)
                    alone[name].append((time.thread_time() - own) / STEPS)
        found[loop] = {**compared(seconds), "cpu": compared(busy), "thread": compared(alone)}
    if dist.get_rank() == 0:
        seen = {"results": found, "deepspeed": version("deepspeed") if "deepspeed" in steps else None}
        (out / "found.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def compared(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns the times of each loop in milliseconds, and the extra time of each loop as a fraction of the bare loop's
    time."""
    bare = np.array(seconds["bare"])
    found: dict[str, Any] = {}
    for name, values in seconds.items():
        median, p99 = np.percentile(values, [50, 99]) * 1e3
        found[name] = {"median_ms": round(float(median), 2), "p99_ms": round(float(p99), 2)}
        if name != "bare":
            ratio = speedup(np.array(values), bare)
            interval = [round(ratio.low - 1, 4), round(ratio.high - 1, 4)]
            found[name] |= {"over_bare": round(ratio.value - 1, 4), "interval": interval}
    return found


def packages(python: str) -> str:
    """Returns the folder with the packages of the interpreter ``python``. Ends the program if the environment has
    another Python version or no DeepSpeed."""
    ask = (
        "import importlib.metadata, platform, sysconfig; importlib.metadata.version('deepspeed'); "
        "print(platform.python_version_tuple()[:2] == {!r}, sysconfig.get_path('purelib'))"
    )
    try:
        line = [python, "-c", ask.format(platform.python_version_tuple()[:2])]
        same, folder = subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip().split(" ", 1)
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"{python} has no deepspeed, or is no Python; --help says how to make its environment")
    if same != "True":
        sys.exit(f"{python} is another Python than {platform.python_version()}; make its environment with this one")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40, help="of each loop, after two to warm up")
    parser.add_argument("--stages", default="023", help="the ZeRO stages, such as 2 or 023")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="the interpreter of an environment that has DeepSpeed")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    more = [packages(options.deepspeed)] if options.deepspeed else []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, folder]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, *more])),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            _TURNS: str(options.turns),
            _STAGES: options.stages,
        }
        subprocess.run([sys.executable, *line], env=environment, check=True)
        found = json.loads((Path(folder) / "found.json").read_text())
    cpu = next(
        (s.split(":")[1].strip() for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s), ""
    )
    body = {
        "hardware": {"cpu": cpu, "cores": os.cpu_count(), "load_average_before": load},
        "versions": {
            "torch": torch.__version__,
            "deepspeed": found["deepspeed"],
            "python": platform.python_version(),
        },
        "configuration": {
            "ranks": 2,
            "threads": 1,
            "turns": options.turns,
            "steps_a_turn": STEPS,
            "batch": BATCH,
            "length": LENGTH,
        },
        "results": found["results"],
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(body, indent=2) + "\n")
    print(json.dumps(body, indent=2))


if __name__ == "__main__":
    if _TURNS in os.environ:
        rank_main(Path(sys.argv[1]))
    else:
        main()
