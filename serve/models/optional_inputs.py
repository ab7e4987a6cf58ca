"""Inputs that clients may leave out because the model has a default for them: ONNX initializers that are inputs, too.

Exporters list whole sets of weights that way, so that only those are offered which ``config.pbtxt`` names and calls
``optional``; the others are what they are in the file, a constant.
"""

from __future__ import annotations

from dataclasses import replace

from accel.artifact import Artifact
from accel.errors import BadRepository
from accel.serve.model_config import ModelConfig
from accel.sources.onnx_file import inputs_with_defaults, read_proto


def with_optional_inputs(config: ModelConfig, name: str, artifact: Artifact) -> Artifact:
    """``artifact`` with those of its inputs with defaults that ``config`` names. ``BadRepository`` where it names one
    as if clients had to send it, or one that can't be batched."""
    required = {spec.name for spec in artifact.signature.inputs}
    named = {tensor.name: tensor for tensor in config.input if tensor.name not in required}
    if not named or artifact.kind != "onnx":
        return artifact
    batch = artifact.signature.batch_dim
    found = [spec for spec in inputs_with_defaults(read_proto(artifact.path)) if spec.name in named]
    for spec in found:
        if not named[spec.name].optional:
            raise BadRepository(
                f"model '{name}', input '{spec.name}': the model has a default for it; write optional: true beside it"
            )
        if config.max_batch_size and (batch is None or spec.shape[:1] != (batch,)):
            raise BadRepository(
                f"model '{name}', input '{spec.name}': its first dim is not the batch, so it can't be batched; set "
                "max_batch_size to 0, or take the input out of the config"
            )
    return replace(artifact, signature=replace(artifact.signature, inputs=(*artifact.signature.inputs, *found)))
