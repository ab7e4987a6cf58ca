"""Compares `accel serve`, MLServer, LitServe and a bare gRPC server on MiniLM and texts of real lengths.

Usage:

    python benchmarks/serve_texts.py --peers VENV [--seconds 8] [--rounds 3]      # takes about seven minutes.

VENV is the virtual environment that serve_load.py describes. The texts come from serve_lengths.py. Each caller is a
thread that waits for the answer before it sends the next text. Each answer is compared with the unbatched answer
for the same text. All servers get the same ONNX file and the same requests with token ids and an attention mask. By
default, accel batches by length. The other servers don't pad, so they run each text alone. Needs a quiet machine. All
requests go to 127.0.0.1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from serve_goals import Goal, table
from serve_h2load import settled
from serve_lengths import LONGEST, texts
from serve_load import RESULTS, versions
from serve_starters import STARTERS, Scenario

import accel
from accel.timing.environment import environment

CONCURRENCIES = (1, 8, 32)
OWN = "accel-instances"
SERVERS = ("accel-one", "accel-instances", "accel", "floor-model", "mlserver", "mlserver-workers", "litserve")
SCENARIO = Scenario("minilm", "", (), CONCURRENCIES, SERVERS, 0)

Feeds = dict[str, np.ndarray]
Ask = Callable[[Feeds], Any]


@dataclass(frozen=True)
class Row:
    """The results of one server, as medians over the rounds. ``rates`` are the requests per second of each round.
    ``wrong`` counts answers that belong to another text or are inaccurate. ``lost`` counts failed calls. For accel,
    ``lost`` also counts calls that accel's statistics miss or count several times."""

    server: str
    concurrency: int
    requests_per_second: float
    rates: tuple[float, ...]
    p50_ms: float
    p99_ms: float
    wrong: int
    lost: int


