"""Checks the verdicts of `accel bench`. Compares a model with itself, and with a copy whose runs take 10% longer.

Usage:

    python benchmarks/bench_itself.py              # all 60 runs; writes benchmarks/results/bench_itself.json and .md
    python benchmarks/bench_itself.py same-01 delayed-01 --again  # repeats these two runs.

The script uses real sessions in real processes, and gets the same verdicts as a user of `accel bench`. The script
needs a quiet machine for eight minutes. In 40 runs, the script compares a model with itself. The first goal is that at
most two of these 40 runs report a difference. The second goal is that all 20 runs with a delay report the delay. Each
run has its own seed, and therefore its own order of the blocks. The runs alternate between the runtimes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from result_rows import measure_rows, row_arguments

from accel.artifact import Artifact
from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig
from accel.runtimes.base import Session, open_session
from accel.sources.source import Source
from accel.stage import run_stage
from accel.timing import page as bench_page
from accel.timing.paired import Candidate, measure
from accel.timing.statistics import round_medians

RUNTIMES = ("onnxruntime", "openvino")
SAME, DELAYED = 40, 20
SHARE = 0.1  # the added delay, as a fraction of the time of one run
MOST_FALSE = 1 / 20
WIDTH, LAYERS, BATCH = 512, 6, 16


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


def models(folder: Path) -> dict[str, Artifact]:
    """Returns a perceptron of ``LAYERS`` layers for each runtime. One run takes about a millisecond."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for layer in range(LAYERS):
        weight = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / np.float32(np.sqrt(WIDTH))
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"h{layer}"]))
        last = "y" if layer == LAYERS - 1 else f"a{layer}"
        nodes.append(helper.make_node("Relu", [f"h{layer}"], [last]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "perceptron", values[:1], values[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(made, folder / "perceptron.onnx")
    source = Source(folder / "perceptron.onnx").open()
    converted = run_stage("openvino_from_onnx", source, OpenVinoFromOnnxConfig(), out=folder / "perceptron.xml")
    return {"onnxruntime": source, "openvino": converted}


def names(same: int = SAME, late: int = DELAYED) -> list[str]:
    """Returns the names of the runs in the order in which they run. Runs with and without a delay are mixed evenly, so
    that an interrupted series covers both kinds."""
    made = [((i + 0.5) / same, f"same-{i + 1:02}") for i in range(same)]
    made += [((i + 0.5) / late, f"delayed-{i + 1:02}") for i in range(late)]
    return [name for _, name in sorted(made)]


def run(name: str, artifacts: Mapping[str, Artifact], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the benchmark once as a user would, and returns the result row. The benchmark measures the baseline, a
    second copy of the baseline, and the candidate ``name``.

    ``settings`` has the arguments rounds, block_seconds and budget_seconds of ``measure``.
    """
    kind, _, number = name.partition("-")
    runtime = RUNTIMES[int(number) % len(RUNTIMES)]
    artifact = artifacts[runtime]
    opener = f"{Path(__file__).stem}:delayed" if kind == "delayed" else Candidate.opener
    candidates = [
        Candidate("model", artifact, runtime=runtime),
        Candidate(kind, artifact, runtime=runtime, opener=opener),
    ]
    feeds = artifact.signature.example_inputs(seed=0, batch=BATCH)
    seed = int(number) + (1000 if kind == "delayed" else 0)
    report = measure(candidates, feeds, seed=seed, **settings)
    row = report.row(kind)
    if row.error is not None:
        raise RuntimeError(row.error)
    point = report.to_json()
    found = next(one for one in point["results"] if one["name"] == kind)
    return {
        "kind": kind,
        "runtime": runtime,
        "verdict": row.verdict,
        "speedup": found["speedup"],
        "ci95": found["ci95"],
        "noise_floor": point["noise_floor"],
        "baseline_against_itself": point["baseline_against_itself"],
        "median_ms": found["median_ms"],
        "rounds": row.rounds,
        **{key: value for key, value in settings.items() if key != "rounds"},
        "seed": seed,
        "round_medians_ms": {
            lane: [round(float(median), 5) for median in round_medians(list(times))]
            for lane, times in report.samples.items()
        },
        "machine": bench_page.machine_lines(point),
    }


@dataclass(frozen=True)
class Claim:
    """A goal and its result. ``right`` is the number of runs with the right verdict, out of ``runs``. ``wrong`` names
    the runs with a wrong verdict. ``holds`` is true if the goal is met."""

    text: str
    right: int
    runs: int
    wrong: tuple[str, ...]
    holds: bool


def claims(rows: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Returns the two claims, each with the number of finished runs that support the claim."""
    found = []
    for kind, wanted, text, allowed in (
        (
            "same",
            ("no measurable difference", "too noisy"),
            "a model against itself: at most one false verdict in 20",
            MOST_FALSE,
        ),
        ("delayed", ("slower",), f"a delay of {SHARE:.0%} is found", 0.0),
    ):
        runs = {name: row for name, row in rows.items() if row["kind"] == kind}
        wrong = tuple(name for name, row in runs.items() if row["verdict"] not in wanted)
        holds = bool(runs) and len(wrong) <= allowed * len(runs)
        found.append(Claim(text, len(runs) - len(wrong), len(runs), wrong, holds))
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
        f"{LAYERS} layers of {WIDTH} by {WIDTH}, batch {BATCH}, float32; {min(rounds)} to {max(rounds)} rounds of "
        f"{first['block_seconds']:g} s, as many as `accel bench` takes. Made by `python benchmarks/bench_itself.py`.",
        "",
        "| claim | right | runs | wrong | |",
        "|---|---|---|---|---|",
    ]
    for claim in claims(rows):
        verdict = "holds" if claim.holds else "does not hold"
        lines.append(f"| {claim.text} | {claim.right} | {claim.runs} | {', '.join(claim.wrong)} | {verdict} |")
    lines += [
        "",
        "| run | runtime | median ms | speedup | 95% interval | noise floor | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        low, high = row["ci95"]
        lines.append(
            f"| {name} | {row['runtime']} | {row['median_ms']:.3f} | {row['speedup']:.3f}x | {low:.3f} to {high:.3f} "
            f"| {row['noise_floor']:.1%} | {row['verdict']} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Performs the requested runs, and writes the results after each run."""
    parser: argparse.ArgumentParser = row_arguments(__doc__, "same-01 delayed-01")
    parser.add_argument("--rounds", type=int, default=9, help="9 to 36 of them, as accel bench")
    parser.add_argument("--block-seconds", type=float, default=0.2)
    parser.add_argument("--budget-seconds", type=float, default=30.0, help="for rounds beyond the first --rounds")
    parser.add_argument("--same", type=int, default=SAME, help="runs of the model against itself")
    parser.add_argument("--delayed", type=int, default=DELAYED, help="runs with the delay")
    asked = parser.parse_args()
    settings = {key: getattr(asked, key) for key in ("rounds", "block_seconds", "budget_seconds")}
    # The processes of the candidates import this module, which defines the function that opens the delayed candidate.
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as folder:
        artifacts = models(Path(folder))
        measure_rows(
            parser,
            asked,
            names(asked.same, asked.delayed),
            "bench_itself",
            lambda name: run(name, artifacts, settings),
            page,
        )


if __name__ == "__main__":
    main()
