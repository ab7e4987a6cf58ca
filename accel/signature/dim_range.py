"""Defines the range of sizes of a dynamic dim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from accel.errors import BadInputSpec

BATCH = "batch"


@dataclass(frozen=True)
class DimRange:
    """The range of a dynamic dim, with its smallest, most usual and largest size.

    The smallest size is 0 only for a dim that may be empty, such as the past of a KV cache. Every valid size is a
    multiple of ``step``. For example, a net that halves an image's size twice and then upsamples the image takes only
    multiples of 4.
    """

    min: int
    opt: int
    max: int
    # A step of 1 isn't recorded, so that older artifacts without steps keep their hashes.
    step: int = field(default=1, metadata={"omit_default": True})

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max or not self.opt:
            raise BadInputSpec(
                f"a dim range needs 1 <= min <= opt <= max, but got {self.min}:{self.opt}:{self.max}; write e.g. 1:8:64"
            )
        if self.step < 1:
            raise BadInputSpec(
                f"a dim range needs a step of at least 1, but got the range {self}; write e.g. 16:32:64:4"
            )
        sizes = (self.min, self.opt, self.max)
        if odd := [size for size in sizes if size % self.step]:
            nearest = ":".join(str(self.up(size - self.step // 2)) for size in sizes)
            raise BadInputSpec(
                f"in the dim range {self}, the size {odd[0]} is no multiple of the step {self.step}; write the range "
                f"{nearest}:{self.step}"
            )

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}" + (f":{self.step}" if self.step != 1 else "")

    @classmethod
    def parse(cls, text: str) -> DimRange:
        """Reads ``8:128:512`` (min:opt:max), or ``16:32:64:4`` with a step. Raises ``BadInputSpec`` for malformed
        texts."""
        try:
            numbers = [int(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) not in (3, 4):
            raise BadInputSpec(
                f"can't read the dim range {text!r}; write min:opt:max, e.g. 8:128:512, or min:opt:max:step, e.g. "
                "16:32:64:4 for multiples of 4"
            )
        return cls(*numbers)

    @classmethod
    def default(cls, dim: str) -> DimRange:
        """Returns the default range of a dim, which is 1 to 8 for the batch and 2 to 64 for other dims."""
        return cls(1, 1, 8) if dim == BATCH else cls(2, 16, 64)

    @classmethod
    def within(cls, low: int, opt: int, high: int, step: int) -> DimRange | None:
        """Returns the range of the multiples of ``step`` from ``low`` to ``high``, or None if there is no multiple. The
        usual size is the largest multiple of ``step`` in the range that is at most ``opt``. If all multiples in the
        range are larger than ``opt``, the usual size is the smallest multiple.
        """
        low, high = -(-low // step) * step, high // step * step
        return cls(low, min(max(opt // step * step, low), high), high, step) if low <= high else None

    def holds(self, size: int) -> bool:
        """Tells whether ``size`` is in the range. Doesn't look at the step."""
        return self.min <= size <= self.max

    def up(self, size: int) -> int:
        """Returns the smallest multiple of the step that is at least ``size``."""
        return max(-(-size // self.step), 1) * self.step

    def down(self, size: int) -> int:
        """Returns the largest multiple of the step that is at most ``size``, or the step if ``size`` is smaller."""
        return max(size // self.step, 1) * self.step

    def beside(self, size: int) -> str:
        """Returns the nearest multiples of the step below and above ``size`` for a message, such as ``32 or 36``."""
        found = {self.down(size), self.up(size)}
        return " or ".join(map(str, sorted(found)))

    def to_hold(self, size: int) -> str:
        """Returns this range, widened to include ``size``, as a text for ``--dim``."""
        return str(replace(self, min=min(self.min, self.down(size)), max=max(self.max, self.up(size))))

    def over(self, known: DimRange | None) -> DimRange:
        """Returns this range, which replaces ``known``. If this range has no step, and if the step of ``known`` divides
        its min, opt and max, the result keeps the step of ``known``.
        """
        if known is None or self.step != 1 or any(size % known.step for size in (self.min, self.opt, self.max)):
            return self
        return replace(self, step=known.step)

    def to_json(self) -> list[int]:
        """Returns ``[min, opt, max]``, followed by the step if the step isn't 1."""
        return [self.min, self.opt, self.max, *([self.step] if self.step != 1 else [])]


def merged_ranges(known: Mapping[str, DimRange], given: Mapping[str, DimRange]) -> dict[str, DimRange]:
    """Returns the ranges in ``known``, updated with the ranges in ``given``. A range in ``given`` without a step may
    keep the step of the range in ``known`` (see ``DimRange.over``)."""
    return {**known, **{dim: found.over(known.get(dim)) for dim, found in given.items()}}
