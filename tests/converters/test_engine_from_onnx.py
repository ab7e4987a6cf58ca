"""Building engines: real TensorRT-RTX builds without a GPU, on small models with one thing planted in each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.child import run_in_child
from accel.converters import engine_from_onnx as stage_module
from accel.converters.engine_from_onnx import (
    EngineFromOnnxConfig,
    EngineNotBuilt,
    check_engine,
    engine_from_onnx,
)
from accel.errors import AccelError, BadInputSpec, InvalidModel, MissingExtra, SignatureDrift, UnsupportedHere
from accel.progress import watched_by
from accel.runtimes.base import RUNTIMES
from accel.signature import DimRange
from accel.sources.onnx_file import open_onnx
from accel.stage import run_stage

pytest.importorskip("tensorrt_rtx_bindings")

FLOAT = TensorProto.FLOAT


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray] | None = None,
    opsets: Sequence[onnx.OperatorSetIdProto] = (),
) -> Path:
    weights = [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), *opsets], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def value(name: str, shape: Sequence[int | str], dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def two_inputs(path: Path, dtype: int = FLOAT) -> Path:
    """Tokens and mask that share both dynamic dims: two linear layers over the masked rows."""
    rng = np.random.default_rng(0)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="embed"),
        helper.make_node("Cast", ["mask"], ["kept"], name="cast_mask", to=dtype),
        helper.make_node("Unsqueeze", ["kept", "last"], ["column"], name="unsqueeze"),
        helper.make_node("Mul", ["rows", "column"], ["masked"], name="apply_mask"),
        helper.make_node("MatMul", ["masked", "w1"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="second"),
    ]
    constants = {
        "table": rng.standard_normal((10, 16)).astype(kind),
        "last": np.array([-1]),
        "w1": rng.standard_normal((16, 32)).astype(kind),
        "w2": rng.standard_normal((32, 8)).astype(kind),
    }
    dims = ["batch", "sequence"]
    inputs = [value("ids", dims, TensorProto.INT64), value("mask", dims, TensorProto.INT64)]
    return save(path, nodes, inputs, [value("y", [*dims, 8], dtype)], constants)


def relu(path: Path, shape: Sequence[int | str] = ("batch", 4)) -> Path:
    return save(path, [helper.make_node("Relu", ["x"], ["y"], name="relu")], [value("x", shape)], [value("y", shape)])


def opened(path: Path, **dims: DimRange) -> Artifact:
    return open_onnx(path, probe=False, dims=dims)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def source(folder: Path) -> Artifact:
    return opened(two_inputs(folder / "two.onnx"), batch=DimRange(1, 2, 4), sequence=DimRange(2, 8, 16))


@pytest.fixture(scope="module")
def engine(source: Artifact, folder: Path) -> Artifact:
    """Built with the signature's own ranges, for two kinds of GPU, through run_stage."""
    config = EngineFromOnnxConfig(compute_capabilities=("8.6", "12.0"))
    cache = StageCache(folder / "cache")
    return run_stage("engine_from_onnx", source, config, cache=cache, out=folder / "two.engine")


def test_signature_is_the_source_contract(source: Artifact, engine: Artifact) -> None:
    """Fails if names, dtypes, the order of the inputs or the names of dynamic dims are lost on the way."""
    assert engine.signature.inputs == source.signature.inputs
    assert [(s.name, s.dtype, s.shape) for s in engine.signature.outputs] == [
        ("y", "float32", ("batch", "sequence", 8))
    ]
    assert engine.kind == "engine"


def test_what_was_built_is_recorded(engine: Artifact) -> None:
    """Fails if toolkit, version, GPUs or profiles aren't kept where a machine without a GPU can read them."""
    import tensorrt_rtx_bindings as trt

    assert engine.properties["toolkit"] == "tensorrt-rtx"
    assert engine.properties["toolkit_version"] == trt.__version__
    assert engine.properties["compute_capabilities"] == ["8.6", "12.0"]
    assert engine.properties["precision"] == "fp32"
    ends = [[1, 2], [2, 8], [4, 16]]
    assert engine.properties["profiles"] == [{"ids": ends, "mask": ends}]


