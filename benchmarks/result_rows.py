"""Runs a benchmark row by row. Each row is written as soon as it is measured, so the next run continues an interrupted
run."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def row_arguments(description: str | None, example: str) -> argparse.ArgumentParser:
    """Returns an argument parser with the options of every row-by-row benchmark: the rows, ``--again`` and the folder
    of the results. Each benchmark adds its own options."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    parser.add_argument("rows", nargs="*", help=f"such as {example}; default: all")
    parser.add_argument("--again", action="store_true", help="measure rows again that are there already")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


def measure_rows(
    parser: argparse.ArgumentParser,
    asked: argparse.Namespace,
    names: Sequence[str],
    stem: str,
    measure: Callable[[str], dict[str, Any]],
    page: Callable[[dict[str, Any]], str],
    seconds: float | None = None,
) -> None:
    """Measures the requested rows (default: all rows). Without ``--again``, skips the rows that ``stem``.json already
    has. Writes ``stem``.json and ``stem``.md after each row. If no row is missing, only writes ``stem``.md again.

    If a row fails, prints the error and continues with the next row. The next run tries the failed row again. No row
    begins later than ``seconds`` after the call (default: no limit). The next run measures the rows that are left.
    """
    begun = time.monotonic()
    for name in asked.rows:
        if name not in names:
            parser.error(f"no row {name}; the rows are {', '.join(names)}")
    asked.results.mkdir(parents=True, exist_ok=True)
    path = asked.results / f"{stem}.json"
    body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": {}}
    failed: list[str] = []
    for name in asked.rows or names:
        if name in body["rows"] and not asked.again:
            print(f"{name}: there already, --again measures it again", flush=True)
            continue
        started = time.monotonic()
        if seconds is not None and started - begun > seconds:
            print(f"{name}: no time left; call again to continue", flush=True)
            break
        try:
            row = measure(name)
        except Exception as error:
            failed.append(name)
            print(f"{name}: failed: {type(error).__name__}: {error}", flush=True)
            continue
        row["seconds"] = round(time.monotonic() - started)
        done = {**body["rows"], name: row}
        body["rows"] = {n: done[n] for n in names if n in done}
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        (asked.results / f"{stem}.md").write_text(page(body), encoding="utf-8")
        print(f"{name}: {row['seconds']} s", flush=True)
    if body["rows"]:
        (asked.results / f"{stem}.md").write_text(page(body), encoding="utf-8")
        print(page(body))
    if failed:
        parser.exit(1, f"failed: {', '.join(failed)}\n")
