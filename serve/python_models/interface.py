"""The module ``triton_python_backend_utils`` that a ``model.py`` imports, with the names and behaviour that Triton
documents. A model can't call other models (``exec``), and its tensors are in the memory of the CPU.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..protocol.tensors import BY_CONFIG, DATATYPES, encode

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2

_log = logging.getLogger("model")


class TritonModelException(Exception):
    """Raised for a wrong use of this module. A model may raise it too."""


class TritonError:
    """The error of a response. ``code`` is one of the numbers below."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = str(message), code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message


class Tensor:
    """A tensor with a name. Strings are object arrays of ``bytes`` or ``str``."""

    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, np.asarray(array)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def triton_dtype(self) -> int:
        return _NUMBERS[_datatype(self._array)]

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self._array.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    @classmethod
    def from_dlpack(cls, name: str, given: Any) -> Tensor:
        return cls(name, np.from_dlpack(given))


class InferenceResponse:
    """The answer to one request: tensors, or an error."""

    def __init__(self, output_tensors: Iterable[Tensor] = (), error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class InferenceResponseSender:
    """Sends the responses to one request. ``send`` may be called on any thread, until the final flag is sent."""

    def __init__(self, give: Callable[[InferenceResponse | None, bool], None]) -> None:
        self._give, self._lock = give, threading.Lock()
        self.finished = threading.Event()
        self.cancelled = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        final = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self._lock:
            if self.finished.is_set():
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            if response is None and not final:
                raise TritonModelException("Inference response cannot be empty when the response is not final")
            try:
                self._give(response, final)
            finally:
                if final:
                    self.finished.set()

    def is_cancelled(self) -> bool:
        """Tells whether the client has left. The server only knows after it has taken a response."""
        return self.cancelled


class InferenceRequest:
    """One request of a client."""

    def __init__(
        self,
        *,
        inputs: Sequence[Tensor] = (),
        request_id: str = "",
        correlation_id: int | str = 0,
        requested_output_names: Sequence[str] = (),
        flags: int = 0,
        timeout: int = 0,
        parameters: Any = None,
        sender: InferenceResponseSender | None = None,
        **_: Any,
    ) -> None:
        self._inputs, self._id, self._correlation = list(inputs), request_id, correlation_id
        self._names, self._flags, self._timeout = list(requested_output_names), flags, timeout
        self._parameters, self._sender = parameters or {}, sender

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation

    def requested_output_names(self) -> list[str]:
        return self._names

    def flags(self) -> int:
        return self._flags

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def is_cancelled(self) -> bool:
        return self._sender is not None and self._sender.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            raise TritonModelException("this request did not come from a client")
        return self._sender

    def exec(self, **_: Any) -> Any:
        raise TritonModelException("a model can't call other models here; let an ensemble connect the models")

    async_exec = exec


class Logger:
    """Writes to the log of the server."""

    INFO, WARNING, ERROR, VERBOSE = "INFO", "WARNING", "ERROR", "VERBOSE"

    @staticmethod
    def log(message: str, level: str = INFO) -> None:
        _log.log({"WARNING": 30, "ERROR": 40, "VERBOSE": 10}.get(level, 20), message)

    log_info = staticmethod(_log.info)
    log_warn = staticmethod(_log.warning)
    log_error = staticmethod(_log.error)
    log_verbose = staticmethod(_log.debug)


class ModelConfig:
    """The config that ``auto_complete_config`` completes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        given = self._config.get("max_batch_size", 0)
        if given > max_batch_size:
            raise ValueError(
                f"the config has max_batch_size {given}, but auto_complete_config sets {max_batch_size}; lower the "
                "number in the config"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(f"the config has {other}, but auto_complete_config sets dynamic_batching")
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        if set(policy) - {"decoupled"}:
            raise ValueError(f"model_transaction_policy has only the key decoupled, got: {', '.join(policy)}")
        given = self._config.get("model_transaction_policy") or {}
        if "decoupled" in given and given["decoupled"] != policy.get("decoupled"):
            raise ValueError("the config and auto_complete_config have different values of decoupled")
        self._config["model_transaction_policy"] = policy

    def add_input(self, tensor: dict[str, Any]) -> None:
        self._add("input", tensor, ("name", "data_type", "dims", "optional"))

    def add_output(self, tensor: dict[str, Any]) -> None:
        self._add("output", tensor, ("name", "data_type", "dims"))

    def _add(self, role: str, tensor: dict[str, Any], known: tuple[str, ...]) -> None:
        if missing := [key for key in ("name", "data_type", "dims") if key not in tensor]:
            raise ValueError(f"an {role} of auto_complete_config is missing '{missing[0]}'")
        if unknown := set(tensor) - set(known):
            raise ValueError(f"{role} '{tensor['name']}' of auto_complete_config can't have '{unknown.pop()}'")
        rows = self._config.setdefault(role, [])
        for row in rows:
            if row["name"] == tensor["name"]:
                for key in ("data_type", "dims"):
                    given = row.get(key)
                    if given and given != "TYPE_INVALID" and given != tensor[key]:
                        raise ValueError(
                            f"{role} '{tensor['name']}' has the {key} {given} in the config, but {tensor[key]} in "
                            "auto_complete_config"
                        )
                    row[key] = tensor[key]
                return
        rows.append(dict(tensor))


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((row for row in config.get("input", ()) if row["name"] == name), None)


def get_output_config_by_name(config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((row for row in config.get("output", ()) if row["name"] == name), None)


def using_decoupled_model_transaction_policy(config: dict[str, Any]) -> bool:
    return bool((config.get("model_transaction_policy") or {}).get("decoupled", False))


def triton_string_to_numpy(text: str) -> Any:
    """Returns the numpy type of a config's data type, such as ``TYPE_FP32``."""
    return DATATYPES[BY_CONFIG[text]].numpy.type


def triton_to_numpy_type(number: int) -> Any:
    return DATATYPES[next(name for name, one in _NUMBERS.items() if one == number)].numpy.type


def numpy_to_triton_type(kind: Any) -> int:
    return _NUMBERS[_datatype(np.empty(0, kind))]


def serialize_byte_tensor(tensor: np.ndarray) -> np.ndarray:
    """Returns the raw encoding of a tensor of strings."""
    return np.asarray(bytes(encode(tensor, "BYTES")), dtype=np.object_)


def deserialize_bytes_tensor(encoded: Any) -> np.ndarray:
    """Returns the strings of a raw encoding, as a flat object array of ``bytes``."""
    data, at, found = bytes(encoded), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return np.array(found, dtype=np.object_)


# The numbers of the datatypes in ``model_config.proto``.
_NUMBERS = {
    name: number
    for number, name in enumerate(
        ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
         "BYTES", "BF16"), 1
    )
}  # fmt: skip


def _datatype(array: np.ndarray) -> str:
    """Returns the protocol's name of the array's dtype. Raises ``TritonModelException`` if it has none."""
    if array.dtype.kind in "OSU":
        return "BYTES"
    for kind in DATATYPES.values():
        if kind.numpy == array.dtype:
            return kind.name
    raise TritonModelException(f"tensors can't have the dtype {array.dtype}; cast the array")
