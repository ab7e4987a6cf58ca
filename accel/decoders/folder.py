"""Writes the files beside an exported decoder that onnxruntime-genai, openvino-genai, optimum and tokenizers read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.artifact import Artifact, beside, manifest_path
from accel.errors import CannotWrite
from accel.runtimes.kv.cache import grows_in_place
from accel.signature.decoder import IDS, LOGITS, MASK, PARTS, POSITIONS, Cache, is_stateful, past_name, present_name
from accel.spelling import option
from accel.tables.kinds import KINDS, main_files

from .tokenizer_ir import write_tokenizer_ir

GENAI_CONFIG = "genai_config.json"
# The main file of a decoder for openvino-genai.
OPENVINO_GENAI = KINDS["openvino"].other_names[0]
# The configs and the files of the tokenizer in a folder that transformers wrote.
_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "source.spm", "target.spm",
    "preprocessor_config.json", "processor_config.json", "normalizer.json",
)  # fmt: skip
# onnxruntime-genai refuses other types, but runs every model with these inputs and outputs in the same way.
_OTHER_TYPE = "llama"
_TYPES = frozenset(
    {
        "chatglm", "ernie4_5", "gemma", "gemma2", "gemma3_text", "gpt2", "gptoss", "granite", "internlm2", "llama",
        "mistral", "nemotron", "olmo", "phi", "phi3", "phi3small", "phimoe", "qwen2", "qwen3", "smollm3",
    }
)  # fmt: skip


def check_folder(folder: Path, main: str | None = None) -> None:
    """Raises ``CannotWrite`` if a file that accel did not make would be overwritten in ``folder``, or if the folder
    holds the decoder in another form than the main file ``main``, if given."""
    made = [name for name in main_files() if manifest_path(folder / name).is_file()]
    other = [name for name in made if main is not None and name != main]
    if other:
        raise CannotWrite(f"{folder} holds a model in another form ({other[0]}); give another {option('out')}")
    for name in (GENAI_CONFIG, *_CONFIGS, *_TOKENIZER):
        if (folder / name).exists() and not made and not (folder / GENAI_CONFIG).is_file():
            raise CannotWrite(
                f"{folder / name} was not made by accel and would be overwritten; give another {option('out')}"
            )


def write_folder(artifact: Artifact, source: Path | None) -> None:
    """Writes genai_config.json beside the decoder ``artifact``, and copies the configs and the tokenizer of the folder
    ``source``. The configs of a model that wasn't in a folder of transformers come from the manifest. Beside an
    OpenVINO IR, writes the tokenizer's own IR instead of genai_config.json."""
    folder = artifact.path.parent
    copy_configs(folder, source, artifact.source["decoder"].get("configs"))
    if is_stateful(artifact.signature):
        write_tokenizer_ir(folder)
        return
    with beside(folder / GENAI_CONFIG) as temporary:
        temporary.write_text(json.dumps(genai_config(artifact), indent=2) + "\n", encoding="utf-8")


def copy_configs(folder: Path, source: Path | None, configs: Mapping[str, Any] | None = None) -> None:
    """Copies the configs and the tokenizer of the folder ``source``, if there is one, to ``folder``. ``configs`` are
    the configs by name if ``source`` has none of its own."""
    for name, body in (configs or {}).items():
        with beside(folder / name) as temporary:
            temporary.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    for name in _CONFIGS * (configs is None) + _TOKENIZER if source is not None else ():
        if (source / name).is_file():  # type: ignore[operator]
            with beside(folder / name) as temporary:
                shutil.copyfile(source / name, temporary)  # type: ignore[operator]


def genai_config(artifact: Artifact) -> dict[str, Any]:
    """Returns the config that onnxruntime-genai reads, from the signature and the recorded facts of a decoder."""
    cache = Cache.of(artifact.signature)
    assert cache is not None, "the artifact is a decoder"
    about: Mapping[str, Any] = artifact.source["decoder"]
    names = {spec.name for spec in artifact.signature.inputs}
    inputs = {name: name for name in (IDS, MASK, POSITIONS) if name in names}
    heads, size = cache.heads, cache.head_dim
    vocabulary = next(spec for spec in artifact.signature.outputs if spec.name == LOGITS).shape[-1]
    special = {f"{name}_token_id": about[name] for name in ("bos", "eos", "pad")}
    if special["pad_token_id"] is None:
        special["pad_token_id"] = next(iter(about["eos"]), 0)
    return {
        "model": {
            **{name: value for name, value in special.items() if value is not None},
            "context_length": about["context"],
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": artifact.path.name,
                "head_size": size,
                "hidden_size": about["hidden"] or heads * size,
                "inputs": {**inputs, **{f"past_{part}_names": past_name("%d", part) for part in PARTS}},
                "outputs": {LOGITS: LOGITS, **{f"present_{part}_names": present_name("%d", part) for part in PARTS}},
                "num_attention_heads": about["heads"] or heads,
                "num_hidden_layers": cache.layers,
                "num_key_value_heads": heads,
            },
            "type": about["type"] if about["type"] in _TYPES else _OTHER_TYPE,
            "vocab_size": vocabulary,
        },
        "search": {
            "do_sample": False,
            "max_length": about["context"],
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": artifact.kind == "onnx" and grows_in_place(artifact.path, cache),
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 50,
            "top_p": 1.0,
        },
    }
