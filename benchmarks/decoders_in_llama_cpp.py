"""Runs the decoder of ``decoders.py`` in llama.cpp, by the packages llama-cpp-python and gguf.

llama-cpp-python comes as source. ``pip install --no-deps --target FOLDER llama-cpp-python gguf`` compiles it for the
CPU of this machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# The number of llama.cpp's type of file for each form: LLAMA_FTYPE_ALL_F32, MOSTLY_Q4_0 and MOSTLY_Q8_0 in llama.h.
FORMS = {"llama.cpp-f32": 0, "llama.cpp-q4_0": 2, "llama.cpp-q8_0": 7}
# The bytes of a weight in the table of token embeddings, by llama.cpp's blocks of 32 weights and a scale.
TABLE_BYTES = {"llama.cpp-f32": 4, "llama.cpp-q4_0": 18 / 32, "llama.cpp-q8_0": 34 / 32}
# The bytes of a number in the cache, which llama.cpp keeps in float16 by default.
CACHE_BYTES = 2
# The names of a layer's tensors in transformers and in GGUF.
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Runs a prompt and a number of steps.
Run = Callable[[np.ndarray, int], tuple[float, list[float]]]


def write_gguf(source: Path, out: Path) -> None:
    """Writes the Llama of the transformers folder ``source`` as a GGUF file in float32, without a vocabulary."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    tensors = load_file(source / "model.safetensors")
    for name, top in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        if f"{name}.weight" in tensors:  # the head may be the table of tokens
            writer.add_tensor(f"{top}.weight", tensors[f"{name}.weight"])
    for layer in range(config["num_hidden_layers"]):
        for name, short in _LAYER.items():
            values = tensors[f"model.layers.{layer}.{name}.weight"]
            if short in ("attn_q", "attn_k"):
                values = _neighbours(values, heads if short == "attn_q" else kv_heads)
            writer.add_tensor(f"blk.{layer}.{short}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _neighbours(values: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of a query or key weight in llama.cpp's order: the two numbers of a rotation side by side."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def make(source: Path, out: Path, form: str) -> None:
    """Writes the file of ``form`` to the folder ``out``, quantized by llama.cpp itself."""
    import llama_cpp

    out.mkdir(parents=True, exist_ok=True)
    whole = out / "whole.gguf"
    write_gguf(source, whole)
    if not FORMS[form]:
        whole.rename(out / "model.gguf")
        return
    asked = llama_cpp.llama_model_quantize_default_params()
    asked.ftype = FORMS[form]
    if llama_cpp.llama_model_quantize(bytes(whole), bytes(out / "model.gguf"), asked):
        raise SystemExit(f"llama.cpp can't make {form}; see the error above")
    whole.unlink()


def _opened(file: Path, threads: int, context: int) -> tuple[Any, int]:
    """Returns an open model with a cache for ``context`` tokens, and the number of its logits."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(bytes(file), llama_cpp.llama_model_default_params())
    asked = llama_cpp.llama_context_default_params()
    asked.n_ctx, asked.n_batch, asked.n_ubatch = context, context, 512
    asked.n_threads = asked.n_threads_batch = threads
    running = llama_cpp.llama_init_from_model(model, asked)
    return running, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))


def all_logits(file: Path, threads: int, length: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that computes the logits [length, vocabulary] of the token ids of a text."""
    import llama_cpp

    running, words = _opened(file, threads, length)

    def logits(ids: np.ndarray) -> np.ndarray:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(running), True)
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for at, number in enumerate(ids):
            batch.token[at], batch.pos[at], batch.logits[at] = int(number), at, True
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        failed = llama_cpp.llama_decode(running, batch)
        llama_cpp.llama_batch_free(batch)
        if failed:
            raise SystemExit(f"llama.cpp can't run {len(ids)} tokens")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(running), (len(ids), words)).copy()

    return logits


def opened(folder: Path, threads: int, context: int) -> Run:
    """Returns a function that runs a prompt [1, tokens] and a number of steps, and returns the seconds of the prompt
    and of each step. ``context`` is the number of tokens that the cache holds."""
    import llama_cpp

    running, words = _opened(folder / "model.gguf", threads, context)

    def step(ids: list[int]) -> int:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        if llama_cpp.llama_decode(running, llama_cpp.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit(f"llama.cpp can't run {len(ids)} tokens")
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(running, -1), (words,)).argmax())

    def run(ids: np.ndarray, steps: int) -> tuple[float, list[float]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(running), True)
        ticks = [time.perf_counter()]
        following = [int(number) for number in ids[0]]
        for _ in range(steps + 1):
            following = [step(following)]
            ticks.append(time.perf_counter())
        first, *rest = np.diff(ticks).tolist()
        return first, rest

    return run
