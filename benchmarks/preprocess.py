"""Is preprocessing cheaper inside the graph? The digits net fed with bytes through numpy on the host, and directly.

    python benchmarks/preprocess.py [--batch 32] [--rounds 200]

Prints the median and the 99th percentile of both in ms, in turns, on one thread. Not run on a quiet machine yet.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import accel
from accel.converters.preprocess import PreprocessConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        plain = accel.export("accel.examples.digits:model", out=folder / "plain.onnx")
        config = PreprocessConfig(mean=(0.25,), std=(0.5,), layout="NHWC", dtype="uint8")
        fused = accel.export(plain.path, preprocess=config, out=folder / "fused.onnx")
        images = np.random.default_rng(0).integers(0, 256, (asked.batch, 8, 8, 1)).astype(np.uint8)
        with accel.load(plain, options={"threads": 1}) as host, accel.load(fused, options={"threads": 1}) as inside:

            def on_the_host() -> None:
                x = (images.astype(np.float32) / 255 - np.float32(0.25)) / np.float32(0.5)
                host.run({"image": np.ascontiguousarray(x.transpose(0, 3, 1, 2))})

            times: dict[str, list[float]] = {"numpy on the host": [], "in the graph": []}
            for _ in range(asked.rounds):
                for name, run in (
                    ("numpy on the host", on_the_host),
                    ("in the graph", lambda: inside.run({"image": images})),
                ):
                    start = time.perf_counter()
                    run()
                    times[name].append((time.perf_counter() - start) * 1e3)
        for name, values in times.items():
            print(f"{name:18} median {np.median(values):.4f} ms, p99 {np.percentile(values, 99):.4f} ms")


if __name__ == "__main__":
    main()
