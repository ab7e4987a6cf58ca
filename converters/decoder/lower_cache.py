"""Keeps the KV cache of a decoder with fused attention in 16 or 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from accel.artifact import Artifact
from accel.errors import StageFailed, UnknownName
from accel.runtimes.base import open_session
from accel.runtimes.kv.cache import grows_in_place
from accel.signature.decoder import Cache
from accel.sources.onnx.weights import read_detached
from accel.stage import StageConfig

from ..graph.write import onnx_artifact
from ..quantize.texts import feeds_of_texts
from .wires import MICROSOFT, Wires

FP16, INT8 = "fp16", "int8"
_DTYPES = {FP16: onnx.TensorProto.FLOAT16, INT8: onnx.TensorProto.INT8}
# The inputs of GroupQueryAttention: the cached keys and values, the mask, the steps of an int8 cache, and those that
# have the dtype in which the operator computes.
_KEY, _VALUE, _MASK, _STEPS = 3, 4, 10, 12
_COMPUTED = (0, 1, 2, 7, 8, _MASK, 11)
# float16 has no smaller numbers that softmax could tell from these.
_MASKED = -6e4
_LEVELS = 127
# A channel that is 0 in all texts gets the step of a channel with values up to this.
_LEAST = 1e-3


@dataclass(frozen=True, kw_only=True)
class LowerCacheConfig(StageConfig):
    """``precision`` is fp16 or int8. An int8 cache has one step for each channel of a head, from the largest key and
    value of at most ``samples`` texts in the file ``data`` (see ``write_texts``)."""

    precision: str = INT8
    data: Path | None = None
    samples: int = 32


class CacheNotLowered(StageFailed):
    """The decoder keeps its cache in another way, or there are no texts for the steps of an int8 cache."""


def lower_cache(src: Artifact, config: LowerCacheConfig, out: Path) -> Artifact:
    """Changes the dtype of the cache of ``src``, whose attention is GroupQueryAttention with a float32 cache.

    With a float16 cache, the operator computes in float16. With an int8 cache it computes in float32, and rounds new
    keys and values as it writes them. Raises ``CacheNotLowered`` for any other model.
    """
    if config.precision not in _DTYPES:
        raise UnknownName(f"a KV cache can't be kept in {config.precision!r}; use one of {', '.join(_DTYPES)}")
    layout = Cache.of(src.signature)
    if layout is None or any(spec.dtype != "float32" for spec in layout.past):
        raise CacheNotLowered(f"{src.path.name} has no KV cache in float32; start from the float32 decoder")
    if not grows_in_place(src.path, layout):
        raise CacheNotLowered(
            f"the attention of {src.path.name} isn't fused; run the stage fuse_decoder first, or keep the cache in fp32"
        )
    wires = Wires(read_detached(src.path))
    lowered = _Lowered(wires)
    steps = _steps(src, layout, config) if config.precision == INT8 else {}
    for node in wires.nodes:
        if node.op_type == "GroupQueryAttention" and node.domain == MICROSOFT:
            lowered.in_8_bits(node, steps) if steps else lowered.in_16_bits(node)
    wires.finish()
    names = {*layout.presents, *layout.presents.values()}
    for value in (*wires.model.graph.input, *wires.model.graph.output):
        if value.name in names:
            value.type.tensor_type.elem_type = _DTYPES[config.precision]
    return onnx_artifact(src, wires.model, out, {"precision": config.precision, "layers": layout.layers})


def _steps(src: Artifact, layout: Cache, config: LowerCacheConfig) -> dict[str, np.ndarray]:
    """Returns the difference of two neighboring values for each part of the cache, [kv_heads, 1, head_dim]."""
    if config.data is None:
        raise CacheNotLowered(f"an int8 cache of {src.path.name} needs texts to calibrate on; name a file in data")
    largest: dict[str, np.ndarray] = {}
    with open_session(src, "onnxruntime") as session:
        for feeds in feeds_of_texts(src.signature, config.data, config.samples):
            outputs = session.run(feeds)
            for past, present in layout.presents.items():
                found = abs(outputs[present]).max(axis=(0, 2), keepdims=True)[0]
                largest[past] = np.maximum(largest.get(past, _LEAST), found)
    return {past: (value / _LEVELS).astype(np.float32) for past, value in largest.items()}


class _Lowered:
    """Replaces the attention operators in ``wires``."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._masks: dict[str, str] = {}

    def in_8_bits(self, node: onnx.NodeProto, steps: dict[str, np.ndarray]) -> None:
        inputs = [*node.input, *[""] * (_STEPS - len(node.input))][:_STEPS]
        inputs += [self._wires.constant(steps[node.input[part]], "step") for part in (_KEY, _VALUE)]
        kind = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        self._replace(node, inputs, list(node.output), kind)

    def in_16_bits(self, node: onnx.NodeProto) -> None:
        wires, inputs = self._wires, list(node.input)
        for at in _COMPUTED:
            if at < len(inputs) and inputs[at]:
                inputs[at] = self._mask(inputs[at], node) if at == _MASK else self._cast(inputs[at], node)
        own = wires.name("attention")
        self._replace(node, inputs, [own, *node.output[1:]], {})
        wires.instead(node, "Cast", [own], [node.output[0]], to=onnx.TensorProto.FLOAT)

    def _replace(self, node: onnx.NodeProto, inputs: list[str], outputs: list[str], more: dict[str, Any]) -> None:
        kept = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        self._wires.instead(node, node.op_type, inputs, outputs, MICROSOFT, **{**kept, **more})

    def _cast(self, value: str, where: onnx.NodeProto) -> str:
        return self._wires.instead(where, "Cast", [value], to=onnx.TensorProto.FLOAT16)

    def _mask(self, value: str, where: onnx.NodeProto) -> str:
        """Returns the mask in float16, without infinities. The layers share it."""
        if value not in self._masks:
            least = self._wires.constant(np.array(_MASKED, np.float32), "masked")
            self._masks[value] = self._cast(self._wires.instead(where, "Max", [value, least]), where)
        return self._masks[value]
