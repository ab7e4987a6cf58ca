"""Proves that every stage handles external weights tensor by tensor, even if the model exceeds protobuf's 2 GB."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.child import Child, run_in_child
from accel.converters.cast.stage import CastConfig, cast
from accel.converters.from_torch.onnx_from_torch import OnnxFromTorchConfig
from accel.converters.graph import onnx_from_onnx
from accel.converters.graph import simplify as simplify_stage
from accel.converters.graph import write as onnx_write
from accel.converters.graph.onnx_from_onnx import OnnxFromOnnxConfig
from accel.converters.graph.simplify import SimplifyConfig
from accel.converters.quantize.smooth import smooth
from accel.converters.quantize.stage import QuantizeConfig, make_task, quantize, run_task
from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig
from accel.converters.to_tensorrt.fit import FitTensorRtConfig
from accel.proof import gates
from accel.proof.gates import OutputGate
from accel.runtimes import onnx_rounded
from accel.runtimes.onnx_rounded import RoundedModel
from accel.sources.onnx import weights as onnx_weights
from accel.sources.onnx.file import external_files, open_onnx, read_proto
from accel.sources.onnx.weights import detached_bytes, read_detached, weight_array
from accel.sources.source import Source
from accel.stage import run_stage


def chain(folder: Path, width: int, layers: int) -> Path:
    """Writes a model of ``layers`` square MatMuls with external weights. Each MatMul is followed by a Relu. The model
    ends in an Identity, which the stage simplify can remove."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    block = (rng.standard_normal((width, width)) * np.sqrt(2 / width)).astype(np.float32)
    nodes, weights, value, offset = [], [], "x", 0
    with (folder / "model.weights").open("wb") as stream:
        for index in range(layers):
            tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[width, width])
            tensor.data_location = TensorProto.EXTERNAL
            for key, entry in (("location", "model.weights"), ("offset", offset), ("length", block.nbytes)):
                tensor.external_data.add(key=key, value=str(entry))
            weights.append(tensor)
            np.roll(block, index, axis=0).tofile(stream)
            offset += block.nbytes
            nodes.append(helper.make_node("MatMul", [value, f"w{index}"], [f"p{index}"], name=f"linear_{index}"))
            nodes.append(helper.make_node("Relu", [f"p{index}"], [f"r{index}"], name=f"relu_{index}"))
            value = f"r{index}"
    nodes.append(helper.make_node("Identity", [value], ["y"], name="identity"))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", width])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


@pytest.fixture
def detached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes accel treat weights of 256 KiB or more as large."""
    monkeypatch.setattr(onnx_weights, "DETACHED_BYTES", 1 << 18)


def weights_of(path: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(str(path)).graph.initializer}


@pytest.mark.usefixtures("detached")
def test_detached_weights_are_the_weights(tmp_path: Path) -> None:
    """Checks that accel reads the values of detached tensors, and that the model's outputs don't change. A detached
    tensor is a large weight with values that stay in the file."""
    path = chain(tmp_path / "m", 256, 3)
    light, whole = read_detached(path), read_proto(path, weights=True)
    assert detached_bytes(light) == 3 * 256 * 256 * 4
    assert light.ByteSize() < 10_000
    for a, b in zip(light.graph.initializer, whole.graph.initializer, strict=True):
        assert np.array_equal(weight_array(a), numpy_helper.to_array(b))
    feeds = {"x": np.ones((2, 256), np.float32)}
    assert np.array_equal(RoundedModel(light).run(feeds)["y"], RoundedModel(whole).run(feeds)["y"])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_cast_of_detached_weights_is_the_same_cast(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the cast rounds detached weights to the same bits as weights in memory."""
    src = open_onnx(chain(tmp_path / "m", 256, 3), probe=False)
    config = CastConfig(precision=precision)
    whole = cast(src, config, tmp_path / "whole.onnx")
    monkeypatch.setattr(onnx_weights, "DETACHED_BYTES", 1 << 18)
    light = cast(src, config, tmp_path / "light.onnx")
    assert light.path.read_bytes() == whole.path.read_bytes()
    assert light.notes["measured"] == whole.notes["measured"]


