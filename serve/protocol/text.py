"""Writes a file descriptor as the text of a ``.proto`` file, for users who compile the protocol into other languages.

The compiler protoc turns the text into the same descriptor. The text has no comments, because descriptors don't carry
comments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {number: name.removeprefix("TYPE_").lower() for name, number in _Field.Type.items()}

_HEAD = """\
// The Open Inference Protocol as Triton speaks it; license: BSD-3-Clause, see LICENSE.txt.
// Written by regenerate.py from the descriptors in inference.binpb: the official file without its comments.
"""


def proto_text(file: Any) -> str:
    """Returns the proto3 text of one ``FileDescriptorProto``. Raises ``ValueError`` if the file uses a feature that
    this module can't write."""
    if file.syntax != "proto3" or file.extension or file.options.ListFields():
        raise ValueError(f"{file.name} is not plain proto3")
    parts = [_HEAD, 'syntax = "proto3";\n', f"package {file.package};\n"]
    parts += [f'import "{name}";\n' for name in file.dependency]
    for message in file.message_type:
        parts.append(_block(_message(message, file.package)))
    for enum in file.enum_type:
        parts.append(_block(_enum(enum)))
    for service in file.service:
        parts.append(_block(_service(service, file.package)))
    return "\n".join(parts)


def _block(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _inside(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"


def _message(message: Any, package: str) -> Iterator[str]:
    yield f"message {message.name} {{"
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    for enum in message.enum_type:
        yield from _inside(_enum(enum))
    for nested in message.nested_type:
        if nested.name not in maps:
            yield from _inside(_message(nested, package))
    if message.extension or message.extension_range:
        raise ValueError(f"the message {message.name} has extensions, which proto3 does not allow")
    for reserved in message.reserved_range:
        last = reserved.end - 1
        yield f"  reserved {reserved.start};" if reserved.start == last else f"  reserved {reserved.start} to {last};"
    if message.reserved_name:
        yield "  reserved " + ", ".join(f'"{name}"' for name in message.reserved_name) + ";"
    group = None
    for field in message.field:
        own = field.oneof_index if field.HasField("oneof_index") and not field.proto3_optional else None
        if own != group:
            if group is not None:
                yield "  }"
            if own is not None:
                yield f"  oneof {message.oneof_decl[own].name} {{"
            group = own
        yield ("  " if own is None else "    ") + _field(field, maps, package)
    if group is not None:
        yield "  }"
    yield "}"


def _field(field: Any, maps: dict[str, Any], package: str) -> str:
    entry = maps.get(field.type_name.rpartition(".")[2]) if field.type == _Field.TYPE_MESSAGE else None
    if entry is not None:
        key, value = entry.field
        kind = f"map<{_type(key, package)}, {_type(value, package)}>"
    else:
        kind = _type(field, package)
        if field.label == _Field.LABEL_REPEATED:
            kind = f"repeated {kind}"
        elif field.proto3_optional:
            kind = f"optional {kind}"
    options = []
    for option, value in field.options.ListFields():
        if option.name not in ("deprecated", "packed"):
            raise ValueError(f"{field.name} has the option {option.name}")
        options.append(f"{option.name} = {str(value).lower()}")
    ending = f" [{', '.join(options)}]" if options else ""
    return f"{kind} {field.name} = {field.number}{ending};"


def _type(field: Any, package: str) -> str:
    return _name(field.type_name, package) if field.type_name else _TYPES[field.type]


def _name(full: str, package: str) -> str:
    return str(full).removeprefix(f".{package}.")


def _enum(enum: Any) -> Iterator[str]:
    yield f"enum {enum.name} {{"
    if enum.options.allow_alias:
        yield "  option allow_alias = true;"
    for value in enum.value:
        yield f"  {value.name} = {value.number};"
    yield "}"


def _service(service: Any, package: str) -> Iterator[str]:
    yield f"service {service.name} {{"
    for method in service.method:
        request, response = _name(method.input_type, package), _name(method.output_type, package)
        takes = f"{'stream ' if method.client_streaming else ''}{request}"
        gives = f"{'stream ' if method.server_streaming else ''}{response}"
        if method.options.ListFields():
            raise ValueError(f"{method.name} has options")
        end = " {}" if method.HasField("options") else ";"  # "{}" stands for empty options
        yield f"  rpc {method.name}({takes}) returns ({gives}){end}"
    yield "}"