def test_kernel_table_covers_the_graph(engine: Artifact) -> None:
    """Fails if the build log's listing isn't read: every node that computes is in some kernel, and some are fused."""
    assert engine.manifest is not None
    notes = engine.manifest.stages[-1]["notes"]
    nodes = {name for row in notes["kernels"] for name in row["onnx"]}
    assert {"embed", "apply_mask", "first", "relu", "second"} <= nodes
    assert notes["summary"]["kernels"] == len(notes["kernels"]) == sum(notes["summary"]["types"].values())
    assert notes["summary"]["fused"] >= 1
    assert any(row["outputs"] == ["float32"] for row in notes["kernels"])


def test_rebuild_is_byte_identical(source: Artifact, tmp_path: Path) -> None:
    """Fails if anything but the input and the options reaches the engine: then no hash in a chain means anything."""
    config = EngineFromOnnxConfig(compute_capabilities=("8.6",))
    made = [engine_from_onnx(source, config, tmp_path / f"{name}.engine") for name in ("one", "two")]
    assert made[0].path.read_bytes() == made[1].path.read_bytes()
    assert made[0].notes == made[1].notes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.engine", "two.engine"]


def test_precision_is_the_graphs(tmp_path: Path) -> None:
    """Fails if the network isn't strongly typed, or the precision isn't read from the graph."""
    src = opened(two_inputs(tmp_path / "half.onnx", TensorProto.FLOAT16))
    made = engine_from_onnx(src, EngineFromOnnxConfig(compute_capabilities=("8.6",)), tmp_path / "m.engine")
    assert made.properties["precision"] == "fp16"
    assert made.signature.outputs[0].dtype == "float16"
    dtypes = {dtype for row in made.notes["kernels"] for dtype in row["outputs"]}
    assert "float16" in dtypes
    assert "float32" not in dtypes


def test_given_profiles_become_the_ranges(source: Artifact, tmp_path: Path) -> None:
    """Fails if --profile is ignored, if a second one is dropped, or if the ranges of both aren't merged."""
    texts = ("ids=1x2,2x4,3x8", "mask=1x2,2x4,3x8", "ids=4x8,8x8,8x32", "mask=4x8,8x8,8x32")
    config = EngineFromOnnxConfig(profiles=texts, compute_capabilities=("8.6",))
    made = engine_from_onnx(source, config, tmp_path / "m.engine")
    assert made.signature.dims == {"batch": DimRange(1, 2, 8), "sequence": DimRange(2, 4, 32)}
    assert [profile["ids"][2] for profile in made.properties["profiles"]] == [[3, 8], [8, 32]]


def test_contradictory_profile_stops_before_the_build(source: Artifact, tmp_path: Path) -> None:
    """Fails if the profile goes to TensorRT unchecked, which builds this one."""
    config = EngineFromOnnxConfig(profiles=("ids=1x2,2x4,8x16", "mask=1x2,2x4,4x16"))
    with pytest.raises(BadInputSpec, match="'batch'"):
        engine_from_onnx(source, config, tmp_path / "m.engine")
    assert list(tmp_path.iterdir()) == []


def test_progress_is_real(source: Artifact, tmp_path: Path) -> None:
    """Fails if the child's progress doesn't come through, goes back, or jumps from nothing to the end."""
    seen: list[float] = []
    with watched_by(lambda _, fraction: seen.append(fraction) if fraction is not None else None):
        engine_from_onnx(source, EngineFromOnnxConfig(), tmp_path / "m.engine")
    assert seen == sorted(seen)
    assert len({fraction for fraction in seen if 0 < fraction < 1}) > 5


