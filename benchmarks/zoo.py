"""Counts the common models that accel exports correctly at the first try.

Usage:

    python benchmarks/zoo.py                                  # tries the families without extra packages
    python benchmarks/zoo.py own transformers/bert            # tries a family and one more model
    python benchmarks/zoo.py own --children 2                 # tries two models at a time
    python benchmarks/zoo.py timm --packages FOLDER           # tries a family whose packages are in FOLDER
    python benchmarks/zoo.py own --tools accel --optimize     # also optimizes the models that no run optimized yet
    python benchmarks/zoo.py own/gru-tagger --optimize --again all  # exports and optimizes a model again
    python benchmarks/zoo.py transformers --tools optimum --packages FOLDER  # tries optimum, which is in FOLDER
    python benchmarks/zoo.py --report                         # only writes the page of results.

Each model is small and has random weights. The script exports each model twice: with ``accel.export`` and with
``torch.onnx.export`` alone. Each file is compared with PyTorch at batches and sizes that the export didn't see. Each
try runs in a child process with a time limit and a memory limit. The child is forked from a process that has already
imported the libraries. Each result is a line of ``results/zoo.jsonl``. After an interruption, the next run tries the
models that have no line yet. The advice of an error message is followed once.

The families torchvision, timm, segmentation and diffusers need extra packages:
``pip install --no-deps --target FOLDER torchvision timm segmentation-models-pytorch diffusers``. optimum needs a folder
of its own: ``pip install --no-deps --target FOLDER optimum optimum-onnx "transformers<4.58" "huggingface_hub<1"
"tokenizers<0.23"``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from zoo_models.case import FAMILIES, names_of
from zoo_models.child import Child, Limits

RESULTS = Path(__file__).parent / "results"
TOOLS = ("accel", "torch.onnx")
PEERS = ("torch.onnx", "optimum")
OPTIMIZE_SECONDS = 20.0
DEFAULT = ("own", "transformers")
# For each family, the modules that are imported once, before the child processes are forked. accel and torch are always
# imported.
PRELOAD = {
    "transformers": "transformers,transformers.modeling_utils,transformers.models.auto.modeling_auto",
    "torchvision": "torchvision,torchvision.models",
    "timm": "torchvision,timm",
    "segmentation": "torchvision,timm,segmentation_models_pytorch",
    "diffusers": "transformers,diffusers,diffusers.models",
}
CLASSES = {
    "first": "worked the first time",
    "followed": "worked after following the message once",
    "refused": "refused with a right reason",
    "failed": "failed",
    "wrong": "wrong number",
    "crashed": "crashed",
}
# The classes of a model that accel exports.
EXPORTED = ("first", "followed")
# The words for a model that ``accel optimize`` fails to optimize, optimizes wrongly, or has no time to measure, which
# gives the exported file.
NO_SPEEDUP = ("failed", "wrong", "unmeasured")
Row = dict[str, Any]
Try = tuple[str, str, str]  # the family, the name of the model, and the tool


def main() -> None:
    """Tries the requested models, and writes the page of results."""
    asked = arguments()
    asked.results.mkdir(parents=True, exist_ok=True)
    path = asked.results / "zoo.jsonl"
    if not asked.report:
        families: dict[str, list[str]] = {}
        for text in asked.models or DEFAULT:
            family, _, name = text.partition("/")
            if family not in FAMILIES:
                raise SystemExit(f"unknown family {family!r}; use one of {', '.join(FAMILIES)}")
            families.setdefault(family, []).extend([name] if name else [])
        if len(families) > 1:  # one process for each family, because families import different packages
            for family, names in families.items():
                models = [f"{family}/{name}" for name in names] or [family]
                others = [word for word in sys.argv[1:] if word not in (asked.models or ())]
                subprocess.run([sys.executable, __file__, *models, *others], check=False)
        else:
            ((family, names),) = families.items()
            prepare(family, asked.packages)
            known = names or names_of(family)
            if asked.sample:
                known = drawn(family, known, read(RESULTS / "zoo.jsonl"), asked.sample, asked.seed)
            rows = pending(family, known, asked.tools.split(","), read(path), asked.again, asked.optimize)
            limits = Limits(asked.seconds, asked.memory)
            budget = OPTIMIZE_SECONDS if asked.optimize else 0.0
            try_all(rows[: asked.limit], path, limits, budget, asked.children)
    rows_read = read(path)
    if rows_read:
        from accel.timing.environment import environment

        (asked.results / "zoo.md").write_text(page(rows_read, dict(environment(1))), encoding="utf-8")
        print(asked.results / "zoo.md")


def arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("models", nargs="*", help="families or FAMILY/NAME; default: own transformers")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--packages", default="", help="the folder with the family's packages")
    parser.add_argument("--seconds", type=float, default=180, help="the time limit of one try")
    parser.add_argument("--children", type=int, default=1, help="the number of tries that run at the same time")
    parser.add_argument("--memory", type=float, default=6000, help="the memory limit of one try in MiB")
    parser.add_argument("--again", default="", help="repeat the tries with these results, such as failed,unmeasured")
    parser.add_argument(
        "--optimize",
        action="store_true",
        help="optimize the exported models too, also those that no run optimized yet",
    )
    parser.add_argument("--sample", type=int, default=0, help="draw this number of exported models of each family")
    parser.add_argument("--seed", type=int, default=20, help="the seed of --sample")
    parser.add_argument("--limit", type=int, default=None, help="the largest number of tries")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="only write the page of results")
    return parser.parse_args()


def prepare(family: str, packages: str) -> None:
    """Sets environment variables for the process that forks the children, and makes the packages importable in the
    calling process."""
    if packages:
        os.environ["ACCEL_ZOO_PACKAGES"] = packages
    os.environ["ACCEL_ZOO_PRELOAD"] = PRELOAD.get(family, "")
    folders = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, folders)))
    import zoo_models.preload  # noqa: F401 - some families read their names from a package


def read(path: Path) -> dict[Try, Row]:
    """Returns the last result of each model and tool. Ignores a line that an interruption left incomplete."""
    found: dict[Try, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["family"], row["name"], row["tool"]] = row
    return found


def drawn(family: str, names: Iterable[str], done: Mapping[Try, Row], count: int, seed: int) -> list[str]:
    """Draws ``count`` of the models that accel exports, in an order that depends only on ``seed``."""
    exported = [name for name in names if done.get((family, name, "accel"), {}).get("class") in EXPORTED]
    chance = random.Random(f"{family} {seed}")
    return chance.sample(sorted(exported), min(count, len(exported)))


def pending(
    family: str,
    names: Iterable[str],
    tools: Sequence[str],
    done: Mapping[Try, Row],
    again: str,
    optimize: bool = False,
) -> list[Try]:
    """Returns the tries without a result, and the tries whose result has one of the words in ``again``: a class, or one
    of ``NO_SPEEDUP``.

    If ``optimize`` is true, also returns the models that accel exported but did not optimize yet.
    """
    repeat = set(filter(None, again.split(",")))
    found = []
    for name in names:
        for tool in tools:
            row = done.get((family, name, tool))
            if row is None:
                wanted = done.get((family, name, "accel"), {}).get("class") != "not made"
            else:
                unoptimized = row["class"] in EXPORTED and tool == "accel" and "optimize" not in row
                named = {row["class"], row.get("optimize"), "all"} & repeat
                wanted = bool(named) or (optimize and unoptimized)
            if wanted:
                found.append((family, name, tool))
    return found


def try_all(wanted: Iterable[Try], path: Path, limits: Limits, budget: float, children: int = 1) -> None:
    """Runs each try in a child process, and appends each result to ``path`` immediately.

    ``budget`` is the time for ``accel optimize`` in seconds. If ``budget`` is 0, no model is optimized. Up to
    ``children`` tries run at the same time, each with another model.
    """
    from zoo_models.trial import run

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zoo_models.preload", "zoo_models.trial", "zoo_models.compare"])
    tries_of: dict[tuple[str, str], list[Try]] = {}
    for family, name, tool in wanted:
        tries_of.setdefault((family, name), []).append((family, name, tool))
    waiting, count, number = list(tries_of.values()), sum(map(len, tries_of.values())), 0
    running: dict[Child, list[Try]] = {}  # the child of a model's first try, with this try and the model's further ones

    def start(tries: list[Try], apart: bool = False) -> None:
        running[Child(context, run, (*tries[0], budget, apart), limits)] = tries

    while waiting or running:
        while waiting and len(running) < children:
            start(waiting.pop(0))
        wait([child.process.sentinel for child in running], timeout=0.1)
        for child, tries in list(running.items()):
            row = child.result()
            if row is None:
                continue
            del running[child]
            # To save time, the first try simplifies the graph in its own process. After a crash, a second try
            # simplifies the graph in a child process, as accel does for users.
            *_, apart = child.words
            if row["class"] == "crashed" and "SIG" in row["message"] and not apart:
                start(tries, apart=True)
                continue
            (family, name, tool), *further = tries
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"family": family, "name": name, "tool": tool, **row}) + "\n")
            number += 1
            said = f"{row.get('message', '')}"[:150]
            print(f"{number}/{count} {family}/{name} {tool}: {row['class']} {row.get('wall')} s {said}", flush=True)
            if further and row["class"] != "not made":
                start(further)


def page(rows: Mapping[Try, Row], machine: Mapping[str, Any]) -> str:
    """Returns the results as Markdown: the counts by family, and a line for each model that didn't work at the first
    try."""
    families = list(dict.fromkeys(family for family, *_ in rows))
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    lines = [
        "# Does it work the first time?",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {str(machine['date'])[:10]}; {versions}.",
        "Made by `python benchmarks/zoo.py`. Models with small random weights: exported as a user does, run at batches",
        "and sizes that the export didn't see, and compared with PyTorch (relative error at most 1e-3, or float64",
        "decides). `torch.onnx` is `torch.onnx.export(dynamo=True)` alone, with dynamic dims of the kind `Dim.AUTO`,",
        "compared in the same calls. `optimum` exports with transformers 4.57, which lacks some models, and its files",
        "are compared in the outputs that they have. Wrong numbers of these two come without a word. A message is",
        "followed by machine: the arguments that it advises are passed, or the line that it names is changed in a copy",
        "of the source (`zoo_models/rewritten.py`), and the file is compared with the changed model. The changed model",
        "has the outputs of the original model, unless the original draws them at random or by equal scores.",
        "",
        "| family | tool | models | " + " | ".join(CLASSES.values()) + " |",
        "|---|---|---|" + "---|" * len(CLASSES),
    ]
    for family in [*families, "all"]:
        for tool in ("accel", *PEERS):
            found = [row for (one, _, by), row in rows.items() if by == tool and family in (one, "all")]
            found = [row for row in found if row["class"] in CLASSES]
            counts = Counter(row["class"] for row in found)
            if found:
                share = f"{counts['first']} ({100 * counts['first'] / len(found):.0f}%)"
                cells = [share, *(str(counts[name]) for name in list(CLASSES)[1:])]
                lines.append(f"| {family} | {tool} | {len(found)} | " + " | ".join(cells) + " |")
    lines += ["", *others(rows), *optimized(rows), *not_counted(rows)]
    return "\n".join(lines) + "\n"


def others(rows: Mapping[Try, Row]) -> list[str]:
    """Returns a table line for each model that didn't work at the first try with accel. The line also has the result
    of each peer."""
    lines = [
        "## What did not work the first time",
        "",
        f"| model | accel | message | {' | '.join(PEERS)} |",
        "|---|---|---|---|---|",
    ]
    for (family, name, tool), row in sorted(rows.items()):
        if tool == "accel" and row["class"] in CLASSES and row["class"] != "first":
            peers = " | ".join(rows.get((family, name, peer), {}).get("class", "-") for peer in PEERS)
            message = str(row.get("message", "")).replace("|", "\\|")
            lines.append(f"| {family}/{name} | {row['class']} | {message[:300]} | {peers} |")
    return [*lines, ""]


def optimized(rows: Mapping[Try, Row]) -> list[str]:
    """Returns a section about the exported models that were also optimized.

    The section has a table line for each family, and a line for each failure.
    """
    found = {f"{family}/{name}": row for (family, name, _), row in sorted(rows.items()) if row.get("optimize")}
    if all(row["optimize"] in NO_SPEEDUP for row in found.values()):
        return []
    busy = sum(bool(row.get("busy")) for row in found.values())
    lines = [
        "## accel optimize",
        "",
        f"A part of the exported files was also optimized, without data and within {OPTIMIZE_SECONDS:g} s. The outputs",
        "of the result are compared with the model's outputs on further inputs. A result counts as faster if it is at",
        "least 2% faster than the file in ONNX Runtime. The speedup is the geometric mean of all measured results. If",
        "no candidate was ready in time, the result is the exported file, not measured.",
        *([f"{busy} of the files were optimized beside other work, which hides small speedups."] if busy else []),
        "",
        "| family | files | no result | wrong | not measured | faster | speedup | seconds (median) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in [*dict.fromkeys(name.partition("/")[0] for name in found), "all"]:
        rows_of = [row for name, row in found.items() if family in (name.partition("/")[0], "all")]
        done = [row for row in rows_of if row["optimize"] not in NO_SPEEDUP]
        speedups = [float(row["optimize"]) for row in done]
        counts = [sum(row["optimize"] == kind for row in rows_of) for kind in NO_SPEEDUP]
        faster = sum(speedup > 1.02 for speedup in speedups)
        mean = f"{statistics.geometric_mean(speedups):.2f}" if speedups else "-"
        seconds = f"{statistics.median(row['optimize_seconds'] for row in done):.0f}" if done else "-"
        cells = [len(rows_of), *counts, faster, mean, seconds]
        lines.append(f"| {family} | " + " | ".join(map(str, cells)) + " |")
    failed = {name: row for name, row in found.items() if row["optimize"] in ("failed", "wrong")}
    return [*lines, "", *(f"- {name}: {row['optimize_message']}" for name, row in failed.items()), ""]


def not_counted(rows: Mapping[Try, Row]) -> list[str]:
    """Returns a sentence with the names of all models that the zoo can't make."""
    names = [f"{family}/{name}" for (family, name, _), row in sorted(rows.items()) if row["class"] == "not made"]
    names = list(dict.fromkeys(names))
    if not names:
        return []
    return [f"Not counted, because the zoo can't make them from a small config ({len(names)}): {', '.join(names)}."]


if __name__ == "__main__":
    main()
