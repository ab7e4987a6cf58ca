"""Checks that `accel optimize` chooses the fastest candidate on this CPU without losing accuracy.

Usage:

    python benchmarks/cpu_latency.py                           # measures every row that has no result yet
    python benchmarks/cpu_latency.py small-cnn-b1 --again       # measures this row again.
    python benchmarks/cpu_latency.py --budget-seconds 60 --seconds 0    # takes at most about 2.5 minutes for a row

Each row is a model at one batch size. In paired blocks, a row compares PyTorch (eager, torch.compile), ONNX Runtime
(fp32, quantize_static, quantize_dynamic), OpenVINO with NNCF (called by hand), and accel's choice. The other tools run
with the session options that a user gets without asking. Each measured row is written at once
(benchmarks/results/cpu_latency.json and .md), so an interrupted run continues later. The results page tells whether the
goals are met. The script needs a quiet machine. The results page shows how long each row took.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cpu_models import MODELS, Model
from result_rows import measure_rows, row_arguments

import accel
from accel.artifact import Artifact
from accel.proof.data import Dataset
from accel.sources.source import Source
from accel.timing import page
from accel.timing.paired import Candidate, measure
from accel.timing.statistics import Ratio, judge, speedup

ROWS = [
    ("small-cnn", 1), ("small-cnn", 8), ("resnet50", 1), ("resnet50", 8), ("minilm", 1), ("minilm", 8),
    ("bert-base", 1), ("efficientnet-lite0", 1), ("mobilenet-v3", 1), ("vit-b16", 1), ("ssdlite", 1), ("crnn", 1),
    ("unet", 1), ("whisper-tiny-encoder", 1), ("distilbert-16", 1), ("distilbert-512", 1), ("dlrm", 128),
]  # fmt: skip
SAMPLES = 64
CHOICE = "accel's choice"
# The goals are a minimum speedup of the int8 rows over eager and of all rows over the fastest other candidate, both in
# the geometric mean, and a maximum loss of accuracy.
GOAL_SPEEDUP, GOAL_AHEAD, GOAL_LOSS = 7.0, 1.15, 0.01


def main() -> None:
    """Measures the requested rows (all rows by default) that have no result yet."""
    parser = row_arguments(__doc__, "resnet50-b8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=30.0, help="in which rounds go on while an interval is wide")
    parser.add_argument("--budget-seconds", type=float, help="time of accel optimize; default: accel's own")
    parser.add_argument("--minutes", type=float, help="begin no row after so many minutes; call again to continue")
    asked = parser.parse_args()
    names = {f"{model}-b{batch}": (model, batch) for model, batch in ROWS}

    # Rows that measure the same model share the model's files. The cache starts empty, so no stage reuses a result of
    # an earlier run.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ACCEL_CACHE_DIR"] = f"{folder}/cache"
        made: dict[str, Made] = {}

        def measured(name: str) -> dict[str, Any]:
            model, batch = names[name]
            if model not in made:
                made[model] = make(MODELS[model], Path(folder) / model)
            return row(made[model], batch, asked.rounds, asked.seconds, asked.budget_seconds)

        seconds = None if asked.minutes is None else 60 * asked.minutes
        measure_rows(parser, asked, list(names), "cpu_latency", measured, markdown, seconds)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A model with its data and the artifacts that the other tools made from the model. ``failed`` maps the name of
    each failed tool to the error. ``took`` has the seconds of each tool, and of the export."""

    model: Model
    folder: Path
    data: Path
    evaluation: Path | None
    eager: Artifact
    exported: Artifact
    by_hand: dict[str, Artifact]
    failed: dict[str, str]
    took: dict[str, int]


