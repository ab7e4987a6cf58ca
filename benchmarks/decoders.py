"""Measures the decode and prefill speed of a decoder in accel's forms, in PyTorch and in other tools.

Usage:

    python benchmarks/decoders.py                                  # PyTorch and accel
    python benchmarks/decoders.py --packages FOLDER                # also the tools that FOLDER holds
    python benchmarks/decoders.py --forms accel-int4,genai-int4    # only these forms
    python benchmarks/decoders.py --make                           # only makes the files, which takes minutes

``FOLDER`` is made by ``pip install --no-deps --target FOLDER onnxruntime-genai llama-cpp-python gguf``, which compiles
llama.cpp for the CPU of this machine. Run ``accel kernels build --onnxruntime-include DIR`` first, so that ``accel
optimize`` can choose packed weights.

The model is a Llama of 12 layers of 1024 with 16 heads, 4 heads of keys and values and a vocabulary of 32,000 (201 M
parameters). Its weights are random, so the divergences (KL) compare the forms with one another, and say nothing about a
trained model.

``accel-fp32`` is the plain export. The other forms of accel are made by ``accel optimize``, ``accel-int4`` with one
scale for 32 weights, as in genai's file, and ``accel-int4-128`` with the default. genai's files are made by its own
builder, and ``genai-accel-int4`` is its loop on accel's file. llama.cpp's files are made by its own quantizer.

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
from typing import Any

import decoders_in_llama_cpp
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
ON_ACCEL = "genai-accel-int4"
GENAI = {"genai-fp32": (), "genai-int4": ("int4_accuracy_level=4", "int4_block_size=32")}
LLAMA_CPP = tuple(decoders_in_llama_cpp.FORMS)
FORMS = ("pytorch", *ACCEL, *GENAI, ON_ACCEL, *LLAMA_CPP)
THREADS = 2
# The file that a finished form has.
MADE = ("model.onnx", "model.gguf")
# The libraries of each kind of form. Their memory doesn't count.
LIBRARIES = {
    "pytorch": ("torch", "transformers"),
    "accel": ("accel.decoders.replay", "onnxruntime"),
    "genai": ("onnxruntime_genai",),
    "llama.cpp": ("llama_cpp",),
}
# The endings of the files with weights.
WEIGHTS = (".onnx", ".weights", ".data", ".gguf")


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


def make_forms(folder: Path, forms: list[str], packages: Path | None) -> dict[str, float]:
    """Makes the files of ``forms`` that don't exist, and returns the seconds that each took."""
    import accel

    source, seconds = make_model(folder / "llama"), {}
    for form in dict.fromkeys(["accel-fp32", *forms]):  # the other forms of accel begin with the export
        out, started = folder / form, time.perf_counter()
        if form not in (*ACCEL, *GENAI, *LLAMA_CPP) or any((out / name).is_file() for name in MADE):
            continue
        if form in GENAI:
            make_by_genai(source, out, form, packages)
        elif form in LLAMA_CPP:
            decoders_in_llama_cpp.make(source, out, form)
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


def make_by_genai(source: Path, out: Path, form: str, packages: Path | None) -> None:
    """Makes the form by genai's builder, which needs a tokenizer. The tokenizer is never used."""
    from tokenizers import Tokenizer, models

    precision = form.removeprefix("genai-")
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        with_tokenizer = Path(scratch) / "source"
        with_tokenizer.mkdir()
        for file in source.iterdir():
            (with_tokenizer / file.name).symlink_to(file.absolute())
        Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(with_tokenizer / "tokenizer.json"))
        about = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (with_tokenizer / "tokenizer_config.json").write_text(json.dumps(about))
        words = ["-i", str(with_tokenizer), "-o", str(out), "-p", precision, "-e", "cpu", "-c", scratch]
        words += ["--extra_options", *GENAI[form]] if GENAI[form] else []
        subprocess.run(
            [sys.executable, "-m", "onnxruntime_genai.models.builder", *words],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment_with(packages),
        )


