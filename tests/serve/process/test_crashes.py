"""Proves that a crashed or hung session makes only requests to its own process fail."""

from __future__ import annotations

import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.serving import FAULTY, WEIGHTS, Load, Served, ask, client, linear, pids

RAISES, HANGS, CRASHES, FINE = 1.0, 2.0, 3.0, 4.0


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Makes the models ``linear`` and ``bad``. The two sessions of ``bad`` crash or hang if their input requests a
    fault."""
    for name in ("bad", "linear"):
        linear(tmp_path / "models" / name / "1")
    config = "max_batch_size: 1 instance_group [{ count: 2 }]"  # each request is a run
    (tmp_path / "models" / "bad" / "config.pbtxt").write_text(config)
    return tmp_path / "models"


def status_of(call: Any) -> str:
    """Returns the error status of a call that must fail."""
    with pytest.raises(InferenceServerException) as caught:
        call()
    return str(caught.value.status()).removeprefix("StatusCode.")


def crash(port: int) -> str:
    with client(port) as made:
        return status_of(lambda: ask(made, "bad", CRASHES, client_timeout=60))


def ask_again(port: int, model: str = "linear") -> None:
    """Repeats a request until a server listens, for at most a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with client(port) as made:
                np.testing.assert_allclose(ask(made, model, FINE), [FINE * WEIGHTS.sum(0)], rtol=1e-5)
            return
        except InferenceServerException as error:
            if error.status() != "StatusCode.UNAVAILABLE" or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def counts(port: int) -> dict[str, tuple[int, int]]:
    """Returns the numbers of successful and failed requests by model."""
    with client(port) as made:
        rows = made.get_inference_statistics().model_stats
        return {row.name: (row.inference_stats.success.count, row.inference_stats.fail.count) for row in rows}


def test_a_segfault_in_one_process_of_two(models: Path, serve: Any) -> None:
    """Fails if the crash of a process makes requests of the other process fail. Also checks that callers get the code
    UNAVAILABLE, and that a new process starts. Also checks that the counters include all requests after the restart."""
    served = serve(str(models), "--processes", "2", path=FAULTY)
    port = served.wait_for("all processes serve")["ports"]["grpc"]
    load = Load(port)
    load.more(50)
    assert crash(port) == "UNAVAILABLE"
    assert served.wait_for("a process died and is started again")["died"] == "signal SIGSEGV"
    served.wait_for("serving", 3)
    load.more(50)
    load.end()
    assert {status for status, _ in load.errors} <= {"StatusCode.UNAVAILABLE"}
    assert len(load.lost) <= 4 * 2, load.lost  # each of four clients may lose a running and a waiting request
    assert len([line for line in served.log if line["message"] == "a process died and is started again"]) == 1
    assert any("Segmentation fault" in line["message"] for line in served.log)
    before = counts(port)
    for _ in range(6):
        with client(port) as made:
            ask(made)
            ask(made, "bad", FINE)
            assert status_of(lambda made=made: ask(made, "bad", RAISES)) == "INTERNAL"
    after = counts(port)
    found = {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after}
    assert found == {"bad": (6, 6), "linear": (6, 0)}
    assert served.end() == 0


def test_one_process_that_is_started_again(models: Path, serve: Any) -> None:
    """Checks that ``--restart`` restarts a single process on its port, and doesn't give up on a process that serves
    requests between its crashes."""
    served = serve(str(models), "--restart", path=FAULTY)
    port = served.wait_for("all processes serve")["ports"]["grpc"]
    for crashes in range(1, 7):
        assert crash(port) == "UNAVAILABLE"
        served.wait_for("serving", crashes + 1)
        ask_again(port)
    assert len(set(pids(served))) == 7
    assert served.end() == 0


def test_a_segfault_without_anyone_to_start_it_again(models: Path, serve: Any) -> None:
    """Checks that callers don't hang when the only process crashes, and that the log contains the code location of the
    crash."""
    served = serve(str(models), path=FAULTY)
    port = served.wait_for("serving")["ports"]["grpc"]
    with ThreadPoolExecutor(1) as pool, client(port) as made:
        other = pool.submit(status_of, lambda: ask(made, "bad", HANGS, client_timeout=60))
        served.wait_for("hangs\n")
        assert crash(port) == "UNAVAILABLE"
        assert other.result(60) == "UNAVAILABLE"
    assert served.process.wait(60) == -signal.SIGSEGV
    served.wait_for("end of log")
    text = "".join(str(line["message"]) for line in served.log)
    assert "Segmentation fault" in text
    assert "sitecustomize.py" in text  # this file contains the line that crashed


def test_a_hung_session_and_sigterm(models: Path, serve: Any) -> None:
    """Fails if a hung session blocks other models, or delays the end of the server beyond the drain time."""
    served = serve(str(models), "--drain", "1", path=FAULTY)
    port = served.wait_for("serving")["ports"]["grpc"]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(4))
        hung = []
        for _ in range(4):
            made = stack.enter_context(client(port))
            hung.append(pool.submit(status_of, lambda made=made: ask(made, "bad", HANGS, client_timeout=100)))
        served.wait_for("hangs\n", 2)
        for _ in range(20):
            ask_again(port)
        assert not any(one.done() for one in hung)
        assert end_of(served) == 0
        assert {one.result(60) for one in hung} <= {"UNAVAILABLE", "CANCELLED"}
    assert "stopped before every request was answered" in [line["message"] for line in served.log]


def end_of(served: Served) -> int:
    served.process.send_signal(signal.SIGTERM)
    try:
        return served.process.wait(60)
    except subprocess.TimeoutExpired:
        pytest.fail("the server did not end")
