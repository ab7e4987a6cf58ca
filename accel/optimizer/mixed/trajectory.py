"""Records a search for mixed precision, with each assignment that was tried and the chosen assignment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from accel.artifact import finite_json
from accel.converters.quantize.sensitivity import Sensitivity


@dataclass(frozen=True, kw_only=True)
class Try:
    """One assignment that was built and judged.

    ``kept`` lists the layers that aren't int8. ``in_fp32`` lists the layers of ``kept`` that are float32 although the
    base is a 16-bit precision. ``drop`` means the same as in ``Judgement``. ``within`` is True if the drop is within
    ``max_drop``. ``judged_on`` is ``search`` (the first half of the data), ``held out`` (the second half) or ``all``
    (the data could not be split).
    """

    kept: tuple[str, ...]
    drop: float
    within: bool
    judged_on: str
    in_fp32: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Trajectory:
    """The record of the search that found an assignment.

    ``base`` is the precision of the layers in ``kept``, except for the layers in ``in_fp32``. ``layers`` holds the
    error of each layer if only this layer is quantized, the most sensitive layer first. ``confirmed`` is True if the
    assignment was confirmed on the held-out half of the data. If there was no held-out half, ``not_confirmed`` is the
    reason.
    """

    base: str
    layers: Sequence[Sensitivity] = ()
    tries: list[Try] = field(default_factory=list)
    kept: tuple[str, ...] = ()
    in_fp32: tuple[str, ...] = ()
    confirmed: bool = False
    not_confirmed: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the record in the format of the manifest and ``optimize.json``."""
        found: dict[str, Any] = finite_json(asdict(self))
        return found

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Trajectory:
        """Returns the record that ``to_json`` wrote. A drop or an error without a number is infinite."""

        def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
            return {name: math.inf if value is None else value for name, value in row.items()}

        tries = [
            Try(**{**numbers(one), "kept": tuple(one["kept"]), "in_fp32": tuple(one["in_fp32"])})
            for one in body["tries"]
        ]
        return cls(
            **{
                **body,
                "layers": [Sensitivity(**numbers(layer)) for layer in body["layers"]],
                "tries": tries,
                "kept": tuple(body["kept"]),
                "in_fp32": tuple(body["in_fp32"]),
            }
        )

    def precision_of(self, node: str) -> str:
        """Returns the precision of the layer ``node``."""
        return "fp32" if node in self.in_fp32 else self.base if node in self.kept else "int8"
