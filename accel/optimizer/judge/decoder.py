"""Judges how much the next-token distributions of a quantized decoder differ from those of its source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, text_sha256
from accel.cache import StageCache
from accel.converters.quantize.texts import write_texts
from accel.decoders.decoder import Decoder, special_tokens
from accel.decoders.replay import Replay, bytes_a_token, cache_precision
from accel.errors import BadData, UnknownName, UsageError
from accel.progress import report
from accel.proof.gates import PATIENT, gate_runtime
from accel.runtimes.base import Session, SessionOptions, open_session
from accel.signature.decoder import Cache
from accel.spelling import option
from accel.stage import path_sha256

from .cached import CachedText, cached_texts, contexts_to_judge, logits_after
from .comparison import Judge, Judgement
from .texts import MOST_TOKENS, WINDOW, calibration_texts, judged_texts

if TYPE_CHECKING:
    import numpy as np

# The measures that a budget may be for: the mean Kullback-Leibler divergence of the candidate's distributions from the
# source's in nats a token, the relative rise of the perplexity, and the share of tokens whose most likely successor
# changes.
KL, PERPLEXITY, TOP1 = MEASURES = ("kl", "perplexity", "top1")

_TEXTS_FILE = "texts.npz"
# The tokens whose distributions are compared at once. More would leave the cache of a core.
_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums over tokens: of the divergences, of the negative log-likelihoods of the candidate and of the source, and of
    the tokens with another most likely successor."""

    tokens: int = 0
    divergence: float = 0.0
    candidate: float = 0.0
    source: float = 0.0
    changed: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(**{name: getattr(self, name) + getattr(other, name) for name in vars(self)})

    @property
    def perplexity(self) -> float:
        """Returns the candidate's perplexity."""
        return math.exp(self.candidate / self.tokens)

    @property
    def source_perplexity(self) -> float:
        """Returns the source's perplexity."""
        return math.exp(self.source / self.tokens)

    def drop(self, measure: str) -> float:
        """Returns the loss in terms of ``measure``."""
        if measure == KL:
            return self.divergence / self.tokens
        if measure == TOP1:
            return self.changed / self.tokens
        return max(0.0, self.perplexity / self.source_perplexity - 1)


