"""Proves that casts to float16 and bfloat16 stay accurate and keep the nodes that need float32 in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.converters.cast import overflow_search as cast_search
from accel.converters.cast.stage import CastConfig, CastFailed, cast
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig, engine_from_onnx
from accel.errors import UnknownName, UnsupportedHere
from accel.optimizer.judge.comparison import Judge
from accel.proof.gates import OutputGate
from accel.runtimes.onnx_rounded import RoundedModel
from accel.signature import DimRange
from accel.sources.onnx.file import open_onnx
from tests.support.onnx_builder import (
    FLOAT,
    HALF,
    INT64,
    artifact,
    kept,
    node,
    proto,
    run,
    save_data,
    square_root_of_square,
)

# Nodes that stay float32


def test_overflow_in_the_data_stays_float32(tmp_path: Path) -> None:
    """Fails if the overflow search ignores the data file, casts an overflowing node, or keeps Relu in float32."""
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
    """Builds softmax(scores + (1 - mask) * low), the formula of the transformers library."""
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
    """Fails if a mask constant becomes small, zero or (times 0) NaN, or if the mask keeps the softmax in float32."""
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
    """Fails if a finite mask value becomes -inf, which makes the output of a fully masked row NaN."""
    made = cast(attention_mask(tmp_path / "m.onnx", -1e9), CastConfig(), tmp_path / "o.onnx")
    p = run(made, scores=np.zeros((1, 8), np.float32), mask=np.zeros((1, 8), np.int64))["p"]
    assert np.allclose(p, 1 / 8, atol=1e-3)


def test_where_with_infinity_and_constant_of_shape(tmp_path: Path) -> None:
    """Fails if -inf is clamped, or if a ConstantOfShape, Constant or Cast node still outputs float32."""
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
    assert made.notes["casts_inserted"] == 3  # one cast is for x, one for y and one for b
    assert kept(made) == set()


@pytest.mark.parametrize("eps", [1e-8, 1e-12])
def test_epsilons_stay_effective(tmp_path: Path, eps: float) -> None:
    """Fails if eps is rounded to 0 or to another number, or if a node from the sum to the division is cast."""
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
    """Fails if a whole or decomposed LayerNormalization squares 1000 in fp16, or if the layers around it aren't
    cast."""
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
    """Fails if angles of thousands of radians are rounded to 11 bits, which makes their sine noise without an overflow.
    Also fails if nodes after the sine stay float32."""
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
    """Fails if the size 2049 is cast to fp16, which rounds 2049 to 2048 and breaks the Expand node."""
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


# Structure of the graph


def test_branches_read_their_outer_tensors_in_float32(tmp_path: Path) -> None:
    """Fails if a subgraph reads an outer tensor or constant with the wrong dtype, or if a shadowing name is renamed."""
    then = helper.make_graph(
        [node("Mul", "h k", "t0"), node("Add", "t0 h", "t")],
        "then",
        [],
        [helper.make_tensor_value_info("t", FLOAT, None)],
    )
    other = helper.make_graph([node("Neg", "h", "e")], "else", [], [helper.make_tensor_value_info("e", FLOAT, None)])
    src = artifact(
        tmp_path / "m.onnx",
        [
            node("MatMul", "x w", "h"),
            node("Mul", "h k", "hk"),
            node("If", "c", "b", then_branch=then, else_branch=other),
            node("Add", "b hk", "y"),
        ],
        {"x": (FLOAT, ["batch", 4]), "c": (TensorProto.BOOL, [])},
        {"y": (FLOAT, ["batch", 4])},
        {"w": np.eye(4, dtype=np.float32), "k": np.full(4, 2, np.float32)},
    )
    made = cast(src, CastConfig(), tmp_path / "o.onnx")
    graph = proto(made).graph
    assert made.notes["no_such_form"] == {"it has a subgraph, which stays float32": 1}
    assert {t.data_type for t in graph.initializer if t.name == "w"} == {HALF}
    assert {t.data_type for t in graph.initializer if t.name.startswith("k")} == {HALF, FLOAT}
    x = np.array([[1, 2, 3, 4]], np.float32)
    assert np.array_equal(run(made, x=x, c=np.array(True))["y"], 5 * x)
    assert np.array_equal(run(made, x=x, c=np.array(False))["y"], x)


def test_io_is_kept_or_cast(tmp_path: Path) -> None:
    """Fails if keep_io changes a float dtype, if keep_io=False leaves a float32, or if an integer dtype changes."""
    src = artifact(
        tmp_path / "m.onnx",
        [node("Gather", "table ids", "r"), node("Add", "r x", "y"), node("ArgMax", "y", "best", axis=-1)],
        {"ids": (INT64, ["batch"]), "x": (FLOAT, ["batch", 4])},
        {"y": (FLOAT, ["batch", 4]), "best": (INT64, ["batch", 1])},
        {"table": np.arange(40, dtype=np.float32).reshape(10, 4)},
    )
    keep = cast(src, CastConfig(), tmp_path / "k.onnx")
    free = cast(src, CastConfig(keep_io=False), tmp_path / "f.onnx")
    for made, wanted in ((keep, "float32"), (free, "float16")):
        dtypes = {s.name: s.dtype for s in (*made.signature.inputs, *made.signature.outputs)}
        assert dtypes == {"ids": "int64", "x": wanted, "y": wanted, "best": "int64"}
    assert free.notes["casts_inserted"] == 0
    assert [(s.name, s.shape) for s in free.signature.inputs] == [(s.name, s.shape) for s in src.signature.inputs]
    assert (keep.properties["opset"], keep.properties["ir"]) == (20, 10)


def test_one_cast_serves_all_readers(tmp_path: Path) -> None:
    """Fails if each reader of an input, or each float32 node in a chain, gets its own Cast."""
    src = artifact(
        tmp_path / "m.onnx",
        [
            node("Relu", "x", "a"),
            node("Neg", "x", "b"),
            node("Add", "a b", "c"),
            node("Transpose", "c", "d", perm=[1, 0]),
            node("Exp", "d", "y"),
        ],
        {"x": (FLOAT, ["batch", 4])},
        {"y": (FLOAT, [4, "batch"])},
    )
    assert cast(src, CastConfig(), tmp_path / "o.onnx").notes["casts_inserted"] == 2
    made = cast(src, CastConfig(keep_fp32=("n_c", "Exp")), tmp_path / "k.onnx")
    assert kept(made) == {"n_c", "n_y", "n_d"}  # the transpose between "n_c" and "n_y" only moves values
    assert made.notes["casts_inserted"] == 3


def test_operators_without_a_form_stay_and_say_from_which_opset(tmp_path: Path) -> None:
    """Fails if a node gets a dtype that its schema at this opset forbids, or if the error names no opset to use."""
    inputs, outputs = {"x": (FLOAT, ["batch", 4, 8, 8])}, {"y": (FLOAT, ["batch", 4, 6, 6])}
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((4, 4, 3, 3)).astype(np.float32)}
    nodes = [node("Conv", "x w", "c"), node("Relu", "c", "y")]
    src = artifact(tmp_path / "m.onnx", nodes, inputs, outputs, weights)
    with pytest.raises(UnsupportedHere, match=r"Conv takes bfloat16 from opset 22.*opset=22"):
        cast(src, CastConfig(precision="bf16"), tmp_path / "o.onnx")
    newer = artifact(tmp_path / "n.onnx", nodes, inputs, outputs, weights, opset=22)
    assert {
        t.data_type for t in proto(cast(newer, CastConfig(precision="bf16"), tmp_path / "p.onnx")).graph.initializer
    } == {TensorProto.BFLOAT16}
    up = artifact(
        tmp_path / "r.onnx",
        [node("Resize", "x - scales", "y", mode="nearest")],
        {"x": (FLOAT, [1, 1, 4, 4])},
        {"y": (FLOAT, [1, 1, 8, 8])},
        {"scales": np.array([1, 1, 2, 2], np.float32)},
    )
    made = cast(up, CastConfig(), tmp_path / "u.onnx")
    assert [t.data_type for t in proto(made).graph.initializer] == [FLOAT]  # the schema requires float32 scales


def test_local_functions_are_cast(tmp_path: Path) -> None:
    """Fails if the body of a local function stays float32, or if the file contains the body twice."""
    body = helper.make_function(
        "local", "Double", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 20)]
    )
    graph = helper.make_graph(
        [helper.make_node("Double", ["x"], ["h"], domain="local"), node("Relu", "h", "y")],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, ["batch"])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch"])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=[body], ir_version=10), str(tmp_path / "m.onnx"))
    made = cast(open_onnx(tmp_path / "m.onnx", probe=False), CastConfig(), tmp_path / "o.onnx")
    assert made.notes["nodes_cast"] == 2
    assert not proto(made).functions
    assert np.array_equal(run(made, x=np.array([1.5], np.float32))["y"], [3.0])


def test_what_was_asked_for_wrongly_is_named(tmp_path: Path) -> None:
    """Fails if a pattern that matches no node, or an unknown precision, is silently ignored."""
    src = square_root_of_square(tmp_path / "m.onnx")
    with pytest.raises(UnknownName, match="no node and no operator is called 'Conv_\\*'"):
        cast(src, CastConfig(keep_fp32=("Conv_*",)), tmp_path / "o.onnx")
    with pytest.raises(UnknownName, match="fp16 or bf16"):
        cast(src, CastConfig(precision="fp8"), tmp_path / "o.onnx")
    assert not (tmp_path / "o.onnx").exists()


def test_an_output_beyond_the_format_is_refused(tmp_path: Path) -> None:
    """Fails if a 16-bit output is written as infinity although the value fits in float32."""
    src = artifact(
        tmp_path / "m.onnx",
        [node("Relu", "x", "h"), node("Mul", "h h", "y")],
        {"x": (FLOAT, ["batch"])},
        {"y": (FLOAT, ["batch"])},
    )
    data = save_data(tmp_path / "d.npz", x=np.array([300.0], np.float32))
    with pytest.raises(CastFailed, match="keep float32 inputs and outputs"):
        cast(src, CastConfig(data=data, keep_io=False), tmp_path / "o.onnx")


@st.composite
def small_nets(draw: st.DrawFn) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray], int]:
    """Draws a chain of layers of width 8 with skip connections and normally scaled random weights."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, np.ndarray] = {}
    tensors = ["x"]
    for index in range(draw(st.integers(1, 6))):
        op = draw(st.sampled_from(["linear", "gemm", "relu", "tanh", "add", "norm", "softmax", "reshape"]))
        name, last = f"t{index}", tensors[-1]
        if op in ("linear", "gemm"):
            constants[f"w{index}"] = (rng.standard_normal((8, 8)) / 3).astype(np.float32)
            constants[f"b{index}"] = rng.standard_normal(8).astype(np.float32)
            if op == "gemm":
                nodes.append(node("Gemm", f"{last} w{index} b{index}", name, transB=1))
            else:
                nodes += [node("MatMul", f"{last} w{index}", f"{name}m"), node("Add", f"{name}m b{index}", name)]
        elif op == "add":
            nodes.append(node("Add", f"{last} {draw(st.sampled_from(tensors))}", name))
        elif op == "norm":
            constants[f"w{index}"] = np.ones(8, np.float32)
            nodes.append(node("LayerNormalization", f"{last} w{index}", name, epsilon=1e-3))
        elif op == "reshape":
            constants[f"s{index}"] = np.array([-1, 8])
            nodes.append(node("Reshape", f"{last} s{index}", name))
        else:
            nodes.append(node({"relu": "Relu", "tanh": "Tanh", "softmax": "Softmax"}[op], last, name))
        tensors.append(name)
    nodes.append(node("Identity", tensors[-1], "y"))
    return nodes, constants, draw(st.sampled_from([17, 20]))