def make(model: Model, folder: Path) -> Made:
    """Makes the data and the artifacts, which don't depend on the batch size."""
    folder.mkdir()
    weights = folder / "weights.safetensors" if model.train else None
    if model.train and weights:
        model.train(weights)
    data = folder / "data.npz"
    np.savez(data, **model.data(SAMPLES))  # type: ignore[arg-type]
    evaluation = model.evaluation(folder) if model.evaluation else None
    begun = time.monotonic()
    exported = accel.export(model.source, weights=weights, out=folder / "model.onnx")
    took = {"export": round(time.monotonic() - begun)}
    dataset = Dataset.load(data, exported.signature)
    by_hand: dict[str, Artifact] = {}
    failed: dict[str, str] = {}
    for title, function in BY_HAND.items():
        begun = time.monotonic()
        try:
            by_hand[title] = function(exported, dataset, folder, model)
        except Exception as error:  # if a tool fails, the results report the error
            failed[title] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        took[title] = round(time.monotonic() - begun)
    return Made(
        model=model,
        folder=folder,
        data=data,
        evaluation=evaluation,
        eager=Source(model.source, weights=weights).open(),
        exported=exported,
        by_hand=by_hand,
        failed=failed,
        took=took,
    )


def row(made: Made, batch: int, rounds: int, seconds: float, budget_seconds: float | None) -> dict[str, Any]:
    """Measures one model at one batch size and returns the row."""
    dataset = Dataset.load(made.data, made.exported.signature)
    sizes = {made.exported.signature.batch_dim or "batch": batch}
    sizes |= {d: dataset.parts[0]["input_ids"].shape[1] for d in made.exported.signature.dims if d == "sequence"}
    begun = time.monotonic()
    result = accel.optimize(
        made.exported.path,
        out=made.folder / f"accel-b{batch}",
        data=made.data,
        eval_data=made.evaluation,
        metric=made.model.metric,
        sizes=sizes,
        budget_seconds=budget_seconds,
    )
    optimized = time.monotonic()
    candidates = [
        Candidate(name="eager", artifact=made.eager),
        Candidate(name="torch.compile", artifact=made.eager, runtime="torch-compile"),
        Candidate(name="ONNX Runtime fp32", artifact=made.exported),
        *(
            Candidate(name=title, artifact=artifact, options=options_by_hand(artifact))
            for title, artifact in made.by_hand.items()
        ),
        Candidate(name=CHOICE, artifact=result.artifact),
    ]
    report = measure(candidates, dataset.shaped(sizes), rounds=rounds, budget_seconds=seconds, block_seconds=0.3)
    return {
        "title": made.model.title,
        "batch": batch,
        "bench": report.to_json(),
        "failed": made.failed,
        "optimize": result.to_json(),
        "took": {"optimize": round(optimized - begun), "measure": round(time.monotonic() - optimized), **made.took},
    }


def options_by_hand(artifact: Artifact) -> dict[str, Any]:
    """Returns the session options that a user of the artifact's runtime gets without asking. accel always sets
    OpenVINO's precision, but OpenVINO's own default is bfloat16 on a CPU with such instructions."""
    if artifact.kind != "openvino":
        return {}
    import openvino

    default = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
    return {"precision": "bf16"} if default == "bf16" else {}


