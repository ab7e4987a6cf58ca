"""Proves that int8 activations keep their small columns if the outlier columns are multiplied in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.converters.quantize.dynamic.outliers import outlier_columns
from accel.converters.quantize.stage import QuantizeConfig, QuantizeFailed, quantize
from accel.sources.onnx.file import open_onnx

WIDTH, OUTLIER, TIMES = 64, 17, 100.0
FLOAT = TensorProto.FLOAT


def planted(path: Path) -> Path:
    """Writes a net whose feature ``OUTLIER`` is 100 times as large as the others. Three products read the features: a
    MatMul, a Gemm with turned weights and bias, and a MatMul of inner features. Classes depend on all features alike,
    because the weights of the outlier are 100 times smaller."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for name in ("a", "b")}
    for value in weights.values():
        value[OUTLIER] /= TIMES
    scale = np.ones(WIDTH, np.float32)
    scale[OUTLIER] = TIMES
    constants = {
        "a": weights["a"], "b": np.ascontiguousarray(weights["b"].T), "bias": rng.standard_normal(WIDTH),
        "scale": scale, "c": rng.standard_normal((WIDTH, 10)) / 8,
    }  # fmt: skip
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["features"], name="scaled"),
        helper.make_node("MatMul", ["features", "a"], ["first"], name="first"),
        helper.make_node("Gemm", ["features", "b", "bias"], ["second"], name="second", transB=1),
        helper.make_node("Add", ["first", "second"], ["sum"], name="added"),
        helper.make_node("Tanh", ["sum"], ["inner"], name="tanh"),
        helper.make_node("MatMul", ["inner", "c"], ["logits"], name="third"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("logits", FLOAT, ["batch", 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))
    return path


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(tmp_path_factory.mktemp("net") / "net.onnx")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "x.npz"
    np.savez(path, x=np.random.default_rng(1).standard_normal((512, WIDTH)).astype(np.float32))
    return path


def lost(net: Path, mode: str, samples: Path, folder: Path) -> tuple[float, dict]:
    """Returns the relative error of the logits on other samples, and the notes of the stage."""
    made = quantize(open_onnx(net), QuantizeConfig(mode=mode, data=samples), folder / f"{mode}.onnx")
    x = np.random.default_rng(2).standard_normal((256, WIDTH)).astype(np.float32)
    with accel.load(net) as one, accel.load(made.path) as other:
        wanted, found = one.run({"x": x})["logits"], other.run({"x": x})["logits"]
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)), dict(made.notes)


def test_a_planted_outlier(net: Path, samples: Path, tmp_path: Path) -> None:
    """Fails if the outlier column isn't found, or isn't taken out of the range of the others: with it, a step of int8
    is nearly as large as the other values. The inner features have no outlier, and their product isn't split."""
    rowwise, _ = lost(net, "dynamic", samples, tmp_path)
    apart, notes = lost(net, "dynamic-outliers", samples, tmp_path)
    assert rowwise > 0.2
    assert apart < rowwise / 10
    assert (notes["outlier_columns"], notes["split_products"]) == (1, 2)
    made = onnx.load(tmp_path / "dynamic-outliers.onnx")
    assert [node.name for node in made.graph.node if node.op_type == "MatMul"] == ["first/outliers", "second/outliers"]
    assert sum(node.op_type == "MatMulInteger" for node in made.graph.node) == 3


def test_the_search_turns_to_outlier_columns(net: Path, samples: Path, tmp_path: Path) -> None:
    """Fails if int8 that loses too much isn't tried again with outlier columns, or if the second try is judged to lose
    more than the budget."""
    made = accel.optimize(
        net,
        data=samples,
        target="ort-cpu",
        precision="int8",
        max_drop=0.05,
        rounds=5,
        vary_session=False,
        thorough=True,
        out=tmp_path / "out",
    )
    status = {row.name: row for row in made.candidates}
    assert status["ort-cpu int8 dynamic"].status == "rejected"
    kept = status["ort-cpu int8 dynamic with outlier columns"]
    assert kept.status in ("passed", "chosen"), kept.reason
    assert kept.judgement is not None
    assert kept.judgement.drop <= 0.05


def test_without_outliers(net: Path, tmp_path: Path) -> None:
    """Fails if a model without outliers is split, or the error names no mode that helps. On these samples, the feature
    is as large as the others."""
    x = np.random.default_rng(1).standard_normal((64, WIDTH)).astype(np.float32)
    x[:, OUTLIER] /= TIMES
    np.savez(tmp_path / "even.npz", x=x)
    with pytest.raises(QuantizeFailed, match="use the mode dynamic"):
        lost(net, "dynamic-outliers", tmp_path / "even.npz", tmp_path)


@given(st.integers(1, 80), st.lists(st.integers(0, 79), max_size=8), st.integers(0, 9))
def test_columns(count: int, large: list[int], seed: int) -> None:
    """Fails if an ordinary column counts as an outlier, or more than a sixteenth of the columns (at least one) do."""
    largest = np.random.default_rng(seed).uniform(1, 2, count)
    planted_at = {one for one in large if one < count}
    largest[list(planted_at)] *= 100
    found = outlier_columns(largest)
    assert set(found) <= planted_at
    assert len(found) <= max(1, count // 16)
    assert list(found) == sorted(found)
    if 2 * len(planted_at) < count:
        assert len(found) == min(len(planted_at), max(1, count // 16))
