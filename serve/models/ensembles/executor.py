"""Runs ensembles, which are several models that clients call as a single model. Each step of an ensemble runs one of
the models. A step's outputs can be the inputs of other steps. A step runs as soon as all its inputs exist."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from accel.errors import BadConfig

from ...protocol.inference import (
    Answer,
    Code,
    Durations,
    InferenceRequest,
    InferenceResponse,
    ModelStatistics,
    ServeError,
    StepDurations,
    Ticket,
)
from ...scheduling.queue import too_late
from ...scheduling.statistics import Recorder, ns

if TYPE_CHECKING:
    import numpy as np

    from accel.signature import Signature

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EnsembleStep:
    """One model of an ensemble.

    An empty ``version`` means the newest served version. ``input_map`` maps each input of the model to a tensor of the
    ensemble. ``output_map`` maps each output of the model to a tensor of the ensemble.
    """

    model: str
    version: str = ""
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """The steps of an ensemble, in any order. The order of execution follows from the tensors that each step needs and
    makes."""

    steps: tuple[EnsembleStep, ...]


class Step(Protocol):
    """The part of an ``Executor`` that an ensemble needs to run a step."""

    def submit(self, request: InferenceRequest, answer: Answer) -> Ticket: ...


# Looks up the executor of a model by name and version. Raises ``ServeError`` if the model isn't served.
Find = Callable[[str, str], Step]


class _Run:
    """The progress of one request through the steps of an ensemble. ``EnsembleExecutor.submit`` returns this object as
    the request's ``Ticket``."""

    def __init__(self, executor: EnsembleExecutor, request: InferenceRequest, answer: Answer, arrived: float) -> None:
        self.executor = executor
        self.request = request
        self.answer = answer
        self.arrived = arrived
        self.durations = Durations()
        self.tensors: dict[str, np.ndarray] = dict(request.inputs)
        self.ready: deque[int] = deque()
        self.started: set[int] = set()
        self.tickets: dict[int, Ticket] = {}
        self.results: dict[int, InferenceResponse] = {}
        self.finished = 0
        self.done = False

    def cancel(self) -> None:
        self.executor.fail(self, ServeError(Code.CANCELLED, "Request was cancelled"))


