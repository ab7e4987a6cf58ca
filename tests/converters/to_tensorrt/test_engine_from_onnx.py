"""Proves on small models, without a GPU, that TensorRT-RTX engines match their source and their build options."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from accel.artifact import Artifact
from accel.child import run_in_child
from accel.converters.to_tensorrt import engine_from_onnx as stage_module
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig, EngineNotBuilt, engine_from_onnx
from accel.errors import BadInputSpec
from accel.progress import watched_by
from accel.signature import DimRange
from tests.support.engine_models import opened, save, two_inputs, value

pytest.importorskip("tensorrt_rtx_bindings")


def test_signature_is_the_source_contract(source: Artifact, engine: Artifact) -> None:
    """Fails if the engine loses names, dtypes, the order of the inputs, or the names of dynamic dims."""
    assert engine.signature.inputs == source.signature.inputs
    assert [(s.name, s.dtype, s.shape) for s in engine.signature.outputs] == [
        ("y", "float32", ("batch", "sequence", 8))
    ]
    assert engine.kind == "engine"


def test_what_was_built_is_recorded(engine: Artifact) -> None:
    """Fails if the manifest lacks the toolkit, the toolkit's version, the GPUs or the profiles. On a machine without a
    GPU, accel can't read the toolkit or the profiles from the engine."""
    import tensorrt_rtx_bindings as trt

    assert engine.properties["toolkit"] == "tensorrt-rtx"
    assert engine.properties["toolkit_version"] == trt.__version__
    assert engine.properties["compute_capabilities"] == ["8.6", "12.0"]
    assert engine.properties["precision"] == "fp32"
    ends = [[1, 2], [2, 8], [4, 16]]
    assert engine.properties["profiles"] == [{"ids": ends, "mask": ends}]


def test_kernel_table_covers_the_graph(engine: Artifact) -> None:
    """Checks that accel can parse the kernels in the build log. Each node of the test's model has to be in a kernel,
    and at least one kernel has to contain several nodes."""
    assert engine.manifest is not None
    notes = engine.manifest.stages[-1]["notes"]
    nodes = {name for row in notes["kernels"] for name in row["onnx"]}
    assert {"embed", "apply_mask", "first", "relu", "second"} <= nodes
    assert notes["summary"]["kernels"] == len(notes["kernels"]) == sum(notes["summary"]["types"].values())
    assert notes["summary"]["fused"] >= 1
    assert any(row["outputs"] == ["float32"] for row in notes["kernels"])


def test_rebuild_is_byte_identical(source: Artifact, tmp_path: Path) -> None:
    """Fails if two builds with the same input and the same options give different engines. Different engines would have
    different hashes in their manifests."""
    config = EngineFromOnnxConfig(compute_capabilities=("8.6",))
    made = [engine_from_onnx(source, config, tmp_path / f"{name}.engine") for name in ("one", "two")]
    assert made[0].path.read_bytes() == made[1].path.read_bytes()
    assert made[0].notes == made[1].notes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.engine", "two.engine"]


def test_precision_is_the_graphs(tmp_path: Path) -> None:
    """Checks that the network is strongly typed, and that the manifest's precision is the precision of the graph."""
    src = opened(two_inputs(tmp_path / "half.onnx", TensorProto.FLOAT16))
    made = engine_from_onnx(src, EngineFromOnnxConfig(compute_capabilities=("8.6",)), tmp_path / "m.engine")
    assert made.properties["precision"] == "fp16"
    assert made.signature.outputs[0].dtype == "float16"
    dtypes = {dtype for row in made.notes["kernels"] for dtype in row["outputs"]}
    assert "float16" in dtypes
    assert "float32" not in dtypes


def test_only_a_tf32_engine_uses_tf32(source: Artifact, engine: Artifact, tmp_path: Path) -> None:
    """Fails if an fp32 engine may round its products to TF32, which TensorRT does by default, or if a TF32 engine is
    called fp32. The names of the kernels don't tell, so the engine's bytes have to differ."""
    config = EngineFromOnnxConfig(compute_capabilities=("8.6", "12.0"))
    made = engine_from_onnx(source, replace(config, tf32=True), tmp_path / "m.engine")
    assert (engine.properties["precision"], made.properties["precision"]) == ("fp32", "tf32")
    assert "tf32" not in engine.properties
    assert made.properties["tf32"] is True
    assert made.path.read_bytes() != engine.path.read_bytes()


def test_given_profiles_become_the_ranges(source: Artifact, tmp_path: Path) -> None:
    """Checks that --profile is used, and that the second profile is kept. Also checks that the signature merges the
    ranges of both profiles."""
    texts = ("ids=1x2,2x4,3x8", "mask=1x2,2x4,3x8", "ids=4x8,8x8,8x32", "mask=4x8,8x8,8x32")
    config = EngineFromOnnxConfig(profiles=texts, compute_capabilities=("8.6",))
    made = engine_from_onnx(source, config, tmp_path / "m.engine")
    assert made.signature.dims == {"batch": DimRange(1, 2, 8), "sequence": DimRange(2, 4, 32)}
    assert [profile["ids"][2] for profile in made.properties["profiles"]] == [[3, 8], [8, 32]]


