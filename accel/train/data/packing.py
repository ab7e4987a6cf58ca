"""Packs several documents of any length into one sequence, so that the model trains as if each document were alone.

``pack = 128`` in the config packs the samples of ``data`` into sequences of 128 positions. A sample has ``int64[n]``
tokens and ``int64[n]`` targets, and n may differ between samples. The longest documents are placed first. Each document
goes into the fullest sequence with enough room (best fit, Krell et al. 2021, "Efficient Sequence Packing without
Cross-contamination", section 3).

Positions restart at 0 in every document. A model that uses positions takes ``positions`` or ``position_ids`` in
``forward``. In ``F.scaled_dot_product_attention``, a position sees only positions of the same document. The padding at
the end of a sequence has targets of -100, which aren't counted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from accel.errors import BadConfig, BadData

from ..attention import AroundAttention
from ..batch import call, input_names, to_device
from ..loss import IGNORED

# A parameter of ``forward`` called ``positions`` or ``position_ids`` gets each token's position in its document.
POSITIONS = ("positions", "position_ids")
_FIX = (
    "let forward take positions (or position_ids), and let only F.scaled_dot_product_attention look at other "
    "positions, or use pack = 0"
)


class Packed(torch.utils.data.Dataset[Any]):
    """A dataset that packs ``documents`` into sequences of ``length`` positions, in the same way on every rank and in
    every run.

    A sample is ``((tokens, positions, documents), targets)``, each ``int64[length]``. In a sample, ``documents`` holds
    the number of each position's document, or -1 for padding. Takes the document lengths from the list
    ``documents.lengths``, or reads every document once if the list is missing. Raises ``BadData`` if a document is
    longer than a sequence.
    """

    def __init__(self, documents: Sequence[Any], length: int) -> None:
        self.documents, self.length = documents, length
        known = getattr(documents, "lengths", None)
        lengths = (
            [int(n) for n in known] if known is not None else [len(documents[i][0]) for i in range(len(documents))]
        )
        for index, size in enumerate(lengths):
            if size > length:
                raise BadData(
                    f"document {index} has {size} tokens, but pack is only {length}; cut the document, or use "
                    f"--pack={size}"
                )
        self.sequences = best_fit(lengths, length)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        tokens, positions = torch.zeros(2, self.length, dtype=torch.int64)
        documents, targets = torch.full((self.length,), -1), torch.full((self.length,), IGNORED)
        start = 0
        for number, document in enumerate(self.sequences[index]):
            x, y = (torch.as_tensor(value) for value in self.documents[document])
            end = start + len(x)
            if x.ndim != 1 or x.shape != y.shape or end > self.length:
                raise BadData(
                    f"document {document} has tokens of shape {list(x.shape)} and targets of shape {list(y.shape)}; "
                    "give two arrays of equal length, and list this length in the dataset's lengths"
                )
            tokens[start:end], targets[start:end] = x, y
            positions[start:end], documents[start:end] = torch.arange(len(x)), number
            start = end
        return (tokens, positions, documents), targets

    def several(self) -> tuple[torch.Tensor, ...] | None:
        """Returns the inputs of the first sequence with more than one document, or None if every sequence has a single
        document."""
        index = next((i for i, inside in enumerate(self.sequences) if len(inside) > 1), None)
        return None if index is None else self[index][0]


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Assigns documents to sequences of ``room`` tokens, and returns the document numbers of each sequence.

    Places the longest documents first, each in the fullest sequence with enough room.
    """
    found: list[list[int]] = []
    spare: dict[int, list[int]] = {}  # Maps a number of free positions to the sequences with this many free positions.
    rooms: list[int] = []  # The keys of ``spare``, sorted.
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(rooms, lengths[document])
        if place == len(rooms):
            free, sequence = room, len(found)
            found.append([])
        else:
            free = rooms[place]
            sequence = spare[free].pop()
            if not spare[free]:
                del rooms[place]
        found[sequence].append(document)
        free -= lengths[document]
        if not spare.setdefault(free, []):
            insort(rooms, free)
        spare[free].append(sequence)
    return found


class OwnDocument(AroundAttention):
    """A context in which a position attends only to positions of the same document.

    ``documents`` holds the document number of each position, as int64[batch, positions].
    """

    def __init__(self) -> None:
        super().__init__()
        self.documents = torch.empty(0, 0)
        self._masks: dict[bool, torch.Tensor] = {}

    def enter(self, documents: torch.Tensor) -> None:
        """Sets the document numbers of the batch that runs next."""
        self.documents = documents
        self._masks = {}

    def _mask(self, causal: bool) -> torch.Tensor:
        """Returns the attention mask bool[batch, 1, positions, positions], which is False between documents."""
        if causal not in self._masks:
            same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
            self._masks[causal] = same.tril() if causal else same
        return self._masks[causal]

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> torch.Tensor:
        batch, positions = self.documents.shape
        for tensor in (query, key):
            if tensor.ndim != 4 or tensor.shape[0] != batch or tensor.shape[2] != positions:
                raise BadConfig(
                    f"attention gets a tensor of shape {list(tensor.shape)} instead of [{batch}, heads, {positions}, "
                    f"width], so packing can't keep the documents apart; {_FIX}"
                )
        mask = self._mask(is_causal)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            mask = attn_mask.masked_fill(~mask, float("-inf"))
        elif attn_mask is not None:
            mask = mask & attn_mask
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, False, **named)


def keep_apart(module: nn.Module, data: Packed, device: torch.device, dtype: torch.dtype) -> None:
    """Changes ``module`` in place to take ``(tokens, positions, documents)`` and to keep documents apart.

    Raises ``BadConfig`` if the output for a document in a sequence differs from the output for the document alone.
    """
    sample = data.several()
    if sample is None:
        _wrap(module)
        return
    tokens, _, numbers = inputs = to_device(tuple(value[None] for value in sample), device, dtype)
    training = module.training
    module.eval()
    with torch.no_grad():
        alone = [(own, call(module, tokens[:, own])) for own in _documents(numbers)]
        _wrap(module)
        found = call(module, inputs)
    module.train(training)
    for own, expected in alone:
        same = found.shape[:2] == tokens.shape and found[:, own].shape == expected.shape
        far = float((found[:, own] - expected).abs().max() / expected.abs().max()) if same else float("inf")
        if not far < (1e-4 if dtype == torch.float32 else 3e-2):
            raise BadConfig(
                f"the model's output for a document changes if other documents are in the same sequence; {_FIX}"
            )


def _documents(numbers: torch.Tensor) -> list[torch.Tensor]:
    """Returns a mask bool[positions] for each document of a batch with one sequence."""
    return [numbers[0] == number for number in range(int(numbers.max()) + 1)]


def _wrap(module: nn.Module) -> None:
    name = next((name for name in POSITIONS if name in input_names(module)), None)
    mode = OwnDocument()
    mode.wrap(module)
    inside = module.forward

    def packed(tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor) -> Any:
        mode.enter(documents)
        return inside(tokens, **({name: positions} if name else {}))

    module.forward = packed
