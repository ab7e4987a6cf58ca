"""Proves that ONNX Runtime sessions check their inputs, apply their options, and report bad files in one line."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact, Manifest, manifest_path
from accel.errors import (
    BadFeeds,
    InvalidModel,
    MissingExtra,
    RunFailed,
    SizeBeyond,
    UnsupportedHere,
    UsageError,
    ValuesOutOfRange,
)
from accel.runtimes.base import BaseSession, SessionOptions, open_session
from accel.runtimes.onnxruntime import OnnxRuntimeCudaSession, OnnxRuntimeSession, with_tf32
from accel.signature import DimRange, Feeds, Signature, TensorSpec
from accel.sources.onnx.file import describe


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int | str]]],
    outputs: dict[str, tuple[int, list[int | str]]],
    weights: dict[str, np.ndarray] | None = None,
    external: str | None = None,
) -> Artifact:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, *spec) for n, spec in inputs.items()],
        [helper.make_tensor_value_info(n, *spec) for n, spec in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if external:
        onnx.save(model, path, save_as_external_data=True, location=external, size_threshold=0)
    else:
        onnx.save(model, path)
    return artifact(path)


def artifact(path: Path) -> Artifact:
    return Artifact(path=path, kind="onnx", signature=describe(path)[0])


def unread(path: Path) -> Artifact:
    """Returns an artifact without opening the file, because the file may be damaged."""
    return Artifact(path=path, kind="onnx", signature=Signature((TensorSpec("x", "float32", (2,)),)))


FLOAT = TensorProto.FLOAT


@pytest.fixture
def linear(tmp_path: Path) -> Artifact:
    """Makes ``y = x @ w`` and ``z = x + x``, with the outputs in an order that isn't alphabetical."""
    return save(
        tmp_path / "linear.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Add", ["x", "x"], ["z"])],
        {"x": (FLOAT, ["batch", 3])},
        {"z": (FLOAT, ["batch", 3]), "y": (FLOAT, ["batch", 2])},
        {"w": np.arange(6, dtype=np.float32).reshape(3, 2)},
    )


def test_outputs_come_by_name(linear: Artifact) -> None:
    """Fails if outputs get the wrong names, or if a second run with another batch is refused."""
    with open_session(linear, "onnxruntime") as session:
        assert isinstance(session, OnnxRuntimeSession)
        for batch in (1, 5):
            x = np.random.default_rng(0).standard_normal((batch, 3)).astype(np.float32)
            outputs = session.run({"x": x})
            assert list(outputs) == ["z", "y"]
            np.testing.assert_allclose(outputs["z"], 2 * x)
            np.testing.assert_allclose(outputs["y"], x @ np.arange(6, dtype=np.float32).reshape(3, 2), rtol=1e-5)


def test_feeds_are_checked_before_the_runtime_sees_them(linear: Artifact) -> None:
    """Fails if an input with a wrong name, dtype or shape reaches ONNX Runtime instead of raising BadFeeds."""
    with open_session(linear, "onnxruntime") as session:
        for feeds in (
            {"q": np.ones((1, 3), np.float32)},
            {"x": np.ones((1, 3))},
            {"x": np.ones((1, 4), np.float32)},
            {"x": np.ones(3, np.float32)},
        ):
            with pytest.raises(BadFeeds):
                session.run(feeds)
        advice = r"x\.float\(\), or with x\.astype\('float32'\) for a NumPy array"
        with pytest.raises(BadFeeds, match=f"has dtype float64, but the model takes float32; cast .* with {advice}"):
            session(torch.ones(1, 3, dtype=torch.float64))
        assert session(torch.ones(1, 3, dtype=torch.float64).float())


