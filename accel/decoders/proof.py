"""Proves that a decoder with a KV cache computes the same logits as the model does without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.errors import AccelError, GateFailed, one_line
from accel.progress import report
from accel.proof.compare import compare
from accel.proof.gates import PATIENT, gate_runtime, output_result
from accel.runtimes.base import Session, open_session
from accel.signature import Feeds
from accel.signature.decoder import IDS, LOGITS, MASK
from accel.stage import GateResult

from .adapters import adapter_feeds
from .replay import Replay, replay

if TYPE_CHECKING:
    import numpy as np

Whole = Callable[["np.ndarray"], "np.ndarray"]

# The number of base texts, and their length in tokens. All scenarios use beginnings of these texts.
_TEXTS, _LENGTH = 8, 128
_TOKEN_BY_TOKEN = 96
# The most tokens of the scenario at the end of the context. A context of 128k tokens would take hours.
_LONGEST = 512
_GREEDY = 24
PADDED = "rows of unequal lengths, padded on the left"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Some texts, by number and length, and the steps in which they run. The text after the base texts reaches the end
    of the context. ``order`` is the order of the rows after the first step."""

    name: str
    texts: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]
    order: tuple[int, ...] | None = None


def scenarios(context: int, *, padded: bool = True) -> list[Scenario]:
    """Returns the ways to run a decoder that may not change its logits. ``context`` is the largest number of tokens. A
    decoder without an attention mask can't be ``padded``, so all rows have the same length."""
    length = min(_LENGTH, context)
    single = min(_TOKEN_BY_TOKEN, length)
    half, third = max(1, length // 2), max(1, length // 3)
    rest = length - half
    beams = ((0, length), (1, length), (2, length), (3, length))
    end = _end(context)
    found = [
        Scenario(name="prefill of the whole text", texts=((0, length),), steps=(length,)),
        Scenario(
            name="prefill in three parts",
            texts=((0, length), (1, length), (2, length)),
            steps=tuple(size for size in (third, 1, length - third - 1) if size),
        ),
        Scenario(name=f"{single} tokens one by one", texts=((3, single),), steps=(1,) * single),
        Scenario(
            name=PADDED,
            texts=((0, length), (1, max(1, rest + half // 3)), (2, rest + 1)),
            steps=(half, *_ones(rest)),
        ),
        Scenario(
            name="a batch of 8",
            texts=tuple((number, length) for number in range(_TEXTS)),
            steps=(half, *_ones(rest)),
        ),
        Scenario(name="rows in a new order", texts=beams, steps=(half, *_ones(rest)), order=(2, 2, 0, 1)),
        Scenario(name=f"the last token of {end}", texts=((_TEXTS, end),), steps=(end - 1, 1) if end > 1 else (1,)),
    ]
    return [scenario for scenario in found if all(scenario.steps) and (padded or scenario.name != PADDED)]


def _ones(count: int) -> tuple[int, ...]:
    """Splits ``count`` tokens into up to four single tokens and the rest."""
    singles = min(4, count)
    return (*(1,) * singles, *((count - singles,) if count > singles else ()))


@dataclass(frozen=True, kw_only=True)
class DecoderGate:
    """Limits the relative error ||candidate - reference||₂ / ||reference||₂ of the logits of each scenario.

    The reference runs each text alone, without padding, in one pass and without a cache. Therefore the gate also finds
    errors that a comparison of two cached runs can't find. ``context`` is the largest number of tokens of the model.
    ``reference`` is the model to compare with, by default the stage's input. With ``adapter``, the decoder runs with
    its adapter of this name. The reference is then a PyTorch model with the adapter merged, or a decoder with an
    adapter of the same name.
    """

    name: str = "decoder"
    limit: float
    context: int
    seed: int = 0
    reference: Artifact | None = None
    adapter: str = ""

    def to_json(self) -> dict[str, Any]:
        body = asdict(replace(self, reference=None))
        del body["reference"]
        if not self.adapter:
            del body["adapter"]
        return {**body, "reference": self.reference.digest} if self.reference else body

    def check(self, src: Artifact, out: Artifact) -> list[GateResult]:
        """Returns a result for each scenario and for a greedy generation. ``passed`` is None if this machine can't run
        ``out``."""
        runtime = gate_runtime(out)
        if runtime is None:
            note = f"{out.kind} can't run on this machine; run accel verify on a machine that can"
            return [
                GateResult(
                    gate=self.name, case="all", output=LOGITS, metric="rel_l2", value=None, limit=None, passed=None,
                    note=note,
                )
            ]  # fmt: skip
        import numpy as np

        src = self.reference or src
        texts = self._texts(src)
        adapter = adapter_feeds(out, self.adapter)
        asked = scenarios(self.context, padded=any(spec.name == MASK for spec in out.signature.inputs))
        with ExitStack() as stack:
            whole = whole_logits(src, stack, self.adapter)
            wanted = [*whole(np.stack(texts[:_TEXTS])), *whole(texts[_TEXTS][None])]
            with open_session(out, runtime, PATIENT) as session:
                results = []
                for index, scenario in enumerate(asked):
                    report("gate", index / (len(asked) + 1))
                    try:
                        found = _replayed(session, scenario, texts, adapter)
                    except GateFailed as error:
                        if out.manifest is not None:
                            raise
                        results.append(self._refused(scenario.name, one_line(error)))  # another tool's file
                        continue
                    rows = scenario.texts if scenario.order is None else [scenario.texts[n] for n in scenario.order]
                    results.append(self._worst(scenario.name, [wanted[n][:length] for n, length in rows], found))
                results.append(self._greedy(Replay(session, 1, adapter=adapter), whole, texts[0][:8]))
        return (
            [replace(one, case=f"{one.case}, with the adapter {self.adapter}") for one in results]
            if adapter
            else results
        )

    def _refused(self, case: str, note: str) -> GateResult:
        return GateResult(
            gate=self.name, case=case, output=LOGITS, metric="rel_l2", value=None, limit=None, passed=False, note=note
        )

    def _texts(self, src: Artifact) -> list[np.ndarray]:
        """Returns the random token ids of the base texts, and of a text that reaches the end of the context."""
        import numpy as np

        low, high = src.signature.input(IDS).range_at({}) or (0, 1)
        shape = (_TEXTS, _end(self.context))
        drawn = np.random.default_rng(self.seed).integers(low, high, size=shape, endpoint=True)
        return [*drawn[:, : min(_LENGTH, self.context)], drawn[0]]

    def _worst(self, case: str, wanted: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> GateResult:
        pairs = zip(wanted, found, strict=True)
        differences = [compare({LOGITS: one}, {LOGITS: other})[0] for one, other in pairs]
        return output_result(self.name, case, max(differences, key=lambda one: one.rel_l2), self.limit)

    def _greedy(self, running: Replay, whole: Whole, text: np.ndarray) -> GateResult:
        """Generates tokens greedily, and limits the share of the logits' spread by which a chosen token falls behind
        the reference's best token. Two tokens whose logits differ by rounding alone are equally good."""
        import numpy as np

        count = min(_GREEDY, self.context - len(text))
        logits = running.step(text[None])
        tokens = list(text)
        for _ in range(count):
            tokens.append(int(logits[0, -1].argmax()))
            logits = running.step(np.array([tokens[-1:]]))
        reference = whole(np.array([tokens]))[0][len(text) - 1 : -1]
        chosen = np.array(tokens[len(text) :])
        behind = reference.max(axis=1) - reference[np.arange(len(chosen)), chosen]
        spread = np.linalg.norm(reference, axis=1) + np.finfo(np.float32).tiny
        value = float((behind / spread).max(initial=0.0))
        other = int((reference.argmax(axis=1) != chosen).sum())
        note = f"{other} tokens differ, whose logits are equal within rounding" if other and value <= self.limit else ""
        return GateResult(
            gate=self.name, case=f"{count} tokens chosen greedily", output=LOGITS, metric="behind the best logit",
            value=value, limit=self.limit, passed=value <= self.limit, note=note,
        )  # fmt: skip


def _end(context: int) -> int:
    """Returns the number of tokens of the scenario at the end of the context."""
    return min(context, _LONGEST)


def _replayed(session: Session, scenario: Scenario, texts: Sequence[np.ndarray], adapter: Feeds) -> list[np.ndarray]:
    rows = [texts[number][:length] for number, length in scenario.texts]
    try:
        return replay(session, rows, scenario.steps, scenario.order, Replay(session, len(rows), adapter=adapter))
    except AccelError as error:
        raise GateFailed(f"the decoder fails at {scenario.name}: {one_line(error)}") from error


def whole_logits(artifact: Artifact, stack: ExitStack, adapter: str = "") -> Whole:
    """Returns a function that computes the logits of whole texts without a cache. A PyTorch model computes them by
    itself, and has the ``adapter`` merged. Any other model starts with an empty cache, and runs with its adapter of
    this name."""
    if artifact.kind == "torch" and artifact.manifest is None:
        from accel.sources.torch.call import to_array, to_tensor
        from accel.sources.torch.decoder import CachedDecoder
        from accel.sources.torch.source import forget, module_of

        module = module_of(artifact)
        if adapter:  # the modules of several adapters need not be in memory at once
            stack.callback(forget, artifact)
        assert isinstance(module, CachedDecoder), "the source was opened as a decoder"
        return lambda ids: to_array(module.whole(to_tensor(ids))).astype("float32")
    session = stack.enter_context(open_session(artifact, gate_runtime(artifact), PATIENT))
    feeds = adapter_feeds(artifact, adapter)
    return lambda ids: Replay(session, len(ids), adapter=feeds).step(ids)
