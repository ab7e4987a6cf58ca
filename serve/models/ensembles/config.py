"""Reads an ensemble's ``config.pbtxt`` and checks its steps, which are other models of the repository."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from accel.errors import BadRepository
from accel.signature import Signature

from ...protocol.inference import Answer, Executor, InferenceRequest, ServeError, Ticket
from ...protocol.tensors import shape_text, to_strings
from ..config import ModelConfig, datatype, declared_signature
from ..model import Retired, ServedModel, ServedTensor
from .executor import Ensemble, EnsembleExecutor, EnsembleStep

Get = Callable[[str, str], ServedModel]


class StepMissing(BadRepository):
    """Raised if the model of a step isn't served. The server tries the ensemble again after the step's model is
    loaded."""


def is_ensemble(config: ModelConfig) -> bool:
    return bool(config.platform == "ensemble" or config.HasField("ensemble_scheduling"))


def complete_ensemble(config: ModelConfig, name: str) -> Signature:
    """Fills in the missing fields of ``config`` and returns the signature that ``config`` declares.

    Raises ``BadRepository`` if the config lacks inputs, outputs or steps, or has a field that an ensemble can't have.
    """
    if config.name and config.name != name:
        raise BadRepository(
            f"the config of model '{name}' has the name '{config.name}', but a model is named after its folder; "
            "remove the field 'name'"
        )
    if not config.input or not config.output or not config.ensemble_scheduling.step:
        raise BadRepository(f"ensemble '{name}' has to have input, output and ensemble_scheduling in its config")
    given = {
        "response_cache": config.response_cache.enable,
        "instance_group": bool(config.instance_group),
        "model_transaction_policy": config.model_transaction_policy.decoupled,
    }
    if refused := [field for field, there in given.items() if there]:
        raise BadRepository(
            f"ensemble '{name}' can't have the field {refused[0]}; move the field to the configs of the steps"
        )
    config.name, config.platform = name, "ensemble"
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    for tensor in config.input:
        if tensor.optional:
            raise BadRepository(
                f"ensemble '{name}': a step needs the input '{tensor.name}', so the input can't be optional; remove "
                "optional"
            )
    for tensor in (*config.input, *config.output):
        if tensor.HasField("reshape"):
            raise BadRepository(f"ensemble '{name}', '{tensor.name}': reshape is not supported; remove reshape")
    return declared_signature(config, f"ensemble '{name}'", scalars=True)


def make_ensemble(config: ModelConfig, signature: Signature, get: Get, version: str) -> Executor:
    """Returns an executor for the ensemble. Each step runs on the version that is served at the time of the request."""
    steps = tuple(
        EnsembleStep(
            model=step.model_name,
            version=str(step.model_version) if step.model_version > 0 else "",
            input_map=dict(step.input_map),
            output_map=dict(step.output_map),
        )
        for step in config.ensemble_scheduling.step
    )
    return EnsembleExecutor(
        signature,
        Ensemble(steps=steps),
        lambda model, number: _Serving(get, model, number),
        name=config.name,
        version=version,
        max_batch_size=config.max_batch_size,
    )


def step_names(config: ModelConfig) -> list[str]:
    """Returns the names of an ensemble's models without duplicates. Returns an empty list if ``config`` doesn't
    describe an ensemble."""
    return list(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def steps_first(names: Iterable[str], steps_of: Callable[[str], Iterable[str]]) -> list[str]:
    """Returns ``names``, extended by the steps of the ensembles in ``names``. Each name is listed once. An ensemble is
    listed after its steps.

    If ensembles form a cycle, one of the ensembles comes before its steps and fails to load.
    """
    order: dict[str, None] = {}
    seen: set[str] = set()
    left = [(name, False) for name in reversed(list(names))]
    while left:
        name, behind_its_steps = left.pop()
        if behind_its_steps:
            order[name] = None
        elif name not in seen:
            seen.add(name)
            left.append((name, True))
            left += [(step, False) for step in reversed(list(steps_of(name)))]
    return list(order)


def check_steps(config: ModelConfig, get: Get) -> None:
    """Checks that every step names a served model that fits the ensemble.

    Raises ``BadRepository`` if a model can't be a step, and ``StepMissing`` if a model isn't served.
    """
    name, largest = config.name, config.max_batch_size
    batch = (-1,) if largest else ()
    known = {t.name: (f"the ensemble's input is {_kind(t, batch)}", _tensor(t, batch)) for t in config.input}
    takers: list[tuple[str, str, ServedTensor]] = []
    for step in config.ensemble_scheduling.step:
        model = _step_model(name, step, get)
        tensors = [*((k, model.inputs) for k in step.input_map), *((k, model.outputs) for k in step.output_map)]
        for key, there in tensors:
            if key not in there:
                role = "input" if there is model.inputs else "output"
                raise BadRepository(
                    f"ensemble '{name}' maps the {role} '{key}' of step '{model.name}', which has only: "
                    f"{', '.join(there)}"
                )
        if lacking := sorted(model.required.difference(step.input_map)):
            raise BadRepository(f"ensemble '{name}' maps no tensor to the input '{lacking[0]}' of step '{model.name}'")
        rows = model.scheduling.max_batch_size
        if largest and (rows < largest if rows else any(there[key].shape[:1] != (-1,) for key, there in tensors)):
            raise BadRepository(
                f"ensemble '{name}' allows maximum batch size {largest}, but it contains model '{model.name}' which "
                f"allows maximum batch size {rows}; lower the ensemble's max_batch_size"
            )
        takers += [(tensor, f"step '{model.name}' takes", model.inputs[key]) for key, tensor in step.input_map.items()]
        for key, tensor in step.output_map.items():
            made = model.outputs[key]
            known[tensor] = (f"step '{model.name}' makes {made.datatype} {shape_text(made.shape)}", made)
    takers += [(t.name, "the ensemble's output is", _tensor(t, batch)) for t in config.output]
    for tensor, who, wanted in takers:
        source, made = known[tensor]
        if made.datatype != wanted.datatype or not _may_agree(made.shape, wanted.shape):
            raise BadRepository(
                f"ensemble '{name}' has two types for tensor '{tensor}': {source} and {who} {wanted.datatype} "
                f"{shape_text(wanted.shape)}; make the types agree"
            )


def _step_model(name: str, step: Any, get: Get) -> ServedModel:
    try:
        model = get(step.model_name, str(step.model_version) if step.model_version > 0 else "")
    except ServeError as error:
        raise StepMissing(f"ensemble '{name}' depends on '{step.model_name}', which is not served ({error})") from None
    if model.scheduling.decoupled:
        raise BadRepository(
            f"ensemble '{name}': the decoupled model '{model.name}' can't be a step; call the model directly"
        )
    return model


def step_labels(config: ModelConfig, get: Get) -> dict[str, tuple[str, ...]]:
    """Returns the labels of the ensemble's outputs that the steps have, as in Triton."""
    outputs = {tensor.name for tensor in config.output}
    found: dict[str, tuple[str, ...]] = {}
    for step in config.ensemble_scheduling.step:
        labels = _step_model(config.name, step, get).labels
        found |= {tensor: labels[key] for key, tensor in step.output_map.items() if key in labels and tensor in outputs}
    return found


