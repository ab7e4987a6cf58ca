"""Loads the protobuf messages of Triton's version of the Open Inference Protocol, and of Triton's ``config.pbtxt``.

``inference.binpb`` is a FileDescriptorSet that ``regenerate.py`` writes (BSD-3, see ``LICENSE.txt``). The
FileDescriptorSet is loaded into a separate descriptor pool. Generated modules and the default pool would clash with a
Triton client in the same process.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DESCRIPTORS = Path(__file__).parent / "inference.binpb"
SERVICE = "inference.GRPCInferenceService"


def _load() -> Any:
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())
    for file in files.file:  # imported files come before the files that import them
        pool.Add(file)
    return pool


POOL = _load()


@cache
def message(name: str) -> Any:
    """Returns the class of a message. ``name`` is the message's name without the package, such as
    ``ModelInferRequest``."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


@cache
def methods() -> dict[str, tuple[Any, Any, bool]]:
    """Maps each method of the service to its request class, its response class and a flag. The flag is True if requests
    and responses are streams."""
    service = POOL.FindServiceByName(SERVICE)
    return {
        method.name: (
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
            method.server_streaming,
        )
        for method in service.methods
    }


def enum_number(enum: str, name: str) -> int:
    """Returns the number of an enum's value, as in ``enum_number("DataType", "TYPE_FP32")``."""
    return int(POOL.FindEnumTypeByName(f"inference.{enum}").values_by_name[name].number)


def enum_name(enum: str, number: int) -> str:
    """Returns the name of an enum's value."""
    return str(POOL.FindEnumTypeByName(f"inference.{enum}").values_by_number[number].name)