@pytest.mark.usefixtures("detached")
@pytest.mark.parametrize("inside", [False, True])
def test_simplify_without_the_weights(inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that onnxsim gets no weight of a matrix product, whether the weights are inside the model file or beside
    it. The simplified model must keep every weight, and must not have a weight as an input."""
    path = chain(tmp_path / "m", 256, 3)
    if inside:
        onnx.save(onnx.load(str(path)), str(path))
    given = []

    def child(target: str, *, path: Path, **words: Any) -> Any:
        given.append(path.stat().st_size)
        return run_in_child(target, path=path, **words)

    monkeypatch.setattr(simplify_stage, "run_in_child", child)
    made = simplify_stage.simplify(open_onnx(path, probe=False), SimplifyConfig(), tmp_path / "simple.onnx")
    assert given[0] < 10_000
    assert "kept" not in made.notes
    assert [spec.name for spec in made.signature.inputs] == ["x"]
    assert "Identity" not in {node.op_type for node in read_proto(made.path).graph.node}
    assert weights_of(made.path).keys() == {"w0", "w1", "w2"}
    feeds = {"x": np.ones((1, 256), np.float32)}
    before = RoundedModel(read_proto(path, weights=True)).run(feeds)
    (after,) = RoundedModel(read_proto(made.path, weights=True)).run(feeds).values()
    np.testing.assert_allclose(after, before["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("detached")
def test_smoothing_detached_weights(tmp_path: Path) -> None:
    """Checks that ``smooth``, which scales weights, changes the weights of the model in memory, but not the source's
    file."""
    path = chain(tmp_path / "m", 256, 2)
    before = weights_of(path)
    model = read_detached(path)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)}
    wanted = RoundedModel(model).run(feeds)["y"]
    assert smooth(model, ("MatMul",), set(), lambda skip: iter([feeds][skip:]), 0.5) == 1  # no samples of the input
    np.testing.assert_allclose(RoundedModel(model).run(feeds)["y"], wanted, rtol=1e-3, atol=1e-3)
    assert all(np.array_equal(value, before[name]) for name, value in weights_of(path).items())


def test_a_gate_holds_one_model_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a gate unloads the reference before it loads the candidate. The gate must still compare the candidate
    with the reference."""
    src = open_onnx(chain(tmp_path / "m", 64, 2), probe=False)
    made = quantize(src, QuantizeConfig(mode="int8-weights", smallest=1, block_size=16), tmp_path / "q.onnx")
    open_now: list[str] = []
    most = [0]
    plain = gates.open_session

    def counted(artifact: Artifact, *rest: Any) -> Any:
        session = plain(artifact, *rest)
        open_now.append(artifact.path.name)
        most[0] = max(most[0], len(open_now))
        close = session.close
        monkeypatch.setattr(session, "close", lambda: (open_now.remove(artifact.path.name), close()))
        return session

    monkeypatch.setattr(gates, "open_session", counted)
    results = OutputGate(limit=0.1).check(src, made)
    assert most == [1]
    assert all(result.passed and result.value and result.value > 1e-4 for result in results)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the limits so that every model is too large for one file, and every weight is too large for memory."""
    monkeypatch.setattr(onnx_write, "SINGLE_FILE_BYTES", 0)
    monkeypatch.setattr(onnx_weights, "DETACHED_BYTES", 0)


LINEAR = """
import torch

def make(width=256, layers=3):
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width, bias=False), torch.nn.ReLU())]
    return torch.nn.Sequential(*parts)

def large():
    return make(8192, 8)
