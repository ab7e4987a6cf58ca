"""Measures the time and memory that accel and other tools need to turn BERT-base in PyTorch into an optimized file.

Usage:

    python benchmarks/toolchain_time.py            # measures every row that has no result yet
    python benchmarks/toolchain_time.py accel --again      # measures the row of accel again.

All tools get the same transformers folder with random weights. accel and NNCF get the same samples of 128 tokens. The
rows:

- ``accel``: ``accel export`` with an empty cache; ``accel optimize`` of the folder with an empty cache, and the same
  command again. The first file is the first result that ``accel optimize`` publishes.
- ``thorough``: ``accel optimize --thorough`` with an empty cache.
- ``optimum``: the ONNX export and the ONNX Runtime quantizer. ``olive``: an ``olive run`` that exports the model and
  quantizes it to dynamic int8. Both are installed into virtual environments below ``--environments``. If a tool can't
  be installed, its row gives the reason.
- ``nncf``: a script that converts optimum's ONNX file to OpenVINO and quantizes it with NNCF. ``openvino``: OpenVINO's
  own converter on the same ONNX file.
- ``latency``: all files at 1 x 128 tokens, side by side with PyTorch or with optimum's ONNX file.

Times are in seconds and cover the whole commands, imports included. The first command of each row runs once before it
is timed, so that no tool pays for reading its libraries from a cold disk. The memory of a command is the peak of the
resident memory of all its processes together, in which pages that processes share count several times, such as
libraries and mapped weights. A second column counts each page once (the proportional set size of Linux). Needs a quiet
machine.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_rows import measure_rows, row_arguments

from accel.artifact import Artifact
from accel.machine import available_cores
from accel.sources.source import Source
from accel.timing.environment import environment
from accel.timing.paired import Candidate, measure

ROWS = ("accel", "thorough", "optimum", "olive", "nncf", "openvino", "latency")
PACKAGES = {
    "optimum": ["optimum-onnx[onnxruntime]", "torch==2.13.0", "transformers"],
    # Olive 0.13 imports ``requests`` without declaring this dependency. Olive's export fails with transformers 5.
    "olive": ["olive-ai[cpu]==0.13.0", "torch==2.13.0", "transformers<5", "requests"],
}
LIMIT_SECONDS = 3600
COUNT_SECONDS = 1.0  # between two counts of the pages that processes share
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
LENGTH = 128
SAMPLES = 64
# The row of the tool that makes the ONNX file for the rows nncf and openvino.
ONNX = "optimum"
NNCF = """
import nncf, numpy as np, openvino as ov
data = np.load("data.npz")
samples = [{name: data[name][at : at + 1] for name in data.files} for at in range(32)]
model = ov.convert_model("onnx/model.onnx")
made = nncf.quantize(model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples))
ov.save_model(made, "int8/model.xml")
"""
# The configuration of `olive run`. The benchmark can't use `olive optimize`, which only supports language models and
# downloads texts for calibration.
OLIVE = {
    "input_model": {
        "type": "HfModel",
        "model_path": "bert",
        "task": "feature-extraction",
        "io_config": {
            "input_names": list(INPUTS),
            "input_shapes": [[1, LENGTH]] * len(INPUTS),
            "input_types": ["int64"] * len(INPUTS),
            "output_names": ["last_hidden_state", "pooler_output"],
            "dynamic_axes": {name: {"0": "batch", "1": "length"} for name in INPUTS},
        },
    },
    "systems": {
        "here": {
            "type": "LocalSystem",
            "accelerators": [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}],
        }
    },
    "target": "here",
    "passes": {"export": {"type": "OnnxConversion"}, "int8": {"type": "OnnxDynamicQuantization"}},
    "output_dir": "int8",
}


def main() -> None:
    """Measures the rows named on the command line (default: all rows). Without ``--again``, skips rows that already
    have a result."""
    parser = row_arguments(__doc__, "accel")
    work = Path(tempfile.gettempdir()) / "accel-toolchain-time"
    parser.add_argument(
        "--environments", type=Path, default=work, help="folder of the tools and of the files they made"
    )
    asked = parser.parse_args()

    def measured(name: str) -> dict[str, Any]:
        work = asked.environments / "work"
        prepare(work)
        if name == "latency":
            found = latency_row(work)
        else:
            found = (
                accel_row(name, work) if name in ("accel", "thorough") else other_row(name, asked.environments, work)
            )
        return found | {"environment": environment(threads=available_cores())}

    measure_rows(parser, asked, ROWS, "toolchain_time", measured, markdown)


def prepare(work: Path) -> None:
    """Writes the model and the samples to the folder ``work``, unless they are there already."""
    if (work / "data.npz").is_file():
        return
    from transformers import BertConfig, BertModel

    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    BertModel(BertConfig()).save_pretrained(work / "bert")
    ids = np.random.default_rng(0).integers(0, BertConfig().vocab_size, (SAMPLES, LENGTH))
    np.savez(work / "data.npz", input_ids=ids, attention_mask=np.ones_like(ids), token_type_ids=np.zeros_like(ids))


def accel_row(name: str, work: Path) -> dict[str, Any]:
    """Runs accel with an empty cache. For the row ``accel``, runs ``accel optimize`` twice."""
    own = emptied(work / name)
    accel = [sys.executable, "-m", "accel"]
    given = ["--data", str(work / "data.npz"), "-o", "out"]
    optimize = [*accel, "optimize", str(work / "bert"), *given, *(["--thorough"] if name == "thorough" else [])]
    export = [*accel, "export", str(work / "bert"), "--no-cache", "-o", "model.onnx"]
    env = {**os.environ, "ACCEL_CACHE_DIR": str(own / "cache"), "HF_HUB_OFFLINE": "1"}
    first = own / "out" / "optimize.json"
    if name == "thorough":
        return {"title": "accel, thorough", "steps": [timed(optimize, own, env)], "made": "out"}
    timed(export, own, env)
    steps = [timed(export, own, env), timed(optimize, own, env, first)]
    return {"title": "accel", "steps": steps, "second": [timed(optimize, own, env)], "made": "out"}


def emptied(folder: Path) -> Path:
    """Returns ``folder`` after it was emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def other_row(name: str, environments: Path, work: Path) -> dict[str, Any]:
    """Runs another tool on the folder of the model, or on the ONNX file of the row ``ONNX``."""
    own = emptied(work / name)
    (own / "bert").symlink_to(work / "bert")
    (own / "data.npz").symlink_to(work / "data.npz")
    scripts = Path(sys.executable).parent
    if name in PACKAGES:
        place = environments / name
        scripts = place / "bin"
        if not (place / "ready").is_file():
            for words in (
                [sys.executable, "-m", "venv", "--clear", str(place)],
                [str(scripts / "python"), "-m", "pip", "install", "--quiet", *PACKAGES[name]],
            ):
                ran = subprocess.run(words, capture_output=True, text=True)
                if ran.returncode:
                    last = " ".join((ran.stderr or ran.stdout).strip().splitlines()[-1:])[:300]
                    return {"title": name, "error": f"can't be installed: {last}"}
            (place / "ready").touch()
    else:
        made = work / ONNX / "onnx"
        if not made.is_dir():
            return {"title": name, "error": f"needs the ONNX file of the row {ONNX}"}
        (own / "onnx").symlink_to(made)
        (own / "int8").mkdir()
    (own / "olive.json").write_text(json.dumps(OLIVE))
    task = ["--task", "feature-extraction"]
    tool = {tool: str(scripts / tool) for tool in ("optimum-cli", "olive", "ovc", "python")}
    commands = {
        "optimum": [
            [tool["optimum-cli"], "export", "onnx", "--model", "bert", *task, "onnx"],
            [tool["optimum-cli"], "onnxruntime", "quantize", "--avx512_vnni", "--onnx_model", "onnx", "-o", "int8"],
        ],
        "olive": [[tool["olive"], "run", "--config", "olive.json"]],
        "nncf": [[tool["python"], "-c", NNCF]],
        "openvino": [[tool["ovc"], "onnx/model.onnx", "--output_model", "int8/model.xml"]],
    }[name]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(own / "home"), "OLIVE_DISABLE_TELEMETRY": "1"}
    timed(commands[0], own, env)
    steps = []
    for words in commands:
        steps.append(timed(words, own, env))
        if steps[-1].get("error"):
            break
    return {"title": name, "steps": steps, "made": "int8"}


