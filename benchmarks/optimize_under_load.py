"""Checks that `accel optimize` makes the same choice beside other work as on a quiet machine.

Usage:

    python benchmarks/optimize_under_load.py                # writes benchmarks/results/optimize_under_load.json and .md
    python benchmarks/optimize_under_load.py --minutes 10   # begins no row after so many minutes

First, the command optimizes each model on a quiet machine, with an empty cache. Then the command runs 20 times beside
1, 2 or 4 busy processes (see bench_itself.py). Last, all chosen files of a model are timed side by side on the quiet
machine, in paired blocks. A run is right if its file is at most 10% slower than the file that was chosen on the quiet
machine. A series that was interrupted goes on where it ended. The chosen files stay in ``--work`` until then.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_itself import busy
from result_rows import measure_rows, row_arguments

import accel
from accel.examples import digits
from accel.sources.source import Source
from accel.timing import page as bench_page
from accel.timing.paired import Candidate, measure

LOADS = (1, 2, 4)
RUNS = 20
WITHIN = 0.1  # the largest share by which a right choice may be slower
LEAST_RIGHT = 19 / 20
LIMIT_SECONDS = 300
LENGTH = 64
SAMPLES = 64


def small_cnn(folder: Path) -> list[str]:
    """Writes a trained convolutional net for digits. Returns the arguments of accel optimize."""
    weights, data = folder / "weights.safetensors", folder / "data.npz"
    digits.train(weights)
    np.savez(data, image=digits.data()["train"]["image"][:SAMPLES])
    np.savez(folder / "test.npz", **digits.data()["test"])  # type: ignore[arg-type]
    model = accel.export("accel.examples.digits:model", weights=weights, out=folder / "model.onnx")
    judged = ["--eval-data", str(folder / "test.npz"), "--metric", "accel.examples.digits:top1"]
    return [str(model.path), "--data", str(data), *judged]


def text_encoder(folder: Path) -> list[str]:
    """Writes a BERT of 4 layers of width 256 with random weights. Returns the arguments of accel optimize."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    net = BertModel(BertConfig(vocab_size=8192, **sizes), add_pooling_layer=False).eval()
    inputs = ["input_ids:int64[batch,length]{0..8191}", "attention_mask:int64[batch,length]"]
    dims = {"batch": (1, 1, 8), "length": (8, LENGTH, 128)}
    model = accel.export(net, inputs=inputs, dims=dims, out=folder / "model.onnx")
    ids = np.random.default_rng(0).integers(0, 8192, (SAMPLES, LENGTH))
    np.savez(folder / "data.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    return [str(model.path), "--data", str(folder / "data.npz")]


MODELS: Mapping[str, Callable[[Path], list[str]]] = {"small-cnn": small_cnn, "text": text_encoder}


def names() -> dict[str, tuple[str, int]]:
    """Returns the model and the number of busy processes of each row, in the order in which the rows run. The last
    rows, which compare the files, have the number -1."""
    rows = {f"{model}-quiet": (model, 0) for model in MODELS}
    for number in range(RUNS):
        model, load = list(MODELS)[number % len(MODELS)], LOADS[number // len(MODELS) % len(LOADS)]
        rows[f"{model}-load-{load}-{number + 1:02}"] = (model, load)
    return rows | {f"{model}-compared": (model, -1) for model in MODELS}


def prepare(work: Path) -> dict[str, list[str]]:
    """Writes the models that aren't in ``work`` yet. Returns the arguments of accel optimize for each model."""
    for model, write in MODELS.items():
        folder = work / model
        if not (folder / "arguments.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "arguments.json").write_text(json.dumps(write(folder)))
    return {model: json.loads((work / model / "arguments.json").read_text()) for model in MODELS}


def optimized(name: str, arguments: list[str], load: int, work: Path) -> dict[str, Any]:
    """Runs accel optimize with an empty cache beside ``load`` busy processes. Returns what it chose, and when."""
    own = work / name
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    env = {**os.environ, "ACCEL_CACHE_DIR": str(own / "cache")}
    words = [sys.executable, "-m", "accel", "optimize", *arguments, "-o", str(own / "out")]
    begun = time.monotonic()
    with busy(load):
        ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS, cwd=own)
    took = time.monotonic() - begun
    shutil.rmtree(own / "cache", ignore_errors=True)
    if ran.returncode:
        raise RuntimeError((ran.stderr or ran.stdout).strip()[-300:])
    found = json.loads((own / "out" / "optimize.json").read_text(encoding="utf-8"))
    chosen = next(row for row in found["candidates"] if row["name"] == found["chosen"]["name"])
    return {
        "load": load,
        "chosen": chosen["name"],
        "file": found["chosen"]["file"],
        "speedup": (chosen["measured"] or {}).get("speedup"),
        "noise_floor": found["environment"].get("noise_floor"),
        "optimize_seconds": round(took, 1),
    }


def side_by_side(model: str, rows: Mapping[str, Mapping[str, Any]], work: Path) -> dict[str, Any]:
    """Times one file of each choice of ``model`` beside the file that was chosen on the quiet machine. Runs with the
    same choice, which has the same name, share the measurement."""
    quiet = rows[f"{model}-quiet"]
    runs = {name: rows[name] for name, (of, load) in names().items() if of == model and load >= 0 and name in rows}
    if missing := [name for name, (of, load) in names().items() if of == model and load >= 0 and name not in rows]:
        raise RuntimeError(f"not run yet: {', '.join(missing)}")
    first = {row["chosen"]: name for name, row in reversed(runs.items())}
    candidates = [
        Candidate(name=chosen, artifact=Source(work / name / "out" / runs[name]["file"]).open())
        for chosen, name in first.items()
    ]
    feeds = dict(np.load(work / model / "data.npz"))
    report = measure(
        candidates,
        {name: value[:1] for name, value in feeds.items()},
        baseline=quiet["chosen"],
        budget_seconds=30.0,
    )
    made = report.to_json()
    found = {
        row["name"]: {key: row[key] for key in ("median_ms", "speedup", "ci95", "error")} for row in made["results"]
    }
    return {
        "choices": found,
        "noise_floor": made["noise_floor"],
        "quiet": quiet["chosen"],
        "machine": bench_page.machine_lines(made),
    }


def judged(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float | None, bool | None]]:
    """Returns for each run beside other work how fast its choice is, beside the quiet choice (1.0 is as fast), and
    whether this is right. Both are None until the files are compared. An error in the comparison counts as wrong."""
    found: dict[str, tuple[float | None, bool | None]] = {}
    for name, (model, load) in names().items():
        if load < 1 or name not in rows:
            continue
        compared = rows.get(f"{model}-compared")
        if compared is None:
            found[name] = (None, None)
            continue
        speedup = compared["choices"][rows[name]["chosen"]]["speedup"]
        found[name] = (speedup, speedup is not None and speedup >= 1 / (1 + WITHIN))
    return found


def page(body: Mapping[str, Any]) -> str:
    """Returns the results page."""
    rows = body["rows"]
    verdicts = judged(rows)
    right = sum(held is True for _, held in verdicts.values())
    decided = sum(held is not None for _, held in verdicts.values())
    holds = decided == RUNS and right >= LEAST_RIGHT * RUNS
    lines = ["# accel optimize beside other work", ""]
    machine = next((row["machine"] for row in rows.values() if "machine" in row), [])
    lines += [f"{line}  " for line in machine]
    lines += [
        "Made by `python benchmarks/optimize_under_load.py`. Each run has an empty cache. The goal is the choice of",
        f"the quiet machine, or a file at most {WITHIN:.0%} slower, in 19 of 20 runs beside 1, 2 or 4 busy processes.",
        "",
        f"**{'Goal met' if holds else 'Goal not met'}**: right in {right} of {decided} compared runs"
        + (f", {RUNS - decided} not compared yet." if decided < RUNS else "."),
        "",
        "`beside the quiet choice` is the speed of the chosen file on the quiet machine, over that of the file that",
        "was chosen there, in paired blocks.",
        "",
        "| run | busy processes | seconds | chosen | measured then | beside the quiet choice | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (_, load) in names().items():
        if load < 0 or name not in rows:
            continue
        row = rows[name]
        speedup, held = verdicts.get(name, (None, None))
        then = f"{row['speedup']:.2f}x the source" if row["speedup"] else ""
        beside = f"{speedup:.2f}x" if speedup else ""
        says = {True: "right", False: "**wrong**", None: ""}[held]
        lines.append(
            f"| {name} | {load} | {row['optimize_seconds']:.0f} | {row['chosen']} | {then} | {beside} | {says} |"
        )
    for model in MODELS:
        compared = rows.get(f"{model}-compared")
        if compared is None:
            continue
        lines += ["", f"## The choices for {model}, side by side", ""]
        lines += ["| choice | ms | over the quiet choice | 95% interval |", "|---|---|---|---|"]
        for chosen, found in compared["choices"].items():
            if found["speedup"] is None:
                lines.append(f"| {chosen} | {found['error']} | | |")
                continue
            low, high = found["ci95"]
            quiet = " (quiet)" if chosen == compared["quiet"] else ""
            lines.append(
                f"| {chosen}{quiet} | {found['median_ms']:.3f} | {found['speedup']:.2f}x | {low:.2f} to {high:.2f} |"
            )
        lines += ["", f"Measured noise floor {compared['noise_floor']:.1%}."]
    return "\n".join([*lines, ""])


def main() -> None:
    """Runs the requested rows, and writes the results after each row."""
    parser = row_arguments(__doc__, "text-load-2-05")
    work = Path(tempfile.gettempdir()) / "accel-optimize-under-load"
    parser.add_argument("--work", type=Path, default=work, help="folder of the models and of the chosen files")
    parser.add_argument("--minutes", type=float, help="begin no row after so many minutes; call again to continue")
    asked = parser.parse_args()
    arguments = prepare(asked.work)
    place = asked.results / "optimize_under_load.json"

    def measured(name: str) -> dict[str, Any]:
        model, load = names()[name]
        if load >= 0:
            return optimized(name, arguments[model], load, asked.work)
        return side_by_side(model, json.loads(place.read_text(encoding="utf-8"))["rows"], asked.work)

    seconds = None if asked.minutes is None else 60 * asked.minutes
    measure_rows(parser, asked, list(names()), "optimize_under_load", measured, page, seconds)


if __name__ == "__main__":
    main()
