"""Captures CUDA graphs, which launch all kernels of an engine at once instead of one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cuda_memory import Cuda


class CudaGraph:
    """A CUDA graph of the work that ``enqueue`` puts on ``stream``. The graph is captured at the second run with the
    same ``key``.

    The key has to identify everything that the kernels depend on (profile, shapes, addresses) except the contents of
    the kernels' buffers. The first run of a key isn't captured, because TensorRT does additional work at new shapes
    (TensorRT's developer guide, "CUDA graphs").
    """

    def __init__(self, cuda: Cuda, stream: int) -> None:
        self._cuda = cuda
        self._stream = stream
        self._key: Hashable = None
        self._graph: int | None = None

    def run(self, key: Hashable, enqueue: Callable[[], bool]) -> bool:
        """Launch the graph, or call ``enqueue`` if ``key`` is new. Returns False if ``enqueue`` fails."""
        if key != self._key:
            self.close()
            self._key = key
            return enqueue()
        if self._graph is None:
            self._cuda.begin_capture(self._stream)
            try:
                enqueued = enqueue()
            finally:  # without this call after an error, the stream would record later work and not run it
                graph = self._cuda.end_capture(self._stream)
            if not enqueued:
                self._cuda.destroy_graph(graph)
                return False
            self._graph = graph
        self._cuda.launch(self._graph, self._stream)
        return True

    def close(self) -> None:
        """Destroy the graph. After that, no key has a graph, so the next call of ``run`` calls ``enqueue``."""
        if self._graph is not None:
            self._cuda.destroy_graph(self._graph)
        self._key = self._graph = None
