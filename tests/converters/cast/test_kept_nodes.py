"""Proves that nodes whose values don't fit into 16 bits stay in float32, and that all other nodes are cast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import numpy_helper

from accel.artifact import Artifact
from accel.converters.cast import overflow_search as cast_search
from accel.converters.cast.stage import CastConfig, cast
from accel.optimizer.judge.comparison import Judge
from accel.proof.gates import OutputGate
from accel.runtimes.onnx_rounded import RoundedModel
from accel.signature import DimRange
from tests.support.onnx_builder import (
    FLOAT,
    INT64,
    artifact,
    kept,
    node,
    proto,
    run,
    save_data,
    square_root_of_square,
)


def test_overflow_in_the_data_stays_float32(tmp_path: Path) -> None:
    """Fails if the overflow search ignores the data file, if a node that overflows is cast, or if Relu stays in
    float32."""
    src = square_root_of_square(tmp_path / "m.onnx")
    data = save_data(tmp_path / "d.npz", x=np.array([300.0, 1.0], np.float32))
    made = cast(src, CastConfig(data=data), tmp_path / "o.onnx")
    assert kept(made) == {"n_a", "n_y"}
    assert "reaches 9e+04" in made.notes["kept_fp32"][0]["reason"]
    assert np.allclose(run(made, x=np.array([300.0, 1.0], np.float32))["z"], [300, 1], rtol=1e-3)
    without = cast(src, CastConfig(), tmp_path / "w.onnx")
    assert kept(without) == set()
    assert np.isinf(run(without, x=np.array([300.0], np.float32))["z"]).all()
    bf16 = cast(src, CastConfig(precision="bf16", data=data), tmp_path / "b.onnx")
    assert kept(bf16) == set()


def attention_mask(path: Path, low: float) -> Artifact:
    """Builds a model of softmax(scores + (1 - mask) * low), the attention mask formula of the transformers library."""
    return artifact(
        path,
        [
            node("Cast", "mask", "m", to=FLOAT),
            node("Sub", "one m", "inverted"),
            node("Mul", "inverted low", "bias"),
            node("Add", "scores bias", "masked"),
            node("Softmax", "masked", "p", axis=-1),
        ],
        {"scores": (FLOAT, ["batch", 8]), "mask": (INT64, ["batch", 8])},
        {"p": (FLOAT, ["batch", 8])},
        {"one": np.float32(1), "low": np.float32(low)},
    )


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("low", [-1e9, float(np.finfo(np.float32).min), -1e4])
def test_masks_stay_masks(tmp_path: Path, low: float, precision: str) -> None:
    """Fails if the large negative constant of an attention mask becomes small or zero, or if its product with 0 is NaN.
    Also fails if the softmax stays in float32."""
    made = cast(attention_mask(tmp_path / "m.onnx", low), CastConfig(precision=precision), tmp_path / "o.onnx")
    scores = np.array([[5, -20, 0, 3, 9, 9, 9, 9]], np.float32)
    p = run(made, scores=scores, mask=np.array([[1, 1, 1, 1, 0, 0, 0, 0]]))["p"]
    assert np.all(p[0, 4:] == 0)
    assert np.isclose(p.sum(), 1, atol=1e-2)
    assert kept(made) == set()
    top = 65504 if precision == "fp16" else float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    constant = next(t for t in proto(made).graph.initializer if t.name == "low")
    assert float(numpy_helper.to_array(constant)) == pytest.approx(max(low, -top), rel=4e-3)


def test_fully_masked_rows_stay_finite(tmp_path: Path) -> None:
    """Fails if a finite mask value becomes -inf, because the softmax of a fully masked row would then be NaN."""
    made = cast(attention_mask(tmp_path / "m.onnx", -1e9), CastConfig(), tmp_path / "o.onnx")
    p = run(made, scores=np.zeros((1, 8), np.float32), mask=np.zeros((1, 8), np.int64))["p"]
    assert np.allclose(p, 1 / 8, atol=1e-3)


def test_where_with_infinity_and_constant_of_shape(tmp_path: Path) -> None:
    """Checks that -inf stays -inf in fp16. Also fails if a ConstantOfShape, Constant or Cast node still outputs
    float32."""
    src = artifact(
        tmp_path / "m.onnx",
        [
            node("Shape", "x", "s"),
            node("ConstantOfShape", "s", "low", value=numpy_helper.from_array(np.array([-1e9], np.float32))),
            node("Constant", "", "inf", value_float=float("-inf")),
            node("Greater", "x zero", "positive"),
            node("Where", "positive x low", "a"),
            node("Where", "positive a inf", "b"),
            node("Max", "a b", "y"),
        ],
        {"x": (FLOAT, ["batch", 4])},
        {"y": (FLOAT, ["batch", 4]), "b": (FLOAT, ["batch", 4])},
        {"zero": np.float32(0)},
    )
    made = cast(src, CastConfig(), tmp_path / "o.onnx")
    found = run(made, x=np.array([[1, -1, 2, -2]], np.float32))
    assert np.array_equal(found["y"], [[1, -65504, 2, -65504]])
    assert np.array_equal(found["b"], [[1, -np.inf, 2, -np.inf]])
    assert made.notes["casts_inserted"] == 3  # one cast each for x, y and b
    assert kept(made) == set()


@pytest.mark.parametrize("eps", [1e-8, 1e-12])
def test_epsilons_stay_effective(tmp_path: Path, eps: float) -> None:
    """Fails if the eps of a normalization is rounded to fp16. Also fails if accel casts the addition of eps, the square
    root or the division."""
    src = artifact(
        tmp_path / "m.onnx",
        [
            node("ReduceMean", "x axes", "mean", keepdims=1),
            node("Sub", "x mean", "d"),
            node("Mul", "d d", "sq"),
            node("ReduceMean", "sq axes", "var", keepdims=1),
            node("Add", "var eps", "v"),
            node("Sqrt", "v", "std"),
            node("Div", "d std", "n"),
            node("Mul", "n w", "y"),
        ],
        {"x": (FLOAT, ["batch", 8])},
        {"y": (FLOAT, ["batch", 8])},
        {"axes": np.array([-1]), "eps": np.float32(eps), "w": np.ones(8, np.float32)},
    )
    made = cast(src, CastConfig(), tmp_path / "o.onnx")
    assert kept(made) == {"n_v", "n_std", "n_n"}
    constant = next(t for t in proto(made).graph.initializer if t.name == "eps")
    assert numpy_helper.to_array(constant) == np.float32(eps)
    flat = run(made, x=np.full((1, 8), 3, np.float32))["y"]
    assert np.array_equal(flat, np.zeros((1, 8), np.float32))
    assert kept(cast(src, CastConfig(precision="bf16"), tmp_path / "b.onnx")) == set()


def test_normalisation_over_large_activations(tmp_path: Path) -> None:
    """Fails if a layer normalization squares values around 1000 in fp16. One model has the LayerNormalization operator,
    and the other model computes the layer normalization with several operators. Also checks that the layers around the
    layer normalization are cast."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((2, 16)) * 1000).astype(np.float32)
    inputs, outputs = {"x": (FLOAT, ["batch", 16])}, {"y": (FLOAT, ["batch", 16])}
    weights = {"w": np.eye(16, dtype=np.float32), "one": np.ones(16, np.float32)}
    operator = artifact(
        tmp_path / "op.onnx",
        [node("MatMul", "x w", "h"), node("LayerNormalization", "h one", "n"), node("MatMul", "n w", "y")],
        inputs,
        outputs,
        weights,
    )
    decomposed = artifact(
        tmp_path / "de.onnx",
        [
            node("MatMul", "x w", "h"),
            node("ReduceMean", "h axes", "mean", keepdims=1),
            node("Sub", "h mean", "d"),
            node("Pow", "d two", "sq"),
            node("ReduceMean", "sq axes", "var", keepdims=1),
            node("Sqrt", "var", "std"),
            node("Div", "d std", "n"),
            node("MatMul", "n w", "y"),
        ],
        inputs,
        outputs,
        weights | {"axes": np.array([-1]), "two": np.float32(2)},
    )
    data = save_data(tmp_path / "d.npz", x=x)
    for src, expected in ((operator, {"n_n"}), (decomposed, {"n_sq", "n_var", "n_std"})):
        made = cast(src, CastConfig(data=data), tmp_path / f"{src.path.stem}16.onnx")
        assert kept(made) == expected
        wanted = run(src, x=x)["y"]
        assert np.linalg.norm(run(made, x=x)["y"] - wanted) < 3e-3 * np.linalg.norm(wanted)


