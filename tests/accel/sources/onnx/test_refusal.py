"""Proves that accel says in plain words why ONNX Runtime refuses a model, and keeps ONNX Runtime's own text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from accel.errors import AccelError, library_text
from accel.optimizer.candidate import CandidateResult
from accel.runtimes.base import SessionOptions
from accel.runtimes.onnxruntime import OnnxRuntimeSession
from tests.accel.runtimes.test_onnxruntime import save, unread

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
# Parts of ONNX Runtime's own texts: error codes, C++ files and conditions, and its own wording.
RAW = ("[ONNXRuntimeError]", ".h:", ".cc:", "::", "was false", "Optype", "Status Message", "Load model from", "tensor(")


@pytest.mark.parametrize(
    ("node", "inputs", "said"),
    [
        (
            ("Add", ["x", "w"]),
            {"x": (FLOAT, [1]), "w": (HALF, [1])},
            "node 'n' (Add) has inputs of the types",
        ),
        (("Relu", ["x"]), {"x": (TensorProto.STRING, [1])}, "node 'n' (Relu) takes no string as its input 'x'"),
        (("Foo", ["x"]), {"x": (FLOAT, [1])}, "the operator Foo doesn't exist at opset 20"),
        (("Relu", ["q"]), {"x": (FLOAT, [1])}, "nothing makes 'q'"),
        (("MatMul", ["x", "w"]), {"x": (FLOAT, [1, 3]), "w": (FLOAT, [4, 1])}, "node 'n' (MatMul): Incompatible"),
        (("Reshape", ["x", "s"]), {"x": (FLOAT, ["a"]), "s": (INT64, [2])}, "Reshape 'n': The input tensor cannot be"),
        (("Abs", ["x"]), {"x": (TensorProto.BFLOAT16, [1])}, "no kernel for Abs as in node 'n'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_refusal_in_plain_words(tmp_path: Path, node: tuple[str, list[str]], inputs: dict, said: str) -> None:
    """Fails if an error, and with it the reason of a rejected candidate, shows ONNX Runtime's codes, C++ files or
    paths, or if ONNX Runtime's text is lost."""
    op, names = node
    made = helper.make_node(op, names, ["y"], name="n")
    outputs = {"y": (next(iter(inputs.values()))[0], ["n"] if op != "MatMul" else [1, 1])}
    path = tmp_path / "m.onnx"
    try:
        artifact = save(path, [made], inputs, outputs)
    except AccelError:
        artifact = unread(path)
    feeds = {"x": np.ones(3, np.float32), "s": np.array([2, 2])}
    with pytest.raises(AccelError) as failed, OnnxRuntimeSession(artifact, SessionOptions()) as session:
        session.run(feeds)
    row = CandidateResult(name="ort-cpu fp32")
    row.reject(str(failed.value), failed.value)
    assert said in row.reason
    assert not [raw for raw in RAW if raw in row.reason.replace(str(path), "")]
    assert "[ONNXRuntimeError]" in row.to_json()["detail"]
    assert row.to_json()["detail"] == library_text(failed.value)


def test_the_checker_leaves_operators_of_other_domains_to_the_runtime(tmp_path: Path) -> None:
    """Fails if the two checks of a file differ on an operator that has no schema."""
    from accel.converters.graph.write import check_file
    from accel.sources.onnx.file import check

    graph = helper.make_graph(
        [helper.make_node("Foo", ["x"], ["y"], name="n", domain="own")],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [1])],
        [helper.make_tensor_value_info("y", FLOAT, [1])],
    )
    ids = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    onnx.save(helper.make_model(graph, opset_imports=ids, ir_version=10), tmp_path / "m.onnx")
    assert check_file(tmp_path / "m.onnx") is None
    assert check(tmp_path / "m.onnx") == "the operator own:Foo is unknown"
