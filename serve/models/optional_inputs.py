"""Lets clients leave out an input if the ONNX model has a default for the input. The default is an initializer with the
name of the input.

Some exporters list every weight as an input. By default, the server therefore treats an input with a default as a
constant. Clients can send an input with a default if ``config.pbtxt`` marks the input as ``optional``.
"""

from __future__ import annotations

from dataclasses import replace

from accel.artifact import Artifact
from accel.errors import BadRepository
from accel.sources.onnx.file import read_proto
from accel.sources.onnx.value_spec import inputs_with_defaults

from .config import ModelConfig


def with_optional_inputs(config: ModelConfig, name: str, artifact: Artifact) -> Artifact:
    """Returns ``artifact`` with the optional inputs of ``config`` in its signature.

    Raises ``BadRepository`` if ``config`` names an input with a default but doesn't mark the input as ``optional``.
    Also raises ``BadRepository`` if the model is batched and the input's first dim is not the batch.
    """
    required = {spec.name for spec in artifact.signature.inputs}
    named = {tensor.name: tensor for tensor in config.input if tensor.name not in required}
    if not named or artifact.kind != "onnx":
        return artifact
    batch = artifact.signature.batch_dim
    found = [spec for spec in inputs_with_defaults(read_proto(artifact.path)) if spec.name in named]
    for spec in found:
        if not named[spec.name].optional:
            raise BadRepository(
                f"model '{name}', input '{spec.name}': the model has a default for the input; write optional: true"
            )
        if config.max_batch_size and (batch is None or spec.shape[:1] != (batch,)):
            raise BadRepository(
                f"model '{name}', input '{spec.name}': the input's first dim is not the batch, so requests can't be "
                "batched; set max_batch_size to 0, or remove the input from the config"
            )
    return replace(artifact, signature=replace(artifact.signature, inputs=(*artifact.signature.inputs, *found)))
