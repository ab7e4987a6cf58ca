"""Proves that a mixed load of ten minutes doesn't make the memory grow, and that the counters add up.

One process gets ten minutes of load, and two processes get five minutes. The load consists of gRPC calls, streams,
HTTP, shared memory, sequences, texts of many lengths, failures and reloads.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import urllib.request
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from accel.timing.environment import environment
from tests.support.onnx_builder import artifact, node
from tests.support.serving import FAULTY, FLOAT, INT64, WEIGHTS, ask, client, identity, linear, pids

SECONDS = float(os.environ.get("ACCEL_SOAK_SECONDS", "600"))


def resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


def files_and_threads(pid: int) -> tuple[int, int]:
    files, threads = (len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task"))
    return files, threads


class Clients:
    """Runs each function in ``kinds`` repeatedly on a separate thread until ``end``. Each function gets a gRPC client,
    the HTTP port and the number of the call. The function returns the model's name and an outcome. A function that
    sends several requests also returns their number. ``counts`` contains the number of requests by model and
    outcome."""

    def __init__(self, ports: dict[str, int], kinds: list[Any]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []
        self.ended: list[str] = []
        self._ports, self._stop, self._lock = ports, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in kinds]
        for thread in self._threads:
            thread.start()

    def _run(self, kind: Any) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                with client(self._ports["grpc"]) as made:  # the client sometimes opens a new connection
                    for _ in range(200):
                        number += 1
                        if self._stop.is_set():
                            return
                        self._count(*kind(made, self._ports["http"], number))
        except Exception as error:
            self.ended.append(f"{kind.__name__}: {error!r}")

    def _count(self, model: str, outcome: str, requests: int = 1) -> None:
        with self._lock:
            self.counts[model, outcome] += requests
            if outcome == "wrong":
                self.wrong.append(model)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        assert self.ended == []


def right(made: Any, http: int, number: int) -> tuple[str, str]:
    mark = float(number % 97)
    return "linear", "ok" if np.allclose(
        ask(made, "linear", mark, client_timeout=60), mark * WEIGHTS.sum(0)
    ) else "wrong"


def failing(made: Any, http: int, number: int) -> tuple[str, str]:
    if number % 2:
        return "bad", "ok" if ask(made, "bad", 4.0, client_timeout=60).shape == (1, 3) else "wrong"
    try:
        ask(made, "bad", 1.0, client_timeout=60)
    except InferenceServerException as error:
        return "bad", "failed" if error.status() == "StatusCode.INTERNAL" else "wrong"
    return "bad", "wrong"


def large(made: Any, http: int, number: int) -> tuple[str, str]:
    size = 1000 * (1 + number % 50)
    x = np.full(size, number, np.float32)
    given = triton.InferInput("x", [size], "FP32")
    given.set_data_from_numpy(x)
    return "same", "ok" if np.array_equal(made.infer("same", [given]).as_numpy("y"), x) else "wrong"


def refused(made: Any, http: int, number: int) -> tuple[str, str]:
    try:
        ask(made, "nothing", client_timeout=60)
    except InferenceServerException as error:
        return "nothing", "refused" if error.status() == "StatusCode.NOT_FOUND" else "wrong"
    return "nothing", "wrong"


def reloading(made: Any, http: int, number: int) -> tuple[str, str]:
    made.load_model("again")
    found = ask(made, "again", float(number % 97), client_timeout=60)
    time.sleep(0.2)
    made.unload_model("again")
    return "again", "reloaded" if np.allclose(found, number % 97 * WEIGHTS.sum(0)) else "wrong"


def streaming(made: Any, http: int, number: int) -> tuple[str, str, int]:
    """Sends twenty requests over a stream, and checks that each request is answered once and in order."""
    answers: queue.Queue[Any] = queue.Queue()
    made.start_stream(lambda result, error: answers.put((result, error)))
    for mark in range(20):
        x = triton.InferInput("x", [1, 4], "FP32")
        x.set_data_from_numpy(np.full((1, 4), mark, np.float32))
        made.async_stream_infer("linear", [x], request_id=str(mark))
    found = [answers.get(timeout=60) for _ in range(20)]
    made.stop_stream()
    right = all(
        error is None
        and result.get_response().id == str(mark)
        and np.allclose(result.as_numpy("y"), mark * WEIGHTS.sum(0))
        for mark, (result, error) in enumerate(found)
    )
    return "linear", "ok" if right and answers.empty() else "wrong", 20


def over_http(made: Any, http: int, number: int) -> tuple[str, str]:
    mark = number % 97
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [mark] * 4}]}
    request = urllib.request.Request(f"http://127.0.0.1:{http}/v2/models/linear/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        found = json.load(response)["outputs"][0]["data"]
    return "linear", "ok" if np.allclose(found, mark * WEIGHTS.sum(0)) else "wrong"


def through_memory(made: Any, http: int, number: int) -> tuple[str, str]:
    """Sends a request through a new shared memory region. The server must keep nothing of an unregistered region."""
    key = f"/accel-soak-{uuid.uuid4().hex[:12]}"
    x = np.full((1, 4), number % 97, np.float32)
    handle = shm.create_shared_memory_region(key[1:], key, 128)
    try:
        shm.set_shared_memory_region(handle, [x])
        made.register_system_shared_memory(key, key, 128)
        given, asked = triton.InferInput("x", [1, 4], "FP32"), triton.InferRequestedOutput("y")
        given.set_shared_memory(key, 16)
        asked.set_shared_memory(key, 12, offset=64)
        made.infer("linear", [given], outputs=[asked], client_timeout=60)
        found = shm.get_contents_as_numpy(handle, np.float32, [1, 3], offset=64).copy()
        made.unregister_system_shared_memory(key)
    finally:
        shm.destroy_shared_memory_region(handle)
    return "linear", "ok" if np.allclose(found, x @ WEIGHTS) else "wrong"


def sequences(made: Any, http: int, number: int) -> tuple[str, str, int]:
    """Sends a sequence of three requests. Every second call leaves its sequence open."""
    totals = []
    for step in (1, 2, 3):
        x = triton.InferInput("x", [1, 1], "FP32")
        x.set_data_from_numpy(np.full((1, 1), step, np.float32))
        ends = step == 3 and number % 2 == 0
        result = made.infer("counter", [x], sequence_id=1 + number % 500, sequence_start=step == 1, sequence_end=ends)
        totals.append(result.as_numpy("total").item())
    return "counter", "ok" if totals == [1, 3, 6] else "wrong", 3


def texts(made: Any, http: int, number: int) -> tuple[str, str]:
    ids = np.arange(1 + number % 40, dtype=np.int64)[None]
    given = triton.InferInput("ids", list(ids.shape), "INT64")
    given.set_data_from_numpy(ids)
    found = made.infer("text", [given], client_timeout=60).as_numpy("y")
    return "text", "ok" if np.array_equal(found, 2 * ids) else "wrong"


KINDS = [
    right, failing, large, refused, reloading, streaming, over_http, through_memory, sequences, texts, texts, texts,
]  # fmt: skip


def repository(models: Path) -> Path:
    """Makes a repository with the models for all kinds of load."""
    for name in ("linear", "bad", "again"):
        linear(models / name / "1")
    identity(models / "same" / "1", FLOAT)
    (models / "same" / "config.pbtxt").write_text("max_batch_size: 0")
    for name in ("counter", "text"):
        (models / name / "1").mkdir(parents=True)
    rows, lengths = ["batch", 1], ["batch", "length"]
    artifact(
        models / "counter" / "1" / "model.onnx",
        [node("Add", "x total_in", "total"), node("Identity", "total", "total_out")],
        {"x": (FLOAT, rows), "total_in": (FLOAT, rows)},
        {"total": (FLOAT, rows), "total_out": (FLOAT, rows)},
    )
    (models / "counter" / "config.pbtxt").write_text(
        'max_batch_size: 8 sequence_batching { state { input_name: "total_in" output_name: "total_out" } }'
    )
    artifact(
        models / "text" / "1" / "model.onnx",
        [node("Mul", "ids attention_mask", "real"), node("Add", "ids real", "y")],
        {"ids": (INT64, lengths), "attention_mask": (INT64, lengths)},
        {"y": (INT64, lengths)},
    )
    (models / "text" / "config.pbtxt").write_text(
        "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 1000 }"
    )
    return models


def held(served: Any) -> tuple[int, int, int]:
    """Returns the memory, open files and threads of all server processes."""
    found = [(resident(pid), *files_and_threads(pid)) for pid in pids(served)]
    memory, files, threads = (sum(values) for values in zip(*found, strict=True))
    return memory, files, threads


def record(folder: Path, processes: int, seconds: float, requests: int, rows: list[tuple[str, int, int]]) -> None:
    """Writes the file ``soak_PROCESSES.md``. The file describes the machine, and lists the resources that the server
    used in the second and in the last quarter of the load."""
    found = environment(os.cpu_count() or 1)
    lines = [
        f"# A server under mixed load: {processes} process{'es' if processes > 1 else ''}",
        "",
        f"Made by `make soak` ({found['date'][:10]}, {found['cpu']}, {found['cores']} cores): {seconds:,.0f} seconds, "
        f"{requests:,} requests, each counted by the server as by its client.",
        "The most that all serving processes held in the second quarter of the time and in the last.",
        "",
        "| | second quarter | last quarter |",
        "|---|---|---|",
        *(f"| {what} | {before:,} | {after:,} |" for what, before, after in rows),
        "",
    ]
    (folder / f"soak_{processes}.md").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("processes", [1, 2])
def test_soak(tmp_path: Path, serve: Any, processes: int) -> None:
    """Fails if an answer is wrong or lost, or if a counter differs from the clients' counts. Also fails if memory,
    threads or open files grow between the second and the last quarter of the time. The test with two processes takes
    half the time. ACCEL_SOAK_SECONDS shortens the load. ACCEL_SOAK_RESULTS names a folder for the results."""
    seconds = SECONDS / processes
    words = ["--mode", "explicit", "--load-model", "*", "--processes", str(processes)]
    served = serve(str(repository(tmp_path / "models")), *words, path=FAULTY)
    ports = served.wait_for("serving" if processes == 1 else "all processes serve")["ports"]
    assert len(pids(served)) == processes
    clients = Clients(ports, KINDS)
    samples: list[tuple[int, int, int]] = []
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        time.sleep(min(seconds / 200, seconds - now))
        samples.append(held(served))
        assert served.process.poll() is None
    clients.end()
    assert clients.wrong == []
    with client(ports["grpc"]) as made:
        rows = {row.name: row.inference_stats for row in made.get_inference_statistics().model_stats}
        for name in ("linear", "bad", "same", "counter", "text"):
            counted = (clients.counts[name, "ok"], clients.counts[name, "failed"])
            assert (rows[name].success.count, rows[name].fail.count) == counted, name
            assert counted[0] > seconds
        assert clients.counts["again", "reloaded"] > seconds / 10
        assert clients.counts["nothing", "refused"] > seconds
        assert not made.get_system_shared_memory_status().regions
    quarter = len(samples) // 4
    growth = []
    for what, slack, before, after in zip(
        ("memory", "files", "threads"),
        (processes * 32 << 20, processes * 16, processes * 16),
        np.max(samples[quarter : 2 * quarter], axis=0),
        np.max(samples[-quarter:], axis=0),
        strict=True,
    ):
        print(f"{what}: {before} -> {after}")
        growth.append((f"{what} (bytes)" if what == "memory" else what, int(before), int(after)))
        assert after <= before + slack, (what, before, after)
    assert len(pids(served)) == processes  # the server restarted no process
    assert served.end() == 0
    if folder := os.environ.get("ACCEL_SOAK_RESULTS"):
        record(Path(folder), processes, seconds, sum(clients.counts.values()), growth)
