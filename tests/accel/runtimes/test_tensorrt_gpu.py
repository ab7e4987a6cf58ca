"""Proves that real engines on a real GPU give ONNX Runtime's outputs (pytest -m gpu)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig
from accel.errors import BadFeeds, UnsupportedHere
from accel.examples.gpt import GPT, GPTConfig
from accel.runtimes.base import RUNTIMES, open_session
from accel.signature import DimRange
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage
from tests.support.engine_models import NEEDS_TOOLKIT, toolkit_of_this_gpu

pytestmark = pytest.mark.gpu
TOOLKIT = toolkit_of_this_gpu()
needs_toolkit = pytest.mark.skipif(TOOLKIT is None, reason=NEEDS_TOOLKIT)
needs_rtx_on_hopper = pytest.mark.skipif(
    not RUNTIMES["tensorrt-rtx"].runnable() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs [tensorrt-rtx] and a Hopper GPU",
)

Build = Callable[..., Artifact]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Returns ``build(onnx_path, dims)``, which builds an engine for this machine's GPU."""

    def made(path: Path, **dims: DimRange) -> Artifact:
        assert TOOLKIT is not None
        src = open_onnx(path, dims=dims)
        return run_stage(
            "engine_from_onnx", src, EngineFromOnnxConfig(toolkit=TOOLKIT), out=tmp_path / f"{path.stem}.engine"
        )

    return made


@needs_toolkit
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


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Exports a GPT with two dynamic dims and integer inputs. Its weights are random, so that no package with a real
    model is needed on the GPU machine."""
    torch.manual_seed(0)
    return accel.export(
        GPT(GPTConfig(layers=4, hidden=256, seq=128)).eval(),
        example=(torch.zeros(1, 64, dtype=torch.int64),),
        dynamic={"ids": {0: "batch", 1: "sequence"}},
        dims={"batch": (1, 1, 4), "sequence": (8, 64, 128)},
        out=tmp_path_factory.mktemp("gpt") / "gpt.onnx",
    )


@needs_toolkit
def test_the_engine_of_a_gpt_agrees_with_onnxruntime(build: Build, gpt: Artifact) -> None:
    """Fails if the outputs of a transformer with two dynamic dims and integer inputs are wrong."""
    made = build(gpt.path)
    with open_session(made) as session, open_session(gpt, "onnxruntime") as reference:
        for sizes in made.signature.cases():
            given_feeds = session.example_inputs(**sizes)
            found, wanted = session.run(given_feeds), reference.run(given_feeds)
            for name, value in wanted.items():
                assert np.linalg.norm(found[name] - value) / np.linalg.norm(value) < 5e-3


@needs_rtx_on_hopper
def test_rtx_has_no_engines_for_hopper(gpt: Artifact, tmp_path: Path) -> None:
    """TensorRT-RTX has no engines for Hopper, but builds without an error. Fails if accel keeps such an engine, or
    doesn't name the toolkit for this GPU."""
    config = EngineFromOnnxConfig(toolkit="tensorrt-rtx")
    with pytest.raises(UnsupportedHere, match=r"compute capability 9\.0\); build with target='tensorrt'"):
        run_stage("engine_from_onnx", gpt, config, out=tmp_path / "gpt.engine")


@needs_rtx_on_hopper
def test_an_engine_for_another_gpu(gpt: Artifact, tmp_path: Path) -> None:
    """Fails if a machine with a GPU can't build an engine for another GPU, or if it loads the engine."""
    config = EngineFromOnnxConfig(toolkit="tensorrt-rtx", compute_capabilities=("8.0",))
    made = run_stage("engine_from_onnx", gpt, config, out=tmp_path / "gpt.engine")
    assert accel.inspect(made.path, check=True).intact
    with pytest.raises(UnsupportedHere, match=r"built for compute capability 8\.0, but this GPU has"):
        open_session(made)


@needs_toolkit
def test_phases_and_a_cuda_graph(build: Build, gpt: Artifact) -> None:
    """Fails if a replayed CUDA graph gives other outputs than a plain run. Also fails if CUDA events give no time for a
    phase of the run."""
    made = build(gpt.path)
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


@needs_toolkit
def test_bench_tells_the_phases_apart(build: Build, gpt: Artifact) -> None:
    """Fails if the report lacks the phases of a run on the GPU, or if the phases exceed the whole run."""
    made = build(gpt.path)
    for cuda_graph in (False, True):
        row = accel.bench([made], rounds=5, block_seconds=0.05, budget_seconds=0, cuda_graph=cuda_graph).rows[0]
        assert row.phases_ms is not None
        assert sum(row.phases_ms.values()) < 1.5 * row.median_ms
