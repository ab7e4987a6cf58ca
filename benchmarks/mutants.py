"""Measures how many faults the tests catch. Changes one line of code at a time, and runs the tests for this line.

Usage:

    python benchmarks/mutants.py                          # tests 120 mutants of this checkout
    python benchmarks/mutants.py --before FOLDER          # reruns the survivors in the checkout of an older commit.

Needs cosmic-ray (``pip install cosmic-ray``), which makes the mutants. The first run writes all mutants to
``results/mutants.json``, and each run adds its results to this file. An interrupted run continues with the mutants that
have no result yet. The tests run in a copy of the checkout.

Only the tests near a mutant run. If older tests catch a mutant that today's near tests miss, the next run without
``--before`` also tries today's test of the same name. The row then has ``"by_name": true``.

A mutant counts as caught if the tests hang, or if a test fails only with the mutant. A mutant counts as absent if its
original line of code isn't in the checkout, or occurs several times. With ``--before``, the results show whether the
older tests catch a mutant that today's tests miss.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
FOLDERS = ("accel", "converters", "kernels", "serve")
# The largest number of test files that run for one mutant.
_FILES = 8
_SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    """One changed line. ``line`` counts from 0. ``definition`` is the function or class around the line, or ""."""

    path: str
    line: int
    was: str
    now: str
    definition: str


def main() -> None:
    """Draws the mutants, runs the tests near each mutant, and prints how many are caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--before", type=Path, help="a checkout of an older commit with an environment in .venv")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if not asked.results.is_file():
        write([{**asdict(mutant)} for mutant in draw(asked.count, asked.seed)], asked.results)
    rows = json.loads(asked.results.read_text(encoding="utf-8"))
    tree, key = (asked.before.resolve(), "before") if asked.before else (ROOT, "today")
    python = tree / ".venv" / "bin" / "python" if asked.before else Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="accel-mutants-") as folder:
        copy = Path(folder) / "checkout"
        subprocess.run(["git", "clone", "--quiet", str(tree), str(copy)], check=True)
        for number, row in enumerate(rows):
            named: list[str] = []
            if key == "today" and row.get("before") == "caught" and row.get("today") == "survived":
                named = same_name(row["before_by"], copy)
            elif key in row or (asked.before and row.get("today") != "survived"):
                continue
            mutant = find(Mutant(**{field.name: row[field.name] for field in fields(Mutant)}), copy)
            row[key], row[f"{key}_by"] = run(mutant, copy, str(python), named) if mutant else ("absent", "")
            row |= {"by_name": True} if named else {}
            write(rows, asked.results)
            print(f"{number + 1}/{len(rows)} {row[key]:9} {row['path']}:{row['line'] + 1} {row['now'].strip()[:80]}")
    print(key, dict(Counter(row[key] for row in rows if key in row)))


