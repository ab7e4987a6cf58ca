"""Proves that accel exports models saved with save_pretrained of transformers, and reads the models' inputs from their
configs."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel.errors import BadInputSpec
from accel.sources.source import Source

TEXT = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 40,
}  # fmt: skip
SEEN = {**TEXT, "image_size": 16, "patch_size": 8, "projection_dim": 8}
DECODED = {
    "vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
IDS, MASK = "input_ids:int64[batch,sequence]{0..49}", "attention_mask:int64[batch,sequence]"
DECODER_IDS = "decoder_input_ids:int64[batch,decoder_sequence]{0..49}"


def save(folder: Path, kind: str, **config: Any) -> Path:
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    model(model.config_class(**config)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "config", "inputs", "dims"),
    [
        ("RobertaModel", {**TEXT, "pad_token_id": 0, "type_vocab_size": 1}, [IDS, MASK], {"sequence": [8, 39, 39]}),
        ("EsmModel", {**TEXT, "pad_token_id": 1, "mask_token_id": 2}, [IDS, MASK], {"sequence": [8, 38, 38]}),
        ("FNetModel", {**TEXT, "type_vocab_size": 1}, [IDS], {"sequence": [8, 40, 40]}),
        (
            "ProphetNetModel",
            {
                "vocab_size": 50, "hidden_size": 16, "encoder_ffn_dim": 16, "num_encoder_layers": 1,
                "num_encoder_attention_heads": 2, "decoder_ffn_dim": 16, "num_decoder_layers": 1,
                "num_decoder_attention_heads": 2, "max_position_embeddings": 40,
            },
            [IDS, MASK, DECODER_IDS],
            {"sequence": [8, 39, 39], "decoder_sequence": [1, 16, 38]},
        ),
        (
            "XLNetForSequenceClassification",
            {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
            [IDS, MASK],
            {"sequence": [8, 128, 512]},
        ),
        (
            "WhisperForAudioClassification",
            {**DECODED, "num_mel_bins": 16, "max_source_positions": 20, "classifier_proj_size": 8},
            ["input_features:float32[batch,16,40]"],
            {},
        ),
        (
            "T5ForConditionalGeneration",
            {"vocab_size": 50, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2},
            [IDS, MASK, DECODER_IDS],
            {"sequence": [8, 128, 512], "decoder_sequence": [1, 16, 512]},
        ),
        ("BartModel", {**DECODED, "max_position_embeddings": 40}, [IDS, MASK], {"sequence": [8, 40, 40]}),
        (
            "BartForConditionalGeneration",
            {**DECODED, "max_position_embeddings": 40},
            [IDS, MASK, DECODER_IDS],
            {"decoder_sequence": [1, 16, 40]},
        ),
        (
            "WhisperForConditionalGeneration",
            {**DECODED, "max_source_positions": 20, "max_target_positions": 12, "num_mel_bins": 4},
            ["input_features:float32[batch,4,40]", DECODER_IDS],
            {"decoder_sequence": [1, 12, 12]},
        ),
        (
            "ASTModel",
            {**TEXT, "max_length": 32, "num_mel_bins": 16, "patch_size": 8},
            ["input_values:float32[batch,32,16]"],
            {},
        ),
        (
            "Wav2Vec2Model",
            {**TEXT, "conv_dim": [8, 8], "conv_stride": [50, 4], "conv_kernel": [50, 4], "num_feat_extract_layers": 2,
             "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
            ["input_values:float32[batch,samples]"],
            {"samples": [8000, 16000, 80000]},
        ),
        (
            "CLIPModel",
            {"text_config": TEXT, "vision_config": SEEN, "projection_dim": 8},
            [IDS.replace("batch", "texts"), MASK.replace("batch", "texts"), "pixel_values:float32[images,3,16,16]"],
            {"sequence": [8, 40, 40], "texts": [1, 3, 16], "images": [1, 1, 8]},
        ),
        (
            "BlipForImageTextRetrieval",
            {"text_config": {**TEXT, "encoder_hidden_size": 16}, "vision_config": SEEN, "projection_dim": 8,
             "image_text_hidden_size": 8},
            [IDS, MASK, "pixel_values:float32[batch,3,16,16]"],
            {"batch": [1, 1, 8]},
        ),
        (
            "LayoutLMModel",
            {**TEXT, "type_vocab_size": 1},
            [IDS, MASK, "bbox:int64[batch,sequence,4]{0..1023}"],
            {},
        ),
        (
            "VideoMAEModel",
            {**TEXT, "image_size": 16, "patch_size": 8, "num_frames": 4},
            ["pixel_values:float32[batch,4,3,16,16]"],
            {},
        ),
        (
            "UperNetForSemanticSegmentation",
            {"backbone_config": transformers.SwinConfig(
                embed_dim=8, depths=[1, 1], num_heads=[2, 2], image_size=16, window_size=2,
                out_features=["stage1", "stage2"]), "hidden_size": 8, "auxiliary_in_channels": 8, "pool_scales": [1],
             "use_auxiliary_head": False},
            ["pixel_values:float32[batch,3,16,16]"],
            {},
        ),
        (
            "PatchTSTModel",
            {"context_length": 16, "num_input_channels": 2, "patch_length": 4, "patch_stride": 4, "d_model": 8,
             "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 8},
            ["past_values:float32[batch,16,2]"],
            {},
        ),
    ],
)  # fmt: skip
def test_what_it_takes(
    tmp_path: Path, kind: str, config: dict[str, Any], inputs: list[str], dims: dict[str, list[int]]
) -> None:
    """Checks that the signature has all inputs that the config describes, and only inputs that forward takes. Also
    checks that the ranges of the dims contain only sizes at which the model can run."""
    signature = Source(save(tmp_path, kind, **config)).open().signature
    assert [str(spec) for spec in signature.inputs] == inputs
    assert {dim: signature.dims[dim].to_json() for dim in dims} == dims


@pytest.mark.parametrize(
    "saved",
    [
        {"preprocessor_config.json": {"do_center_crop": True, "size": {"shortest_edge": 40}, "crop_size": 32}},
        {"preprocessor_config.json": {"size": {"height": 32, "width": 32}, "crop_size": {"height": 8, "width": 8}}},
        {"processor_config.json": {"image_processor": {"size": {"shortest_edge": 32}}}},
    ],
)
def test_the_size_of_the_images(tmp_path: Path, saved: dict[str, Any]) -> None:
    """The net in this test takes images of any size. Checks that accel uses the image size in the folder's preprocessor
    config. Without a preprocessor config, the message must say how to declare the input."""
    folder = save(tmp_path, "ResNetModel", **RESNET)
    with pytest.raises(BadInputSpec, match=r"inputs=\['pixel_values:float32\[batch,3,224,224\]'\]$"):
        Source(folder).open()
    for name, body in saved.items():
        (folder / name).write_text(json.dumps(body), encoding="utf-8")
    assert str(Source(folder).open().signature.inputs[0]) == "pixel_values:float32[batch,3,32,32]"


def test_what_isnt_told_is_asked_for(tmp_path: Path) -> None:
    """Fails if the error for undeclared inputs leaves out an input, or gives token ids the shape of an image."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sound = {**small, "num_mel_bins": 16, "spec_size": 32, "window_size": 2, "patch_embeds_hidden_size": 8,
             "depths": [1, 1], "num_attention_heads": [1, 1]}  # fmt: skip
    folder = save(tmp_path, "ClapModel", text_config={**TEXT, "vocab_size": 50}, audio_config=sound, projection_dim=8)
    with pytest.raises(BadInputSpec) as raised:
        Source(folder).open()
    for words in ("input_ids:int64[batch,sequence]", "input_features:float32"):
        assert f"'{words}" in str(raised.value)


