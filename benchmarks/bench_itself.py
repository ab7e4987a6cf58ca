"""Checks the verdicts of `accel bench` on a quiet machine and beside other work.

Usage:

    python benchmarks/bench_itself.py              # all runs; writes benchmarks/results/bench_itself.json and .md
    python benchmarks/bench_itself.py --repeats 5 --minutes 25  # five runs of each case, in up to 25 minutes
    python benchmarks/bench_itself.py same-4-01 twice-4-01 --again  # repeats these two runs.

The script uses real sessions in real processes, and gets the same verdicts as a user of `accel bench`. Beside each run,
0, 1, 2 or 4 busy processes run, each in a session of its own, so that the kernel gives each of them a share of the
cores. A run compares a model with itself (with other weights), with a copy that waits 10% longer, or with a model of
more layers. Each run has its own seed, and therefore its own order of the blocks. The runs alternate between the
runtimes. The runs of the last two cases take some 20 ms on one thread of ONNX Runtime. There, the CPU time can decide.

An interrupted series continues where it ended. ``--minutes`` ends a series early. A run takes 10 to 30 s.

From the same samples, the script computes the verdicts of the statistics that pyperf, hyperfine, asv and criterion use.
The machine has to be quiet, apart from the busy processes that the script starts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from bench_peers import PEERS
from onnx import TensorProto, helper, numpy_helper
from result_rows import measure_rows, row_arguments

from accel.artifact import Artifact
from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig
from accel.runtimes.base import Session, open_session
from accel.sources.source import Source
from accel.stage import run_stage
from accel.timing import page as bench_page
from accel.timing.paired import Candidate, measure

RUNTIMES = ("onnxruntime", "openvino", "torch")
SHARE = 0.1  # the added delay, as a fraction of the time of one run
WIDTH, LAYERS, BATCH = 512, 6, 16
LONG_WIDTH, LONG_BATCH = 1024, 128  # of the model whose runs take long
RUNS = 20  # the number of runs of each case
_BUSY_SECONDS = 300  # a busy process ends by itself after this time


@dataclass(frozen=True)
class Case:
    """Runs of one kind beside ``load`` busy processes. ``layers`` is the candidate's number of layers. ``right`` lists
    the right verdicts. ``claim`` says what the runs prove. If ``long`` is true, the runs take longer, on one thread."""

    kind: str
    load: int
    layers: int
    right: tuple[str, ...]
    claim: str
    long: bool = False


_UNDECIDED = ("no measurable difference", "too noisy")
CASES = (
    *(Case("same", load, LAYERS, _UNDECIDED, f"itself, {load} busy processes") for load in (0, 1, 2, 4)),
    Case("delayed", 0, LAYERS, ("slower",), f"a delay of {SHARE:.0%}, no busy process"),
    Case("half-more", 2, LAYERS * 3 // 2, ("slower",), "1.5 times the work, 2 busy processes"),
    Case("twice", 4, LAYERS * 2, ("slower",), "2 times the work, 4 busy processes"),
    Case("long-same", 4, LAYERS, _UNDECIDED, "itself, long runs on one thread, 4 busy processes", long=True),
    Case("long-third", 4, LAYERS * 4 // 3, ("slower",), "a third more work, long runs, 4 busy processes", long=True),
)
LEAST_RIGHT = 19 / 20


class Delayed:
    """Wraps a session, and makes each run longer by the fraction ``SHARE``."""

    def __init__(self, session: Session) -> None:
        self.signature = session.signature
        self._session = session

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the model's outputs after a busy wait, which keeps the CPU busy as a slower layer would."""
        start = time.perf_counter_ns()
        outputs = self._session.run(feeds)
        now = time.perf_counter_ns()
        end = now + int((now - start) * SHARE)
        while time.perf_counter_ns() < end:
            pass
        return outputs


def delayed(candidate: Candidate) -> Delayed:
    """Opens the session of the delayed candidate."""
    return Delayed(open_session(candidate.artifact, candidate.runtime, candidate.options))


