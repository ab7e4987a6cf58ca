"""Runs the decoder of ``decoders.py`` in OpenVINO GenAI, by the packages openvino-genai and openvino-tokenizers.

The files are accel's stateful export, whose weights NNCF compresses with its defaults: int8 with one scale for an
output channel, or int4 with one scale for 128 weights, where the head and the table of tokens stay int8.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

# The mode of NNCF's compression for each form, or None for the export.
FORMS = {"openvino-fp32": None, "openvino-int8": "INT8_ASYM", "openvino-int4": "INT4_ASYM"}
# The bytes of a weight in the table of tokens. int8 has a scale of 2 bytes and a zero point for a row of 1,024 weights.
TABLE_BYTES = {"openvino-fp32": 4, "openvino-int8": 1, "openvino-int4": 1}
# The bytes of a number in the cache, which OpenVINO keeps in int8 by default, with a scale and a zero point for a head.
CACHE_BYTES = 1
# The weights that share a scale in int4.
_GROUP = 128
_FILE = "openvino_model.xml"

# Runs a prompt and a number of steps.
Run = Callable[[np.ndarray, int], tuple[float, list[float]]]


def make(source: Path, out: Path, form: str) -> None:
    """Writes the IR of ``form`` to the folder ``out``, and the export beside it. ``source`` is a folder of
    transformers."""
    import nncf
    import openvino as ov

    import accel

    whole = out.parent / "openvino-fp32" / _FILE
    if not whole.is_file():
        accel.export(source, out=whole.parent, to="openvino")
    if (mode := FORMS[form]) is None:
        return
    sizes = {"group_size": _GROUP} if mode.startswith("INT4") else {}
    made = nncf.compress_weights(ov.Core().read_model(whole), mode=nncf.CompressWeightsMode[mode], **sizes)
    out.mkdir()
    ov.save_model(made, out / _FILE, compress_to_fp16=False)
    for name in ("config.json", "generation_config.json"):
        (out / name).write_bytes((whole.parent / name).read_bytes())


def opened(folder: Path, threads: int, context: int) -> Run:
    """Returns a function that runs a prompt [1, tokens] and a number of steps, and returns the seconds of the prompt
    and of each step. fp32 computes in float32, the other forms in the precision that OpenVINO chooses."""
    del context  # the cache grows
    import openvino as ov
    import openvino_genai

    exact = {"INFERENCE_PRECISION_HINT": "f32"} if FORMS[folder.name] is None else {}
    pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", INFERENCE_NUM_THREADS=threads, **exact)

    def run(ids: np.ndarray, steps: int) -> tuple[float, list[float]]:
        asked = openvino_genai.GenerationConfig()
        asked.max_new_tokens, asked.ignore_eos = steps + 1, True
        # A streamer runs in a thread of its own, so the pipeline's own times are taken. They are in microseconds.
        found = pipeline.generate(ov.Tensor(ids.astype(np.int64)), asked).perf_metrics.raw_metrics
        return found.m_times_to_first_token[0] / 1e6, [taken / 1e6 for taken in found.m_durations]

    return run
