"""Compares the requests per second and the latency of `accel serve`, Triton, MLServer, LitServe and bare gRPC servers.

Usage:

    python benchmarks/serve_load.py --peers VENV [--seconds 5] [--rounds 3]     # measures all servers in one run
    python benchmarks/serve_load.py --peers VENV --goals --seconds 4            # what the goals need, in 8 minutes

The peers are in a virtual environment of Python 3.11:

    python3.11 -m venv VENV
    VENV/bin/pip install mlserver==1.7.1 litserve==0.2.19 onnxruntime 'uvloop<0.22'
    VENV/bin/pip install --no-deps nvidia-pytriton==0.7.0

MLServer 1.7.1 can't start workers with a later uvloop. Triton comes from the wheel of nvidia-pytriton. accel answers
with the native transport. The requests are sent by h2load (Debian package nghttp2-client), which uses far less CPU than
a Python client. Every round measures each server once. Needs a quiet machine. All requests go to 127.0.0.1.

After each run of accel, the script compares the server's statistics with the answers that h2load counted, because
h2load can't see an error in a gRPC call's trailers. The module serve_goals.py tells whether the goals are met."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from serve_goals import TAIL_LOAD, Goal, goals, needed, table
from serve_h2load import DEALS, arrivals, counted, exactly, first_answer, grpc_body, load
from serve_starters import STARTERS, Scenario

import accel
from accel.timing.environment import environment

RESULTS = Path(__file__).parent / "results"
MODELS = """
import torch
from torch import nn

def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )

class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))

def image():
    return Mean()

def small():
    return Mean()
