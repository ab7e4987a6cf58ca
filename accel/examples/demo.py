"""Runs the whole toolchain on three real models. ``make demo`` runs ``python -m accel.examples.demo FOLDER``.

Prepares the data, then prints and runs the commands that a user would type.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from accel.optimizer.report.page import PAGE

from . import digits, minilm, writer

_LAST_WORDS = """
In {seconds:.0f} s, a trained model and all-MiniLM-L6-v2 were exported, optimized for this CPU and built for an RTX GPU,
and a small Llama was trained, exported with its KV cache, quantized and asked for text.
The files are in {folder}; {folder}/minilm/{page} shows the speed and the accuracy of every candidate.
Next, try your own model: accel.optimize(model, example=(x,)) in Python, or the commands in docs/quickstart.md."""


def accel(*words: str, folder: Path) -> None:
    """Prints the command and runs it in ``folder``. Exits if the command fails."""
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
    """Writes the calibration and test data of both models."""
    parts = digits.data()
    np.savez(folder / "digits_calib.npz", image=parts["train"]["image"][:256])
    np.savez(folder / "digits_test.npz", **parts["test"])  # type: ignore[arg-type]
    np.savez(folder / "calib.npz", **minilm.calibration_data())  # type: ignore[arg-type]
    judged = folder / "judged"
    judged.mkdir(exist_ok=True)
    for name, arrays in minilm.evaluation_data().items():
        np.savez(judged / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def main(folder: Path) -> None:
    """Trains two models and loads packaged weights for another. Exports, optimizes and benchmarks all models, builds
    engines of two, and lets the third write text."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)

    def run(*words: str) -> None:
        accel(*words, folder=folder)

    image = ("--metric", "accel.examples.digits:top1", "--eval-data", "digits_test.npz", "--data", "digits_calib.npz")
    run("train", "examples/digits.toml", "--nproc", "2", "--zero", "3", "--steps", "200", "--out", "digits-run/")
    run("export", "digits-run/", "-o", "digits.onnx")
    # One session setting and few rounds are enough to tell which candidate is fastest.
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
    # The net is small, so a few short rounds are enough.
    run("bench", "digits/", "digits.onnx", "--against", "digits-run/", "--rounds", "5", "--budget-seconds", "5")

    text = ("--metric", "accel.examples.minilm:similarity", "--eval-data", "judged", "--data", "calib.npz")
    run("export", "accel.examples.minilm:model", "-o", "minilm.onnx")
    run("optimize", "minilm.onnx", *text, "--fixed-session", "-o", "minilm/")
    # Judging a transformer's engines takes long, so only int8 is tried. In the int8 candidate, all layers that aren't
    # int8 are fp16.
    engine = ("--target", "tensorrt-rtx", "--compute-capability", "8.6", "--precision", "int8")
    run("optimize", "minilm.onnx", *text, *engine, "-o", "minilm-rtx/")
    shape = ("--sizes", "batch=1,sequence=128", "--budget-seconds", "15")
    run("bench", "minilm/", "minilm.onnx", "--against", "accel.examples.minilm:model", *shape)
    run("inspect", "minilm-rtx/", "--check")

    run("train", "examples/writer.toml", "--nproc", "2", "--steps", "300", "--out", "writer-run/")
    run("export", "writer-run/", "--decoder", "-o", "writer/")
    writer.write_texts(folder / "writer")
    held_out = ("--text", "writer/held_out.txt", "--max-kl", "0.01", "--contexts", "64")
    quick = ("--target", "ort-cpu", "--precision", "int4", "--fixed-session", "--rounds", "5")
    run("optimize", "writer/", *held_out, *quick, "-o", "writer-small/")
    run("generate", "writer-small/", "--prompt", "The statement", "--max-new-tokens", "60", "--temperature", "0.7")
    print(_LAST_WORDS.format(seconds=time.monotonic() - started, folder=folder, page=PAGE))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("demo"))