class Callers:
    """Threads that each keep one request in flight, for a given number of seconds."""

    def __init__(self, asks: list[Ask], inputs: list[Feeds], wanted: np.ndarray) -> None:
        self._asks, self._inputs, self._wanted = asks, inputs, wanted
        self._lock = threading.Lock()
        self.latencies: list[float] = []
        self.wrong = self.lost = 0

    def run(self, seconds: float) -> float:
        """Returns the answers per second."""
        begin = time.perf_counter()
        threads = [threading.Thread(target=self._call, args=(i, begin + seconds)) for i in range(len(self._asks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(self.latencies) / (time.perf_counter() - begin)

    def _call(self, first: int, end: float) -> None:
        number = first
        while time.perf_counter() < end:
            index = number % len(self._inputs)
            number += len(self._asks)
            begun = time.perf_counter()
            try:
                answer = self._asks[first](self._inputs[index])
            except (triton.InferenceServerException, OSError, http.client.HTTPException):
                answer = None
            with self._lock:
                self.latencies.append(time.perf_counter() - begun)
                self.lost += answer is None
                self.wrong += answer is not None and not np.allclose(answer, self._wanted[index], atol=1e-3)


def over_grpc(stack: ExitStack, port: int) -> Ask:
    client = stack.enter_context(triton.InferenceServerClient(f"127.0.0.1:{port}"))

    def ask(feeds: Feeds) -> np.ndarray:
        given = [triton.InferInput(name, list(value.shape), "INT64") for name, value in feeds.items()]
        for tensor, value in zip(given, feeds.values(), strict=True):
            tensor.set_data_from_numpy(value)
        answer = client.infer(SCENARIO.name, given)
        return answer.as_numpy(answer.get_response().outputs[0].name)[0]

    return ask


def over_json(stack: ExitStack, port: int) -> Ask:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    stack.callback(connection.close)

    def ask(feeds: Feeds) -> np.ndarray:
        body = json.dumps({name: value.tolist() for name, value in feeds.items()})
        connection.request("POST", "/predict", body, {"content-type": "application/json"})
        return np.asarray(json.load(connection.getresponse())["y"][0], np.float32)

    return ask


def measure(
    server: str, folder: Path, peers: Path | None, inputs: list[Feeds], wanted: np.ndarray, seconds: float
) -> dict[int, dict[str, float]]:
    """Measures one server in one round. Returns the results by number of callers."""
    found = {}
    connect = over_json if server == "litserve" else over_grpc
    with STARTERS[server](SCENARIO, folder, peers) as port, ExitStack() as stack:
        asks = [connect(stack, port) for _ in range(max(CONCURRENCIES))]
        until_ready(asks[0], inputs[0])
        for concurrency in CONCURRENCIES:
            Callers(asks[:concurrency], inputs, wanted).run(seconds / 4)
            before = settled(port, SCENARIO.name) if server.startswith("accel") else (0, 0)
            callers = Callers(asks[:concurrency], inputs, wanted)
            rate = callers.run(seconds)
            if server.startswith("accel"):
                success, failed = (now - was for now, was in zip(settled(port, SCENARIO.name), before, strict=True))
                callers.lost += abs(len(callers.latencies) - success) + failed
            times = sorted(callers.latencies)
            p50, p99 = (1000 * times[int(len(times) * q)] for q in (0.5, 0.99))
            found[concurrency] = {"rate": rate, "p50": p50, "p99": p99, "wrong": callers.wrong, "lost": callers.lost}
    return found


def until_ready(ask: Ask, feeds: Feeds, patience: float = 120.0) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            ask(feeds)
            return
        except (triton.InferenceServerException, OSError, http.client.HTTPException, KeyError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, help="default: only accel and the floor")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    inputs = [{"input_ids": ids[None], "attention_mask": np.ones_like(ids)[None]} for ids in texts()]
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "repository" / SCENARIO.name / "1" / "model.onnx"
        model.parent.mkdir(parents=True)
        dims = {"batch": (1, 8, 32), "sequence": (2, 64, LONGEST)}
        accel.export("accel.examples.minilm:model", out=model, dims=dims)
        with accel.load(model) as session:
            wanted = np.concatenate([session.run(feeds)["embedding"] for feeds in inputs])
        for _ in range(options.rounds):
            for server in SERVERS if options.peers else SERVERS[:4]:
                for concurrency, run in measure(server, folder, options.peers, inputs, wanted, options.seconds).items():
                    runs.setdefault((server, concurrency), []).append(run)
    write([row(*key, each) for key, each in runs.items()], options.peers)


def row(server: str, concurrency: int, runs: list[dict[str, float]]) -> Row:
    return Row(
        server=server,
        concurrency=concurrency,
        requests_per_second=statistics.median(run["rate"] for run in runs),
        rates=tuple(run["rate"] for run in runs),
        p50_ms=statistics.median(run["p50"] for run in runs),
        p99_ms=statistics.median(run["p99"] for run in runs),
        wrong=int(sum(run["wrong"] for run in runs)),
        lost=int(sum(run["lost"] for run in runs)),
    )


def write(rows: list[Row], peers: Path | None) -> None:
    rates = {(r.server, r.concurrency): r.rates for r in rows}
    ratios = [
        Goal(
            what=f"{concurrency} callers: {OWN} over {other}",
            bound=1.0,
            rounds=[a / b for a, b in zip(rates[OWN, concurrency], rates[other, concurrency], strict=True)],
        )
        for concurrency in CONCURRENCIES
        for other in SERVERS
        if other != OWN
        if (other, concurrency) in rates
    ]
    body = {"environment": environment(2), "peers": versions(peers), "rows": [asdict(r) for r in rows]}
    body["ratios"] = [goal.row() for goal in ratios]
    (RESULTS / "serve_texts.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# MiniLM on texts of real lengths, beside peers",
        "",
        "Made by `python benchmarks/serve_texts.py`: one ONNX file, real texts of 2 to 256 tokens, callers that wait",
        "for their answer before they send the next. Two cores, the callers (Python) on them as well. All of accel's",
        "batch by length: `accel-one` as it is where nothing is said (one session, both cores), `accel-instances` with",
        "`instance_group { count: 2 }`, `accel` with `--processes 2`, where a connection stays with its process and",
        "Triton's client shares one among six callers. `floor-model`: bare grpcio, two processes, each text alone.",
        "`mlserver` in one process, `mlserver-workers` with two; LitServe with two, over JSON.",
        "",
        "| server | callers | requests/s | rounds | p50 ms | p99 ms | wrong | lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.server} | {r.concurrency} | {r.requests_per_second:,.0f} | {min(r.rates):,.0f} to {max(r.rates):,.0f} "
        f"| {r.p50_ms:.1f} | {r.p99_ms:.1f} | {r.wrong} | {r.lost} |"
        for r in rows
    ]
    text = "\n".join([*lines, "", *table(ratios), ""])
    (RESULTS / "serve_texts.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
