"""A small GPT with an odd vocabulary on uneven targets: what the distributed checks train."""

from __future__ import annotations

import os

import torch

from accel.examples.gpt import GPT, GPTConfig

VOCABULARY, LENGTH, SAMPLES = 61, 16, 96


def model() -> torch.nn.Module:
    return GPT(GPTConfig(vocab=VOCABULARY, layers=3, hidden=32, heads=4, seq=LENGTH))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(SAMPLES):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        targets = (ids * 3 + 1) % VOCABULARY
        targets[: (index * 5) % (LENGTH - 1)] = -100  # uneven: 1 to 16 counted targets a sample
        found.append((ids, targets))
    return found


def odd_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences of a length that two ranks can't share."""
    return [(ids[:15], targets[:15]) for ids, targets in data()]


def wrong_chain() -> torch.nn.Module:
    """A model that does more than its chain says."""

    class Doubled(GPT):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    return Doubled(GPTConfig(vocab=VOCABULARY, layers=3, hidden=32, heads=4, seq=LENGTH))


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The default loss written by somebody who counts on plain, whole logits."""
    assert type(outputs) is torch.Tensor
    assert outputs.shape[-1] == VOCABULARY
    picked = outputs.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    counted = targets != -100
    return -(picked * counted).sum(), counted.sum()


_calls = 0


def overflow_once(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first loss of the last rank is infinite."""
    from accel.train.loss import cross_entropy

    global _calls
    _calls += 1
    total, count = cross_entropy(outputs, targets)
    last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    return (total * float("inf") if _calls == 1 and last else total), count
