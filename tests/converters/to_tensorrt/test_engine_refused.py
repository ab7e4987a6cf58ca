"""Proves that accel refuses bad sources and damaged engines, names the cause in the error, and leaves no file
behind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import accel
from accel.artifact import Artifact, Manifest, file_sha256, manifest_path
from accel.cache import StageCache
from accel.converters.to_tensorrt.engine_from_onnx import (
    EngineFromOnnxConfig,
    EngineNotBuilt,
    check_engine,
    engine_from_onnx,
)
from accel.errors import AccelError, InvalidModel, MissingExtra, SignatureDrift, UnsupportedHere
from accel.runtimes.base import RUNTIMES
from accel.stage import run_stage
from tests.support.engine_models import opened, relu, save, two_inputs, value

pytest.importorskip("tensorrt_rtx_bindings")


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
    """Checks that accel refuses an empty file, a text file and a truncated model. TensorRT's parser would read an empty
    file or plain text as an empty network."""
    src = replace(source, path=broken(folder / f"{broken.__name__}.onnx"))
    with pytest.raises(InvalidModel, match="export it again"):
        engine_from_onnx(src, EngineFromOnnxConfig(), tmp_path / "m.engine")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_contradicts_itself(source: Artifact, tmp_path: Path) -> None:
    """Fails if the build skips the ONNX checker. Without the ONNX checker, TensorRT builds a model whose outputs don't
    have the declared shape."""
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    path = save(tmp_path / "model.onnx", [node], [value("x", [4, 8])], [value("y", [4, 9])])
    with pytest.raises(InvalidModel, match=r"fails the ONNX checker .*; export it again"):
        engine_from_onnx(replace(source, path=path), EngineFromOnnxConfig(), tmp_path / "m.engine")


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_never_take_the_caller_down(seed: int, source: Artifact, tmp_path: Path) -> None:
    """Checks that building a corrupt model either succeeds or raises AccelError, and that a failed build leaves no file
    behind."""
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
    """Makes a model of QuantizeLinear and DequantizeLinear with the given zero point. If `dtype` is None, the nodes
    have no zero point."""
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
    # TensorRT silently accepts this graph but reads the values 0..255 as -128..127.
    "unsigned QDQ": (lambda p: quantized(p, "uint8", 0), r"culprit.*no uint8.*; quantize it symmetrically"),
    "asymmetric unsigned QDQ": (lambda p: quantized(p, "uint8", 128), r"culprit.*no uint8.*; quantize it symmetr"),
    "QDQ without a zero point": (lambda p: quantized(p, None, 0), r"culprit.*no uint8.*; quantize it symmetrically"),
    "asymmetric signed QDQ": (lambda p: quantized(p, "int8", 3), r"culprit.*zero point.*; quantize it symmetrically"),
    "a quantized bias": (int32_bias, r"culprit.*Int32.*; quantize it without quantizing biases"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_graphs_name_the_node_and_the_fix(what: str, tmp_path: Path) -> None:
    """Fails if accel silently builds a graph that TensorRT refuses. Also checks that the error names the node, the
    cause and the fix."""
    make, message = REFUSED[what]
    src = replace(opened(relu(tmp_path / "relu.onnx", [4, 8])), path=make(tmp_path / "model.onnx"))
    with pytest.raises(EngineNotBuilt, match=message) as caught:
        engine_from_onnx(src, EngineFromOnnxConfig(), tmp_path / "m.engine")
    assert "\n" not in str(caught.value)
    assert "checkMacros" not in str(caught.value)  # TensorRT prints checkMacros lines without a GPU
    assert not (tmp_path / "m.engine").exists()


def test_symmetric_int8_builds(tmp_path: Path) -> None:
    """Checks that symmetric int8, which TensorRT requires, is accepted."""
    src = opened(quantized(tmp_path / "int8.onnx", "int8", 0))
    made = engine_from_onnx(src, EngineFromOnnxConfig(compute_capabilities=("8.6",)), tmp_path / "m.engine")
    assert made.properties["precision"] == "int8"


def test_types_that_dont_match_are_refused(tmp_path: Path) -> None:
    """Checks that the error for float32 weights with bfloat16 inputs names the fix."""
    path = mixed_types(tmp_path / "mixed.onnx")
    src = replace(opened(relu(tmp_path / "relu.onnx", [4, 8])), path=path)
    with pytest.raises((EngineNotBuilt, InvalidModel), match=r"cast the model again|export it again"):
        engine_from_onnx(src, EngineFromOnnxConfig(), tmp_path / "m.engine")


def test_a_dtype_that_tensorrt_changes_is_drift(tmp_path: Path) -> None:
    """Fails if a float64 model reaches TensorRT, which silently reads float64 as float32. Also checks that an engine's
    signature is read from the engine, and not copied from the source."""
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")

    def saved(kind: int) -> Artifact:
        return opened(save(tmp_path / f"{kind}.onnx", [node], [value("x", [4, 8], kind)], [value("y", [4, 8], kind)]))

    double = saved(TensorProto.DOUBLE)
    with pytest.raises(EngineNotBuilt, match=r"nodes 'x' .*'y' .*: TensorRT reads float64 as float32"):
        engine_from_onnx(double, EngineFromOnnxConfig(), tmp_path / "m.engine")
    claimed = replace(saved(TensorProto.FLOAT), signature=double.signature)
    with pytest.raises(SignatureDrift, match="float64"):
        run_stage("engine_from_onnx", claimed, EngineFromOnnxConfig(), cache=StageCache(tmp_path / "cache"))


def test_inputs_that_are_sizes_are_refused(tmp_path: Path) -> None:
    """Checks that accel refuses a model in which an input contains the shape for a Reshape."""
    node = helper.make_node("Reshape", ["x", "size"], ["y"], name="reshape")
    ends = [value("x", [4, 8]), value("size", [2], TensorProto.INT64)], [value("y", ["a", "b"])]
    src = opened(save(tmp_path / "sizes.onnx", [node], *ends))
    with pytest.raises(EngineNotBuilt, match=r"'size' are sizes of other tensors"):
        engine_from_onnx(src, EngineFromOnnxConfig(), tmp_path / "m.engine")


def test_unknown_compute_capability_lists_what_there_is(source: Artifact, tmp_path: Path) -> None:
    """Checks that accel refuses compute capability 9.0, which TensorRT-RTX lacks, and that the error lists the
    supported capabilities."""
    with pytest.raises(UnsupportedHere, match=r"9\.0; use one of .*8\.6.*12\.0"):
        engine_from_onnx(source, EngineFromOnnxConfig(compute_capabilities=("9.0",)), tmp_path / "m.engine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("toolkit", ["tensorrt", "tensorrt-rtx"])
def test_missing_extra_is_named(
    toolkit: str, source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the error for a missing toolkit names the extra to install."""
    monkeypatch.setitem(RUNTIMES, toolkit, replace(RUNTIMES[toolkit], module="not_installed_anywhere"))
    with pytest.raises(MissingExtra, match=rf'pip install "accel-toolchain\[{toolkit}\]"'):
        engine_from_onnx(source, EngineFromOnnxConfig(toolkit=toolkit), tmp_path / "m.engine")


