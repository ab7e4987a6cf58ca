"""Proves that the tensors of an ensemble determine the order of its steps, and that errors name the failed step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accel.errors import BadConfig
from accel.serve.models.ensembles.executor import Ensemble, EnsembleExecutor, EnsembleStep
from accel.serve.protocol.inference import Code, Durations, Executor, InferenceResponse, ServeError, infer
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.instances import QueuedExecutor
from accel.serve.scheduling.options import Scheduling
from accel.signature import Signature, TensorSpec
from tests.support.fake_sessions import POISON, SIGNATURE, Caller, FakeSession, request

WHOLE = Signature(
    SIGNATURE.inputs, (TensorSpec("y", "float32", ("batch", 2)), TensorSpec("side", "float32", ("batch",)))
)


def model(name: str, eager: bool = True, start: bool = False) -> tuple[QueuedExecutor, FakeSession]:
    session = FakeSession()
    executor = make_executor(
        SIGNATURE, Scheduling(max_batch_size=8, dynamic=True, eager=eager), lambda: session, name=name, version="1",
        start=start,
    )  # fmt: skip
    assert isinstance(executor, QueuedExecutor)
    return executor, session


def doubling(model: str, takes: str, gives: str, side: str | None = None) -> EnsembleStep:
    """Returns a step that doubles the tensor ``takes`` and writes the result to the tensor ``gives``. The tensor
    ``side``, if given, receives the sums of the rows."""
    return EnsembleStep(model=model, input_map={"x": takes}, output_map={"y": gives} | ({"z": side} if side else {}))


# The steps of this ensemble are listed in a wrong order. The names of the tensors determine the order in which the
# steps run.
DIAMOND = Ensemble(
    steps=(
        doubling("last", "four", "y"),
        doubling("left", "two", "four"),
        doubling("right", "two", "unused", side="side"),
        doubling("first", "x", "two"),
    )
)


def ensemble(steps: Ensemble = DIAMOND, **models: Executor) -> EnsembleExecutor:
    def find(name: str, version: str) -> Executor:
        if name not in models:
            raise ServeError(Code.NOT_FOUND, f"unknown model '{name}'")
        return models[name]

    return EnsembleExecutor(WHOLE, steps, find, name="e", version="1", max_batch_size=8)


@pytest.fixture
def models() -> dict[str, QueuedExecutor]:
    return {name: model(name)[0] for name in ("first", "left", "right", "last")}


def test_steps_run_when_their_inputs_are_there(models: dict[str, QueuedExecutor]) -> None:
    """Fails if steps run in the order of the config, or if a step gets the wrong tensor."""
    executor = ensemble(**models)
    asked = request(3, rows=2)
    response = infer(executor, asked, timeout=0)
    np.testing.assert_array_equal(response.outputs["y"], asked.inputs["x"] * 8)
    np.testing.assert_array_equal(response.outputs["side"], asked.inputs["x"].sum(1) * 2)
    assert list(response.outputs) == ["y", "side"]
    assert (response.model, response.id) == ("e", "3")
    assert list(infer(executor, request(1, outputs=("side",)), timeout=0).outputs) == ["side"]
    found = executor.statistics()
    assert (found.received, found.success.count, found.inference_count) == (2, 2, 3)
    assert found.compute_infer.ns > 0
    assert [m.statistics().success.count for m in models.values()] == [2] * 4


def test_a_failing_step(models: dict[str, QueuedExecutor]) -> None:
    """Checks that the error names the failed step, that the caller gets only one answer, and that no later step
    runs."""
    caller = Caller(ensemble(**models), request(POISON))
    assert caller.code == "INTERNAL"
    assert str(caller.answer) == "in ensemble 'e', step 'first': model 'first' failed: poison"
    assert models["last"].statistics().received == 0


def test_a_step_that_is_not_there(models: dict[str, QueuedExecutor]) -> None:
    """Checks that the caller gets an error if the model of a step isn't loaded, and that later steps don't run."""
    del models["right"]
    caller = Caller(ensemble(**models), request(1))
    assert caller.code == "NOT_FOUND"
    assert models["last"].statistics().success.count == 0


def test_cancelling_cancels_the_steps() -> None:
    """Checks that canceling a request cancels the steps of the request."""
    parts = {name: model(name, eager=False) for name in ("first", "left", "right", "last")}
    executor = ensemble(**{name: part[0] for name, part in parts.items()})
    caller = Caller(executor, request(1))
    assert parts["first"][0].poll()
    assert [parts[name][0].pending() for name in ("left", "right")] == [1, 1]
    caller.ticket.cancel()
    caller.ticket.cancel()
    assert caller.code == "CANCELLED"
    assert [parts[name][0].pending() for name in ("left", "right")] == [0, 0]
    assert (executor.pending(), executor.statistics().cancel.count) == (0, 1)


def test_a_step_that_cannot_be_cancelled() -> None:
    """Checks that a cancel during the submission of a step also cancels this step. Also fails if the caller gets a
    second answer when the canceled step ends later."""
    parts = {name: model(name, eager=False)[0] for name in ("first", "right", "last")}
    cancelled: list[bool] = []
    answers: list[Callable[[Any], None]] = []

    class Stubborn:
        durations = Durations()

        def submit(self, request: Any, answer: Callable[[Any], None]) -> Any:
            answers.append(answer)
            caller.ticket.cancel()
            return self

        def cancel(self) -> None:
            cancelled.append(True)

    steps = Ensemble(steps=(doubling("first", "x", "two"), doubling("left", "two", "y", "side")))
    executor = ensemble(steps, left=Stubborn(), **parts)  # type: ignore[arg-type]
    caller = Caller(executor, request(1))
    parts["first"].poll()
    assert cancelled == [True]
    answers[0](InferenceResponse(model="left", version="1", outputs={"y": np.zeros(1), "z": np.zeros(1)}))
    assert caller.code == "CANCELLED"
    found = executor.statistics()
    assert (found.received, found.fail.count, found.success.count) == (1, 1, 0)


def test_a_long_chain() -> None:
    """Fails if each step runs inside the callback of the previous step, which would overflow the stack."""
    steps = tuple(doubling("m", f"t{i}" if i else "x", f"t{i + 1}") for i in range(600))
    whole = Signature(SIGNATURE.inputs, (TensorSpec("t600", "float32", ("batch", 2)),))
    executor = EnsembleExecutor(whole, Ensemble(steps=steps), lambda *_: model("m")[0], name="e", version="1")
    response = infer(executor, request(0), timeout=0)
    assert not response.outputs["t600"].any()


def test_real_threads() -> None:
    """Fails if a step is lost or counted twice when the answers of steps arrive on other threads."""
    parts = {name: model(name, start=True)[0] for name in ("first", "left", "right", "last")}
    executor = ensemble(**parts)
    wrong: list[Any] = []

    def ask(thread: int) -> None:
        for i in range(40):
            asked = request(thread * 100 + i)
            try:
                response = infer(executor, asked, timeout=20)
                np.testing.assert_array_equal(response.outputs["y"], asked.inputs["x"] * 8)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert executor.statistics().success.count == 320
    executor.close(5)
    for part in parts.values():
        part.close(5)


def test_closing() -> None:
    """Checks that closing the ensemble answers each waiting request, and doesn't close the models of the steps."""
    parts = {name: model(name, eager=False) for name in ("first", "left", "right", "last")}
    executor = ensemble(**{name: part[0] for name, part in parts.items()})
    caller = Caller(executor, request(1))
    executor.close(0.0)
    assert caller.code == "UNAVAILABLE"
    assert Caller(executor, request(2)).code == "UNAVAILABLE"
    assert parts["first"][1].closed == 0
    found = executor.statistics()
    assert found.received == found.fail.count == 2


