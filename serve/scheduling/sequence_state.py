"""Makes the state and control inputs of a stateful model, and takes the states from the model's outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from accel.errors import BadConfig
from accel.signature import numpy_dtype, size_at

from ..protocol.inference import InferenceRequest, InferenceResponse
from .options import Scheduling, SequenceBatching

if TYPE_CHECKING:
    from accel.signature import Signature, TensorSpec

CONTROLS = ("START", "END", "READY", "CORRID")


class ServerInputs:
    """Makes the state and control inputs of a stateful model with the dtypes and shapes of the signature."""

    def __init__(self, signature: Signature, scheduling: Scheduling, options: SequenceBatching) -> None:
        self._options = options
        self._scheduling = scheduling
        self._specs = {spec.name: spec for spec in signature.inputs}
        self._outputs = tuple(spec.name for spec in signature.outputs)

    def unfit(self, sequence_id: int | str) -> TensorSpec | None:
        """Returns the CORRID control input if its dtype can't hold ``sequence_id``, or else None."""
        if corrid := self._options.controls.get("CORRID"):
            try:
                self._correlation(corrid, sequence_id)
            except (TypeError, ValueError, OverflowError):
                return self._specs[corrid]
        return None

    def added(self, request: InferenceRequest, states: Mapping[str, np.ndarray] | None) -> InferenceRequest:
        """Returns the request with the state and control inputs added. ``states`` is None at the start of a
        sequence."""
        inputs = dict(request.inputs)
        for name in self._options.states.values():
            if states is None:
                inputs[name] = self._first(self._specs[name], request.inputs)
            else:
                inputs[name] = states[name]
        applies = {"START": request.sequence_start, "END": request.sequence_end, "READY": True}
        for control, name in self._options.controls.items():
            if control == "CORRID":
                inputs[name] = self._correlation(name, request.sequence_id)
            else:
                inputs[name] = self._control(name, self._options.values.get(control, (0, 1))[applies[control]])
        asked = self._outputs if request.outputs is None else request.outputs
        outputs = (*asked, *(name for name in self._options.states if name not in asked))
        return replace(request, inputs=inputs, outputs=outputs)

    def _correlation(self, name: str, value: int | str) -> np.ndarray:
        if self._specs[name].dtype == "string":
            return np.full(self._one_row(name), str(value), dtype=object)
        return self._control(name, int(value))

    def _control(self, name: str, value: float) -> np.ndarray:
        return np.full(self._one_row(name), np.array(value, dtype=numpy_dtype(self._specs[name].dtype)))

    def _one_row(self, name: str) -> list[int]:
        return [size if isinstance(size, int) else 1 for size in self._specs[name].shape]

    def _first(self, spec: TensorSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the state of a new sequence: the configured initial state, or zeros by default.

        If a state of zeros has a dynamic dim, the dim takes its size from the request's inputs. If no input of the
        request has the dim, such as the number of past steps, the dim gets the size 0.
        """
        if (given := self._options.initial.get(spec.name)) is not None:
            return given[None] if self._scheduling.max_batch_size else given
        known = defaultdict[str, int](int)
        for name in inputs.keys() & self._specs.keys():
            known |= {str(dim): size for dim, size in zip(self._specs[name].shape, inputs[name].shape, strict=False)}
        shape = [size_at(dim, known) for dim in spec.shape]
        if self._scheduling.max_batch_size:
            shape[0] = 1
        return np.full(shape, "", object) if spec.dtype == "string" else np.zeros(shape, numpy_dtype(spec.dtype))

    def kept(self, response: InferenceResponse) -> dict[str, np.ndarray]:
        """Returns copies of the states in ``response``, because the session's arrays may be views of a whole batch."""
        return {to: np.array(response.outputs[output]) for output, to in self._options.states.items()}

    def without(self, response: InferenceResponse, request: InferenceRequest) -> InferenceResponse:
        """Returns ``response`` with the outputs that ``request`` asks for. If ``request`` names no outputs, keeps all
        outputs except the states."""
        asked = request.outputs
        outputs = {
            name: value
            for name, value in response.outputs.items()
            if (name in asked if asked is not None else name not in self._options.states)
        }
        return replace(response, outputs=outputs)


def check_sequence(signature: Signature, options: SequenceBatching, *, name: str) -> None:
    """Raises ``BadConfig`` if a state or control is not a tensor of the model, or has the wrong dtype."""
    inputs, outputs = ({spec.name: spec for spec in specs} for specs in (signature.inputs, signature.outputs))
    for output, to in options.states.items():
        if output not in outputs:
            raise BadConfig(
                f"model '{name}' has no output '{output}' to take a state from; its outputs are: {', '.join(outputs)}"
            )
        if to not in inputs:
            raise BadConfig(f"model '{name}' has no input '{to}' for a state; its inputs are: {', '.join(inputs)}")
        if outputs[output].dtype != inputs[to].dtype:
            raise BadConfig(
                f"model '{name}': the state output '{output}' and the state input '{to}' have different dtypes; "
                "cast one of the two in the model"
            )
    for control, to in options.controls.items():
        if control not in CONTROLS:
            raise BadConfig(f"model '{name}': unknown control '{control}'; use {', '.join(CONTROLS)}")
        if to not in inputs:
            raise BadConfig(f"model '{name}' has no input '{to}' for a control; its inputs are: {', '.join(inputs)}")
    if options.max_sequences < 1 or options.max_idle_us < 0:
        raise BadConfig(f"model '{name}': max_sequences has to be at least 1, and max_idle_us at least 0")
