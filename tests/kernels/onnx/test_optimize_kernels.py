"""Proves that ``accel optimize --kernels`` writes the fused operators and keeps the model's outputs.

These tests check that --kernels takes effect, and that a candidate without the fused operators gets a warning. The
tests also check that the fused model runs in ONNX Runtime, and that its outputs stay within the limit of the stage's
gate.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import accel
from accel.artifact import Artifact
from accel.errors import UnsupportedHere
from accel.kernels.onnx.function import DOMAIN
from accel.optimizer.recipes.candidates import recipes, targets_for
from accel.optimizer.recipes.recipe import RecipeRequest
from accel.tables.target import TARGETS, Target


@pytest.fixture
def my_softmax(tmp_path: Path) -> Path:
    """Returns the path of a model in which no pattern can be fused."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "softmax.onnx")
    return tmp_path / "softmax.onnx"


def fused_nodes(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node if node.domain == DOMAIN)


@pytest.mark.proof(seconds=25)
def test_minilm_as_on_the_command_line(cli: Any, minilm: Artifact, tmp_path: Path) -> None:
    """Checks that every pattern of MiniLM is fused. Each of the six layers has six products with a bias. The products
    for query, key and value have only a bias, two products also have a residual, and one product also has a GELU. The
    stage's gate lets the outputs change by 1e-4 of their norm."""
    out = tmp_path / "fused"
    words = ["optimize", minilm.path, "--kernels", "--target", "ort-cpu", "--rounds", "5", "-o", out]
    ran = cli(*words)
    assert ran.code == 0, ran.stderr
    assert "ort-cpu int8" in ran.stdout, "what can't have the operators is named"
    found = fused_nodes(out / "model.onnx")
    assert found["FusedGemm_matmul_bias_gelu_erf_fp32"] == 6
    assert found["FusedGemm_matmul_bias_residual_fp32"] == 12
    assert found["FusedGemm_matmul_bias_fp32"] == 18
    files = (minilm.path, out / "model.onnx")
    before, after = (ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]) for file in files)
    g = np.random.default_rng(0)
    for batch, length in ((1, 8), (3, 77)):
        ids = g.integers(0, 30000, (batch, length))
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        wanted, got = before.run(None, feeds)[0], after.run(None, feeds)[0]
        assert np.linalg.norm(got - wanted) <= 1e-4 * np.linalg.norm(wanted)
    record = accel.inspect(out, check=True)
    assert record.intact


def test_convolutions_are_fused_too(digits: Artifact, tmp_path: Path) -> None:
    result = accel.optimize(digits.path, out=tmp_path / "out", target="ort-cpu", kernels=True, rounds=5)
    found = fused_nodes(result.artifact.path)
    assert any(name.startswith("FusedConv2d_k3x3") and "relu" in name for name in found), found
    assert [gate["passed"] for gate in result.artifact.history[-1]["gates"]].count(True) > 0
    with accel.load(digits.path) as before, accel.load(result.artifact.path) as after:
        feeds = before.example_inputs(batch=5)
        wanted, got = before.run(feeds)["logits"], after.run(feeds)["logits"]
    assert np.linalg.norm(got - wanted) <= 1e-4 * np.linalg.norm(wanted)


def test_the_fused_form_that_seemed_faster_first(my_softmax: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The test replaces all measured times by fixed times. In the first measurement, the fused model is faster. In the
    second measurement, which tries other session options, all candidates are equally fast. Checks that the fused model
    is chosen."""
    ratios = iter([2.0])

    def measured(source: Any, rows: Any, *_: Any) -> dict[str, Any]:
        ratio = next(ratios, 1.0)
        for row in (source, *rows):
            ms = 10.0 if row is source else 10.0 / ratio
            verdict = "faster" if ratio > 1 and row is not source else "no measurable difference"
            faster = 1.0 if row is source else ratio
            row.measured = {"median_ms": ms, "round_medians_ms": [ms] * 9, "verdict": verdict}
            row.measured |= {"speedup": faster, "ci95": [faster, faster]}
        return {"noise_floor": 0.02}

    monkeypatch.setattr("accel.optimizer.search.measured", measured)
    result = accel.optimize(my_softmax, out=tmp_path / "out", target="ort-cpu", kernels=True, rounds=5)
    assert next(ratios, None) is None
    assert len(result.candidates) > 2, "its session options were tried"
    assert result.chosen.startswith("ort-cpu fp32")
    assert "fuse_kernels" in [record["name"] for record in result.artifact.history]
    assert "kernels=True requests it" in " ".join(result.notes)


def request(*targets: Target, **options: Any) -> RecipeRequest:
    options = {"precisions": None, "data": None, "samples": 0, "threads": 1, "kernels": True, **options}
    return RecipeRequest(targets=targets, **options)


def test_openvino_has_no_kernels(digits: Artifact) -> None:
    with pytest.raises(UnsupportedHere, match="OpenVINO doesn't take accel's fused operators; leave out kernels=True"):
        recipes(digits, request(TARGETS["openvino"]))
    made, left_out = recipes(digits, request(*targets_for("auto")))
    assert [recipe.name for recipe in made if recipe.target.name == "ort-cpu"] == ["ort-cpu fp32"]
    reasons = {item.name: item.reason for item in left_out}
    assert "leave out kernels=True" in reasons["openvino fp32"]
    assert "quantized products" in reasons["ort-cpu int8"]


def test_fusing_is_the_last_step_before_an_engine(digits: Artifact) -> None:
    """Fails if fusing runs before the cast. A function's name contains the dtype of the products, and the cast changes
    this dtype."""
    made, _ = recipes(digits, request(*(TARGETS[name] for name in ("tensorrt-rtx", "tensorrt", "ort-cuda"))))
    steps = {recipe.name: [stage for stage, *_ in recipe.stages] for recipe in made}
    for name in ("tensorrt-rtx", "tensorrt"):
        assert steps[f"{name} fp32"][-2:] == ["fuse_kernels", "engine_from_onnx"]
        assert steps[f"{name} fp16"][-3:] == ["cast", "fuse_kernels", "engine_from_onnx"]
        assert f"{name} int8" not in steps
    assert steps["ort-cuda fp32"][-1:] == ["fuse_kernels"]
    assert steps["ort-cuda fp16"][-2:] == ["cast", "fuse_kernels"]
    plain, _ = recipes(digits, request(TARGETS["tensorrt-rtx"], kernels=False))
    assert not any(stage == "fuse_kernels" for recipe in plain for stage, *_ in recipe.stages)


def test_a_model_without_products_is_not_called_fused(my_softmax: Path, tmp_path: Path) -> None:
    """Checks that a model without products isn't fused. accel makes a candidate even if nothing can be fused, and the
    candidate's record says that nothing was fused."""
    result = accel.optimize(my_softmax, out=tmp_path / "out", target="ort-cpu", kernels=True, rounds=5)
    assert fused_nodes(result.artifact.path) == Counter()
    fused = next(record for record in result.artifact.history if record["name"] == "fuse_kernels")
    assert fused["notes"]["fused"] == 0
