"""Proves that the TensorRT session works with a fake CUDA and a fake engine in plain memory, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.artifact import Artifact, Manifest
from accel.errors import AccelError, BadFeeds, InvalidModel, MissingExtra, UnsupportedHere, UsageError
from accel.runtimes import tensorrt as runtime_module
from accel.runtimes.base import RUNTIMES, SessionOptions
from accel.runtimes.cuda_memory import GRAIN, CudaRuntime, DeviceMemory
from accel.runtimes.tensorrt import (
    EngineFailed,
    TensorRTSession,
    check_fit,
    choose_profile,
    off_profile,
    ranged,
    rebuild,
)
from accel.runtimes.tensorrt_toolkit import load_toolkit
from accel.signature import DimRange, Signature
from tests.support.fake_gpu import SIGNATURE, FakeCuda, FakeToolkit


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    path = tmp_path / "model.engine"
    path.write_bytes(b"ENGINE whole")
    properties = {
        "toolkit": "tensorrt-rtx",
        "toolkit_version": "1.7.1",
        "compute_capabilities": ["8.6", "8.9"],
        "precision": "fp16",
        "profiles": [{"x": [[1, 2], [2, 4], [4, 8]]}],
    }
    made = Artifact(
        path=path,
        kind="engine",
        signature=SIGNATURE,
        properties=properties,
        source={"kind": "onnx", "spec": "net.onnx"},
    )
    manifest = Manifest(
        kind="engine", signature=SIGNATURE, files=made.hashes(), source=made.source, properties=properties
    )
    return replace(made, manifest=manifest)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(runtime_module, "CudaRuntime", lambda _extra: fake)
    monkeypatch.setattr(runtime_module, "load_toolkit", lambda _toolkit: FakeToolkit())
    return fake


def feeds(batch: int, width: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((batch, width)).astype(np.float32)}


def test_run_returns_what_the_engine_computed(artifact: Artifact, cuda: FakeCuda) -> None:
    """Fails if an input or output uses the wrong memory, keeps the size of an earlier run, or shares memory with the
    next run. The size of one output is known only after the run."""
    with TensorRTSession(artifact, SessionOptions()) as session:
        kept = []
        for seed, (batch, width) in enumerate([(2, 3), (4, 8), (1, 2)]):
            given_feeds = feeds(batch, width, seed)
            found = session.run(given_feeds)
            kept.append((given_feeds["x"], found))
        for x, found in kept:
            np.testing.assert_array_equal(found["y"], x * 2)
            np.testing.assert_array_equal(found["where"], np.stack(np.nonzero(x > 0)))
    assert cuda.live == {}
    assert cuda.host == {}
    assert cuda.streams == set()


def test_the_phases_of_a_run_are_told_apart(artifact: Artifact, cuda: FakeCuda) -> None:
    """Checks that every event is recorded at the right point of a run, and is destroyed. The fake clock advances by 10
    during the copy to the GPU, by 100 during the computation, and by 1000 during the copy back."""
    with TensorRTSession(artifact, SessionOptions()) as session:
        found = session.phases(feeds(2, 3))
    assert found == {"host_to_device": 10.0, "compute": 100.0, "device_to_host": 1000.0}
    assert cuda.destroyed == 4


def fixed(artifact: Artifact) -> Artifact:
    """Returns the artifact with its first output only, because the size of the second output depends on the data."""
    signature = Signature(SIGNATURE.inputs, SIGNATURE.outputs[:1])
    manifest = artifact.manifest
    assert manifest is not None
    return replace(artifact, signature=signature, manifest=replace(manifest, signature=signature))


def test_a_cuda_graph_is_captured_at_the_second_run_of_a_shape(artifact: Artifact, cuda: FakeCuda) -> None:
    """Fails if a run launches a CUDA graph that was captured for another shape or for other buffers. Also fails if a
    shape's first run is captured, if a run returns another run's outputs, or if a closed session keeps a CUDA graph."""
    shapes = [(2, 3), (2, 3), (2, 3), (4, 8), (4, 8), (2, 3)]
    with TensorRTSession(fixed(artifact), SessionOptions(cuda_graph=True)) as session:
        counts = []
        for seed, shape in enumerate(shapes):
            given_feeds = feeds(*shape, seed)
            np.testing.assert_array_equal(session.run(given_feeds)["y"], given_feeds["x"] * 2)
            counts.append((cuda.captured, cuda.launched))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 2), (2, 3), (2, 3)]
    assert cuda.graphs == {}
    assert cuda.live == {}


def test_a_size_that_depends_on_the_data_is_never_captured(artifact: Artifact, cuda: FakeCuda) -> None:
    """Fails if a CUDA graph is captured from a run in which TensorRT asks for memory. A CUDA graph that includes an
    allocation can't be replayed."""
    with TensorRTSession(artifact, SessionOptions(cuda_graph=True)) as session:
        for seed in range(3):
            given_feeds = feeds(2, 3, seed)
            expected = np.stack(np.nonzero(given_feeds["x"] > 0))
            np.testing.assert_array_equal(session.run(given_feeds)["where"], expected)
    assert cuda.captured == 0