"""


@pytest.mark.parametrize("rung", ["dynamo", "legacy"])
@pytest.mark.usefixtures("apart")
def test_an_exported_model_keeps_its_weights_beside_it(rung: str, tmp_path: Path) -> None:
    """Checks that a model that is too large for one file is exported with separate weights. The artifact must contain
    the weight file that the model needs, and no other weight files may stay beside the model."""
    (tmp_path / "net.py").write_text(LINEAR)
    src = Source(f"{tmp_path / 'net.py'}:make", inputs=["x:float32[batch,256]"]).open()
    cache = StageCache(tmp_path / "cache")
    made = run_stage("onnx_from_torch", src, OnnxFromTorchConfig(ladder=(rung,)), cache=cache)
    assert len(made.companions) == 1
    assert made.path.stat().st_size < 20_000 < made.path.with_name(made.companions[0]).stat().st_size
    beside = {path.name for path in made.path.parent.iterdir()}
    assert beside == {"main", "model.onnx", "model.onnx.manifest.json", *made.companions}


@pytest.mark.usefixtures("apart")
def test_a_refused_export_takes_its_weights_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the weight files of a rejected exporter stay beside the model of the next exporter."""
    from accel.converters.from_torch import onnx_from_torch as stage

    right = stage._RUNGS["dynamo"]

    def wrong(src: Artifact, opset: int, out: Path) -> None:
        right(src, opset, out)
        model = read_proto(out)
        (name,) = external_files(model)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                entry.value = "wrong.weights" if entry.key == "location" else entry.value
        out.write_bytes(model.SerializeToString())
        weights = out.with_name(name).rename(out.with_name("wrong.weights"))
        weights.write_bytes(bytes(weights.stat().st_size))

    monkeypatch.setitem(stage._RUNGS, "dynamo", wrong)
    (tmp_path / "net.py").write_text(LINEAR)
    src = Source(f"{tmp_path / 'net.py'}:make", inputs=["x:float32[batch,256]"]).open()
    made = run_stage("onnx_from_torch", src, OnnxFromTorchConfig(), cache=StageCache(tmp_path / "cache"))
    assert "the file's outputs are off" in made.history[-1]["notes"]["refused"]["dynamo"]
    assert {path.name for path in made.path.parent.glob("*.weights")} == set(made.companions)


@pytest.mark.usefixtures("apart")
def test_a_large_model_is_brought_to_another_opset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that onnx's converter and ONNX Runtime never get all weights in one message, and that no weight is
    lost."""
    from onnx import version_converter

    plain, given = version_converter.convert_version, []

    def convert(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
        given.append(model.ByteSize())
        return plain(model, opset)

    monkeypatch.setattr(version_converter, "convert_version", convert)
    # The conversion runs in this process, because the fixture lowers the limits only in this process.
    monkeypatch.setattr(onnx_from_onnx, "run_in_child", lambda _, **words: onnx_from_onnx.run_conversion(**words))
    src = open_onnx(chain(tmp_path / "m", 256, 3), probe=False)
    made = made_by("onnx_from_onnx", src, OnnxFromOnnxConfig(opset=19), tmp_path / "cache")
    assert made.properties["opset"] == 19
    assert len(made.companions) == 1
    assert given
    assert max(given) < 20_000
    assert made.path.stat().st_size < 20_000
    before, after = weights_of(src.path), weights_of(made.path)
    assert all(np.array_equal(after[name], before[name]) for name in before)


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["static", "int8-weights"])
def test_nncf_reads_the_weights_of_a_large_model_one_by_one(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that NNCF never gets all weights in one message, and that reading the weights one by one doesn't change
    NNCF's result."""
    src = open_onnx(chain(tmp_path / "m", 256, 3), probe=False)
    config = QuantizeConfig(form="openvino", mode=mode, smallest=1)
    whole = quantize(src, config, tmp_path / "whole.onnx")
    folder = tmp_path / "large"
    folder.mkdir()
    monkeypatch.setattr(onnx_write, "SINGLE_FILE_BYTES", 0)
    monkeypatch.setattr("accel.converters.quantize.stage._APART_BYTES", 0)
    model = read_detached(src.path)
    task = make_task(src, config, model, folder)
    assert run_task("tests.accel.api.large_models:nncf_of_a_large_one", task, model) < 20_000
    assert external_files(read_proto(task.path))
    assert external_files(read_proto(task.out))
    first, second = read_proto(whole.path).graph, read_proto(task.out).graph
    assert [node.op_type for node in first.node] == [node.op_type for node in second.node]
    wanted, found = weights_of(whole.path), weights_of(task.out)
    assert wanted.keys() == found.keys()
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)


def taken_by_a_session(path: Path) -> float:
    """Returns the anonymous memory (RssAnon) that a session of ``path`` takes, as a multiple of the size of the model's
    weights."""
    onnx_weights.DETACHED_BYTES, onnx_rounded._LARGE_BYTES = 0, 0
    model = RoundedModel(read_detached(path), threads=1)

    def held() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    before = held()
    model.run({"x": np.ones((1, 2048), np.float32)})
    return (held() - before) / (4 * 4 * 2048 * 2048)


def test_a_session_with_rounding_shares_the_weights(tmp_path: Path) -> None:
    """Checks that ONNX Runtime doesn't copy the weights of a large model into memory. A copy that is packed for matrix
    products is forbidden too."""
    path = chain(tmp_path / "m", 2048, 4)
    assert run_in_child(f"{__name__}:taken_by_a_session", path=path) < 0.5


