"""Fuses a decoder into the operators that ONNX Runtime has for generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel.artifact import Artifact
from accel.errors import StageFailed
from accel.signature.decoder import Cache
from accel.sources.onnx.weights import read_detached
from accel.stage import StageConfig

from ..graph.write import onnx_artifact
from .attention import Fusion, NotFused
from .norms import fuse_norms
from .products import pack_products
from .wires import Wires


@dataclass(frozen=True, kw_only=True)
class FuseDecoderConfig(StageConfig):
    """The stage has no options."""


class DecoderNotFused(StageFailed):
    """The decoder has a form of attention that the fused operator can't compute."""


def fuse_decoder(src: Artifact, config: FuseDecoderConfig, out: Path) -> Artifact:  # noqa: ARG001 - no options
    """Replaces each attention of the decoder ``src`` by a GroupQueryAttention, and each RMS norm after an addition by a
    SkipSimplifiedLayerNormalization. Products of one value become one product. The inputs and outputs stay the same.

    Nothing in the fused graph reads the sizes of the cache, so a session may give buffers with more room than tokens,
    and the cache grows in place. Raises ``DecoderNotFused`` if ``src`` isn't a decoder, or has another attention.
    """
    cache = Cache.of(src.signature)
    if cache is None:
        raise DecoderNotFused(f"{src.path.name} has no KV cache; export the decoder with accel export --decoder")
    model = read_detached(src.path)
    wires = Wires(model)
    try:
        layers = Fusion(wires, cache).run()
    except NotFused as error:
        raise DecoderNotFused(f"the attention of {src.path.name} can't be fused, because {error}") from error
    norms = fuse_norms(wires)
    packed = pack_products(wires)
    wires.finish()
    read = {name for node in model.graph.node for name in node.input} & set(cache.presents.values())
    if read:
        raise DecoderNotFused(
            f"the attention of {src.path.name} can't be fused, because more than one attention reads {min(read)}"
        )
    return onnx_artifact(src, model, out, {"attentions": layers, "norms": norms, "packed": packed})