"""


SCENARIOS = (
    Scenario(
        "mlp",
        "x:float32[batch,1024]",
        (1, 1024),
        (1, 8, 32),
        (
            "accel",
            "accel-one",
            "triton",
            "triton-two",
            "floor",
            "floor-model",
            "mlserver",
            "mlserver-workers",
            "litserve",
        ),
        40,
    ),
    # The input has only 4,096 bytes (1 x 4 x 16 x 16 floats), so the server itself takes nearly all of the time.
    Scenario("small", "x:float32[batch,4,16,16]", (1, 4, 16, 16), (8, 32), ("accel", "floor", "floor-model"), 16),
    # The input has 1 x 3 x 224 x 224 floats (602,112 bytes).
    Scenario(
        "image",
        "x:float32[batch,3,224,224]",
        (1, 3, 224, 224),
        (8,),
        ("accel", "triton", "triton-two", "floor", "floor-model", "mlserver"),
        12,
    ),
)


@dataclass(frozen=True)
class Row:
    """The results of one server, as medians over the rounds. ``rates`` are the requests per second of each round.
    ``spread`` is (max - min) / median of ``rates``. ``lost`` counts the lost requests of all rounds, and ``twice`` the
    requests that the server answered twice. ``lost`` and ``twice`` come from the server's statistics, and are None for
    a server without statistics."""

    scenario: str
    server: str
    concurrency: int
    requests_per_second: float
    rates: tuple[float, ...]
    spread: float
    p50_ms: float
    p99_ms: float
    failed: int
    lost: int | None = None
    twice: int | None = None


@dataclass(frozen=True)
class Overhead:
    """The time that serving adds for one caller, as medians over the rounds. ``rpc_us`` is the p50 of a remote call.
    ``run_us`` is the p50 of ``session.run`` with one thread on the same request. ``rounds`` has the time of a remote
    call minus the time of ``session.run`` in each round, and ``overhead_us`` is the median of ``rounds``."""

    scenario: str
    rpc_us: float
    run_us: float
    overhead_us: float
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Tail:
    """The latency of accel at a part of its largest rate, in each round. ``offered`` are requests per second, and
    ``ratios`` are p99 over the median. The requests come at random times, whether earlier ones have an answer or
    not."""

    scenario: str
    concurrency: int
    offered: tuple[float, ...]
    answered: tuple[float, ...]
    p50_ms: tuple[float, ...]
    p99_ms: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(p99 / p50 for p50, p99 in zip(self.p50_ms, self.p99_ms, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peers", type=Path, help="venv with mlserver, litserve, nvidia-pytriton; default: only accel and the floor"
    )
    parser.add_argument("--goals", action="store_true", help="measure only what the goals need")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for serve_load.json and serve_load.md")
    options = parser.parse_args()
    rows: list[Row] = []
    overheads: list[Overhead] = []
    tails: list[Tail] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models.py").write_text(MODELS)
        for scenario in SCENARIOS:
            found = measure(scenario, folder, options)
            rows += found.rows
            if found.alone:
                overheads.append(overhead(scenario.name, found.alone))
            if found.paced:
                tails.append(tail(scenario.name, found.paced))
            write(rows, overheads, tails, options.peers, options.results)
    print(markdown(rows, overheads, tails))


@dataclass
class Measured:
    """What was measured of a scenario. ``alone`` has the p50 in microseconds of a remote call and of ``session.run``
    for each round of accel with one caller. ``paced`` has the rate that was offered and the figures of each round."""

    rows: list[Row] = field(default_factory=list)
    alone: list[tuple[float, float]] = field(default_factory=list)
    paced: list[tuple[float, dict[str, float]]] = field(default_factory=list)


def measure(scenario: Scenario, folder: Path, options: argparse.Namespace) -> Measured:
    """Measures every server of the scenario in turn, in each round."""
    peers, seconds = options.peers, options.seconds
    model = folder / "repository" / scenario.name / "1" / "model.onnx"
    model.parent.mkdir(parents=True)
    accel.export(f"{folder / 'models.py'}:{scenario.name}", inputs=[scenario.spec], out=model)
    x = np.random.default_rng(0).standard_normal(scenario.shape).astype(np.float32)
    bodies = {True: grpc_body(scenario.name, x), False: json.dumps({"x": x.tolist()}).encode()}
    files = {is_grpc: folder / f"{scenario.name}.{'grpc' if is_grpc else 'json'}" for is_grpc in bodies}
    for is_grpc, body in bodies.items():
        files[is_grpc].write_bytes(body)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    made = Measured()
    servers = [s for s in scenario.peers if peers or s.startswith(("accel", "floor"))]
    callers = {
        s: [n for n in scenario.concurrencies if not options.goals or n in needed(scenario.name, s)] for s in servers
    }
    servers = [s for s in servers if callers[s]]
    for _ in range(options.rounds):
        for server in servers:
            with STARTERS[server](scenario, folder, peers) as port:
                if server != "litserve":
                    first_answer(port, scenario, x)
                for concurrency in callers[server]:
                    grpc = server != "litserve"
                    with counted(port, scenario.name) if server == "accel" else contextlib.nullcontext([]) as sent:
                        run = load(port, files[grpc], concurrency, seconds, grpc=grpc)
                        sent.append((int(run["answered"]), (1 + DEALS) * concurrency))
                    if server == "accel":
                        run["lost"], run["twice"] = sent[1]
                    found.setdefault((server, concurrency), []).append(run)
                    if server == "accel" and concurrency == 1:
                        made.alone.append((1000 * run["p50"], session_run_us(model, x, seconds)))
                    if (server, scenario.name, concurrency) == ("accel", "mlp", 32):
                        rate = TAIL_LOAD * run["rate"]
                        made.paced.append((rate, arrivals(port, files[True], concurrency, seconds, rate)))
                if server == "accel":
                    check(port, scenario, model)
                    with counted(port, scenario.name) as sent:
                        sent.append((exactly(port, files[True], 2000, 8), 0))
    made.rows = [row(scenario.name, *key, runs) for key, runs in found.items()]
    return made


def session_run_us(model: Path, x: np.ndarray, seconds: float) -> float:
    """Returns the p50 of ``session.run`` with one thread while the server is idle."""
    times = []
    with accel.load(model, options={"threads": 1}) as session:
        feeds = {"x": x}
        for _ in range(200):
            session.run(feeds)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            begun = time.perf_counter()
            session.run(feeds)
            times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times)


def overhead(scenario: str, runs: list[tuple[float, float]]) -> Overhead:
    return Overhead(
        scenario=scenario,
        rpc_us=statistics.median(rpc for rpc, _ in runs),
        run_us=statistics.median(run for _, run in runs),
        overhead_us=statistics.median(rpc - run for rpc, run in runs),
        rounds=tuple(rpc - run for rpc, run in runs),
    )


def tail(scenario: str, runs: list[tuple[float, dict[str, float]]]) -> Tail:
    return Tail(
        scenario=scenario,
        concurrency=32,
        offered=tuple(rate for rate, _ in runs),
        answered=tuple(run["rate"] for _, run in runs),
        p50_ms=tuple(run["p50"] for _, run in runs),
        p99_ms=tuple(run["p99"] for _, run in runs),
    )


def row(scenario: str, server: str, concurrency: int, runs: list[dict[str, float]]) -> Row:
    rates = [run["rate"] for run in runs]
    middle = statistics.median(rates)
    return Row(
        scenario=scenario,
        server=server,
        concurrency=concurrency,
        requests_per_second=middle,
        rates=tuple(rates),
        spread=(max(rates) - min(rates)) / middle,
        p50_ms=statistics.median(run["p50"] for run in runs),
        p99_ms=statistics.median(run["p99"] for run in runs),
        failed=int(sum(run["failed"] for run in runs)),
        **{name: int(sum(run[name] for run in runs)) for name in ("lost", "twice") if all(name in run for run in runs)},
    )


def check(port: int, scenario: Scenario, model: Path) -> None:
    """Checks that each answer belongs to its request, with up to 200 different requests at once through Triton's own
    client."""
    rng = np.random.default_rng(1)
    inputs = [
        rng.standard_normal(scenario.shape).astype(np.float32) for _ in range(200 if scenario.name == "mlp" else 16)
    ]

    def ask(x: np.ndarray) -> np.ndarray:
        tensor = triton.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        answer = client.infer(scenario.name, [tensor])
        return answer.as_numpy(answer.get_response().outputs[0].name)

    with (
        accel.load(model) as session,
        triton.InferenceServerClient(f"127.0.0.1:{port}") as client,
        ThreadPoolExecutor(16) as threads,
    ):
        for x, answer in zip(inputs, threads.map(ask, inputs), strict=True):
            (wanted,) = session.run({"x": x}).values()
            np.testing.assert_allclose(answer, wanted, rtol=1e-4, atol=1e-5)


def write(rows: list[Row], overheads: list[Overhead], tails: list[Tail], peers: Path | None, folder: Path) -> None:
    body = {
        "environment": environment(2),
        "peers": versions(peers),
        "rows": [asdict(row) for row in rows],
        "overhead": [asdict(one) for one in overheads],
        "tails": [asdict(one) for one in tails],
        "goals": [goal.row() for goal in reached(rows, overheads, tails)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serve_load.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (folder / "serve_load.md").write_text(markdown(rows, overheads, tails), encoding="utf-8")


def reached(rows: list[Row], overheads: list[Overhead], tails: list[Tail]) -> list[Goal]:
    rates = {(r.scenario, r.server, r.concurrency): r.rates for r in rows}
    over = next((one.rounds for one in overheads if one.scenario == "mlp"), ())
    return goals(rates, over, next((one.ratios for one in tails), ()))


def versions(peers: Path | None) -> dict[str, str]:
    if peers is None:
        return {}
    said = subprocess.run(
        [str(peers / "bin" / "python"), "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
    )
    named = ("mlserver", "litserve", "nvidia-pytriton", "onnxruntime", "grpcio")
    return {p["name"]: p["version"] for p in json.loads(said.stdout) if p["name"] in named}


def markdown(rows: list[Row], overheads: list[Overhead], tails: list[Tail]) -> str:
    lines = [
        "# accel serve beside its peers",
        "",
        "Made by `python benchmarks/serve_load.py`. Two cores; the load generator (h2load) is on them as well. `floor`",
        "is a bare grpcio server in two processes that parses the request and answers without a model; like accel it",
        "keeps freed memory (mallopt). `floor-model` is the same but runs the model, on the call's thread: the least",
        "that a Python server with this model can cost. `mlserver` runs in one process, its fastest here,",
        "`mlserver-workers` with two workers. LitServe takes JSON. `triton` is Triton 2.51 with its Python backend,",
        "which runs the model with ONNX Runtime in one process, and `triton-two` in two. `accel` answers with the",
        "native transport in two processes, `accel-one` in one. `small` runs the mean of 4 KiB, `image` of 588 KiB.",
        "Lost and twice: by accel's own counts beside h2load's, which can't see an error in a gRPC call's trailers (-:",
        "not counted).",
        "",
        "| scenario | server | concurrency | requests/s | spread | p50 ms | p99 ms | failed | lost | twice |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.scenario} | {r.server} | {r.concurrency} | {r.requests_per_second:,.0f} | {100 * r.spread:.0f}% "
            f"| {r.p50_ms:.2f} | {r.p99_ms:.2f} | {r.failed} "
            f"| {'-' if r.lost is None else r.lost} | {'-' if r.twice is None else r.twice} |"
        )
    if overheads:
        lines += [
            "",
            "One caller at a time, p50: over the wire, `session.run` with one thread in the same round, the rest.",
            "",
            "| scenario | over the wire us | session.run us | difference us |",
            "|---|---|---|---|",
        ]
        lines += [f"| {o.scenario} | {o.rpc_us:.0f} | {o.run_us:.0f} | {o.overhead_us:.0f} |" for o in overheads]
    for one in tails:
        rate, p50, p99 = (statistics.median(values) for values in (one.offered, one.p50_ms, one.p99_ms))
        lines += [
            "",
            f"`{one.scenario}` at {TAIL_LOAD:.0%} of the largest rate, {rate:,.0f} requests a second on "
            f"{one.concurrency} connections, at random times: p50 {p50:.2f} ms, p99 {p99:.2f} ms.",
        ]
    return "\n".join([*lines, "", *table(reached(rows, overheads, tails)), *why_missed(rows), ""])


def why_missed(rows: list[Row]) -> list[str]:
    """Returns lines of Markdown with the results of the bare gRPC servers in the same run."""
    found = {(r.scenario, r.server, r.concurrency): r for r in rows}

    def ratio(scenario: str, server: str, others: tuple[str, ...]) -> float | None:
        peers = [found[scenario, other, 8].requests_per_second for other in others if (scenario, other, 8) in found]
        own = found.get((scenario, server, 8))
        return own.requests_per_second / max(peers) if own and peers else None

    over_mlserver = ratio("mlp", "floor-model", ("mlserver", "mlserver-workers"))
    of_floor, alone = ratio("small", "floor-model", ("floor",)), found.get(("mlp", "floor", 1))
    said = []
    if over_mlserver:
        said.append(f"reaches {over_mlserver:.1f} times MLServer at concurrency 8")
    if of_floor:
        said.append(f"{of_floor:.2f} of the floor at 4 KiB")
    lines = []
    if said:
        lines.append(
            f"What Python leaves of the goals: bare grpcio that only runs the model {' and '.join(said)}; "
            "accel checks, queues, counts and batches besides."
        )
    if alone:
        lines.append(f"One call to the floor, which has no model, takes {alone.p50_ms:.2f} ms (p50).")
    return ["", *lines] if lines else []


if __name__ == "__main__":
    main()
