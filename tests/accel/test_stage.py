"""Proves that accel refuses a stage that loses names, dims or the opset, tests each stage with gates, and uses the
cache. The stages here are tiny, and each has one planted fault."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.api.export import open_cache
from accel.artifact import Artifact, manifest_path
from accel.cache import StageCache
from accel.errors import CannotWrite, ChainBroken, GateFailed, SignatureDrift, StageFailed, UnsupportedHere
from accel.proof.gates import OutputGate, Outputs
from accel.signature import DimRange
from accel.sources.onnx.file import open_onnx
from accel.stage import NOT_FINITE, GateResult, StageConfig, config_json, run_stage
from accel.tables.stage_table import Stage

CALLS: list[str] = []


def affine_model(
    batch: str | int = "batch", opset: int = 20, name: str = "y", shape: tuple[int, ...] = (-1, 4), ir: int = 10
) -> onnx.ModelProto:
    """Makes y = reshape(x, shape) * 2 + 1."""
    graph = helper.make_graph(
        [
            helper.make_node("Reshape", ["x", "shape"], ["flat"]),
            helper.make_node("Mul", ["flat", "two"], ["double"]),
            helper.make_node("Add", ["double", "one"], [name]),
        ],
        "affine",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 4])],
        [
            numpy_helper.from_array(np.array(shape, np.int64), "shape"),
            numpy_helper.from_array(np.float32(2), "two"),
            numpy_helper.from_array(np.float32(1), "one"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


@dataclass(frozen=True, kw_only=True)
class PlantedConfig(StageConfig):
    fault: str = ""
    file: Path | None = None


def planted(src: Artifact, config: PlantedConfig, out: Path) -> Artifact:
    """Copies the model and plants one fault in it."""
    CALLS.append(config.fault)
    faults: dict[str, Callable[[], onnx.ModelProto]] = {
        "": affine_model,
        "batch": lambda: affine_model(batch=1),
        "baked": lambda: affine_model(shape=(1, 4)),
        "opset": lambda: affine_model(opset=19),
        "ir": lambda: affine_model(ir=9),
        "name": lambda: affine_model(name="z"),
        "wrong": lambda: _with_constant(affine_model(), "one", 1.01),
        "infinite": lambda: _with_constant(affine_model(), "one", float("inf")),
        "nothing": affine_model,
    }
    if config.fault == "raises":
        raise KeyboardInterrupt
    if config.fault == "excuse":
        raise StageFailed("the operator Add is not supported; use another target")
    if config.fault == "killed":
        out.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    onnx.save(faults[config.fault](), str(out))
    return Artifact(path=out, kind="onnx", signature=src.signature)


def _with_constant(model: onnx.ModelProto, name: str, value: float) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(np.float32(value), name))
    return model


STAGE = Stage(
    name="planted",
    function=f"{__name__}:planted",
    config=f"{__name__}:PlantedConfig",
    takes=("onnx",),
    gives="onnx",
    packages=("onnx",),
)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules["test_stage"])


@pytest.fixture
def source(tmp_path: Path, own_cache: Path) -> Artifact:
    path = tmp_path / "affine.onnx"
    onnx.save(affine_model(), str(path))
    CALLS.clear()
    return open_onnx(path, dims={"batch": DimRange(1, 1, 8)}, probe=False)


def run(
    source: Artifact, fault: str, out: Path | None = None, limit: float = 1e-4, cache: StageCache | None = None
) -> Artifact:
    config, gates = PlantedConfig(fault=fault), [OutputGate(limit=limit)]
    return run_stage("planted", source, config, gates=gates, out=out, stage=STAGE, cache=cache)


def test_a_good_stage_is_recorded(source: Artifact, tmp_path: Path) -> None:
    """Fails if the manifest lacks the stage, its hashes, or its gates at batch 1, 2 and 8."""
    made = run(source, "", tmp_path / "out.onnx")
    assert made.path.is_file()
    record = made.history[-1]
    assert record["input"] == source.digest
    assert record["output"] == list(made.hashes().values())
    assert {g["case"] for g in record["gates"]} >= {"batch=1", "batch=2", "batch=8"}
    assert all(g["passed"] for g in record["gates"])
    assert Artifact.open(made.path).manifest == made.manifest


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("batch", "stage planted turned the dim 'batch' of the input 'x' into 1"),
        ("opset", "stage planted made a model with opset 19 instead of opset 20; ask for opset=19"),
        ("ir", "stage planted made a model with ir 9 instead of ir 10; save the model with ir_version 9"),
        ("name", "stage planted lost the output 'y'"),
    ],
)
def test_a_broken_contract_stops_at_its_stage(source: Artifact, tmp_path: Path, fault: str, words: str) -> None:
    """Fails if accel accepts a stage that wrongly fixes the batch size, changes the opset or the IR version, or loses
    the name of an output. Also fails if the error blames another stage, or names an unknown option."""
    out = tmp_path / "out.onnx"
    with pytest.raises(SignatureDrift, match=words.replace("(", r"\(")):
        run(source, fault, out)
    assert not out.exists()


def test_a_batch_baked_in_behind_a_dynamic_declaration(source: Artifact, tmp_path: Path) -> None:
    """Fails if the gate runs only one batch size. The file that the stage writes declares the dynamic dim `batch`, but
    works only at batch 1."""
    with pytest.raises(GateFailed, match="batch=2"):
        run(source, "baked", tmp_path / "out.onnx")


@pytest.mark.parametrize("fault", ["excuse", "wrong"])
def test_a_full_disk_behind_another_reason(source: Artifact, tmp_path: Path, fault: str) -> None:
    """Checks that the error reports a full disk, even if the library gave another reason or wrote a wrong file. Also
    fails if the error reports a full disk although the disk has room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ by default. Once another test has loaded LLVM into this process, SIGXFSZ would end the
    # process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        with pytest.raises(CannotWrite, match=r"no space left for stage planted in .*; free some"):
            run(source, fault, tmp_path / "out.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.glob("out.onnx*")) == []
    with pytest.raises((StageFailed, GateFailed), match=r"not supported; use another target|the limit is 0\.0001"):
        run(source, fault, tmp_path / "out.onnx")


def test_a_failed_gate_sets_the_file_aside(source: Artifact, tmp_path: Path) -> None:
    """Fails if wrong outputs pass the gate. The rejected file must get the suffix ``.rejected``, and an older file with
    the requested name must stay unchanged."""
    out = tmp_path / "out.onnx"
    out.write_bytes(b"what was there before")
    with pytest.raises(
        GateFailed, match=r"rel_l2 .* the limit is 0.0001; the file is set aside as .*out.onnx.rejected"
    ):
        run(source, "wrong", out)
    assert out.read_bytes() == b"what was there before"
    assert onnx.load(str(tmp_path / "out.onnx.rejected")).graph.node
    with pytest.raises(GateFailed):
        run(source, "wrong", out)
    assert CALLS == ["wrong", "wrong"], "a failed stage must not be taken from the cache"


def test_the_rejected_file_outlives_a_temporary_cache(source: Artifact, own_cache: Path) -> None:
    """Fails if the error names a file that is deleted with the temporary cache of ``use_cache=False``."""
    with ExitStack() as stack:
        cache = open_cache(stack, use_cache=False)
        with pytest.raises(GateFailed) as error:
            run(source, "wrong", cache=cache)
    assert not cache.root.exists()
    named = Path(str(error.value).rpartition("set aside as ")[2])
    assert named.parent == own_cache / "rejected"
    assert onnx.load(str(named)).graph.node


def test_infinite_outputs_are_named(source: Artifact, tmp_path: Path) -> None:
    """Checks that the error for infinite outputs calls the outputs infinite. Internally, accel stores the difference of
    infinite outputs as 1e30, and the error must not show this number."""
    with pytest.raises(GateFailed) as error:
        run(source, "infinite", tmp_path / "out.onnx")
    assert "4 values are NaN or infinite where the reference is not; the file is set aside" in str(error.value)
    assert "e+30" not in str(error.value)
    where = {"gate": "outputs", "case": "batch=1", "output": "y", "metric": "rel_l2"}
    nothing = GateResult(**where, value=NOT_FINITE, limit=1e-4, passed=False)
    assert nothing.finding == "the reference is all zeros, and this is not"


def test_the_second_run_does_no_work(source: Artifact, tmp_path: Path) -> None:
    """Checks that a second run with the same stage and model uses the cache, and that the cached result equals the
    first result."""
    first = run(source, "", tmp_path / "a.onnx")
    second = run(source, "", tmp_path / "b.onnx")
    assert CALLS == [""]
    assert first.digest == second.digest


def test_what_counts_for_the_cache(source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the cache returns an old result after a change of a limit, an option, a file's contents, or the version
    of a package or stage. Also fails if the same contents under another path count as a change."""
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    one.write_text("a")
    same.write_text("a")
    other.write_text("b")
    run(source, "")
    run(source, "", limit=1e-3)
    assert len(CALLS) == 2
    run(source, "nothing")
    assert CALLS[2:] == ["nothing"]
    run_stage("planted", source, PlantedConfig(), gates=[OutputGate(limit=1e-4)], stage=replace(STAGE, version=2))
    assert len(CALLS) == 4
    real = importlib.metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0.0.1" if name == "onnx" else real(name))
        run(source, "")
        assert len(CALLS) == 5
    with monkeypatch.context() as patch:
        patch.setattr("accel.stage.__version__", "0.0.1")
        run(source, "")
        assert len(CALLS) == 6
    run(source, "")
    assert len(CALLS) == 6, "the first run is still known"
    assert (
        config_json(PlantedConfig(file=one))["file"]["sha256"]
        == config_json(PlantedConfig(file=same))["file"]["sha256"]
    )
    assert config_json(PlantedConfig(file=one)) != config_json(PlantedConfig(file=other))


def test_a_damaged_cache_entry_is_made_again(source: Artifact, own_cache: Path, tmp_path: Path) -> None:
    """Fails if the cache returns a damaged file instead of running the stage again."""
    made = run(source, "")
    blob = bytearray(made.path.read_bytes())
    blob[len(blob) // 2] ^= 1
    made.path.write_bytes(blob)
    again = run(source, "", tmp_path / "out.onnx")
    assert CALLS == ["", ""]
    assert again.hashes() == dict(again.manifest.files)  # type: ignore[union-attr]


def test_an_interrupted_stage_leaves_nothing(source: Artifact, own_cache: Path, tmp_path: Path) -> None:
    """Fails if Ctrl-C in a stage leaves a file under a final name or in the cache."""
    with pytest.raises(KeyboardInterrupt):
        run(source, "raises", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
    assert [p for p in own_cache.rglob("*") if p.is_file()] == []


def test_sigkill_then_resume(source: Artifact, own_cache: Path, tmp_path: Path) -> None:
    """A run is killed in its second stage. Fails if the next run repeats the first stage, or if a half-written file has
    a final name."""
    code = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "import test_stage as t\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from accel.sources.onnx.file import open_onnx\n"
        "from accel.signature import DimRange\n"
        "source = open_onnx(Path(sys.argv[1]), dims={'batch': DimRange(1, 1, 8)}, probe=False)\n"
        "stage = replace(t.STAGE, function='test_stage:planted')\n"
        "first = t.run_stage('planted', source, t.PlantedConfig(fault=''), stage=stage)\n"
        "print(len(t.CALLS), flush=True)\n"
        "t.run_stage('planted', first, t.PlantedConfig(fault=sys.argv[2]), stage=stage, out=Path(sys.argv[3]))\n"
    )
    out = tmp_path / "final.onnx"

    def process(fault: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", code, str(source.path), fault, str(out)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    killed = process("killed")
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout.split() == ["1"], killed.stderr
    assert not out.exists()
    resumed = process("nothing")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.split() == ["0"], "the first stage ran again"
    assert out.is_file()
    leftovers = list((own_cache / "scratch").iterdir())
    assert leftovers == [], "what the killed run left behind is still there"


def test_outputs_are_remembered_for_these_inputs_alone(tmp_path: Path) -> None:
    """Fails if inputs with equal bytes but different shapes or dtypes share their cached outputs."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["a", "b"]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    path = tmp_path / "neg.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    ones = np.ones((1, 8), np.float32)
    with ExitStack() as stack:
        outputs = Outputs(open_onnx(path), "onnxruntime", stack)
        assert outputs.of({"x": ones})["y"].shape == (1, 8)
        assert outputs.of({"x": ones.reshape(8, 1)})["y"].shape == (8, 1)
        assert outputs.of({"x": ones.view(np.int32)})["y"][0, 0] == -float(0x3F800000)
        assert outputs.of({"x": ones.copy()}) is outputs.of({"x": ones})


def test_wrong_kind(source: Artifact) -> None:
    """Checks that accel refuses to run a stage on an unsuitable kind of artifact."""
    with pytest.raises(UnsupportedHere, match="takes onnx"):
        run(replace(source, kind="engine"), "")


def test_one_flipped_byte_of_a_manifest_is_found(source: Artifact, tmp_path: Path) -> None:
    """Fails if a change of one byte in a sidecar goes unnoticed, even in white space or digits."""
    made = run(source, "", tmp_path / "out.onnx")
    sidecar = manifest_path(made.path)
    good = sidecar.read_bytes()
    for position in range(0, len(good), max(1, len(good) // 300)):
        bad = bytearray(good)
        bad[position] ^= 1
        sidecar.write_bytes(bad)
        with pytest.raises(ChainBroken):
            Artifact.open(made.path)
    sidecar.write_bytes(good)
    Artifact.open(made.path)


def test_cache_is_bounded(source: Artifact, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the cache keeps more bytes than its limit allows."""
    monkeypatch.setenv("ACCEL_CACHE_GB", "0")
    run(source, "")
    run(source, "", limit=1e-3)
    assert len(list(StageCache().root.joinpath("stages").iterdir())) == 1


def test_the_cache_counts_files_in_folders(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the limit of the cache leaves out the files in an entry's folders, such as the parts of a pipeline."""
    monkeypatch.setenv("ACCEL_CACHE_GB", "0.00002")
    cache = StageCache()
    for key in ("a", "b"):
        with cache.scratch() as folder:
            (folder / "part").mkdir()
            (folder / "part" / "weights.bin").write_bytes(bytes(15_000))
            cache.keep(key, folder)
        if key == "a":
            os.utime(cache.entry("a"), (1, 1))
    with cache.scratch() as folder:
        (folder / "small").write_bytes(b"")
        cache.keep("c", folder)
    assert not cache.entry("a").exists()
    assert cache.entry("b").exists()


def test_an_artifact_replaces_the_weights_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if weights that no file reads stay in the folder, or if the weights of another file are removed."""
    monkeypatch.setattr("accel.converters.graph.write.SINGLE_FILE_BYTES", 1000)
    out = tmp_path / "out" / "model.onnx"

    def publish(number: float) -> set[str]:
        model = affine_model()
        model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.full((400, 4), number, np.float32), "two"))
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([-1, 1, 4]), "shape"))
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        model.graph.output[0].type.tensor_type.shape.dim.add(dim_param="batch")
        for size in (400, 4):
            model.graph.output[0].type.tensor_type.shape.dim.add(dim_value=size)
        source = tmp_path / "source.onnx"
        onnx.save(model, str(source))
        accel.export(source, out=out, opset=21)
        return {path.name for path in out.parent.glob("*.weights")}

    first, second = publish(1.0), publish(2.0)
    assert len(first) == len(second) == 1
    assert first != second
    (out.parent / "kept.onnx").write_bytes(out.read_bytes())
    assert publish(3.0) > second
