"""Proves that real engines on a real GPU give ONNX Runtime's outputs (pytest -m gpu)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig
from accel.errors import AccelError, BadFeeds
from accel.runtimes.base import RUNTIMES, open_session
from accel.signature import DimRange
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not any(RUNTIMES[name].runnable() for name in ("tensorrt-rtx", "tensorrt")),
        reason="needs an NVIDIA GPU and the extra [tensorrt-rtx] or [tensorrt]",
    ),
]

Build = Callable[..., Artifact]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Returns ``build(onnx_path, dims)``, which builds an engine for this machine's GPU."""

    def made(path: Path, **dims: DimRange) -> Artifact:
        toolkit = "tensorrt-rtx" if RUNTIMES["tensorrt-rtx"].installed else "tensorrt"
        src = open_onnx(path, dims=dims)
        return run_stage(
            "engine_from_onnx", src, EngineFromOnnxConfig(toolkit=toolkit), out=tmp_path / f"{path.stem}.engine"
        )

    return made


def test_engine_agrees_with_onnxruntime(build: Build, tmp_path: Path) -> None:
    """Fails if the engine's outputs differ from ONNX Runtime's at any size inside the profile."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("ReduceMean", ["r", "axes"], ["m"], keepdims=0),
        helper.make_node("MatMul", ["m", "head"], ["logits"]),
    ]
    constants = {
        "w": rng.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "axes": np.array([2, 3]),
        "head": rng.standard_normal((8, 5)).astype(np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, "height", "width"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 5])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    path = tmp_path / "net.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    made = build(path, batch=DimRange(1, 2, 4))
    with open_session(made) as session, open_session(open_onnx(path), "onnxruntime") as reference:
        for batch, height in ((1, 2), (4, 64), (2, 16)):
            given_feeds = session.example_inputs(batch=batch, height=height)
            found, wanted = session.run(given_feeds)["logits"], reference.run(given_feeds)["logits"]
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found, wanted, rtol=5e-3, atol=5e-3)  # TF32
        with pytest.raises(BadFeeds, match="off the engine's optimization profiles"):
            session.run(reference.example_inputs(batch=9))


def test_minilm_engine_agrees_with_onnxruntime(build: Build, minilm: Artifact) -> None:
    """Fails if the outputs of a real model with two dynamic dims and integer inputs are wrong."""
    made = build(minilm.path)
    with open_session(made) as session, open_session(minilm, "onnxruntime") as reference:
        for sizes in made.signature.cases():
            given_feeds = session.example_inputs(**sizes)
            found, wanted = session.run(given_feeds), reference.run(given_feeds)
            for name, value in wanted.items():
                assert np.linalg.norm(found[name] - value) / np.linalg.norm(value) < 5e-3


def test_an_engine_for_8_0_on_a_hopper_gpu(minilm: Artifact, tmp_path: Path) -> None:
    """TensorRT-RTX built the engine for compute capability 8.0. Checks that the engine gives outputs or an accel error
    on a Hopper GPU, and doesn't crash."""
    import torch

    if not RUNTIMES["tensorrt-rtx"].runnable() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs the extra [tensorrt-rtx] and a GPU of compute capability 9.0")
    config = EngineFromOnnxConfig(toolkit="tensorrt-rtx", compute_capabilities=("8.0",))
    made = run_stage("engine_from_onnx", minilm, config, out=tmp_path / "minilm.engine")
    try:
        session = open_session(made)
    except AccelError as error:
        pytest.xfail(f"TensorRT-RTX doesn't load it there: {error}")
    with session, open_session(minilm, "onnxruntime") as reference:
        given_feeds = session.example_inputs()
        found, wanted = session.run(given_feeds), reference.run(given_feeds)
        for name, value in wanted.items():
            assert np.linalg.norm(found[name] - value) / np.linalg.norm(value) < 5e-3


def test_phases_and_a_cuda_graph(build: Build, minilm: Artifact) -> None:
    """Fails if a replayed CUDA graph gives other outputs than a plain run. Also fails if CUDA events give no time for a
    phase of the run."""
    made = build(minilm.path)
    with open_session(made) as plain, open_session(made, options={"cuda_graph": True}) as graph:
        for sizes in made.signature.cases():
            given_feeds = plain.example_inputs(**sizes)
            wanted = plain.run(given_feeds)
            for _ in range(3):  # plain, captured, replayed
                for name, value in graph.run(given_feeds).items():
                    np.testing.assert_array_equal(value, wanted[name])
        found = plain.phases(given_feeds)
        assert set(found) == {"host_to_device", "compute", "device_to_host"}
        assert all(ms > 0 for ms in found.values())


def test_bench_tells_the_phases_apart(build: Build, minilm: Artifact) -> None:
    """Fails if the report lacks the phases of a run on the GPU, or if the phases exceed the whole run."""
    made = build(minilm.path)
    for cuda_graph in (False, True):
        row = accel.bench([made], rounds=5, block_seconds=0.05, budget_seconds=0, cuda_graph=cuda_graph).rows[0]
        assert row.phases_ms is not None
        assert sum(row.phases_ms.values()) < 1.5 * row.median_ms
