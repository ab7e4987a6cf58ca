"""Ten minutes of everything at once: memory stays flat and the counters add up."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from serving import FAULTY, FLOAT, WEIGHTS, ask, client, identity, linear
from tritonclient.utils import InferenceServerException

SECONDS = float(os.environ.get("ACCEL_SOAK_SECONDS", "600"))


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


def files_and_threads(pid: int) -> tuple[int, int]:
    files, threads = (len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task"))
    return files, threads


class Clients:
    """Each of ``kinds`` again and again on a thread of its own, until ``end``. ``counts``: by model and outcome."""

    def __init__(self, port: int, kinds: list[Any]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []
        self._port, self._stop, self._lock = port, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in kinds]
        for thread in self._threads:
            thread.start()

    def _run(self, kind: Any) -> None:
        number = 0
        while not self._stop.is_set():
            with client(self._port) as made:  # now and then a new connection
                for _ in range(200):
                    number += 1
                    if self._stop.is_set():
                        return
                    self._count(*kind(made, number))

    def _count(self, model: str, outcome: str) -> None:
        with self._lock:
            self.counts[model, outcome] += 1
            if outcome == "wrong":
                self.wrong.append(model)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def right(made: Any, number: int) -> tuple[str, str]:
    mark = float(number % 97)
    return "linear", "ok" if np.allclose(
        ask(made, "linear", mark, client_timeout=60), mark * WEIGHTS.sum(0)
    ) else "wrong"


def failing(made: Any, number: int) -> tuple[str, str]:
    if number % 2:
        return "bad", "ok" if ask(made, "bad", 4.0, client_timeout=60).shape == (1, 3) else "wrong"
    try:
        ask(made, "bad", 1.0, client_timeout=60)
    except InferenceServerException as error:
        return "bad", "failed" if error.status() == "StatusCode.INTERNAL" else "wrong"
    return "bad", "wrong"


def large(made: Any, number: int) -> tuple[str, str]:
    size = 1000 * (1 + number % 50)
    x = np.full(size, number, np.float32)
    given = triton.InferInput("x", [size], "FP32")
    given.set_data_from_numpy(x)
    return "same", "ok" if np.array_equal(made.infer("same", [given]).as_numpy("y"), x) else "wrong"


def refused(made: Any, number: int) -> tuple[str, str]:
    try:
        ask(made, "nothing", client_timeout=60)
    except InferenceServerException as error:
        return "nothing", "refused" if error.status() == "StatusCode.NOT_FOUND" else "wrong"
    return "nothing", "wrong"


def reloading(made: Any, number: int) -> tuple[str, str]:
    made.load_model("again")
    time.sleep(0.2)
    made.unload_model("again")
    return "again", "reloaded"


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 300)
def test_soak(tmp_path: Path, serve: Any) -> None:
    """Fails if an answer is wrong or lost, a counter differs from what the clients counted, or memory, threads or open
    files grow: the last quarter of the time against the quarter after the first. ACCEL_SOAK_SECONDS shortens it."""
    models = tmp_path / "models"
    for name in ("linear", "bad", "again"):
        linear(models / name / "1")
    identity(models / "same" / "1", FLOAT)
    (models / "same" / "config.pbtxt").write_text("max_batch_size: 0")
    served = serve(str(models), "--mode", "explicit", "--load-model", "*", path=FAULTY)
    port = served.wait_for("serving")["ports"]["grpc"]
    pid = served.process.pid
    clients = Clients(port, [right, right, failing, large, refused, reloading])
    samples: list[tuple[int, int, int]] = []
    began = time.monotonic()
    while (now := time.monotonic() - began) < SECONDS:
        time.sleep(min(SECONDS / 200, SECONDS - now))
        samples.append((resident(pid), *files_and_threads(pid)))
        assert served.process.poll() is None
    clients.end()
    assert clients.wrong == []
    with client(port) as made:
        rows = {row.name: row.inference_stats for row in made.get_inference_statistics().model_stats}
        for name in ("linear", "bad", "same"):
            counted = (clients.counts[name, "ok"], clients.counts[name, "failed"])
            assert (rows[name].success.count, rows[name].fail.count) == counted, name
            assert counted[0] > SECONDS
        assert clients.counts["again", "reloaded"] > SECONDS / 10
        assert clients.counts["nothing", "refused"] > SECONDS
    quarter = len(samples) // 4
    for what, slack, before, after in zip(
        ("memory", "files", "threads"),
        (32 << 20, 16, 16),
        np.max(samples[quarter : 2 * quarter], axis=0),
        np.max(samples[-quarter:], axis=0),
        strict=True,
    ):
        print(f"{what}: {before} -> {after}")
        assert after <= before + slack, (what, before, after)
    assert served.end() == 0
