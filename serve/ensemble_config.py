"""An ensemble's ``config.pbtxt``: models of the repository as steps of one that has no file of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.errors import BadRepository
from accel.serve.ensemble import Ensemble, EnsembleExecutor, EnsembleStep
from accel.serve.inference import Answer, Executor, InferenceRequest, Ticket
from accel.serve.model import Retired, ServedModel
from accel.serve.model_config import ModelConfig, datatype
from accel.serve.tensors import DATATYPES
from accel.signature import BATCH, Dim, Signature, TensorSpec

Get = Callable[[str, str], ServedModel]


def is_ensemble(config: ModelConfig) -> bool:
    return bool(config.platform == "ensemble" or config.HasField("ensemble_scheduling"))


def complete_ensemble(config: ModelConfig, name: str) -> Signature:
    """Fill in what the config leaves out; the signature that it declares. ``BadRepository`` where it declares none."""
    if config.name and config.name != name:
        raise BadRepository(f"model '{name}' calls itself '{config.name}' in its config; the folder's name counts")
    if not config.input or not config.output or not config.ensemble_scheduling.step:
        raise BadRepository(f"ensemble '{name}' has to have input, output and ensemble_scheduling in its config")
    config.name, config.platform = name, "ensemble"
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    batching = config.max_batch_size > 0
    return Signature(
        tuple(_spec(name, tensor, batching) for tensor in config.input),
        tuple(_spec(name, tensor, batching) for tensor in config.output),
    )


def _spec(name: str, tensor: Any, batching: bool) -> TensorSpec:
    if not tensor.data_type or not tensor.dims:
        raise BadRepository(f"ensemble '{name}': '{tensor.name}' has to have a data_type and dims")
    dims: list[Dim] = [BATCH] if batching else []
    dims += [f"{tensor.name}_{axis}" if dim < 0 else int(dim) for axis, dim in enumerate(tensor.dims)]
    return TensorSpec(tensor.name, DATATYPES[datatype(tensor)].field, tuple(dims))


def make_ensemble(config: ModelConfig, signature: Signature, get: Get, version: str) -> Executor:
    """The executor that runs the steps on whichever versions serve at the time."""
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


class _Serving:
    """A model by its name: a request goes to what serves when it comes."""

    def __init__(self, get: Get, name: str, version: str) -> None:
        self._get, self._name, self._version = get, name, version
        get(name, version)  # ``ServeError`` where there is no such model

    def submit(self, request: InferenceRequest, answer: Answer) -> Ticket:
        while True:
            try:
                return self._get(self._name, self._version).submit(request, answer)
            except Retired:
                continue