def ort_static(src: Artifact, dataset: Dataset, folder: Path, model: Model) -> Artifact:  # noqa: ARG001
    """Quantizes per channel with onnxruntime.quantization.quantize_static and its defaults, after ONNX Runtime's
    pre-processing. If symbolic shape inference fails, repeats the pre-processing without symbolic shape inference, as
    ONNX Runtime's documentation advises for transformers."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = dataset.batches(1)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.left, None)

    prepared, out = folder / "prepared.onnx", folder / "ort_static.onnx"
    with contextlib.chdir(folder):  # quantize_static leaves files in the working directory
        try:
            quant_pre_process(str(src.path), str(prepared))
        except Exception:
            quant_pre_process(str(src.path), str(prepared), skip_symbolic_shape=True)
    quantize_static(str(prepared), str(out), Reader(), per_channel=True)
    return Source(out).open()


def ort_dynamic(src: Artifact, dataset: Dataset, folder: Path, model: Model) -> Artifact:  # noqa: ARG001
    """Quantizes with onnxruntime.quantization.quantize_dynamic and its defaults."""
    from onnxruntime.quantization import quantize_dynamic

    out = folder / "ort_dynamic.onnx"
    quantize_dynamic(str(src.path), str(out))
    return Source(out).open()


def openvino_nncf(src: Artifact, dataset: Dataset, folder: Path, model: Model) -> Artifact:
    """Reads the model with OpenVINO and quantizes it with nncf.quantize, with its preset for transformers."""
    import nncf
    import openvino

    from accel.converters.graph.read_ir import describe

    out = folder / "by_hand.xml"
    kind = nncf.ModelType.TRANSFORMER if model.transformer else None
    read = openvino.Core().read_model(str(src.path))
    made = nncf.quantize(read, nncf.Dataset(list(dataset.batches(1))), model_type=kind, subset_size=SAMPLES)
    openvino.save_model(made, str(out), compress_to_fp16=False)
    signature, properties = describe(out)
    return Artifact(path=out, kind="openvino", signature=signature, properties=properties, companions=("by_hand.bin",))


BY_HAND: dict[str, Callable[[Artifact, Dataset, Path, Model], Artifact]] = {
    "ORT quantize_static": ort_static,
    "ORT quantize_dynamic": ort_dynamic,
    "NNCF + OpenVINO int8": openvino_nncf,
}


def markdown(body: dict[str, Any]) -> str:
    """Returns the results page."""
    rows = body["rows"]
    lines = ["# CPU latency: what accel chooses beside what a user would pick", ""]
    machines = {name: page.machine_lines(found["bench"]) for name, found in rows.items()}
    shared = {tuple(machine[:-1]) for machine in machines.values()}
    lines += [f"{line}  " for line in (shared.pop() if len(shared) == 1 else ["The machine is said with each row."])]
    lines += ["Made by `python benchmarks/cpu_latency.py`. Medians over paired blocks in separate processes.", ""]
    lines += goal_lines(rows)
    lines += ["", body["remark"]] if "remark" in body else []  # a remark that a person has added to the results
    for name, found in rows.items():
        chosen = found["optimize"]["chosen"]["name"]
        lines += ["", f"## {found['title']}, batch {found['batch']} (`{name}`, {found['seconds']} s)", ""]
        lines += [*(machines[name][:-1] if shared else ()), f"Measured {machines[name][-1]}.", ""]
        results = [
            {**r, "name": f"{CHOICE}: {chosen}"} if r["name"] == CHOICE else r for r in found["bench"]["results"]
        ]
        lines += page.table_lines({**found["bench"], "results": results})
        lines += ["", *(f"{title} made nothing: {why}" for title, why in found["failed"].items())]
        _, said = beside_the_fastest(found)
        lines += [said, page.noise_of(found["bench"])]
        judged = judgement(found)
        if judged and judged["metric"] is not None:
            lines.append(f"Metric {judged['metric']:.4f}, the source has {judged['reference_metric']:.4f}.")
    return "\n".join([*lines, ""])


def judgement(found: dict[str, Any]) -> dict[str, Any] | None:
    """Returns accel's judgement of the chosen candidate. The judgement contains the loss of accuracy."""
    chosen = found["optimize"]["chosen"]["name"]
    judged: dict[str, Any] | None = next(c["judgement"] for c in found["optimize"]["candidates"] if c["name"] == chosen)
    return judged


def beside_the_fastest(found: dict[str, Any]) -> tuple[bool | None, str]:
    """Compares accel's choice with the fastest candidate of a row. Returns a verdict and a sentence. The verdict is
    True if the choice is as fast as the fastest candidate, up to noise. The verdict is False if the choice is slower.
    If the interval extends beyond the noise floor, the row proves nothing and the verdict is None.

    Compares the same paired rounds, with the same noise floor, as every verdict of accel bench.
    """
    timed = {r["name"]: r for r in found["bench"]["results"] if r["median_ms"] is not None}
    if CHOICE not in timed:
        error = next(r["error"] for r in found["bench"]["results"] if r["name"] == CHOICE)
        return False, f"**accel's choice could not be timed: {error}**"
    best = max(timed, key=lambda name: timed[name]["speedup"])
    if best == CHOICE:
        return True, "accel's choice is the fastest."
    ratio = compared(found["bench"].get("statistic", "median"), timed[best], timed[CHOICE])
    apart = f"{1 / ratio.value - 1:.1%} (95% interval {1 / ratio.high - 1:.1%} to {1 / ratio.low - 1:.1%})"
    floor = found["bench"]["noise_floor"]
    if judge(ratio, floor) != "slower":
        if 1 / ratio.low - 1 > floor:
            return None, f"Not shown: accel's choice and {best} are {apart} apart, where the noise is {floor:.1%}."
        return True, f"accel's choice is within the noise of the fastest ({best}): {apart} apart."
    return False, f"**accel's choice takes {apart} longer than {best}.**"


