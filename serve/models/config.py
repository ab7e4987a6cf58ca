"""Reads ``config.pbtxt``, completes and checks the config against the model's signature, and derives the scheduling
options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format

from accel.errors import BadRepository, one_line
from accel.signature import BATCH, Dim, DimRange, Signature, TensorSpec

from ..protocol import messages as proto
from ..protocol.tensors import BY_CONFIG, BY_FIELD, DATATYPES
from ..scheduling.options import LengthBatching, QueuePolicy, Scheduling
from ..scheduling.profiles import Profile, rows_of
from .sequence_config import sequence_batching
from .shapes import model_dims

# ``ModelConfig`` is a protobuf message. Type annotations can't name the message's class, because ``messages.py`` makes
# the class at run time.
ModelConfig = Any

# Maps each kind of model to Triton's names for its platform and its backend. A kind that is missing in ``PLATFORMS``
# uses its own name as the platform and as the backend.
PLATFORMS = {
    "onnx": ("onnxruntime_onnx", "onnxruntime"),
    "openvino": ("openvino", "openvino"),
    "engine": ("tensorrt_plan", "tensorrt"),
    "torch": ("pytorch_libtorch", "pytorch"),
}
# accel's own options are entries of the config's ``parameters``, so that Triton can still read the file.
LENGTH_DIM, LENGTH_MASK, LENGTH_PAD, THREADS = "length_dim", "length_mask", "length_pad", "threads"
# If ``length_grouping`` is "cost" (the default), the server forms the cheapest batches. If ``length_grouping`` is
# "none", the server batches requests in the order of arrival.
LENGTH_GROUPING = "length_grouping"
QUEUE_ROWS, QUEUE_BYTES = "queue_rows", "queue_bytes"
TOOLKIT = "toolkit"  # the runtime of an engine without a manifest: tensorrt (the default) or tensorrt-rtx
_MAX_CONFIG = 1 << 20
_NO_BATCH = -(1 << 31)


def parse(text: str, where: str) -> ModelConfig:
    """Reads the text of a ``config.pbtxt``. If the text can't be parsed, raises ``BadRepository`` with the line in the
    message."""
    config = proto.message("ModelConfig")()
    if len(text) > _MAX_CONFIG:
        raise BadRepository(f"the config {where} is larger than {_MAX_CONFIG} bytes; a valid config has a few lines")
    try:
        text_format.Parse(text, config, descriptor_pool=proto.POOL)
    except (text_format.ParseError, RecursionError) as error:
        raise BadRepository(
            f"can't read the config {where}: {one_line(error)}; see Triton's model configuration"
        ) from None
    return config


def parse_json(text: str, where: str) -> ModelConfig:
    """Reads the JSON config of a load request. Raises ``BadRepository`` if the text can't be parsed."""
    config = proto.message("ModelConfig")()
    try:
        json_format.Parse(text, config, descriptor_pool=proto.POOL)
    except (json_format.ParseError, RecursionError) as error:
        raise BadRepository(f"can't read {where}: {one_line(error)}; send a ModelConfig as JSON") from None
    return config


def to_json(config: ModelConfig) -> dict[str, Any]:
    """Returns the config as the JSON of Triton's HTTP API."""
    body: dict[str, Any] = json_format.MessageToDict(
        config,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        descriptor_pool=proto.POOL,
    )
    for tensor in (*body.get("input", ()), *body.get("output", ())):  # protobuf's JSON writes int64 as text
        tensor["dims"] = [int(dim) for dim in tensor.get("dims", ())]
    return body


def complete(
    config: ModelConfig,
    name: str,
    signature: Signature,
    kind: str,
    *,
    batch_given: bool,
    gpu: bool = False,
    alone: bool = False,
) -> None:
    """Fills in the missing fields of ``config`` and checks the other fields against the model's ``signature``.

    ``batch_given`` is True if the file sets ``max_batch_size``. The argument ``batch_given`` is needed because a
    protobuf message doesn't tell an unset ``max_batch_size`` from 0. ``gpu`` is True if the model runs on a GPU by
    default. If ``alone`` is True, dynamic batching is off by default, so that requests of different callers are not
    batched together. Raises ``BadRepository`` if the config contradicts the model.
    """
    if config.name and config.name != name:
        raise BadRepository(
            f"the config of model '{name}' has the name '{config.name}', but a model is named after its folder; "
            "remove the field 'name'"
        )
    config.name = name
    platform, backend = PLATFORMS.get(kind, (kind, kind))
    config.platform = config.platform or platform
    config.backend = config.backend or backend
    if not batch_given and not config.input and not config.output:
        config.max_batch_size = _largest_batch(signature)
        if config.max_batch_size and not alone and not config.HasField("sequence_batching"):
            config.dynamic_batching.SetInParent()
    batching = config.max_batch_size > 0
    if batching:
        _check_batch(name, signature)
    for role, found, specs in (
        ("input", config.input, signature.inputs),
        ("output", config.output, signature.outputs),
    ):
        _complete_tensors(name, role, found, specs, batching, kept_by_server(config))
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if not config.instance_group:
        config.instance_group.add(name=name, count=1, kind="KIND_GPU" if gpu else "KIND_CPU")


