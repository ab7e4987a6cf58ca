"""The whole job on two real models: ``python -m accel.examples.demo FOLDER`` (what ``make demo`` runs).

It prepares the data, then runs the same commands that a user would type, and prints them.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from accel.examples import digits, minilm


def accel(*words: str, folder: Path) -> None:
    """Print the command and run it in ``folder``; the demo ends where it fails."""
    print(f"\n$ accel {shlex.join(words)}", flush=True)
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    code = subprocess.run(
        [sys.executable, "-m", "accel", *words, "--quiet"], cwd=folder, env=env, check=False
    ).returncode
    if code:
        sys.exit(code)
    print(f"({time.monotonic() - started:.0f} s)", flush=True)


def prepare(folder: Path) -> None:
    """Write the data files."""
    parts = digits.data()
    np.savez(folder / "digits_calib.npz", image=parts["train"]["image"][:256])
    np.savez(folder / "digits_test.npz", **parts["test"])  # type: ignore[arg-type]
    np.savez(folder / "calib.npz", **minilm.calibration_data())  # type: ignore[arg-type]
    judged = folder / "judged"
    judged.mkdir(exist_ok=True)
    for name, arrays in minilm.evaluation_data().items():
        np.savez(judged / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def main(folder: Path) -> None:
    """Train one model, take another's weights; export, optimize here, build engines, bench, check the chain."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)

    def run(*words: str) -> None:
        accel(*words, folder=folder)

    image = ("--metric", "accel.examples.digits:top1", "--eval-data", "digits_test.npz", "--data", "digits_calib.npz")
    run("train", "examples/digits.toml", "--nproc", "2", "--zero", "3", "--steps", "200", "--out", "digits-run/")
    run("export", "digits-run/", "-o", "digits.onnx")
    # Both are measured with the usual session alone, and so small a net in fewer rounds: enough to say what is fastest.
    run("optimize", "digits.onnx", *image, "--fixed-session", "--rounds", "5", "-o", "digits/")
    run(
        "optimize",
        "digits.onnx",
        *image,
        "--target",
        "tensorrt-rtx",
        "--compute-capability",
        "8.6",
        "-o",
        "digits-rtx/",
    )
    # A small net: few short blocks say how much faster.
    run("bench", "digits/", "digits.onnx", "--against", "digits-run/", "--rounds", "5", "--budget-seconds", "5")

    text = ("--metric", "accel.examples.minilm:similarity", "--eval-data", "judged", "--data", "calib.npz")
    run("export", "accel.examples.minilm:model", "-o", "minilm.onnx")
    run("optimize", "minilm.onnx", *text, "--fixed-session", "-o", "minilm/")
    # Engines of a transformer take long to judge: that of int8 goes through every stage, its other layers being fp16.
    engine = ("--target", "tensorrt-rtx", "--compute-capability", "8.6", "--precision", "int8")
    run("optimize", "minilm.onnx", *text, *engine, "-o", "minilm-rtx/")
    shape = ("--sizes", "batch=1,sequence=128", "--budget-seconds", "15")
    run("bench", "minilm/", "minilm.onnx", "--against", "accel.examples.minilm:model", *shape)
    run("inspect", "minilm-rtx/", "--check")
    print(f"\nall of it took {time.monotonic() - started:.0f} s; the files are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("demo"))
