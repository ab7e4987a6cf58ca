"""Exports a decoder with its KV cache to a folder, and proves each stage with the scenarios of ``accel.decoders``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.decoders.decoder import special_tokens
from accel.decoders.folder import OPENVINO_GENAI, check_folder, write_folder
from accel.decoders.proof import PADDED, DecoderGate
from accel.errors import BadSource, StageFailed
from accel.optimizer.publish import check_out
from accel.signature.decoder import POSITIONS, step_sizes
from accel.sources.run_folder import CONFIG, trained_config
from accel.sources.source import Source
from accel.spelling import option
from accel.stage import run_stage
from accel.tables.kinds import KINDS
from accel.tables.limits import EXPORT_LIMITS

from ..export import to_onnx, to_onnx_config, usual_limit
from .adapters import adapter_config, with_adapter_inputs


def is_decoder(source: Source, out: Path | None) -> bool:
    """Tells whether ``source`` is exported with a KV cache. If the user doesn't say it, a model that generates text is
    exported with a cache, unless the user declares the inputs or wants a single file. ``accel train`` recorded whether
    its model does."""
    if source.decoder is not None:
        return source.decoder
    if source.inputs or (out is not None and out.suffix) or not source.native or source.form is not None:
        return False
    if (trained := trained_config(source.folder or source.path)) is not None:
        return bool(trained.get("decoder"))
    try:
        config = json.loads((source.path / CONFIG).read_text(encoding="utf-8"))
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
    src: Artifact,
    source: Source,
    *,
    opset: int,
    simplify: bool,
    limit: float | None,
    cache: StageCache,
    folder: Path,
    adapters: Sequence[Path] = (),
) -> Artifact:
    """Exports the opened decoder ``src`` to ``folder``, with the configs and the tokenizer of ``source``. The matrices
    of ``adapters``, which are folders of PEFT, become inputs.

    Raises the errors of ``accel.export``, and ``CannotWrite`` if a file that accel did not make would be overwritten.
    """
    main = KINDS["onnx"].main_file
    check_out(folder, source.text)
    check_folder(folder, main)
    config = adapter_config(src, adapters) if adapters else None
    made = _onnx(src, opset, simplify, limit, cache, None if config else folder / main)
    if config is not None:
        made = with_adapter_inputs(src, made, config, limit or usual_limit(src), cache, folder / main)
    write_folder(made, source.folder)
    return made


def _onnx(
    src: Artifact, opset: int, simplify: bool, limit: float | None, cache: StageCache, out: Path | None
) -> Artifact:
    gates = decoder_gates(src, limit or usual_limit(src))
    try:
        return to_onnx(src, to_onnx_config("torch", opset=opset), simplify, limit, cache, out, gates)
    except StageFailed:
        _check_own_cache(src, gates[0])
        raise


def export_stateful(
    src: Artifact, source: Source, *, opset: int, simplify: bool, limit: float | None, cache: StageCache, folder: Path
) -> Artifact:
    """Exports the opened decoder ``src`` to ``folder`` as an OpenVINO IR that keeps the cache in the runtime, in the
    form of openvino-genai. ``src`` is a PyTorch model, or an ONNX decoder with a cache.

    The IR is compared with ``src`` itself. Raises the errors of ``export_decoder``.
    """
    from accel.converters.to_openvino.stateful_from_onnx import StatefulFromOnnxConfig

    main = OPENVINO_GENAI
    check_out(folder, source.text)
    check_folder(folder, main)
    cached = src if src.kind == "onnx" else _onnx(src, opset, simplify, limit, cache, None)
    context = special_tokens(src).context or sum(src.signature.dims[dim].max for dim in step_sizes(src.signature, 1, 1))
    allowed = limit or EXPORT_LIMITS.get(src.properties.get("precision", "fp32"), EXPORT_LIMITS["fp32"])
    gate = DecoderGate(limit=allowed, context=context, reference=src)
    config = StatefulFromOnnxConfig()
    made = run_stage("stateful_from_onnx", cached, config, gates=[gate], out=folder / main, cache=cache)
    write_folder(made, source.folder)
    return made
