"""Converts between the protobuf messages of the protocol and the server's own types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...core.server import ModelMetadata
from ...core.transport import InferCall, InferReply, Slice, WantedOutput, WireInput
from ...protocol import messages as proto
from ...protocol.inference import DurationStatistic, ModelStatistics, Parameter
from ...protocol.tensors import DATATYPES, encode, invalid
from ..parameters import memory_slice, wanted_output
from .message import LARGE, ReceivedRequest

_InferResponse = proto.message("ModelInferResponse")
# The tag of an entry of raw_output_contents: the number of the field, and the wire type of bytes.
_LONG_ID = 64
_RAW_TAG = bytes([_InferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | 2])


def parameters(given: Mapping[str, Any]) -> dict[str, Parameter]:
    """Converts a map of ``InferParameter`` to plain Python values."""
    found: dict[str, Parameter] = {}
    for key, value in given.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is None:
            raise invalid(f"parameter '{key[:64]}' has no value")
        found[key] = getattr(value, kind)
    return found


def set_parameters(target: Any, values: Mapping[str, Parameter]) -> None:
    """Writes plain Python values into a map of ``InferParameter``."""
    for key, value in values.items():
        if isinstance(value, bool):
            target[key].bool_param = value
        elif isinstance(value, int):
            target[key].int64_param = value
        elif isinstance(value, float):
            target[key].double_param = value
        else:
            target[key].string_param = value


def read_call(received: ReceivedRequest) -> InferCall:
    """Returns the call that a ``ModelInferRequest`` describes. Raises ``ServeError`` INVALID_ARGUMENT if a parameter is
    malformed, or if the raw and typed contents contradict each other."""
    request, raws = received.message, received.raws
    used = 0
    inputs = []
    for tensor in request.inputs:
        place = memory_slice(parameters(tensor.parameters), tensor.name) if tensor.parameters else None
        made = WireInput(tensor.name, tensor.datatype, tuple(tensor.shape), slice=place)
        if place is not None:
            if tensor.HasField("contents"):
                raise invalid(f"input '{tensor.name}' has both contents and a shared memory region")
        elif raws:
            if tensor.HasField("contents"):
                raise invalid(
                    f"contents field must not be specified when using raw_input_contents for '{tensor.name}' "
                    f"for model '{request.model_name}'"
                )
            if used >= len(raws):
                raise invalid(
                    f"expected one entry of raw_input_contents for each input without shared memory for model "
                    f"'{request.model_name}', got {len(raws)}"
                )
            made.raw = raws[used]
            used += 1
        else:
            made.values = _typed(tensor)
        inputs.append(made)
    if used != len(raws):
        raise invalid(
            f"expected one entry of raw_input_contents for each input without shared memory for model "
            f"'{request.model_name}', got {len(raws)} for {used} inputs"
        )
    return InferCall(
        model=request.model_name,
        version=request.model_version,
        id=request.id,
        inputs=inputs,
        outputs=[_wanted(output) for output in request.outputs],
        parameters=parameters(request.parameters) if request.parameters else {},
    )


def _typed(tensor: Any) -> Any:
    kind = DATATYPES.get(tensor.datatype)
    if kind is not None and kind.contents is None:
        raise invalid(f"input '{tensor.name}' has datatype {tensor.datatype}; send its data in raw_input_contents")
    # An unknown datatype is reported later, when the inputs are checked against the model.
    wanted = kind.contents if kind else None
    for field, _ in tensor.contents.ListFields():
        if field.name != wanted:
            raise invalid(
                f"input '{tensor.name}' has datatype {tensor.datatype}, but its contents are in the field {field.name}"
            )
    return getattr(tensor.contents, wanted) if wanted else ()


def _wanted(output: Any) -> WantedOutput:
    if not output.parameters:
        return WantedOutput(output.name)
    given = parameters(output.parameters)
    return wanted_output(output.name, given)


class Reply:
    """A ModelInferResponse that is written without copying its tensors into a protobuf message first."""

    __slots__ = ("_head", "_raws")

    def __init__(self, head: bytes, raws: list[bytes | memoryview]) -> None:
        self._head, self._raws = head, raws

    def SerializeToString(self) -> bytes:
        """Returns the bytes of the message, as protobuf's method of this name does."""
        return b"".join(self.parts())

    def parts(self) -> tuple[bytes | memoryview, ...]:
        """Returns the bytes of the message in parts. Joins the parts of a small message."""
        parts: list[bytes | memoryview] = [self._head]
        size = 0
        for raw in self._raws:
            parts += (_RAW_TAG, _varint(len(raw)), raw)
            size += len(raw)
        return tuple(parts) if size > LARGE else (b"".join(parts),)

    def message(self) -> Any:
        """Returns the protobuf message."""
        made = _InferResponse.FromString(self._head)
        made.raw_output_contents.extend(map(bytes, self._raws))  # one at a time
        return made


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes((*made, number))