def build_and_look(**words: Any) -> dict[str, Any]:
    """Builds an engine in the child process. Adds an entry ``seen`` to the build's result, with the settings that
    TensorRT's builder has at the start of the build."""
    from accel.converters.to_tensorrt import build as tensorrt_build

    seen: dict[str, Any] = {"profiles": []}
    add, watch = tensorrt_build._add_profile, tensorrt_build._watch

    class Builder:
        def __init__(self, builder: Any) -> None:
            self._builder = builder

        def create_optimization_profile(self) -> Any:
            self.made = self._builder.create_optimization_profile()
            return self.made

    def added(builder: Any, config: Any, network: Any, shapes: Mapping[str, Sequence[Sequence[int]]]) -> None:
        stand_in = Builder(builder)
        add(stand_in, config, network, shapes)
        seen["profiles"].append({name: [list(shape) for shape in stand_in.made.get_shape(name)] for name in shapes})

    def watched(trt: Any, config: Any, toolkit: str) -> Any:
        seen["count"] = config.num_optimization_profiles
        seen["level"] = config.builder_optimization_level
        seen["workspace"] = config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
        return watch(trt, config, toolkit)

    tensorrt_build._add_profile, tensorrt_build._watch = added, watched
    return {**tensorrt_build.build(**words), "seen": seen}


def test_the_builder_is_told_what_was_asked(source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the builder level, the workspace and each profile are passed to TensorRT."""
    found: list[dict[str, Any]] = []

    def run(_target: str, **words: Any) -> dict[str, Any]:
        found.append(run_in_child(f"{__name__}:build_and_look", **words))
        return found[0]

    monkeypatch.setattr(stage_module, "run_in_child", run)
    texts = ("ids=1x2,2x4,3x8", "mask=1x2,2x4,3x8", "ids=4x8,8x8,8x32", "mask=4x8,8x8,8x32")
    config = EngineFromOnnxConfig(
        profiles=texts, compute_capabilities=("8.6",), builder_level=1, workspace_bytes=48 << 20
    )
    engine_from_onnx(source, config, tmp_path / "m.engine")
    seen = found[0]["seen"]
    assert (seen["level"], seen["workspace"], seen["count"]) == (1, 48 << 20, 2)
    first, second = [[1, 2], [2, 4], [3, 8]], [[4, 8], [8, 8], [8, 32]]
    assert seen["profiles"] == [{"ids": first, "mask": first}, {"ids": second, "mask": second}]


def test_contradictory_profile_stops_before_the_build(source: Artifact, tmp_path: Path) -> None:
    """Fails if a contradictory profile reaches TensorRT, which builds an engine without checking profiles."""
    config = EngineFromOnnxConfig(profiles=("ids=1x2,2x4,8x16", "mask=1x2,2x4,4x16"))
    with pytest.raises(BadInputSpec, match="'batch'"):
        engine_from_onnx(source, config, tmp_path / "m.engine")
    assert list(tmp_path.iterdir()) == []


def test_progress_is_real(source: Artifact, tmp_path: Path) -> None:
    """Checks that the child process reports progress. Also fails if the progress decreases, or jumps from zero to the
    end."""
    seen: list[float] = []
    with watched_by(lambda _, fraction: seen.append(fraction) if fraction is not None else None):
        engine_from_onnx(source, EngineFromOnnxConfig(), tmp_path / "m.engine")
    assert seen == sorted(seen)
    assert len({fraction for fraction in seen if 0 < fraction < 1}) > 5


def chain(path: Path, count: int) -> Path:
    nodes = [helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"], name=f"n{i}") for i in range(count)]
    return save(path, nodes, [value("t0", [4, 8])], [value(f"t{count}", [4, 8])])


def test_a_long_chain_of_nodes_builds(tmp_path: Path) -> None:
    """Fails if the build runs on the main thread's small stack. A chain of 3500 nodes overflows the usual stack of 8
    MB. This test uses 700 nodes and a stack of 1 MB, because a longer chain takes much longer to build."""
    path = chain(tmp_path / "chain.onnx", 700)
    script = textwrap.dedent(
        f"""
        import pathlib, resource
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig, engine_from_onnx
        from accel.sources.onnx.file import open_onnx
        src = open_onnx(pathlib.Path({str(path)!r}), probe=False)
        print(engine_from_onnx(src, EngineFromOnnxConfig(), pathlib.Path({str(tmp_path)!r}) / "m.engine").kind)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "engine\n", done.stderr


def test_a_crash_of_the_builder_is_a_failed_build(
    source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a crash of the builder kills the calling process. Also fails if a crash leaves a half-written file, or
    replaces an earlier engine."""

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
    """Fails if an interrupted build continues in its child process, or leaves a file behind."""
    path = chain(tmp_path / "chain.onnx", 3000)
    out = tmp_path / "out"
    out.mkdir()
    script = textwrap.dedent(
        f"""
        import os, pathlib, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is handed an ignored one
        from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig, engine_from_onnx
        from accel.progress import watched_by
        from accel.sources.onnx.file import open_onnx
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
            pass  # waits until the builder reports progress
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert process.stdout.read().splitlines()[-1] == "interrupted"
        assert process.wait() == 0
    assert time.monotonic() - started < 30
    assert list(out.iterdir()) == []
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), 0)
