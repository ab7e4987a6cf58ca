"""Counts the ranks that crash while they end. Gloo's threads outlive the process groups of a device mesh.

Usage:

    python benchmarks/rank_exits.py                    # adds to benchmarks/results/rank_exits.jsonl
    python benchmarks/rank_exits.py --plain            # ends the ranks as Python ends, for comparison

Each launch forks eight ranks, which join the process groups of a run with pipeline, tensor and data parallel, sum a
tensor over each group, and end as a rank of `accel train` ends. A rank that ends by a signal, with another exit code
than 0, or not within a minute counts as a crash. The ranks are forked from a process that has imported torch but has no
threads, because imports would take most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from accel.train.config.schema import ParallelConfig, TrainConfig
from accel.train.parallel.layout import join
from accel.train.run.rank import end

RESULT = Path(__file__).parent / "results" / "rank_exits.jsonl"
RANKS = 8
PATIENCE = 60.0


def rank_main(rank: int, port: int, *, plain: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    parallel = ParallelConfig(pp=2, tp=2, zero=1)
    ranks = join(TrainConfig(parallel=parallel, global_batch=RANKS, micro_batch=1))
    assert ranks.pp is not None
    assert ranks.tp is not None
    assert ranks.data is not None
    value = torch.full((1024,), float(rank))
    for group in (None, ranks.pp.get_group(), ranks.tp.get_group(), ranks.data.get_group()):
        dist.all_reduce(value, group=group)
    assert value[0] == sum(range(RANKS)) * RANKS, value[0]
    dist.destroy_process_group()
    if plain:
        sys.exit(0)
    end(0)


def launch(*, plain: bool) -> list[str]:
    """Runs eight ranks to their end. Returns a line for each rank that crashed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = {}
    for rank in range(RANKS):
        if (process := os.fork()) == 0:
            try:
                rank_main(rank, port, plain=plain)
            except Exception as error:  # the parent counts it
                print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        found[process] = rank
    crashes, deadline = [], time.monotonic() + PATIENCE
    while found:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            rank, code = found.pop(process), os.waitstatus_to_exitcode(status)
            if code:
                crashes.append(f"rank {rank} " + (f"signal {-code}" if code < 0 else f"exit code {code}"))
        elif time.monotonic() > deadline:
            for late in found:
                os.kill(late, 9)
            deadline += PATIENCE
        else:
            time.sleep(0.002)
    return crashes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--plain", action="store_true", help="end the ranks as Python ends")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    began, launches, crashes = time.monotonic(), 0, []
    while launches < options.launches and time.monotonic() - began < options.seconds:
        crashes += launch(plain=options.plain)
        launches += 1
    row = {
        "ends": "as Python" if options.plain else "as accel train",
        "launches": launches,
        "ranks": RANKS,
        "crashes": len(crashes),
        "which": crashes[:20],
        "seconds": round(time.monotonic() - began),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    with options.out.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
