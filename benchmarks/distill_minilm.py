"""Trains a student with half of MiniLM's layers with and without its teacher, and compares the accuracies.

Usage:

    python benchmarks/distill_minilm.py            # writes benchmarks/results/distill_minilm.json

The task is made from Python's standard library: the text of a docstring tells its module, one of 20. A fifth of the
texts is kept for the test. The teacher is MiniLM with its 6 pretrained layers and a new linear layer, trained on the
task. The student starts from 3 of the pretrained layers. It is trained for the same steps on the task alone, and with
``[distillation]``, from each of SEEDS. Speed doesn't matter here, so other work may run beside.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import platform
import statistics
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from accel.examples import minilm

HERE = Path(__file__).absolute()
RESULT = HERE.parent / "results" / "distill_minilm.json"
CLASSES, MOST, LENGTH = 20, 150, 48
SEEDS = (0, 1, 2)
STEPS = {"teacher": 300, "student": 200}
LESSONS = {"logits": 1.0, "hidden": 1.0, "targets": 1.0, "temperature": 2.0}


class Classifier(torch.nn.Module):
    """Tells the class of a text from its token ids [batch, LENGTH]. ``layers`` are the pretrained layers that stay."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.encoder = minilm.model().encoder
        self.encoder.encoder.layer = torch.nn.ModuleList(self.encoder.encoder.layer[index] for index in layers)
        self.encoder.config.num_hidden_layers = len(layers)
        self.head = torch.nn.Linear(self.encoder.config.hidden_size, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = (ids != 0).long()
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def teacher() -> torch.nn.Module:
    return Classifier((0, 1, 2, 3, 4, 5))


def student() -> torch.nn.Module:
    return Classifier((0, 2, 4))


@cache
def texts() -> list[tuple[str, int]]:
    """Returns docstrings of the standard library with the class of their module, at most MOST of a module."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    root = Path(ast.__file__).parent
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).parts[0].removesuffix(".py")
        if name.startswith(("_", "test", "site-packages", "lib2to3", "idlelib", "turtledemo", "config-")):
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                said = " ".join((ast.get_docstring(node) or "").split())
                if len(said) > 30 and said not in found[name]:
                    found[name].append(said)
    largest = sorted(found, key=lambda name: (-len(found[name]), name))[:CLASSES]
    return [(said, index) for index, name in enumerate(largest) for said in found[name][:MOST]]


def samples(*, test: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns token ids and class of every fifth text, or of the other texts if ``test`` is false."""
    chosen = [pair for index, pair in enumerate(texts()) if (index % 5 == 0) == test]
    ids = torch.from_numpy(minilm.tokenize([said for said, _ in chosen], LENGTH)["input_ids"])
    return [(row, torch.tensor(index)) for row, (_, index) in zip(ids, chosen, strict=True)]


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return samples(test=False)


def evaluate(module: torch.nn.Module) -> dict[str, float]:
    ids, targets = (torch.stack(part) for part in zip(*samples(test=True), strict=True))
    with torch.no_grad():
        guessed = torch.cat([module(part).argmax(-1) for part in ids.split(64)])
    return {"top1": float((guessed == targets).double().mean())}


def trained(name: str, out: Path, **more: Any) -> float:
    """Trains the model of the factory ``name`` in the folder ``out``. Returns its accuracy on the test texts."""
    from accel.train.config.schema import TrainConfig
    from accel.train.run.launch import train

    body: dict[str, Any] = {
        **{key: f"{HERE}:{key}" for key in ("data", "evaluate")},
        **{"model": f"{HERE}:{name}", "steps": STEPS[name], "global_batch": 32, "micro_batch": 32},
        "optimizer": {"name": "adamw", "lr": 2e-4, "weight_decay": 0.01, "clip": 1.0},
        "schedule": {"name": "cosine", "warmup": 20},
        **more,
    }
    found: float = train(TrainConfig.from_dict(body), out)["metrics"]["top1"]
    print(f"{out.name}: {found:.1%}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    sys.path.insert(0, str(HERE.parents[1]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        best = trained("teacher", folder / "teacher")
        lessons = {**LESSONS, "teacher": f"{HERE}:teacher", "weights": str(folder / "teacher" / "final")}
        alone = [trained("student", folder / f"alone {seed}", seed=seed) for seed in SEEDS]
        taught = [trained("student", folder / f"taught {seed}", seed=seed, distillation=lessons) for seed in SEEDS]
    body = {
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "configuration": {"classes": CLASSES, "texts": len(texts()), "steps": STEPS, "lessons": LESSONS},
        "teacher_top1": best,
        "student_alone_top1": {"median": statistics.median(alone), "seeds": alone},
        "student_taught_top1": {"median": statistics.median(taught), "seeds": taught},
    }
    options.out.write_text(json.dumps(body, indent=2) + "\n")
    print(json.dumps(body, indent=2))


if __name__ == "__main__":
    main()