def _tensor(tensor: Any, batch: tuple[int, ...]) -> ServedTensor:
    return ServedTensor(tensor.name, datatype(tensor), (*batch, *tensor.dims))


def _kind(tensor: Any, batch: tuple[int, ...]) -> str:
    return f"{datatype(tensor)} {shape_text((*batch, *tensor.dims))}"


def _may_agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


class _Serving:
    """Looks up a model by name for each request, so that the request goes to the currently served version."""

    def __init__(self, get: Get, name: str, version: str) -> None:
        self._get, self._name, self._version = get, name, version
        get(name, version)  # raises ``ServeError`` if the model isn't served

    def submit(self, request: InferenceRequest, answer: Answer) -> Ticket:
        while True:
            try:
                model = self._get(self._name, self._version)
                return model.submit(request if model.takes_bytes else _with_texts(request), answer)
            except Retired:
                continue


def _with_texts(request: InferenceRequest) -> InferenceRequest:
    """Returns the request with strings in place of bytes. Raises ``ServeError`` INVALID_ARGUMENT if bytes aren't
    UTF-8."""
    found = {
        name: to_strings(name, value, request.model)
        for name, value in request.inputs.items()
        if value.dtype.hasobject and any(isinstance(item, bytes) for item in value.flat)
    }
    return replace(request, inputs={**request.inputs, **found}) if found else request
