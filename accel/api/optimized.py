"""Defines the result of ``accel.optimize``, with methods that call, save and time the published model."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, beside
from accel.decoders.folder import check_folder, write_folder
from accel.optimizer.publish import check_no_decoder, check_out
from accel.optimizer.report.page import PAGE
from accel.optimizer.result import Optimization
from accel.proof.gates import gate_runtime
from accel.runtimes.base import BaseSession, open_session
from accel.sources.main_file import REPORT
from accel.timing.columns import as_text
from accel.timing.report import BenchReport
from accel.timing.statistics import TOO_NOISY_FLOOR

from .bench import bench

if TYPE_CHECKING:
    import numpy as np

# The number of seconds for extra rounds, which run while the speedup over the source is not yet certain.
_SECONDS = 5.0
# The number of seconds that a round runs each model.
_BLOCK_SECONDS = 0.2
# Styles for the report's plot in a notebook, where the report's own styles are missing.
_PLOT_STYLE = (
    "<style>.accel-plot svg{max-width:760px}.accel-plot text{font:11px system-ui,sans-serif;fill:#888}"
    ".accel-plot circle{fill:#8aa}.accel-plot circle.chosen{fill:#2a2}.accel-plot circle.rejected{fill:#c44}"
    ".accel-plot .axis{stroke:#aaa}.accel-plot .frontier{fill:none;stroke:#aaa;stroke-dasharray:4 3}"
    ".accel-plot .limit{stroke:#c44;stroke-dasharray:2 4}</style>"
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Optimized(Optimization):
    """Holds the result of ``accel.optimize``. The result is callable with the arguments of the source model. The result
    takes and returns tensors in the same structure as the source model. ``source`` is the model in its own framework,
    or None if the user gave an ONNX model.
    """

    source: Artifact | None = None

    @classmethod
    def of(cls, result: Optimization, source: Artifact | None) -> Optimized:
        """Returns an ``Optimized`` with all fields of ``result``, and with ``source`` as a further field."""
        return cls(**{field.name: getattr(result, field.name) for field in fields(Optimization)}, source=source)

    @cached_property
    def session(self) -> BaseSession:
        """Returns the session of the published model. The session is opened at the first use."""
        return open_session(self.artifact)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model with the arguments of the source, and returns the outputs in the source's own structure."""
        return self.session(*args, **kwargs)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs the model on arrays by input name, and returns arrays by output name."""
        return self.session.run(feeds)

    @cached_property
    def comparison(self) -> BenchReport | None:
        """At the first use, times the published model against the source, which runs in its own framework. Returns None
        if the user gave an ONNX model, or if this machine can't run the published model."""
        if self.source is None or (not self.environment and gate_runtime(self.artifact) is None):
            return None
        sizes = self.environment.get("sizes") or {}
        return bench(
            [self.artifact],
            against=self.source,
            sizes=sizes,
            block_seconds=_BLOCK_SECONDS,
            budget_seconds=_SECONDS,
            one_thread=True,
        )

    @property
    def speedup(self) -> float | None:
        """Returns the speedup of the published model over the source, as the median of paired runs. The source runs in
        its own framework, such as PyTorch in eager mode, with all cores or with one core, whichever is faster. Returns
        None if nothing was measured. On a machine that is too noisy, the number tells nothing: then
        ``comparison.too_noisy`` is True, and the text of this object says so."""
        if self.comparison is not None:
            *sources, own = self.comparison.rows
            fastest = max(row.speedup or 0.0 for row in sources)
            return None if own.speedup is None else own.speedup / fastest
        measured = next((c.measured for c in self.candidates if c.name == self.chosen), None)
        return float(measured["speedup"]) if measured and measured.get("speedup") else None

    def table(self) -> str:
        """Returns the table of all candidates as text of at most 100 columns."""
        from accel.optimizer.report.table import table

        return as_text(table(self))

    def save(self, folder: str | Path) -> Artifact:
        """Copies the model, its manifest and the report to ``folder``, and the configs and the tokenizer of a decoder.
        Returns the copied artifact.

        Raises ``CannotWrite`` if ``folder`` can't be written, if a file that accel did not make would be overwritten,
        or if ``folder`` holds a decoder and this model is none.
        """
        folder = Path(folder)
        decoder = "decoder" in self.artifact.source
        check_out(folder, str(self.artifact.path))
        (check_folder if decoder else check_no_decoder)(folder)
        saved = self.artifact.copy_to(folder / self.artifact.path.name)
        if decoder:
            write_folder(saved, self.artifact.path.parent)
        for name in (REPORT, PAGE):
            if (file := self.artifact.path.parent / name).is_file() and file.parent.resolve() != folder.resolve():
                with beside(folder / name) as temporary:
                    shutil.copyfile(file, temporary)
        return saved

    def close(self) -> None:
        """Frees the session."""
        if "session" in self.__dict__:
            self.__dict__.pop("session").close()

    def __repr__(self) -> str:
        measured = next((c.measured for c in self.candidates if c.name == self.chosen), None) or {}
        ms = f", {measured['median_ms']:.3g} ms" if measured.get("median_ms") else ""
        # The comparison is named only once it was measured, because a text must not take seconds.
        found: BenchReport | None = self.__dict__.get("comparison")
        floor = found.noise_floor if found is not None else self.environment.get("noise_floor") or 0.0
        ms += f", too noisy to tell the speedup (noise floor {floor:.0%})" if floor > TOO_NOISY_FLOOR else ""
        return f"<accel optimized: {self.chosen}{ms}, {len(self.candidates)} candidates, {self.artifact.path}>"

    def _repr_html_(self) -> str:
        """Returns the table and the plot of all candidates for a notebook."""
        page = self.artifact.path.parent / PAGE
        drawn = re.search(r'<svg id="pareto".*?</svg>', page.read_text("utf-8"), re.DOTALL) if page.is_file() else None
        plot = f'{_PLOT_STYLE}<div class="accel-plot">{drawn.group(0)}</div>' if drawn else ""
        return f"<pre>{html.escape(self.table())}</pre>{plot}"
