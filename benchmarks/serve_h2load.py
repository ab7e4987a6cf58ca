"""Sends the same request again and again with h2load (Debian package nghttp2-client), and compares what h2load counted
with the server's own counts, because h2load can't see an error in a gRPC call's trailers."""

from __future__ import annotations

import contextlib
import re
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from serve_starters import Scenario

DEALS = 4
METHOD = "/inference.GRPCInferenceService/ModelInfer"


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


def load(port: int, body: Path, concurrency: int, seconds: float, *, grpc: bool = True) -> dict[str, float]:
    """Sends requests for ``seconds`` on ``concurrency`` connections, each after the answer to the last one.

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
        found = re.search(r"finished in .*?, ([\d.]+) req/s", said)
        codes = re.search(r"(\d+) failed, (\d+) errored, (\d+) timeout", said)
        if not found or not codes:
            raise RuntimeError(said)
        if not log.read_text():
            raise RuntimeError(f"no answer in {seconds / DEALS} s: {said}")
        rates.append(float(found[1]))
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


def arrivals(port: int, body: Path, concurrency: int, seconds: float, rate: float) -> dict[str, float]:
    """Sends ``rate`` requests per second at random times, as many independent callers would, whether the earlier ones
    have an answer or not. h2load can't do this: it sends what is due in bursts, so it mostly measures its own bursts.
    ``load`` says why there are ``DEALS`` parts. Needs a C compiler. Raises ``CalledProcessError`` if a request has no
    answer."""
    program = body.with_name("serve_arrivals")
    if not program.exists():
        source = Path(__file__).with_name("serve_arrivals.c")
        subprocess.run(["cc", "-std=gnu17", "-O2", "-o", str(program), str(source), "-lm"], check=True)
    times: list[float] = []
    for _ in range(DEALS):
        words = [str(program), str(port), str(body), f"{rate:.1f}", f"{seconds / DEALS:.3f}", str(concurrency)]
        times += map(float, subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.split())
    times.sort()
    return {
        "rate": len(times) / seconds,
        "p50": times[len(times) // 2] / 1000,
        "p99": times[int(len(times) * 0.99)] / 1000,
    }


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
