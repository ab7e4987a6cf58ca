"""Measures the decode and prefill speed of a decoder in accel's forms, in PyTorch and in other tools.

Usage:

    python benchmarks/decoders.py                                  # PyTorch and accel
    python benchmarks/decoders.py --packages FOLDER                # also the tools that FOLDER holds
    python benchmarks/decoders.py --forms accel-int4,genai-int4    # only these forms
    python benchmarks/decoders.py --make                           # only makes the files, which takes minutes

``FOLDER`` is made by ``pip install --no-deps --target FOLDER onnxruntime-genai llama-cpp-python gguf openvino-genai
openvino-tokenizers ctranslate2``, which compiles llama.cpp for the CPU of this machine. Run ``accel kernels build
--onnxruntime-include DIR`` first, so that ``accel optimize`` can choose packed weights.

The model is a Llama of 12 layers of 1024 with 16 heads, 4 heads of keys and values and a vocabulary of 32,000 (201 M
parameters). Its weights are random, so the divergences (KL), which ``decoders_quality.py`` measures, compare the forms
with one another, and say nothing about a trained model.

``accel-fp32`` is the plain export. The other forms of accel are made by ``accel optimize``, ``accel-int4`` with one
scale for 32 weights, as in genai's file, and ``accel-int4-128`` with the default. ``genai-accel-int4`` is genai's loop
on accel's file. Other files are made by the tools: genai's by its builder, llama.cpp's by its quantizer, CTranslate2's
by its converter, and OpenVINO's by NNCF.

Every form runs in a process of its own. The processes take turns in short blocks, so that other work on the machine
slows all of them. A decode time is the median over the blocks of the fastest step of a block, with the quartiles. The
floor is the time to read the weights that a step needs and the cache once, at the bandwidth with which two threads
copy memory in the same run. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import decoders_in_ctranslate2
import decoders_in_genai
import decoders_in_llama_cpp
import decoders_in_openvino
import numpy as np

RESULTS = Path(__file__).parent / "results"
CONTEXTS = (128, 1024)
PROMPT, STEPS, ROUNDS = 512, 12, 9
# The precision and the options of the quantization of each form, or None for the export.
ACCEL: dict[str, tuple[str, dict[str, Any]] | None] = {
    "accel-fp32": None,
    "accel-fp32-fused": ("fp32", {}),
    "accel-int8": ("int8", {}),
    "accel-int4": ("int4", {"block_size": 32}),
    "accel-int4-128": ("int4", {}),
}
# The module of each form of a tool with files of its own.
OTHERS: dict[str, ModuleType] = {
    form: tool
    for tool in (decoders_in_genai, decoders_in_llama_cpp, decoders_in_openvino, decoders_in_ctranslate2)
    for form in tool.FORMS
}
FORMS = ("pytorch", *ACCEL, *OTHERS)
THREADS = 2
Run = Callable[[np.ndarray, int], tuple[float, list[float]]]
Steps = tuple[Callable[[np.ndarray], None], Callable[[], float]]
# The file that a finished form has.
MADE = ("model.onnx", "model.gguf", "openvino_model.bin", "model.bin")
# The libraries of each kind of form. Their memory doesn't count.
LIBRARIES = {
    "pytorch": ("torch", "transformers"),
    "accel": ("accel.decoders.replay", "onnxruntime"),
    "genai": ("onnxruntime_genai",),
    "llama.cpp": ("llama_cpp",),
    "openvino": ("openvino", "openvino_genai"),
    "ctranslate2": ("ctranslate2",),
}
# The endings of the files with weights.
WEIGHTS = (".onnx", ".weights", ".data", ".gguf", ".bin")


def make_model(folder: Path) -> Path:
    """Writes the model to ``folder`` as transformers does, if it isn't there."""
    if not (folder / "config.json").is_file():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
            num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=1,
            eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_forms(folder: Path, forms: list[str]) -> dict[str, float]:
    """Makes the files of ``forms`` that don't exist, and returns the seconds that each took."""
    import accel

    source, seconds = make_model(folder / "llama"), {}
    for form in dict.fromkeys(["accel-fp32", *forms]):  # the other forms of accel begin with the export
        out, started = folder / form, time.perf_counter()
        if (
            form not in (*ACCEL, *OTHERS)
            or form == decoders_in_genai.ON_ACCEL
            or any((out / name).is_file() for name in MADE)
        ):
            continue
        if form in OTHERS:
            OTHERS[form].make(source, out, form)
        elif (how := ACCEL[form]) is None:
            accel.export(source, out=out)
        else:
            accel.optimize(
                folder / "accel-fp32",
                out=out,
                target="ort-cpu",
                precision=how[0],
                quantize=how[1],
                contexts=CONTEXTS,
                metric="kl",
                max_drop=0.9,
            )
        seconds[form] = round(time.perf_counter() - started, 1)
    return seconds


