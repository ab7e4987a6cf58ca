"""Keeps the results of programs that were run against `accel serve` on several gRPC transports, and writes a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

TRANSPORTS = ("native", "cygrpc", "grpc")


@dataclass(frozen=True)
class Run:
    """One run of a program: its name with its options, and the last line that it wrote if it failed."""

    name: str
    passed: bool
    last: str = ""
    transport: str = ""


class Runs:
    """All runs. With a file, the runs are kept there, so that the rest can be run later."""

    def __init__(self, kept: Path | None) -> None:
        self._kept = kept
        lines = kept.read_text(encoding="utf-8").splitlines() if kept and kept.exists() else []
        self.all = [Run(**json.loads(line)) for line in lines]

    def has(self, name: str, transport: str) -> bool:
        return any(one.name == name and one.transport == transport for one in self.all)

    def add(self, one: Run) -> None:
        self.all.append(one)
        print(f"{one.transport}: {one.name}: {one.last or 'passes'}", flush=True)
        if self._kept:
            with self._kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(one)) + "\n")

    def passed(self, names: Iterable[str]) -> int:
        """Returns how many of the programs pass on every transport."""
        failing = {one.name for one in self.all if not one.passed}
        return sum(name not in failing for name in names)

    def table(self, what: str, names: Iterable[str], transports: tuple[str, ...]) -> list[str]:
        """Returns a row for each program, with a column for each transport."""
        found = {(one.name, one.transport): one for one in self.all}
        lines = [f"| {what} | {' | '.join(transports)} | why |", "|---" * (len(transports) + 2) + "|"]
        for name in names:
            runs = [found.get((name, transport)) for transport in transports]
            said = ["not run" if one is None else "passes" if one.passed else "fails" for one in runs]
            why = "; ".join(dict.fromkeys(one.last for one in runs if one is not None and one.last))
            lines.append(f"| {name} | {' | '.join(said)} | {why} |")
        return lines


def add_options(parser: argparse.ArgumentParser, of: str) -> None:
    """Adds the options that say what is run."""
    parser.add_argument("--only", default="", help=f"a regular expression of the {of} names; writes no result file")
    parser.add_argument(
        "--transport", action="append", choices=TRANSPORTS, help="default: native, cygrpc and grpc. Repeatable"
    )
    parser.add_argument("--kept", type=Path, help="a file that keeps the runs; what it holds isn't run again")
