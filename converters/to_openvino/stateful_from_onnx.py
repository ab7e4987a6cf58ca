"""Converts an ONNX decoder with a KV cache to a stateful OpenVINO IR, which keeps the cache in the runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from accel.artifact import Artifact
from accel.errors import BadSource
from accel.signature import Signature, TensorSpec
from accel.signature.decoder import BEAMS, IDS, LOGITS, MASK, POSITIONS, Cache
from accel.stage import StageConfig

from ..graph.read_ir import describe
from .openvino_from_onnx import write_ir


@dataclass(frozen=True, kw_only=True)
class StatefulFromOnnxConfig(StageConfig):
    """Has no options. Weights keep their precision, and the session chooses the precision of the computation."""


def stateful_from_onnx(src: Artifact, config: StatefulFromOnnxConfig, out: Path) -> Artifact:  # noqa: ARG001
    """Converts the ONNX decoder ``src`` to ``out`` (.xml) and its weights file (.bin), in a child process.

    The signature describes a run that begins with an empty cache, so the mask is as long as the new tokens. Raises
    ``BadSource`` if ``src`` has no KV cache, and the errors of ``openvino_from_onnx``.
    """
    if Cache.of(src.signature) is None:
        raise BadSource(f"{src.path} has no KV cache; export the decoder with its cache first")
    signature = stateful_signature(src.signature)
    notes = write_ir(src, out, signature, stateful=True)
    _, found = describe(out)
    return Artifact(
        path=out,
        kind="openvino",
        signature=signature,
        properties=found,
        notes=notes,
        companions=(out.with_suffix(".bin").name,),
    )


def stateful_signature(cached: Signature) -> Signature:
    """Returns the signature of the stateful form of a decoder with a cache."""
    batch, sequence = map(str, cached.input(IDS).shape)
    inputs = [cached.input(IDS)]
    for spec in cached.inputs:
        if spec.name == MASK:
            inputs.append(replace(spec, shape=(batch, sequence)))
        elif spec.name == POSITIONS:
            inputs.append(replace(spec, values=(0, f"{sequence}-1")))
    inputs.append(TensorSpec(BEAMS, "int32", (batch,), (0, f"{batch}-1")))
    outputs = tuple(spec for spec in cached.outputs if spec.name == LOGITS)
    return Signature(tuple(inputs), outputs, {dim: cached.dims[dim] for dim in (batch, sequence) if dim in cached.dims})