def _check_batch(name: str, signature: Signature) -> None:
    """Raises ``BadRepository`` if the first dim of an input is not the batch."""
    fixed = next((spec for spec in signature.inputs if not spec.shape or isinstance(spec.shape[0], int)), None)
    if fixed is not None or signature.batch_dim is None:
        lacks = f"input {fixed} has no dynamic first dim" if fixed else "the inputs share no dynamic batch dim"
        raise BadRepository(
            f"model '{name}' can't batch requests, because {lacks}; set max_batch_size to 0, or export the model with "
            "a dynamic first dim"
        )


def declared_signature(config: ModelConfig, what: str, *, scalars: bool = False) -> Signature:
    """Returns the signature that ``config`` declares. ``what`` is the model's name in error messages.

    If ``scalars`` is True, a tensor without dims is a single number, or one number for each row of a batch. If
    ``scalars`` is False, a tensor without dims raises ``BadRepository``. A tensor without a ``data_type`` always raises
    ``BadRepository``.
    """

    def spec(tensor: Any) -> TensorSpec:
        shape = model_dims(tensor)
        if not tensor.data_type or not (shape or scalars or tensor.HasField("reshape")):
            lacks = "dims" if tensor.data_type else "a data_type"
            raise BadRepository(f"{what}: tensor '{tensor.name}' has to have {lacks}; add {lacks} to the config")
        dims: list[Dim] = [BATCH] if config.max_batch_size > 0 else []
        dims += [f"{tensor.name}_{axis}" if dim < 0 else int(dim) for axis, dim in enumerate(shape)]
        return TensorSpec(tensor.name, DATATYPES[datatype(tensor)].field, tuple(dims))

    return Signature(tuple(map(spec, config.input)), tuple(map(spec, config.output)))


def _complete_tensors(
    name: str, role: str, found: Any, specs: Iterable[TensorSpec], batching: bool, hidden: set[str]
) -> None:
    by_name = {spec.name: spec for spec in specs}
    for tensor in found:
        spec = by_name.get(tensor.name)
        if spec is None:
            has = ", ".join(by_name)
            raise BadRepository(
                f"model '{name}' has no {role} '{tensor.name}'; write one of these in the config: {has}"
            )
        wanted = config_dtype(spec)
        if not tensor.data_type:
            tensor.data_type = wanted
        elif tensor.data_type != wanted:
            raise BadRepository(
                f"model '{name}', {role} '{spec.name}': the config has the data type "
                f"{proto.enum_name('DataType', tensor.data_type)}, but the model has "
                f"{proto.enum_name('DataType', wanted)}"
            )
        dims = config_dims(spec, batching)
        if not tensor.dims and not tensor.HasField("reshape"):
            tensor.dims.extend(dims)
        if not dims and not batching and tensor.dims and set(tensor.dims) == {1}:
            tensor.reshape.SetInParent()  # the model takes a single number, which clients see as a tensor of one number
        given = list(model_dims(tensor))
        if len(given) != len(dims) or any(a != b and -1 not in (a, b) for a, b in zip(given, dims, strict=True)):
            note = "; with max_batch_size above 0, the dims don't include the batch" if batching else ""
            what = "reshape" if tensor.HasField("reshape") else "dims"
            raise BadRepository(
                f"model '{name}', {role} '{spec.name}': the config's {what} are {given}, but the model's dims are "
                f"{dims}{note}"
            )
    listed = {tensor.name for tensor in found}
    if listed and role == "output":
        return  # an output that the config leaves out is hidden from clients
    for spec in by_name.values():
        if spec.name not in listed | hidden:
            found.add(name=spec.name, data_type=config_dtype(spec), dims=config_dims(spec, batching))


def kept_by_server(config: ModelConfig) -> set[str]:
    """Returns the names of the tensors that stay on the server: the states and controls of a sequence."""
    batching = config.sequence_batching
    states = {name for state in batching.state for name in (state.input_name, state.output_name)}
    return states | {entry.name for entry in batching.control_input}


