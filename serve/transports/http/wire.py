"""Converts the JSON and the binary tensors of REST v2 to the server's own types and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from accel.errors import one_line

from ...core.server import ModelMetadata
from ...core.transport import InferCall, InferReply, WireInput
from ...protocol.inference import DurationStatistic, ModelStatistics, Parameter
from ...protocol.tensors import DATATYPES, encode, get_datatype, invalid, misfit, takes
from ..parameters import memory_slice, wanted_output

HEADER_LENGTH = "Inference-Header-Content-Length"
# The protocol has no JSON form of FP16 and BF16.
BINARY_ONLY = ("FP16", "BF16")
_MOST_DIGITS = 18  # of a length in bytes
_DEEPEST = 100  # Triton's limit for nested lists


def read_json(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Returns the JSON object in ``body``, or an empty dict if ``body`` is empty. Raises ``ServeError``
    INVALID_ARGUMENT if ``body`` is not a JSON object."""
    try:
        found = json.loads(str(body, "utf-8")) if body else {}
    except (ValueError, RecursionError) as error:
        raise invalid(f"failed to parse the request JSON buffer: {one_line(error, 200)}") from None
    if not isinstance(found, dict):
        raise invalid("the request has to be a JSON object")
    return found


def read_parameters(given: Any) -> dict[str, Parameter]:
    """Returns the parameters in a JSON value. Raises ``ServeError`` INVALID_ARGUMENT if the value is neither None nor
    an object of booleans, numbers and strings."""
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(v, bool | int | float | str) for v in given.values()):
        raise invalid("parameters have to be an object of booleans, numbers and strings")
    return dict(given)


def read_call(model: str, version: str, body: bytes | bytearray, header_length: str | None) -> InferCall:
    """Returns the call that the body of an inference request describes. The first ``header_length`` bytes of ``body``
    are JSON, and the binary tensors follow. Without a ``header_length``, all of ``body`` is JSON."""
    length = len(body)
    if header_length is not None:
        digits = header_length if header_length.isascii() and header_length.isdigit() else ""
        if not digits or len(digits) > _MOST_DIGITS or int(digits) > len(body):
            raise invalid(
                f"invalid {HEADER_LENGTH} header: expected a length of at most the size of the body, got "
                f"'{header_length[:32]}'"
            )
        length = int(digits)
    view = memoryview(body)
    if header_length is not None and not length:
        return _raw(model, version, view)
    head, rest = read_json(view[:length]), view[length:]
    literals = _Literals.of(body, length)
    inputs, used = [], 0
    for row in _rows(head.get("inputs"), "inputs"):
        made, size = _input(row, rest[used:], literals)
        inputs.append(made)
        used += size
    if used != len(rest):
        raise invalid(f"unexpected additional input data for model '{model}': {len(rest) - used} bytes")
    given = read_parameters(head.get("parameters"))
    binary = given.pop("binary_data_output", False)
    outputs = []
    for row in _rows(head.get("outputs", []), "outputs"):
        asked = read_parameters(row.get("parameters"))
        asked.setdefault("binary_data", binary)
        outputs.append(wanted_output(_text(row, "name", "output"), asked))
    request_id = head.get("id", "")
    if not isinstance(request_id, str):
        raise invalid("the id has to be a string")
    call = InferCall(model, version, request_id, inputs, outputs, given)
    call.binary = bool(binary)
    return call


def _raw(model: str, version: str, body: memoryview) -> InferCall:
    """Returns the call of a raw binary request: the body is the tensor of the model's only input. The server fills in
    the input's name, datatype and shape. The outputs are sent in binary."""
    call = InferCall(model, version, inputs=[WireInput(None, "", (), raw=body)])
    call.binary = True
    return call


