"""Compares the CPU time that each gRPC transport of `accel serve` needs for a request.

Usage:

    python benchmarks/serve_transport.py [--seconds 1.5] [--rounds 5]    # writes results/serve_transport.md

Starts one server for each transport, pinned to one core, and h2load (Debian package nghttp2-client) on another core.
In each round, every transport answers the same requests for some seconds, in random order. The CPU time is the user and
system time of the server's process, divided by the number of answers, so it hardly depends on what else the machine
does. The requests per second do. All requests go to 127.0.0.1."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import tritonclient.grpc as triton
from serve_executor import mlp
from serve_h2load import METHOD, grpc_body
from serve_starters import free_port, running

from accel.timing.environment import environment

RESULT = Path(__file__).parent / "results" / "serve_transport.md"
MEAN = """<ir_version: 10, opset_import: ["" : 20]>
mean (float[batch, {sizes}] x) => (float[batch, {channels}] y) <int64[2] axes = {{2, 3}}> {{
  y = ReduceMean <keepdims = 0> (x, axes)
}}"""
TRANSPORTS = ("grpc", "cygrpc", "native")
# Each row has a model, the shape of a request, and the numbers of callers.
SCENARIOS = (("small", (1, 4, 16, 16), (1, 8, 32)), ("mlp", (1, 1024), (1, 8, 32)), ("image", (1, 3, 224, 224), (8,)))


@dataclass
class Found:
    """The CPU time in microseconds, the answers per second, the mean latency in milliseconds and the mean batch of each
    round."""

    cpu_us: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    mean_ms: list[float] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)


def write_models(folder: Path) -> None:
    for name, shape, _ in SCENARIOS:
        model = folder / name / "1" / "model.onnx"
        model.parent.mkdir(parents=True)
        if name == "mlp":
            mlp(model)
        else:
            dims = [str(dim) for dim in shape[1:]]
            onnx.save(onnx.parser.parse_model(MEAN.format(sizes=",".join(dims), channels=dims[0])), model)
        (folder / name / "config.pbtxt").write_text(f'name: "{name}"\nmax_batch_size: 32\ndynamic_batching {{}}\n')


@contextlib.contextmanager
def server(folder: Path, transport: str) -> Iterator[tuple[int, int]]:
    """Starts the server on the last core, and yields its port and its process id."""
    port, http = free_port(), free_port()
    core = str(max(os.sched_getaffinity(0)))
    words = ["taskset", "-c", core, sys.executable, "-m", "accel", "serve", str(folder), "--transport", transport]
    with running([*words, "--grpc-port", str(port), "--http-port", str(http), "--threads", "1"], port):
        found = subprocess.run(["pgrep", "-f", f"grpc-port {port}"], capture_output=True, text=True, check=True).stdout
        yield port, int(found.split()[0])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def batches(port: int, model: str) -> tuple[int, int]:
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        found = client.get_inference_statistics(model).model_stats[0]
    return found.inference_count, found.execution_count


def block(port: int, pid: int, model: str, body: Path, callers: int, seconds: float, found: Found) -> None:
    """Sends requests for ``seconds`` and adds the figures to ``found``. Raises RuntimeError if a request fails."""
    core = str(min(os.sched_getaffinity(0)))
    words = [
        "taskset",
        "-c",
        core,
        "h2load",
        "-c",
        str(callers),
        "-m",
        "1",
        "-t",
        "1",
        "-D",
        f"{round(1000 * seconds)}ms",
    ]
    words += ["-d", str(body), "-H", "content-type: application/grpc", "-H", "te: trailers"]
    before, started = batches(port, model), cpu_seconds(pid)
    text = subprocess.run([*words, f"http://127.0.0.1:{port}{METHOD}"], capture_output=True, text=True).stdout
    spent, after = cpu_seconds(pid) - started, batches(port, model)
    requests, runs = after[0] - before[0], after[1] - before[1]
    times = re.search(r"time for request: +\S+ +\S+ +([\d.]+)(us|ms|s)", text)
    if not times or not requests:
        raise RuntimeError(f"no answers: {text[-2000:]}")
    found.cpu_us.append(spent / requests * 1e6)
    found.rates.append(requests / seconds)
    found.mean_ms.append(float(times[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[times[2]])
    found.batches.append(requests / runs)


def table(rows: dict[tuple[str, int, str], Found], seconds: float, rounds: int) -> str:
    machine = environment(threads=1)
    lines = [
        "# The gRPC transports of accel serve",
        "",
        f"Made by `python benchmarks/serve_transport.py` ({rounds} interleaved rounds of {seconds} s, medians). One",
        f"process on one core of {machine['cores']} ({machine['cpu']}), h2load on another; load average",
        f"{machine['load_average']}, of which these two take up to 2. `small` takes 4 KiB, `image` 588 KiB.",
        "",
        "| model | callers | transport | CPU us a request | range | requests/s | mean ms | mean batch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (model, callers, transport), found in rows.items():
        low, high = min(found.cpu_us), max(found.cpu_us)
        middle = [statistics.median(one) for one in (found.cpu_us, found.rates, found.mean_ms, found.batches)]
        lines.append(
            f"| {model} | {callers} | {transport} | {middle[0]:.0f} | {low:.0f} to {high:.0f} | {middle[1]:,.0f} | "
            f"{middle[2]:.2f} | {middle[3]:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=[name for name, _, _ in SCENARIOS], help="one model, without a result file")
    options = parser.parse_args()
    rows: dict[tuple[str, int, str], Found] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_models(folder / "models")
        places = {one: stack.enter_context(server(folder / "models", one)) for one in TRANSPORTS}
        for model, shape, callers in SCENARIOS:
            if options.only not in (None, model):
                continue
            body = folder / f"{model}.grpc"
            body.write_bytes(grpc_body(model, np.random.default_rng(0).standard_normal(shape).astype(np.float32)))
            for count in callers:
                for _ in range(options.rounds):
                    for transport in random.sample(TRANSPORTS, len(TRANSPORTS)):
                        found = rows.setdefault((model, count, transport), Found())
                        block(*places[transport], model, body, count, options.seconds, found)
    text = table(rows, options.seconds, options.rounds)
    if options.only is None:
        RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
