"""Compares batching by length with batching in the order of arrival, on texts of real lengths.

Usage:

    python benchmarks/serve_lengths.py [--seconds 12] [--rounds 2]      # takes about two minutes.

One `accel serve` process serves MiniLM (real weights) under two names. The model `grouped` has the default settings,
and the model `padded` has the parameter `length_grouping: none`. The model `padded` batches texts in the order of
arrival, and pads each batch to its longest text. The texts are a mix of the documents of the Lee corpora, the sentences
of these documents, and the words of WordSim353. In every round each model first gets the maximum load (64 requests in
flight). Then each model gets requests at random times, at half of its maximum rate, to measure the latency. Every
answer is compared with the unbatched answer for the same text. Needs a quiet machine. All requests go to 127.0.0.1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families
from serve_goals import Goal, table
from serve_load import RESULTS
from serve_starters import free_port, running

import accel
from accel.examples import minilm
from accel.timing.environment import environment

LONGEST, BATCH, UNDER_WAY, TEXTS = 256, 32, 64, 600
BOUND_MS = 100  # the longest time in ms that a request waits until its batch is full (max_queue_delay)
CONFIG = """
max_batch_size: {batch}
dynamic_batching {{ max_queue_delay_microseconds: {delay} }}
parameters {{ key: "length_grouping" value {{ string_value: "{grouping}" }} }}
"""


@dataclass(frozen=True)
class Row:
    """The results of one model, as medians over the rounds. ``rates`` are the requests per second of each round.
    ``p50_ms`` and ``p99_ms`` are latencies at half of the largest rate. ``waited_in_bound`` is the share of requests
    that waited in the queue for at most ``BOUND_MS``, also at half of the largest rate. ``in_bound`` has the value of
    ``waited_in_bound`` for each round."""

    model: str
    requests_per_second: float
    rates: tuple[float, ...]
    spread: float
    offered_per_second: float
    p50_ms: float
    p99_ms: float
    waited_in_bound: float
    in_bound: tuple[float, ...]
    padding: float
    lost: int
    twice: int
    wrong: int


def texts() -> list[np.ndarray]:
    """Returns token ids, one array per text, in a fixed random order."""
    documents: list[str] = []
    for name in ("lee_background.cor", "lee.cor"):
        documents += minilm._corpus(name).read_text(encoding="latin-1").splitlines()
    sentences = [part.strip() for text in documents for part in text.split(". ") if part.strip()]
    pairs = minilm._corpus("wordsim353.tsv").read_text(encoding="utf-8").splitlines()
    words = [line.split("\t")[0] for line in pairs if line and not line.startswith("#")]
    every = [*documents, *sentences, *words]
    random.Random(0).shuffle(every)
    found = minilm.tokenize(every[:TEXTS], LONGEST)
    return [ids[: int(mask.sum())] for ids, mask in zip(found["input_ids"], found["attention_mask"], strict=True)]


class Asked:
    """Sends requests, and counts missing, repeated and wrong answers."""

    def __init__(self, port: int, model: str, inputs: list[np.ndarray], wanted: np.ndarray) -> None:
        self._client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        self._model, self._inputs, self._wanted = model, inputs, wanted
        self._lock = threading.Condition()
        self._started: dict[int, float] = {}
        self._answers: dict[int, int] = {}
        self._numbers = itertools.count()
        # The arrival time of each answer, and the latency of its request in seconds.
        self.latencies: list[tuple[float, float]] = []
        self.wrong = 0

    def send(self) -> None:
        """Sends the next text without waiting for the answer."""
        number = next(self._numbers)
        index = number % len(self._inputs)
        ids = self._inputs[index]
        given = triton.InferInput("input_ids", [1, len(ids)], "INT64")
        given.set_data_from_numpy(ids[None])
        with self._lock:
            self._started[number] = time.perf_counter()

        def answered(result: Any, error: Any) -> None:
            now = time.perf_counter()
            good = error is None and result.get_response().id == str(number)
            good = good and np.allclose(result.as_numpy("embedding")[0], self._wanted[index], atol=1e-3)
            with self._lock:
                self._answers[number] = self._answers.get(number, 0) + 1
                self.wrong += not good
                self.latencies.append((now, now - self._started[number]))
                self._lock.notify_all()

        self._client.async_infer(self._model, [given], answered, request_id=str(number))

    def wait_for_room(self, under_way: int) -> None:
        """Waits at most a minute until fewer than ``under_way`` requests are unanswered."""
        with self._lock:
            self._lock.wait_for(lambda: len(self._started) - len(self._answers) < under_way, 60)

    def close(self) -> tuple[int, int, int]:
        """Closes the client. Returns how many requests got no answer, how many got several answers, and how many
        answers were wrong."""
        self.wait_for_room(1)
        with self._lock:
            lost = len(self._started) - len(self._answers)
            twice = sum(count > 1 for count in self._answers.values())
        self._client.close()
        return lost, twice, self.wrong


def closed_loop(asked: Asked, seconds: float) -> float:
    """Keeps ``UNDER_WAY`` requests in flight for ``seconds``. Returns the requests per second, measured after a warm-up
    of a sixth of the time."""
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds:
        asked.wait_for_room(UNDER_WAY)
        asked.send()
    end = time.perf_counter()
    start = begin + seconds / 6
    return sum(start <= when <= end for when, _ in list(asked.latencies)) / (end - start)


def open_loop(asked: Asked, seconds: float, rate: float) -> list[float]:
    """Sends requests at the times of a Poisson process with ``rate`` requests per second. Returns the sorted latencies
    in seconds."""
    gaps = random.Random(1)
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        asked.send()
        due += gaps.expovariate(rate)
    asked.wait_for_room(1)
    return sorted(latency for _, latency in asked.latencies)


def measure(
    port: int, http_port: int, model: str, inputs: list[np.ndarray], wanted: np.ndarray, seconds: float
) -> dict[str, float]:
    """Measures one model in one round."""
    found: dict[str, float] = dict.fromkeys(("lost", "twice", "wrong"), 0)
    asked = Asked(port, model, inputs, wanted)
    found["rate"] = closed_loop(asked, seconds)
    faults = [asked.close()]
    asked = Asked(port, model, inputs, wanted)
    found["offered"] = found["rate"] / 2
    before = waits(http_port, model)
    latencies = open_loop(asked, seconds, found["offered"])
    faults.append(asked.close())
    found["in_bound"], found["waited"] = (
        after - was for after, was in zip(waits(http_port, model), before, strict=True)
    )
    found["p50"], found["p99"] = (1000 * latencies[int(len(latencies) * q)] for q in (0.5, 0.99))
    for name, counts in zip(("lost", "twice", "wrong"), zip(*faults, strict=True), strict=True):
        found[name] = sum(counts)
    return found


def counters(http_port: int, model: str) -> dict[str, float]:
    """Returns the Prometheus metrics of the model by name. The name of a histogram bucket includes its upper bound."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        sample.name + sample.labels.get("le", ""): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("model") == model
    }