@settings(max_examples=25, deadline=None)
@given(net=small_nets(), precision=st.sampled_from(["fp16", "bf16"]), keep_io=st.booleans())
def test_any_small_net_casts_within_the_rounding(
    tmp_path_factory: pytest.TempPathFactory,
    net: tuple[list[onnx.NodeProto], dict[str, np.ndarray], int],
    precision: str,
    keep_io: bool,
) -> None:
    """Fails if a cast graph is invalid, changes the signature, or has a larger error than 16-bit rounding explains."""
    nodes, constants, opset = net
    folder = tmp_path_factory.mktemp("net")
    spec = (FLOAT, ["batch", 8])
    src = artifact(folder / "m.onnx", nodes, {"x": spec}, {"y": spec}, constants, opset=opset)
    made = cast(src, CastConfig(precision=precision, keep_io=keep_io), folder / "o.onnx")
    proto(made)
    x = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    dtype = np.dtype(np.float32 if keep_io else {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[precision])
    wanted = run(src, x=x)["y"].astype(np.float64)
    found = run(made, x=x.astype(dtype))["y"].astype(np.float64)
    unit = {"fp16": 2**-11, "bf16": 2**-8}[precision]
    scale = np.abs(wanted).max() + 1
    assert np.abs(found - wanted).max() < 24 * len(nodes) * unit * scale


@pytest.mark.proof
def test_real_model_in_both_formats(minilm: Artifact, minilm_data: Path, tmp_path: Path) -> None:
    """Fails if a real net's error exceeds 16-bit rounding, or if TensorRT-RTX refuses the graph."""
    pytest.importorskip("tensorrt_rtx_bindings")
    feeds = minilm.signature.example_inputs(seed=3, batch=2, sequence=48)
    wanted = run(minilm, **feeds)["embedding"]
    for precision, limit in (("fp16", 5e-3), ("bf16", 5e-2)):
        made = cast(minilm, CastConfig(precision=precision, data=minilm_data), tmp_path / f"{precision}.onnx")
        found = run(made, **feeds)["embedding"]
        assert np.linalg.norm(found - wanted) < limit * np.linalg.norm(wanted)
        assert FLOAT not in {t.data_type for t in proto(made).graph.initializer if len(t.dims) == 2}
        assert made.path.stat().st_size < 0.51 * minilm.path.stat().st_size
        config = EngineFromOnnxConfig(compute_capabilities=("8.6",))
        engine = engine_from_onnx(made, config, tmp_path / f"{precision}.engine")
        assert engine.path.stat().st_size < 0.7 * minilm.path.stat().st_size


def test_the_search_holds_a_few_tensors_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the search for overflows holds every tensor of the model in memory at once."""
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
    assert sum(given) >= 2 * count * one  # the search read every tensor in both precisions


@pytest.mark.parametrize("place", [12, 60])
def test_an_overflow_that_only_a_later_sample_has(tmp_path: Path, place: int) -> None:
    """Fails if the gate passes a sample that overflows among its first 16, or the judge among its first 128, although
    the overflow search skipped the sample."""
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
