"""What `serve_load.py` is measured for: each goal, the figure of the run, and whether it is met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Requests a second by scenario, server and concurrency.
Rates = Mapping[tuple[str, str, int], float]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """``found`` has to be at least ``bound``, at most where ``at_most``; None where it was not measured."""

    what: str
    bound: float
    found: float | None
    unit: str = "x"
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """None where there is no figure."""
        if self.found is None:
            return None
        return self.found < self.bound if self.at_most else self.found >= self.bound

    def row(self) -> dict[str, object]:
        return {"goal": self.what, "bound": self.bound, "found": self.found, "unit": self.unit, "met": self.met}


def goals(rates: Rates, overhead_us: float | None) -> list[Goal]:
    """``overhead_us``: what one remote call at concurrency 1 takes longer than ``session.run``, in microseconds."""
    found = [
        Goal(
            what=f"mlp, concurrency {concurrency}: accel over MLServer's faster way",
            bound=3.3,
            found=_ratio(rates, "mlp", ("mlserver", "mlserver-workers"), concurrency),
        )
        for concurrency in (8, 32)
    ]
    found += [
        Goal(what=f"{name}: accel over the floor", bound=bound, found=_ratio(rates, scenario, ("floor",), 8))
        for name, scenario, bound in (("588 KiB", "image", 0.9), ("4 KiB", "small", 0.85))
    ]
    over = Goal(
        what="mlp, concurrency 1: over session.run (p50)", bound=250, found=overhead_us, unit="us", at_most=True
    )
    return [*found, over]


def _ratio(rates: Rates, scenario: str, others: tuple[str, ...], concurrency: int) -> float | None:
    own = rates.get((scenario, "accel", concurrency))
    peers = [rates[key] for other in others if (key := (scenario, other, concurrency)) in rates]
    return None if own is None or not peers else own / max(peers)


def table(found: list[Goal]) -> list[str]:
    """Lines of Markdown."""
    lines = ["| goal | bound | found | met |", "|---|---|---|---|"]
    for goal in found:
        sign = "<" if goal.at_most else ">="
        figure = "not measured" if goal.found is None else f"{goal.found:,.2f} {goal.unit}"
        met = {None: "-", True: "yes", False: "no"}[goal.met]
        lines.append(f"| {goal.what} | {sign} {goal.bound:g} {goal.unit} | {figure} | {met} |")
    return lines
