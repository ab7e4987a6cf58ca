"""Runs the decoder of ``decoders.py`` in onnxruntime-genai, by the package onnxruntime-genai."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

Run = Callable[[np.ndarray, int], tuple[float, list[float]]]

# The form that is genai's loop on a file of accel.
ON_ACCEL = "genai-accel-int4"
# The options of genai's builder for each form.
FORMS: dict[str, tuple[str, ...]] = {
    "genai-fp32": (),
    "genai-int4": ("int4_accuracy_level=4", "int4_block_size=32"),
    ON_ACCEL: (),
}
# The bytes of a weight in the table of tokens, and of a number in the cache.
TABLE_BYTES = dict.fromkeys(FORMS, 4)
CACHE_BYTES = 4


def make(source: Path, out: Path, form: str) -> None:
    """Writes the files of ``form`` to the folder ``out`` by genai's builder. ``source`` is a folder of transformers.
    The builder needs a tokenizer, which is never used."""
    from tokenizers import Tokenizer, models

    package = find_spec("onnxruntime_genai")
    assert package is not None
    assert package.origin is not None
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(package.origin).parents[1])])
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        with_tokenizer = Path(scratch) / "source"
        with_tokenizer.mkdir()
        for file in source.iterdir():
            (with_tokenizer / file.name).symlink_to(file.absolute())
        Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(with_tokenizer / "tokenizer.json"))
        about = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (with_tokenizer / "tokenizer_config.json").write_text(json.dumps(about))
        words = [
            "-i",
            str(with_tokenizer),
            "-o",
            str(out),
            "-p",
            form.removeprefix("genai-"),
            "-e",
            "cpu",
            "-c",
            scratch,
        ]
        subprocess.run(
            [
                *(sys.executable, "-m", "onnxruntime_genai.models.builder", *words),
                *(["--extra_options", *FORMS[form]] if FORMS[form] else []),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )


def opened(folder: Path, threads: int, context: int) -> Run:
    """Returns a function that runs a prompt [1, tokens] and a number of steps, and returns the seconds of the prompt
    and of each step."""
    del context  # the cache of each prompt has its own size
    import onnxruntime_genai as genai

    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["session_options"] |= {"intra_op_num_threads": threads}
    config["model"]["eos_token_id"] = [config["model"]["vocab_size"] - 1]
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        copy = shutil.copytree(folder, Path(name) / "copy")
        (copy / "genai_config.json").write_text(json.dumps(config))
        model = genai.Model(str(copy))

    def run(ids: np.ndarray, steps: int) -> tuple[float, list[float]]:
        ticks = [time.perf_counter()]
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=ids.shape[1] + steps + 8, do_sample=False)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(ids.astype(np.int32)[0])
        for _ in range(steps + 1):
            generator.generate_next_token()
            ticks.append(time.perf_counter())
        first, *rest = np.diff(ticks).tolist()
        return first, rest

    return run