def test_positions_are_not_rounded(tmp_path: Path) -> None:
    """Fails if angles of thousands of radians are cast to fp16. The cast causes no overflow, but the rounding error
    makes the sines random. Also fails if nodes after the sine stay float32."""
    src = artifact(
        tmp_path / "m.onnx",
        [
            node("Cast", "position", "p", to=FLOAT),
            node("Mul", "p frequency", "angle"),
            node("Sin", "angle", "s"),
            node("MatMul", "s w", "y"),
        ],
        {"position": (INT64, ["batch", 1])},
        {"y": (FLOAT, ["batch", 8])},
        {"frequency": np.linspace(0.5, 1.7, 8, dtype=np.float32), "w": np.eye(8, dtype=np.float32)},
    )
    positions = np.array([[1999], [1234], [17]])
    data = save_data(tmp_path / "d.npz", position=positions)
    made = cast(src, CastConfig(data=data), tmp_path / "o.onnx")
    assert {"n_angle", "n_s"} <= kept(made)
    assert "n_y" not in kept(made)
    wanted = run(src, position=positions)["y"]
    assert np.abs(run(made, position=positions)["y"] - wanted).max() < 2e-3


def test_sizes_are_not_rounded(tmp_path: Path) -> None:
    """Fails if the tensor size 2049 is cast to fp16. The cast would round 2049 to 2048 and break the Expand node."""
    src = artifact(
        tmp_path / "m.onnx",
        [
            node("Shape", "x", "s"),
            node("Cast", "s", "f", to=FLOAT),
            node("Mul", "f one", "g"),
            node("Cast", "g", "i", to=INT64),
            node("Expand", "row i", "e"),
            node("Mul", "e x", "y"),
        ],
        {"x": (FLOAT, ["n"])},
        {"y": (FLOAT, ["n"])},
        {"one": np.float32(1), "row": np.ones(1, np.float32)},
        dims={"n": DimRange(2, 16, 2049)},
    )
    made = cast(src, CastConfig(), tmp_path / "o.onnx")
    assert {"n_f", "n_g"} <= kept(made)
    assert "n_y" not in kept(made)
    assert run(made, x=np.ones(2049, np.float32))["y"].shape == (2049,)


