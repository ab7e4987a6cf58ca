"""Judges how much less accurate a candidate is than its source, by the user's metric or by the distance of the
outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, canonical_json, finite_json, text_sha256
from accel.cache import StageCache
from accel.cancel import check_cancelled
from accel.errors import BadData, BadSource, RunFailed, UsageError
from accel.progress import report
from accel.proof.compare import compare
from accel.proof.concordance import discordance
from accel.proof.data import Dataset, place
from accel.proof.gates import PATIENT, Outputs, cast_feeds, gate_runtime
from accel.proof.runs import check_samples, nan_samples, nan_words
from accel.proof.stream import SampleStream
from accel.runtimes.base import ROUNDED, SessionOptions, detached, open_session
from accel.sources.python_object import load_object, raised
from accel.spelling import option, options
from accel.stage import path_sha256

from .label_metric import LabelMetric
from .metric_code import metric_digest

if TYPE_CHECKING:
    import numpy as np

# The arguments are dicts, so that type checkers take metrics that declare dicts and metrics that declare mappings.
Metric = Callable[[dict[str, "np.ndarray"], dict[str, "np.ndarray"]], float]

BATCH = 8

# The name of the method that computes the quality drop if the user gives no metric. Cache keys contain this name, so a
# changed method needs a new name.
_DROP = "discordance"

# Without a metric, outputs are compared on at most this many batches.
MOST_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The judgement of one candidate.

    With a metric, ``drop`` is (reference - candidate) / |reference|, computed from the metric of the source and of the
    candidate. Without a metric, ``drop`` is the ``discordance`` of the worst output. For a decoder, ``metric`` is the
    perplexity, and ``DecoderJudge`` computes ``drop``. ``max_abs_diff`` is the largest difference of any output value.
    ``judged_on`` names the batches and the runtime on which the candidate was judged. ``problem`` is the reason why the
    outputs can't be compared, or empty. ``details`` are further figures in words. ``cache`` has the ``precision`` of a
    decoder's KV cache, as read back from the session, and ``bytes_a_token``.
    """

    drop: float
    metric: float | None
    reference_metric: float | None
    max_abs_diff: float
    judged_on: str
    problem: str = ""
    details: str = ""
    cache: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the judgement in the format of ``optimize.json`` and the cache."""
        return finite_json(asdict(self))  # type: ignore[no-any-return]


class Judge:
    """Judges candidates against one source, whose outputs are computed once.

    ``metric`` is a function ``f(outputs, data) -> float`` whose value is higher for better outputs. The argument
    ``outputs`` of a metric maps each output's name to an array, with all samples on axis 0. The argument ``data`` of a
    metric holds every array of the data, such as inputs and labels. If the path ``data`` is None, the judge compares
    outputs on random inputs. The candidates were calibrated on the first ``skip`` samples of the data. Without a
    metric, the judge only uses the samples after the calibration samples. If all samples are calibration samples, the
    judge uses the calibration samples and ``saw_all`` is set.
    """

    def __init__(self, source: Artifact, data: Path | None, metric: str | Metric | None, skip: int = 0) -> None:
        self.source = source
        self.data = data
        self.metric_name = metric if isinstance(metric, str) else getattr(metric, "__name__", "")
        self.metric: Metric | None = load_object(metric, "metric")[1] if isinstance(metric, str) else metric
        if self.metric is not None and data is None:
            raise UsageError(f"a metric needs data; pass {options('data', 'eval_data')}")
        if self.metric is not None and not callable(self.metric):
            given = self.metric_name or repr(self.metric)
            raise UsageError(f"the metric {given} is not a function; give a function of (outputs, data)")
        self._stream = SampleStream(data, source.signature) if data else None
        self._batch, self._skip, self._count = self._part_of_the_data(skip)
        self.saw_all = bool(skip) and self.metric is None and not self._skip
        self._dataset: Dataset | None = None
        self._reference: list[dict[str, np.ndarray]] | None = None
        self._reference_metric: float | None = None
        self._nan: tuple[int, int] | None = None

    def key(self, candidate: Artifact, options: Mapping[str, Any]) -> str:
        """Returns a hash of everything that a judgement depends on."""
        code = _DROP
        if self.metric is not None:
            code = repr(self.metric) if isinstance(self.metric, LabelMetric) else metric_digest(self.metric)
        # Random inputs depend on the ranges that the user declares for an existing file.
        data = path_sha256(self.data) if self.data else canonical_json(self.source.signature.to_json())
        part = f"{self._skip} {self._count} of {self._batch}"
        return text_sha256(
            "\n".join([self.source.digest, candidate.digest, str(sorted(options.items())), data, code, part])
        )

    def texts_to_calibrate(self, cache: StageCache) -> Path | None:  # noqa: ARG002 - only decoders read texts
        """Returns a file with texts to calibrate on, which the judge doesn't read, or None."""
        return None

    def judge(self, candidate: Artifact, options: Mapping[str, Any]) -> Judgement:
        """Runs ``candidate`` on the data and judges its outputs. This machine has to be able to run ``candidate``."""
        reference = self._reference_outputs()
        precision = SessionOptions.of(options).precision
        runtime = gate_runtime(candidate, precision)
        outputs = []
        settings = replace(PATIENT, precision=precision)
        if runtime != ROUNDED:
            settings = replace(SessionOptions.of(options), spinning=False)
        with open_session(candidate, runtime, settings) as session:
            for number, feeds in enumerate(self._feeds()):
                report("judging", number / self._count)
                outputs.append(detached(session.run(cast_feeds(session, feeds))))
        differences = [compare(a, b) for a, b in zip(reference, outputs, strict=True)]
        problems = [f"{d.output}: {d.problem}" for row in differences for d in row if d.problem]
        largest = max(d.max_abs for row in differences for d in row)
        judged_on = f"{self._count} batches with {runtime}"
        if problems:
            return Judgement(
                drop=math.inf,
                metric=None,
                reference_metric=self._reference_metric,
                max_abs_diff=largest,
                judged_on=judged_on,
                problem=problems[0],
            )
        if self.metric is None:
            drop = max(
                discordance([o[name] for o in reference], [o[name] for o in outputs], about_the_mean=bool(self.data))
                for name in reference[0]
            )
            return Judgement(drop=drop, metric=None, reference_metric=None, max_abs_diff=largest, judged_on=judged_on)
        value = self._measure(outputs)
        wanted = self.reference_metric()
        if not math.isfinite(value):  # for example, the correlation of constant outputs is NaN
            return Judgement(
                drop=math.inf,
                metric=None,
                reference_metric=wanted,
                max_abs_diff=largest,
                judged_on=judged_on,
                problem=f"the metric {self.metric_name} is {value} for its outputs",
            )
        drop = (wanted - value) / abs(wanted) if wanted else wanted - value
        return Judgement(drop=drop, metric=value, reference_metric=wanted, max_abs_diff=largest, judged_on=judged_on)

    def nan_note(self) -> str:
        """Returns a warning if the source itself outputs NaN on the samples for judging, or else an empty text."""
        if self._nan is None:
            reference = self._reference_outputs()
            count = sum(max((len(v) for v in o.values() if v.ndim), default=1) for o in reference)
            self._nan = (sum(map(nan_samples, reference)), count)
        return nan_words(*self._nan, self.source.signature, self.data)

    def check(self, cache: StageCache) -> None:
        """Runs the source and the metric on the data, before any candidate is made. Doesn't run them if ``cache`` has
        the results of an earlier run.

        Raises ``BadData``, which names the sample, if the source can't run on a sample. Raises ``UsageError`` if the
        metric fails.
        """
        key = self.key(self.source, {})
        known = cache.get_record("reference", key)
        if known is not None:
            self._nan, self._reference_metric = tuple(known["nan"]), known["metric"]
            return
        self.nan_note()
        if self.metric is not None:
            self.reference_metric()
        cache.put_record("reference", key, {"nan": self._nan, "metric": self._reference_metric})

    def reference_metric(self) -> float:
        """Returns the metric of the source itself."""
        if self._reference_metric is None:
            value = self._measure(self._reference_outputs())
            if not math.isfinite(value):
                raise UsageError(f"the metric {self.metric_name} returned {value}; it has to return a finite number")
            self._reference_metric = value
        return self._reference_metric

    def _measure(self, outputs: list[dict[str, np.ndarray]]) -> float:
        import numpy as np

        assert self.metric is not None
        assert self.data is not None
        joined = {name: np.concatenate([o[name] for o in outputs]) for name in outputs[0]}
        arrays = self._arrays()
        try:
            found: Any = self.metric(joined, arrays)
        except UsageError:  # keeps the error of the metric, which has its own advice
            raise
        except (Exception, SystemExit) as error:
            told = raised(f"the metric {self.metric_name}", error)
            name = error.args[0] if isinstance(error, KeyError) and error.args else None
            if isinstance(name, str) and name not in {*arrays, *joined}:
                where = place(self.data) if self.data is not None else "the data"
                has = f"{where} has {', '.join(arrays) or 'no arrays'}; the outputs are {', '.join(joined)}"
                told = BadSource(f"{told} ({has}), or pass {option('eval_data')} with the array {name!r}")
            raise told from error
        try:
            value = float(found)
        except (TypeError, ValueError) as error:  # the metric returned several numbers, or no number
            kind = f"an array of shape {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
            raise UsageError(f"the metric {self.metric_name} returned {kind}; it has to return one number") from error
        return value

    def _arrays(self) -> dict[str, np.ndarray]:
        """Returns all arrays of the data, to pass them to the metric.

        Returns no arrays for a ``LabelMetric``, because a ``LabelMetric`` holds its own labels.
        """
        import numpy as np

        if isinstance(self.metric, LabelMetric):
            return {}
        assert self.data is not None
        if self._dataset is None:
            self._dataset = Dataset.load(self.data, self.source.signature)
        dataset = self._dataset
        names = [spec.name for spec in dataset.signature.inputs]
        same_shape = len({tuple(p[n].shape[1:] for n in names) for p in dataset.parts}) == 1
        inputs = {n: np.concatenate([p[n] for p in dataset.parts]) for n in names} if same_shape else {}
        return inputs | dataset.extra()

    def _reference_outputs(self) -> list[dict[str, np.ndarray]]:
        if self._reference is None and self._stream is None:
            # The gates run the source on the same random inputs, so that it runs once for all of them.
            with ExitStack() as stack:
                outputs = Outputs(self.source, gate_runtime(self.source), stack)
                made = []
                for feeds in self._feeds():
                    check_cancelled()
                    made.append(outputs.of(feeds))
                self._reference = made
        elif self._reference is None:
            with open_session(self.source, gate_runtime(self.source), PATIENT) as session:
                try:
                    self._reference = [detached(session.run(feeds)) for feeds in self._feeds()]
                except RunFailed:
                    if self.data is not None:
                        check_samples(self.source, self.data)  # raises an error that names the failing sample
                    raise
        return self._reference

    def _part_of_the_data(self, skip: int) -> tuple[int, int, int]:
        """Returns the batch size, the number of leading batches to skip, and the number of batches to judge on. The
        first ``skip`` samples are calibration samples. Without a metric, the judge skips the calibration samples if
        other samples are left. A metric gets all samples, because a metric may depend on their number and order.
        """
        if self._stream is None:
            return BATCH, 0, len(self.source.signature.cases())
        count = self._stream.batch_count(BATCH)
        if not count:
            raise BadData(f"{self.data} has too few samples for the model's fixed batch; add samples")
        if self.metric is not None:
            return BATCH, 0, count
        for size in (BATCH, 1):
            count, seen = self._stream.batch_count(size), self._stream.batch_count(size, skip) if skip else 0
            if seen < count:
                return size, seen, min(count - seen, MOST_BATCHES)
        return BATCH, 0, min(self._stream.batch_count(BATCH), MOST_BATCHES)

    def _feeds(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields the inputs to judge on, batch by batch, so that only outputs stay in memory."""
        signature = self.source.signature
        if self._stream is None:
            yield from map(signature.inputs_at, signature.cases())
            return
        yield from itertools.islice(self._stream.batches(self._batch, skip=self._skip), self._count)
