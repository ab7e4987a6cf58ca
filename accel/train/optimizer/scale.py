"""Scales the loss of the fp16 modes, and counts the steps that overflow."""

from __future__ import annotations

# The smallest loss scale. An even smaller loss scale would not help.
_FLOOR = 2.0**-20
# The number of overflowing steps in a row after which a run stops.
MOST_SKIPPED = 100


class LossScale:
    """Dynamic loss scaling.

    If a gradient on any rank is not finite, the scale halves and every rank skips the step. After ``interval`` good
    steps the scale doubles. The method is from Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    ``skipped`` counts the skipped steps since the beginning of the run, and ``in_a_row`` since the last good step.
    """

    def __init__(self, first: float, interval: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = first if enabled else 1.0
        self.interval = interval
        self.good = self.skipped = self.in_a_row = 0

    @property
    def hopeless(self) -> bool:
        """Tells whether so many steps in a row were skipped that a run has to stop."""
        return self.in_a_row >= MOST_SKIPPED

    def update(self, *, finite: bool) -> None:
        """Adjusts the scale after a step."""
        if not self.enabled:
            return
        if not finite:
            self.scale, self.good = max(self.scale / 2, _FLOOR), 0
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            return
        self.good, self.in_a_row = self.good + 1, 0
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0

    def fell_to(self) -> str:
        """Returns words for a message about the scale after many skipped steps."""
        return f"its floor, {self.scale:g}" if self.scale == _FLOOR else f"{self.scale:g}"

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes over the state of a checkpoint. Checkpoints of version 0.1 lack the counts of skipped steps."""
        self.scale, self.good = float(state["scale"]), int(state["good"])
        self.skipped, self.in_a_row = int(state.get("skipped", 0)), int(state.get("in_a_row", 0))
