"""Runs the decoder of ``decoders.py`` in CTranslate2, by the package ctranslate2."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

# The quantization of each form in CTranslate2's words.
FORMS = {"ctranslate2-fp32": "float32", "ctranslate2-int8": "int8"}
# The bytes of a weight in the table of tokens. int8 has a scale of 4 bytes for a row of 1,024 weights.
TABLE_BYTES = {"ctranslate2-fp32": 4, "ctranslate2-int8": 1}
CACHE_BYTES = 4

# Runs a prompt and a number of steps.
Run = Callable[[np.ndarray, int], tuple[float, list[float]]]


def make(source: Path, out: Path, form: str) -> None:
    """Writes the files of ``form`` to the folder ``out``. ``source`` is a transformers folder.

    CTranslate2 takes tokens by their text, so each token id gets a text."""
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer, models

    words = json.loads((source / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        named = Path(scratch)
        for file in source.iterdir():
            (named / file.name).symlink_to(file.absolute())
        texts = {_text(number): number for number in range(words)}
        Tokenizer(models.WordLevel(vocab=texts, unk_token=_text(0))).save(str(named / "tokenizer.json"))
        special = {"bos_token": _text(1), "eos_token": _text(2), "unk_token": _text(0)}
        about = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
        (named / "tokenizer_config.json").write_text(json.dumps(about))
        TransformersConverter(str(named)).convert(str(out), quantization=FORMS[form], force=True)


def _text(number: int) -> str:
    return f"t{number}"


def opened(folder: Path, threads: int, context: int) -> Run:
    """Returns a function that runs a prompt [1, tokens] and a number of steps, and returns the seconds of the prompt
    and of each step."""
    del context  # the cache grows
    import ctranslate2

    generator = ctranslate2.Generator(str(folder), device="cpu", intra_threads=threads)

    def run(ids: np.ndarray, steps: int) -> tuple[float, list[float]]:
        texts = [_text(number) for number in ids[0]]
        ticks = [time.perf_counter()]

        def note(_: object) -> bool:
            ticks.append(time.perf_counter())
            return False  # go on

        # The iterator of generate_tokens lags behind the thread that computes the steps. This function doesn't.
        generator.generate_batch(
            [texts], max_length=steps + 1, sampling_topk=1, end_token=[], include_prompt_in_result=False, callback=note
        )
        first, *rest = np.diff(ticks).tolist()
        return first, rest

    return run
