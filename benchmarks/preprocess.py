"""Compares the time of preprocessing inside the graph with preprocessing in numpy before the graph.

Usage:

    python benchmarks/preprocess.py                    # measures every row that has no result yet
    python benchmarks/preprocess.py digits --again     # measures the row digits again.

With preprocessing inside the graph, the inputs of the graph are bytes. The two variants run alternately, on one thread,
in ONNX Runtime. A row has the median and the 99th percentile of both variants, and the difference between their
outputs. Each row is written to benchmarks/results/preprocess.json and .md as soon as it is measured. Needs a quiet
machine.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from result_rows import measure_rows, row_arguments

import accel
from accel.converters.graph.preprocess import PreprocessConfig
from accel.timing.environment import environment

HERE = Path(__file__)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One network to measure. ``shape`` is the shape of the input bytes, channels last. ``mean`` and ``std`` have one
    number, or one number per channel."""

    title: str
    source: str
    shape: tuple[int, int, int]
    batch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


ROWS = {
    "digits": Row(
        title="small CNN (digits), 8x8x1",
        source="accel.examples.digits:model",
        shape=(8, 8, 1),
        batch=32,
        mean=(0.25,),
        std=(0.5,),
    ),
    "efficientnet-lite0": Row(
        title="EfficientNet-Lite0, 224x224x3",
        source=f"{HERE.with_name('cpu_models.py')}:efficientnet_lite0",
        shape=(224, 224, 3),
        batch=1,
        mean=(0.498, 0.498, 0.498),
        std=(0.502, 0.502, 0.502),
    ),
}


def main() -> None:
    """Measures the requested rows (all rows by default) that have no result yet."""
    parser = row_arguments(__doc__, "digits")
    parser.add_argument("--rounds", type=int, default=200)
    asked = parser.parse_args()
    measure_rows(parser, asked, list(ROWS), "preprocess", lambda name: measured(ROWS[name], asked.rounds), markdown)


def measured(row: Row, rounds: int) -> dict[str, Any]:
    """Times both variants alternately. Returns a row with the times in ms and the largest relative error between the
    outputs of the two variants."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        plain = accel.export(row.source, out=folder / "plain.onnx")
        config = PreprocessConfig(mean=row.mean, std=row.std, layout="NHWC", dtype="uint8")
        fused = accel.export(plain.path, preprocess=config, out=folder / "fused.onnx")
        images = np.random.default_rng(0).integers(0, 256, (row.batch, *row.shape)).astype(np.uint8)
        (name,) = (spec.name for spec in plain.signature.inputs)
        mean, std = np.float32(row.mean), np.float32(row.std)
        with accel.load(plain, options={"threads": 1}) as host, accel.load(fused, options={"threads": 1}) as inside:

            def on_the_host() -> dict[str, np.ndarray]:
                x = (images.astype(np.float32) / 255 - mean) / std
                return host.run({name: np.ascontiguousarray(x.transpose(0, 3, 1, 2))})

            def in_the_graph() -> dict[str, np.ndarray]:
                return inside.run({name: images})

            wanted, found = on_the_host(), in_the_graph()
            off = max(float(np.linalg.norm(found[k] - wanted[k]) / np.linalg.norm(wanted[k])) for k in wanted)
            times: dict[str, list[float]] = {"numpy on the host": [], "in the graph": []}
            for _ in range(rounds):
                for way, run in (("numpy on the host", on_the_host), ("in the graph", in_the_graph)):
                    start = time.perf_counter()
                    run()
                    times[way].append((time.perf_counter() - start) * 1e3)
    return {
        "title": row.title,
        "batch": row.batch,
        "rounds": rounds,
        "environment": environment(1),
        "rel_l2": off,
        "results": {
            way: {"median_ms": float(np.median(ms)), "p99_ms": float(np.percentile(ms, 99))}
            for way, ms in times.items()
        },
    }


def markdown(body: dict[str, Any]) -> str:
    """Returns the results page."""
    lines = [
        "# Preprocessing in the graph, against numpy on the host",
        "",
        "Bytes, channels last, normalized, into the net and through it; ONNX Runtime on one thread, in turns;",
        "`python benchmarks/preprocess.py`. Median and 99th percentile in ms.",
        "",
        "| net | batch | numpy on the host | in the graph | ratio of the medians | relative error |",
        "|---|---|---|---|---|---|",
    ]
    for row in body["rows"].values():
        host, inside = row["results"]["numpy on the host"], row["results"]["in the graph"]
        figures = [f"{way['median_ms']:.3f} (p99 {way['p99_ms']:.3f})" for way in (host, inside)]
        ratio = host["median_ms"] / inside["median_ms"]
        lines.append(f"| {row['title']} | {row['batch']} | {' | '.join(figures)} | {ratio:.3f} | {row['rel_l2']:.1e} |")
    for row in body["rows"].values():
        where = row["environment"]
        versions = ", ".join(f"{name} {where['versions'][name]}" for name in ("onnxruntime", "numpy", "python"))
        lines += ["", f"{row['title']}: {where['cpu']}, {where['cores']} cores, {versions}, {row['rounds']} turns."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