def test_a_capture_that_fails_ends(artifact: Artifact, cuda: FakeCuda) -> None:
    """Fails if the stream stays in capture mode after a failed capture, or if an empty CUDA graph is launched later."""
    with TensorRTSession(fixed(artifact), SessionOptions(cuda_graph=True)) as session:
        session.run(feeds(2, 3))
        context = FakeToolkit.Runtime.engines[-1].contexts[-1]
        context.fails = True
        with pytest.raises(EngineFailed, match="out of resources"):
            session.run(feeds(2, 3))
        assert not cuda.capturing
        context.fails = False
        np.testing.assert_array_equal(session.run(feeds(2, 3))["y"], feeds(2, 3)["x"] * 2)


def test_strided_inputs_are_copied_right(artifact: Artifact, cuda: FakeCuda) -> None:
    """Fails if a non-contiguous array is copied in memory order."""
    with TensorRTSession(artifact, SessionOptions()) as session:
        x = np.asfortranarray(feeds(3, 4)["x"])
        np.testing.assert_array_equal(session.run({"x": x})["y"], x * 2)


def test_no_memory_is_allocated_for_sizes_seen_before(artifact: Artifact, cuda: FakeCuda) -> None:
    """Fails if a run allocates memory although the session has already run the largest shape."""
    with TensorRTSession(artifact, SessionOptions()) as session:
        session.run({"x": np.ones((16, 8), np.float32)})
        before = cuda.allocations
        for batch in (1, 4, 9, 16):
            session.run(feeds(batch, 8))
        assert cuda.allocations == before


def test_the_profile_follows_the_feeds(artifact: Artifact, cuda: FakeCuda) -> None:
    """Checks that each shape runs under a profile that contains the shape, and that profiles are not switched
    needlessly."""
    with TensorRTSession(artifact, SessionOptions()) as session:
        context = FakeToolkit.Runtime.engines[-1].contexts[-1]
        for batch in (2, 4, 8, 16, 1):
            np.testing.assert_array_equal(session.run(feeds(batch, 4))["y"], feeds(batch, 4)["x"] * 2)
        assert context.switched == [1, 0]


@pytest.mark.parametrize(("batch", "width"), [(5, 4), (17, 4), (2, 9), (2, 1)])
def test_sizes_off_every_profile_are_refused(
    batch: int,
    width: int,
    artifact: Artifact,
    cuda: FakeCuda,
) -> None:
    """Checks that a size outside every profile never reaches the engine, and that the message names the engine's
    sizes."""
    with TensorRTSession(artifact, SessionOptions()) as session:
        with pytest.raises(BadFeeds, match=rf"x {batch}x{width} is off .*\(x 1x2 to 4x8 or x 8x2 to 16x8\); pad or"):
            session.run(feeds(batch, width))
        assert session.run(feeds(2, 4))["y"].shape == (2, 4)


def test_the_signature_is_as_wide_as_the_profiles(artifact: Artifact, cuda: FakeCuda) -> None:
    """Fails if the session's signature has the source's ranges of sizes instead of the engine's ranges."""
    with TensorRTSession(artifact, SessionOptions()) as session:
        assert session.signature.dims == {"batch": DimRange(1, 2, 16), "width": DimRange(2, 4, 8)}


def test_a_failed_run_says_why_and_the_session_goes_on(artifact: Artifact, cuda: FakeCuda) -> None:
    """Fails if a run returns outputs although the engine reports a failure, or if the error lacks the reason. Also
    checks that the session can run afterwards."""
    with TensorRTSession(artifact, SessionOptions()) as session:
        context = FakeToolkit.Runtime.engines[-1].contexts[-1]
        context.fails = True
        with pytest.raises(EngineFailed, match="failed on the GPU: out of resources in some file"):
            session.run(feeds(2, 4))
        context.fails = False
        assert session.run(feeds(2, 4))["y"].shape == (2, 4)


