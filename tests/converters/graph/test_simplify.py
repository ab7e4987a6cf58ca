"""Proves that onnxsim's simplification keeps the model's signature and outputs, and that a failed simplification leaves
the model unchanged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel.converters.graph.simplify as module
import accel.converters.graph.write as onnx_write
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.graph.simplify import SimplifyConfig, SimplifyFailed, simplify
from accel.converters.graph.unfoldable import unfoldable
from accel.proof.gates import OutputGate
from accel.runtimes.base import open_session
from accel.sources.onnx.file import open_onnx, read_proto
from accel.stage import run_stage

FLOAT = TensorProto.FLOAT


def conv_net(path: Path, *, ir: int = 8, opset: int = 15) -> Artifact:
    """Makes a net of Conv, BatchNorm, Relu and Reshape. Part of the Reshape's shape is computed from constants. The net
    has an unusual opset, an unusual IR version and a dynamic batch."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"], name="norm"),
        helper.make_node("Relu", ["n"], ["r"], name="relu"),
        helper.make_node("Add", ["minus", "zero"], ["last"], name="constant"),
        helper.make_node("Concat", ["batch", "last"], ["shape"], name="shape", axis=0),
        helper.make_node("Shape", ["r"], ["all"], name="sizes"),
        helper.make_node("Slice", ["all", "zero", "one"], ["batch"], name="slice"),
        helper.make_node("Reshape", ["r", "shape"], ["y"], name="flat"),
    ]
    nodes[4], nodes[5], nodes[6] = nodes[5], nodes[6], nodes[4]
    constants: dict[str, Any] = {
        "w": rng.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "scale": np.full(4, 1.5, np.float32),
        "bias": np.ones(4, np.float32),
        "mean": np.full(4, 0.2, np.float32),
        "var": np.full(4, 0.7, np.float32),
        "minus": np.array([-1]),
        "zero": np.array([0]),
        "one": np.array([1]),
    }
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("image", FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 256])],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    onnx.save(model, str(path))
    return open_onnx(path, probe=False)


