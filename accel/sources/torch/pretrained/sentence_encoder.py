"""Wraps a sentence-transformers model as a module with named inputs.

Keep other code out of this file, because the module's hash in manifests covers the whole file.
"""

from __future__ import annotations

import torch

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class SentenceEncoder(torch.nn.Module):
    """A sentence-transformers model that takes named tensors instead of a dict, and returns only the embedding."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        given = dict(zip(INPUTS, (input_ids, attention_mask, token_type_ids), strict=True))
        features = {name: tensor for name, tensor in given.items() if tensor is not None}
        return {"sentence_embedding": self.model(features)["sentence_embedding"]}
