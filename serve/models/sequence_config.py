"""Reads ``sequence_batching`` of a ``config.pbtxt``: states, controls, their values, and the number of sequences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import BadRepository
from accel.signature import BATCH, Dim, TensorSpec

from ..protocol import messages as proto
from ..protocol.inference import ServeError
from ..protocol.tensors import BY_CONFIG, BY_FIELD, DATATYPES, decode_raw, to_strings
from ..scheduling.options import SequenceBatching

if TYPE_CHECKING:
    from accel.signature import Signature

INITIAL_STATES = "initial_state"  # Triton's folder for initial states, next to the version folders
_KINDS = {
    "CONTROL_SEQUENCE_START": "START",
    "CONTROL_SEQUENCE_READY": "READY",
    "CONTROL_SEQUENCE_END": "END",
    "CONTROL_SEQUENCE_CORRID": "CORRID",
}
# Maps a config field to the dtype of the field's two values. A control's input gets the first value for false and the
# second value for true.
_VALUES = {"int32_false_true": "int32", "fp32_false_true": "float32", "bool_false_true": "bool"}


def sequence_batching(config: Any, signature: Signature, folder: Path | None) -> SequenceBatching | None:
    """Returns the options of a stateful model, or None if the config has no ``sequence_batching``.

    ``folder`` is the model's folder. Raises ``BadRepository`` if the config contradicts the model or needs an
    unsupported feature.
    """
    if not config.HasField("sequence_batching"):
        return None
    given = config.sequence_batching
    if given.iterative_sequence:
        raise _refused(config, "iterative_sequence is not supported; let the client send each step")
    if given.direct.minimum_slot_utilization:
        raise _refused(
            config, "minimum_slot_utilization is not supported; use the strategy oldest with a preferred_batch_size"
        )
    most = given.oldest.max_candidate_sequences
    if most < 0:
        raise _refused(config, f"max_candidate_sequences is {most}; write a number of at least 0")
    inputs = {spec.name: spec for spec in signature.inputs}
    outputs = {spec.name: spec for spec in signature.outputs}
    controls: dict[str, str] = {}
    values: dict[str, tuple[float, float]] = {}
    for entry in given.control_input:
        if len(entry.control) != 1:
            raise _refused(
                config, f"the control input '{entry.name}' has {len(entry.control)} controls; write exactly one"
            )
        [control] = entry.control
        kind = _KINDS[type(control).DESCRIPTOR.fields_by_name["kind"].enum_type.values_by_number[control.kind].name]
        if kind in controls or entry.name in controls.values():
            raise _refused(config, f"the control {kind} or its input '{entry.name}' comes twice; remove one")
        controls[kind] = entry.name
        spec = _there(config, "control input", entry.name, inputs)
        if kind == "CORRID":
            _check_dtype(config, "control input", spec, control.data_type)
        else:
            values[kind] = _false_true(config, kind, spec, control)
    states: dict[str, str] = {}
    initial: dict[str, np.ndarray] = {}
    for state in given.state:
        spec = _there(config, "state input", state.input_name, inputs)
        out = _there(config, "state output", state.output_name, outputs)
        if state.output_name in states or state.input_name in states.values():
            raise _refused(config, f"the state '{state.input_name}' comes twice; remove one")
        for one in (spec, out):
            _check_dtype(config, "state", one, state.data_type)
            _check_dims(config, one, state.dims)
        states[state.output_name] = state.input_name
        if len(state.initial_state) > 1:
            raise _refused(config, f"the state '{state.input_name}' has several initial states; keep one")
        for first in state.initial_state:
            initial[state.input_name] = _initial(config, spec, first, folder)
    return SequenceBatching(
        states=states,
        controls=controls,
        values=values,
        initial=initial,
        max_idle_us=given.max_sequence_idle_microseconds or SequenceBatching.max_idle_us,
        max_sequences=most or SequenceBatching.max_sequences,
    )


def server_tensors(config: Any) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns the inputs and outputs that ``sequence_batching`` adds to those of the config: controls and states. Other
    models have these tensors in their files; Python code has no file that declares them."""
    batch: tuple[Dim, ...] = (BATCH,) if config.max_batch_size > 0 else ()

    def dtype(number: int) -> str:
        return DATATYPES[BY_CONFIG[proto.enum_name("DataType", number)]].field

    inputs, outputs = [], []
    for entry in config.sequence_batching.control_input:
        for control in entry.control[:1]:
            kinds = [kind for field, kind in _VALUES.items() if getattr(control, field)]
            kind = kinds[0] if kinds else dtype(control.data_type) if control.data_type else "uint64"
            inputs.append(TensorSpec(entry.name, kind, (*batch, 1)))
    for state in config.sequence_batching.state:
        dims = tuple(f"{state.input_name}_{axis}" if dim < 0 else int(dim) for axis, dim in enumerate(state.dims))
        inputs.append(TensorSpec(state.input_name, dtype(state.data_type), (*batch, *dims)))
        outputs.append(TensorSpec(state.output_name, dtype(state.data_type), (*batch, *dims)))
    return tuple(inputs), tuple(outputs)


