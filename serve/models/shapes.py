"""Relates the shapes in a ``config.pbtxt`` to the shapes of the model: which dim is the batch, and ``reshape``.

Exporters often leave the first dim without a name, or give it another name in each input. If the config sets
``max_batch_size`` above 0, every dynamic first dim is the batch.

``reshape`` lets clients see another shape than the model has. ``dims: [ 3 ] reshape { shape: [ 1, 3, 1 ] }`` gives the
model (batch, 1, 3, 1) for the client's (batch, 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.errors import BadRepository
from accel.signature import BATCH, Signature, TensorSpec

from ..protocol.inference import (
    Answer,
    Executor,
    InferenceRequest,
    InferenceResponse,
    ModelStatistics,
    ServeError,
    Ticket,
)
from ..protocol.tensors import invalid, shape_text

if TYPE_CHECKING:
    import numpy as np

ModelConfig = Any


def with_batch_dim(config: ModelConfig, artifact: Artifact) -> Artifact:
    """Returns ``artifact`` with one name for the first dim of all inputs and outputs, if the config batches requests
    and the first dim of all inputs is dynamic. Otherwise returns ``artifact`` unchanged."""
    signature = artifact.signature
    inputs = signature.inputs
    firsts = {spec.shape[0] if spec.shape else 0 for spec in inputs}
    if not config.max_batch_size or not all(isinstance(first, str) for first in firsts):
        return artifact
    name = BATCH if len(firsts) > 1 or not signature.batch_dim else signature.batch_dim
    replaced = {str(first) for first in firsts} - {name}
    if any(replaced & spec.bound_dims for spec in inputs):  # the range of an input depends on the dim
        return artifact

    def named(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(spec, shape=(name, *spec.shape[1:])) if spec.shape and isinstance(spec.shape[0], str) else spec
            for spec in specs
        )

    changed = Signature(named(inputs), named(signature.outputs))
    changed = changed.with_dims({dim: found for dim, found in signature.dims.items() if dim in changed.dims})
    return replace(artifact, signature=changed)


@dataclass(frozen=True)
class Reshape:
    """The two shapes of one tensor, both without the batch: the shape that clients see, and the model's shape."""

    seen: tuple[int, ...]
    real: tuple[int, ...]

    def inward(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the model's shape for a client's shape."""
        return _filled(self.real, self.seen, shape)

    def outward(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the client's shape for a shape that the model gave. Raises ``ValueError`` if the shape doesn't fit
        the config."""
        if len(shape) != len(self.real) or any(d not in (-1, s) for d, s in zip(self.real, shape, strict=True)):
            raise ValueError
        return _filled(self.seen, self.real, shape)


def _filled(target: Sequence[int], source: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Replaces the dynamic dims of ``target`` by the sizes of the dynamic dims of ``source``, in order."""
    dynamic = iter(size for dim, size in zip(source, sizes, strict=True) if dim < 0)
    return tuple(next(dynamic) if dim < 0 else dim for dim in target)


def read_reshapes(config: ModelConfig) -> tuple[dict[str, Reshape], dict[str, Reshape]]:
    """Returns the reshapes of the inputs and of the outputs. Raises ``BadRepository`` if the two shapes of a tensor
    can't hold the same number of elements."""
    return (_read(config, "input", config.input), _read(config, "output", config.output))


def _read(config: ModelConfig, role: str, tensors: Iterable[Any]) -> dict[str, Reshape]:
    found = {}
    for tensor in tensors:
        if not tensor.HasField("reshape"):
            continue
        made = Reshape(tuple(map(int, tensor.dims)), tuple(map(int, tensor.reshape.shape)))
        if _parts(made.seen) != _parts(made.real):
            raise BadRepository(
                f"model '{config.name}', {role} '{tensor.name}': dims {shape_text(made.seen)} and reshape "
                f"{shape_text(made.real)} differ in size; write two shapes with the same number of elements before, "
                "between and behind the dims of -1"
            )
        found[tensor.name] = made
    return found


def _parts(shape: Sequence[int]) -> list[int]:
    """Returns the number of elements before, between and behind the dynamic dims of ``shape``."""
    found = [1]
    for dim in shape:
        if dim < 0:
            found.append(1)
        else:
            found[-1] *= dim
    return found


class ReshapingExecutor:
    """An ``Executor`` that reshapes the inputs for ``inner``, and the outputs of ``inner`` for the clients.

    ``batched`` is True if the first dim of every tensor is the batch, which keeps its size.
    """

    def __init__(
        self,
        inner: Executor,
        inputs: Mapping[str, Reshape],
        outputs: Mapping[str, Reshape],
        *,
        name: str,
        batched: bool,
    ) -> None:
        self.inner, self._inputs, self._outputs = inner, inputs, outputs
        self._name, self._kept = name, int(batched)

    def submit(self, request: InferenceRequest, answer: Answer) -> Ticket:
        inputs = {
            name: self._reshaped(name, value, self._inputs, inward=True) for name, value in request.inputs.items()
        }
        return self.inner.submit(replace(request, inputs=inputs), self._outward(answer))

    def _outward(self, answer: Answer) -> Answer:
        def reshaped(found: InferenceResponse | ServeError) -> None:
            if isinstance(found, InferenceResponse):
                found = replace(
                    found,
                    outputs={
                        name: self._reshaped(name, value, self._outputs, inward=False)
                        for name, value in found.outputs.items()
                    },
                )
            answer(found)

        return reshaped

    def _reshaped(self, name: str, value: np.ndarray, known: Mapping[str, Reshape], *, inward: bool) -> np.ndarray:
        found = known.get(name)
        if found is None:
            return value
        rows, shape = value.shape[: self._kept], value.shape[self._kept :]
        change: Callable[[Sequence[int]], tuple[int, ...]] = found.inward if inward else found.outward
        try:
            return value.reshape((*rows, *change(shape)))
        except ValueError:
            if inward:
                raise invalid(
                    f"input '{name}' of model '{self._name}' can't be reshaped from {shape_text(shape)}"
                ) from None
            return value  # the model gave another shape than its file declares; the client gets what there is

    def statistics(self) -> ModelStatistics:
        return self.inner.statistics()

    def pending(self) -> int:
        return self.inner.pending()

    def close(self, timeout: float) -> None:
        self.inner.close(timeout)


def model_dims(tensor: Any) -> Any:
    """Returns the dims of a config's tensor as the model has them: those of ``reshape``, if the config has it."""
    return tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
