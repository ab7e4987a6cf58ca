"""Lets the older exporter write RNNs on packed sequences."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

# A line that the older exporter writes to stderr for each RNN on a packed sequence.
_NOISE = b"shape_type_inference.cpp"


@contextlib.contextmanager
def with_packed_outputs(module: Any, example: tuple[Any, ...]) -> Iterator[Any]:
    """Yields ``module`` with an added output for each RNN that returns a packed sequence. The added output is the
    padded sequence.

    A model that uses only the last hidden state never reads the lengths of a packed sequence. Without the added
    outputs, the exporter fails for a model that never reads the lengths. The caller removes the added outputs from the
    graph.
    """
    import torch
    from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

    padded: list[Any] = []

    def keep(rnn: Any, _: Any, output: Any) -> None:
        if isinstance(output[0], PackedSequence):
            padded.append(pad_packed_sequence(output[0], batch_first=rnn.batch_first)[0])

    class More(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *tensors: Any) -> Any:
            padded.clear()
            return (*self.inner(*tensors), *padded)

    hooks = [part.register_forward_hook(keep) for part in module.modules() if isinstance(part, torch.nn.RNNBase)]
    try:
        if hooks:
            module(*example)
        with contextlib.ExitStack() as stack:
            if padded:
                stack.enter_context(_padded_as_in_eager())
                stack.enter_context(_without_noise())
            yield More().eval() if padded else module
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _padded_as_in_eager() -> Iterator[None]:
    """Makes ``pad_packed_sequence`` cut its result to the longest sequence within the ``with`` block, and fill it with
    the padding value. The exporter leaves out the packing, so the result would be as long as the input of the packing,
    and its padding would be 0."""
    import torch

    own = torch._VF._pad_packed_sequence

    def padded(data: Any, batch_sizes: Any, batch_first: bool, value: float, length: Any) -> tuple[Any, Any]:
        found, lengths = own(data, batch_sizes, batch_first, value, length)
        lengths = lengths.to(torch.int32).to(torch.int64)  # the exporter's lengths are int32, which no slice takes
        if sys._getframe(1).f_locals.get("total_length") is None:
            longest = lengths.max()
            found = found[:, :longest] if batch_first else found[:longest]
        if value:
            places = torch.arange(found.shape[1 if batch_first else 0])
            inside = places < lengths[:, None] if batch_first else places[:, None] < lengths
            found = torch.where(inside[..., None], found, value)
        return found, lengths

    with mock.patch.object(torch._VF, "_pad_packed_sequence", padded, create=True):
        yield


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Hides the warnings that the exporter's C++ code writes to stderr within the ``with`` block. Other lines that
    are written meanwhile follow at the end of the block."""
    try:
        sys.stderr.flush()
        before = os.dup(2)
    except (OSError, ValueError, AttributeError):  # the process has no stderr
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            for line in held:
                if _NOISE not in line:
                    with contextlib.suppress(OSError):
                        os.write(2, line)
