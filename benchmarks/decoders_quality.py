"""Measures how far the quantized forms of a decoder are from PyTorch, beside those of other tools.

Usage:

    python benchmarks/decoders_quality.py                       # accel alone
    python benchmarks/decoders_quality.py --packages FOLDER     # also the tools that FOLDER holds, see decoders.py
    python benchmarks/decoders_quality.py --models trained      # one of the models

For each form: the mean Kullback-Leibler divergence (KL) from PyTorch in float32, in nats a token, the share of tokens
with the same most likely successor, the perplexity, and the bytes of the weights. All forms get the same tokens. Needs
no quiet machine, because nothing is timed.

``random`` is the model of ``decoders.py``, on random tokens. Its weights are random, so the figures compare the forms
with one another alone. ``trained`` is the Llama of 10 M parameters that ``accel train`` trains on Python's
documentation (``accel.examples.writer:larger``), on text that was held out. The script trains it if it isn't there,
which takes ten minutes.

accel's forms are made by the stages that ``accel optimize`` tries. genai's file consists of operators of ONNX Runtime
and is run by accel, because genai computes the logits of the last token alone.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import decoders
import decoders_in_genai
import decoders_in_llama_cpp
import numpy as np

if TYPE_CHECKING:
    from accel.artifact import Artifact

RESULTS = Path(__file__).parent / "results"
MODELS = ("random", "trained")
# The mode and the options of the quantization of each form of accel. A calibrated form gets texts that aren't judged.
ACCEL: dict[str, dict[str, Any]] = {
    "accel-fp32": {},
    "accel-int8": {"mode": "int8-weights"},
    "accel-int4": {"mode": "int4-weights", "block_size": 32},
    "accel-int4-128": {"mode": "int4-weights", "block_size": 128},
    "accel-int4-gptq": {"mode": "int4-gptq", "block_size": 32},
}
PEERS = ("genai-fp32", "genai-int4", *decoders_in_llama_cpp.FORMS)
TEXTS, LENGTH = 8, 256
CALIBRATED = 32

Logits = Callable[[np.ndarray], np.ndarray]


def make_trained(folder: Path) -> Path:
    """Trains the model and writes it to ``folder`` as transformers does, if it isn't there."""
    if not (folder / "config.json").is_file():
        import torch
        from safetensors.torch import load_file

        from accel.examples import writer

        run = folder.with_name("writer-run")
        config = Path(__file__).parents[1] / "examples" / "writer.toml"
        words = ["train", str(config), "--model=accel.examples.writer:larger", "--nproc", "2", "--out", str(run)]
        subprocess.run([sys.executable, "-m", "accel", *words], check=True)
        module = writer.larger()
        weights: dict[str, torch.Tensor] = {}
        for file in sorted((run / "final").glob("model-*.safetensors")):
            weights |= load_file(file)
        module.load_state_dict(weights, strict=False)  # the head is the table of tokens
        module.save_pretrained(folder)  # type: ignore[operator]
    return folder