def test_an_own_model_is_asked_for_all_it_needs(tmp_path: Path) -> None:
    """Fails if the example in the error for undeclared inputs leaves out an input, or includes an input with a
    default."""
    code = """
        import torch
        class Net(torch.nn.Module):
            def forward(self, input_ids, attention_mask, labels=None, **more):
                return input_ids * attention_mask
        make = Net
    """
    (tmp_path / "net.py").write_text(textwrap.dedent(code))
    with pytest.raises(BadInputSpec) as raised:
        Source(f"{tmp_path / 'net.py'}:make").open()
    asked = "inputs=['input_ids:int64[batch,sequence]', 'attention_mask:int64[batch,sequence]']"
    assert str(raised.value).endswith(f"e.g. {asked}")


def test_a_range_that_is_given_stays(tmp_path: Path) -> None:
    """Fails if accel ignores the caller's range for a dim that also has a range in the config."""
    folder = save(tmp_path, "RobertaModel", **TEXT)
    assert Source(folder, dims={"sequence": (2, 4, 6)}).open().signature.dims["sequence"].to_json() == [2, 4, 6]


@pytest.mark.proof
def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Checks that an exported mixture of experts gives the same outputs as the torch model at several sequence
    lengths."""
    folder = save(
        tmp_path / "model", "MixtralForCausalLM", **TEXT, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=None,
    )  # fmt: skip
    made = accel.export(str(folder), out=tmp_path / "model.onnx", dims={"sequence": (4, 8, 12)})
    assert all(gate["passed"] for gate in made.proof())
