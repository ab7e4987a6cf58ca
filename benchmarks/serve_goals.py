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
    has to be at most ``bound``. A goal without rounds was not measured."""

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
        return self.found <= self.bound if self.at_most else self.found >= self.bound

    def row(self) -> dict[str, object]:
        found = {"found": self.found, "rounds": list(self.rounds), "unit": self.unit, "met": self.met}
        return {"goal": self.what, "bound": self.bound, **found}


@dataclass(frozen=True)
class Ratio:
    """A goal for the rate of the server ``own`` over the rate of the fastest of ``others``, with so many callers."""

    what: str
    bound: float
    scenario: str
    own: str
    others: tuple[str, ...]
    callers: int


TRITON, MLSERVER = ("triton", "triton-two"), ("mlserver", "mlserver-workers")
RATIOS = (
    Ratio("mlp, 32 callers: two processes of accel over Triton", 1.7, "mlp", "accel", TRITON, 32),
    Ratio("mlp, 32 callers: two processes of accel over MLServer", 7, "mlp", "accel", MLSERVER, 32),
    Ratio("mlp, 32 callers: one process of accel over Triton", 1.3, "mlp", "accel-one", TRITON, 32),
    Ratio("4 KiB, 8 callers: accel over bare grpcio without a model", 3, "small", "accel", ("floor",), 8),
    Ratio("4 KiB, 32 callers: accel over bare grpcio without a model", 3, "small", "accel", ("floor",), 32),
    Ratio("588 KiB, 8 callers: accel over Triton", 1.3, "image", "accel", TRITON, 8),
)
OVER_RUN_US = 120  # one call over session.run
TAIL = 3  # p99 over the median
TAIL_LOAD = 0.8  # of the largest rate


def needed(scenario: str, server: str) -> set[int]:
    """Returns the numbers of callers at which the goals need a server's rate."""
    found = {one.callers for one in RATIOS if one.scenario == scenario and server in (one.own, *one.others)}
    return found | ({1} if (scenario, server) == ("mlp", "accel") else set())  # for the time over session.run


def goals(rates: Rates, overhead_us: Sequence[float], tails: Sequence[float] = ()) -> list[Goal]:
    """Returns the goals. ``overhead_us`` has one number per round: the time of a remote call at concurrency 1 minus the
    time of ``session.run``, in microseconds. ``tails`` has each round's p99 over the median at ``TAIL_LOAD``."""
    found = [
        Goal(what=one.what, bound=one.bound, rounds=_ratios(rates, one.scenario, one.own, one.others, one.callers))
        for one in RATIOS
    ]
    over = Goal(
        what="mlp, one caller: over session.run (p50)", bound=OVER_RUN_US, rounds=overhead_us, unit="us", at_most=True
    )
    what = f"mlp, {TAIL_LOAD:.0%} of the largest rate at 32 callers: p99 over the median"
    return [*found, over, Goal(what=what, bound=TAIL, rounds=tails, at_most=True)]


def _ratios(rates: Rates, scenario: str, own: str, others: tuple[str, ...], callers: int) -> list[float]:
    """Returns the ratio of the rates in each round. If other work disturbs the machine, both servers of a round become
    slower, so the ratio hardly changes. If the peer has several setups, uses the setup with the highest median rate."""
    ours = rates.get((scenario, own, callers))
    peers = [rates[key] for other in others if (key := (scenario, other, callers)) in rates]
    if ours is None or not peers:
        return []
    return [one / other for one, other in zip(ours, max(peers, key=median), strict=True)]


def table(found: list[Goal]) -> list[str]:
    """Returns the goals as lines of Markdown."""
    lines = ["| goal | bound | found | rounds | met |", "|---|---|---|---|---|"]
    for goal in found:
        sign = "<=" if goal.at_most else ">="
        figure = "not measured" if goal.found is None else f"{goal.found:,.2f} {goal.unit}"
        met = {None: "-", True: "yes", False: "no"}[goal.met]
        rounds = f"{min(goal.rounds):,.2f} to {max(goal.rounds):,.2f}" if goal.rounds else ""
        lines.append(f"| {goal.what} | {sign} {goal.bound:g} {goal.unit} | {figure} | {rounds} | {met} |")
    return lines