def test_late_and_unknown_outputs(models: dict[str, QueuedExecutor]) -> None:
    """Fails if a step starts for a request that has passed its deadline or names an unknown output."""
    executor = ensemble(**models)
    assert Caller(executor, request(1, deadline=0.0)).code == "DEADLINE_EXCEEDED"
    assert Caller(executor, request(1, outputs=("two",))).code == "INVALID_ARGUMENT"
    assert models["first"].statistics().received == 0


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ((), "no steps"),
        ((doubling("a", "nowhere", "y", "side"),), "needs tensor 'nowhere', which no step makes"),
        ((doubling("a", "x", "y"),), "no step makes the output 'side'"),
        (
            (doubling("a", "x", "y", "side"), doubling("b", "x", "y")),
            "tensor 'y' comes from step 'a' and from step 'b'",
        ),
        ((doubling("a", "x", "x"),), "tensor 'x' comes from the request"),
        ((doubling("a", "q", "p"), doubling("b", "p", "q"), doubling("c", "q", "y", "side")), "a, b, c wait for each"),
        ((doubling("a", "y", "y", "side"),), "a wait for each other"),
        ((EnsembleStep(model="a", input_map={"x": "x"}, output_map={}),), "makes no tensor"),
    ],
)
def test_steps_that_cannot_be_run(steps: tuple[EnsembleStep, ...], text: str) -> None:
    """Fails if accel accepts an ensemble whose steps would wait forever or mix up tensors."""
    with pytest.raises(BadConfig, match=text):
        ensemble(Ensemble(steps=steps))


def test_a_decoupled_step_is_refused(models: dict[str, QueuedExecutor]) -> None:
    """Fails if an ensemble uses the first response of a stream as the complete output."""

    class Streaming:
        def submit(self, request: Any, answer: Callable[[Any], None]) -> Any:
            answer(InferenceResponse(model="left", version="1", outputs={}, final=False))
            return model("left")[0].submit(request, lambda _: None)

    caller = Caller(ensemble(**{**models, "left": Streaming()}), request(1))  # type: ignore[dict-item]
    assert caller.code == "UNIMPLEMENTED"
