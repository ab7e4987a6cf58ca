"""Reads the tensor parameters that gRPC and HTTP share: shared memory and classification."""

from __future__ import annotations

from ..core.transport import Slice, WantedOutput
from ..protocol.inference import Parameter
from ..protocol.tensors import invalid


def memory_slice(given: dict[str, Parameter], name: str) -> Slice | None:
    """Removes the shared-memory parameters of the tensor ``name``. Returns the slice that the parameters describe, or
    None if the tensor has no shared-memory parameters."""
    region = given.pop("shared_memory_region", None)
    if region is None:
        return None
    size, offset = given.pop("shared_memory_byte_size", None), given.pop("shared_memory_offset", 0)
    if not isinstance(region, str) or isinstance(size, bool | float | str) or size is None:
        raise invalid(f"tensor '{name}' with a shared_memory_region also needs an integer shared_memory_byte_size")
    if isinstance(offset, bool | float | str):
        raise invalid(f"shared_memory_offset of tensor '{name}' has to be an integer")
    return Slice(region, size, offset)


def wanted_output(name: str, given: dict[str, Parameter]) -> WantedOutput:
    """Returns the requested output ``name`` with its parameters. Raises ``ServeError`` INVALID_ARGUMENT if a parameter
    is malformed."""
    place = memory_slice(given, name)
    count = given.pop("classification", 0)
    if isinstance(count, bool | float | str) or count < 0:
        raise invalid(f"the parameter 'classification' of output '{name}' has to be an integer, the number of classes")
    if count and place is not None:
        raise invalid(f"output '{name}' can't have both a classification and a shared_memory_region; leave one out")
    return WantedOutput(name, count, place, given)