def latency_row(work: Path) -> dict[str, Any]:
    """Times the files that the rows have made, in two groups. accel's and Olive's files have both outputs of the model,
    and run beside PyTorch. The files that were made from optimum's ONNX file lack the pooled output, and run beside
    that ONNX file."""
    source = Source(work / "bert").open()
    exported = Source(work / ONNX / "onnx" / "model.onnx").open()
    data = np.load(work / "data.npz")
    feeds = {name: data[name][:1] for name in INPUTS}
    folders = {"accel, first file": work / "accel" / "first", "accel": work / "accel" / "out"}
    folders |= {"accel, thorough": work / "thorough" / "out", "olive": work / "olive" / "int8"}
    by_hand = {name: work / name / "int8" for name in (ONNX, "nncf", "openvino")}
    groups = [
        [Candidate(name="PyTorch", artifact=source), *(candidate(name, place) for name, place in folders.items())],
        [
            Candidate(name="optimum, not quantized", artifact=exported),
            *(candidate(name, place, exported) for name, place in by_hand.items()),
        ],
    ]
    reports = [measure(group, feeds, budget_seconds=60.0) for group in groups]
    found = {
        row.name: {"ms": row.median_ms, "speedup": row.speedup, "ci95": row.ci95, "error": row.error}
        for report in reports
        for row in report.rows
    }
    return {"title": "latency", "latency": found}


