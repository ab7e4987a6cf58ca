"""Proves that accel reproduce runs the recorded chain again and gets the same bytes, or names the stage that
differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import accel
from accel.api.reproduce import Reproduction, reproduce
from accel.artifact import Artifact
from accel.converters.cast.stage import CastConfig
from accel.converters.quantize.stage import QuantizeConfig
from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig
from accel.errors import ChainBroken, UsageError
from accel.stage import run_stage
from tests.support.small_decoder import save_decoder


@pytest.fixture(scope="module")
def engine(digits: Artifact, digits_data: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Makes an int8 engine of the trained net in five stages: export, simplify, quantize, cast and build."""
    quantized = run_stage("quantize", digits, QuantizeConfig(form="tensorrt", data=digits_data[0]))
    cast = run_stage("cast", quantized, CastConfig(precision="fp16"))
    out = tmp_path_factory.mktemp("engine") / "model.engine"
    return run_stage("engine_from_onnx", cast, EngineFromOnnxConfig(compute_capabilities=("8.6",)), out=out)


def test_a_chain_of_five_stages_gives_the_same(
    cli: Any, engine: Artifact, digits_data: tuple[Path, Path], tmp_path: Path
) -> None:
    """Checks that every stage is deterministic, and that the recorded options give the same result. Also fails if a
    result comes from the cache, because a cached result would prove nothing."""
    ran = cli("reproduce", engine.path, "--data", digits_data[0], "-o", tmp_path / "again.engine", "--json")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert [row["stage"] for row in body["stages"]] == [
        "onnx_from_torch", "simplify", "quantize", "cast", "engine_from_onnx",
    ]  # fmt: skip

    # For some int8 networks, TensorRT-RTX builds different bytes each time, but always picks the same kernels.
    assert {row["status"] for row in body["stages"][:4]} == {"identical"}, body["stages"]
    assert body["stages"][4]["status"] in ("identical", "equivalent"), body["stages"]
    assert (tmp_path / "again.engine").stat().st_size > 0
    assert "cached" not in ran.stderr


@pytest.mark.proof
def test_a_chain_through_nncf_and_openvino_gives_the_same(
    digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path
) -> None:
    """Checks that accel can repeat NNCF's quantization and the conversion to OpenVINO from the manifest, and gets the
    same bytes. NNCF and OpenVINO are the usual way to make int8 models for CPUs."""
    quantized = run_stage("quantize", digits, QuantizeConfig(form="openvino", data=digits_data[0], samples=16))
    made = run_stage("openvino_from_onnx", quantized, OpenVinoFromOnnxConfig(), out=tmp_path / "m.xml")
    found = reproduce(made, data=(digits_data[0],))
    assert {row.stage: row.status for row in found.stages} == dict.fromkeys(
        ("onnx_from_torch", "simplify", "quantize", "openvino_from_onnx"), "identical"
    )


def test_the_data_is_asked_for_before_any_work(engine: Artifact, digits_data: tuple[Path, Path]) -> None:
    """Checks that reproduce calibrates on the data of the original run, and that the error names a missing data
    file."""
    for data in ((), (digits_data[1],)):
        with pytest.raises(UsageError, match=r"quantize read the data digits_calib.npz .*with data="):
            reproduce(engine, data=data)


def stub(folder: Path, factor: float) -> Path:
    path = folder / "net.py"
    path.write_text(
        "import accel, torch\n\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        f"        return torch.tanh(x) * {factor}\n\n\n"
        "@accel.declare(inputs=['x:float32[batch,4]'])\ndef make():\n    return Net()\n"
    )
    return path


def test_a_source_that_changed_is_refused(cli: Any, tmp_path: Path) -> None:
    """Checks that reproduce notices a changed source, and doesn't compare the changed model with the recorded model."""
    source = stub(tmp_path, 2.0)
    made = accel.export(f"{source}:make", out=tmp_path / "m.onnx")
    assert reproduce(made).identical
    stub(tmp_path, 3.0)
    ran = cli("reproduce", made.path)
    assert ran.code == 1
    assert "is not the file that the artifact was made from" in ran.stderr
    source.unlink()
    with pytest.raises(ChainBroken, match="can't be opened any more"):
        reproduce(made)


def test_a_decoder_is_opened_with_its_cache(tmp_path: Path) -> None:
    """Fails if the source of a decoder is opened without its cache, or if the hash of a model of transformers holds a
    hash of Python, which differs between two processes. The next export would then miss the cache."""
    folder = save_decoder(tmp_path / "llama")
    made = accel.export(folder, out=tmp_path / "decoder")
    script = (
        "import sys; from accel.sources.source import Source; print(Source(sys.argv[1], decoder=True).open().digest)"
    )
    ran = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == made.history[0]["input"]
    assert reproduce(made).identical


@pytest.mark.proof
@pytest.mark.parametrize(("factor", "status"), [(1.00001, "equivalent"), (1.5, "different")])
def test_a_stage_that_gives_other_bytes(
    digits: Artifact, monkeypatch: pytest.MonkeyPatch, factor: float, status: str
) -> None:
    """Fails if a result with other bytes counts as identical. The result has to count as equivalent if its outputs
    pass the gate, and as different otherwise. In this test, the stage simplify scales a weight."""
    from accel.converters.graph import write as onnx_write

    right = onnx_write.write_onnx

    def scaled(model: onnx.ModelProto, out: Path, **options: Any) -> tuple[str, ...]:
        tensor = next(t for t in model.graph.initializer if len(t.dims) == 2)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), tensor.name))
        return right(model, out, **options)

    monkeypatch.setattr(onnx_write, "write_onnx", scaled)
    found = reproduce(digits)
    rows = {row.stage: row.status for row in found.stages}
    assert rows["simplify"] == status
    assert found.passed == (status == "equivalent")


def test_what_has_no_chain(digits: Artifact, tmp_path: Path) -> None:
    """Checks that accel refuses a file without a manifest."""
    plain = tmp_path / "plain.onnx"
    plain.write_bytes(digits.path.read_bytes())
    with pytest.raises(ChainBroken, match="no manifest"):
        reproduce(plain)


@pytest.mark.proof
def test_an_engine_that_was_changed_is_not_called_reproduced(cli: Any, tmp_path: Path) -> None:
    """Fails if accel reports an engine as reproduced although its file was changed. The stages in the manifest still
    give the original bytes, so accel must also check the file."""
    stub(tmp_path, 2)
    exported = accel.export(f"{tmp_path}/net.py:make", out=tmp_path / "net.onnx")
    made = run_stage("engine_from_onnx", exported, EngineFromOnnxConfig(), out=tmp_path / "net.engine")
    body = bytearray(made.path.read_bytes())
    body[len(body) // 2] ^= 1
    made.path.write_bytes(body)
    ran = cli("reproduce", made.path)
    assert ran.code == 1, ran.stderr
    assert "changed since it was made" in " ".join(ran.stdout.split())
    found = Reproduction(stages=(), intact=False).to_json()
    assert (found["passed"], found["identical"], found["intact"]) == (False, False, False)


def test_a_source_that_was_named_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that accel can reproduce a chain even if the current folder differs from that of the original run. Also
    fails if accel accepts a file of the same name in the current folder instead of the recorded file."""
    (tmp_path / "elsewhere").mkdir()
    stub(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    made = accel.export("net.py:make", out="net.onnx")
    path = made.path.resolve()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert reproduce(path).passed
    stub(tmp_path / "elsewhere", 3)
    with pytest.raises(ChainBroken, match=r"net\.py"):
        reproduce(path)