def texts_of(model: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token ids [texts, length] to judge on and to calibrate on."""
    if model == "random":
        ids = np.random.default_rng(0).integers(3, 31000, (TEXTS + CALIBRATED, LENGTH))
        return ids[:TEXTS], ids[TEXTS:]
    from accel.examples import writer

    with tempfile.TemporaryDirectory() as scratch:
        writer.write_texts(Path(scratch))
        held_out = writer.tokenizer().encode((Path(scratch) / "held_out.txt").read_text(encoding="utf-8")).ids
    seen = np.concatenate([row["input_ids"] for row in writer.data()[: 2 * CALIBRATED]])
    return np.array(held_out[: TEXTS * LENGTH]).reshape(TEXTS, LENGTH), seen.reshape(CALIBRATED, LENGTH)


def of_pytorch(folder: Path) -> Logits:
    """Returns a function that computes the logits [length, vocabulary] of a text in PyTorch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32).eval()

    def logits(ids: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return np.asarray(model(input_ids=torch.from_numpy(ids[None])).logits[0])

    return logits


def of_accel(path: Path) -> Logits:
    """Returns the function of ``of_pytorch`` for an ONNX file."""
    import accel
    from accel.decoders.replay import Replay

    session = accel.load(path)
    return lambda ids: Replay(session, 1).step(ids[None])[0]


def made_by_accel(folder: Path, options: dict[str, Any], calibrated_on: np.ndarray, scratch: Path) -> Artifact:
    """Returns what accel's stages make of the export in ``folder``."""
    import accel
    from accel.converters.quantize.stage import GPTQ, QuantizeConfig
    from accel.converters.quantize.texts import write_texts
    from accel.optimizer.recipes import steps
    from accel.stage import run_stage

    made = accel.Source(folder / "accel-fp32").open()
    if not options:
        return made
    if options["mode"] == GPTQ:
        write_texts(calibrated_on, scratch / "texts.npz")
        options = {**options, "data": scratch / "texts.npz"}
    stages = [(step.stage, step.config) for step in steps.fuse_decoder(made)]
    stages += [("quantize", QuantizeConfig(**options))]
    stages += [(step.stage, step.config) for step in steps.packed_weights(made)]
    for number, (stage, config) in enumerate(stages):
        made = run_stage(stage, made, config, out=scratch / f"{number}.onnx")
    return made


def forms_of(folder: Path, forms: list[str], calibrated_on: np.ndarray) -> Iterator[tuple[str, int, Logits]]:
    """Yields the name, the bytes and the function of each form."""
    for form in forms:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            scratch = Path(name)
            if form in ACCEL:
                made = made_by_accel(folder, ACCEL[form], calibrated_on, scratch)
                yield form, sum(file.stat().st_size for file in made.files), of_accel(made.path)
            elif form in decoders_in_genai.FORMS:
                files = [file for file in (folder / form).iterdir() if file.suffix in decoders.WEIGHTS]
                yield form, sum(file.stat().st_size for file in files), of_accel(folder / form / "model.onnx")
            else:
                file = folder / form / "model.gguf"
                yield form, file.stat().st_size, decoders_in_llama_cpp.all_logits(file, decoders.THREADS, LENGTH)


def compared(folder: Path, model: str, forms: list[str]) -> Iterator[dict[str, Any]]:
    """Yields what is known about one model after each form: PyTorch's perplexity, the tokens, and the form's row."""
    from accel.optimizer.judge.decoder import Sums, sums

    decoders.make_forms(folder, [form for form in forms if form in PEERS])
    texts, calibrated_on = texts_of(model)
    reference = of_pytorch(folder)
    wanted = [reference(ids) for ids in texts]
    for form, size, logits in forms_of(folder, forms, calibrated_on):
        total = Sums()
        for ids, one in zip(texts, wanted, strict=True):
            total += sums(ids, one, logits(ids))
        assert math.isfinite(total.divergence), form
        row = {
            "kl": float(f"{total.drop('kl'):.4g}"),
            "same_top1": round(1 - total.drop("top1"), 4),
            "perplexity": float(f"{total.perplexity:.5g}"),
            "megabytes": round(size / 1e6, 2),
        }
        print(model, form, json.dumps(row), flush=True)
        yield {
            "perplexity": float(f"{total.source_perplexity:.5g}"),
            "tokens": total.tokens,
            "rows": {form: row},
        }


def table(body: dict[str, Any]) -> str:
    """Returns the figures as a page."""
    lines = ["# What quantized decoders lose", "", "Written by `python benchmarks/decoders_quality.py`. "
             "Compared with PyTorch in float32 on the same tokens. The script explains the forms.", ""]  # fmt: skip
    titles = {
        "random": "A Llama of 201 M parameters with random weights",
        "trained": "A Llama of 10 M parameters, trained on Python's documentation",
    }
    for model, found in body["models"].items():
        about = f"{found['tokens']} tokens, PyTorch's perplexity {found['perplexity']}."
        lines += [f"## {titles[model]}", "", about, ""]
        lines += [
            "| form | KL, nats a token | most likely token unchanged | perplexity | MB |",
            "|---|---|---|---|---|",
        ]
        for form, row in found["rows"].items():
            cells = (row["kl"], f"{100 * row['same_top1']:.1f}%", row["perplexity"], row["megabytes"])
            lines.append(f"| {form} | {' | '.join(map(str, cells))} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "accel-decoders")
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--forms", default="")
    given = parser.parse_args()
    if given.packages:
        sys.path.append(str(given.packages))
    forms = given.forms.split(",") if given.forms else [*ACCEL, *(PEERS if given.packages else ())]
    path = RESULTS / "decoders_quality.json"
    body: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"models": {}}
    for model in given.models.split(","):
        folder = given.folder if model == "random" else given.folder / model
        if model == "trained":
            make_trained(folder / "llama")
        for found in compared(folder, model, forms):
            earlier = body["models"].get(model, {"rows": {}})["rows"]
            body["models"][model] = {**found, "rows": {**earlier, **found["rows"]}}
            path.write_text(json.dumps(body, indent=2) + "\n")
            path.with_suffix(".md").write_text(table(body))


if __name__ == "__main__":
    main()
