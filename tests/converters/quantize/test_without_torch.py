"""Proves that simplification and quantization run in processes that don't import torch. Importing torch takes
seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from accel.artifact import Artifact
from accel.converters.graph.simplify import SimplifyConfig, simplify
from accel.converters.quantize.stage import QuantizeConfig, quantize
from tests.support.onnx_builder import FLOAT, artifact, node

STAGES: dict[str, Callable[[Artifact, Path], Artifact]] = {
    "simplify": lambda src, out: simplify(src, SimplifyConfig(), out),
    "dynamic": lambda src, out: quantize(src, QuantizeConfig(mode="dynamic"), out),
    "static": lambda src, out: quantize(src, QuantizeConfig(samples=4), out),
    "nncf": lambda src, out: quantize(src, QuantizeConfig(form="openvino", samples=4), out),
    "int8 weights": lambda src, out: quantize(
        src, QuantizeConfig(form="openvino", mode="int8-weights", smallest=16), out
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_torch_stays_unloaded(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the child process of a stage imports torch. A fake torch package ends any process that imports torch."""
    weights = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    net = artifact(
        tmp_path / "net.onnx",
        [node("MatMul", "x w", "y")],
        {"x": (FLOAT, ["batch", 8])},
        {"y": (FLOAT, ["batch", 8])},
        {"w": weights},
    )
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "torch.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(trap)
    made = STAGES[stage](net, tmp_path / "out.onnx")
    assert made.path.is_file()
    assert "kept" not in made.notes
