"""Proves that the chain of hashes leads from an artifact back to its weights, and reveals every changed file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import accel
from accel.artifact import Artifact, manifest_path


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that gives the cache folder of a kind of artifact. The first test of a kind fills the folder,
    so that later tests skip the slow stages."""
    folder = tmp_path_factory.mktemp("caches")
    return lambda kind: folder / kind


@pytest.fixture
def made(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    own_cache: Path,
    digits_weights: Path,
    caches: Callable[[str], Path],
) -> tuple[Path, list[Path]]:
    """Makes an OpenVINO IR or an engine from weights in three stages. Returns the artifact and every file of its
    chain."""
    kind = getattr(request, "param", "openvino")
    if caches(kind).is_dir():
        shutil.copytree(caches(kind), own_cache)
    weights = tmp_path / "weights.safetensors"
    shutil.copyfile(digits_weights, weights)
    exported = accel.export("accel.examples.digits:model", weights=weights, out=tmp_path / "digits.onnx")
    from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig
    from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig
    from accel.stage import run_stage

    if kind == "engine":
        out = tmp_path / "out" / "model.engine"
        run_stage("engine_from_onnx", exported, EngineFromOnnxConfig(compute_capabilities=("8.6",)), out=out)
    else:
        out = tmp_path / "out" / "model.xml"
        run_stage("openvino_from_onnx", exported, OpenVinoFromOnnxConfig(), out=out)
    if not caches(kind).is_dir():
        shutil.copytree(own_cache, caches(kind))
    files = [weights, exported.path, manifest_path(exported.path), *out.parent.iterdir()]
    files += [p for p in (own_cache / "stages").rglob("model.*") if p.is_file()]
    return out, files


OF_EACH_KIND = pytest.mark.parametrize("made", ["openvino", "engine"], indirect=True)


@OF_EACH_KIND
def test_an_intact_chain_reaches_the_weights(made: tuple[Path, list[Path]]) -> None:
    """Fails if the check skips a file of the chain, or reports an intact file as changed."""
    out, files = made
    found = accel.inspect(out, check=True)
    assert found.intact
    assert {link.status for link in found.chain} == {"ok"}
    looked_at = {link.path for link in found.chain}
    assert {str(f) for f in files} <= looked_at


def test_a_copy_under_another_name_is_the_same_artifact(made: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """Fails if accel refuses files that were copied by hand together with their sidecars. Also fails if accel accepts a
    copy with changed content."""
    out, _ = made
    for suffix in (".xml", ".bin", ".xml.manifest.json"):
        shutil.copyfile(out.with_suffix(suffix), tmp_path / f"renamed{suffix}")
    copied = accel.inspect(tmp_path / "renamed.xml", check=True)
    assert copied.intact
    assert copied.artifact.digest == accel.inspect(out).artifact.digest
    exported = tmp_path / "digits.onnx"
    shutil.copyfile(manifest_path(exported), manifest_path(tmp_path / "other.onnx"))
    shutil.copyfile(exported, tmp_path / "other.onnx")
    with accel.load(tmp_path / "other.onnx") as session:
        assert session.artifact.history
    model = onnx.load(exported)
    model.doc_string = "another"
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(accel.AccelError, match="is not the file its manifest describes"):
        accel.load(tmp_path / "other.onnx")


@OF_EACH_KIND
def test_one_flipped_byte_anywhere_is_found(made: tuple[Path, list[Path]], cli: Any) -> None:
    """Fails if the check misses a changed byte in any file of the chain (artifact, sidecars, intermediates, ONNX,
    weights)."""
    out, files = made
    rng = np.random.default_rng(0)
    for file in files:
        good = file.read_bytes()
        bad = bytearray(good)
        bad[int(rng.integers(len(bad)))] ^= 1 << int(rng.integers(8))
        file.write_bytes(bad)
        ran = cli("inspect", out, "--check", "--json", "-q")
        assert ran.code == 1, file
        assert "Traceback" not in ran.stderr
        file.write_bytes(good)
    assert cli("inspect", out, "--check", "-q").code == 0


def test_what_is_gone_is_called_absent(made: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """Checks that a missing file of an earlier stage counts as absent, not as changed. Also checks that an artifact
    doesn't count as intact if one of its own files is missing."""
    out, _ = made
    (tmp_path / "weights.safetensors").unlink()
    found = accel.inspect(out, check=True)
    assert found.intact
    assert "absent" in {link.status for link in found.chain}
    out.with_suffix(".bin").unlink()
    assert accel.inspect(out, check=True).intact is False


def test_a_forged_history_is_found(made: tuple[Path, list[Path]]) -> None:
    """Fails if the check accepts a manifest that has a valid digest, but names a wrong input for a stage."""
    out, _ = made
    artifact = Artifact.open(out)
    assert artifact.manifest is not None
    body = artifact.manifest.to_json()
    body["stages"][1]["input"] = "0" * 64
    from accel.artifact import Manifest

    Manifest.from_json(body).write(manifest_path(out))
    found = accel.inspect(out, check=True)
    assert not found.intact
    assert next(link.what for link in found.changed).startswith("input of")


def test_inspect_shows_operators_and_json(digits: Artifact, cli: Any) -> None:
    """Checks that inspect shows the signature, properties, stages and operators, and that --json prints one object."""
    body = json.loads(cli("inspect", digits.path, "--json").stdout)
    assert body["graph"]["operators"]["Conv"] == 3
    assert body["properties"]["opset"] == 20
    assert [s["name"] for s in body["stages"]] == ["onnx_from_torch", "simplify"]
    shown = cli("inspect", digits.path).stdout
    assert "image:float32[batch,1,8,8]" in shown
    assert "Conv 3" in shown
