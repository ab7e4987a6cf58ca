"""Runs an encoder-decoder: the encoder once for each text, then the decoder step by step with both caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.artifact import Artifact
from accel.errors import AccelError, BadSource, GateFailed, UnsupportedHere, one_line
from accel.progress import report
from accel.proof.gates import PATIENT, gate_runtime
from accel.runtimes.base import Session, open_session
from accel.runtimes.kv.cache import KvCache
from accel.signature import Feeds, Signature
from accel.signature.decoder import IDS, MASK, reordered
from accel.signature.encoder_decoder import FEATURES, SOURCE_MASK, Caches, takes_text
from accel.stage import GateResult

from .decoder import Decoder
from .proof import DecoderGate, scenarios
from .replay import Replay, replay

if TYPE_CHECKING:
    import numpy as np

# The longest text and sound that the gate runs have these numbers of tokens.
_SOURCE = 40


class CrossCache:
    """Holds both caches of a batch: the encoder's, computed once from its inputs ``given``, and the decoder's own."""

    def __init__(self, session: Session, encoder: Session, given: Mapping[str, np.ndarray]) -> None:
        caches = Caches.of(session.signature)
        assert caches is not None, "the session is a decoder that reads an encoder"
        outputs = encoder.run(given)
        self._fixed = {past: outputs[present] for past, present in caches.cross.items()}
        if any(spec.name == SOURCE_MASK for spec in session.signature.inputs):
            self._fixed[SOURCE_MASK] = given[MASK]
        self._own = KvCache(session, caches.own, len(next(iter(given.values()))))

    def step(self, feeds: Feeds) -> np.ndarray:
        """Runs the decoder with the inputs ``feeds`` beside both caches. Returns the logits [rows, new tokens,
        vocabulary], and adds the new tokens to the decoder's cache."""
        return self._own.step({**feeds, **self._fixed})

    def reorder(self, rows: Iterable[int]) -> None:
        """Puts the rows of both caches into a new order. A row may be repeated or left out."""
        order = list(rows)
        self._own.reorder(order)
        self._fixed = reordered(self._fixed, order)

    def crop(self, tokens: int) -> None:
        """Keeps the first ``tokens`` tokens of the decoder's own cache."""
        self._own.crop(tokens)

    def arrays(self) -> Mapping[str, np.ndarray]:
        """Returns the decoder's own keys and values by name."""
        return self._own.arrays()


def begun(session: Session, encoder: Session, given: Mapping[str, np.ndarray]) -> Replay:
    """Runs the encoder on its inputs ``given``, and returns a replay of the decoder in ``session``."""
    rows = len(next(iter(given.values())))
    return Replay(session, rows, CrossCache(session, encoder, given))


