"""Defines the goals of `serve_load.py` and tells whether a run met them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

# Requests per second in each round, by scenario, server and concurrency.
Rates = Mapping[tuple[str, str, int], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal of a benchmark. The median of ``rounds`` has to be at least ``bound``. If ``at_most`` is true, the median
    has to be below ``bound``. A goal without rounds was not measured."""

    what: str
    bound: float
    rounds: Sequence[float]
    unit: str = "x"
    at_most: bool = False

    @property
    def found(self) -> float | None:
        return median(self.rounds) if self.rounds else None

    @property
    def met(self) -> bool | None:
        """Returns True if the goal is met, False if the goal is missed, and None if the goal was not measured."""
        if self.found is None:
            return None
        return self.found < self.bound if self.at_most else self.found >= self.bound

    def row(self) -> dict[str, object]:
        found = {"found": self.found, "rounds": list(self.rounds), "unit": self.unit, "met": self.met}
        return {"goal": self.what, "bound": self.bound, **found}


def goals(rates: Rates, overhead_us: Sequence[float]) -> list[Goal]:
    """Returns the goals. ``overhead_us`` has one number per round: the time of a remote call at concurrency 1 minus the
    time of ``session.run``, in microseconds."""
    found = [
        Goal(
            what=f"mlp, concurrency {concurrency}: accel over MLServer's faster way",
            bound=3.3,
            rounds=_ratios(rates, "mlp", ("mlserver", "mlserver-workers"), concurrency),
        )
        for concurrency in (8, 32)
    ]
    found += [
        Goal(what=f"{name}: accel over the floor", bound=bound, rounds=_ratios(rates, scenario, ("floor",), 8))
        for name, scenario, bound in (("588 KiB", "image", 0.9), ("4 KiB", "small", 0.85))
    ]
    over = Goal(
        what="mlp, concurrency 1: over session.run (p50)", bound=250, rounds=overhead_us, unit="us", at_most=True
    )
    return [*found, over]


def _ratios(rates: Rates, scenario: str, others: tuple[str, ...], concurrency: int) -> list[float]:
    """Returns the ratio of accel's rate to the peer's rate in each round. If other work disturbs the machine, both
    servers of a round become slower, so the ratio hardly changes. If the peer has several setups, uses the setup with
    the highest median rate."""
    own = rates.get((scenario, "accel", concurrency))
    peers = [rates[key] for other in others if (key := (scenario, other, concurrency)) in rates]
    if own is None or not peers:
        return []
    return [ours / theirs for ours, theirs in zip(own, max(peers, key=median), strict=True)]


def table(found: list[Goal]) -> list[str]:
    """Returns the goals as lines of Markdown."""
    lines = ["| goal | bound | found | rounds | met |", "|---|---|---|---|---|"]
    for goal in found:
        sign = "<" if goal.at_most else ">="
        figure = "not measured" if goal.found is None else f"{goal.found:,.2f} {goal.unit}"
        met = {None: "-", True: "yes", False: "no"}[goal.met]
        rounds = f"{min(goal.rounds):,.2f} to {max(goal.rounds):,.2f}" if goal.rounds else ""
        lines.append(f"| {goal.what} | {sign} {goal.bound:g} {goal.unit} | {figure} | {rounds} | {met} |")
    return lines