def test_closed_is_closed(artifact: Artifact, cuda: FakeCuda) -> None:
    """Checks that a closed session frees its memory and stream, doesn't run, and can be closed twice."""
    session = TensorRTSession(artifact, SessionOptions())
    session.run(feeds(2, 4))
    session.close()
    session.close()
    assert (cuda.live, cuda.host, cuda.streams) == ({}, {}, set())
    with pytest.raises(UsageError, match="closed; open it again with accel"):
        session.run(feeds(2, 4))


def test_a_changed_byte_stops_before_the_engine_is_loaded(artifact: Artifact, cuda: FakeCuda) -> None:
    """Fails if accel deserializes an engine although its bytes differ from the manifest. Wrong bytes can crash the
    deserializer."""
    artifact.path.write_bytes(b"ENGINE wholf")
    loaded = len(FakeToolkit.Runtime.engines)
    with pytest.raises(InvalidModel, match=r"sha256 differs\); build it again with: accel optimize net\.onnx"):
        TensorRTSession(artifact, SessionOptions())
    assert len(FakeToolkit.Runtime.engines) == loaded
    assert cuda.streams == set()


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"OLDONE whole", UnsupportedHere, "another version of the toolkit"),
        (b"TEXT", UnsupportedHere, "no engine file, or a corrupt one"),
        (b"ENGINE half", InvalidModel, "it is not whole"),
    ],
    ids=["version", "text", "half"],
)
def test_engines_without_a_manifest(
    content: bytes,
    kind: type[AccelError],
    message: str,
    artifact: Artifact,
    cuda: FakeCuda,
) -> None:
    """Checks that the session refuses an engine of another toolkit version, a file that is no engine, and an incomplete
    engine."""
    artifact.path.write_bytes(content)
    with pytest.raises(kind, match=message):
        TensorRTSession(replace(artifact, manifest=None), SessionOptions())


def test_the_sidecar_is_compared_with_the_machine(artifact: Artifact) -> None:
    """Fails if the session loads an engine of another toolkit version or for another GPU. Also fails if the error gives
    a wrong command to rebuild the engine."""
    check_fit(artifact, "1.7.1", "8.9")
    said = r"built by tensorrt-rtx 1\.7\.1, but this machine has version 1\.8\.0; build it again with: accel"
    with pytest.raises(UnsupportedHere, match=said):
        check_fit(artifact, "1.8.0", "8.6")
    with pytest.raises(
        UnsupportedHere, match=r"for compute capability 8\.6, 8\.9, but this GPU has .* 12\.0"
    ) as caught:
        check_fit(artifact, "1.7.1", "12.0")
    assert str(caught.value).endswith(
        "accel optimize net.onnx --target tensorrt-rtx --precision fp16 --profile x=1x2,2x4,4x8 "
        f"--compute-capability 12.0 -o {artifact.path.parent}"
    )
    # check_fit accepts an engine that names no GPU, because the toolkit checks the GPU itself.
    check_fit(replace(artifact, properties={**artifact.properties, "compute_capabilities": []}), "1.7.1", "12.0")


def test_rebuilding_keeps_the_capabilities(artifact: Artifact) -> None:
    """Checks that the command to rebuild an engine names the compute capabilities of the old engine."""
    assert "--compute-capability 8.6 --compute-capability 8.9" in rebuild(artifact)


PROFILES = [
    {"a": ((1, 4), (2, 4), (4, 4)), "b": ((1,), (2,), (4,))},
    {"a": ((4, 4), (8, 4), (16, 4)), "b": ((4,), (8,), (16,))},
]


@given(st.integers(0, 20), st.integers(3, 5), st.integers(0, 20))
def test_a_chosen_profile_holds_every_input(rows: int, columns: int, length: int) -> None:
    """Checks that the chosen profile fits every input, and that a profile is chosen if any profile fits."""
    shapes = {"a": (rows, columns), "b": (length,)}
    fits = [columns == 4 and low <= rows <= high and low <= length <= high for low, high in ((1, 4), (4, 16))]
    assert choose_profile(PROFILES, shapes) == (fits.index(True) if any(fits) else None)


def test_engines_without_profiles_take_what_the_signature_takes() -> None:
    """Checks that an engine of fixed shapes is accepted without a profile."""
    assert choose_profile([], {"x": (4, 4)}) == 0
    assert ranged(SIGNATURE, []) == SIGNATURE
    assert "a 9x4, b 1" in off_profile(PROFILES, {"a": (9, 4), "b": (1,)})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5000)), max_size=30))
