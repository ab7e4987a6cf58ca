"""Completes the signature of a decoder that onnxruntime-genai's builder wrote, which leaves sizes of its cache open."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from accel.artifact import Artifact
from accel.signature import Signature, TensorSpec
from accel.signature.decoder import Cache

_CONFIG = "genai_config.json"
# The axes of a cache whose size never changes, and their names in the config.
_FIXED = {1: "num_key_value_heads", 3: "head_size"}


def with_cache_sizes(artifact: Artifact) -> Artifact:
    """Returns the decoder with the number of heads and their size from the config beside it, where the file leaves them
    open. Returns any other model, and a decoder without a valid config, as it is."""
    cache = Cache.of(artifact.signature)
    if cache is None or all(isinstance(spec.shape[axis], int) for spec in cache.past for axis in _FIXED):
        return artifact
    try:
        config: Any = json.loads((artifact.path.parent / _CONFIG).read_text(encoding="utf-8"))["model"]["decoder"]
        sizes = {axis: config[name] for axis, name in _FIXED.items()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return artifact
    if not all(isinstance(size, int) and 0 < size < 1 << 20 for size in sizes.values()):
        return artifact
    names = {spec.name for spec in cache.past} | set(cache.presents.values())

    def fixed(spec: TensorSpec) -> TensorSpec:
        if spec.name not in names or len(spec.shape) != 4:
            return spec
        shape = [dim if isinstance(dim, int) else sizes.get(axis, dim) for axis, dim in enumerate(spec.shape)]
        return replace(spec, shape=tuple(shape))

    known = artifact.signature
    bare = Signature(tuple(map(fixed, known.inputs)), tuple(map(fixed, known.outputs)))
    ranges = {dim: limits for dim, limits in known.dims.items() if dim in bare.dims}
    return replace(artifact, signature=bare.with_dims(ranges))