def write_reply(reply: InferReply) -> Reply:
    """Returns a ``ModelInferResponse``. Each output has an entry in ``raw_output_contents``. If an output is in shared
    memory, the output's entry is empty."""
    outputs = tuple([(tensor.name, tensor.datatype, tuple(tensor.shape), tensor.slice) for tensor in reply.outputs])
    write = _write_head if reply.parameters or len(reply.id) > _LONG_ID else _kept_head
    head = write(reply.model, reply.version, reply.id, outputs, reply.parameters or None)
    return Reply(
        head, [b"" if tensor.array is None else encode(tensor.array, tensor.datatype) for tensor in reply.outputs]
    )


def _write_head(
    model: str,
    version: str,
    name: str,
    outputs: Sequence[tuple[str, str, Sequence[int], Slice | None]],
    parameters: Mapping[str, Parameter] | None,
) -> bytes:
    """Returns a ``ModelInferResponse`` without its tensors. ``name`` is the id of the request."""
    response = _InferResponse(model_name=model, model_version=version, id=name)
    if parameters:
        set_parameters(response.parameters, parameters)
    for output, datatype, shape, place in outputs:
        made = response.outputs.add(name=output, datatype=datatype, shape=shape)
        if place is not None:
            where: dict[str, Parameter] = {
                "shared_memory_region": place.region,
                "shared_memory_byte_size": place.byte_size,
            }
            if place.offset:
                where["shared_memory_offset"] = place.offset
            set_parameters(made.parameters, where)
    return bytes(response.SerializeToString())


_kept_head = lru_cache(256)(_write_head)  # most responses differ from an earlier one only in their tensors


def write_metadata(found: ModelMetadata) -> Any:
    """Returns a ``ModelMetadataResponse``."""
    response = proto.message("ModelMetadataResponse")(name=found.name, versions=found.versions, platform=found.platform)
    for target, tensors in ((response.inputs, found.inputs), (response.outputs, found.outputs)):
        for tensor in tensors:
            target.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return response


def write_statistics(target: Any, name: str, version: str, found: ModelStatistics) -> None:
    """Fills one ``ModelStatistics`` message with the statistics of a version."""
    target.name, target.version = name, version
    target.last_inference = found.last_inference_ms
    target.inference_count = found.inference_count
    target.execution_count = found.execution_count
    stats = target.inference_stats
    for field in (
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
    ):  # fmt: skip
        _duration(getattr(stats, field), getattr(found, field))
    for size, durations in sorted(found.batches.items()):
        row = target.batch_stats.add(batch_size=size)
        for field, value in zip(("compute_input", "compute_infer", "compute_output"), durations, strict=True):
            _duration(getattr(row, field), value)


def _duration(target: Any, value: DurationStatistic) -> None:
    target.count, target.ns = value.count, value.ns
    target.SetInParent()