def test_buffers_grow_only_and_are_freed_once(requests: list[tuple[str, int]]) -> None:
    """Fails if a buffer is too small, shrinks, moves needlessly, is freed twice or is never freed."""
    cuda = FakeCuda()
    memory = DeviceMemory(cuda)
    largest: dict[str, int] = {}
    known: dict[str, int] = {}
    for name, size in requests:
        address = memory.device(name, size)
        assert len(cuda.live[address]) >= max(size, 1)
        if name in known and size <= largest[name]:
            assert address == known[name]
        known[name] = address
        largest[name] = max(size, largest.get(name, 0))
        host = memory.host(name, size)
        assert host.nbytes == size
        host[...] = 255  # raises an error if the buffer isn't writable
    assert len(cuda.live) == len(cuda.host) == len(largest)
    assert memory.size <= sum(size + GRAIN for size in largest.values())
    memory.close()
    memory.close()
    assert cuda.live == {}
    assert cuda.host == {}


def test_a_failed_growth_loses_no_memory() -> None:
    """Fails if accel frees a buffer twice, or still counts the freed buffer as allocated, when a larger buffer doesn't
    fit into the GPU's memory."""
    cuda = FakeCuda(limit=4096)
    memory = DeviceMemory(cuda)
    memory.device("x", 1000)
    with pytest.raises(AccelError, match="no room"):
        memory.device("x", 10_000)
    assert memory.size == 0
    assert memory.device("x", 100) in cuda.live
    memory.close()
    assert cuda.live == {}


def test_without_a_gpu_cuda_says_so() -> None:
    """Checks that cuda-bindings has all CUDA functions and enums that accel uses. Also checks that the error on a
    machine without a GPU gives the reason."""
    pytest.importorskip("cuda.bindings.runtime")
    from accel.machine import has_nvidia_gpu

    if has_nvidia_gpu():
        assert CudaRuntime().capability().count(".") == 1
    else:
        with pytest.raises(
            UnsupportedHere, match=r"no NVIDIA GPU can be used here \(.+\); use a machine where nvidia-smi"
        ):
            CudaRuntime()


def test_missing_toolkit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the error about a missing toolkit names the extra to install."""
    monkeypatch.setitem(RUNTIMES, "tensorrt", replace(RUNTIMES["tensorrt"], module="not_installed_anywhere"))
    with pytest.raises(MissingExtra, match=r'pip install "accel-toolchain\[tensorrt\]"'):
        load_toolkit("tensorrt")


def test_the_real_toolkit_has_what_the_session_calls() -> None:
    """Fails if the installed toolkit lacks a name that the session uses. The tests with the fake engine wouldn't notice
    a missing name."""
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    assert {"set_input_shape", "set_tensor_address", "get_tensor_shape", "execute_async_v3", "set_output_allocator"} | {
        "set_optimization_profile_async"
    } <= set(dir(trt.IExecutionContext))
    assert {"get_tensor_location", "get_tensor_profile_shape", "num_optimization_profiles"} | {
        "create_execution_context"
    } <= set(dir(trt.ICudaEngine))
    assert {"deserialize_cuda_engine", "get_engine_validity"} <= set(dir(trt.Runtime))
    allocator = runtime_module.make_output_allocator(trt, lambda _name, size: 4096 + size)
    assert allocator.reallocate_output_async("y", 0, 16, 256, 0) == 4112
    allocator.notify_shape("y", trt.Dims([2, 3]))
    assert allocator.shapes == {"y": (2, 3)}


def test_a_compatible_engine_fits_later_versions_and_newer_gpus(artifact: Artifact) -> None:
    """Fails if a compatible engine is refused on a later toolkit version or a newer GPU. Also fails if the engine is
    accepted on a version or a GPU that is too old."""
    both = {"version_compatible": True, "hardware": "ampere-plus"}
    compatible = replace(artifact, properties={**artifact.properties, **both})
    for version, capability in (("1.7.1", "12.0"), ("1.8.0", "8.0"), ("1.10.0", "8.6")):
        check_fit(compatible, version, capability)
    for version, capability in (("1.7.0", "8.6"), ("1.6.9", "8.6"), ("1.7.1", "7.5")):
        with pytest.raises(UnsupportedHere, match="--engine version-compatible=yes --engine hardware=ampere-plus"):
            check_fit(compatible, version, capability)
