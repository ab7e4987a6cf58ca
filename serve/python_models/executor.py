"""Gives Python code the requests of a batch one by one, and not as one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.inference import InferenceResponse, ServeError
from ..scheduling.batcher import RowBatching
from ..scheduling.decoupled import DecoupledExecutor
from ..scheduling.executor import Forms
from ..scheduling.instances import QueuedExecutor
from ..scheduling.queue import Entry
from .session import Answers, RequestFeeds

if TYPE_CHECKING:
    import numpy as np


class RequestBatching(RowBatching):
    """Chooses requests as ``RowBatching`` does, but keeps them apart."""

    def stack(self, entries: Sequence[Entry]) -> Mapping[str, np.ndarray]:
        made = RequestFeeds(entries[0].request.inputs)
        made.requests = [entry.request for entry in entries]
        return made

    def split(self, outputs: Mapping[str, Any], entries: Sequence[Entry]) -> list[Any]:  # noqa: ARG002
        assert isinstance(outputs, Answers)
        return list(outputs.parts)


class _Responses(QueuedExecutor):
    def _response(self, entry: Entry, outputs: Any) -> Any:
        """Returns the error of the request, or its response with the requested outputs that the model gave."""
        if isinstance(outputs, ServeError):
            return outputs
        asked = entry.request.outputs
        return InferenceResponse(
            model=self.name,
            version=self.version,
            id=entry.request.id,
            outputs={name: outputs[name] for name in (outputs if asked is None else asked) if name in outputs},
            durations=entry.durations,
        )


class PythonExecutor(_Responses):
    """Runs the requests of a Python model."""


class DecoupledPythonExecutor(_Responses, DecoupledExecutor):
    """Runs the requests of a decoupled Python model."""


FORMS = Forms(queued=PythonExecutor, decoupled=DecoupledPythonExecutor, rows=RequestBatching)