def outputs(made: Artifact, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with open_session(made, "onnxruntime") as session:
        return session.run(feeds)


def test_smaller_and_the_same(tmp_path: Path) -> None:
    """Fails if onnxsim simplifies nothing. Also fails if the opset, the IR version, a name, a dtype or the dynamic
    batch changes."""
    src = conv_net(tmp_path / "m.onnx")
    made = run_stage(
        "simplify", src, SimplifyConfig(), gates=[OutputGate(limit=1e-5)], cache=StageCache(tmp_path / "c")
    )
    assert made.manifest is not None
    notes = made.manifest.stages[-1]["notes"]
    assert notes["nodes_before"] == 8
    assert notes["nodes_after"] <= 6
    assert "kept" not in notes
    assert (made.properties["opset"], made.properties["ir"]) == (15, 8)
    assert made.signature == src.signature
    assert "BatchNormalization" not in {node.op_type for node in read_proto(made.path).graph.node}
    assert not read_proto(made.path).metadata_props


def test_linear_layers_stay_products(minilm: Artifact) -> None:
    """Fails if onnxsim rewrites a Linear layer as Reshape, Gemm and Reshape. The rewrite adds nodes and hides the
    layer from every runtime."""
    ops = [node.op_type for node in read_proto(minilm.path).graph.node]
    assert ops.count("MatMul") == 6 * 8
    assert "Gemm" not in ops


def test_only_weights_that_cannot_be_folded_stay_apart(tmp_path: Path) -> None:
    """Fails if onnxsim doesn't get a weight that can be folded: a transposed weight, rows that are looked up by
    constants, or two equal weights. Also fails if onnxsim gets a weight that only a product of an activation reads."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((256, 256)).astype(np.float32) for name in ("plain", "turned", "table", "one")}
    weights |= {"other": weights["one"].copy(), "rows": np.arange(256)}
    nodes = [
        helper.make_node("MatMul", ["x", "plain"], ["a"]),
        helper.make_node("Transpose", ["turned"], ["t"]),
        helper.make_node("MatMul", ["a", "t"], ["b"]),
        helper.make_node("Gather", ["table", "rows"], ["g"]),
        helper.make_node("MatMul", ["b", "g"], ["c"]),
        helper.make_node("MatMul", ["c", "one"], ["d"]),
        helper.make_node("MatMul", ["d", "other"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 256])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 256])],
        [numpy_helper.from_array(v, n) for n, v in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert unfoldable(model) == {"plain"}
    onnx.save(model, str(tmp_path / "m.onnx"))
    made = simplify(open_onnx(tmp_path / "m.onnx", probe=False), SimplifyConfig(), tmp_path / "s.onnx")
    after = read_proto(made.path, weights=True).graph
    assert [node.op_type for node in after.node] == ["MatMul"] * 5
    assert len(after.initializer) == 4  # the equal weights are one


def crash(path: Path, out: Path, skip: list[str]) -> None:
    os.abort()


@pytest.mark.parametrize("fault", ["crash", "refusal", "drift", "invalid", "slow"])
def test_any_failure_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Checks that a native crash doesn't kill the calling process, and that a hung process is killed. Also fails if
    accel accepts a simplified model that is invalid or has a changed dim."""
    src = conv_net(tmp_path / "m.onnx")
    before = outputs(src, src.signature.example_inputs(batch=2))

    def child(target: str, timeout: float, path: Path, out: Path, **options: Any) -> None:
        from accel.child import run_in_child
        from accel.errors import ChildCrashed

        model = onnx.load(str(path))
        if fault == "crash":
            run_in_child("os:abort", timeout=60)
        elif fault == "refusal":
            raise ChildCrashed("RuntimeError: can't")
        elif fault == "slow":
            raise TimeoutError("it took longer than 1 s")
        elif fault == "drift":
            model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
        else:
            model.graph.node[0].op_type = "Conv2"
        onnx.save(model, str(out))

    monkeypatch.setattr(module, "run_in_child", child)
    made = simplify(src, SimplifyConfig(), tmp_path / "o.onnx")
    words = {"crash": "SIGABRT", "refusal": "can't", "drift": "onnxsim changed y", "invalid": "Conv2", "slow": "longer"}
    assert words[fault] in made.notes["kept"]
    assert made.notes["nodes_after"] == made.notes["nodes_before"]
    after = outputs(made, src.signature.example_inputs(batch=2))
    assert np.array_equal(before["y"], after["y"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "o.onnx"]


def test_a_model_that_fails_the_checker_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an invalid model reaches the next stage."""
    src = conv_net(tmp_path / "m.onnx")
    model = onnx.load(str(src.path))
    model.graph.value_info.append(helper.make_tensor_value_info("c", TensorProto.INT64, None))
    onnx.save(model, str(src.path))
    monkeypatch.setattr(module, "run_in_child", lambda *_, **__: (_ for _ in ()).throw(TimeoutError("slow")))
    with pytest.raises(SimplifyFailed, match="doesn't pass the checker"):
        simplify(src, SimplifyConfig(), tmp_path / "o.onnx")


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an interrupt leaves the temporary folder or a half-written file behind."""

    def interrupted(*_: object, out: Path, **__: object) -> None:
        out.write_bytes(b"half")
        raise KeyboardInterrupt

    src = conv_net(tmp_path / "m.onnx")
    monkeypatch.setattr(module, "run_in_child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simplify(src, SimplifyConfig(), tmp_path / "o.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_large_models_keep_their_weights_in_a_file_named_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the weights of a model above the size limit are lost, or if different weights share a file name. Also
    checks that the artifact records the files of the weights."""
    src = conv_net(tmp_path / "m.onnx")
    reads = onnx.load(str(src.path))
    made: list[Artifact] = []
    for index, factor in enumerate((1, 1, 2)):
        model = onnx.ModelProto()
        model.CopyFrom(reads)
        big = np.full((4, 3, 3, 3), factor, np.float32).repeat(20, axis=0)
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(big[:4], "w"))
        model.graph.initializer.append(numpy_helper.from_array(np.full(999, factor, np.float32), "unused"))
        out = tmp_path / f"{index}" / "model.onnx"
        out.parent.mkdir()
        names = onnx_write.write_onnx(model, out, limit=100)
        assert sorted(p.name for p in out.parent.iterdir()) == sorted(["model.onnx", *names])
        made.append(open_onnx(out, probe=False))
        assert made[-1].companions == names
    assert made[0].companions == made[1].companions != made[2].companions
    feeds = src.signature.example_inputs(batch=2)
    assert np.array_equal(outputs(made[0], feeds)["y"], outputs(made[1], feeds)["y"])
    assert not np.array_equal(outputs(made[0], feeds)["y"], outputs(made[2], feeds)["y"])
    with_weights = simplify(made[2], SimplifyConfig(), tmp_path / "s.onnx")
    assert np.allclose(outputs(with_weights, feeds)["y"], outputs(made[2], feeds)["y"], rtol=1e-5)
