"""accel reproduce: the recorded chain, run again, gives the same bytes, or says which stage doesn't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import accel
from accel.api.reproduce import Reproduction, reproduce
from accel.artifact import Artifact
from accel.converters.cast import CastConfig
from accel.converters.engine_from_onnx import EngineFromOnnxConfig
from accel.converters.openvino_from_onnx import OpenVinoFromOnnxConfig
from accel.converters.quantize import QuantizeConfig
from accel.errors import ChainBroken, UsageError
from accel.stage import run_stage


@pytest.fixture(scope="module")
def engine(digits: Artifact, digits_data: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The trained net as an int8 engine: exported, simplified, quantized on data, cast, built."""
    quantized = run_stage("quantize", digits, QuantizeConfig(form="tensorrt", data=digits_data[0]))
    cast = run_stage("cast", quantized, CastConfig(precision="fp16"))
    out = tmp_path_factory.mktemp("engine") / "model.engine"
    return run_stage("engine_from_onnx", cast, EngineFromOnnxConfig(compute_capabilities=("8.6",)), out=out)


def test_a_chain_of_five_stages_gives_the_same(
    cli: Any, engine: Artifact, digits_data: tuple[Path, Path], tmp_path: Path
) -> None:
    """Fails if one of the stages isn't deterministic, if its recorded options don't lead to it, or if anything comes
    from the cache (which would prove nothing)."""
    ran = cli("reproduce", engine.path, "--data", digits_data[0], "-o", tmp_path / "again.engine", "--json")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert [row["stage"] for row in body["stages"]] == [
        "onnx_from_torch", "simplify", "quantize", "cast", "engine_from_onnx",
    ]  # fmt: skip
    # TensorRT-RTX doesn't give the same bytes for every int8 network, but the same kernels.
    assert {row["status"] for row in body["stages"][:4]} == {"identical"}, body["stages"]
    assert body["stages"][4]["status"] in ("identical", "equivalent"), body["stages"]
    assert (tmp_path / "again.engine").stat().st_size > 0
    assert "cached" not in ran.stderr


def test_a_chain_through_nncf_and_openvino_gives_the_same(
    digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path
) -> None:
    """Fails if what the CPU's form is mostly made by, NNCF and OpenVINO, can't be made again from its manifest, or if
    the bytes are others."""
    quantized = run_stage("quantize", digits, QuantizeConfig(form="openvino", data=digits_data[0], samples=16))
    made = run_stage("openvino_from_onnx", quantized, OpenVinoFromOnnxConfig(), out=tmp_path / "m.xml")
    found = reproduce(made, data=(digits_data[0],))
    assert {row.stage: row.status for row in found.stages} == dict.fromkeys(
        ("onnx_from_torch", "simplify", "quantize", "openvino_from_onnx"), "identical"
    )


def test_the_data_is_asked_for_before_any_work(engine: Artifact, digits_data: tuple[Path, Path]) -> None:
    """Fails if calibration runs on other data than it did, or if the missing file isn't named."""
    for data in ((), (digits_data[1],)):
        with pytest.raises(UsageError, match=r"quantize was given digits_calib.npz .*--data"):
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
    """Fails if another model is made and compared with the old one, as though it were the same source."""
    source = stub(tmp_path, 2.0)
    made = accel.export(f"{source}:make", out=tmp_path / "m.onnx")
    assert reproduce(made).identical
    stub(tmp_path, 3.0)
    ran = cli("reproduce", made.path)
    assert ran.code == 1
    assert "is not what the artifact was made from" in ran.stderr
    source.unlink()
    with pytest.raises(ChainBroken, match="can't be opened any more"):
        reproduce(made)


@pytest.mark.parametrize(("factor", "status"), [(1.00001, "equivalent"), (1.5, "different")])
def test_a_stage_that_gives_other_bytes(
    digits: Artifact, monkeypatch: pytest.MonkeyPatch, factor: float, status: str
) -> None:
    """Fails if other bytes count as the same, if bytes that compute the same within the gate count as different, or if
    ones that compute something else count as equivalent: here simplify scales a weight."""
    from accel.converters import onnx_write

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
    """Fails if a file without a manifest, or one that no stage made, is anything but one sentence."""
    plain = tmp_path / "plain.onnx"
    plain.write_bytes(digits.path.read_bytes())
    with pytest.raises(ChainBroken, match="no manifest"):
        reproduce(plain)


def test_an_engine_that_was_changed_is_not_called_reproduced(cli: Any, tmp_path: Path) -> None:
    """Fails if a file that isn't the recorded one any more passes because its stages give what the manifest says."""
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
    """Fails if a chain can only be run again from the folder in which it was made, or if a file of the same name that
    lies here is passed by for the recorded one."""
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