def chain(path: Path, count: int) -> Path:
    nodes = [helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"], name=f"n{i}") for i in range(count)]
    return save(path, nodes, [value("t0", [4, 8])], [value(f"t{count}", [4, 8])])


def test_a_long_chain_of_nodes_builds(tmp_path: Path) -> None:
    """Fails if the build runs on the stack that the process was started with. 3500 nodes in a row overflow the usual
    8 MB; here 700 would overflow 1 MB, because a long chain takes long to build."""
    path = chain(tmp_path / "chain.onnx", 700)
    script = textwrap.dedent(
        f"""
        import pathlib, resource
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        from accel.converters.engine_from_onnx import EngineFromOnnxConfig, engine_from_onnx
        from accel.sources.onnx_file import open_onnx
        src = open_onnx(pathlib.Path({str(path)!r}), probe=False)
        print(engine_from_onnx(src, EngineFromOnnxConfig(), pathlib.Path({str(tmp_path)!r}) / "m.engine").kind)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "engine\n", done.stderr


def test_a_crash_of_the_builder_is_a_failed_build(
    source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a builder that dies takes the caller along, or leaves a half-written file."""

    def dies_while_writing(_target: str, *, out: Path, **_arguments: object) -> object:
        out.write_bytes(b"half an engine")
        return run_in_child("os:abort")

    monkeypatch.setattr(stage_module, "run_in_child", dies_while_writing)
    out = tmp_path / "m.engine"
    out.write_bytes(b"an earlier result")
    with pytest.raises(EngineNotBuilt, match=r"died .*SIGABRT.*; simplify"):
        engine_from_onnx(source, EngineFromOnnxConfig(), out)
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == b"an earlier result"


def test_ctrl_c_ends_the_build(tmp_path: Path) -> None:
    """Fails if an interrupted build goes on in its child process, or leaves a file behind."""
    path = chain(tmp_path / "chain.onnx", 3000)
    out = tmp_path / "out"
    out.mkdir()
    script = textwrap.dedent(
        f"""
        import os, pathlib, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is handed an ignored one
        from accel.converters.engine_from_onnx import EngineFromOnnxConfig, engine_from_onnx
        from accel.progress import watched_by
        from accel.sources.onnx_file import open_onnx
        src = open_onnx(pathlib.Path({str(path)!r}), probe=False)
        with watched_by(lambda message, fraction: print(fraction, flush=True)):
            try:
                engine_from_onnx(src, EngineFromOnnxConfig(), pathlib.Path({str(out)!r}) / "m.engine")
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while float(process.stdout.readline()) <= 0:
            pass  # until the builder itself reports
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert process.stdout.read().splitlines()[-1] == "interrupted"
        assert process.wait() == 0
    assert time.monotonic() - started < 3
    assert list(out.iterdir()) == []
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), 0)


def empty(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def text(path: Path) -> Path:
    path.write_text("this is a text file, not a model\n" * 20)
    return path


def truncated(path: Path) -> Path:
    whole = two_inputs(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


@pytest.mark.parametrize("broken", [empty, text, truncated], ids=lambda f: f.__name__)
def test_files_that_are_no_model(
    broken: Callable[[Path], Path], source: Artifact, tmp_path: Path, folder: Path
) -> None:
    """Fails if such a file reaches TensorRT's parser, which takes an empty or text file for an empty network."""
    src = replace(source, path=broken(folder / f"{broken.__name__}.onnx"))
    with pytest.raises(InvalidModel, match="export it again"):
        engine_from_onnx(src, EngineFromOnnxConfig(), tmp_path / "m.engine")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_contradicts_itself(source: Artifact, tmp_path: Path) -> None:
    """Fails if the checker isn't asked: TensorRT builds this one and gives another shape than the file declares."""
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    path = save(tmp_path / "model.onnx", [node], [value("x", [4, 8])], [value("y", [4, 9])])
    with pytest.raises(InvalidModel, match=r"fails the ONNX checker .*; export it again"):
        engine_from_onnx(replace(source, path=path), EngineFromOnnxConfig(), tmp_path / "m.engine")


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_never_take_the_caller_down(seed: int, source: Artifact, tmp_path: Path) -> None:
    """Fails if a corrupt model ends in anything but an engine or an error of ours with nothing left behind."""
    rng = np.random.default_rng(seed)
    content = bytearray(source.path.read_bytes())
    for position in rng.integers(0, len(content), 8):
        content[position] ^= 1 << int(rng.integers(8))
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(content)
    out = tmp_path / "m.engine"
    built = False
    with contextlib.suppress(AccelError):
        engine_from_onnx(replace(source, path=damaged), EngineFromOnnxConfig(), out)
        built = True
    assert {p.name for p in tmp_path.iterdir()} == {"damaged.onnx"} | ({"m.engine"} if built else set())


def one_node(path: Path, op: str, domain: str = "", **attributes: Any) -> Path:
    node = helper.make_node(op, ["x"], ["y"], name="culprit", domain=domain, **attributes)
    opsets = [helper.make_opsetid(domain, 1)] if domain else []
    return save(path, [node], [value("x", [4, 8])], [value("y", [4, 8])], opsets=opsets)


def quantized(path: Path, dtype: str | None, zero: int) -> Path:
    """QuantizeLinear and DequantizeLinear with this zero point; None leaves it out."""
    tail = [] if dtype is None else ["zero"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", *tail], ["q"], name="culprit"),
        helper.make_node("DequantizeLinear", ["q", "scale", *tail], ["d"], name="back"),
        helper.make_node("Relu", ["d"], ["y"], name="relu"),
    ]
    constants = {"scale": np.array(0.1, np.float32)} | ({} if dtype is None else {"zero": np.array(zero, dtype)})
    return save(path, nodes, [value("x", [4, 8])], [value("y", [4, 8])], constants)


def int32_bias(path: Path) -> Path:
    nodes = [
        helper.make_node("DequantizeLinear", ["bias", "scale"], ["b"], name="culprit"),
        helper.make_node("Add", ["x", "b"], ["y"], name="add"),
    ]
    constants = {"bias": np.arange(8, dtype=np.int32), "scale": np.array(0.1, np.float32)}
    return save(path, nodes, [value("x", [4, 8])], [value("y", [4, 8])], constants)


def mixed_types(path: Path) -> Path:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="culprit")
    weight = {"w": np.ones((4, 3, 3, 3), np.float32)}
    ends = [value("x", [1, 3, 8, 8], TensorProto.BFLOAT16)], [value("y", [1, 4, 6, 6], TensorProto.BFLOAT16)]
    return save(path, [node], *ends, weight)


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "an unknown operator": (lambda p: one_node(p, "NoSuchOperator"), r"culprit.*NoSuchOperator.*; rewrite it"),
    "an operator of another domain": (lambda p: one_node(p, "Own", "my.domain"), r"culprit.*Own.*; rewrite it"),
    # TensorRT takes this one without a word and reads 0..255 as -128..127.
    "unsigned QDQ": (lambda p: quantized(p, "uint8", 0), r"culprit.*no uint8.*; quantize it symmetrically"),
    "asymmetric unsigned QDQ": (lambda p: quantized(p, "uint8", 128), r"culprit.*no uint8.*; quantize it symmetr"),
    "QDQ without a zero point": (lambda p: quantized(p, None, 0), r"culprit.*no uint8.*; quantize it symmetrically"),
    "asymmetric signed QDQ": (lambda p: quantized(p, "int8", 3), r"culprit.*zero point.*; quantize it symmetrically"),
    "a quantized bias": (int32_bias, r"culprit.*Int32.*; quantize it without quantizing biases"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_graphs_name_the_node_and_the_fix(what: str, tmp_path: Path) -> None:
    """Fails if TensorRT's refusal comes without the node, the reason or what to do, or if it is silently built."""
    make, message = REFUSED[what]
    src = replace(opened(relu(tmp_path / "relu.onnx", [4, 8])), path=make(tmp_path / "model.onnx"))
    with pytest.raises(EngineNotBuilt, match=message) as caught:
        engine_from_onnx(src, EngineFromOnnxConfig(), tmp_path / "m.engine")
    assert "\n" not in str(caught.value)
    assert "checkMacros" not in str(caught.value)  # noise of a machine without a GPU
    assert not (tmp_path / "m.engine").exists()


def test_symmetric_int8_builds(tmp_path: Path) -> None:
    """Fails if the refusal of unsigned QDQ also hits the form that TensorRT wants."""
    src = opened(quantized(tmp_path / "int8.onnx", "int8", 0))
    made = engine_from_onnx(src, EngineFromOnnxConfig(compute_capabilities=("8.6",)), tmp_path / "m.engine")
    assert made.properties["precision"] == "int8"


def test_types_that_dont_match_are_refused(tmp_path: Path) -> None:
    """Fails if float32 weights under bfloat16 inputs come back as a checker or parser message without the fix."""
    path = mixed_types(tmp_path / "mixed.onnx")
    src = replace(opened(relu(tmp_path / "relu.onnx", [4, 8])), path=path)
    with pytest.raises((EngineNotBuilt, InvalidModel), match=r"cast the model again|export it again"):
        engine_from_onnx(src, EngineFromOnnxConfig(), tmp_path / "m.engine")


def test_a_dtype_that_tensorrt_changes_is_drift(tmp_path: Path) -> None:
    """Fails if the signature is copied from the source: TensorRT makes a float64 input float32 without a word."""
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    ends = [value("x", [4, 8], TensorProto.DOUBLE)], [value("y", [4, 8], TensorProto.DOUBLE)]
    src = opened(save(tmp_path / "double.onnx", [node], *ends))
    with pytest.raises(SignatureDrift, match="float64"):
        run_stage("engine_from_onnx", src, EngineFromOnnxConfig(), cache=StageCache(tmp_path / "cache"))


def test_inputs_that_are_sizes_are_refused(tmp_path: Path) -> None:
    """Fails if a model that takes a shape as a value is built without a range for it."""
    node = helper.make_node("Reshape", ["x", "size"], ["y"], name="reshape")
    ends = [value("x", [4, 8]), value("size", [2], TensorProto.INT64)], [value("y", ["a", "b"])]
    src = opened(save(tmp_path / "sizes.onnx", [node], *ends))
    with pytest.raises(EngineNotBuilt, match=r"'size' are sizes of other tensors"):
        engine_from_onnx(src, EngineFromOnnxConfig(), tmp_path / "m.engine")


def test_unknown_compute_capability_lists_what_there_is(source: Artifact, tmp_path: Path) -> None:
    """Fails if 9.0, which TensorRT-RTX has no code for, isn't refused with the list."""
    with pytest.raises(UnsupportedHere, match=r"9\.0; it offers .*8\.6.*12\.0"):
        engine_from_onnx(source, EngineFromOnnxConfig(compute_capabilities=("9.0",)), tmp_path / "m.engine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("toolkit", ["tensorrt", "tensorrt-rtx"])
def test_missing_extra_is_named(
    toolkit: str, source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a toolkit that isn't installed ends in an ImportError."""
    monkeypatch.setitem(RUNTIMES, toolkit, replace(RUNTIMES[toolkit], module="not_installed_anywhere"))
    with pytest.raises(MissingExtra, match=rf'pip install "accel-toolchain\[{toolkit}\]"'):
        engine_from_onnx(source, EngineFromOnnxConfig(toolkit=toolkit), tmp_path / "m.engine")


def test_weights_outside_the_folder_are_refused(source: Artifact, tmp_path: Path) -> None:
    """Fails if a model can name any file of the machine as its weights."""
    model = onnx.load(str(source.path))
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")
    path = tmp_path / "escape.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InvalidModel, match="outside the model's folder"):
        engine_from_onnx(replace(source, path=path), EngineFromOnnxConfig(), tmp_path / "m.engine")


def test_a_good_engine_passes_the_check(engine: Artifact) -> None:
    """Fails if the check can't tell a machine without a GPU from a damaged engine."""
    assert check_engine(engine.path) is None


def damaged_header(content: bytes) -> bytes:
    return b"XXXX" + content[4:]


def damaged_layout(content: bytes) -> bytes:
    return content[:64] + bytes(8) + content[72:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "text": lambda _: b"this is a text file, not an engine\n" * 20,
    "truncated": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "header": damaged_header,
    "layout": damaged_layout,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_engines_are_found(damage: str, engine: Artifact, tmp_path: Path) -> None:
    """Fails if a file that is no whole engine passes where there is neither a GPU nor a sidecar."""
    path = tmp_path / "copy.engine"
    path.write_bytes(DAMAGES[damage](engine.path.read_bytes()))
    problem = check_engine(path)
    assert problem is not None
    assert problem.endswith("build it again")
    assert "\n" not in problem


def test_one_flipped_bit_is_found_by_the_sidecar(engine: Artifact, tmp_path: Path) -> None:
    """Fails if the check trusts the header alone: nothing else in the file tells that a weight changed."""
    copy = engine.copy_to(tmp_path / "copy.engine")
    assert check_engine(copy.path) is None
    content = bytearray(copy.path.read_bytes())
    content[len(content) // 2] ^= 1
    copy.path.write_bytes(content)
    assert "sha256 differs" in str(check_engine(copy.path))


def test_missing_engine(tmp_path: Path) -> None:
    """Fails if a path that isn't there ends in an OSError."""
    assert "does not exist" in str(check_engine(tmp_path / "none.engine"))