def config_dtype(spec: TensorSpec) -> int:
    """Returns the protobuf enum number for the dtype of ``spec``. Raises ``BadRepository`` if the protocol lacks the
    dtype."""
    if spec.dtype not in BY_FIELD:
        raise BadRepository(
            f"tensor '{spec.name}' has dtype {spec.dtype}, which the Open Inference Protocol lacks; cast the tensor in "
            "the model"
        )
    return proto.enum_number("DataType", DATATYPES[BY_FIELD[spec.dtype]].config)


def config_dims(spec: TensorSpec, batching: bool) -> list[int]:
    """Returns the dims of ``spec`` in the form of a config. A dynamic dim is -1, and the batch dim is left out if
    ``batching`` is True."""
    dims = [-1 if isinstance(dim, str) else dim for dim in spec.shape]
    return dims[1:] if batching else dims


def datatype(tensor: Any) -> str:
    """Returns the protocol's name for the dtype of a config's input or output."""
    return BY_CONFIG[proto.enum_name("DataType", tensor.data_type)]


def _largest_batch(signature: Signature) -> int:
    """Returns the model's largest batch size, or 0 if the first dim of an input or output is not the batch."""
    batch = signature.batch_dim
    specs = (*signature.inputs, *signature.outputs)
    if batch is None or not all(spec.shape and spec.shape[0] == batch for spec in signature.inputs):
        return 0
    if not all(spec.shape and isinstance(spec.shape[0], str) for spec in specs):
        return 0
    return signature.dims[batch].max


def batch_range(signature: Signature) -> DimRange:
    """Returns the smallest and the largest allowed number of rows in a batch. If the model declares no batch range, the
    smallest number is 1."""
    batch = signature.batch_dim
    if batch is None:
        return DimRange(1, 1, 1)
    found = signature.dims[batch]
    return replace(found, min=1) if found == DimRange.default(batch) else found


def scheduling(
    config: ModelConfig, signature: Signature, folder: Path | None = None, profiles: tuple[Profile, ...] = ()
) -> Scheduling:
    """Returns the options for queueing and batching the model's requests.

    ``folder`` is the model's folder, which contains the files that the config names. ``profiles`` are the optimization
    profiles of an engine. Raises ``BadRepository`` if the config contradicts the model or needs an unsupported feature.
    """
    name = config.name
    dynamic = config.HasField("dynamic_batching")
    sequences = config.sequence_batching
    batching = config.dynamic_batching
    timing: Any = batching  # the part of the config in which max_queue_delay_microseconds is set
    if config.HasField("sequence_batching"):
        timing = sequences.oldest if sequences.HasField("oldest") else sequences.direct
    largest = config.max_batch_size
    if dynamic and not largest:
        raise BadRepository(f"model '{name}' has dynamic_batching and max_batch_size 0; set max_batch_size")
    preferred = tuple(sorted(getattr(timing, "preferred_batch_size", ())))
    if preferred and not 0 < preferred[0] <= preferred[-1] <= largest:
        raise BadRepository(f"model '{name}': preferred_batch_size has to be from 1 to max_batch_size ({largest})")
    options = _parameters(config)
    rows = batch_range(signature) if largest else DimRange(1, 1, 1)
    if largest and not profiles and largest < rows.min:
        raise BadRepository(
            f"model '{name}': max_batch_size {largest} is below {rows.min}, the smallest batch size of the exported "
            f"model; raise max_batch_size, or export the model again with --dim "
            f"{signature.batch_dim}=1:{rows.opt}:{rows.max}"
        )
    allowed = tuple(range(rows.min, largest + 1, rows.step)) if rows.min > 1 else None
    if profiles and largest:
        allowed = rows_of(profiles, None, largest, rows.step)
    resources, resource_priority = _rate_limit(config)
    made = Scheduling(
        max_batch_size=largest,
        dynamic=dynamic,
        preferred=preferred,
        max_delay_us=timing.max_queue_delay_microseconds,
        allowed=allowed,
        profiles=profiles,
        preserve_ordering=getattr(timing, "preserve_ordering", False),
        priority_levels=batching.priority_levels,
        default_priority=batching.default_priority_level,
        default_policy=_policy(batching.default_queue_policy),
        policies={int(level): _policy(policy) for level, policy in batching.priority_queue_policy.items()},
        instances=max(1, sum(max(1, group.count) for group in config.instance_group)),
        threads=_number(name, options, THREADS, 0),
        queue_rows=_number(name, options, QUEUE_ROWS, Scheduling.queue_rows),
        queue_bytes=_number(name, options, QUEUE_BYTES, Scheduling.queue_bytes),
        lengths=_lengths(config, signature, options) if dynamic else None,
        sequence=sequence_batching(config, signature, folder),
        decoupled=config.model_transaction_policy.decoupled,
        response_cache=config.response_cache.enable,
        resources=resources,
        resource_priority=resource_priority,
    )
    defaults = made.optional_inputs | {spec.name for spec in signature.inputs if spec.optional}
    for tensor in config.input:
        if tensor.optional and tensor.name not in defaults:
            raise BadRepository(
                f"model '{name}', input '{tensor.name}': the input is optional but has no default and is not the mask "
                "for batching by length; remove optional, or export the model with an initializer named "
                f"{tensor.name!r}"
            )
    return made