def environment_with(packages: Path | None) -> dict[str, str]:
    """Returns the environment of a process that finds accel and the tools in ``packages``."""
    path = [os.environ.get("PYTHONPATH", ""), *([str(packages)] if packages else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def divergences() -> dict[str, float]:
    """Returns the mean divergence (KL) of each form from PyTorch, in nats a token, that ``decoders_quality.py`` found
    last."""
    path = RESULTS / "decoders_quality.json"
    rows = json.loads(path.read_text())["models"].get("random", {"rows": {}})["rows"] if path.is_file() else {}
    return {form: row["kl"] for form, row in rows.items()}


def of_pytorch(folder: Path) -> Steps:
    """Returns a function that runs a prompt, and a function that runs one more token and returns its seconds."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(folder / "llama").eval()
    state: dict[str, Any] = {}

    def step(ids: Any) -> None:
        with torch.inference_mode():
            logits = model(input_ids=ids, past_key_values=state["cache"], use_cache=True, logits_to_keep=1).logits
        state["next"] = logits[:, -1:].argmax(-1)

    def prefill(ids: np.ndarray) -> None:
        state["cache"] = DynamicCache()
        step(torch.from_numpy(ids))

    def decode() -> float:
        started = time.perf_counter()
        step(state["next"])
        return time.perf_counter() - started

    return prefill, decode


def of_accel(folder: Path, form: str) -> Steps:
    """Returns the functions of ``of_pytorch`` for a form of accel."""
    import accel
    from accel.decoders.replay import Replay

    session = accel.load(folder / form, options={"threads": THREADS})
    state: dict[str, Any] = {}

    def prefill(ids: np.ndarray) -> None:
        state["running"] = Replay(session, 1)
        state["next"] = state["running"].prompt(ids)[:, -1].argmax(-1)

    def decode() -> float:
        started = time.perf_counter()
        state["next"] = state["running"].step(state["next"][:, None])[:, -1].argmax(-1)
        return time.perf_counter() - started

    return prefill, decode


def by_steps(prefill: Callable[[np.ndarray], None], decode: Callable[[], float]) -> Run:
    """Returns a function that runs a prompt and a number of steps, and returns the seconds of the prompt and of each
    step."""

    def run(ids: np.ndarray, steps: int) -> tuple[float, list[float]]:
        started = time.perf_counter()
        prefill(ids)
        return time.perf_counter() - started, [decode() for _ in range(steps)]

    return run


def work(form: str, folder: Path) -> None:
    """Answers lines of JSON on stdin: the number of tokens of the prompt. Each answer has the seconds of the prompt and
    of each step, and the peak memory in MiB without the libraries."""
    for name in LIBRARIES[form.partition("-")[0]]:
        importlib.import_module(name)
    before = memory_mib("VmRSS")
    context = max(*CONTEXTS, PROMPT) + STEPS + 8
    run: Run
    if form in OTHERS:
        run = OTHERS[form].opened(folder_of(folder, form), THREADS, context)
    else:
        run = by_steps(*(of_pytorch(folder) if form == "pytorch" else of_accel(folder, form)))
    ids = np.random.default_rng(0).integers(3, 31000, (1, max(*CONTEXTS, PROMPT)))
    print("ready", flush=True)
    for line in sys.stdin:
        count = json.loads(line)
        seconds, steps = run(ids[:, :count], STEPS)
        print(json.dumps([seconds, steps, memory_mib("VmHWM") - before]), flush=True)


def memory_mib(field: str) -> float:
    """Returns the memory of this process in MiB: ``VmRSS`` is the memory now, ``VmHWM`` the peak. Pages of files that
    are mapped into memory count too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


class Worker:
    """A process that runs one form."""

    def __init__(self, form: str, folder: Path, packages: Path | None) -> None:
        self.peak = 0.0
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", form, "--folder", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment_with(packages),
        )
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline().strip()) != "ready":
            if not line and self.process.poll() is not None:
                raise SystemExit(f"{form} failed; see the error above")

    def ask(self, count: int) -> tuple[float, list[float]]:
        """Returns the seconds of a prompt of ``count`` tokens, and of each step after it. Sets ``peak``, the largest
        memory of the process so far in MiB."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        seconds, steps, self.peak = json.loads(self.process.stdout.readline())
        return seconds, steps

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def bandwidth() -> float:
    """Returns the gigabytes a second that two threads read, as the best of ten sums over 1 GiB."""
    import torch

    torch.set_num_threads(THREADS)
    block = torch.ones(1 << 28)
    best = 0.0
    for _ in range(10):
        started = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - started) / 1e9)
    return best


def folder_of(folder: Path, form: str) -> Path:
    """Returns the folder with the file of a form."""
    return folder / {"pytorch": "accel-fp32", decoders_in_genai.ON_ACCEL: "accel-int4"}.get(form, form)


def bytes_held(folder: Path, form: str, context: int) -> float:
    """Returns the bytes of the weights and of the cache for ``context`` tokens."""
    files = [file for file in folder_of(folder, form).iterdir() if file.suffix in WEIGHTS]
    return sum(file.stat().st_size for file in files) + cache_bytes(form, context)


def cache_bytes(form: str, context: int) -> int:
    """Returns the bytes of the keys and values of ``context`` tokens in 12 layers with 4 heads of 64."""
    return 12 * 2 * 4 * 64 * context * (OTHERS[form].CACHE_BYTES if form in OTHERS else 4)


def bytes_of_a_step(folder: Path, form: str, context: int) -> float:
    """Returns the bytes that a step reads: the weights without the table of token embeddings, and the cache."""
    table = 32000 * 1024 * (OTHERS[form].TABLE_BYTES[form] if form in OTHERS else 4)
    return bytes_held(folder, form, context) - table


def measure(forms: list[str], folder: Path, packages: Path | None) -> dict[str, Any]:
    """Returns the figures of each form, in ms and tokens a second."""
    workers = {form: Worker(form, folder, packages) for form in forms}
    steps: dict[tuple[str, int], list[float]] = {(form, size): [] for form in forms for size in CONTEXTS}
    prompts: dict[str, list[float]] = {form: [] for form in forms}
    for worker in workers.values():
        worker.ask(CONTEXTS[0])
    for number in range(ROUNDS):
        order = forms if number % 2 else forms[::-1]
        for size in CONTEXTS:
            for form in order:
                steps[form, size].append(min(workers[form].ask(size)[1]) * 1e3)
        for form in order:
            prompts[form].append(PROMPT / workers[form].ask(PROMPT)[0])
    for worker in workers.values():
        worker.close()
    speed = bandwidth()
    rows = {}
    for form in forms:
        found = {}
        for size in CONTEXTS:
            low, middle, high = np.quantile(steps[form, size], (0.25, 0.5, 0.75))
            floor = bytes_of_a_step(folder, form, size) / speed / 1e6
            ratios = np.array(steps["pytorch", size]) / np.array(steps[form, size]) if "pytorch" in forms else None
            found[str(size)] = {
                "ms": round(float(middle), 2),
                "quartiles": [round(float(low), 2), round(float(high), 2)],
                "floor_ms": round(floor, 2),
                "over_pytorch": None if ratios is None else round(float(np.median(ratios)), 2),
            }
        held = bytes_held(folder, form, max(CONTEXTS) + STEPS) / 2**20
        rows[form] = {
            "decode": found,
            "prefill_tokens_a_second": round(float(np.median(prompts[form])), 1),
            "peak_mib": round(workers[form].peak),
            "peak_over_weights_and_cache": round(workers[form].peak / held, 2),
        }
    return {"gigabytes_a_second": round(speed, 1), "rows": rows}


def table(body: dict[str, Any]) -> str:
    """Returns the figures as a page."""
    machine = body["environment"]
    lines = [
        "# Decoders: a Llama of 201 M parameters",
        "",
        f"{machine['cpu']}, {THREADS} threads, {body['gigabytes_a_second']} GB/s of memory; {machine['date']}. "
        "Written by `python benchmarks/decoders.py`.",
        "",
        "| form | " + " | ".join(f"decode at {size}, ms | times PyTorch | over the floor" for size in CONTEXTS)
        + " | prefill 512, tokens/s | peak MiB | over weights and cache | KL |",
        "|---|" + "---|" * (3 * len(CONTEXTS) + 4),
    ]  # fmt: skip
    for form, row in body["rows"].items():
        cells = []
        for size in CONTEXTS:
            one = row["decode"][str(size)]
            low, high = one["quartiles"]
            cells += [f"{one['ms']} ({low} to {high})", str(one["over_pytorch"]), f"{one['ms'] / one['floor_ms']:.2f}"]
        lost = body["divergences"].get(form, "")
        cells += [str(row[name]) for name in ("prefill_tokens_a_second", "peak_mib", "peak_over_weights_and_cache")]
        lines.append(f"| {form} | {' | '.join(cells)} | {lost} |")
    made = ", ".join(f"{form} {seconds} s" for form, seconds in body["seconds"].items())
    return "\n".join([*lines, "", f"Making the files took: {made or 'made earlier'}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "accel-decoders")
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--forms", default="")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--worker")
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.folder)
        return
    from accel.timing.environment import environment

    if given.packages:
        sys.path.append(str(given.packages))
    own = ("pytorch", *ACCEL)
    forms = given.forms.split(",") if given.forms else list(FORMS if given.packages else own)
    seconds = make_forms(given.folder, forms)
    if given.make:
        print(json.dumps(seconds))
        return
    body = {
        "environment": environment(THREADS),
        "seconds": seconds,
        **measure(forms, given.folder, given.packages),
        "divergences": divergences(),
    }
    (RESULTS / "decoders.json").write_text(json.dumps(body, indent=2) + "\n")
    (RESULTS / "decoders.md").write_text(table(body))
    print(table(body))


if __name__ == "__main__":
    main()