def models(folder: Path) -> dict[tuple[str, int], Artifact]:
    """Returns the perceptrons of all cases, by runtime and number of layers. One run takes a third of a millisecond or
    more. The runtime of the perceptrons whose runs take longer is called ``long``.

    Number 0 of layers stands for a copy of the baseline with other weights, because ``accel bench`` recognizes a file
    with equal bytes, and calls it identical.
    """
    made = {}
    for number in (0, *sorted({case.layers for case in CASES})):
        layers, seed = number or LAYERS, int(not number)
        place = folder / str(number)
        place.mkdir()
        source = perceptron(place / "perceptron.onnx", layers, seed=seed)
        made["onnxruntime", number] = source
        made["openvino", number] = run_stage(
            "openvino_from_onnx", source, OpenVinoFromOnnxConfig(), out=place / "perceptron.xml"
        )
        net = torch.nn.Sequential()
        for _ in range(layers):
            net.extend([torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()])
        made["torch", number] = Source(net, example=(torch.zeros(BATCH, WIDTH),)).open()
        if any(case.long and layers in (case.layers, LAYERS) for case in CASES):
            made["long", number] = perceptron(place / "long.onnx", layers, LONG_WIDTH, seed)
    return made


def perceptron(path: Path, layers: int, width: int = WIDTH, seed: int = 0) -> Artifact:
    """Writes a perceptron with random weights to ``path`` and opens the file."""
    rng = np.random.default_rng(seed)
    nodes, weights, last = [], [], "x"
    for layer in range(layers):
        weight = rng.standard_normal((width, width)).astype(np.float32) / np.float32(np.sqrt(width))
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"h{layer}"]))
        last = "y" if layer == layers - 1 else f"a{layer}"
        nodes.append(helper.make_node("Relu", [f"h{layer}"], [last]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "perceptron", values[:1], values[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return Source(path).open()


# A busy process ends with the process whose id it gets, and after a limited time.
_BUSY = f"""
import os, sys, time
parent, end = int(sys.argv[1]), time.monotonic() + {_BUSY_SECONDS}
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(10**6):
        pass
"""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keeps ``processes`` processes busy inside the ``with`` block."""
    words = [sys.executable, "-c", _BUSY, str(os.getpid())]
    running = [subprocess.Popen(words, start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def names(repeats: int = RUNS) -> dict[str, Case]:
    """Returns the names of the runs, in the order in which they run, and their cases. The cases are mixed evenly, so
    that an interrupted series covers all of them."""
    return {f"{case.kind}-{case.load}-{run + 1:02}": case for run in range(repeats) for case in CASES}


def run(
    name: str, case: Case, artifacts: Mapping[tuple[str, int], Artifact], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Runs the benchmark once as a user would, and returns the result row. The benchmark measures the baseline, a
    second copy of the baseline, and the candidate of ``case``.

    ``settings`` has the arguments rounds, block_seconds and budget_seconds of ``measure``.
    """
    number = int(name.rpartition("-")[2])
    runtime = "onnxruntime" if case.long else RUNTIMES[number % len(RUNTIMES)]
    kind = "long" if case.long else runtime
    options = {"threads": 1} if case.long else {}
    layers = 0 if case.right is _UNDECIDED else case.layers
    opener = f"{Path(__file__).stem}:delayed" if case.kind == "delayed" else Candidate.opener
    candidates = [
        Candidate("model", artifacts[kind, LAYERS], runtime=runtime, options=options),
        Candidate(case.kind, artifacts[kind, layers], runtime=runtime, opener=opener, options=options),
    ]
    feeds = artifacts[kind, LAYERS].signature.example_inputs(seed=0, batch=LONG_BATCH if case.long else BATCH)
    seed = number + 100 * CASES.index(case)
    with busy(case.load):
        begun = time.monotonic()
        report = measure(candidates, feeds, seed=seed, **settings)
        seconds = time.monotonic() - begun
    row = report.row(case.kind)
    if row.error is not None:
        raise RuntimeError(row.error)
    point = report.to_json()
    found = next(one for one in point["results"] if one["name"] == case.kind)
    return {
        "kind": case.kind,
        "load": case.load,
        "runtime": runtime,
        "verdict": row.verdict,
        "speedup": found["speedup"],
        "ci95": found["ci95"],
        "noise_floor": point["noise_floor"],
        "baseline_against_itself": point["baseline_against_itself"],
        "median_ms": found["median_ms"],
        "measured_seconds": round(seconds, 1),
        "statistic": point["statistic"],
        "lost": point["lost"],
        "repeated": point["repeated"],
        "rounds": row.rounds,
        "peers": {peer: says(report.samples["model"], report.samples[case.kind]) for peer, says in PEERS.items()},
        **{key: value for key, value in settings.items() if key != "rounds"},
        "seed": seed,
        "machine": bench_page.machine_lines(point),
    }


@dataclass(frozen=True)
class Claim:
    """A goal and its result. ``right`` is the number of runs with the right verdict, out of ``runs``. ``wrong`` names
    the runs with a wrong verdict. ``holds`` is true if the goal is met. ``peers`` has the number of right verdicts of
    each other tool's statistic. ``seconds`` is the time of the longest run."""

    text: str
    right: int
    runs: int
    wrong: tuple[str, ...]
    holds: bool
    peers: Mapping[str, int]
    seconds: float


def claims(rows: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Returns a claim for each case that has runs, first with the verdicts of accel, then with those of each peer."""
    found = []
    for case in CASES:
        runs = {name: row for name, row in rows.items() if (row["kind"], row["load"]) == (case.kind, case.load)}
        if not runs:
            continue
        wrong = tuple(name for name, row in runs.items() if row["verdict"] not in case.right)
        peers = {peer: sum(row["peers"][peer] in case.right for row in runs.values()) for peer in PEERS}
        right = len(runs) - len(wrong)
        longest = max(row["measured_seconds"] for row in runs.values())
        found.append(Claim(case.claim, right, len(runs), wrong, right >= LEAST_RIGHT * len(runs), peers, longest))
    return found


def page(body: Mapping[str, Any]) -> str:
    """Returns the results page."""
    rows = body["rows"]
    first = next(iter(rows.values()))
    rounds = [row["rounds"] for row in rows.values()]
    lines = [
        "# accel bench, measured by itself",
        "",
        *(f"{line}  " for line in first["machine"]),
        f"{LAYERS} layers of {WIDTH} by {WIDTH}, batch {BATCH}, float32; long runs: {LONG_WIDTH} by {LONG_WIDTH}, "
        f"batch {LONG_BATCH}; {min(rounds)} to {max(rounds)} rounds of "
        f"{first['block_seconds']:g} s, as many as `accel bench` takes. Made by `python benchmarks/bench_itself.py`.",
        "",
        "Each column of a tool counts the right verdicts of this tool's statistic on the same samples. A verdict on",
        "the model itself is right if no difference is found. The goal is 19 of 20 for each line.",
        "",
        f"| compared | accel | {' | '.join(PEERS)} | runs | accel wrong in | longest run | |",
        f"|---|---|{'---|' * len(PEERS)}---|---|---|---|",
    ]
    for claim in claims(rows):
        verdict = "holds" if claim.holds else "does not hold"
        others = " | ".join(str(claim.peers[peer]) for peer in PEERS)
        lines.append(
            f"| {claim.text} | {claim.right} | {others} | {claim.runs} | {', '.join(claim.wrong)} | "
            f"{claim.seconds:.0f} s | {verdict} |"
        )
    lines += [
        "",
        "The column `decided by` names what the speedups compare, and `taken` is the share of the cores that other",
        "work took from the runs.",
        "",
        "| run | runtime | median ms | speedup | 95% interval | noise floor | verdict | decided by | taken |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        low, high = row["ci95"]
        # Rows of an older version lack these figures.
        decided, taken = row.get("statistic", ""), f"{row['lost']:.0%}" if "lost" in row else ""
        lines.append(
            f"| {name} | {row['runtime']} | {row['median_ms']:.3f} | {row['speedup']:.3f}x | {low:.3f} to {high:.3f} "
            f"| {row['noise_floor']:.1%} | {row['verdict']} | {decided} | {taken} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Performs the requested runs, and writes the results after each run."""
    parser: argparse.ArgumentParser = row_arguments(__doc__, "same-0-01 twice-4-01")
    parser.add_argument("--rounds", type=int, default=9, help="9 to 36 of them, as accel bench")
    parser.add_argument("--block-seconds", type=float, default=0.2)
    parser.add_argument("--budget-seconds", type=float, default=15.0, help="for rounds beyond the first --rounds")
    parser.add_argument("--repeats", type=int, default=RUNS, help="runs of each case")
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes; call again to continue")
    asked = parser.parse_args()
    settings = {key: getattr(asked, key) for key in ("rounds", "block_seconds", "budget_seconds")}
    # The processes of the candidates import this module, which defines the function that opens the delayed candidate.
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as folder:
        artifacts = models(Path(folder))
        cases = names(asked.repeats)
        measure_rows(
            parser,
            asked,
            list(cases),
            "bench_itself",
            lambda name: run(name, cases[name], artifacts, settings),
            page,
            None if asked.minutes is None else 60 * asked.minutes,
        )


if __name__ == "__main__":
    main()