class DecoderJudge(Judge):
    """Judges decoders on the text file ``text``, or on texts that the source samples. ``measure`` is one of
    ``MEASURES``. ``folder`` has the tokenizer, by default the source's folder. A candidate whose cache may be
    rounded is also judged on tokens with ``contexts`` tokens in the cache, and its worst loss counts.

    Perplexity alone is blind: 4-bit weights may change every twentieth most likely token, and hardly the perplexity.
    """

    def __init__(
        self,
        source: Artifact,
        text: Path | None,
        measure: str = KL,
        folder: Path | None = None,
        contexts: Sequence[int] = (),
    ) -> None:
        super().__init__(source, None, None)
        if measure not in MEASURES:
            raise UnknownName(f"unknown measure {measure!r} of a decoder; use one of {', '.join(MEASURES)}")
        self._text = text
        self._folder = folder
        self._measure_name = measure
        self._windows: list[np.ndarray] | None = None
        self._logits: list[np.ndarray] | None = None
        self._cached: list[CachedText] | None = None
        self._most = special_tokens(source).context
        self._contexts = contexts_to_judge(contexts, self._most)

    def key(self, candidate: Artifact, options: Mapping[str, Any]) -> str:
        """Returns a hash of everything that a judgement depends on."""
        text = path_sha256(self._text) if self._text else ""
        part = f"decoder, short texts, {self._measure_name} {WINDOW} {MOST_TOKENS}"
        part += f" {self._contexts}" if self._rounds_cache(candidate) else ""
        return text_sha256("\n".join([self.source.digest, candidate.digest, str(sorted(options.items())), text, part]))

    def check(self, cache: StageCache) -> None:  # noqa: ARG002 - a decoder's logits are too large for the cache
        """Reads the text. Raises ``BadData`` if the text is too short, and ``BadSource`` if a text is given and the
        decoder's folder has no tokenizer."""
        self._of_source()

    def nan_note(self) -> str:
        """Returns "", because ``check`` raises an error for a source with NaN."""
        return ""

    def judge(self, candidate: Artifact, options: Mapping[str, Any]) -> Judgement:
        """Runs ``candidate`` on the texts and compares its distributions with the source's."""
        windows, wanted = self._of_source()
        settings = replace(SessionOptions.of(options), spinning=False)
        total, largest = Sums(), 0.0
        runtime = gate_runtime(candidate)
        with open_session(candidate, runtime, settings) as session:
            for number, (ids, reference) in enumerate(zip(windows, wanted, strict=True)):
                report("judging", number / len(windows))
                found = Replay(session, 1).step(ids[None])[0, :-1]
                largest = max(largest, float(abs(found - reference).max()))
                total += sums(ids, reference, found)
            in_cache = self._at_contexts(session) if self._rounds_cache(candidate) else {}
            cache = {"precision": cache_precision(session), "bytes_a_token": bytes_a_token(session)}
        every = [total, *in_cache.values()]
        finite = all(math.isfinite(one.divergence) for one in every)
        return Judgement(
            drop=max(one.drop(self._measure_name) for one in every) if finite else math.inf,
            metric=total.perplexity if finite else None,
            reference_metric=total.source_perplexity,
            max_abs_diff=largest,
            judged_on=f"{total.tokens} tokens of {self._text.name if self._text else 'its own texts'} with {runtime}",
            problem="" if finite else "its logits are NaN or infinite",
            details=self._details(total, in_cache, cache) if finite else "",
            cache=cache,
        )

    def _rounds_cache(self, candidate: Artifact) -> bool:
        """Tells whether ``candidate`` may read rounded keys and values, because its runtime keeps them, or because its
        file keeps them in another dtype than the source."""
        own, cache = Cache.of(self.source.signature), Cache.of(candidate.signature)
        return cache is None or own is None or [one.dtype for one in cache.past] != [one.dtype for one in own.past]

    def _at_contexts(self, session: Session) -> dict[int, Sums]:
        """Returns the sums over the tokens behind each number of tokens in the cache."""
        windows, _ = self._of_source()
        if self._cached is None:
            with open_session(self.source, gate_runtime(self.source), PATIENT) as source:
                self._cached = cached_texts(source, windows, self._contexts, self._most)
        found = dict.fromkeys(self._contexts, Sums())
        for text in self._cached:
            logits = logits_after(session, text.ids, text.context)
            found[text.context] += sums(text.judged, text.logits, logits)
        return found

    def texts_to_calibrate(self, cache: StageCache) -> Path:
        """Returns a file with texts that the judge doesn't read (see ``calibration_texts``), made once for the
        cache."""
        text = path_sha256(self._text) if self._text else ""
        key = text_sha256(
            "\n".join(["short texts to calibrate on", self.source.digest, text, str(WINDOW), str(MOST_TOKENS)])
        )
        if not (cache.entry(key) / _TEXTS_FILE).is_file():
            with cache.scratch() as folder, open_session(self.source, gate_runtime(self.source), PATIENT) as session:
                texts = calibration_texts(Decoder(self.source, session, self._folder), self._text)
                write_texts(texts, folder / _TEXTS_FILE)
                cache.keep(key, folder)
        return cache.entry(key) / _TEXTS_FILE

    def _details(self, total: Sums, in_cache: Mapping[int, Sums], cache: Mapping[str, Any]) -> str:
        later = "".join(f", KL {one.drop(KL):.4g} with {size} tokens in the cache" for size, one in in_cache.items())
        return (
            f"KL {total.drop(KL):.4g} nats a token, perplexity {total.perplexity:.4g} (the source: "
            f"{total.source_perplexity:.4g}), {100 * (1 - total.drop(TOP1)):.1f}% of the most likely tokens unchanged"
            f"{later}, a cache in {cache['precision']} of {cache['bytes_a_token']} bytes a token"
        )

    def _of_source(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the texts, and the source's logits of all tokens of each text but the last."""
        if self._windows is None or self._logits is None:
            with open_session(self.source, gate_runtime(self.source), PATIENT) as session:
                decoder = Decoder(self.source, session, self._folder)
                texts = list(judged_texts(decoder, self._text))
            self._windows, self._logits = [ids for ids, _ in texts], [logits for _, logits in texts]
            import numpy as np

            if not all(np.isfinite(logits).all() for logits in self._logits):
                raise BadData(
                    "the source itself has NaN in its logits; check it with accel verify, and export it again"
                )
        return self._windows, self._logits


def sums(ids: np.ndarray, reference: np.ndarray, found: np.ndarray) -> Sums:
    """Returns the sums over the tokens ``ids`` [length]. ``reference`` and ``found`` are the logits of the source and
    of the candidate, [length, vocabulary]. The logits of the last token aren't needed."""
    parts = (slice(start, min(start + _ROWS, len(ids) - 1)) for start in range(0, len(ids) - 1, _ROWS))
    return sum((_sums(ids[1:][part], reference[part], found[part]) for part in parts), start=Sums())


def _sums(following: np.ndarray, reference: np.ndarray, found: np.ndarray) -> Sums:
    import numpy as np

    wanted, other = _log_probabilities(reference), _log_probabilities(found)
    at = np.arange(len(following)), following
    return Sums(
        tokens=len(following),
        divergence=float((np.exp(wanted) * (wanted - other)).sum()),
        candidate=-float(other[at].sum()),
        source=-float(wanted[at].sum()),
        changed=int((wanted.argmax(axis=1) != other.argmax(axis=1)).sum()),
    )


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    import numpy as np

    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def measure_and_limit(metric: str | None, max_drop: float, max_kl: float | None) -> tuple[str, float]:
    """Returns the measure and the limit that the user's options mean. ``max_kl`` is short for the metric ``kl`` with
    ``max_drop``."""
    if max_kl is None:
        return metric or KL, max_drop
    if metric not in (None, KL):
        raise UsageError(f"{option('max_kl', max_kl)} is a limit of {KL}; leave out {option('metric', metric)}")
    if not max_kl >= 0:
        raise UsageError(f"{option('max_kl', max_kl)} is not valid; give nats a token, e.g. 0.005")
    return KL, max_kl
