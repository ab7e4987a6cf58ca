"""The record of a search for mixed precision: each assignment that was tried, and the one that was taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from accel.artifact import finite_json
from accel.converters.quantize.sensitivity import Sensitivity


@dataclass(frozen=True, kw_only=True)
class Try:
    """One assignment that was built and judged.

    ``kept``: the layers that aren't int8. ``in_fp32``: those of ``kept`` that compute in float32 although the base is
    a 16-bit format. ``drop``: as in ``Judgement``. ``within``: the drop is within the budget.
    ``judged_on``: ``search`` (the first half of the data), ``held out`` (the second half) or ``all`` (the metric can't
    be computed on a half).
    """

    kept: tuple[str, ...]
    drop: float
    within: bool
    judged_on: str
    in_fp32: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Trajectory:
    """The record of the search that found an assignment.

    ``base``: the precision of the layers in ``kept``, except for those ``in_fp32``. ``layers``: the error of each layer
    in int8 alone, the most sensitive first. ``confirmed``: the held-out half of the data confirms the assignment.
    ``not_confirmed``: why there was no held-out half.
    """

    base: str
    layers: Sequence[Sensitivity] = ()
    tries: list[Try] = field(default_factory=list)
    kept: tuple[str, ...] = ()
    in_fp32: tuple[str, ...] = ()
    confirmed: bool = False
    not_confirmed: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the record as the manifest and ``optimize.json`` have it."""
        found: dict[str, Any] = finite_json(asdict(self))
        return found

    def precision_of(self, node: str) -> str:
        """Returns the precision that the layer ``node`` computes in."""
        return "fp32" if node in self.in_fp32 else self.base if node in self.kept else "int8"