def _rows(found: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise invalid(f"the {what} of the request have to be a list of objects")
    return found


def _text(row: dict[str, Any], key: str, what: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise invalid(f"each {what} of the request needs a string under the key '{key}'")
    return value


class _Literals(NamedTuple):
    """Tells which words a body has. Without the words, there is no need to look for their values, one by one."""

    booleans: bool
    infinity: bool

    @classmethod
    def of(cls, body: bytes | bytearray, length: int) -> _Literals:
        """Returns the words among the first ``length`` bytes of ``body``."""
        booleans = body.find(b"true", 0, length) >= 0 or body.find(b"false", 0, length) >= 0
        return cls(booleans, body.find(b"Infinity", 0, length) >= 0)


def _input(row: dict[str, Any], rest: memoryview, literals: _Literals) -> tuple[WireInput, int]:
    name, kind = _text(row, "name", "input"), _text(row, "datatype", "input")
    shape = row.get("shape")
    if not isinstance(shape, list) or not all(isinstance(d, int) and not isinstance(d, bool) for d in shape):
        raise invalid(f"the shape of input '{name}' has to be a list of integers")
    given = read_parameters(row.get("parameters"))
    made = WireInput(name, kind, tuple(shape))
    size = given.pop("binary_data_size", None)
    made.slice = memory_slice(given, name)
    ways = [way for way, there in (("data", "data" in row), ("binary_data_size", size is not None)) if there]
    if made.slice is not None:
        ways.append("shared_memory_region")
    if len(ways) != 1:
        raise invalid(f"input '{name}' needs exactly one of data, binary_data_size and a shared memory region")
    if size is not None:
        if isinstance(size, bool | float | str) or not 0 <= size <= len(rest):
            raise invalid(f"binary_data_size of input '{name}' is {size}, but the body has only {len(rest)} bytes left")
        made.raw = rest[:size]
        return made, size
    if "data" in row:
        if kind in BINARY_ONLY:
            raise invalid(f"sending {kind} data via JSON is not supported, use binary data for input '{name}'")
        made.values = _flat(name, kind, row["data"], literals)
    return made, 0


def _flat(name: str, kind: str, data: Any, literals: _Literals) -> Any:
    """Returns the values of a possibly nested list in row-major order. The rows may differ in length, as Triton allows;
    the number of values is compared with the shape later. Raises ``ServeError`` INVALID_ARGUMENT for values that NumPy
    takes for other values: a boolean for 1, and a number beyond float64 for infinity."""
    if not isinstance(data, list):
        data = [data]
    if kind == "BYTES":
        strings = _flattened(name, data)
        if not all(isinstance(value, str) for value in strings):
            raise invalid(f"input '{name}' is BYTES, so its data has to be strings")
        return strings
    if literals.booleans and kind != "BOOL":
        values = _flattened(name, data)
        if any(isinstance(value, bool) for value in values):
            raise misfit(name, get_datatype(name, kind), values)
    is_float = kind in ("FP32", "FP64")
    if data and (is_float or isinstance(data[0], list)):
        try:
            array = np.asarray(data).ravel()  # much faster than ``_leaves``
        except (ValueError, OverflowError):
            return _flattened(name, data)
        if is_float and array.dtype.kind == "f" and not literals.infinity and np.isinf(array).any():
            limit = takes(DATATYPES[kind])
            raise invalid(f"input '{name}' holds a number that is too large, but {kind} takes {limit}")
        if array.dtype.kind in ("fiu" if is_float else "biu"):
            return array
    return _flattened(name, data)


def _flattened(name: str, data: list[Any]) -> list[Any]:
    return data if not any(isinstance(value, list) for value in data) else list(_leaves(name, data, 0))


def _leaves(name: str, data: list[Any], depth: int) -> Iterator[Any]:
    if depth >= _DEEPEST:
        raise invalid(
            f"JSON nesting depth exceeds maximum allowed limit ({_DEEPEST}) in input '{name}'; send a flat list"
        )
    for value in data:
        if isinstance(value, list):
            yield from _leaves(name, value, depth + 1)
        else:
            yield value


def write_reply(reply: InferReply, call: InferCall) -> tuple[list[bytes | memoryview], int | None]:
    """Returns the parts of the response body and the length of the JSON part. The length is None if no binary tensors
    follow the JSON."""
    asked = {output.name: output.parameters.get("binary_data", False) for output in call.outputs or ()}
    rows: list[dict[str, Any]] = []
    blobs: list[bytes | memoryview] = []
    for tensor in reply.outputs:
        row: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        # An output in shared memory has no parameters, because Triton's C++ clients expect binary data for every output
        # with parameters.
        binary = asked.get(tensor.name, call.binary)
        if tensor.array is not None and not binary and tensor.datatype in BINARY_ONLY:
            raise invalid(
                f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format for "
                f"output '{tensor.name}'"
            )
        if tensor.array is not None and binary:
            blob = encode(tensor.array, tensor.datatype)
            row["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        elif tensor.array is not None:
            row["data"] = _values(tensor.array, tensor.datatype)
        rows.append(row)
    body: dict[str, Any] = {"model_name": reply.model, "model_version": reply.version, "outputs": rows}
    if reply.id:
        body["id"] = reply.id
    if reply.parameters:
        body["parameters"] = dict(reply.parameters)
    head = json.dumps(body, separators=(",", ":")).encode()
    return [head, *blobs], len(head) if blobs else None


def _values(array: np.ndarray, kind: str) -> list[Any]:
    if kind == "BYTES":
        try:
            return [value.decode() if isinstance(value, bytes) else str(value) for value in array.ravel()]
        except UnicodeDecodeError:
            raise invalid("an output holds a string that is not UTF-8; request the output with binary_data") from None
    values: list[Any] = array.ravel().tolist()
    return values


def metadata_json(found: ModelMetadata) -> dict[str, Any]:
    """Returns a model's metadata as Triton writes it over HTTP."""

    def rows(tensors: Any) -> list[dict[str, Any]]:
        return [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors]

    return {
        "name": found.name,
        "versions": list(found.versions),
        "platform": found.platform,
        "inputs": rows(found.inputs),
        "outputs": rows(found.outputs),
    }


def statistics_json(name: str, version: str, found: ModelStatistics) -> dict[str, Any]:
    """Returns a model's statistics as Triton writes them over HTTP."""

    def duration(value: DurationStatistic) -> dict[str, int]:
        return {"count": value.count, "ns": value.ns}

    fields = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    return {
        "name": name,
        "version": version,
        "last_inference": found.last_inference_ms,
        "inference_count": found.inference_count,
        "execution_count": found.execution_count,
        "inference_stats": {field: duration(getattr(found, field)) for field in fields},
        "batch_stats": [
            {"batch_size": size}
            | dict(zip(("compute_input", "compute_infer", "compute_output"), map(duration, durations), strict=True))
            for size, durations in sorted(found.batches.items())
        ],
        "response_stats": {},
        "memory_usage": [],
    }
