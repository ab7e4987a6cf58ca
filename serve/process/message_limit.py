"""Chooses the size of the largest message that the server takes."""

from __future__ import annotations

import logging
import math

from accel.artifact import Artifact, manifest_path
from accel.errors import AccelError
from accel.signature import Signature, numpy_dtype
from accel.sources.onnx.file import describe

from ..generate.own_loop import declare_own_loop
from ..generate.token_loop import token_loop
from ..models.config import ModelConfig
from ..models.files import ModelFolder
from ..models.repository import Repository
from ..models.shapes import with_batch_dim

log = logging.getLogger("accel.serve")

LEAST = 256 << 20
MOST = (1 << 31) - 1  # of gRPC
_BESIDES = 1 << 20  # names, shapes and parameters
_STRING = 64  # bytes of a string; signatures don't tell the length of strings


def message_limit(repository: Repository, given: int) -> int:
    """Returns the limit in bytes: ``given``, or if ``given`` is 0, 256 MiB or as much as the largest request to a model
    of ``repository`` takes.

    The size of a request follows from the model's file and config. A model whose file can't be read here is left out;
    loading it tells what is wrong.
    """
    if given:
        return given
    needed = {folder.name: _needed(folder) for folder in repository.folders()}
    name = max(needed, key=lambda one: needed[one], default="")
    if not name or needed[name] <= LEAST:
        return LEAST
    limit = min(MOST, needed[name])
    log.info("larger messages are taken", extra={"model": name, "bytes": limit, "default": LEAST})
    return limit


def _needed(folder: ModelFolder) -> int:
    """Returns the number of bytes of the largest request to a model, or 0 if it is unknown."""
    most = 0
    try:
        config = folder.config()[0]
        for version in folder.chosen(config):
            path, _ = folder.model_file(version, config.default_model_filename)
            if path is None or not path.is_file():
                continue
            if manifest_path(path).is_file():
                found = with_batch_dim(config, Artifact.open(path))
            elif path.suffix == ".onnx":
                found = with_batch_dim(config, Artifact(path=path, kind="onnx", signature=describe(path)[0]))
            else:
                continue
            most = max(most, _size(_offered(found, config, folder.name), config))
    except (AccelError, OSError):
        return 0
    return most


def _offered(artifact: Artifact, config: ModelConfig, name: str) -> Signature:
    """Returns the signature that clients see. Clients don't send the states of a token loop, such as a KV cache."""
    declared = type(config)()
    declared.CopyFrom(config)
    declare_own_loop(declared, artifact)
    loop = token_loop(declared, name, artifact.signature)
    return loop.offered(artifact.signature) if loop else artifact.signature


def _size(signature: Signature, config: ModelConfig) -> int:
    sizes = {dim: found.max for dim, found in signature.dims.items()}
    if signature.batch_dim and config.max_batch_size:
        sizes[signature.batch_dim] = config.max_batch_size
    total = _BESIDES
    for spec in signature.inputs:
        item = _STRING if spec.dtype == "string" else numpy_dtype(spec.dtype).itemsize
        total += item * math.prod(spec.resolve(sizes))
    return total