def compared(statistic: str, theirs: dict[str, Any], ours: dict[str, Any]) -> Ratio:
    """Returns the paired speedup of ``ours`` over ``theirs``, by what the speedups of the row compare. The fastest runs
    don't belong to single rounds. If they decide, the interval is the widest that the two intervals allow."""
    if statistic == "fast runs":
        (low, high), (their_low, their_high) = ours["ci95"], theirs["ci95"]
        return Ratio(value=ours["speedup"] / theirs["speedup"], low=low / their_high, high=high / their_low)
    values = "round_cpu_ms" if statistic == "cpu time" else "round_medians_ms"
    return speedup(np.array(theirs[values]), np.array(ours[values]))


def goal_lines(rows: dict[str, Any]) -> list[str]:
    """Returns a table of the goals: what is asked, what ``rows`` show, and whether the goal is met."""
    behind: list[str] = []
    undecided: list[str] = []
    lossy: list[str] = []
    ratios: list[float] = []
    ahead: list[float] = []
    for name, found in rows.items():
        held, said = beside_the_fastest(found)
        if held is False:
            behind.append(f"{name}: {said.strip('*.')}")
        elif held is None:
            undecided.append(name)
        judged = judgement(found)
        if judged and judged["metric"] is not None and judged["drop"] > GOAL_LOSS:
            lossy.append(f"{name} loses {judged['drop']:.2%}")
        timed = {r["name"]: r["speedup"] for r in found["bench"]["results"]}
        if timed.get(CHOICE):
            ahead.append(timed[CHOICE] / max(s for title, s in timed.items() if s and title != CHOICE))
            if "int8" in found["optimize"]["chosen"]["name"]:
                ratios.append(timed[CHOICE])
    missing = [f"{model}-b{batch}" for model, batch in ROWS if f"{model}-b{batch}" not in rows]
    mean, over_best = geometric_mean(ratios), geometric_mean(ahead)
    not_measured = f"; not measured: {', '.join(missing)}" if missing else ""
    too_noisy = f"; too noisy to tell: {', '.join(undecided)}" if undecided else ""
    goals = [
        (
            f"accel's choice over the fastest other candidate, geometric mean: at least {GOAL_AHEAD:g}x",
            f"{over_best or 0:.2f}x over {len(ahead)} rows{not_measured}",
            over_best is not None and over_best >= GOAL_AHEAD and not missing,
        ),
        (
            "rows in which accel's choice is significantly slower than the fastest other candidate: none",
            ("; ".join(behind) or f"none of {len(rows)}") + too_noisy,
            not behind and not missing,
        ),
        (
            f"int8 rows over eager, geometric mean: at least {GOAL_SPEEDUP:g}x",
            f"{mean:.2f}x over {len(ratios)} rows" if mean else "int8 is chosen nowhere",
            mean is not None and mean >= GOAL_SPEEDUP,
        ),
        (
            f"loss of the metric, where there is one: at most {GOAL_LOSS:.0%}",
            "; ".join(lossy) or "no more in any row",
            not lossy,
        ),
    ]
    lines = ["| goal | measured | |", "|---|---|---|"]
    return [*lines, *(f"| {asked} | {shown} | {'met' if met else '**not met**'} |" for asked, shown, met in goals)]


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """Returns the geometric mean, or None if there are no ratios."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


if __name__ == "__main__":
    main()
