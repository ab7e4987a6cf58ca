"""Holds one loaded version of a model, and checks each request before the request is executed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel.signature import IntegerRanges

from ..protocol.inference import (
    Answer,
    Code,
    Executor,
    InferenceRequest,
    InferenceResponse,
    ModelStatistics,
    ServeError,
    Ticket,
)
from ..protocol.tensors import DATATYPES, invalid, shape_text
from ..scheduling.options import Scheduling
from ..scheduling.statistics import Recorder, merged
from .config import ModelConfig, datatype

if TYPE_CHECKING:
    import numpy as np

    from accel.signature import Signature


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """An input or output as clients see it. ``shape`` includes the batch dim, and has -1 for each dynamic dim."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()


class Retired(Exception):
    """Raised if a request's version was replaced after the lookup. The caller has to look up the model again."""


@dataclass(kw_only=True, eq=False)
class ServedModel:
    """A loaded version of a model. ``files`` is the fingerprint of the version's files. If the fingerprint changes, the
    server loads the version again. ``required`` names the inputs that a request must have. ``ranges`` holds the value
    ranges that the manifest declares for the integer inputs. ``takes_bytes`` is True if the model takes strings of any
    bytes, and not only text."""

    name: str
    version: str
    config: ModelConfig
    signature: Signature
    scheduling: Scheduling
    executor: Executor
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    files: Any = None
    ranges: IntegerRanges = field(default_factory=IntegerRanges)
    takes_bytes: bool = False
    inputs: dict[str, ServedTensor] = field(init=False)
    outputs: dict[str, ServedTensor] = field(init=False)
    required: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        batch = (-1,) if self.scheduling.max_batch_size else ()
        optional = self.scheduling.optional_inputs
        self.inputs = {
            t.name: ServedTensor(t.name, datatype(t), (*batch, *t.dims), t.optional or t.name in optional)
            for t in self.config.input
        }
        self.outputs = {
            t.name: ServedTensor(t.name, datatype(t), (*batch, *t.dims), labels=self.labels.get(t.name, ()))
            for t in self.config.output
        }
        self.required = frozenset(name for name, t in self.inputs.items() if not t.optional)
        self._entered = 0
        self._retired = False
        self._state = threading.Condition()
        self._recorder = Recorder()  # counts requests that never reach the executor
        self._recording = threading.Lock()

    def check_input(self, name: str, kind: str, shape: Sequence[int]) -> ServedTensor:
        """Returns the model's input with the name ``name``. Raises ``ServeError`` INVALID_ARGUMENT if the name, the
        datatype or the shape doesn't fit the model."""
        spec = self.inputs.get(name)
        if spec is None:
            raise invalid(f"unexpected inference input '{name}' for model '{self.name}'")
        if kind != spec.datatype:
            if kind not in DATATYPES:
                raise invalid(f"unsupported data type '{kind}' for input '{name}', use one of {', '.join(DATATYPES)}")
            raise invalid(
                f"inference input '{name}' data-type is '{kind}', but model '{self.name}' expects '{spec.datatype}'"
            )
        wanted = spec.shape
        if len(shape) != len(wanted) or any(
            size < 0 or (size != dim and dim >= 0) for size, dim in zip(shape, wanted, strict=True)
        ):
            note = (
                " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
                "prepended to each input shape."
                if self.scheduling.max_batch_size
                else ""
            )
            if min(shape, default=0) < 0:
                note = " NOTE: -1 stands for any size; send the real one."
            raise invalid(
                f"unexpected shape for input '{name}' for model '{self.name}'. Expected {shape_text(wanted)}, "
                f"got {shape_text(shape)}.{note}"
            )
        return spec

    def check_inputs(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Raises ``ServeError`` INVALID_ARGUMENT if an input is missing or an integer is outside the range that the
        manifest declares. Raises ``ServeError`` INVALID_ARGUMENT if the batch sizes of the inputs differ, are 0 or are
        too large."""
        if found := self.ranges.first_outside(inputs):
            raise invalid(f"{found} for model '{self.name}'")
        if missing := self.required.difference(inputs):
            got = ",".join(f"'{name}'" for name in inputs)
            lacking = ",".join(f"'{name}'" for name in self.inputs if name in missing)
            raise invalid(
                f"expected {len(self.inputs)} inputs but got {len(inputs)} inputs for model '{self.name}'. Got "
                f"input(s) [{got}], but missing required input(s) [{lacking}]. Please provide all required input(s)."
            )
        largest = self.scheduling.max_batch_size
        if not largest or not inputs:
            return
        first = next(iter(inputs.values())).shape[0]
        for name, value in inputs.items():
            if value.shape[0] != first:
                raise invalid(f"input '{name}' batch size does not match other inputs for '{self.name}'")
        if first > largest:
            raise invalid(f"inference request batch-size must be <= {largest} for '{self.name}'")
        if first == 0:
            raise invalid(f"inference request batch-size must be >= 1 for '{self.name}'")

    def submit(self, request: InferenceRequest, answer: Answer) -> Ticket:
        """Passes the request to the executor. Raises ``Retired`` if the version was replaced since the lookup."""
        with self._state:
            if self._retired:
                raise Retired
            self._entered += 1
        try:
            return self.executor.submit(request, answer)
        finally:
            with self._state:
                self._entered -= 1
                if not self._entered:
                    self._state.notify_all()

    def refused(self, error: ServeError, ns: int) -> None:
        """Counts a request that failed with ``error`` after ``ns`` nanoseconds and never reached the executor."""
        with self._recording:
            self._recorder.received()
            self._recorder.failed(error, ns)

    def spoiled(self, response: InferenceResponse) -> None:
        """Counts a request as failed instead of successful. The executor counted the request as successful, but the
        client got an error."""
        with self._recording:
            self._recorder.spoiled(response.durations)

    def statistics(self) -> ModelStatistics:
        """Returns the statistics of this version since its loading, including refused requests."""
        # The recorder subtracts successes that the executor counted wrongly. The recorder is copied before the
        # executor's statistics are read. Otherwise, the recorder might subtract a success that the executor's
        # statistics don't contain yet.
        with self._recording:
            own = self._recorder.copy()
        return merged(self.executor.statistics(), own)

    def retire(self, timeout: float) -> None:
        """Refuses new requests, waits at most ``timeout`` seconds for accepted requests, and releases the model."""
        with self._state:
            self._retired = True
            self._state.wait_for(lambda: not self._entered, timeout)
        self.executor.close(timeout)


def unknown(name: str, version: str = "") -> ServeError:
    """Returns the error for a model or version that isn't served. The message is the same as in Triton."""
    which = f"'{name}' version {version}" if version else f"'{name}'"
    return ServeError(Code.NOT_FOUND, f"Request for unknown model: {which} is not found")
