"""Is what `accel optimize` chooses the fastest form that a user could have picked on this CPU, and is it right?

    python benchmarks/cpu_latency.py                     # every row that isn't there yet
    python benchmarks/cpu_latency.py small-cnn-b1 --again

Each row is a model at a batch: PyTorch eager and torch.compile, ONNX Runtime in fp32, its own quantize_static and
quantize_dynamic, NNCF and OpenVINO by hand, and accel's choice, side by side in paired blocks. A row is written as soon
as it is measured (benchmarks/results/cpu_latency.json and .md): an interrupted run goes on where it was. For a quiet
machine.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cpu_models import MODELS, Model
from result_rows import measure_rows, row_arguments

import accel
from accel.artifact import Artifact
from accel.bench.paired import Candidate, measure
from accel.sources import open_source
from accel.verify.data import Dataset

ROWS = [
    ("small-cnn", 1), ("small-cnn", 8), ("resnet50", 1), ("resnet50", 8), ("minilm", 1), ("minilm", 8),
    ("bert-base", 1), ("efficientnet-lite0", 1),
]  # fmt: skip
SAMPLES = 64
CHOICE = "accel's choice"


def main() -> None:
    """Measure the rows asked for, or all that aren't there yet."""
    parser = row_arguments(__doc__, "resnet50-b8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60.0, help="of further rounds while an interval is wide")
    asked = parser.parse_args()
    names = {f"{model}-b{batch}": (model, batch) for model, batch in ROWS}

    def measured(name: str) -> dict[str, Any]:
        model, batch = names[name]
        return row(MODELS[model], batch, asked.rounds, asked.seconds)

    measure_rows(parser, asked, list(names), "cpu_latency", measured, markdown)


def row(model: Model, batch: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Everything about one model at one batch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = folder / "weights.safetensors" if model.train else None
        if model.train and weights:
            model.train(weights)
        data = folder / "data.npz"
        np.savez(data, **model.data(SAMPLES))  # type: ignore[arg-type]
        evaluation = model.evaluation(folder) if model.evaluation else None
        exported = accel.export(model.source, weights=weights, out=folder / "model.onnx")
        dataset = Dataset.load(data, exported.signature)
        sizes = {exported.signature.batch_dim or "batch": batch}
        sizes |= {d: dataset.parts[0]["input_ids"].shape[1] for d in exported.signature.dims if d == "sequence"}
        result = accel.optimize(
            exported.path,
            out=folder / "accel",
            data=data,
            eval_data=evaluation,
            metric=model.metric,
            sizes=sizes,
            use_cache=False,
        )
        eager = open_source(model.source, weights=weights)
        candidates = [
            Candidate(name="eager", artifact=eager),
            Candidate(name="torch.compile", artifact=eager, runtime="torch-compile"),
            Candidate(name="ONNX Runtime fp32", artifact=exported),
        ]
        failed: dict[str, str] = {}
        for title, make in BY_HAND.items():
            try:
                candidates.append(Candidate(name=title, artifact=make(exported, dataset, folder)))
            except Exception as error:  # what doesn't work for a model is part of the answer
                failed[title] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        candidates.append(Candidate(name=CHOICE, artifact=result.artifact))
        report = measure(candidates, dataset.shaped(sizes), rounds=rounds, budget_seconds=seconds, block_seconds=0.3)
    return {
        "title": model.title,
        "batch": batch,
        "bench": report.to_json(),
        "failed": failed,
        "optimize": result.to_json(),
    }


def ort_static(src: Artifact, dataset: Dataset, folder: Path) -> Artifact:
    """onnxruntime.quantization.quantize_static with its defaults, per channel, after its own pre-processing."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = dataset.batches(1)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.left, None)

    prepared, out = folder / "prepared.onnx", folder / "ort_static.onnx"
    quant_pre_process(str(src.path), str(prepared))
    quantize_static(str(prepared), str(out), Reader(), per_channel=True)
    return open_source(out)


def ort_dynamic(src: Artifact, dataset: Dataset, folder: Path) -> Artifact:  # noqa: ARG001
    """onnxruntime.quantization.quantize_dynamic with its defaults."""
    from onnxruntime.quantization import quantize_dynamic

    out = folder / "ort_dynamic.onnx"
    quantize_dynamic(str(src.path), str(out))
    return open_source(out)


def openvino_nncf(src: Artifact, dataset: Dataset, folder: Path) -> Artifact:
    """nncf.quantize on OpenVINO's own model, with the preset for transformers where there is attention."""
    import nncf
    import openvino

    from accel.converters.openvino_from_onnx import describe

    out = folder / "by_hand.xml"
    kind = nncf.ModelType.TRANSFORMER if len(src.signature.inputs) > 1 else None
    model = openvino.Core().read_model(str(src.path))
    made = nncf.quantize(model, nncf.Dataset(list(dataset.batches(1))), model_type=kind, subset_size=SAMPLES)
    openvino.save_model(made, str(out), compress_to_fp16=False)
    signature, properties = describe(out)
    return Artifact(path=out, kind="openvino", signature=signature, properties=properties, companions=("by_hand.bin",))


BY_HAND: dict[str, Callable[[Artifact, Dataset, Path], Artifact]] = {
    "ORT quantize_static": ort_static,
    "ORT quantize_dynamic": ort_dynamic,
    "NNCF + OpenVINO int8": openvino_nncf,
}


def markdown(body: dict[str, Any]) -> str:
    """The results page."""
    rows = body["rows"]
    machine = next(iter(rows.values()))["bench"]["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    lines = [
        "# CPU latency: what accel chooses beside what a user would pick",
        "",
        f"{machine['cpu']}, {machine['threads']} threads, {machine['date'][:10]}; {versions}.",
        "Made by `python benchmarks/cpu_latency.py`. Medians over paired blocks in separate processes.",
    ]
    ratios = []
    for name, found in rows.items():
        results = {r["name"]: r for r in found["bench"]["results"]}
        timed = {k: r["median_ms"] for k, r in results.items() if r["median_ms"] is not None}
        chosen = found["optimize"]["chosen"]["name"]
        lines += ["", f"## {found['title']}, batch {found['batch']} (`{name}`)", ""]
        lines += ["| candidate | median ms | p99 ms | speedup over eager | 95% interval | cosine | peak MiB |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for title, r in results.items():
            shown = f"{title}: {chosen}" if title == CHOICE else title
            if r["median_ms"] is None:
                lines.append(f"| {shown} | - | - | - | - | - | {r['error']} |")
                continue
            low, high = r["ci95"] or (1, 1)
            lines.append(
                f"| {shown} | {r['median_ms']:.3f} | {r['p99_ms']:.3f} | {r['speedup']:.2f}x | {low:.2f} to {high:.2f} "
                f"| {r['cosine']:.5f} | {r['peak_rss_mb']:.0f} |"
            )
        lines += [f"| {title} | - | - | - | - | - | {why} |" for title, why in found["failed"].items()]
        if CHOICE in timed:
            lines += ["", verdict(timed, found["bench"]["noise_floor"])]
            if "int8" in chosen:
                ratios.append(timed["eager"] / timed[CHOICE])
        judged = next(c["judgement"] for c in found["optimize"]["candidates"] if c["name"] == chosen)
        if judged and judged["metric"] is not None:
            lines.append(f"Metric {judged['metric']:.4f}, the source has {judged['reference_metric']:.4f}.")
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines += ["", f"Rows for which int8 was chosen: {mean:.2f}x eager in the geometric mean of {len(ratios)}."]
    return "\n".join([*lines, ""])


def verdict(timed: dict[str, float], noise: float) -> str:
    """Whether the choice is the fastest or within the noise of it."""
    best = min(timed, key=lambda name: timed[name])
    if best == CHOICE:
        return "accel's choice is the fastest."
    apart = timed[CHOICE] / timed[best] - 1
    if apart <= noise:
        return (
            f"accel's choice is within the noise of the fastest ({best}): {apart:.1%} apart, noise floor {noise:.1%}."
        )
    return f"**{best} is {apart:.1%} faster than accel's choice** (noise floor {noise:.1%})."


if __name__ == "__main__":
    main()
