"""Makes the architectures of transformers with small configs, random weights and their most common heads."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..case import Case, NotMade

# Names of mappings in transformers. Each mapping lists the architectures that have a certain head. The zoo uses the
# first mapping that contains the architecture.
_HEADS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_MASKED_LM", "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_CTC", "MODEL_FOR_AUDIO_CLASSIFICATION", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_OBJECT_DETECTION",
    "MODEL_FOR_SEMANTIC_SEGMENTATION", "MODEL_FOR_UNIVERSAL_SEGMENTATION", "MODEL_FOR_DEPTH_ESTIMATION",
    "MODEL_FOR_VIDEO_CLASSIFICATION", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION", "MODEL_FOR_IMAGE_TO_IMAGE",
    "MODEL_FOR_TOKEN_CLASSIFICATION", "MODEL_FOR_TIME_SERIES_PREDICTION", "MODEL",
)  # fmt: skip

# Maps an architecture to the head for its best-known task. The zoo uses ``_HEADS`` only for architectures that are not
# in this dict.
_OWN_HEADS = {
    "bert": "MODEL_FOR_SEQUENCE_CLASSIFICATION", "roberta": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "distilbert": "MODEL_FOR_QUESTION_ANSWERING", "deberta-v2": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "mpnet": "MODEL", "xlm-roberta": "MODEL", "electra": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "modernbert": "MODEL_FOR_SEQUENCE_CLASSIFICATION", "layoutlm": "MODEL_FOR_TOKEN_CLASSIFICATION",
}  # fmt: skip
_SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "model_dim": 32, "embedding_size": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "intermediate_size": 64, "d_ff": 64,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_dim": 64, "n_inner": 64, "hidden_dim": 64, "d_kv": 8,
    "vocab_size": 320, "head_dim": 8, "image_size": 32, "patch_size": 8, "max_position_embeddings": 128,
    "n_positions": 128, "projection_dim": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "rotary_dim": 8,
    "max_source_positions": 64, "max_target_positions": 64, "num_mel_bins": 16, "num_queries": 10,
    "vision_hidden_size": 32, "text_hidden_size": 32, "embedding_dim": 32, "decoder_hidden_size": 32,
    "hidden_dropout_prob": 0.0, "mamba_d_state": 8, "state_size": 8, "type_vocab_size": 2, "num_labels": 3,
    "moe_num_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "sliding_window": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip

# Maps each model that ONNX can't express to a text that the error message of accel.export must contain. The text
# encoder of aimv2 uses causal attention if the mask has a zero. A traced graph can't depend on the mask's values. The
# routers of afmoe start with zeros, and PyTorch doesn't define which of several equal scores topk chooses.
_REFUSED = {
    "afmoe": "the outputs depend on the order of equal or nearly equal scores in topk",
    "aimv2": "the file's outputs are off",
    "fsmt": "instead of `if not padding_mask.any()`",
    "led": "compute with the tensor `is_index_global_attn.flatten().any()`",
    "longformer": "compute with the tensor `is_index_global_attn.flatten().any()`",
    "switch_transformers": "instead of `for expert_idx in expert_hit`",
}
# The zoo first reduces all sizes in a model's config. If transformers refuses the reduced config, the zoo reduces only
# the sizes whose names end with a word of this list.
_FEW = ("layers", "layer", "vocab_size", "image_size", "num_labels", "token_id", "max_position_embeddings")


NAMES = tuple(
    """
    afmoe aimv2 albert altclip apertus arcee audio-spectrogram-transformer bart beit bert bert-generation big_bird
    bigbird_pegasus biogpt bit bitnet blenderbot blenderbot-small blip bloom bros camembert canine chinese_clip clap
    clip clipseg codegen cohere cohere2 conditional_detr convbert convnext convnextv2 ctrl cvt dab-detr
    data2vec-audio data2vec-text data2vec-vision dbrx deberta deberta-v2 deepseek_v2 deepseek_v3 deformable_detr
    deit depth_anything detr diffllama dinat dinov2 dinov2_with_registers dinov3_vit distilbert dots1 dpr dpt
    efficientnet electra ernie ernie4_5 esm eurobert exaone4 falcon falcon_mamba flaubert flava fnet focalnet fsmt
    funnel gemma gemma2 gemma3 git glm glm4 glm4_moe glpn gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj
    granite granitemoe groupvit helium hiera hubert ibert idefics3 ijepa imagegpt informer jamba jetmoe layoutlm
    layoutlmv2 layoutlmv3 led levit lfm2 lilt llama llava longformer longt5 luke lxmert m2m_100 mamba mamba2 marian
    markuplm mask2former maskformer mbart megatron-bert minicpm3 minimax ministral mistral mixtral mlcd mobilebert
    mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 modernbert modernbert-decoder moonshine mpnet mpt mra mt5 mvp
    nemotron nomic_bert nystromformer olmo olmo2 olmo3 olmoe openai-gpt opt owlv2 owlvit patchtsmixer patchtst
    pegasus pegasus_x perceiver persimmon phi phi3 phimoe plbart poolformer prophetnet pvt pvt_v2 qwen2 qwen2_moe
    qwen2_vl qwen3 qwen3_moe qwen3_next recurrent_gemma reformer regnet rembert resnet roberta roberta-prelayernorm
    roc_bert roformer rt_detr rt_detr_v2 rwkv sam seed_oss segformer seggpt sew sew-d siglip siglip2 smollm3
    speecht5 splinter squeezebert stablelm starcoder2 swiftformer swin swin2sr swinv2 switch_transformers t5 t5gemma
    table-transformer tapas textnet time_series_transformer timesformer trocr umt5 unispeech unispeech-sat upernet
    vaultgemma videomae vilt visual_bert vit vit_mae vit_msn vits vivit wav2vec2 wav2vec2-bert wav2vec2-conformer
    wavlm whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod yolos yoso zamba2 zoedepth
    """.split()  # noqa: SIM905
)


def make(name: str) -> Case:
    """Returns the architecture with a small config. If the model doesn't run with all sizes reduced, the function
    reduces only the sizes in ``_FEW``."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    reasons = []
    for few in (False, True):
        torch.manual_seed(0)
        try:
            model = _model(name, few)
            case = replace(_case(model), refusal=_REFUSED.get(name, ""))
            with torch.no_grad():
                model(**case.example(2, case.sizes[0]))
            return case
        except Exception as error:  # a config may not fit
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")
    raise NotMade("; ".join(reasons))


