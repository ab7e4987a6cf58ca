"""Compares the memory that ``accel plan`` tells with the peak memory of the ranks of real runs.

Usage:

    python benchmarks/plan_memory.py                 # writes benchmarks/results/plan_memory.json and plan_memory.md
    python benchmarks/plan_memory.py "ZeRO 3" --out /tmp/plan    # runs some of RUNS

Each run trains a GPT with AdamW, in one process a rank, on the CPU with gloo. The GPT has 10.7 million parameters, or
is small and has long sequences. The runs of one world size follow each other in the same processes. For each run, a
rank first trains two steps and drops the trainer, so that libraries and their buffers are loaded. The rank's memory
then is its base. The rank makes a second trainer, trains a step, and resets the kernel's peak of resident memory
(``VmHWM``). The measured memory is the peak after two more steps, less the base. It includes all tensors, the buffers
of gloo and of matrix products, and Python's objects. glibc gives each block of 64 KiB or more back to the kernel when
it is freed, so resident memory is the memory in use (MALLOC_MMAP_THRESHOLD_). All runs are repeated, and the result is
the rank with the most memory. Memory doesn't depend on other work on the machine. Runs on Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel.api.plan import layout_of_config, spec_of_config
from accel.examples.gpt import GPT, GPTConfig
from accel.plan.memory import Memory
from accel.plan.peak import training_memory
from accel.train.config.schema import TrainConfig
from accel.train.config.toml import override

HERE = Path(__file__).absolute()
RESULT = HERE.parent / "results" / "plan_memory.json"
STYLES = tomllib.loads((HERE.parents[1] / "examples" / "gpt.toml").read_text())["tensor_parallel"]
SHAPE = GPTConfig(vocab=4096, layers=4, hidden=384, heads=6, seq=256)
# The scores of this shape's attention take more memory than its logits.
LONG = GPTConfig(vocab=512, layers=2, hidden=128, heads=8, seq=2048)
REPEATS = 3
_RING = [
    "model=HERE:long_model",
    "data=HERE:long_data",
    "global_batch=2",
    "micro_batch=1",
    "parallel.cp=2",
    "parallel.cp_method=ring",
]
# The world size and the config of each run, in which HERE stands for this file. A step has two micro-batches or more.
# If it has one, the name says so.
RUNS: dict[str, tuple[int, list[str]]] = {
    "fp32, one micro-batch": (1, ["global_batch=8", "micro_batch=8"]),
    "bf16 with master weights": (1, ["global_batch=8", "micro_batch=4", "precision.mode=bf16"]),
    "autocast-bf16": (1, ["global_batch=8", "micro_batch=4", "precision.mode=autocast-bf16"]),
    "full recomputation, one micro-batch": (1, ["global_batch=8", "micro_batch=8", "parallel.recompute=full"]),
    "selective recomputation": (1, ["global_batch=8", "micro_batch=4", "parallel.recompute=selective"]),
    "DDP": (2, ["global_batch=16", "micro_batch=4"]),
    "ZeRO 1, bf16": (4, ["global_batch=16", "micro_batch=2", "parallel.zero=1", "precision.mode=bf16"]),
    "ZeRO 2": (4, ["global_batch=16", "micro_batch=2", "parallel.zero=2"]),
    "ZeRO 3, bf16": (4, ["global_batch=16", "micro_batch=2", "parallel.zero=3", "precision.mode=bf16"]),
    "ZeRO 3, full recomputation": (
        4,
        ["global_batch=16", "micro_batch=2", "parallel.zero=3", "parallel.recompute=full"],
    ),
    "ZeRO 3, hpZ 2": (4, ["global_batch=16", "micro_batch=2", "parallel.zero=3", "parallel.hpz=2"]),
    "TP 2": (2, ["global_batch=8", "micro_batch=4", "parallel.tp=2"]),
    "PP 2, 1F1B": (2, ["global_batch=8", "micro_batch=2", "parallel.pp=2"]),
    "CP 2": (2, ["global_batch=8", "micro_batch=4", "parallel.cp=2"]),
    "CP 2 by ring attention, long sequences": (2, _RING),
    "CP 2 by ring attention, long sequences, bf16": (2, [*_RING, "precision.mode=bf16"]),
}


def model() -> torch.nn.Module:
    return GPT(SHAPE)


def long_model() -> torch.nn.Module:
    return GPT(LONG)


def data(shape: GPTConfig = SHAPE) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(ids, ids) for ids in torch.randint(0, shape.vocab, (64, shape.seq), generator=generator)]


def long_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return data(LONG)


def config_of(words: Sequence[str]) -> TrainConfig:
    body: dict[str, Any] = {
        "model": f"{HERE}:model",
        "data": f"{HERE}:data",
        "steps": 100,
        "tensor_parallel": STYLES,
        "optimizer": {"name": "adamw"},
    }
    for word in words:
        override(body, word.replace("HERE", str(HERE)))
    return TrainConfig.from_dict(body)


def planned(world: int, words: Sequence[str]) -> Memory:
    """Returns what ``accel plan`` tells of a run."""
    config = config_of(words)
    return training_memory(spec_of_config(config), layout_of_config(config, world))


def resident(key: str) -> int:
    """Returns this process' resident memory (``VmRSS``) or its peak (``VmHWM``) in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure(config: TrainConfig) -> int:
    """Returns the peak memory of this rank in a step, in bytes. All ranks of the run have to call this function."""
    from accel.train.loop import Trainer
    from accel.train.parallel.layout import join

    ranks = join(config)
    nowhere = Path("none")

    def trained(steps: int) -> Any:
        trainer = Trainer(config, nowhere, ranks)
        batches = trainer.batches()
        for _ in range(steps):
            trainer.one_step(batches)
        return trainer, batches

    trained(2)
    gc.collect()
    base = resident("VmRSS")
    trainer, batches = trained(1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        trainer.one_step(batches)
    return resident("VmHWM") - base


def rank_main(names: Sequence[str], out: Path) -> None:
    torch.set_num_threads(1)
    found = {name: measure(config_of(RUNS[name][1])) for name in names}
    (out / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(names: Sequence[str]) -> dict[str, int]:
    """Returns the measured memory of the fullest rank of each run in bytes. The runs need the same world size."""
    (world,) = {RUNS[name][0] for name in names}
    alone = [sys.executable]
    several = [*alone, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": str(2**16),
            "MALLOC_ARENA_MAX": "1",
        }
        line = [*(several if world > 1 else alone), str(HERE), "--rank", *names, "--out", folder]
        subprocess.run(line, env=environment, check=True, stdout=subprocess.DEVNULL)
        ranks = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    return {name: max(rank[name] for rank in ranks) for name in names}


def row(name: str, seen: Sequence[int]) -> dict[str, Any]:
    """Returns a run's row of the table. ``seen`` has the measured bytes of each repetition."""
    world, words = RUNS[name]
    plan, measured = planned(world, words), sorted(seen)[len(seen) // 2]
    return {
        "run": name,
        "ranks": world,
        "config": words,
        "planned_bytes": round(plan.total),
        "fullest": max(plan.instants, key=lambda instant: plan.instants[instant]),
        "measured_bytes": measured,
        "measured_least_bytes": min(seen),
        "measured_most_bytes": max(seen),
        "error": round(plan.total / measured - 1, 4),
    }


def table(body: dict[str, Any]) -> str:
    """Returns the results as a page of Markdown."""
    lines = [
        "# The plan's memory and the measured peak",
        "",
        f"`python benchmarks/plan_memory.py` on {body['hardware']['cpu']}, torch {body['versions']['torch']}. Each run "
        f"was measured {body['repeats']} times. The table has the median of the fullest rank, and the range.",
        "",
        "| Run | Ranks | Planned | Measured | Range | Error | Fullest instant |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in body["rows"]:
        least, most = one["measured_least_bytes"] / 1e6, one["measured_most_bytes"] / 1e6
        lines.append(
            f"| {one['run']} | {one['ranks']} | {one['planned_bytes'] / 1e6:.1f} MB | "
            f"{one['measured_bytes'] / 1e6:.1f} MB | {least:.1f} to {most:.1f} | {one['error']:+.1%} | "
            f"{one['fullest']} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="RUN", help="some of RUNS; all by default")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, default=RESULT, help="the JSON file; the table is written beside it")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.names, options.out)
        return
    rows = []
    names = options.names or list(RUNS)
    for world in sorted({RUNS[name][0] for name in names}):
        together = [name for name in names if RUNS[name][0] == world]
        seen = [launch(together) for _ in range(options.repeats)]
        for name in together:
            rows.append(row(name, [one[name] for one in seen]))
            print(f"{name}: {rows[-1]['planned_bytes'] / 1e6:.1f} MB planned, {rows[-1]['error']:+.1%}", flush=True)
    cpu = next(
        (s.split(":")[1].strip() for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s), ""
    )
    body = {
        "hardware": {"cpu": cpu},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "repeats": options.repeats,
        "rows": rows,
    }
    out = options.out.with_suffix(".json")
    out.write_text(json.dumps(body, indent=2) + "\n")
    out.with_suffix(".md").write_text(table(body))


if __name__ == "__main__":
    main()
