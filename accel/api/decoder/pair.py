"""Exports encoder-decoders as two files, and proves both together against PyTorch."""

from __future__ import annotations

from pathlib import Path

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.decoders.encoder_decoder import PairGate
from accel.decoders.folder import check_folder, copy_configs
from accel.errors import BadSource, UsageError
from accel.optimizer.publish import check_out
from accel.proof.compare import Difference, compare
from accel.signature.decoder import LOGITS
from accel.signature.encoder_decoder import DECODER_FILE, ENCODER_FILE, Caches
from accel.sources.source import Source
from accel.spelling import option
from accel.stage import GateResult
from accel.tables.limits import VERIFY_LIMITS

from ..export import to_onnx, to_onnx_config, usual_limit
from .parts import DECODER, ENCODER, encoder_of, is_pair, open_parts

# The most tokens that the gate runs.
_LONGEST = 128


def export_pair(
    source: Source, *, opset: int, simplify: bool, limit: float | None, cache: StageCache, folder: Path
) -> Artifact:
    """Exports both parts of ``source`` to ``folder``, with the configs and the tokenizer. Returns the decoder.

    The encoder is compared with PyTorch's at several shapes, the decoder too, and then both together in the scenarios
    of decoders. Raises the errors of ``accel.export``.
    """
    check_out(folder, source.text)
    check_folder(folder, DECODER_FILE)
    if source.decoder:
        raise BadSource(
            f"{source.text} has an encoder and a decoder, which are exported as two files; leave out "
            f"{option('decoder', True)}"
        )
    config = to_onnx_config("torch", opset=opset)
    parts = source.open(part=ENCODER), source.open(part=DECODER)
    encoder = to_onnx(parts[0], config, simplify, limit, cache, folder / ENCODER_FILE)
    decoder = to_onnx(
        parts[1], config, simplify, limit, cache, folder / DECODER_FILE, [pair_gate(*parts, encoder, limit)]
    )
    copy_configs(folder, source.folder)
    return decoder


def pair_gate(encoder: Artifact, decoder: Artifact, exported: Artifact, limit: float | None) -> PairGate:
    """Returns the gate of an exported decoder with the ``exported`` encoder, against the opened ``decoder``."""
    context = decoder.source["encoder_decoder"]["context"] or _LONGEST
    allowed = limit if limit is not None else usual_limit(encoder)
    return PairGate(limit=allowed, context=min(context, _LONGEST), encoder=exported, reference=decoder)


def checked_pair(
    reference: Source, candidate: Source, limit: float | None
) -> tuple[Difference, list[GateResult], float] | None:
    """Compares the exported encoder-decoder ``candidate`` with its folder of transformers. Returns the difference of
    whole texts, a result for each scenario and the limit, or None if ``candidate`` is another model.

    Raises ``UsageError`` if ``reference`` isn't a folder of an encoder-decoder.
    """
    if candidate.native:
        return None
    second = candidate.open()
    if Caches.of(second.signature) is None:
        return None
    if not is_pair(reference):
        raise UsageError(
            f"{second.path} is the decoder of an encoder-decoder; compare it with the folder of transformers that it "
            "was made from"
        )
    allowed = limit if limit is not None else VERIFY_LIMITS[second.properties.get("precision", "fp32")]
    decoder, encoder = open_parts(reference)
    assert encoder is not None, "the reference has both parts"
    gate = pair_gate(encoder, decoder, encoder_of(second), allowed)
    wanted, found = gate.prefill(decoder, second)
    return compare({LOGITS: wanted}, {LOGITS: found})[0], gate.check(decoder, second), allowed