def environment_with(packages: Path | None) -> dict[str, str]:
    """Returns the environment of a process that finds accel and the tools in ``packages``."""
    path = [os.environ.get("PYTHONPATH", ""), *([str(packages)] if packages else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def divergences(folder: Path, forms: list[str]) -> dict[str, float]:
    """Returns the mean divergence (KL) of each optimized form of accel from the export, in nats a token. genai's int4
    rounds to the same steps as ``accel-int4``."""
    import accel
    from accel.optimizer.judge.decoder import DecoderJudge

    judge = DecoderJudge(accel.Source(folder / "accel-fp32").open(), None)
    made = [form for form in forms if ACCEL.get(form)]
    return {
        form: float(f"{judge.judge(accel.Source(folder / form / 'model.onnx').open(), {}).drop:.4g}") for form in made
    }


def of_pytorch(folder: Path) -> tuple[Callable[[np.ndarray], None], Callable[[], float]]:
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


def of_accel(folder: Path, form: str) -> tuple[Callable[[np.ndarray], None], Callable[[], float]]:
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


def of_genai(folder: Path, form: str) -> tuple[Callable[[np.ndarray], None], Callable[[], float]]:
    """Returns the functions of ``of_pytorch`` for onnxruntime-genai."""
    import onnxruntime_genai as genai

    own = folder_of(folder, form)
    config = json.loads((own / "genai_config.json").read_text())
    options = {"intra_op_num_threads": THREADS}
    config["model"]["decoder"]["session_options"] |= options
    config["model"]["eos_token_id"] = [31999]
    copy = Path(tempfile.mkdtemp(dir=folder))
    for file in own.iterdir():
        os.link(file, copy / file.name)
    (copy / "genai_config.json").unlink()
    (copy / "genai_config.json").write_text(json.dumps(config))
    model = genai.Model(str(copy))
    state: dict[str, Any] = {}

    def prefill(ids: np.ndarray) -> None:
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=ids.shape[1] + STEPS + 8, do_sample=False)
        state["generator"] = genai.Generator(model, parameters)
        state["generator"].append_tokens(ids.astype(np.int32)[0])
        state["generator"].generate_next_token()

    def decode() -> float:
        started = time.perf_counter()
        state["generator"].generate_next_token()
        return time.perf_counter() - started

    return prefill, decode


def work(form: str, folder: Path) -> None:
    """Answers lines of JSON on stdin: the number of tokens of the prompt. Each answer has the seconds of the prompt and
    of each step, and the peak memory in MiB without the libraries."""
    for name in LIBRARIES[form.partition("-")[0]]:
        importlib.import_module(name)
    before = memory_mib("VmRSS")
    if form == "pytorch":
        prefill, decode = of_pytorch(folder)
    elif form in LLAMA_CPP:
        context = max(*CONTEXTS, PROMPT) + STEPS + 8
        prefill, decode = decoders_in_llama_cpp.functions(folder / form / "model.gguf", THREADS, context)
    else:
        prefill, decode = (of_genai if form.startswith("genai") else of_accel)(folder, form)
    ids = np.random.default_rng(0).integers(3, 31000, (1, max(*CONTEXTS, PROMPT)))
    print("ready", flush=True)
    for line in sys.stdin:
        count = json.loads(line)
        started = time.perf_counter()
        prefill(ids[:, :count])
        seconds = time.perf_counter() - started
        steps = [decode() for _ in range(STEPS)]
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
    return folder / {"pytorch": "accel-fp32", ON_ACCEL: "accel-int4"}.get(form, form)


def bytes_held(folder: Path, form: str, context: int) -> float:
    """Returns the bytes of the weights and of the cache for ``context`` tokens."""
    files = [file for file in folder_of(folder, form).iterdir() if file.suffix in WEIGHTS]
    return sum(file.stat().st_size for file in files) + cache_bytes(form, context)


def cache_bytes(form: str, context: int) -> int:
    """Returns the bytes of the keys and values of ``context`` tokens in 12 layers with 4 heads of 64."""
    return 12 * 2 * 4 * 64 * context * (decoders_in_llama_cpp.CACHE_BYTES if form in LLAMA_CPP else 4)


def bytes_of_a_step(folder: Path, form: str, context: int) -> float:
    """Returns the bytes that a step reads: the weights without the table of token embeddings, and the cache."""
    table = 32000 * 1024 * decoders_in_llama_cpp.TABLE_BYTES.get(form, 4)
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
    seconds = make_forms(given.folder, forms, given.packages)
    if given.make:
        print(json.dumps(seconds))
        return
    body = {
        "environment": environment(THREADS),
        "seconds": seconds,
        **measure(forms, given.folder, given.packages),
        "divergences": divergences(given.folder, forms),
    }
    (RESULTS / "decoders.json").write_text(json.dumps(body, indent=2) + "\n")
    (RESULTS / "decoders.md").write_text(table(body))
    print(table(body))


if __name__ == "__main__":
    main()
