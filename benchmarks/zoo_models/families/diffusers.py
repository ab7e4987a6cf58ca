"""Makes UNets, diffusion transformers and VAEs of diffusers, with tiny configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Case

_BLOCKS = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 16, "norm_num_groups": 8,
}  # fmt: skip


def _unet(**more: Any) -> Case:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        **_BLOCKS, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8, **more,
    )  # fmt: skip
    added = more.get("addition_embed_type") == "text_time"

    def example(b: int, _: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "sample": torch.randn(b, 4, 16, 16), "timestep": torch.randint(0, 999, (b,)),
            "encoder_hidden_states": torch.randn(b, 7, 32),
        }  # fmt: skip
        if added:
            found["added_cond_kwargs"] = {"text_embeds": torch.randn(b, 16), "time_ids": torch.rand(b, 6) * 500}
        return found

    return Case(model, example)


def _unconditional() -> Case:
    import diffusers

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = diffusers.UNet2DModel(**_BLOCKS, **blocks, in_channels=3, out_channels=3, attention_head_dim=8)
    return Case(model, lambda b, _: {"sample": torch.randn(b, 3, 16, 16), "timestep": torch.randint(0, 999, (b,))})


def _vae(kind: str, latents: bool, **more: Any) -> Case:
    import diffusers

    options = {
        "block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, "norm_num_groups": 8, "sample_size": 32,
    }  # fmt: skip
    model = getattr(diffusers, kind)(**({**options, **more} if kind != "AutoencoderTiny" else more)).eval()
    if latents:
        model.forward = model.decode
    return Case(model, lambda b, _: (torch.randn(b, 4, 8, 8) if latents else torch.randn(b, 3, 32, 32),))


class Decode(torch.nn.Module):
    """The decoder of a VAE, called as in a diffusers pipeline."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(latents / 0.18215, return_dict=False)[0]


def _decoder() -> Case:
    vae = _vae("AutoencoderKL", False).module
    return Case(Decode(vae), lambda b, _: (torch.randn(b, 4, 8, 8),))


def _dit() -> Case:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=8,
    )  # fmt: skip
    return Case(
        model,
        lambda b, _: {
            "hidden_states": torch.randn(b, 4, 8, 8), "timestep": torch.randint(0, 999, (b,)),
            "class_labels": torch.randint(0, 10, (b,)),
        },
    )  # fmt: skip


def _sd3() -> Case:
    import diffusers

    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    return Case(
        model,
        lambda b, _: {
            "hidden_states": torch.randn(b, 4, 8, 8), "encoder_hidden_states": torch.randn(b, 7, 32),
            "pooled_projections": torch.randn(b, 16), "timestep": torch.randint(0, 999, (b,)),
        },
    )  # fmt: skip


def _pixart() -> Case:
    import diffusers

    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, cross_attention_dim=32, caption_channels=16, norm_num_groups=8, use_additional_conditions=False,
    )  # fmt: skip
    return Case(
        model,
        lambda b, _: {
            "hidden_states": torch.randn(b, 4, 8, 8), "encoder_hidden_states": torch.randn(b, 7, 16),
            "timestep": torch.randint(0, 999, (b,)),
        },
    )  # fmt: skip


_MODELS: dict[str, Callable[[], Case]] = {
    "unet-sd": _unet,
    "unet-sdxl": lambda: _unet(
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=64
    ),
    "unet-ddpm": _unconditional,
    "vae": lambda: _vae("AutoencoderKL", False),
    "vae-decoder": _decoder,
    "vae-vq": lambda: _vae("VQModel", False, num_vq_embeddings=16),
    "vae-tiny": lambda: _vae(
        "AutoencoderTiny", False, encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1),
    ),
    "dit": _dit,
    "sd3": _sd3,
    "pixart": _pixart,
}  # fmt: skip
NAMES = tuple(_MODELS)


def make(name: str) -> Case:
    """Returns the model called ``name``."""
    return _MODELS[name]()
