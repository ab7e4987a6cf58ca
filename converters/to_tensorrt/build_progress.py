"""Computes the progress of an engine build from the phases that TensorRT announces."""

from __future__ import annotations


class BuildProgress:
    """Tracks the running phases of a build. A phase can contain other phases. TensorRT announces the number of steps
    when a phase starts."""

    def __init__(self) -> None:
        self._phases: dict[str, tuple[str | None, int, int]] = {}  # parent, steps, steps done
        self._best = 0.0

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        self._phases[phase] = (parent, max(1, steps), 0)

    def step(self, phase: str, index: int) -> None:
        """Records that step ``index`` (from 0) of ``phase`` is done."""
        if phase in self._phases:
            parent, steps, _ = self._phases[phase]
            self._phases[phase] = (parent, steps, min(index + 1, steps))

    def finish(self, phase: str) -> None:
        self._phases.pop(phase, None)

    @property
    def fraction(self) -> float:
        """Returns the finished share of the build. The share never decreases, and is at most 0.99."""
        tops = [name for name, (parent, _, _) in self._phases.items() if parent not in self._phases]
        self._best = max([self._best, *(self._of(name) for name in tops)])
        return min(self._best, 0.99)

    def _of(self, phase: str) -> float:
        _, steps, done = self._phases[phase]
        inner = [self._of(name) for name, (parent, _, _) in self._phases.items() if parent == phase and name != phase]
        return min(1.0, (done + max(inner, default=0.0)) / steps)
