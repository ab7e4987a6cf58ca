"""Compares the speed and accuracy of `accel optimize`'s choice for MiniLM with native PyTorch on this CPU.

Usage:

    python benchmarks/minilm_cpu.py            # writes benchmarks/results/minilm_cpu.json and .md.

Uses real weights and real texts of 128 tokens at batch 1. The accuracy is measured on WordSim353 and the Lee corpus.
Needs a quiet machine.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

import accel
from accel.api.optimize import Optimization
from accel.examples import minilm
from accel.timing.report import BenchReport

RESULTS = Path(__file__).parent / "results"
SOURCE = "accel.examples.minilm:model"


def main() -> None:
    """Exports, optimizes and benchmarks the model, and writes the results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "calib.npz", **minilm.calibration_data())  # type: ignore[arg-type]
        judged = folder / "judged"
        judged.mkdir()
        for part, arrays in minilm.evaluation_data().items():
            np.savez(judged / f"{part}.npz", **arrays)  # type: ignore[arg-type]
        exported = accel.export(SOURCE, out=folder / "minilm.onnx")
        result = accel.optimize(
            exported.path,
            out=folder / "out",
            data=folder / "calib.npz",
            eval_data=judged,
            metric="accel.examples.minilm:similarity",
            use_cache=False,
        )
        # Three runs in separate processes show how much the result varies between runs.
        runs = [
            accel.bench(
                [folder / "out", exported.path],
                against=SOURCE,
                also=["torch-compile"],
                data=folder / "calib.npz",
                seed=seed,
            )
            for seed in range(3)
        ]
    RESULTS.mkdir(exist_ok=True)
    body = {"optimize": result.to_json(), "bench": [run.to_json() for run in runs]}
    (RESULTS / "minilm_cpu.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "minilm_cpu.md").write_text(markdown(result, runs), encoding="utf-8")
    print(markdown(result, runs))


def markdown(result: Optimization, runs: list[BenchReport]) -> str:
    """Returns the tables of the results page."""
    machine = runs[0].environment
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "# all-MiniLM-L6-v2 on a CPU, batch 1, 128 tokens",
        "",
        f"{machine['cpu']}, {machine['threads']} threads, {machine['date'][:10]}; {versions}.",
        "Made by `python benchmarks/minilm_cpu.py`. Times are medians over paired blocks in separate processes.",
        "",
        "## What accel optimize tried",
        "",
        "| candidate | median ms | p99 ms | speedup over the ONNX source | WordSim/Lee | drop | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result.candidates:
        m, j = row.measured or {}, row.judgement
        times = f"{m['median_ms']:.2f} | {m['p99_ms']:.2f} | {m['speedup']:.2f}x" if m.get("median_ms") else "- | - | -"
        metric = f"{j.metric:.4f} | {100 * j.drop:.2f}%" if j and j.metric is not None else "- | -"
        reason = f"{row.status}: {row.reason}" if row.reason else row.status
        lines.append(f"| {row.name} | {times} | {metric} | {reason} |")
    lines += [
        "",
        "## Beside native PyTorch, three runs",
        "",
        "| candidate | run | median ms | p99 ms | speedup over eager | 95% interval | largest difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, run in enumerate(runs, start=1):
        for r in run.to_json()["results"]:
            if r.get("error"):
                lines.append(f"| {r['name']} | {number} | - | - | - | - | {r['error']} |")
                continue
            low, high = r["ci95"]
            lines.append(
                f"| {r['name']} | {number} | {r['median_ms']:.2f} | {r['p99_ms']:.2f} | {r['speedup']:.2f}x "
                f"| {low:.2f} to {high:.2f} | {r['max_abs_diff']:.2g} |"
            )
    floors = ", ".join(f"{100 * run.noise_floor:.1f}%" for run in runs)
    return "\n".join([*lines, "", f"Noise floor of each run (the baseline against itself): {floors}.", ""])


if __name__ == "__main__":
    main()
