"""Compares two decoders: the logits of whole texts, the scenarios of a generation, and each LoRA adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.artifact import Artifact
from accel.decoders.adapters import adapter_feeds, with_adapters
from accel.decoders.decoder import special_tokens
from accel.decoders.proof import DecoderGate, whole_logits
from accel.decoders.replay import Replay
from accel.runtimes.base import open_session
from accel.signature.decoder import IDS, LOGITS, Cache, is_decoder, is_stateful, step_sizes
from accel.stage import GateResult

if TYPE_CHECKING:
    import numpy as np


def is_other_form(first: Artifact, second: Artifact) -> bool:
    """Tells whether the decoder ``second`` computes the logits of ``first`` from other inputs: because another tool
    wrote it, because its runtime keeps the cache, or because it runs with an adapter that is merged into ``first``."""
    names = [{spec.name for spec in one.signature.inputs} for one in (first, second)]
    other = names[0] != names[1] or is_stateful(second.signature) or bool(_merged(first, second))
    return is_decoder(second.signature) and other


def decoder_results(first: Artifact, second: Artifact, limit: float) -> Iterator[GateResult]:
    """Yields the results of the scenarios of the decoder ``second``, and of the scenarios with each of its adapters.
    Yields none if ``second`` is no decoder. If one adapter is merged into ``first``, only this adapter runs."""
    if not is_decoder(second.signature):
        return
    alone = _merged(first, second)
    gate = DecoderGate(limit=limit, context=_context(first, second), adapter=alone)
    yield from gate.check(first, second)
    for name, reference in () if alone else with_adapters(first, second):
        yield from replace(gate, adapter=name, reference=reference).check(first, second)


def _merged(first: Artifact, second: Artifact) -> str:
    """Returns the name of the adapter that is merged into ``first`` and that ``second`` takes as inputs, or ""."""
    found = first.source.get("adapters") if second.adapters else None
    return Path(found["path"]).absolute().name if found else ""


def _context(first: Artifact, second: Artifact) -> int:
    """Returns the largest number of tokens of two decoders, as recorded, or else as many as their ranges allow."""
    for artifact in (first, second):
        if context := special_tokens(artifact).context:
            return context
    cached = next(one for one in (second.signature, first.signature) if Cache.of(one) is not None)
    return sum(cached.dims[dim].max for dim in step_sizes(cached, 1, 1))


def whole_texts(
    first: Artifact, second: Artifact
) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Yields the logits of whole texts for two decoders with different inputs."""
    import numpy as np

    from accel.proof.gates import PATIENT, case_name, gate_runtime

    low, high = first.signature.input(IDS).range_at({}) or (0, 1)
    drawn = np.random.default_rng(0)
    context = _context(first, second)
    feeds = adapter_feeds(second, _merged(first, second))

    with ExitStack() as stack:
        whole = whole_logits(first, stack)
        session = stack.enter_context(open_session(second, gate_runtime(second), PATIENT))
        for rows, length in ((1, 8), (2, 16), (8, 4)):
            ids = drawn.integers(low, high, (rows, min(length, context)), endpoint=True)
            yield (
                case_name({"batch": rows, "sequence": ids.shape[1]}),
                {LOGITS: whole(ids)},
                {LOGITS: Replay(session, len(ids), adapter=feeds).step(ids)},
            )
