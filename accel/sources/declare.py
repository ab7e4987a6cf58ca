"""Defines the decorator ``declare`` for factories, and parses the notations of inputs and dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from accel.errors import BadInputSpec
from accel.signature import DimRange, TensorSpec

Factory = TypeVar("Factory", bound=Callable[..., Any])

# Inputs are a list or a dict. A list holds texts such as "x:float32[batch,3]", or TensorSpecs. A dict maps names to
# texts such as "float32[batch,3]", to tuples such as ("float32", ("batch", 3)), or to TensorSpecs.
Inputs = Mapping[str, "str | tuple[str, Sequence[int | str]] | TensorSpec"] | Sequence["str | TensorSpec"]
Dims = Mapping[str, "DimRange | tuple[int, int, int] | tuple[int, int, int, int] | str"]


# Maps common input names to their usual dtype and shape.
_USUAL = {
    "input_ids": "int64[batch,sequence]",
    "attention_mask": "int64[batch,sequence]",
    "token_type_ids": "int64[batch,sequence]",
    "decoder_input_ids": "int64[batch,decoder_sequence]",
    "input_values": "float32[batch,samples]",
    "input_features": "float32[batch,80,3000]",
    "past_values": "float32[batch,64]",
    "pixel_values": "float32[batch,3,224,224]",
}
# The declaration of an input that accel knows nothing about.
_OPEN = "DTYPE[batch,...]"


def input_example(name: str) -> str:
    """Returns an example declaration of the input ``name``, for a message. If the name says nothing, the declaration
    has gaps (see ``gaps_words``)."""
    return f"{name}:{_USUAL.get(name, _OPEN)}"


def gaps_words(examples: Sequence[str]) -> str:
    """Returns the words that tell the reader to fill the gaps of ``examples``, or "" if there are none."""
    return ", with its dtype for DTYPE and its other dims for ..." if any(_OPEN in one for one in examples) else ""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A factory's declaration: inputs, output names, ranges of the dynamic dims, and files of the weights."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...] = ()
    dims: Mapping[str, DimRange]
    weights: Callable[[], Sequence[Path]] | None = None


def declare(
    *,
    inputs: Inputs,
    outputs: Sequence[str] = (),
    dims: Dims | None = None,
    weights: Callable[[], Sequence[Path]] | None = None,
) -> Callable[[Factory], Factory]:
    """Decorates a factory (a function without arguments that returns an ``nn.Module``) with its signature.

    ``inputs`` has the same notations as in ``accel.Source``. ``outputs`` names the tensors that ``forward`` returns, in
    order. ``dims`` gives ranges of dynamic dims as (min, opt, max), or (min, opt, max, step) if only multiples of the
    step are valid. ``weights`` is a function that returns the paths of all files that the factory reads. accel records
    the sha256 of these files.
    """
    declaration = Declaration(
        inputs=parse_inputs(inputs), outputs=tuple(outputs), dims=parse_dims(dims or {}), weights=weights
    )

    def mark(factory: Factory) -> Factory:
        factory.__accel__ = declaration  # type: ignore[attr-defined]
        return factory

    return mark


def parse_inputs(inputs: Inputs) -> tuple[TensorSpec, ...]:
    """Turns inputs in any accepted notation into specs. Raises ``BadInputSpec`` for an unknown notation, and for a
    range beyond an input's dtype."""
    if isinstance(inputs, str):
        inputs = [inputs]
    specs: list[TensorSpec] = []
    if isinstance(inputs, Mapping):
        for name, value in inputs.items():
            if isinstance(value, TensorSpec):
                specs.append(TensorSpec(name, value.dtype, value.shape, value.values).checked())
            elif isinstance(value, str):
                specs.append(TensorSpec.parse(f"{name}:{value}"))
            elif isinstance(value, tuple | list) and len(value) == 2:
                specs.append(TensorSpec(name, str(value[0]), tuple(value[1])))
            else:
                raise BadInputSpec(
                    f"can't read the input {name!r}: give (dtype, shape), e.g. ('float32', ('batch', 3))"
                )
    else:
        for value in inputs:
            specs.append(value.checked() if isinstance(value, TensorSpec) else TensorSpec.parse(value))
    return tuple(specs)


def parse_dims(dims: Dims) -> dict[str, DimRange]:
    """Turns dims such as ``{"batch": "1:8:64"}`` or ``dict(batch=(1, 8, 64))`` into ranges. A step comes last, as in
    ``(16, 32, 64, 4)``."""
    found: dict[str, DimRange] = {}
    for name, value in dims.items():
        if isinstance(value, DimRange):
            found[name] = value
        elif isinstance(value, str):
            found[name] = DimRange.parse(value)
        else:
            found[name] = DimRange(*value)
    return found
