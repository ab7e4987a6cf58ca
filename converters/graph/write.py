"""Writes and checks ONNX files. The weights go into a second file if one file can't hold them."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, beside
from accel.errors import StageFailed
from accel.signature.decoder import PAST_PREFIX
from accel.sources.onnx.file import NAME_SCOPES, describe_model, read_without_weights
from accel.sources.onnx.light import GRAPH_INITIALIZER, LENGTH, MODEL_GRAPH, TENSOR_RAW_DATA
from accel.sources.onnx.refusal import refused_by_checker
from accel.sources.onnx.weights import detached_bytes, is_detached, raw_bytes, raw_pieces

if TYPE_CHECKING:
    import onnx

# A protobuf message can't exceed 2 GB, and shape inference adds its results to the message.
SINGLE_FILE_BYTES = 1_800_000_000

# If the weights of a decoder exceed this size, they go into a second file, which ONNX Runtime maps into memory instead
# of copying it.
DECODER_BYTES = 1 << 24

# If the detached weights exceed this size, they go into a second file. Writing detached weights into the main file
# needs four times their memory.
ATTACHED_BYTES = 1 << 29

# Tensors with fewer bytes than this limit stay in the main file, because shape inference reads some of them.
_APART_BYTES = 1024

# The fields of a tensor that hold its raw data or refer to it, and all fields that may hold its values.
_VALUES = ("raw_data", "external_data", "data_location")
_ALL_VALUES = (
    *_VALUES, "double_data", "float_data", "int32_data", "int64_data", "string_data", "uint64_data",
)  # fmt: skip


def onnx_artifact(
    src: Artifact, model: onnx.ModelProto, out: Path, notes: dict[str, Any], before: onnx.ModelProto | None = None
) -> Artifact:
    """Writes ``model`` to ``out`` and returns the artifact. ``before`` is the model in the file of ``src``, which is
    read if ``before`` is None. Raises ``StageFailed`` if the file fails the checker."""
    signature, properties = describe_model(model)
    if src.kind == "onnx":
        keep_scopes(before or read_without_weights(src.path), model)
    companions = write_onnx(model, out)
    fault = check_file(out)
    if fault:
        raise StageFailed(f"the resulting ONNX file doesn't pass the checker ({fault}); export with another opset")
    dims = {dim: sizes for dim, sizes in src.signature.dims.items() if dim in signature.dynamic_dims}
    return Artifact(
        path=out,
        kind="onnx",
        signature=signature.with_dims(dims),
        properties=properties,
        notes=notes,
        companions=companions,
    )


def keep_scopes(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Copies the torch module scopes from the nodes of ``before`` to the same nodes of ``after``.

    Nodes are matched by name, or else by output. Stack traces are dropped, because they name files of the exporting
    machine.
    """
    known = [
        (node, prop.value) for node in before.graph.node for prop in node.metadata_props if prop.key == NAME_SCOPES
    ]
    by_name = {(node.name, node.op_type): scopes for node, scopes in known if node.name}
    by_output = {name: scopes for node, scopes in known for name in node.output if name}
    for node in after.graph.node:
        kept = [prop.value for prop in node.metadata_props if prop.key == NAME_SCOPES]
        found = [*kept, *filter(None, [by_name.get((node.name, node.op_type))])]
        found += [by_output[name] for name in node.output if name in by_output]
        del node.metadata_props[:]
        if found:
            node.metadata_props.add(key=NAME_SCOPES, value=found[0])


def write_onnx(model: onnx.ModelProto, out: Path, *, limit: int | None = None) -> tuple[str, ...]:
    """Writes ``model`` to ``out``, and returns the names of the weight files beside ``out``.

    The weights go into a second file if the model exceeds ``limit`` bytes (by default ``DECODER_BYTES`` for decoders
    and ``SINGLE_FILE_BYTES`` for other models), or if too many weights are detached. The second file is named by a hash
    of its content, so that two models of the same name never mix their weights. ``model`` must not be used afterwards.
    """
    if limit is None:
        has_cache = any(value.name.startswith(PAST_PREFIX) for value in model.graph.input)
        limit = DECODER_BYTES if has_cache else SINGLE_FILE_BYTES
    if weight_bytes(model) <= limit and detached_bytes(model) <= ATTACHED_BYTES:
        with beside(out) as temporary, temporary.open("wb") as stream:
            stream.writelines(_wire_format(model))
        return ()
    part = out.with_name(f".{out.stem}.{uuid.uuid4().hex[:8]}.part")
    try:
        name = f"{out.stem}.{_weights_apart(model, part)[:16]}.weights"
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = name
        part.replace(out.with_name(name))
    finally:
        part.unlink(missing_ok=True)
    with beside(out) as temporary:
        temporary.write_bytes(model.SerializeToString())
    return (name,)


