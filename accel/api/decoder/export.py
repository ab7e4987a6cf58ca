"""Exports a decoder with its KV cache to a folder, and proves each stage with the scenarios of ``accel.decoders``."""

from __future__ import annotations

import json
from pathlib import Path

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.decoders.folder import check_folder, write_folder
from accel.decoders.proof import PADDED, DecoderGate
from accel.errors import BadSource, StageFailed
from accel.optimizer.publish import check_out
from accel.signature.decoder import POSITIONS
from accel.sources.source import Source
from accel.spelling import option
from accel.tables.kinds import KINDS

from ..export import to_onnx, to_onnx_config, usual_limit

_CONFIG = "config.json"


def is_decoder(source: Source, out: Path | None) -> bool:
    """Tells whether ``source`` is exported with a KV cache. If the user doesn't say it, a model that generates text is
    exported with a cache, unless the user declares the inputs or wants a single file."""
    if source.decoder is not None:
        return source.decoder
    if source.inputs or (out is not None and out.suffix) or not source.native or source.form is not None:
        return False
    try:
        config = json.loads((source.path / _CONFIG).read_text(encoding="utf-8"))
        names = config["architectures"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    if not isinstance(names, list) or not names:
        return False
    from accel.sources.torch.pretrained.transformers_folder import generates

    return generates(str(names[0]))


def decoder_gates(src: Artifact, limit: float) -> list[DecoderGate]:
    """Returns the gate of a decoder, or no gate if ``src`` wasn't opened as a decoder."""
    about = src.source.get("decoder")
    return [DecoderGate(limit=limit, context=about["context"])] if about else []


def _check_own_cache(src: Artifact, gate: DecoderGate) -> None:
    """Raises ``BadSource`` if the PyTorch model itself computes other logits with its cache than without."""
    failed = next((result for result in gate.check(src, src) if result.passed is False), None)
    if failed is not None:
        counted = failed.case != PADDED or any(spec.name == POSITIONS for spec in src.signature.inputs)
        fix = "correct its forward" if counted else "let it take position_ids, because padding shifts the positions"
        raise BadSource(
            f"in PyTorch, {src.source['spec']} computes other logits with its own cache than without, at "
            f"{failed.case} ({failed.finding}); {fix}, or export one pass without a cache with "
            f"{option('decoder', False)}"
        )


def export_decoder(
    src: Artifact, source: Source, *, opset: int, simplify: bool, limit: float | None, cache: StageCache, folder: Path
) -> Artifact:
    """Exports the opened decoder ``src`` to ``folder``, with the configs and the tokenizer of ``source``.

    Raises the errors of ``accel.export``, and ``CannotWrite`` if a file that accel did not make would be overwritten.
    """
    check_out(folder, source.text)
    check_folder(folder)
    allowed = limit or usual_limit(src)
    gates = decoder_gates(src, allowed)
    out = folder / KINDS["onnx"].main_file
    try:
        made = to_onnx(src, to_onnx_config("torch", opset=opset), simplify, limit, cache, out, gates)
    except StageFailed:
        _check_own_cache(src, gates[0])
        raise
    write_folder(made, source.folder)
    return made