def _model(name: str, few: bool) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto

    head = _OWN_HEADS.get(name) or next(h for h in _HEADS if name in getattr(modeling_auto, f"{h}_MAPPING_NAMES"))
    kind = getattr(modeling_auto, f"{head}_MAPPING_NAMES")[name]
    kind = kind[0] if isinstance(kind, tuple | list) else kind
    small = _small(transformers.AutoConfig.for_model(name).to_dict(), few)
    config = type(transformers.AutoConfig.for_model(name)).from_dict(small)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # the exported graph runs one forward pass without a KV cache
    count = 0
    with contextlib.suppress(Exception), torch.device("meta"):  # some constructors fail on meta tensors
        count = sum(p.numel() for p in getattr(transformers, kind)(config).parameters())
    if count > 30_000_000:
        raise NotMade(f"{count / 1e6:.0f} million parameters")
    return getattr(transformers, kind)(config).eval()


def _small(config: Mapping[str, Any], few: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            found[key] = _small(value, few)
        elif key in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            kept = few and not key.endswith(_FEW)
            found[key] = value if kept else min(value, _SMALL[key]) if value >= 0 else value
        elif key in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            found[key] = (value if len(set(value[:2])) == len(set(value)) else list(dict.fromkeys(value)))[:2]
        elif key == "attention_types":
            found[key] = [[["global", "local"], 1]]
        elif key not in ("transformers_version", "torch_dtype", "dtype", "stage_names", "out_features", "out_indices"):
            found[key] = value
    return found


def _part(config: Any, name: str, default: Any = None) -> Any:
    for part in (
        config,
        *(getattr(config, n, None) for n in ("text_config", "vision_config", "audio_config", "encoder")),
    ):
        if (value := getattr(part, name, None)) is not None:
            return value
    return default


def _case(model: Any) -> Case:
    config, takes = model.config, set(inspect.signature(model.forward).parameters)
    main = model.main_input_name
    text = "input_ids" in takes and (
        main == "input_ids" or "vision" in str(type(config)).lower() or "pixel_values" in takes
    )
    vocabulary = int(_part(config, "vocab_size", 320) or 320)
    dynamic: dict[str, dict[int, str]] = {}
    if text:
        dynamic["input_ids"] = {0: "batch", 1: "sequence"}
        if "attention_mask" in takes:
            dynamic["attention_mask"] = {0: "batch", 1: "sequence"}
    decoded = bool(getattr(config, "is_encoder_decoder", False)) and "decoder_input_ids" in takes
    images = "pixel_values" in takes and (main == "pixel_values" or _part(config, "vision_config") is not None)
    if images:
        dynamic["pixel_values"] = {0: "batch"}
    sound = main if main in ("input_values", "input_features") else ""
    if sound:
        dynamic[sound] = {0: "batch"}
    if decoded:
        dynamic["decoder_input_ids"] = {0: "batch"}
    if not dynamic:
        raise NotMade(f"the zoo can't make the input {main}")
    boxes = "bbox" in takes and text

    def example(batch: int, size: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if text:
            low = min(10, vocabulary - 1)
            found["input_ids"] = torch.randint(low, vocabulary, (batch, size))
            if "attention_mask" in takes:
                mask = torch.ones(batch, size, dtype=torch.int64)
                mask[0, size - size // 4 :] = 0
                found["attention_mask"] = mask
        if images:
            found["pixel_values"] = torch.randn(batch, *_pixels(config))
        if sound:
            found[sound] = _sound(config, sound, batch)
        if decoded:
            found["decoder_input_ids"] = torch.randint(
                3, int(_part(config, "decoder_vocab_size") or vocabulary), (batch, 6)
            )
        if boxes:
            found["bbox"] = torch.randint(0, 50, (batch, size, 2)).repeat(1, 1, 2).sort(-1).values
        return found

    if boxes:
        dynamic["bbox"] = {0: "batch", 1: "sequence"}
    return Case(model, example, dynamic, (16, 11, 24) if text else (0,))


def _pixels(config: Any) -> tuple[int, ...]:
    size = _part(config, "image_size", 64)
    size = size if isinstance(size, list | tuple) else (size, size)
    channels = _part(config, "num_channels", 3)
    frames = getattr(config, "num_frames", None)
    shape = (channels if isinstance(channels, int) else 3, *size)
    return (frames, *shape) if frames else shape


def _sound(config: Any, name: str, batch: int) -> torch.Tensor:
    bins = _part(config, "num_mel_bins")
    if name == "input_values":
        if bins and getattr(config, "max_length", None):
            return torch.randn(batch, int(config.max_length), bins)
        return torch.randn(batch, 4000)
    if config.model_type == "whisper":
        return torch.randn(batch, bins, 2 * config.max_source_positions)
    width = _part(config, "input_feat_per_channel") or _part(config, "feature_projection_input_dim") or bins or 80
    return torch.randn(batch, 64, width)
