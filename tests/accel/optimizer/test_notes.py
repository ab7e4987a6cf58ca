"""Proves that accel adds a note about an int8 candidate that computes in float, and about a slow baseline."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

import accel
from accel.optimizer.notes import partly_quantized
from tests.support import onnx_builder as build

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
TABLE = {"table": np.ones((400, 32), np.int8), "scale": np.array(0.1, np.float32)}
EMBEDDING = [build.node("DequantizeLinear", "table scale", "rows"), build.node("Gather", "rows ids", "found")]


@pytest.mark.parametrize(
    ("nodes", "weights", "said"),
    [
        (
            [*EMBEDDING, build.node("MatMul", "found layer", "y")],
            {**TABLE, "layer": np.ones((32, 100), np.float32)},
            "0% of the FLOPs of its products and 50% of its weights' bytes are in int8",
        ),
        (
            [
                *EMBEDDING,
                build.node("QuantizeLinear", "found scale zero", "small"),
                build.node("DequantizeLinear", "small scale", "back"),
                build.node("DequantizeLinear", "layer scale", "weight"),
                build.node("MatMul", "back weight", "y"),
            ],
            {**TABLE, "zero": np.array(0, np.int8), "layer": np.ones((32, 100), np.int8)},
            "",
        ),
        ([*EMBEDDING[:1], build.node("Gather", "rows ids", "y")], TABLE, ""),
    ],
    ids=["only an embedding", "products too", "no products"],
)
def test_an_int8_model_that_is_mostly_float(
    tmp_path: Path, nodes: list[object], weights: dict[str, np.ndarray], said: str
) -> None:
    """Checks that an int8 candidate gets a note if its products are in float, and only then."""
    made = build.artifact(
        tmp_path / "m.onnx", nodes, {"ids": (INT64, ["batch", 8])}, {"y": (FLOAT, ["batch", 8, None])}, weights
    )
    found = partly_quantized(made)
    assert found.partition(" and")[0] == said.partition(" and")[0]
    assert bool(found) == bool(said)
    if said:  # the int8 table takes 400 x 32 bytes, and the float32 layer takes 4 x 32 x 100 bytes
        assert "50% of its weights' bytes" in found


def test_a_source_in_bfloat16(tmp_path: Path) -> None:
    """Fails if ``accel optimize`` can't time a bfloat16 source on a CPU, rejects its OpenVINO form for roundings at
    other nodes, or doesn't say that the source's time is the time of a slow runtime."""
    w = np.random.default_rng(0).standard_normal((8, 8)).astype(ml_dtypes.bfloat16)
    nodes = [
        build.node("Cast", "x", "b", to=TensorProto.BFLOAT16),
        build.node("MatMul", "b w", "p"),
        build.node("Tanh", "p", "t"),
        build.node("Cast", "t", "y", to=FLOAT),
    ]
    build.artifact(tmp_path / "m.onnx", nodes, {"x": (FLOAT, [8, 8])}, {"y": (FLOAT, [8, 8])}, {"w": w})
    found = accel.optimize(tmp_path / "m.onnx", out=tmp_path / "out", vary_session=False, budget_seconds=30)
    source, *others = found.candidates
    assert source.runtime == "onnx-rounded"
    assert any("timed in the runtime onnx-rounded, which is slow" in note for note in found.notes)
    assert not any("changed the output" in row.reason for row in others)