def test_values_the_model_cannot_take_are_one_sentence(tmp_path: Path) -> None:
    """Fails if an index beyond the table raises ONNX Runtime's exception instead of accel's."""
    model = save(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        {"ids": (TensorProto.INT64, ["n"])},
        {"y": (FLOAT, ["n", 2])},
        {"table": np.zeros((3, 2), np.float32)},
    )
    with open_session(model, "onnxruntime") as session:
        with pytest.raises(RunFailed, match=r"ids \[1\].*data bounds.*check the inputs' values"):
            session.run({"ids": np.array([7])})
        with pytest.raises(ValuesOutOfRange, match=r"input 'ids' holds 7, it takes 0\.\.2"):
            session.run({"ids": np.array([0, 7])})
        assert session.run({"ids": np.array([2])})["y"].shape == (1, 2)
        assert session.run({"ids": np.array([-1])})["y"].shape == (1, 2)  # negative indices count from the end


@pytest.mark.parametrize(("kind", "negative"), [("torch", False), ("onnx", True)])
def test_a_declared_range(tmp_path: Path, kind: str, negative: bool) -> None:
    """Fails if a session looks up an integer outside the manifest's range. ONNX Runtime itself would look up the last
    row for -1, at which PyTorch fails. In ONNX models of users, negative indices count from the end."""
    made = save(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        {"ids": (TensorProto.INT64, ["n"])},
        {"y": (FLOAT, ["n", 2])},
        {"table": np.zeros((4, 2), np.float32)},
    )
    declared = Signature((replace(made.signature.inputs[0], values=(0, 2)),), made.signature.outputs)
    manifest = Manifest(kind="onnx", signature=declared, files=made.hashes(), source={"kind": kind})
    manifest.write(manifest_path(made.path))
    for runtime in ("onnxruntime", "onnx-rounded"):
        with open_session(Artifact.open(made.path), runtime) as session:
            assert session.run({"ids": np.array([0, 2])})["y"].shape == (2, 2)
            for wrong in (3, -4) if negative else (3, -1):
                with pytest.raises(ValuesOutOfRange, match=rf"'ids' holds {wrong}, it takes .*; correct the values"):
                    session.run({"ids": np.array([0, wrong])})
            if negative:
                assert session.run({"ids": np.array([-1])})["y"].shape == (1, 2)


def test_a_size_that_is_too_large(tmp_path: Path) -> None:
    """Fails if the error of a run at a larger size than the declared sizes only has ONNX Runtime's words, which don't
    name the dim. Also fails if the error of a run at a declared size blames the size."""
    add, x, y = helper.make_node("Add", ["x", "table"], ["y"]), (FLOAT, ["n"]), (FLOAT, ["n"])
    model = save(tmp_path / "places.onnx", [add], {"x": x}, {"y": y}, {"table": np.zeros(11, np.float32)})
    for most, error, said in ((8, SizeBeyond, r"; n is 12, beyond its range 1\.\.8: give"), (64, RunFailed, "12")):
        signature = replace(model.signature, dims={"n": DimRange(1, 4, most)})
        with open_session(replace(model, signature=signature), "onnxruntime") as session:
            session.run({"x": np.zeros(11, np.float32)})
            with pytest.raises(RunFailed, match=said) as caught:
                session.run({"x": np.zeros(12, np.float32)})
            assert type(caught.value) is error


def test_an_index_that_the_model_computed_is_its_own_fault(tmp_path: Path) -> None:
    """Fails if the error blames the caller's inputs for an index that the graph computed. In this test, the graph looks
    up ids + 2 in an int8 table."""
    nodes = [
        helper.make_node("DequantizeLinear", ["table", "scale"], ["floats"]),
        helper.make_node("Add", ["ids", "two"], ["later"]),
        helper.make_node("Gather", ["floats", "ids"], ["y"]),
        helper.make_node("Gather", ["floats", "later"], ["z"]),
    ]
    weights = {"table": np.zeros((3, 2), np.int8), "scale": np.float32(1), "two": np.array(2)}
    outputs: dict[str, tuple[int, list[int | str]]] = {"y": (FLOAT, ["n", 2]), "z": (FLOAT, ["n", 2])}
    model = save(tmp_path / "later.onnx", nodes, {"ids": (TensorProto.INT64, ["n"])}, outputs, weights)
    with open_session(model, "onnxruntime") as session:
        with pytest.raises(RunFailed, match="data bounds") as caught:
            session.run({"ids": np.array([1])})
        assert not isinstance(caught.value, BadFeeds)
        with pytest.raises(ValuesOutOfRange, match=r"input 'ids' holds 3, it takes 0\.\.2"):
            session.run({"ids": np.array([3])})


