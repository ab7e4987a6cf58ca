"""Makes torch's own transformer layers exportable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Within the ``with`` block, torch's transformer layers use the given mask, and use no fused operators and no
    nested tensors.

    ``nn.Transformer`` compares its mask with the causal mask to choose a faster form of the same attention. The
    exporters can't record a choice that depends on the values of a mask. The fused operators of evaluation mode have no
    ONNX translation.
    """
    import torch
    from torch.nn.modules import transformer

    def is_causal(_: Any, causal: bool | None = None, __: Any = None) -> bool:
        return causal is True

    own = transformer.TransformerEncoder.forward
    fused = torch.backends.mha.get_fastpath_enabled()

    def encode(
        encoder: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
    ) -> Any:
        if fused and mask is None and _nests(encoder, src, src_key_padding_mask):
            return _with_zero_padding(encoder, src, src_key_padding_mask, is_causal is True)
        return own(encoder, src, mask, src_key_padding_mask, is_causal)

    with (
        mock.patch.object(transformer, "_detect_is_causal_mask", is_causal),
        mock.patch.object(transformer.TransformerEncoder, "forward", encode),
    ):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def _nests(encoder: Any, src: Any, padding: Any) -> bool:
    """Tells whether ``encoder`` turns sequences with ``padding`` into a nested tensor, if it is run without
    gradients."""
    plain = padding is None or src.dim() != 3 or encoder.layers[0].training
    return not plain and getattr(encoder, "use_nested_tensor", False)


def _with_zero_padding(encoder: Any, src: Any, padding: Any, is_causal: bool) -> Any:
    """Computes what ``encoder`` computes with a nested tensor: zeros at the padding, if all the padding is at the ends
    of the sequences. Otherwise torch uses no nested tensor, and computes numbers for the padding too."""
    import torch

    padded = padding if padding.dtype == torch.bool else padding != 0
    ends = torch.arange(src.shape[1], device=src.device) >= (~padded).sum(1, keepdim=True)
    found = src
    for layer in encoder.layers:
        found = layer(found, is_causal=is_causal, src_key_padding_mask=padding)
    at_ends = (ends != padded).sum() == 0
    if not getattr(encoder, "mask_check", True):
        at_ends = torch.ones_like(at_ends)
    found = torch.where((padded & at_ends)[..., None], 0.0, found)
    return found if encoder.norm is None else encoder.norm(found)
