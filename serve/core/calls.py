"""Turns a transport's call into the request for a model, and the model's response into the reply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..protocol.inference import InferenceRequest, InferenceResponse, Parameter
from ..protocol.tensors import DATATYPES, decode_raw, decode_typed, encode, invalid, to_bytes, to_strings
from .classification import classify
from .transport import InferCall, InferReply, ReplyTensor, WantedOutput, WireInput

if TYPE_CHECKING:
    import numpy as np

    from ..models.model import ServedModel
    from .shared_memory import SharedMemory

_FINAL = "triton_final_response"
_EMPTY_FINAL = "triton_enable_empty_final_response"
_SCHEDULING = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")


def read_request(model: ServedModel, call: InferCall, memory: SharedMemory) -> InferenceRequest:
    """Returns the request for ``model`` that ``call`` describes. Raises ``ServeError`` INVALID_ARGUMENT if the inputs,
    outputs or parameters of ``call`` don't fit the model."""
    inputs: dict[str, np.ndarray] = {}
    for given in call.inputs:
        if given.name is None:
            given = _only_input(model, given)
        assert given.name is not None
        if given.name in inputs:
            raise invalid(f"input '{given.name}' already exists in request for model '{model.name}'")
        inputs[given.name] = _array(model, given, memory)
    model.check_inputs(inputs)
    names: tuple[str, ...] | None = tuple(model.outputs)
    if call.outputs:
        names = tuple(output.name for output in call.outputs)
        for name in names:
            if name not in model.outputs:
                raise invalid(f"unexpected inference output '{name}' for model '{model.name}'")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise invalid(f"output '{twice}' already exists in request for model '{model.name}'")
    return _with_parameters(
        InferenceRequest(
            model=model.name,
            version=model.version,
            id=call.id,
            inputs=inputs,
            outputs=names,
            deadline=call.deadline,
            inline=call.single,  # a thread that reads a stream must not run requests
            gathering=call.gathering,
        ),
        call.parameters,
    )


def _only_input(model: ServedModel, given: WireInput) -> WireInput:
    """Returns the input of a raw binary request with the name, the datatype and the shape of the model's only input.

    Raises ``ServeError`` INVALID_ARGUMENT if the size of the body doesn't tell the shape. The rules are Triton's.
    """
    if len(model.inputs) != 1:
        raise invalid(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(model.inputs)} inputs in "
            f"'{model.name}' model configuration"
        )
    [spec] = model.inputs.values()
    body = given.raw or b""
    shape = list(spec.shape)
    if model.scheduling.max_batch_size:
        shape[0] = 1
    unknown = [axis for axis, dim in enumerate(shape) if dim < 0]
    known = math.prod(dim for dim in shape if dim >= 0)
    if len(unknown) > 1:
        raise invalid(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    if spec.datatype == "BYTES":
        if unknown or known != 1:
            raise invalid(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        body = len(body).to_bytes(4, "little") + bytes(body)
    elif unknown:
        shape[unknown[0]] = len(body) // max(1, known * DATATYPES[spec.datatype].numpy.itemsize)
    return WireInput(spec.name, spec.datatype, shape, raw=body)


def _array(model: ServedModel, given: WireInput, memory: SharedMemory) -> np.ndarray:
    assert given.name is not None
    spec = model.check_input(given.name, given.datatype, given.shape)
    if given.values is not None:
        found = decode_typed(given.name, given.datatype, given.shape, given.values, model.name)
    else:
        raw = memory.read(given.slice) if given.slice is not None else given.raw
        if raw is None:
            raise invalid(f"input '{given.name}' for model '{model.name}' came without data")
        found = decode_raw(given.name, given.datatype, given.shape, raw, model.name)
    return to_strings(given.name, found, model.name) if spec.datatype == "BYTES" and not model.takes_bytes else found


def _with_parameters(request: InferenceRequest, given: Mapping[str, Parameter]) -> InferenceRequest:
    """Set the fields of ``request`` from the parameters that the protocol defines. Keep the remaining parameters in
    ``request.parameters``.
    """
    if not given:
        return request
    rest = {}
    for key, value in given.items():
        if key in _SCHEDULING:
            _set(request, key, value)
        elif key.startswith("triton_") and key != _EMPTY_FINAL:
            raise invalid(f"parameter keys starting with 'triton_' are reserved for Triton usage, got '{key[:64]}'")
        else:
            rest[key] = value
    request.parameters = rest
    return request


def _set(request: InferenceRequest, key: str, value: Parameter) -> None:
    if key == "sequence_id":
        if isinstance(value, bool | float):
            raise invalid("sequence_id has to be an integer or a string")
        request.sequence_id = value
    elif key in ("sequence_start", "sequence_end"):
        if not isinstance(value, bool):
            raise invalid(f"{key} has to be a boolean")
        setattr(request, key, value)
    else:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise invalid(f"{key} has to be 0 or a positive integer")
        setattr(request, "timeout_us" if key == "timeout" else key, value)


def make_reply(model: ServedModel, call: InferCall, found: InferenceResponse, memory: SharedMemory) -> InferReply:
    """Returns the reply to ``call``. Classifies the outputs for which ``call`` requests classes. Writes outputs to
    shared memory if ``call`` requests it."""
    wanted = {output.name: output for output in call.outputs or ()}
    tensors = []
    for name, value in found.outputs.items():
        asked = wanted.get(name) or WantedOutput(name)
        kind = model.outputs[name].datatype
        if asked.classification:
            value = classify(
                value, asked.classification, model.outputs[name].labels, bool(model.scheduling.max_batch_size)
            )
            kind = "BYTES"
        elif kind == "BYTES":
            value = to_bytes(value)
        tensors.append(_placed(name, kind, value, asked, memory))
    parameters, hidden = dict(found.parameters), False
    if not call.single:
        parameters[_FINAL] = found.final
        hidden = not tensors and found.final and not call.parameters.get(_EMPTY_FINAL)
    return InferReply(found.model, found.version, call.id, tensors, parameters, found.final, hidden)


def _placed(name: str, kind: str, value: np.ndarray, asked: WantedOutput, memory: SharedMemory) -> ReplyTensor:
    if asked.slice is None:
        return ReplyTensor(name, kind, value.shape, value)
    body = encode(value, kind)
    if len(body) > asked.slice.byte_size:
        raise invalid(
            f"shared memory size specified with the request for output '{name}' ({asked.slice.byte_size} bytes) "
            f"should be at least {len(body)} bytes to hold the results"
        )
    memory.write(asked.slice, body)
    return ReplyTensor(name, kind, value.shape, None, asked.slice)