def waits(http_port: int, model: str) -> tuple[float, float]:
    """Returns the number of requests that waited in the queue for at most ``BOUND_MS``, and the number of all
    requests."""
    found = counters(http_port, model)
    return tuple(found[f"accel_queue_duration_seconds_bucket{end}"] for end in (BOUND_MS / 1000, "+Inf"))


def padding(http_port: int, model: str) -> float:
    """Returns the share of padding among all tokens."""
    found = counters(http_port, model)
    padded, real = found["accel_padded_tokens_total"], found["accel_real_tokens_total"]
    return padded / (padded + real)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", type=Path, help="MiniLM as ONNX with a manifest; exported where not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = options.model
        if source is None:
            source = folder / "minilm.onnx"
            dims = {"batch": (1, 8, BATCH), "sequence": (2, 64, LONGEST)}
            accel.export("accel.examples.minilm:model", out=source, dims=dims)
        inputs = texts()
        with accel.load(source) as session:
            runs = [session.run({"input_ids": i[None], "attention_mask": np.ones_like(i)[None]}) for i in inputs]
        wanted = np.concatenate([run["embedding"] for run in runs])
        rows = serve_and_measure(folder / "models", source, inputs, wanted, options.seconds, options.rounds)
    write(rows, inputs)


def serve_and_measure(
    models: Path, source: Path, inputs: list[np.ndarray], wanted: np.ndarray, seconds: float, rounds: int
) -> list[Row]:
    from accel.artifact import Artifact

    for model, grouping in (("grouped", "cost"), ("padded", "none")):
        (models / model / "1").mkdir(parents=True)
        Artifact.open(source).copy_to(models / model / "1" / "model.onnx")
        config = CONFIG.format(batch=BATCH, delay=BOUND_MS * 1000, grouping=grouping)
        (models / model / "config.pbtxt").write_text(config)
    port, http_port = free_port(), free_port()
    words = [sys.executable, "-m", "accel", "serve", str(models), "--grpc-port", str(port)]
    found: dict[str, list[dict[str, float]]] = {"grouped": [], "padded": []}
    with running([*words, "--http-port", str(http_port)], port):
        wait_until_ready(port, list(found))
        for _ in range(rounds):
            for model, runs in found.items():
                runs.append(measure(port, http_port, model, inputs, wanted, seconds))
        shares = {model: padding(http_port, model) for model in found}
    return [row(model, runs, shares[model]) for model, runs in found.items()]


