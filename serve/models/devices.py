"""Chooses the device of a model's instances from the fields ``kind`` and ``gpus`` of the instance groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.errors import BadRepository
from accel.machine import has_nvidia_gpu
from accel.runtimes.base import default_runtime

from ..protocol import messages as proto

if TYPE_CHECKING:
    from accel.artifact import Artifact

    from .config import ModelConfig

# ``_ON_A_GPU`` maps a kind of artifact to a GPU runtime, and ``_ON_A_CPU`` maps a kind of artifact to a CPU runtime.
_ON_A_GPU, _ON_A_CPU = {"onnx": "onnxruntime-cuda"}, {"onnx": "onnxruntime"}


def runtime_for(config: ModelConfig, name: str, artifact: Artifact) -> str | None:
    """Returns the runtime that the instance groups require, or None for the artifact's default runtime.

    Raises ``BadRepository`` if this machine can't run the model on the configured device. The server never falls back
    to another device.
    """

    def refused(what: str) -> BadRepository:
        return BadRepository(f"model '{name}': {what}")

    kinds = {proto.enum_name("ModelInstanceGroup.Kind", group.kind) for group in config.instance_group}
    if len(kinds) > 1:
        raise refused("the instance groups are of different kinds; give all groups the same kind")
    kind = next(iter(kinds), "KIND_AUTO")
    for group in config.instance_group:
        if group.profile:
            raise refused(
                "the server chooses the optimization profile by the shapes of each batch; remove profile from the "
                "config"
            )
        if group.passive or group.secondary_devices:
            raise refused("passive instances and secondary_devices are not supported; remove both")
        if others := [gpu for gpu in group.gpus if gpu != 0]:
            raise refused(f"instances run on the first GPU only; start a server with CUDA_VISIBLE_DEVICES={others[0]}")
        if group.gpus and kind == "KIND_CPU":
            raise refused("instances of KIND_CPU can't have the field gpus; remove gpus")
    if artifact.kind == "engine":
        if kind == "KIND_CPU":
            raise refused("an engine runs on a GPU; write KIND_GPU")
        return None
    if kind == "KIND_CPU":
        return _ON_A_CPU.get(artifact.kind) if default_runtime(artifact).needs_gpu else None
    if kind != "KIND_GPU" and not any(group.gpus for group in config.instance_group):
        return None
    if artifact.kind not in _ON_A_GPU:
        raise refused(
            f"accel has no GPU runtime for {artifact.kind} models; write KIND_CPU, or serve the model as ONNX"
        )
    if not has_nvidia_gpu():
        raise refused("the instance_group has KIND_GPU and this machine has no NVIDIA GPU; write KIND_CPU")
    return _ON_A_GPU[artifact.kind]
