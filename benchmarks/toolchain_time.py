"""Measures the time and memory that accel, optimum and Olive need to turn BERT-base in PyTorch into an optimized file.

Usage:

    python benchmarks/toolchain_time.py            # measures every row that has no result yet
    python benchmarks/toolchain_time.py accel --again      # measures the row of accel again.

For accel, the script measures `accel export` and `accel optimize`, first with an empty cache and then with a filled
cache. For optimum, the script measures the ONNX export and the ONNX Runtime quantizer. For Olive, the script measures
an `olive run` that exports the model and quantizes it to dynamic int8. Olive and optimum are installed into separate
virtual environments below ``--environments``. If a tool can't be installed, the tool's row gives the reason. Times are
in seconds and cover the whole commands, imports included. The memory of a command is the peak memory of all its
processes together. Needs a quiet machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from result_rows import measure_rows, row_arguments

from accel.machine import available_cores
from accel.timing.environment import environment

ROWS = ("accel", "optimum", "olive")
PACKAGES = {
    "optimum": ["optimum-onnx[onnxruntime]", "torch==2.13.0", "transformers"],
    # Olive 0.13 imports ``requests`` without declaring this dependency. Olive's export fails with transformers 5.
    "olive": ["olive-ai[cpu]==0.13.0", "torch==2.13.0", "transformers<5", "requests"],
}
LIMIT_SECONDS = 3600
# The configuration of `olive run`. The benchmark can't use `olive optimize`, which only supports language models and
# downloads texts for calibration.
OLIVE = {
    "input_model": {
        "type": "HfModel",
        "model_path": "bert",
        "task": "feature-extraction",
        "io_config": {
            "input_names": ["input_ids", "attention_mask"],
            "input_shapes": [[1, 128], [1, 128]],
            "input_types": ["int64", "int64"],
            "output_names": ["last_hidden_state", "pooler_output"],
            "dynamic_axes": {name: {"0": "batch", "1": "length"} for name in ("input_ids", "attention_mask")},
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
    parser.add_argument("--model", default="bert-base", help="for a quick try: small-cnn (accel only)")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "accel-toolchain-time")
    asked = parser.parse_args()

    def measured(name: str) -> dict[str, Any]:
        found = accel_row(asked.model) if name == "accel" else other_row(name, asked.environments)
        return found | {"environment": environment(threads=available_cores())}

    measure_rows(parser, asked, ROWS, "toolchain_time", measured, markdown)


def accel_row(name: str) -> dict[str, Any]:
    """Runs export and optimize twice, first with an empty cache and then with a filled cache, and returns the row."""
    from cpu_models import MODELS

    model = MODELS[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        np.savez(folder / "data.npz", **model.data(64))  # type: ignore[arg-type]
        given = []
        if model.train:  # without saved weights, each command would build a model with new random weights
            model.train(folder / "weights.safetensors")
            given = ["--weights", "weights.safetensors"]
        accel = [sys.executable, "-m", "accel"]
        commands = [
            [*accel, "export", model.source, *given, "-o", "model.onnx"],
            [*accel, "optimize", "model.onnx", "--data", "data.npz", "-o", "out"],
        ]
        env = {**os.environ, "ACCEL_CACHE_DIR": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        first = [timed(words, folder, env) for words in commands]
        second = [timed(words, folder, env) for words in commands] if not any(s.get("error") for s in first) else []
    return {"title": f"accel ({name})", "steps": first, "second": second}


def other_row(name: str, environments: Path) -> dict[str, Any]:
    """Runs another tool in its own virtual environment, on the same model saved as a transformers folder."""
    title = f"{name} (bert-base)"
    place = environments / name
    python = place / "bin" / "python"
    if not (place / "ready").is_file():
        for words in (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            [str(python), "-m", "pip", "install", "--quiet", *PACKAGES[name]],
        ):
            ran = subprocess.run(words, capture_output=True, text=True)
            if ran.returncode:
                last = " ".join((ran.stderr or ran.stdout).strip().splitlines()[-1:])[:300]
                return {"title": title, "error": f"can't be installed: {last}"}
        (place / "ready").touch()
    scripts = place / "bin"
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        save = (
            "from transformers import BertConfig, BertModel; import torch; torch.manual_seed(0);"
            "BertModel(BertConfig()).save_pretrained('bert')"
        )
        subprocess.run([sys.executable, "-c", save], check=True, cwd=folder, capture_output=True)
        (folder / "olive.json").write_text(json.dumps(OLIVE))
        task = ["--task", "feature-extraction"]
        optimum, olive = str(scripts / "optimum-cli"), str(scripts / "olive")
        commands = {
            "optimum": [
                [optimum, "export", "onnx", "--model", "bert", *task, "onnx"],
                [optimum, "onnxruntime", "quantize", "--avx512_vnni", "--onnx_model", "onnx", "-o", "int8"],
            ],
            "olive": [[olive, "run", "--config", "olive.json"]],
        }[name]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OLIVE_DISABLE_TELEMETRY": "1"}
        steps = []
        for words in commands:
            steps.append(timed(words, folder, env))
            if steps[-1].get("error"):
                break
    return {"title": title, "steps": steps}


def timed(words: Sequence[str], folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Runs a command. Returns the command's duration in seconds and the largest memory of the command's processes in
    MiB. If the command failed, also returns the end of the command's output."""
    started, peak = time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(words, cwd=folder, env=dict(env), stdout=said, stderr=subprocess.STDOUT)
        while child.poll() is None:
            peak = max(peak, tree_mib(child.pid))
            if time.monotonic() - started > LIMIT_SECONDS:
                child.kill()
            time.sleep(0.1)
        seconds = time.monotonic() - started
        said.seek(0)
        text = said.read().strip()
    named = [Path(words[0]).name, *words[1:]] if words[0] != sys.executable else ["python", *words[1:]]
    shown = " ".join(Path(w).name if w.startswith("/") else w for w in named)
    found = {"command": shown, "seconds": round(seconds, 1), "peak_mib": round(peak)}
    found["cached"] = text.count(": cached")  # the number of stages that accel took from its cache
    if child.returncode:
        found["error"] = " ".join(text.splitlines()[-1:])[-300:] or f"exit code {child.returncode}"
    return found


def tree_mib(pid: int) -> float:
    """Returns the current resident memory of a process and all its descendants, in MiB."""
    total, queue = 0.0, [pid]
    while queue:
        here = queue.pop()
        try:
            status = Path(f"/proc/{here}/status").read_text(encoding="utf-8")
            children = Path(f"/proc/{here}/task/{here}/children").read_text(encoding="utf-8")
        except OSError:
            continue
        total += next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0.0)
        queue += [int(word) for word in children.split()]
    return total


def markdown(body: dict[str, Any]) -> str:
    """Returns the results page."""
    machine = next(iter(body["rows"].values()))["environment"]
    lines = [
        "# From a model to the file that is run: seconds and memory",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['date'][:10]}.",
        "Made by `python benchmarks/toolchain_time.py`. accel tries and measures every candidate in that time; the",
        "others make one file and measure nothing.",
        "",
        "| toolchain | command | seconds | peak MiB | stages from the cache |",
        "|---|---|---|---|---|",
    ]
    for row in body["rows"].values():
        if "error" in row:
            lines.append(f"| {row['title']} | - | - | {row['error']} | |")
        for label, steps in (("", row.get("steps", ())), (", second run", row.get("second", ()))):
            for step in steps:
                memory = step.get("error") or step["peak_mib"]
                lines.append(
                    f"| {row['title']}{label} | `{step['command']}` | {step['seconds']} | {memory} | {step['cached']} |"
                )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