class EnsembleExecutor:
    """An ``Executor`` that runs each step on the executor of another model. ``find`` looks up the model of a step again
    for each request, because the model may be reloaded between two requests.

    Raises ``BadConfig`` if a step needs a missing tensor, if two steps make the same tensor, or if the steps form a
    cycle.
    """

    def __init__(
        self,
        signature: Signature,
        ensemble: Ensemble,
        find: Find,
        *,
        name: str,
        version: str,
        max_batch_size: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        check_ensemble(signature, ensemble, name=name)
        self.name = name
        self.version = version
        self._steps = ensemble.steps
        self._needs = [frozenset(step.input_map.values()) for step in ensemble.steps]
        self._outputs = tuple(spec.name for spec in signature.outputs)
        self._batched = max_batch_size > 0
        self._find = find
        self._clock = clock
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._recorder = Recorder(wall)
        self._runs: dict[_Run, None] = {}
        self._closing = False

    def submit(self, request: InferenceRequest, answer: Answer) -> Ticket:
        """Starts the steps whose inputs exist. If a step's model has an idle instance, the step runs in this thread."""
        now = self._clock()
        run = _Run(self, request, answer, now)
        with self._lock:
            self._recorder.received()
            try:
                self._check(request, now)
            except ServeError as error:
                self._recorder.failed(error, ns(self._clock() - now))
                raise
            self._runs[run] = None
            self._make_ready(run)
        self._pump(run)
        return run

    def _check(self, request: InferenceRequest, now: float) -> None:
        if self._closing:
            raise ServeError(Code.UNAVAILABLE, f"model '{self.name}' version {self.version} is being unloaded")
        if request.deadline is not None and request.deadline <= now:
            raise too_late()
        for output in request.outputs or ():
            if output not in self._outputs:
                raise ServeError(
                    Code.INVALID_ARGUMENT, f"unexpected inference output '{output}' for model '{self.name}'"
                )

    def _make_ready(self, run: _Run) -> None:
        for i, needs in enumerate(self._needs):
            if i not in run.started and needs <= run.tensors.keys():
                run.started.add(i)
                run.ready.append(i)

    def _pump(self, run: _Run) -> None:
        """Starts the steps that are ready.

        A step may be answered before the step's ``submit`` returns. ``_pump`` still waits for the return and then
        starts the next steps, so that calls of ``submit`` don't nest.
        """
        while True:
            with self._lock:
                if run.done or not run.ready:
                    return
                i = run.ready.popleft()
            self._start(run, i)

    def _start(self, run: _Run, i: int) -> None:
        step, request = self._steps[i], run.request
        asked = replace(
            request,
            model=step.model,
            version=step.version,
            inputs={name: run.tensors[tensor] for name, tensor in step.input_map.items()},
            outputs=tuple(step.output_map),
        )
        try:
            ticket = self._find(step.model, step.version).submit(asked, partial(self._answered, run, i))
        except ServeError as error:
            self.fail(run, self._of_step(step, error))
            return
        with self._lock:
            run.tickets[i] = ticket
            cancelled = run.done and i not in run.results
        if cancelled:
            ticket.cancel()
        self._advance(run, i)

    def _of_step(self, step: EnsembleStep, error: ServeError) -> ServeError:
        return ServeError(error.code, f"in ensemble '{self.name}', step '{step.model}': {error}")

    def _answered(self, run: _Run, i: int, result: InferenceResponse | ServeError) -> None:
        step = self._steps[i]
        if isinstance(result, ServeError):
            self.fail(run, self._of_step(step, result))
        elif not result.final:
            self.fail(run, self._of_step(step, ServeError(Code.UNIMPLEMENTED, "decoupled models can't be a step")))
        elif missing := [name for name in step.output_map if name not in result.outputs]:
            self.fail(run, self._of_step(step, ServeError(Code.INTERNAL, f"no output '{missing[0]}' came")))
        else:
            with self._lock:
                run.results[i] = result
            self._advance(run, i)
            self._pump(run)

    def _advance(self, run: _Run, i: int) -> None:
        """Stores the outputs of step ``i`` as soon as the step has both a ticket and an answer."""
        with self._lock:
            if run.done or i not in run.tickets or i not in run.results:
                return
            step, result, ticket = self._steps[i], run.results.pop(i), run.tickets.pop(i)
            for output, tensor in step.output_map.items():
                run.tensors[tensor] = result.outputs[output]
            spent, total = ticket.durations, run.durations
            total.queue += spent.queue
            total.compute_input += spent.compute_input
            total.compute_infer += spent.compute_infer
            total.compute_output += spent.compute_output
            total.steps = [*(total.steps or ()), StepDurations(step.model, result.version, spent, time.time_ns())]
            run.finished += 1
            self._make_ready(run)
            if run.finished < len(self._steps):
                return
            self._end(run)
            rows = next(iter(run.request.inputs.values())).shape[0] if self._batched and run.request.inputs else 1
            self._recorder.executed(rows, run.durations)
            self._recorder.succeeded(run.durations)
        names = self._outputs if run.request.outputs is None else run.request.outputs
        self._give(
            run,
            InferenceResponse(
                model=self.name,
                version=self.version,
                id=run.request.id,
                outputs={name: run.tensors[name] for name in names},
                durations=run.durations,
            ),
        )

    def _end(self, run: _Run) -> None:
        run.done = True
        run.durations.total = ns(self._clock() - run.arrived)
        self._runs.pop(run, None)

    def fail(self, run: _Run, error: ServeError) -> None:
        """Answers the request of ``run`` with ``error`` and cancels the running steps, unless the request already has
        an answer."""
        with self._lock:
            if run.done:
                return
            self._end(run)
            self._recorder.failed(error, run.durations.total)
            tickets = list(run.tickets.values())
        for ticket in tickets:
            ticket.cancel()
        self._give(run, error)

    def _give(self, run: _Run, result: InferenceResponse | ServeError) -> None:
        try:
            run.answer(result)
        except Exception:
            _LOG.exception("model %s: an answer could not be delivered", self.name)
        with self._lock:
            if not self._runs:
                self._drained.notify_all()

    def statistics(self) -> ModelStatistics:
        """Returns the ensemble's statistics. The queue and compute durations are sums over the steps."""
        with self._lock:
            return self._recorder.copy()

    def pending(self) -> int:
        with self._lock:
            return len(self._runs)

    def close(self, timeout: float) -> None:
        """Refuses new requests, waits at most ``timeout`` seconds for accepted requests, and fails the rest. The
        executors of the steps belong to other models and stay open."""
        with self._lock:
            self._closing = True
            self._drained.wait_for(lambda: not self._runs, timeout)
            left = list(self._runs)
        for run in left:
            self.fail(run, ServeError(Code.UNAVAILABLE, f"model '{self.name}' version {self.version} was unloaded"))


def check_ensemble(signature: Signature, ensemble: Ensemble, *, name: str) -> None:
    """Raises ``BadConfig`` if the steps can't be run."""
    if not ensemble.steps:
        raise BadConfig(f"ensemble '{name}' has no steps; add one")
    made_by: dict[str, str] = {spec.name: "the request" for spec in signature.inputs}
    for step in ensemble.steps:
        if not step.output_map:
            raise BadConfig(
                f"ensemble '{name}': step '{step.model}' makes no tensor; map an output of the step to a tensor"
            )
        for tensor in step.output_map.values():
            if tensor in made_by:
                raise BadConfig(
                    f"ensemble '{name}': tensor '{tensor}' comes from {made_by[tensor]} and from step '{step.model}'; "
                    "give each tensor its own name"
                )
            made_by[tensor] = f"step '{step.model}'"
    for step in ensemble.steps:
        for tensor in step.input_map.values():
            if tensor not in made_by:
                raise BadConfig(
                    f"ensemble '{name}': step '{step.model}' needs tensor '{tensor}', which no step makes; "
                    "map an output of a step to the tensor"
                )
    for spec in signature.outputs:
        if spec.name not in made_by:
            raise BadConfig(
                f"ensemble '{name}': no step makes the output '{spec.name}'; map an output of a step to this output"
            )
    there = {spec.name for spec in signature.inputs}
    left = list(ensemble.steps)
    while left:
        ready = [step for step in left if there.issuperset(step.input_map.values())]
        if not ready:
            raise BadConfig(
                f"ensemble '{name}': the steps {', '.join(step.model for step in left)} wait for each other; break the "
                "cycle in their input_maps"
            )
        for step in ready:
            there.update(step.output_map.values())
            left.remove(step)
