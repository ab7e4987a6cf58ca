"""An engine's kernels as one CUDA graph: a launch for all of them instead of one each."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel.runtimes.cuda_memory import Cuda


class CudaGraph:
    """What ``enqueue`` puts on ``stream``, captured when it is asked for the same ``key`` a second time.

    The key has to hold whatever the kernels depend on but the contents of their buffers: profile, shapes, addresses.
    The first run of a key is a plain one: TensorRT then sets up what the shapes need, which can't be captured
    (TensorRT's developer guide, "CUDA graphs").
    """

    def __init__(self, cuda: Cuda, stream: int) -> None:
        self._cuda = cuda
        self._stream = stream
        self._key: Hashable = None
        self._graph: int | None = None

    def run(self, key: Hashable, enqueue: Callable[[], bool]) -> bool:
        """Whether everything is on the stream."""
        if key != self._key:
            self.close()
            self._key = key
            return enqueue()
        if self._graph is None:
            self._cuda.begin_capture(self._stream)
            try:
                enqueued = enqueue()
            finally:  # a stream that stays in capture mode can do nothing else
                graph = self._cuda.end_capture(self._stream)
            if not enqueued:
                self._cuda.destroy_graph(graph)
                return False
            self._graph = graph
        self._cuda.launch(self._graph, self._stream)
        return True

    def close(self) -> None:
        """Give the graph back; the next run of any key is a plain one."""
        if self._graph is not None:
            self._cuda.destroy_graph(self._graph)
        self._key = self._graph = None
