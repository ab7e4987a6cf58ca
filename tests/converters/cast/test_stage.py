"""Proves that a cast to float16 or bfloat16 gives a valid graph with the requested dtypes, and that its outputs have
only rounding errors."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from accel.artifact import Artifact
from accel.converters.cast.stage import CastConfig, CastFailed, cast
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig, engine_from_onnx
from accel.errors import UnknownName, UnsupportedHere
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


def test_branches_read_their_outer_tensors_in_float32(tmp_path: Path) -> None:
    """Fails if a subgraph reads a tensor or a constant of the outer graph in the wrong dtype."""
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
    """Fails if keep_io=True changes the dtype of a float input or output, or if keep_io=False keeps float32. Also fails
    if an integer dtype changes."""
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
    """Fails if each reader of an input gets its own Cast. Also fails if each float32 node in a chain gets its own
    Cast."""
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
    assert kept(made) == {"n_c", "n_y", "n_d"}  # "n_d" only moves values between "n_c" and "n_y"
    assert made.notes["casts_inserted"] == 3


def test_operators_without_a_form_stay_and_say_from_which_opset(tmp_path: Path) -> None:
    """Checks that each node gets a dtype that its operator allows at this opset, and that the error names an opset to
    use."""
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
    """Fails if the body of a local function stays float32, or if the file contains both the function and its inlined
    body."""
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
    """Fails if accel silently ignores an unknown precision, or a pattern that matches no node."""
    src = square_root_of_square(tmp_path / "m.onnx")
    with pytest.raises(UnknownName, match="no node and no operator is called 'Conv_\\*'"):
        cast(src, CastConfig(keep_fp32=("Conv_*",)), tmp_path / "o.onnx")
    with pytest.raises(UnknownName, match="fp16 or bf16"):
        cast(src, CastConfig(precision="fp8"), tmp_path / "o.onnx")
    assert not (tmp_path / "o.onnx").exists()


def test_an_output_beyond_the_format_is_refused(tmp_path: Path) -> None:
    """Fails if accel accepts 16-bit outputs for a model whose float32 outputs overflow in 16 bits."""
    src = artifact(
        tmp_path / "m.onnx",
        [node("Relu", "x", "h"), node("Mul", "h h", "y")],
        {"x": (FLOAT, ["batch"])},
        {"y": (FLOAT, ["batch"])},
    )
    data = save_data(tmp_path / "d.npz", x=np.array([300.0], np.float32))
    with pytest.raises(CastFailed, match="keep the model's inputs and outputs in float32"):
        cast(src, CastConfig(data=data, keep_io=False), tmp_path / "o.onnx")


@st.composite
def small_nets(draw: st.DrawFn) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray], int]:
    """Draws a chain of layers of width 8 with skip connections and random weights from a normal distribution."""
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
    """Fails if a cast graph is invalid, or if its outputs have a larger error than rounding to 16 bits can cause."""
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


@pytest.mark.proof(seconds=45)
def test_real_model_in_both_formats(minilm: Artifact, minilm_data: Path, tmp_path: Path) -> None:
    """Fails if TensorRT-RTX refuses MiniLM's cast graph, or if the outputs have a larger error than rounding to 16 bits
    can cause."""
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
