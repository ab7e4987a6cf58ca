"""Compares the requests per second and the latency of `accel serve`, MLServer, LitServe and bare gRPC servers.

Usage:

    python benchmarks/serve_load.py --peers VENV [--seconds 5] [--rounds 3]     # measures all servers in one run.

VENV is a virtual environment with mlserver, litserve, onnxruntime and uvloop<0.22, because MLServer 1.7.1 can't start
workers with a later uvloop. The requests are sent by h2load (Debian package nghttp2-client), which uses far less CPU
than a Python client. Every round measures each server once. Needs a quiet machine. All requests go to 127.0.0.1.

After each run of accel, the script compares the server's statistics with the answers that h2load counted, because
h2load can't see an error in a gRPC call's trailers. The module serve_goals.py tells whether the goals are met."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from serve_goals import Goal, goals, table
from serve_starters import STARTERS, Scenario

import accel
from accel.timing.environment import environment

DEALS = 4
RESULTS = Path(__file__).parent / "results"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
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
        ("accel", "floor", "floor-model", "mlserver", "mlserver-workers", "litserve"),
        40,
    ),
    # The input has only 4,096 bytes (1 x 4 x 16 x 16 floats), so the server itself takes nearly all of the time.
    Scenario("small", "x:float32[batch,4,16,16]", (1, 4, 16, 16), (8,), ("accel", "floor", "floor-model"), 16),
    # The input has 1 x 3 x 224 x 224 floats (602,112 bytes).
    Scenario(
        "image", "x:float32[batch,3,224,224]", (1, 3, 224, 224), (8,), ("accel", "floor", "floor-model", "mlserver"), 12
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peers", type=Path, help="venv with mlserver, litserve and onnxruntime; default: only accel and the floor"
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for serve_load.json and serve_load.md")
    options = parser.parse_args()
    rows: list[Row] = []
    overheads: list[Overhead] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models.py").write_text(MODELS)
        for scenario in SCENARIOS:
            more, runs = measure(scenario, folder, options.peers, options.seconds, options.rounds)
            rows += more
            if runs:
                overheads.append(overhead(scenario.name, runs))
            write(rows, overheads, options.peers, options.results)
    print(markdown(rows, overheads))


def measure(
    scenario: Scenario, folder: Path, peers: Path | None, seconds: float, rounds: int
) -> tuple[list[Row], list[tuple[float, float]]]:
    """Measures every server of the scenario in turn, ``rounds`` times, and returns the rows of the servers. For each
    round of accel with one caller, also returns the p50 in microseconds of a remote call and of ``session.run``."""
    model = folder / "repository" / scenario.name / "1" / "model.onnx"
    model.parent.mkdir(parents=True)
    accel.export(f"{folder / 'models.py'}:{scenario.name}", inputs=[scenario.spec], out=model)
    x = np.random.default_rng(0).standard_normal(scenario.shape).astype(np.float32)
    bodies = {True: grpc_body(scenario.name, x), False: json.dumps({"x": x.tolist()}).encode()}
    files = {is_grpc: folder / f"{scenario.name}.{'grpc' if is_grpc else 'json'}" for is_grpc in bodies}
    for is_grpc, body in bodies.items():
        files[is_grpc].write_bytes(body)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    alone: list[tuple[float, float]] = []
    servers = [s for s in scenario.peers if peers or not s.startswith(("mlserver", "litserve"))]
    for _ in range(rounds):
        for server in servers:
            with STARTERS[server](scenario, folder, peers) as port:
                if server != "litserve":
                    first_answer(port, scenario, x)
                for concurrency in scenario.concurrencies:
                    grpc = server != "litserve"
                    with counted(port, scenario.name) if server == "accel" else contextlib.nullcontext([]) as sent:
                        run = load(port, files[grpc], concurrency, seconds, grpc=grpc)
                        sent.append((int(run["answered"]), (1 + DEALS) * concurrency))
                    if server == "accel":
                        run["lost"], run["twice"] = sent[1]
                    found.setdefault((server, concurrency), []).append(run)
                    if server == "accel" and concurrency == 1:
                        alone.append((1000 * run["p50"], session_run_us(model, x, seconds)))
                if server == "accel":
                    check(port, scenario, model)
                    with counted(port, scenario.name) as sent:
                        sent.append((exactly(port, files[True], 2000, 8), 0))
    return [row(scenario.name, *key, runs) for key, runs in found.items()], alone


@contextlib.contextmanager
def counted(port: int, model: str) -> Iterator[list[tuple[int, int]]]:
    """Compares the number of requests that are sent inside this context with the server's own counts.

    The caller appends a tuple to the list. The tuple has the number of answers that h2load counted, and the largest
    number of requests that may have been open when h2load stopped. At its end, the context appends the number of lost
    requests and the number of requests with several answers. A request counts as lost if h2load counted an answer and
    the server counted no success. Raises RuntimeError if a request was lost or answered more than once.
    """
    before, sent = settled(port, model), list[tuple[int, int]]()
    yield sent
    after = settled(port, model)
    success, fail = after[0] - before[0], after[1] - before[1]
    ((answered, under_way),) = sent
    # h2load may have canceled requests that were open at the end, and the server counts these requests as failed.
    lost, twice = max(0, answered - success), max(0, success + fail - answered - under_way)
    sent.append((lost, twice))
    if lost or twice:
        raise RuntimeError(
            f"h2load counted {answered} answers, and at most {under_way} requests were open when h2load stopped; "
            f"the server counted {success} successes and {fail} failures"
        )


def settled(port: int, model: str) -> tuple[int, int]:
    """Waits until the server's counts no longer change, and returns the numbers of successes and failures."""
    found = None
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        while True:
            stats = client.get_inference_statistics(model).model_stats[0].inference_stats
            last, found = found, (stats.success.count, stats.fail.count)
            if last == found:
                return found
            time.sleep(0.3)