def _refused(config: Any, what: str) -> BadRepository:
    return BadRepository(f"model '{config.name}', sequence_batching: {what}")


def _there(config: Any, role: str, name: str, specs: dict[str, TensorSpec]) -> TensorSpec:
    if name not in specs:
        raise _refused(config, f"the model has no {role} '{name}'; choose from: {', '.join(specs)}")
    return specs[name]


def _check_dtype(config: Any, role: str, spec: TensorSpec, number: int) -> None:
    said = BY_CONFIG.get(proto.enum_name("DataType", number))
    if number and said != BY_FIELD.get(spec.dtype):
        raise _refused(
            config,
            f"the {role} '{spec.name}' has dtype {said} in the config and {spec.dtype} in the model; correct the "
            "config",
        )


def _rows_left_out(config: Any, spec: TensorSpec) -> tuple[int | str, ...]:
    return spec.shape[1:] if config.max_batch_size else spec.shape


def _check_dims(config: Any, spec: TensorSpec, dims: Any) -> None:
    wanted = _rows_left_out(config, spec)
    fits = len(dims) == len(wanted) and all(
        isinstance(own, str) or said in (own, -1) for own, said in zip(wanted, dims, strict=True)
    )
    if dims and not fits:
        own = ["-1" if isinstance(dim, str) else str(dim) for dim in wanted]
        raise _refused(
            config,
            f"the state '{spec.name}' has dims {list(dims)} in the config and [{', '.join(own)}] in the model; "
            "correct the config",
        )


def _false_true(config: Any, kind: str, spec: TensorSpec, control: Any) -> tuple[float, float]:
    """Returns the two values of a control's input: the value that means false and the value that means true."""
    found = [(field, list(getattr(control, field))) for field in _VALUES if getattr(control, field)]
    if len(found) != 1 or len(found[0][1]) != 2:
        raise _refused(
            config, f"the control {kind} needs a value for false and a value for true in one of: {', '.join(_VALUES)}"
        )
    [(field, (false, true))] = found
    if spec.dtype != _VALUES[field]:
        right = next((name for name, dtype in _VALUES.items() if dtype == spec.dtype), "another input")
        raise _refused(
            config, f"control {kind} uses {field}, but the input '{spec.name}' has dtype {spec.dtype}; use {right}"
        )
    return false, true


def _initial(config: Any, spec: TensorSpec, given: Any, folder: Path | None) -> np.ndarray:
    """Returns the state of a new sequence, without the batch dim."""
    _check_dtype(config, "initial state of", spec, given.data_type)
    dims = tuple(int(dim) for dim in given.dims)
    if any(dim < 0 for dim in dims):
        raise _refused(config, f"the initial state of '{spec.name}' has dims {list(dims)}; write the size of each dim")
    wanted = _rows_left_out(config, spec)
    if len(dims) != len(wanted) or any(
        isinstance(own, int) and own != dim for own, dim in zip(wanted, dims, strict=True)
    ):
        raise _refused(
            config,
            f"the initial state of '{spec.name}' has dims {list(dims)}, but the model takes {spec}; correct the config",
        )
    kind = DATATYPES[BY_FIELD[spec.dtype]]
    if given.WhichOneof("state_data") != "data_file":
        # 4 zero bytes are the length of an empty string.
        raw, source = bytes(math.prod(dims) * (4 if kind.name == "BYTES" else kind.numpy.itemsize)), "zero_data"
    else:
        name, source = given.data_file, f"{INITIAL_STATES}/{given.data_file}"
        if Path(name).name != name or folder is None:
            raise _refused(config, f"the initial state's data_file {name!r} has to be a plain file name")
        try:
            raw = (folder / INITIAL_STATES / name).read_bytes()
        except OSError as error:
            raise _refused(
                config, f"can't read the file {source} ({error.strerror}); put the file into the model's folder"
            ) from None
    try:
        found = decode_raw(spec.name, kind.name, dims, raw, config.name)
        return to_strings(spec.name, found, config.name) if kind.name == "BYTES" else found
    except ServeError as error:
        raise _refused(config, f"the data in {source} doesn't fit the state '{spec.name}': {error}") from None