def test_feeds_need_not_be_contiguous(linear: Artifact) -> None:
    """Fails if strides are ignored, so that a transposed input is read in the wrong order."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert not x.flags.c_contiguous
    with open_session(linear, "onnxruntime") as session:
        np.testing.assert_allclose(session.run({"x": x})["z"], 2 * x)


def test_outputs_belong_to_the_caller(linear: Artifact) -> None:
    """Fails if a run overwrites the outputs of an earlier run."""
    with open_session(linear, "onnxruntime") as session:
        first = session.run({"x": np.ones((2, 3), np.float32)})
        kept = {name: value.copy() for name, value in first.items()}
        session.run({"x": np.full((2, 3), 9, np.float32)})
    for name, value in kept.items():
        np.testing.assert_array_equal(first[name], value)


def threads() -> set[str]:
    """Returns the names of this process's threads. Threads of earlier tests may end at any time."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


def ended(some: set[str]) -> bool:
    """Returns true if the given threads end within 20 seconds. After a join, the kernel still lists the thread for a
    moment."""
    deadline = time.monotonic() + 20
    while some & threads() and time.monotonic() < deadline:
        time.sleep(0.005)
    return not some & threads()


def test_threads_are_those_asked_for(linear: Artifact) -> None:
    """Checks that ``threads`` reaches ONNX Runtime. With ``threads=1``, ONNX Runtime starts no thread. With
    ``threads=3``, ONNX Runtime starts two threads, and the caller's thread is the third."""
    before = threads()
    with open_session(linear, "onnxruntime", {"threads": 1}):
        assert threads() <= before
        with open_session(linear, "onnxruntime", {"threads": 3}):
            made = threads() - before
            assert len(made) == 2
    assert ended(made)


def test_graph_optimisation_can_be_turned_off(linear: Artifact) -> None:
    """Fails if ``graph_level`` is ignored. `accel bisect` has to run a model exactly as the file says."""
    levels = onnxruntime.GraphOptimizationLevel
    for asked, level in (("all", levels.ORT_ENABLE_ALL), ("none", levels.ORT_DISABLE_ALL)):
        with OnnxRuntimeSession(linear, SessionOptions(graph_level=asked)) as session:
            options = session.session.get_session_options()
            assert options.graph_optimization_level == level
            assert options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL


def test_float16_goes_in_and_out(tmp_path: Path) -> None:
    """Fails if a session refuses float16 values, or returns them as a wider dtype."""
    kind = (TensorProto.FLOAT16, ["n"])
    model = save(tmp_path / "h.onnx", [helper.make_node("Add", ["x", "x"], ["y"])], {"x": kind}, {"y": kind})
    with open_session(model, "onnxruntime") as session:
        y = session.run({"x": np.array([1.5, -2], np.float16)})["y"]
    assert y.dtype == np.float16
    assert y.tolist() == [3, -4]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("bfloat16", TensorProto.BFLOAT16), ("float8_e4m3fn", TensorProto.FLOAT8E4M3FN)],
)
def test_types_that_numpy_lacks_go_in_and_out_by_their_bits(tmp_path: Path, dtype: str, kind: int) -> None:
    """Fails if the bits of bfloat16 or float8 values are converted like integers, if shapes are lost, or if memory
    is read after it was freed."""
    model = save(
        tmp_path / "b.onnx",
        [
            helper.make_node("Cast", ["x"], ["wide"], to=FLOAT),
            helper.make_node("Add", ["wide", "plain"], ["sum"]),
            helper.make_node("Cast", ["sum"], ["y"], to=kind),
        ],
        {"x": (kind, ["n", 2]), "plain": (FLOAT, ["n", 2])},
        {"y": (kind, ["n", 2]), "sum": (FLOAT, ["n", 2])},
    )
    assert model.signature.input("x").dtype == dtype
    wanted = np.dtype(getattr(ml_dtypes, dtype))
    x = np.array([[1, -2], [0.5, 3]], np.float32)
    with open_session(model, "onnxruntime") as session:
        feeds = {"x": x.astype(wanted), "plain": np.ones((2, 2), np.float32)}
        outputs = [session.run(feeds) for _ in range(20)]
    for found in outputs:
        assert found["y"].dtype == wanted
        assert found["y"].astype(np.float32).tolist() == (x + 1).tolist()
        assert found["sum"].tolist() == (x + 1).tolist()


