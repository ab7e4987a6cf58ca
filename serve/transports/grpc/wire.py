"""Between the protobuf messages of the protocol and the server's own types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.serve import proto
from accel.serve.inference import DurationStatistic, ModelStatistics, Parameter
from accel.serve.server import ModelMetadata
from accel.serve.tensors import DATATYPES, encode, invalid
from accel.serve.transport import InferCall, InferReply, Slice, WantedOutput, WireInput

_InferResponse = proto.message("ModelInferResponse")


def parameters(given: Mapping[str, Any]) -> dict[str, Parameter]:
    """``InferParameter`` by name as plain values."""
    found: dict[str, Parameter] = {}
    for key, value in given.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is None:
            raise invalid(f"parameter '{key[:64]}' has no value")
        found[key] = getattr(value, kind)
    return found


def set_parameters(target: Any, values: Mapping[str, Parameter]) -> None:
    """Plain values into a map of ``InferParameter``."""
    for key, value in values.items():
        if isinstance(value, bool):
            target[key].bool_param = value
        elif isinstance(value, int):
            target[key].int64_param = value
        elif isinstance(value, float):
            target[key].double_param = value
        else:
            target[key].string_param = value


def memory_slice(given: dict[str, Parameter], name: str) -> Slice | None:
    """The shared memory that a tensor's parameters name; taken out of them."""
    region = given.pop("shared_memory_region", None)
    if region is None:
        return None
    size, offset = given.pop("shared_memory_byte_size", None), given.pop("shared_memory_offset", 0)
    if not isinstance(region, str) or isinstance(size, bool | float | str) or size is None:
        raise invalid(f"shared_memory_byte_size has to be given as an integer for '{name}' with shared_memory_region")
    if isinstance(offset, bool | float | str):
        raise invalid(f"shared_memory_offset has to be an integer for '{name}'")
    return Slice(region, size, offset)


def read_call(request: Any) -> InferCall:
    """A ``ModelInferRequest``. ``INVALID_ARGUMENT`` where its raw and typed contents don't go together."""
    raws = list(request.raw_input_contents)
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
                    f"expected as many raw_input_contents as inputs without shared memory for model "
                    f"'{request.model_name}', got {len(raws)}"
                )
            made.raw = raws[used]
            used += 1
        else:
            made.values = _typed(tensor)
        inputs.append(made)
    if used != len(raws):
        raise invalid(
            f"expected as many raw_input_contents as inputs without shared memory for model '{request.model_name}', "
            f"got {len(raws)} for {used}"
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
        raise invalid(f"input '{tensor.name}' is {tensor.datatype}, which goes into raw_input_contents only")
    # An unknown datatype is reported with the other things that a model doesn't take.
    wanted = kind.contents if kind else None
    for field, _ in tensor.contents.ListFields():
        if field.name != wanted:
            raise invalid(f"input '{tensor.name}' is {tensor.datatype}, its contents are in {field.name}")
    return getattr(tensor.contents, wanted) if wanted else ()


def _wanted(output: Any) -> WantedOutput:
    if not output.parameters:
        return WantedOutput(output.name)
    given = parameters(output.parameters)
    return wanted_output(output.name, given)


def wanted_output(name: str, given: dict[str, Parameter]) -> WantedOutput:
    """A requested output from its name and parameters."""
    place = memory_slice(given, name)
    count = given.pop("classification", 0)
    if isinstance(count, bool | float | str) or count < 0:
        raise invalid(f"classification has to be the number of classes for output '{name}'")
    if count and place is not None:
        raise invalid(f"output '{name}' can't be both a classification and in shared memory")
    return WantedOutput(name, count, place, given)


def write_reply(reply: InferReply) -> Any:
    """A ``ModelInferResponse``: always raw contents, an empty entry for what lies in shared memory."""
    response = _InferResponse(model_name=reply.model, model_version=reply.version, id=reply.id)
    if reply.parameters:
        set_parameters(response.parameters, reply.parameters)
    for tensor in reply.outputs:
        made = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if tensor.slice is not None:
            place = tensor.slice
            where: dict[str, Parameter] = {
                "shared_memory_region": place.region,
                "shared_memory_byte_size": place.byte_size,
            }
            if place.offset:
                where["shared_memory_offset"] = place.offset
            set_parameters(made.parameters, where)
        response.raw_output_contents.append(
            b"" if tensor.array is None else bytes(encode(tensor.array, tensor.datatype))
        )
    return response


def write_metadata(found: ModelMetadata) -> Any:
    """A ``ModelMetadataResponse``."""
    response = proto.message("ModelMetadataResponse")(name=found.name, versions=found.versions, platform=found.platform)
    for target, tensors in ((response.inputs, found.inputs), (response.outputs, found.outputs)):
        for tensor in tensors:
            target.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return response


def write_statistics(target: Any, name: str, version: str, found: ModelStatistics) -> None:
    """Fill one ``ModelStatistics`` message."""
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