def exactly(port: int, body: Path, count: int, concurrency: int) -> int:
    """Sends ``count`` requests, waits for all, and returns the number of answers. Raises RuntimeError if an answer is
    missing. The server's own counts don't include a request that never arrived."""
    words = ["h2load", "-c", str(concurrency), "-m", "1", "-t", "1", "-n", str(count), "-d", str(body)]
    words += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"http://127.0.0.1:{port}{METHOD}"]
    answered = answers(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    if answered != count:
        raise RuntimeError(f"{answered} of {count} requests were answered")
    return answered


def answers(said: str) -> int:
    found = re.search(r"(\d+) succeeded", said)
    if not found:
        raise RuntimeError(said)
    return int(found[1])


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


def grpc_body(model: str, x: np.ndarray) -> bytes:
    """Returns the gRPC request as it is sent over the network: one length-prefixed message."""
    wanted = triton.InferInput("x", list(x.shape), "FP32")
    wanted.set_data_from_numpy(x)
    request = triton.service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=list(x.shape))
    request.raw_input_contents.append(x.tobytes())
    message = request.SerializeToString()
    return b"\0" + len(message).to_bytes(4, "big") + message


def first_answer(port: int, scenario: Scenario, x: np.ndarray, patience: float = 60.0) -> None:
    """Waits until the server answers without an error. h2load counts an error in the trailers as an answer."""
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    deadline = time.monotonic() + patience
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        while True:
            try:
                client.infer(scenario.name, [tensor])
                return
            except triton.InferenceServerException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)


def load(port: int, body: Path, concurrency: int, seconds: float, *, grpc: bool) -> dict[str, float]:
    """Sends requests for ``seconds`` on ``concurrency`` connections, one request at a time on each connection.

    The operating system assigns connections to a server's processes at random, so a few connections may be spread
    unevenly. Therefore the time is divided into ``DEALS`` parts, each with new connections. The warm-up of one second
    is a separate run, because h2load does not count the requests of its built-in warm-up.
    """
    log = body.with_suffix(".log")
    words = ["h2load", "-c", str(concurrency), "-m", "1", "-t", "1", "-d", str(body)]
    if grpc:
        words += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"http://127.0.0.1:{port}{METHOD}"]
    else:
        words += ["--h1", "-H", "content-type: application/json", f"http://127.0.0.1:{port}/predict"]
    answered = answers(subprocess.run([*words, "-D", "1s"], capture_output=True, text=True, check=True).stdout)
    words += [f"--log-file={log}", "-D", f"{round(1000 * seconds / DEALS)}ms"]
    rates: list[float] = []
    times: list[float] = []
    failed = 0
    for _ in range(DEALS):
        log.unlink(missing_ok=True)
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        rate = re.search(r"finished in .*?, ([\d.]+) req/s", said)
        codes = re.search(r"(\d+) failed, (\d+) errored, (\d+) timeout", said)
        if not rate or not codes:
            raise RuntimeError(said)
        if not log.read_text():
            raise RuntimeError(f"no answer in {seconds / DEALS} s: {said}")
        rates.append(float(rate[1]))
        failed += sum(map(int, codes.groups()))
        answered += answers(said)
        times += [int(line.split("\t")[2]) / 1000 for line in log.read_text().splitlines()]
    times.sort()
    return {
        "rate": statistics.mean(rates),
        "failed": float(failed),
        "answered": float(answered),
        "p50": times[len(times) // 2],
        "p99": times[int(len(times) * 0.99)],
    }


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


def write(rows: list[Row], overheads: list[Overhead], peers: Path | None, folder: Path) -> None:
    body = {
        "environment": environment(2),
        "peers": versions(peers),
        "rows": [asdict(row) for row in rows],
        "overhead": [asdict(one) for one in overheads],
        "goals": [goal.row() for goal in reached(rows, overheads)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serve_load.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (folder / "serve_load.md").write_text(markdown(rows, overheads), encoding="utf-8")


def reached(rows: list[Row], overheads: list[Overhead]) -> list[Goal]:
    rates = {(r.scenario, r.server, r.concurrency): r.rates for r in rows}
    return goals(rates, next((one.rounds for one in overheads if one.scenario == "mlp"), ()))


def versions(peers: Path | None) -> dict[str, str]:
    if peers is None:
        return {}
    said = subprocess.run(
        [str(peers / "bin" / "python"), "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
    )
    return {p["name"]: p["version"] for p in json.loads(said.stdout) if p["name"] in ("mlserver", "litserve", "grpcio")}


def markdown(rows: list[Row], overheads: list[Overhead]) -> str:
    lines = [
        "# accel serve beside its peers",
        "",
        "Made by `python benchmarks/serve_load.py`. Two cores; the load generator (h2load) is on them as well. `floor`",
        "is a bare grpcio server in two processes that parses the request and answers without a model; like accel it",
        "keeps freed memory (mallopt). `floor-model` is the same but runs the model, on the call's thread: the least",
        "that a Python server with this model can cost. `mlserver` runs in one process, its fastest here,",
        "`mlserver-workers` with two workers. LitServe takes JSON. `small` runs the mean of 4 KiB, `image` of 588 KiB.",
        "Triton itself was not measured beside them. Lost and twice: by accel's own counts beside h2load's, which",
        "can't see an error in a gRPC call's trailers (-: not counted).",
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
    return "\n".join([*lines, "", *table(reached(rows, overheads)), *why_missed(rows), ""])


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