def test_the_search_holds_a_few_tensors_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the overflow search holds all tensors of the model in memory at once."""
    count, width = 24, 1 << 12
    nodes = [node("Sqrt" if i % 2 else "Abs", f"t{i}", f"t{i + 1}") for i in range(count)]
    src = artifact(
        tmp_path / "m.onnx",
        nodes,
        {"t0": (FLOAT, ["batch", width])},
        {f"t{count}": (FLOAT, ["batch", width])},
        dims={"batch": DimRange(2, 2, 2)},
    )
    one = 2 * width * 4
    given: list[int] = []
    plain = RoundedModel.run

    def run(self: RoundedModel, *words: Any) -> dict[str, np.ndarray]:
        found = plain(self, *words)
        given.append(sum(value.nbytes for value in found.values()))
        return found

    monkeypatch.setattr(RoundedModel, "run", run)
    monkeypatch.setattr(cast_search, "_CHUNK_BYTES", 3 * one)
    cast(src, CastConfig(), tmp_path / "c.onnx")
    assert max(given) == 3 * one
    assert sum(given) >= 2 * count * one  # the search computed every tensor twice: in float32 and in 16 bits


@pytest.mark.parametrize("place", [12, 60])
def test_an_overflow_that_only_a_later_sample_has(tmp_path: Path, place: int) -> None:
    """Fails if ``OutputGate`` misses an overflow in the first 16 samples, or if ``Judge`` misses an overflow in the
    first 128 samples. The overflow search doesn't read the sample that overflows."""
    src = square_root_of_square(tmp_path / "m.onnx")
    x = np.ones(64, np.float32)
    x[place] = 300
    data = save_data(tmp_path / "d.npz", x=x)
    made = cast(src, CastConfig(data=data), tmp_path / "c.onnx")
    assert kept(made) == set()
    stopped = not all(result.passed for result in OutputGate(limit=2e-2, data=data).check(src, made))
    assert stopped == (place < 16)
    judgement = Judge(src, data, None).judge(made, {})
    assert judgement.drop == np.inf
    assert judgement.problem
