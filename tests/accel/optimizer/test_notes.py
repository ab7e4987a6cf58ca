"""Proves that accel adds a note when an int8 candidate computes its products in float."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

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