def wait_until_ready(port: int, models: list[str], patience: float = 120.0) -> None:
    deadline = time.monotonic() + patience
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        while not all(client.is_model_ready(model) for model in models):
            if time.monotonic() > deadline:
                raise RuntimeError("the server did not load its models")
            time.sleep(0.2)


def row(model: str, runs: list[dict[str, float]], share: float) -> Row:
    rates = [run["rate"] for run in runs]
    middle = statistics.median(rates)
    return Row(
        model=model,
        requests_per_second=middle,
        rates=tuple(rates),
        spread=(max(rates) - min(rates)) / middle,
        offered_per_second=statistics.median(run["offered"] for run in runs),
        p50_ms=statistics.median(run["p50"] for run in runs),
        p99_ms=statistics.median(run["p99"] for run in runs),
        waited_in_bound=sum(run["in_bound"] for run in runs) / sum(run["waited"] for run in runs),
        in_bound=tuple(run["in_bound"] / run["waited"] for run in runs),
        padding=share,
        lost=int(sum(run["lost"] for run in runs)),
        twice=int(sum(run["twice"] for run in runs)),
        wrong=int(sum(run["wrong"] for run in runs)),
    )


def write(rows: list[Row], inputs: list[np.ndarray]) -> None:
    lengths = sorted(map(len, inputs))
    quantiles = {f"p{q}": lengths[len(lengths) * q // 100] for q in (10, 50, 90, 99)}
    grouped, padded = rows
    ratios = [ours / theirs for ours, theirs in zip(grouped.rates, padded.rates, strict=True)]
    reached = [
        Goal(what="requests a second, by length over padded in the order of arrival", bound=2.0, rounds=ratios),
        Goal(
            what=f"by length: part of the requests that waited at most {BOUND_MS} ms (p99 within the bound: 0.99)",
            bound=0.99,
            rounds=grouped.in_bound,
            unit="",
        ),
    ]
    body = {
        "environment": environment(2),
        "tokens": quantiles,
        "delay_bound_ms": BOUND_MS,
        "ratio": reached[0].found,
        "rows": [asdict(one) for one in rows],
        "goals": [goal.row() for goal in reached],
    }
    (RESULTS / "serve_lengths.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# Batching by length",
        "",
        "Made by `python benchmarks/serve_lengths.py`: MiniLM on real texts ("
        + ", ".join(f"{name} {tokens}" for name, tokens in quantiles.items())
        + f" tokens), batches of up to {BATCH}, a delay bound of {BOUND_MS} ms.",
        f"Latencies at half the requests a second; in bound: the part of those that waited at most {BOUND_MS} ms.",
        "A text of 256 tokens alone takes about half the bound, and the load generator shares the cores, so that runs",
        "take longer than what was measured when the model was loaded: both make others late (`how-to/serving.md`).",
        "",
        "| batching | requests/s | spread | padding | p50 ms | p99 ms | in bound | lost | twice | wrong |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {r.requests_per_second:,.0f} | {100 * r.spread:.0f}% | {100 * r.padding:.0f}% | {r.p50_ms:.1f} "
        f"| {r.p99_ms:.1f} | {r.waited_in_bound:.1%} | {r.lost} | {r.twice} | {r.wrong} |"
        for r in rows
    ]
    text = "\n".join([*lines, "", *table(reached), ""])
    (RESULTS / "serve_lengths.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