def test_weights_outside_the_folder_are_refused(source: Artifact, tmp_path: Path) -> None:
    """Fails if a model can load external weights from a file outside its own folder."""
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
    """Fails if ``check_engine`` reports a good engine as damaged on a machine without a GPU."""
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
    """Checks that ``check_engine`` finds a damaged engine without a GPU and without the engine's manifest."""
    path = tmp_path / "copy.engine"
    path.write_bytes(DAMAGES[damage](engine.path.read_bytes()))
    problem = check_engine(path)
    assert problem is not None
    assert problem.endswith("build it again")
    assert "\n" not in problem


def test_one_flipped_bit_is_found_by_the_sidecar(engine: Artifact, tmp_path: Path) -> None:
    """Fails if ``check_engine`` reads only the header of the engine. Only the hash in the manifest reveals a changed
    weight."""
    copy = engine.copy_to(tmp_path / "copy.engine")
    assert check_engine(copy.path) is None
    content = bytearray(copy.path.read_bytes())
    content[len(content) // 2] ^= 1
    copy.path.write_bytes(content)
    assert "sha256 differs" in str(check_engine(copy.path))


def test_inspect_lets_the_toolkit_read_an_engine(engine: Artifact, tmp_path: Path, cli: Any) -> None:
    """Checks that `accel inspect --check` accepts a good engine, and refuses a damaged engine even if the hashes
    match."""
    copy = engine.copy_to(tmp_path / "copy.engine")
    found = accel.inspect(copy.path, check=True)
    assert (found.intact, found.problem) == (True, "")
    before, sidecar = file_sha256(copy.path), manifest_path(copy.path)
    copy.path.write_bytes(damaged_header(copy.path.read_bytes()))
    body = Manifest.read(sidecar).to_json()
    Manifest.from_json(json.loads(json.dumps(body).replace(before, file_sha256(copy.path)))).write(sidecar)
    found = accel.inspect(copy.path, check=True)
    assert found.intact is False
    assert found.problem.endswith("build it again")
    ran = cli("inspect", copy.path, "--check")
    assert ran.code == 1
    assert f"accel: error: {found.problem}" in ran.stderr


def test_missing_engine(tmp_path: Path) -> None:
    """Checks that ``check_engine`` says that a missing file does not exist, and doesn't raise OSError."""
    assert "does not exist" in str(check_engine(tmp_path / "none.engine"))
