"""Makes the models of torchaudio that don't use its C++ extension."""

from __future__ import annotations

import torch

from ..case import Case

NAMES = ("wav2letter", "deepspeech", "conformer", "wav2vec2", "convtasnet", "emformer")


def make(name: str) -> Case:
    """Returns the model with a small config."""
    from torchaudio import models

    if name == "wav2letter":
        return Case(models.Wav2Letter(10, "mfcc", 16), lambda b, _: (torch.randn(b, 16, 100),))
    if name == "deepspeech":
        return Case(models.DeepSpeech(16, 32, 10), lambda b, _: (torch.randn(b, 1, 20, 16),))
    if name == "conformer":
        net = models.Conformer(16, 4, 32, 2, 7)
        return Case(net, lambda b, _: (torch.randn(b, 20, 16), torch.full((b,), 20)))
    if name == "convtasnet":
        return Case(models.ConvTasNet(2, 8, 16, 3, 8, 16, 2, 1), lambda b, _: (torch.randn(b, 1, 800),))
    if name == "emformer":
        return Case(
            models.Emformer(16, 4, 32, 2, 4, right_context_length=1),
            lambda b, _: (torch.randn(b, 17, 16), torch.full((b,), 16)),
        )
    net = models.wav2vec2_model(
        "group_norm", [(16, 10, 5), (16, 3, 2)], False, 32, 0.0, 16, 4, 2, 4, 0.0, 64, 0.0, 0.0, False, 0.0, 10
    )
    return Case(net, lambda b, _: (torch.randn(b, 1600),))