def candidate(name: str, folder: Path, like: Artifact | None = None) -> Candidate:
    """Returns the model in ``folder``. A file of OpenVINO that accel didn't make has the inputs and outputs of
    ``like``."""
    file = next(file for ending in ("*.xml", "*.onnx") for file in sorted(folder.rglob(ending)))
    if file.suffix == ".xml" and like is not None:
        made = Artifact(path=file, kind="openvino", signature=like.signature, companions=(f"{file.stem}.bin",))
        return Candidate(name=name, artifact=made)
    return Candidate(name=name, artifact=Source(file).open())


def timed(words: Sequence[str], folder: Path, env: Mapping[str, str], first: Path | None = None) -> dict[str, Any]:
    """Runs a command. Returns the command's duration in seconds and the largest memory of the command's processes in
    MiB, as the sum of their resident memory and with each shared page counted once. If ``first`` is a path, also
    returns the seconds after which a file of this path existed, and copies the folder of this file to the folder
    ``first``. If the command failed, also returns the end of the command's output."""
    started, peak, once, appeared = time.monotonic(), 0.0, 0.0, None
    counted = -math.inf
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(words, cwd=folder, env=dict(env), stdout=said, stderr=subprocess.STDOUT)
        while child.poll() is None:
            resident = tree_mib(child.pid)
            peak = max(peak, resident)
            # Linux walks all pages of a process to count them once, so this is done only if it may find a new peak.
            if resident > once and time.monotonic() - counted > COUNT_SECONDS:
                counted = time.monotonic()
                once = max(once, tree_mib(child.pid, "smaps_rollup", "Pss:"))
            if appeared is None and first is not None and first.is_file():
                appeared = round(time.monotonic() - started, 1)
                shutil.copytree(first.parent, folder / "first")
            if time.monotonic() - started > LIMIT_SECONDS:
                child.kill()
            time.sleep(0.1)
        seconds = time.monotonic() - started
        said.seek(0)
        text = said.read().strip()
    named = [Path(words[0]).name, *words[1:]] if words[0] != sys.executable else ["python", *words[1:]]
    shown = " ".join("(a script)" if "\n" in w else Path(w).name if w.startswith("/") else w for w in named)
    found = {"command": shown, "seconds": round(seconds, 1), "peak_mib": round(peak), "peak_once_mib": round(once)}
    if first is not None:
        found["first_seconds"] = appeared
    if child.returncode:
        found["error"] = " ".join(text.splitlines()[-1:])[-300:] or f"exit code {child.returncode}"
    return found


def tree_mib(pid: int, file: str = "status", field: str = "VmRSS:") -> float:
    """Returns the current memory of a process and all its descendants, in MiB. ``file`` is the file in ``/proc/PID``
    whose line ``field`` has the memory of a process: by default its resident memory."""
    total, queue = 0.0, [pid]
    while queue:
        here = queue.pop()
        try:
            status = Path(f"/proc/{here}/{file}").read_text(encoding="utf-8")
            children = Path(f"/proc/{here}/task/{here}/children").read_text(encoding="utf-8")
        except OSError:
            continue
        total += next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(field)), 0.0)
        queue += [int(word) for word in children.split()]
    return total


def markdown(body: dict[str, Any]) -> str:
    """Returns the results page."""
    machine = next(iter(body["rows"].values()))["environment"]
    lines = [
        "# From a model to the file that is run: seconds and memory",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['date'][:10]}. BERT-base in a transformers folder.",
        "Made by `python benchmarks/toolchain_time.py`. accel compares every file with its source, and measures the",
        "candidates in that time. The other tools make one file, and compare and measure nothing.",
        "",
        "`peak MiB` adds up the resident memory of all processes. `shared once` counts shared pages only once.",
        "",
        "| tool | command | first file, s | seconds | peak MiB | shared once |",
        "|---|---|---|---|---|---|",
    ]
    for row in body["rows"].values():
        if "error" in row:
            lines.append(f"| {row['title']} | - | | - | {row['error']} | |")
        for label, steps in (("", row.get("steps", ())), (", second run", row.get("second", ()))):
            for step in steps:
                memory = step.get("error") or step["peak_mib"]
                first = step.get("first_seconds") or step["seconds"]
                once = step.get("peak_once_mib", "")  # rows of an older version lack it
                lines.append(
                    f"| {row['title']}{label} | `{step['command']}` | {first} | {step['seconds']} | {memory} | {once} |"
                )
    found = body["rows"].get("latency", {}).get("latency")
    if found:
        lines += ["", "Latency at 1 x 128 tokens. A row with 1.00x is the baseline of the rows below it."]
        lines += ["", "| made by | ms | over its baseline | 95% interval |", "|---|---|---|---|"]
        for name, row in found.items():
            if row["error"]:
                lines.append(f"| {name} | - | {row['error']} | |")
            else:
                low, high = row["ci95"]
                lines.append(f"| {name} | {row['ms']:.1f} | {row['speedup']:.2f}x | {low:.2f} to {high:.2f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
