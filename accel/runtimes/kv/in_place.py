"""Keeps the cache of a decoder in ONNX Runtime's buffers, which grow in place instead of being copied at each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import onnxruntime

from accel.signature import Feeds
from accel.signature.decoder import IDS, LOGITS, Cache

from .cache import KvCache, runs_by_row

if TYPE_CHECKING:
    import numpy as np

    from ..onnxruntime import OnnxRuntimeSession

# A buffer has room for a multiple of this number of tokens, and grows by half.
_ROOM = 256


class InPlaceCache(KvCache):
    """Runs the steps with buffers that are input and output at the same time."""

    def __init__(self, session: OnnxRuntimeSession, layout: Cache, rows: int) -> None:
        super().__init__(session, layout, rows)
        self._own = session
        self._length = 0
        self._buffers: dict[str, np.ndarray] = dict(self._arrays)
        self._binding: Any = None

    def step(self, feeds: Feeds) -> np.ndarray:
        new = feeds[IDS].shape[1]
        logits = self.peek(feeds)
        self._length += new
        return logits

    def peek(self, feeds: Feeds) -> np.ndarray:
        import numpy as np

        rows, new = feeds[IDS].shape
        if runs_by_row(rows, new, self._length):
            return np.concatenate(list(self._row_by_row(feeds)))
        self._make_room(self._length + new)
        return self._run(feeds)

    def _run(self, feeds: Feeds) -> np.ndarray:
        binding = self._binding or self._bound()
        held = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in feeds.values()]
        for name, value in zip(feeds, held, strict=True):
            binding.bind_ortvalue_input(name, value)
        binding.bind_output(LOGITS, "cpu")
        self._own.run_bound(binding, feeds)
        logits: np.ndarray = binding.get_outputs()[-1].numpy()
        return logits

    def _bound(self) -> Any:
        """Binds each buffer to the input and the output of its part of the cache."""
        self._binding = self._own.session.io_binding()
        for past, present in self._layout.presents.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(self._buffers[past])
            self._binding.bind_ortvalue_input(past, value)
            self._binding.bind_ortvalue_output(present, value)
        return self._binding

    def _make_room(self, tokens: int) -> None:
        import numpy as np

        spec = self._layout.past[0]
        rows, _, room, _ = self._buffers[spec.name].shape
        if tokens <= room:
            return
        room = -(-max(tokens, room + room // 2) // _ROOM) * _ROOM
        self._binding = None  # it holds the old buffers, which are freed one after the other
        for name, old in self._buffers.items():
            _, heads, _, size = old.shape
            made = np.zeros((rows, heads, room, size), old.dtype)
            made[:, :, : self._length] = old[:, :, : self._length]
            self._buffers[name] = made

    def _row_by_row(self, feeds: Feeds) -> Iterator[np.ndarray]:
        """Runs the step for each row alone, because the operator takes several new tokens after others for one row
        only. Yields the logits of each row."""
        rows, new = feeds[IDS].shape
        self._make_room(self._length + new)
        whole, self._binding = self._buffers, None
        for row in range(rows):
            self._buffers = {name: buffer[row : row + 1] for name, buffer in whole.items()}
            yield self._run(self._own.signature.row_of(feeds, row))
            self._binding = None
        self._buffers = whole

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._buffers = {name: value.copy() for name, value in arrays.items()}
        self._length = next(iter(arrays.values())).shape[2]
        self._binding = None

    def reorder(self, rows: Iterable[int]) -> None:
        order = list(rows)
        self._buffers = {name: buffer[order] for name, buffer in self._buffers.items()}
        self._binding = None

    def crop(self, tokens: int) -> None:
        self._length = min(self._length, tokens)  # the next step overwrites the later tokens

    def arrays(self) -> Mapping[str, np.ndarray]:
        return {name: buffer[:, :, : self._length] for name, buffer in self._buffers.items()}