def _rate_limit(config: ModelConfig) -> tuple[dict[str, int], int]:
    """Returns the amount of each resource that a run needs, and the model's priority.

    A per-device resource counts as a global resource, because all instances run on the same device.
    """
    limits = [group.rate_limiter for group in config.instance_group]
    if any(limit != limits[0] for limit in limits):
        raise BadRepository(f"model '{config.name}': all instance groups need the same rate_limiter")
    if not limits:
        return {}, 1
    return {resource.name: resource.count for resource in limits[0].resources if resource.count}, limits[0].priority


def _parameters(config: ModelConfig) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def _number(name: str, options: Mapping[str, str], key: str, default: int) -> int:
    text = options.get(key)
    if text is None:
        return default
    if not text.isdigit():
        raise BadRepository(f"model '{name}': the parameter {key} is {text!r}; write a whole number of at least 0")
    return int(text)


def _policy(policy: Any) -> QueuePolicy:
    return QueuePolicy(
        max_queue_size=policy.max_queue_size,
        timeout_us=policy.default_timeout_microseconds,
        timeout_action="delay" if policy.timeout_action else "reject",
        allow_override=policy.allow_timeout_override,
    )


def _lengths(config: ModelConfig, signature: Signature, options: Mapping[str, str]) -> LengthBatching | None:
    """Returns the options for batching requests of different lengths, or None if such requests are not batched
    together.

    The config's ``length_dim`` names the dim whose size differs between requests. If a model has a mask and just one
    dynamic dim besides the batch dim, ``length_dim`` is this dynamic dim by default. Without a mask, batching by length
    needs ``length_dim`` or ``allow_ragged_batch`` in the config, because padding may change the model's outputs.
    """
    batch = signature.batch_dim
    others = [dim for dim in signature.dynamic_dims if dim != batch]
    dim = options.get(LENGTH_DIM)
    if dim is not None and dim not in others:
        raise BadRepository(
            f"model '{config.name}' has no dynamic dim {dim!r}; choose from: {', '.join(others) or 'none'}"
        )
    ragged = any(tensor.allow_ragged_batch for tensor in config.input)
    if dim is None:
        if len(others) != 1:
            if ragged:
                raise BadRepository(f"model '{config.name}': name the ragged dim in the parameter {LENGTH_DIM}")
            return None
        dim = others[0]
    masks = [s.name for s in signature.inputs if s.name.endswith("mask") and s.shape == (batch, dim)]
    mask = options.get(LENGTH_MASK) or (masks[0] if masks else None)
    if mask is not None and mask not in {spec.name for spec in signature.inputs}:
        raise BadRepository(
            f"model '{config.name}': the parameter {LENGTH_MASK} names the input {mask!r}, which the model lacks"
        )
    if mask is None and LENGTH_DIM not in options and not ragged:
        return None
    pad: dict[str, float] = {}
    for key, text in options.items():
        if key.startswith(f"{LENGTH_PAD}."):
            try:
                pad[key.partition(".")[2]] = float(text)
            except ValueError:
                raise BadRepository(f"model '{config.name}': the parameter {key} is {text!r}; write a number") from None
    outputs = {spec.name: spec.shape.index(dim) for spec in signature.outputs if dim in spec.shape}
    grouping = options.get(LENGTH_GROUPING, "cost")
    if grouping not in ("cost", "none"):
        raise BadRepository(
            f"model '{config.name}': the parameter {LENGTH_GROUPING} is {grouping!r}; write cost or none"
        )
    return LengthBatching(dim=dim, mask=mask, pad=pad, outputs=outputs, grouped=grouping == "cost")


def gives_batch(text: str) -> bool:
    """Tells whether the text of a valid ``config.pbtxt`` sets ``max_batch_size`` to any number, including 0."""
    config = proto.message("ModelConfig")()
    # If a text sets a field twice, the parser keeps the last value. Therefore, ``_NO_BATCH`` only remains if the file
    # doesn't set ``max_batch_size``.
    text_format.Merge(f"max_batch_size: {_NO_BATCH}\n{text}", config, descriptor_pool=proto.POOL)
    return bool(config.max_batch_size != _NO_BATCH)
