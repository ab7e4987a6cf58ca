"""Compares `accel infer --dataset` with the model alone, in rows a second.

Usage:

    python benchmarks/infer_dataset.py             # writes benchmarks/results/infer_dataset.md, in some two minutes

The model alone runs the same batches, which are in memory before, and throws the outputs away. `accel infer` reads
Parquet files, runs the model and writes Parquet files. Both run in one process, in turns. The rows are an MLP
(1024-512-512-10, float32) and MiniLM on token ids of 8 to 128 tokens, padded in batches that are sorted by length.
Needs a quiet machine.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.timing.environment import environment

RESULT = Path(__file__).parent / "results" / "infer_dataset.md"
TURNS, BATCH = 7, 32
WIDTHS = (1024, 512, 512, 10)


def mlp(folder: Path, rows: int = 40_000) -> tuple[Path, dict[str, Any], dict[str, float]]:
    """Writes the MLP. Returns it with its columns and the padding."""
    draw = np.random.default_rng(0)
    nodes, weights, at = [], [], "x"
    for number, (wide, narrow) in enumerate(itertools.pairwise(WIDTHS)):
        weights.append(numpy_helper.from_array(draw.standard_normal((wide, narrow), np.float32) / 32, f"w{number}"))
        nodes.append(helper.make_node("MatMul", [at, f"w{number}"], [f"m{number}"]))
        nodes.append(helper.make_node("Relu", [f"m{number}"], [at := f"h{number}"]))
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTHS[0]])]
    made = [helper.make_tensor_value_info(at, TensorProto.FLOAT, ["batch", WIDTHS[-1]])]
    graph = helper.make_graph(nodes, "mlp", given, made, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, str(folder / "mlp.onnx"))
    x = pa.FixedSizeListArray.from_arrays(pa.array(draw.random(rows * WIDTHS[0], np.float32)), WIDTHS[0])
    return folder / "mlp.onnx", {"id": np.arange(rows), "x": x}, {}


def texts(folder: Path, rows: int = 400) -> tuple[Path, dict[str, Any], dict[str, float]]:
    """Exports MiniLM. Returns it with its columns and the padding."""
    accel.export("accel.examples.minilm:model", out=folder / "minilm.onnx")
    draw = np.random.default_rng(0)
    ids = [draw.integers(1000, 30000, n) for n in draw.integers(8, 129, rows)]
    names = [spec.name for spec in accel.Artifact.open(folder / "minilm.onnx").signature.inputs]
    columns: dict[str, Any] = {
        name: [np.zeros_like(row) if "type" in name else np.ones_like(row) for row in ids] for name in names
    }
    columns[next(name for name in names if "ids" in name and "type" not in name)] = ids
    return folder / "minilm.onnx", {"id": np.arange(rows), **columns}, dict.fromkeys(names, 0)


def batches(columns: dict[str, Any], names: list[str], pad: dict[str, float]) -> list[dict[str, np.ndarray]]:
    """Returns the feeds of each batch, in the order in which `accel infer` runs the rows."""
    arrays = {}
    for name in names:
        rows = columns[name]
        fixed = isinstance(rows, pa.Array)
        arrays[name] = rows.flatten().to_numpy().reshape(len(rows), -1) if fixed else rows
    count = len(arrays[names[0]])
    order = np.argsort([len(row) for row in arrays[names[0]]], kind="stable")
    found = []
    for begin in range(0, count, BATCH):
        rows = order[begin : begin + BATCH]
        feeds = {}
        for name, value in arrays.items():
            widest = max(len(value[row]) for row in rows)
            some = [np.pad(value[row], (0, widest - len(value[row])), constant_values=pad.get(name, 0)) for row in rows]
            feeds[name] = np.stack(some)
        found.append(feeds)
    return found


def row(name: str, model: Path, columns: dict[str, Any], pad: dict[str, float], folder: Path) -> str:
    """Returns the line of a model in the table of results."""
    pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=8192)
    count = len(columns["id"])
    ratios, alone, whole = [], [], []
    with accel.load(model) as session:
        names = [spec.name for spec in session.signature.inputs]
        made = batches(columns, names, pad)
        for turn in range(TURNS):
            began = time.perf_counter()
            for feeds in made:
                session.run(feeds)
            alone.append(count / (time.perf_counter() - began))
            report = accel.infer(model, folder / f"{name}.parquet", out=folder / f"{name}-{turn}", pad=pad, batch=BATCH)
            whole.append(report.rows_a_second)
            ratios.append(whole[-1] / alone[-1])
    low, high = sorted(ratios)[1], sorted(ratios)[-2]
    middle = statistics.median
    ratio = f"{middle(ratios):.2f} ({low:.2f} to {high:.2f})"
    return f"| {name} | {count} | {middle(alone):.0f} | {middle(whole):.0f} | {ratio} |"


def main() -> None:
    lines = [
        "# A dataset through a model: rows a second",
        "",
        f"{environment()['cpu']}. Made by `python benchmarks/infer_dataset.py`: the model alone on batches in memory,",
        "and `accel infer --dataset` from Parquet files to Parquet files, opening the model included.",
        "",
        "| model | rows | model alone, rows/s | accel infer, rows/s | ratio, median (without the extremes) |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, make in {"mlp": mlp, "minilm": texts}.items():
            lines.append(row(name, *make(folder), folder))
            print(lines[-1], flush=True)
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