def padded_right(texts: Sequence[Sequence[int] | np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the encoder's inputs for texts of any lengths, padded on the right as in training."""
    import numpy as np

    longest = max(map(len, texts))
    ids = np.stack([np.pad(np.asarray(text, np.int64), (0, longest - len(text))) for text in texts])
    mask = np.stack([np.arange(longest) < len(text) for text in texts]).astype(np.int64)
    return {IDS: ids, MASK: mask}


class TextPair(Decoder):
    """An encoder-decoder that is open to run, which answers texts with texts.

    Raises ``UnsupportedHere`` if the encoder takes sound.
    """

    def __init__(self, artifact: Artifact, session: Session, encoder: Session) -> None:
        if not takes_text(encoder.signature):
            raise UnsupportedHere(
                f"the encoder of {artifact.path.parent} takes {encoder.signature.inputs[0]}, not text; run both files "
                "with accel.load"
            )
        super().__init__(artifact, session)
        about = artifact.source.get("encoder_decoder")
        if not about or about.get("start") is None:
            raise BadSource(
                f"{artifact.path} doesn't say with which token an answer begins; export the model again with accel"
            )
        self.encoder = encoder
        self.start = [about["start"], *([about["forced_first"]] if about.get("forced_first") is not None else ())]
        self.suppressed = tuple(about.get("suppressed", ()))
        self.longest_prompt = about.get("source")

    def begin(self, sources: Sequence[Sequence[int]]) -> Replay:
        """Runs the encoder on ``sources``, and returns the replay of their answers."""
        return begun(self.session, self.encoder, padded_right(sources))


@dataclass(frozen=True, kw_only=True)
class PairGate(DecoderGate):
    """Limits the relative error of the decoder's logits in each scenario, with the caches of ``encoder``.

    The reference is PyTorch: each pair of texts alone, in one pass and without a cache.
    """

    encoder: Artifact
    name: str = "encoder and decoder"

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "limit": self.limit, "context": self.context, "encoder": self.encoder.digest}

    def check(self, src: Artifact, out: Artifact) -> list[GateResult]:
        """Returns a result for each scenario and for a greedy generation."""
        asked = scenarios(self.context, padded=False)
        results = []
        with ExitStack() as stack:
            runs = self._opened(src, out, stack)
            for index, scenario in enumerate(asked):
                report("gate", index / (len(asked) + 1))
                rows = [runs.texts[number][:length] for number, length in scenario.texts]
                running = runs.begin([number for number, _ in scenario.texts])
                try:
                    found = replay(runs.session, rows, scenario.steps, scenario.order, running)
                except AccelError as error:
                    raise GateFailed(f"the decoder fails at {scenario.name}: {one_line(error)}") from error
                kept = scenario.texts if scenario.order is None else [scenario.texts[n] for n in scenario.order]
                wanted = [runs.whole(runs.sources[n], runs.texts[n][None])[0, :length] for n, length in kept]
                results.append(self._worst(scenario.name, wanted, found))
            text = runs.texts[0][: min(4, self.context // 2)]
            results.append(self._greedy(runs.begin([0]), lambda ids: runs.whole(runs.sources[0], ids), text))
        return results

    def prefill(self, src: Artifact, out: Artifact) -> tuple[np.ndarray, np.ndarray]:
        """Returns the logits of whole texts in a batch: the reference's, and those of the exported files."""
        import numpy as np

        with ExitStack() as stack:
            runs = self._opened(src, out, stack)
            texts = np.stack(runs.texts[:-1])
            wanted = [runs.whole(source, text[None])[0] for source, text in zip(runs.sources, texts, strict=False)]
            return np.stack(wanted), runs.begin(range(len(texts))).step(texts)

    def _opened(self, src: Artifact, out: Artifact, stack: ExitStack) -> _Runs:
        texts = self._texts(out)
        encoder, session = (
            stack.enter_context(open_session(one, gate_runtime(one), PATIENT)) for one in (self.encoder, out)
        )
        sources = _sources(self.encoder.signature, len(texts), self.seed)
        return _Runs(encoder, session, _whole(self.reference or src), texts, sources)


@dataclass(frozen=True)
class _Runs:
    """Both parts, open to run, the reference, and a text and a source for each row."""

    encoder: Session
    session: Session
    reference: Callable[[Mapping[str, np.ndarray], np.ndarray], np.ndarray]
    texts: Sequence[np.ndarray]
    sources: Sequence[np.ndarray]

    def begin(self, rows: Sequence[int]) -> Replay:
        return begun(self.session, self.encoder, _batch([self.sources[row] for row in rows]))

    def whole(self, source: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return self.reference(_batch([source]), ids)


def _whole(artifact: Artifact) -> Callable[[Mapping[str, np.ndarray], np.ndarray], np.ndarray]:
    """Returns a function that computes the logits of whole texts in PyTorch, without a cache."""
    from accel.sources.torch.call import to_array, to_tensor
    from accel.sources.torch.pretrained.encoder_decoder import DecoderPart
    from accel.sources.torch.source import module_of

    module = module_of(artifact)
    assert isinstance(module, DecoderPart), "the source was opened as a part of an encoder-decoder"

    def whole(given: Mapping[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
        tensors = [to_tensor(value) for value in given.values()]
        return to_array(module.parts.whole(tensors, to_tensor(ids))).astype("float32")

    return whole


def _sources(encoder: Signature, count: int, seed: int) -> list[np.ndarray]:
    """Returns random texts of unequal lengths, or random sounds."""
    import numpy as np

    drawn = np.random.default_rng(seed + 1)
    if not takes_text(encoder):
        shape = encoder.input(FEATURES).shape[1:]
        return list(drawn.standard_normal((count, *(int(size) for size in shape))).astype(np.float32))
    low, high = encoder.input(IDS).range_at({}) or (0, 1)
    longest = min(_SOURCE, max(limits.max for limits in encoder.dims.values()))
    return [drawn.integers(low, high, max(1, longest - 3 * n), endpoint=True) for n in range(count)]


def _batch(sources: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    import numpy as np

    return padded_right(sources) if sources[0].ndim == 1 else {FEATURES: np.stack(sources)}