def write(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Writes the results to a new file and renames the file, so that nobody reads an incomplete file."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def draw(count: int, seed: int) -> list[Mutant]:
    """Returns ``count`` different mutants. Draws each line of code with about the same probability. Type annotations
    are left out, because Python never evaluates them."""
    import cosmic_ray.plugins
    from cosmic_ray.commands.init import _all_work_items
    from cosmic_ray.mutating import mutate_code

    chance = random.Random(seed)
    files = list(tracked(ROOT, FOLDERS))
    lengths = [len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files]
    found: dict[tuple[str, str], Mutant] = {}
    while len(found) < count:
        (file,) = chance.choices(files, lengths)
        code = (ROOT / file).read_text(encoding="utf-8")
        left_out = _annotations(code)
        places = [item.mutations[0] for item in _all_work_items([ROOT / file], {})]
        places = [one for one in places if one.start_pos not in left_out and "NoOp" not in one.operator_name]
        if not places:
            continue
        place = chance.choice(places)
        operator = cosmic_ray.plugins.get_operator(place.operator_name)()
        mutated = mutate_code(code, operator, place.occurrence) or code
        pairs = list(zip(code.splitlines(), mutated.splitlines(), strict=False))
        changed = [line for line, (was, now) in enumerate(pairs) if was != now]
        if len(changed) == 1:  # only a mutant of one line can be found again in an older version
            was, now = pairs[changed[0]]
            found[file, now] = Mutant(file, changed[0], was, now, _definition(code, changed[0] + 1))
    return list(found.values())


def tracked(tree: Path, folders: Sequence[str]) -> Iterator[str]:
    """Yields the Python files of ``folders`` that git tracks, sorted."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=tree, capture_output=True, text=True, check=True)
    yield from (file for file in sorted(listed.stdout.splitlines()) if file.endswith(".py"))


def _annotations(code: str) -> set[tuple[int, int]]:
    """Returns the positions (line, column) inside type annotations."""
    found: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(code)):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if part is not None:
                for line in range(part.lineno, part.end_lineno + 1):
                    found.update((line, column) for column in range(part.col_offset, part.end_col_offset))
    return found


def _definition(code: str, line: int) -> str:
    """Returns the name of the innermost function or class around ``line``. The first line has the number 1."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    around = [n for n in ast.walk(ast.parse(code)) if isinstance(n, kinds) and n.lineno <= line <= (n.end_lineno or 0)]
    return max(around, key=lambda node: node.lineno).name if around else ""


def find(mutant: Mutant, tree: Path) -> Mutant | None:
    """Finds the mutant's line in ``tree``, which may be a checkout of another commit. Returns None if ``tree`` doesn't
    have the line, or has the line several times."""
    lines = (tree / mutant.path).read_text(encoding="utf-8").splitlines() if (tree / mutant.path).is_file() else []
    if lines[mutant.line : mutant.line + 1] == [mutant.was]:
        return mutant
    places = []
    for file in tracked(tree, FOLDERS):
        lines = (tree / file).read_text(encoding="utf-8").splitlines()
        places += [(file, number) for number, line in enumerate(lines) if line.strip() == mutant.was.strip()]
    here = [place for place in places if Path(place[0]).name == Path(mutant.path).name]
    chosen = here if len(here) == 1 else places
    if len(chosen) != 1:
        return None
    return Mutant(chosen[0][0], chosen[0][1], mutant.was, mutant.now, mutant.definition)


def same_name(test: str, tree: Path) -> list[str]:
    """Returns the tests in ``tree`` whose function has the same name as ``test``."""
    function = test.partition("::")[2].rpartition("::")[2].partition("[")[0]
    files = [file for file in tracked(tree, ("tests",)) if f"def {function}(" in (tree / file).read_text("utf-8")]
    return [f"{file}::{function}" for file in files if function]


def run(mutant: Mutant, tree: Path, python: str, named: Sequence[str] = ()) -> tuple[str, str]:
    """Runs the tests ``named``, or else the tests near the mutant. Returns ``caught``, ``survived`` or ``no tests``,
    and the test that caught the mutant."""
    tests = list(named) or near(mutant, tree)
    if not tests:
        return "no tests", ""
    file = tree / mutant.path
    code = file.read_text(encoding="utf-8")
    lines = code.splitlines(keepends=True)
    indent = lines[mutant.line][: len(lines[mutant.line]) - len(lines[mutant.line].lstrip())]
    lines[mutant.line] = f"{indent}{mutant.now.strip()}\n"
    flaky: list[str] = []
    while True:
        file.write_text("".join(lines), encoding="utf-8")
        failed = _failed(tree, python, [*tests, *(f"--deselect={one}" for one in flaky)])
        file.write_text(code, encoding="utf-8")
        if failed is None:
            return "survived", ""
        if "::" not in failed or _failed(tree, python, [failed]) is None:
            return "caught", failed
        flaky.append(failed)  # this test also fails without the mutant


def _failed(tree: Path, python: str, arguments: Sequence[str]) -> str | None:
    """Returns the name of the first failed test, the text ``hangs`` after a timeout, or None if all tests pass."""
    command = [
        python,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu and not nightly" if "::" in arguments[0] else "not gpu and not proof and not nightly",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            [*command, *arguments], cwd=tree, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode in (0, 5):  # exit status 5: all tests were deselected
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else "pytest"


def near(mutant: Mutant, tree: Path) -> list[str]:
    """Returns the test files near ``mutant``, the nearest first. A test file is near if it is named after the mutant's
    file, mentions the function around the mutant, imports the mutant's module, or is in the matching folder."""
    path = Path(mutant.path)
    module = ".".join((path if path.parts[0] == "accel" else "accel" / path).with_suffix("").parts)
    package, _, name = module.rpartition(".")
    imported = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    points: Counter[str] = Counter()
    for file in tracked(tree, ("tests",)):
        if not Path(file).name.startswith("test_"):
            continue
        text = (tree / file).read_text(encoding="utf-8")
        points[file] += 8 * Path(file).stem.startswith(f"test_{path.stem}")
        points[file] += 4 * bool(len(mutant.definition) > 4 and re.search(rf"\b{mutant.definition}\b", text))
        points[file] += 4 * bool(imported.search(text))
        points[file] += 3 * (Path(file).parent == "tests" / path.parent)
    return [file for file, score in points.most_common(_FILES) if score > 0]


if __name__ == "__main__":
    main()