def _wire_format(model: onnx.ModelProto) -> Iterator[bytes]:
    """Yields the bytes of the model's file. protobuf would need memory for several copies of the weights.

    The bytes of the weights are copied in pieces. Each field is a tag, a length and its content, and fields may come in
    any order (see https://protobuf.dev/programming-guides/encoding).
    """
    graph = _without(model.graph, "initializer")
    heads, size = [], graph.ByteSize()
    for tensor in model.graph.initializer:
        # A tensor that isn't stored as raw data is written as it is.
        raw = is_detached(tensor) or tensor.HasField("raw_data")
        head = _without(tensor, *_VALUES) if raw else tensor
        count = (raw_bytes(tensor) if is_detached(tensor) else _raw_bytes(tensor)) if raw else 0
        content = head.SerializeToString() + (_start(TENSOR_RAW_DATA, count) if raw else b"")
        heads.append(_start(GRAPH_INITIALIZER, len(content) + count) + content)
        size += len(heads[-1]) + count
    yield _without(model, "graph").SerializeToString() + _start(MODEL_GRAPH, size)
    yield graph.SerializeToString()
    for head, tensor in zip(heads, model.graph.initializer, strict=True):
        yield head
        yield from raw_pieces(tensor)


def _without(message: Any, *left_out: str) -> Any:
    """Returns a copy of a protobuf message without the fields ``left_out``."""
    made = type(message)()
    for field in message.DESCRIPTOR.fields:  # ListFields() would copy the weights
        if field.name in left_out:
            continue
        value = getattr(message, field.name)
        if hasattr(value, "extend"):
            getattr(made, field.name).extend(value)
        elif not message.HasField(field.name):
            continue
        elif hasattr(value, "CopyFrom"):
            getattr(made, field.name).CopyFrom(value)
        else:
            setattr(made, field.name, value)
    return made


def _start(field: int, length: int) -> bytes:
    """Returns the tag of the field with the number ``field``, and the length of its content."""
    return bytes([field << 3 | LENGTH]) + _varint(length)


def _raw_bytes(tensor: onnx.TensorProto) -> int:
    """Returns the number of bytes of ``tensor.raw_data``, which protobuf would copy."""
    rest = int(tensor.ByteSize()) - int(_without(tensor, "raw_data").ByteSize())
    return next(
        count for digits in range(1, 11) if len(_start(TENSOR_RAW_DATA, count := rest - 1 - digits)) == 1 + digits
    )


def _varint(number: int) -> bytes:
    """Returns ``number`` in groups of 7 bits, the lowest group first. All groups except the last have the high bit."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def as_inputs(
    model: onnx.ModelProto, chosen: Callable[[onnx.TensorProto], bool] = is_detached
) -> list[onnx.TensorProto]:
    """Turns the weights for which ``chosen`` is true into inputs, and returns these weights. Some libraries copy the
    model several times, or take the model as one protobuf message, which can't hold large weights."""
    from onnx import helper

    apart = [tensor for tensor in model.graph.initializer if chosen(tensor)]
    kept = [tensor for tensor in model.graph.initializer if not chosen(tensor)]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    known = {value.name for value in model.graph.input}
    for tensor in apart:
        if tensor.name not in known:
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return apart


def as_weights(model: onnx.ModelProto, apart: list[onnx.TensorProto]) -> None:
    """Turns the inputs from ``as_inputs`` back into weights, and leaves out unused weights. A weight that was the
    default of an input of a dynamic size before stays one."""
    from .subgraphs import captured

    used = {name for node in model.graph.node for name in (*node.input, *captured(node))}
    used |= {value.name for value in model.graph.output}
    names = {tensor.name for tensor in apart}
    inputs = [value for value in model.graph.input if value.name not in names or _is_dynamic(value)]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(tensor for tensor in apart if tensor.name in used)


def _is_dynamic(value: onnx.ValueInfoProto) -> bool:
    return any(dim.dim_param for dim in value.type.tensor_type.shape.dim)


def weight_bytes(model: onnx.ModelProto) -> int:
    """Returns the approximate size of the file, which is the size of its weights and nodes."""
    inside = sum(int(part.ByteSize()) for part in (*model.graph.initializer, *model.graph.node))
    return inside + detached_bytes(model)


def _weights_apart(model: onnx.ModelProto, path: Path) -> str:
    """Moves the bytes of the larger initializers to the file ``path``, and returns the file's sha256."""
    import onnx
    from onnx import numpy_helper

    digest = hashlib.sha256()
    offset = 0
    with path.open("wb") as stream:
        for tensor in model.graph.initializer:
            pieces: Iterable[bytes]
            if is_detached(tensor):
                pieces = raw_pieces(tensor)
            elif tensor.ByteSize() < _APART_BYTES or tensor.data_type == onnx.TensorProto.STRING:
                continue
            else:
                if not tensor.raw_data:
                    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
                pieces = [tensor.raw_data]
            padding = -offset % 4096  # each tensor starts at a page, so that the file can be mapped into memory
            length = -padding
            for part in itertools.chain([b"\0" * padding], pieces):
                stream.write(part)
                digest.update(part)
                length += len(part)
            offset += padding
            tensor.ClearField("raw_data")
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", path.name), ("offset", offset), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
            offset += length
    return digest.hexdigest()


def check_file(path: Path) -> str | None:
    """Returns the error that ``onnx.checker`` finds in the file, or None. Also checks types and shapes. The weights
    that ``read_without_weights`` leaves out become inputs, because the checker would copy them."""
    model = read_without_weights(path)
    apart = as_inputs(model, lambda tensor: not any(field.name in _ALL_VALUES for field, _ in tensor.ListFields()))
    return refused_by_checker(model if apart else str(path), lambda: model.graph.node)
