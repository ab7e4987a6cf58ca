"""Proves that ONNX Runtime's operators PackedProduct are the CPU kernels, in the threads of a session."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.kernels.native import bridges
from accel.kernels.native.cpu import layout, reference
from accel.kernels.native.cpu.layout import Packed
from accel.kernels.onnx import packed as operators
from accel.runtimes.base import SessionOptions
from accel.runtimes.onnxruntime import OnnxRuntimeSession
from accel.sources.onnx.file import describe_model

K = 150
SIZES = {
    operators.OF_PARTS[1]: (37,), operators.OF_PARTS[2]: (16, 5), operators.OF_PARTS[3]: (300, 33, 1),
    operators.GATED: (70, 70), operators.RESIDUAL: (40,),
}  # fmt: skip


def made(bits: int) -> tuple[onnx.ModelProto, dict[str, Packed]]:
    """Returns a model with one node of each operator, and their weights."""
    draw = np.random.default_rng(bits)
    nodes, constants, outputs, weights = [], [], [], {}
    for name, sizes in SIZES.items():
        matrix = draw.standard_normal((sum(sizes), K)).astype(np.float32)
        whole = layout.pack(*layout.quantize(matrix, bits=bits, block=64), k=K, bits=bits, sizes=sizes)
        weights[name] = whole
        for part, array in (("w", whole.weights), ("s", whole.scales)):
            constants.append(numpy_helper.from_array(array, f"{name}_{part}"))
        inputs = ["x", f"{name}_w", f"{name}_s", *(["residual"] if name == operators.RESIDUAL else [])]
        own = [f"{name}_{at}" for at in range(1 if name == operators.GATED else len(sizes))]
        nodes.append(operators.packed_node(name, inputs, own, whole))
        outputs += [
            helper.make_tensor_value_info(out, TensorProto.FLOAT, ["batch", "n", size])
            for out, size in zip(own, sizes, strict=False)
        ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "n", K]),
        helper.make_tensor_value_info("residual", TensorProto.FLOAT, ["batch", "n", SIZES[operators.RESIDUAL][0]]),
    ]
    opsets = [
        helper.make_opsetid(domain, version) for domain, version in (("", 20), ("com.microsoft", 1), ("accel", 1))
    ]
    functions = [operators.packed_function(name, 20) for name in SIZES]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10), weights


def opened(model: onnx.ModelProto, folder: Path, threads: int = 2) -> OnnxRuntimeSession:
    onnx.save(model, folder / "m.onnx")
    signature, properties = describe_model(model)
    artifact = Artifact(path=folder / "m.onnx", kind="onnx", signature=signature, properties=properties)
    return OnnxRuntimeSession(artifact, SessionOptions(threads=threads))


def feeds(batch: int, n: int) -> dict[str, Any]:
    draw = np.random.default_rng(batch)
    sizes = {"x": K, "residual": SIZES[operators.RESIDUAL][0]}
    return {name: draw.standard_normal((batch, n, size)).astype(np.float32) for name, size in sizes.items()}


def right(found: dict[str, Any], given: dict[str, Any], weights: dict[str, Packed]) -> float:
    """Checks the bound of every output, and returns the largest error over its bound."""
    worst = 0.0
    rows = {name: value.reshape(-1, value.shape[-1]) for name, value in given.items()}
    for name, whole in weights.items():
        residual = rows["residual"] if name == operators.RESIDUAL else None
        wanted, bounds = reference.product(rows["x"], whole, gated=name == operators.GATED, residual=residual)
        for at, (want, bound) in enumerate(zip(wanted, bounds, strict=True)):
            got = found[f"{name}_{at}"]
            assert got.shape == (*given["x"].shape[:2], want.shape[1])
            if want.size:
                worst = max(worst, float(np.max(np.abs(got.reshape(want.shape) - want) / bound)))
    return worst


@pytest.mark.proof
@pytest.mark.parametrize("bits", [4, 8])
def test_a_session_finds_the_library(
    onnxruntime_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """Fails if an operator mixes up parts, ranks or the residual, or a session of a packed model runs without the
    library that was built: the body's errors are far outside the bound."""
    model, weights = made(bits)
    monkeypatch.delenv("ACCEL_ONNXRUNTIME_LIBRARY", raising=False)
    for library, within in ((onnxruntime_library, True), (None, False)):
        monkeypatch.setattr(bridges, "find_onnxruntime_library", lambda library=library: library)
        with opened(model, tmp_path) as session:
            for batch, n in ((1, 1), (2, 3), (1, 17), (0, 1)):
                given = feeds(batch, n)
                worst = right(session.run(given), given, weights)
                assert (worst <= 1) is (within or batch == 0)


@pytest.mark.proof
def test_several_callers_of_one_session(
    onnxruntime_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if concurrent runs share the quantized rows."""
    monkeypatch.setenv("ACCEL_ONNXRUNTIME_LIBRARY", str(onnxruntime_library))
    model, weights = made(4)
    worst: list[float] = []

    def call(at: int) -> None:
        given = feeds(1 + at, 2)
        worst.extend(right(session.run(given), given, weights) for _ in range(30))

    with opened(model, tmp_path) as session:
        callers = [threading.Thread(target=call, args=(at,)) for at in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert len(worst) == 120
    assert max(worst) <= 1


@pytest.mark.proof
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"N": 64}, "N isn't the number of outputs"),
        ({"begin_0": [16]}, "don't follow one another"),
        ({"block_size": 32}, "don't have the packed form"),
    ],
)
def test_a_wrong_file_is_refused(
    onnxruntime_library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
) -> None:
    """Fails if a damaged or hostile file makes the kernels read outside the weights."""
    monkeypatch.setenv("ACCEL_ONNXRUNTIME_LIBRARY", str(onnxruntime_library))
    model, _ = made(4)
    node = model.graph.node[0]
    for name, value in change.items():
        next(a for a in node.attribute if a.name == name).CopyFrom(helper.make_attribute(name, value))
    with pytest.raises(Exception, match=message), opened(model, tmp_path) as session:
        session.run(feeds(1, 1))
