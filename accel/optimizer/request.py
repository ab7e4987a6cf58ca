"""Holds and checks the arguments of one run of ``accel optimize``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from accel.errors import UsageError
from accel.machine import available_cores
from accel.runtimes.engine_options import parse_engine_options
from accel.sources.source import Source
from accel.spelling import option, options

from .judge.comparison import Metric
from .judge.label_metric import read_labels
from .recipes.candidates import precisions_for, targets_for
from .recipes.recipe import RecipeRequest
from .stage_options import CastOptions, QuantizeOptions, parse_cast_options, parse_quantize_options


@dataclass(frozen=True, kw_only=True)
class OptimizeRequest:
    """The arguments of ``accel.optimize``, with the same names and defaults. ``accel.optimize`` documents each
    argument. ``source`` holds the model and the arguments that describe it.

    Files are given as ``Path`` objects, and repeatable options as tuples.

    Raises these errors:

    - ``UsageError`` if two arguments contradict each other or a number is out of range.
    - ``BadInputSpec`` if an option for a stage can't be read.
    - ``UnknownName`` for an unknown target or precision.
    - ``MissingExtra`` if the toolkit of the target isn't installed.
    """

    source: Source
    out: Path
    target: str | tuple[str, ...] = "auto"
    precision: tuple[str, ...] = ()
    data: Path | None = None
    eval_data: Path | None = None
    metric: str | Metric | None = None
    labels: Path | None = None
    label_metric: str | None = None
    max_drop: float = 0.01
    text: Path | None = None
    max_kl: float | None = None
    contexts: tuple[int, ...] = ()
    profiles: tuple[str, ...] = ()
    compute_capabilities: tuple[str, ...] = ()
    sizes: Mapping[str, int] | None = None
    objective: str = "latency"
    batch: int | None = None
    lengths: str | tuple[int, ...] | None = None
    threads: int = 0
    vary_session: bool = True
    rounds: int = 9
    budget_seconds: float | None = None
    thorough: bool = False
    kernels: bool = False
    engine: tuple[str, ...] = ()
    quantize: QuantizeOptions | tuple[str, ...] = ()
    cast: CastOptions | tuple[str, ...] = ()
    use_cache: bool = True

    def __post_init__(self) -> None:
        self._check_numbers()
        if any(context < 1 for context in self.contexts):
            raise UsageError(f"a context holds at least one token; give e.g. {option('contexts', (128, 1024))}")
        if not 0 <= self.max_drop < 1:
            raise UsageError(
                f"the drop {self.max_drop} has to be at least 0 and below 1; give e.g. 0.01 for one percent"
            )
        if self.labels is None and self.label_metric is not None:
            raise UsageError(
                f"the metric {self.label_metric} compares outputs with labels; pass the labels with {option('labels')}"
            )
        if self.labels is not None and self.metric is not None:
            raise UsageError(f"labels have a metric of their own; give either {options('metric', 'labels')}")
        if self.budget_seconds is not None and not self.budget_seconds > 0:
            raise UsageError(
                f"a budget of {self.budget_seconds:g} s is too short; give e.g. {option('budget_seconds', 60)}"
            )
        if self.thorough and self.budget_seconds is not None:
            raise UsageError(
                f"a thorough search has no time limit; leave out either {option('thorough', True)} or "
                f"{option('budget_seconds')}"
            )
        if self.target != "auto":
            targets_for(self.target)
        precisions_for(self.precision)
        parse_engine_options(self.engine)
        if not isinstance(self.quantize, QuantizeOptions):
            parse_quantize_options(self.quantize)
        if not isinstance(self.cast, CastOptions):
            parse_cast_options(self.cast)

    def _check_numbers(self) -> None:
        """Raises ``UsageError`` if a number has another type, such as a text."""
        kinds: tuple[tuple[type, str, dict[str, float]], ...] = (
            (Real, "a number", {"max_drop": 0.01, "max_kl": 0.005, "budget_seconds": 60}),
            (Integral, "a whole number", {"batch": 8, "threads": 2, "rounds": 9}),
        )
        for kind, what, examples in kinds:
            for name, example in examples.items():
                given = getattr(self, name)
                if given is not None and (isinstance(given, bool) or not isinstance(given, kind)):
                    raise UsageError(f"{option(name)} takes {what}, not {given!r}; give e.g. {option(name, example)}")

    @property
    def quantize_fields(self) -> dict[str, Any]:
        """Returns the fields of ``QuantizeConfig`` that the user chooses."""
        given = self.quantize
        return given.to_fields() if isinstance(given, QuantizeOptions) else parse_quantize_options(given)

    @property
    def cast_fields(self) -> dict[str, Any]:
        """Returns the fields of ``CastConfig`` that the user chooses."""
        return self.cast.to_fields() if isinstance(self.cast, CastOptions) else parse_cast_options(self.cast)

    @property
    def cores(self) -> int:
        """Returns the number of threads to measure with, by default the number of cores."""
        return self.threads or available_cores()

    @property
    def judged_on(self) -> Path | None:
        """Returns the path of the samples that the judge reads, which is ``eval_data`` if given, else ``data``. None
        means random inputs."""
        return self.eval_data or self.data

    def loaded_metric(self) -> str | Metric | None:
        """Returns the metric to judge by, which is the user's function or the metric for ``labels``. Raises the same
        errors as ``read_labels``."""
        return self.metric if self.labels is None else read_labels(self.labels, self.label_metric)

    def recipe_request(self, samples: int) -> RecipeRequest:
        """Returns the part of the request that recipes need. ``samples`` is the number of calibration samples in
        ``data``."""
        return RecipeRequest(
            targets=targets_for(self.target),
            precisions=precisions_for(self.precision),
            data=self.data,
            samples=samples,
            threads=self.cores,
            profiles=self.profiles,
            compute_capabilities=self.compute_capabilities,
            kernels=self.kernels,
            engine=parse_engine_options(self.engine),
            quantize=self.quantize_fields,
            cast=self.cast_fields,
        )