def test_strings_go_in_and_out(tmp_path: Path) -> None:
    """Fails if object arrays of strings are refused."""
    kind = (TensorProto.STRING, ["n"])
    model = save(tmp_path / "s.onnx", [helper.make_node("Identity", ["x"], ["y"])], {"x": kind}, {"y": kind})
    with open_session(model, "onnxruntime") as session:
        assert session.run({"x": np.array(["a", "bc"], dtype=object)})["y"].tolist() == ["a", "bc"]


def test_weights_beside_the_model_are_found(tmp_path: Path) -> None:
    """Checks that the session finds external weights. A session that loads the model from bytes has no path to the
    weights."""
    model = save(
        tmp_path / "m.onnx",
        [helper.make_node("Add", ["x", "w"], ["y"])],
        {"x": (FLOAT, [3])},
        {"y": (FLOAT, [3])},
        {"w": np.array([1, 2, 3], np.float32)},
        external="m.bin",
    )
    with open_session(model, "onnxruntime") as session:
        assert session.run({"x": np.zeros(3, np.float32)})["y"].tolist() == [1, 2, 3]
    (tmp_path / "m.bin").unlink()
    with pytest.raises(InvalidModel, match=r"m\.bin"):
        open_session(model, "onnxruntime")


def _damaged(linear: Artifact, how: str) -> Path:
    good = linear.path.read_bytes()
    contents = {
        "empty": b"",
        "text": b"this is not a model\n" * 20,
        "truncated": good[: len(good) // 2],
        "flipped": good[:40] + bytes(b ^ 0xFF for b in good[40:80]) + good[80:],
        "no graph": onnx.ModelProto(ir_version=10).SerializeToString(),
    }
    path = linear.path.with_name("bad.onnx")
    path.unlink(missing_ok=True)
    if how in contents:
        path.write_bytes(contents[how])
    return path


@pytest.mark.parametrize("how", ["missing", "empty", "text", "truncated", "flipped", "no graph"])
def test_a_damaged_file_is_one_sentence(linear: Artifact, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Checks that the message names the file, and that the user sees neither the runtime's exception nor its log."""
    path = _damaged(linear, how)
    with pytest.raises(InvalidModel) as caught:
        open_session(unread(path), "onnxruntime")
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert "ONNXRuntimeError" not in message
    assert message.count(str(path)) == 1
    assert capfd.readouterr() == ("", "")


def test_an_operator_without_a_kernel_is_named(tmp_path: Path) -> None:
    """Fails if the error for a valid model with an unsupported operator calls the model damaged."""
    kind = (TensorProto.BFLOAT16, [4])
    model = save(tmp_path / "k.onnx", [helper.make_node("Exp", ["x"], ["y"])], {"x": kind}, {"y": kind})
    with pytest.raises(UnsupportedHere, match="Exp"):
        open_session(model, "onnxruntime")


def test_an_unknown_operator_is_named(tmp_path: Path) -> None:
    """Checks that the error about an unknown operator contains the operator's full name."""
    kind = (FLOAT, [4])
    model = save(tmp_path / "u.onnx", [helper.make_node("Frobnicate", ["x"], ["y"])], {"x": kind}, {"y": kind})
    with pytest.raises(InvalidModel, match="Frobnicate"):
        open_session(model, "onnxruntime")


def test_run_costs_little_more_than_the_runtime_itself(linear: Artifact) -> None:
    """Fails if a run of the session takes much longer than a run of ONNX Runtime itself. The session may add up to four
    times the time of its input checks to the run of ONNX Runtime. The test compares the shortest of many alternating
    runs, because other work on the machine can only lengthen a run."""
    feeds = {"x": np.ones((1, 3), np.float32)}
    with OnnxRuntimeSession(linear, SessionOptions(threads=1)) as session:
        names, raw = session.outputs, session.session
        shortest = {"session": 1.0, "raw": 1.0, "checks": 1.0}
        for _ in range(3000):
            start = time.perf_counter()
            session.run(feeds)
            middle = time.perf_counter()
            raw.run(names, feeds)
            end = time.perf_counter()
            linear.signature.check_feeds(feeds)
            checked = time.perf_counter()
            shortest["checks"] = min(shortest["checks"], checked - end)
            shortest["session"] = min(shortest["session"], middle - start)
            shortest["raw"] = min(shortest["raw"], end - middle)
    assert shortest["session"] - shortest["raw"] < 4 * shortest["checks"], shortest


class BoundOnCpu(OnnxRuntimeSession):
    """Runs the code of the CUDA session on the CPU, so that the test needs no GPU."""

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return self._run_bound(feeds, "cpu")


def test_io_binding_gives_the_same(linear: Artifact) -> None:
    """Fails if outputs change their order, or if runs share memory."""
    with OnnxRuntimeSession(linear, SessionOptions()) as plain, BoundOnCpu(linear, SessionOptions()) as bound:
        _same_on_several_shapes(plain, bound)


def _same_on_several_shapes(plain: BaseSession, bound: BaseSession, tolerance: float = 0.0) -> None:
    kept = []
    for seed in range(10):
        feeds = plain.example_inputs(seed=seed, batch=1 + seed % 3)
        kept.append((plain.run(feeds), bound.run(feeds)))
    for wanted, found in kept:
        assert list(wanted) == list(found)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this onnxruntime was built with CUDA"
)
def test_an_onnxruntime_without_cuda_names_the_extra(linear: Artifact) -> None:
    """Fails if a model for the GPU silently runs on the CPU."""
    with pytest.raises(MissingExtra, match=r"\[cuda\]"):
        OnnxRuntimeCudaSession(linear, SessionOptions())


def test_cuda_gets_tf32_only_if_asked() -> None:
    """Fails if an fp32 session may use TF32, which the CUDA provider does by default."""
    assert with_tf32("CUDAExecutionProvider", False) == ("CUDAExecutionProvider", {"use_tf32": "0"})
    assert with_tf32("CUDAExecutionProvider", True) == ("CUDAExecutionProvider", {"use_tf32": "1"})
    assert with_tf32("CPUExecutionProvider", True) == "CPUExecutionProvider"


@pytest.mark.gpu
@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="needs the extra [cuda]"
)
def test_cuda_gives_the_same(linear: Artifact) -> None:
    """Fails if outputs get the wrong names, or are read before the GPU is done."""
    with OnnxRuntimeSession(linear, SessionOptions()) as plain, open_session(linear, "onnxruntime-cuda") as cuda:
        _same_on_several_shapes(plain, cuda, 1e-3)


def test_a_closed_session_holds_nothing(linear: Artifact) -> None:
    """Fails if a closed session keeps the model and its threads."""
    before = threads()
    session = OnnxRuntimeSession(linear, SessionOptions(threads=2))
    made = threads() - before
    assert len(made) == 1
    session.close()
    assert ended(made)


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnx-rounded"])
def test_a_closed_session_says_so(linear: Artifact, runtime: str) -> None:
    """Fails if a run of a closed session raises an error of Python, or gives outputs."""
    session = open_session(linear, runtime)
    x = np.zeros((1, 3), np.float32)
    session.run({"x": x})
    session.close()
    for run in (lambda: session.run({"x": x}), lambda: session(x), lambda: session.run_many([{"x": x}])):
        with pytest.raises(UsageError, match=r"linear.*is closed; open it again with accel\.load$"):
            run()