def resident(pid: int) -> int:
    """Returns the number of bytes that a process and its children hold in memory."""
    try:
        status = Path(f"/proc/{pid}/statm").read_text().split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # the process has ended
        return 0
    return int(status[1]) * 4096 + sum(resident(int(child)) for child in children)


@contextmanager
def peak_of(pid: int) -> Iterator[Callable[[], int]]:
    """Watches the memory of the process ``pid``, and returns a function for the peak of ``resident(pid)`` so far. The
    memory is sampled twenty times a second."""
    found, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            found[0] = max(found[0], resident(pid))
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: found[0]
    finally:
        done.set()
        thread.join()


LIMIT = 2.5
# The stages in ``HOLD_MORE`` may take more memory than ``LIMIT``. NNCF copies the weights to find their ranges, and the
# fp8 stage rounds in float32 (see optimize.md).
HOLD_MORE = {"nncf": 4.2, "tensorrt fp8": 3.0}
DISK_BYTES = 30 << 30


def opened(path: Path, folder: Path) -> Artifact:
    return open_onnx(path, cache=StageCache(folder))


def made_by(name: str, src: Artifact, config: Any, folder: Path) -> Artifact:
    return run_stage(name, src, config, gates=[OutputGate(limit=0.5, seeds=1)], cache=StageCache(folder))


def exported(path: Path, folder: Path) -> Artifact:
    src = Source(f"{path}:large", inputs=["x:float32[batch,8192]"]).open()
    return run_stage("onnx_from_torch", src, OnnxFromTorchConfig(), cache=StageCache(folder))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_2_1_gigabytes_through_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that every stage accepts a model larger than protobuf's 2 GB, and doesn't hold too many copies of the
    weights. A stage's process and its children together must take less memory than 2.5 times the model's size. The
    stages in ``HOLD_MORE`` may take more memory."""
    if shutil.disk_usage(tmp_path).free < DISK_BYTES:
        pytest.skip("less than 30 GB are free for the models")
    size = 8 * 8192 * 8192 * 4
    cache = tmp_path / "cache"
    peaks: dict[str, float] = {}

    def watched(what: str, function: str, **arguments: object) -> Artifact:
        with Child() as child, peak_of(child.pid) as peak:
            found: Artifact = child.call(f"{__name__}:{function}", **arguments, folder=cache)
            peaks[what] = peak() / size
        print(what, round(peaks[what], 2), flush=True)
        return found

    def stage(what: str, name: str, src: Artifact, config: object) -> Artifact:
        return watched(what, "made_by", name=name, src=src, config=config)

    path = chain(tmp_path / "m", 8192, 8)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(cache))
    src = watched("open", "opened", path=path)
    assert sum(file.stat().st_size for file in src.files) > 2**31
    simple = stage("simplify", "simplify", src, SimplifyConfig())
    assert "kept" not in simple.notes
    stage("cast", "cast", simple, CastConfig())
    stage("dynamic", "quantize", simple, QuantizeConfig(mode="dynamic"))
    stage("static", "quantize", simple, QuantizeConfig(mode="static"))
    stage("int4", "quantize", simple, QuantizeConfig(mode="int4-weights"))
    stage("openvino", "openvino_from_onnx", simple, OpenVinoFromOnnxConfig())
    stage("nncf", "quantize", simple, QuantizeConfig(form="openvino"))
    stage("nncf int8-weights", "quantize", simple, QuantizeConfig(form="openvino", mode="int8-weights"))
    stage("tensorrt static", "quantize", simple, QuantizeConfig(form="tensorrt"))
    fp8 = stage("tensorrt fp8", "quantize", simple, QuantizeConfig(form="tensorrt", mode="fp8"))
    stage("another opset", "onnx_from_onnx", simple, OnnxFromOnnxConfig(opset=21))
    stage("fit_tensorrt", "fit_tensorrt", fp8, FitTensorRtConfig())
    (tmp_path / "net.py").write_text(LINEAR)
    made = watched("onnx_from_torch", "exported", path=tmp_path / "net.py")
    assert sum(file.stat().st_size for file in made.files) > 2**31
    assert {what: peak for what, peak in peaks.items() if peak >= HOLD_MORE.get(what, LIMIT)} == {}
