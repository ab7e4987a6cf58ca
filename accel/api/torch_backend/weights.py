"""Finds out whether the weights of a compiled part were changed.

PyTorch counts the writes to a tensor, except for these:

- Writes to an alias that doesn't share the counter: ``weight.data.mul_(2)``, or an array from ``weight.numpy()``.
- Writes to an inference tensor.
- A new storage: ``weight.data = new``.

A new storage has another address. All other such writes show only in the values. At batch 1, reading all values takes
longer than the run itself, so above ``EXACT_BYTES`` only some values of each weight are compared. Weights can't be
inputs of the session instead, because the runtimes fold, pack and quantize only constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

# Up to this size of all weights of a part, every value is compared at each call. Takes 0.05 ms for 1 MB, and more for
# weights that the processor's cache can't hold beside the session's own copy: 0.4 ms for 3 MB.
EXACT_BYTES = 2 << 20
# Above that size, about this many values of each weight are compared, evenly spread.
_SAMPLED = 64
# An array of this many bytes is compared by itself.
_LARGE = 1 << 15

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weights:
    """Holds the state of ``weights`` at the time of creation."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._known = [(one, one.data_ptr(), version(one)) for one in weights]
        exact = _is_small(weights)
        # The views keep the storages alive, so that a new storage can't have the address of an old one. Other than
        # Tensor.numpy, DLPack doesn't make a storage unable to change its size.
        views = [np.from_dlpack(_bits(one)) for one in weights if one.numel()]
        if not exact:
            views = [one[:: max(1, len(one) // _SAMPLED)] for one in views]
        # Many small arrays are compared faster as one array, and large arrays faster without a copy.
        parts = [[one] for one in views if one.nbytes >= _LARGE]
        for dtype in {one.dtype for one in views}:
            parts.append([one for one in views if one.dtype == dtype and one.nbytes < _LARGE])
        self._parts = [(part, np.concatenate(part)) for part in parts if part]

    def changed(self, weights: Sequence[torch.Tensor]) -> bool:
        """Returns True if one of ``weights`` was replaced or overwritten. Misses only a write that PyTorch doesn't
        count, to weights of more than ``EXACT_BYTES`` in all, that leaves all sampled values as they were."""
        for one, (known, address, count) in zip(weights, self._known, strict=True):
            if one is not known or one.data_ptr() != address or version(one) != count:
                return True
        return any(
            not np.array_equal(part[0] if len(part) == 1 else np.concatenate(part), values)
            for part, values in self._parts
        )


def unwatched(weights: Sequence[torch.Tensor]) -> str:
    """Returns the reason why changes of ``weights`` can't be found, or ""."""
    if any(one.layout != torch.strided or one.is_quantized for one in weights):
        return "it has sparse or quantized weights"
    if any(one.is_inference() for one in weights) and not _is_small(weights):
        return (
            "its weights were made in inference mode, where PyTorch doesn't count the writes to a tensor; make the "
            "model outside torch.inference_mode()"
        )
    return ""


def version(tensor: torch.Tensor) -> int:
    """Returns how often ``tensor`` was written to. Returns -1 for an inference tensor, because PyTorch doesn't count
    writes to inference tensors."""
    return -1 if tensor.is_inference() else tensor._version


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if two tensors of the same dtype have the same shape and values. A NaN equals itself."""
    return one.shape == other.shape and torch.equal(_integers(one), _integers(other))


def _is_small(weights: Sequence[torch.Tensor]) -> bool:
    return sum(one.nbytes for one in weights) <= EXACT_BYTES


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of ``tensor`` as integers of the same size."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a 1-D view, as integers, of the memory from the first to the last value of ``tensor``."""
    found = _integers(tensor)
    length = 1 + sum((size - 1) * step for size, step in zip(found.shape, found.stride(), strict=True))
    return found.as_strided((length,), (1,), found.storage_offset())
