"""Proves that the OpenVINO session agrees with ONNX Runtime on the ONNX file that the IR was converted from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.errors import (
    AccelError,
    BadFeeds,
    InvalidModel,
    SizeBeyond,
    UnknownName,
    UnsupportedHere,
    UsageError,
    ValuesOutOfRange,
)
from accel.runtimes import openvino as runtime_module
from accel.runtimes.base import SessionOptions, open_session
from accel.signature import DimRange, numpy_dtype
from accel.sources.onnx.file import open_onnx
from tests.support.cpu_features import has_bf16

pytest.importorskip("openvino")

from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig, openvino_from_onnx
from accel.runtimes.openvino import OpenVinoSession

FLOAT = TensorProto.FLOAT
Make = Callable[..., Artifact]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns ``make(nodes, inputs, outputs, constants)``, which writes the graph as an IR and as an ONNX file."""

    def built(
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[tuple[str, int, Sequence[int | str]]],
        outputs: Sequence[tuple[str, int, Sequence[int | str]]],
        constants: dict[str, np.ndarray] | None = None,
    ) -> Artifact:
        path = tmp_path_factory.mktemp("ir") / "model.onnx"
        graph = helper.make_graph(
            list(nodes),
            "g",
            [helper.make_tensor_value_info(*row) for row in inputs],
            [helper.make_tensor_value_info(*row) for row in outputs],
            [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        path.write_bytes(model.SerializeToString())
        return openvino_from_onnx(open_onnx(path, probe=False), OpenVinoFromOnnxConfig(), path.with_suffix(".xml"))

    return built


@pytest.mark.parametrize(
    ("node", "by", "largest"),
    [
        (helper.make_node("Mod", ["x", "by"], ["y"]), 1000, 2**24),
        (helper.make_node("Less", ["x", "by"], ["y"]), 2**30, 2**31 - 1),
        (helper.make_node("ScatterElements", ["x", "by", "x"], ["y"]), [0], 2**31 - 1),
    ],
    ids=["computed", "compared", "moved"],
)
def test_integers_that_openvino_rounds_are_refused(make: Make, node: onnx.NodeProto, by: object, largest: int) -> None:
    """Fails if OpenVINO drops the upper 32 bits of a hash or a time, or computes with it in float32. Also fails if an
    integer is refused that OpenVINO handles exactly."""
    dtype = TensorProto.BOOL if node.op_type == "Less" else TensorProto.INT64
    made = make([node], [("x", TensorProto.INT64, ["n"])], [("y", dtype, ["n"])], {"by": np.array(by)})
    with open_session(made) as session, open_session(open_onnx(made.path.with_suffix(".onnx"), probe=False)) as source:
        for value in (largest, -largest, 12345):
            feeds = {"x": np.array([value])}
            assert session.run(feeds)["y"] == source.run(feeds)["y"]
        for value in (largest + 1, -largest - 2, 2**40):
            with pytest.raises(ValuesOutOfRange, match=rf"'x' holds {value}, .* OpenVINO computes these integers in"):
                session.run({"x": np.array([value])})


@pytest.fixture(scope="module")
def mlp(make: Make) -> Artifact:
    """Makes a model with two inputs and two outputs that aren't in alphabetical order. The model has a large matrix
    product, and the rounding error of the product shows the precision of the computation."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["z", "w"], ["h"]),
        helper.make_node("Add", ["h", "a"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["b"]),
        helper.make_node("ReduceSum", ["sum", "axis"], ["total"], keepdims=0),
    ]
    constants = {"w": rng.standard_normal((256, 64)).astype(np.float32), "axis": np.array([1])}
    inputs = [("z", FLOAT, ["batch", 256]), ("a", FLOAT, ["batch", 64])]
    return make(nodes, inputs, [("total", FLOAT, ["batch"]), ("b", FLOAT, ["batch", 64])], constants)


def reference(artifact: Artifact, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with open_session(open_onnx(artifact.path.with_suffix(".onnx"), probe=False), "onnxruntime") as session:
        return session.run(feeds)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_outputs_by_name_at_several_sizes(mlp: Artifact) -> None:
    """Fails if inputs or outputs are matched by position, or if a run uses the batch size of an earlier run."""
    with OpenVinoSession(mlp, SessionOptions(threads=1)) as session:
        for batch in (1, 5, 2):
            feeds = session.example_inputs(batch=batch)
            found, wanted = session.run(dict(reversed(feeds.items()))), reference(mlp, feeds)
            assert list(found) == ["total", "b"]
            for name, value in wanted.items():
                assert found[name].shape == value.shape
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-4)


def test_fp32_is_computed_in_fp32(mlp: Artifact) -> None:
    """Fails if OpenVINO chooses the precision itself. On a CPU with bfloat16, OpenVINO would choose bfloat16."""
    with OpenVinoSession(mlp, SessionOptions(threads=1)) as session:
        feeds = session.example_inputs(batch=4)
        assert error(session.run(feeds)["b"], reference(mlp, feeds)["b"]) < 1e-6


def test_bf16_is_computed_in_bf16_or_refused(mlp: Artifact) -> None:
    """Checks that precision="bf16" has an effect, or gives an error on a CPU without bfloat16."""
    options = SessionOptions(threads=1, precision="bf16")
    if not has_bf16():
        with pytest.raises(UnsupportedHere, match="no bf16"):
            OpenVinoSession(mlp, options)
        return
    with OpenVinoSession(mlp, options) as session:
        feeds = session.example_inputs(batch=4)
        found = session.run(feeds)["b"]
        assert found.dtype == np.float32
        assert 1e-5 < error(found, reference(mlp, feeds)["b"]) < 2e-2


def test_a_cpu_without_bf16_refuses_it() -> None:
    """Checks that the session accepts precision="bf16" only on a CPU with bfloat16."""
    settings = runtime_module._settings
    with pytest.raises(UnsupportedHere, match="precision fp32"):
        settings(SessionOptions(precision="bf16"), ["FP32", "INT8"])
    assert settings(SessionOptions(precision="bf16"), ["FP32", "BF16"])["INFERENCE_PRECISION_HINT"] == "bf16"
    assert settings(SessionOptions(threads=3), [])["INFERENCE_NUM_THREADS"] == 3
    assert "INFERENCE_NUM_THREADS" not in settings(SessionOptions(), [])
    with pytest.raises(UnknownName, match="fp32 or bf16"):
        settings(SessionOptions(precision="int4"), [])


def test_outputs_survive_the_next_run(mlp: Artifact) -> None:
    """Fails if an output is a view of memory that the next run overwrites."""
    with OpenVinoSession(mlp, SessionOptions(threads=1)) as session:
        first = session.run(session.example_inputs(batch=2, seed=1))
        kept = {name: value.copy() for name, value in first.items()}
        session.run(session.example_inputs(batch=2, seed=2))
        for name, value in kept.items():
            np.testing.assert_array_equal(first[name], value)


def test_inputs_are_left_alone_and_need_not_stay(mlp: Artifact) -> None:
    """Fails if a run writes to its input arrays, or refuses strided or read-only arrays."""
    with OpenVinoSession(mlp, SessionOptions(threads=1)) as session:
        feeds = session.example_inputs(batch=3)
        wanted = session.run(feeds)
        awkward = {"z": np.asfortranarray(feeds["z"]), "a": np.repeat(feeds["a"], 2, axis=1)[:, ::2]}
        for value in awkward.values():
            value.flags.writeable = False
        for _ in range(3):
            found = session.run(awkward)
            np.testing.assert_array_equal(found["b"], wanted["b"])
        assert all(np.array_equal(awkward[name], feeds[name]) for name in feeds)


KINDS = {
    "float32": FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8, "int32": TensorProto.INT32, "int64": TensorProto.INT64, "uint16": TensorProto.UINT16,
    "bool": TensorProto.BOOL,
}  # fmt: skip


def test_every_dtype_goes_through(make: Make) -> None:
    """Fails if values or dtypes change between numpy and OpenVINO, or if the session refuses a read-only array.
    OpenVINO's Python API has no bfloat16."""
    nodes = [helper.make_node("Reshape", [dtype, "shape"], [f"{dtype}_out"]) for dtype in KINDS]
    inputs = [(dtype, kind, ["batch", 4]) for dtype, kind in KINDS.items()]
    outputs = [(f"{dtype}_out", kind, ["half", 2]) for dtype, kind in KINDS.items()]
    artifact = make(nodes, inputs, outputs, {"shape": np.array([-1, 2])})
    bits = np.array([[0, 1, 1, 0], [1, 0, 0, 1]])
    feeds = {dtype: bits.astype(numpy_dtype(dtype)) for dtype in KINDS}
    for writeable in (True, False):
        for values in feeds.values():
            values.flags.writeable = writeable
        with OpenVinoSession(artifact, SessionOptions(threads=1)) as session:
            found = session.run(feeds)
        for dtype, values in feeds.items():
            assert found[f"{dtype}_out"].dtype == values.dtype
            np.testing.assert_array_equal(found[f"{dtype}_out"], values.reshape(-1, 2))


def test_scalars_and_empty_arrays(make: Make) -> None:
    """Fails if an input without dims gets a dim, or if the session refuses an empty array."""
    node = helper.make_node("Add", ["x", "s"], ["y"])
    artifact = make([node], [("x", FLOAT, ["n", 2]), ("s", FLOAT, [])], [("y", FLOAT, ["n", 2])])
    with OpenVinoSession(artifact, SessionOptions(threads=1)) as session:
        step = np.array(2.0, np.float32)
        np.testing.assert_array_equal(
            session.run({"x": np.ones((3, 2), np.float32), "s": step})["y"], np.full((3, 2), 3)
        )
        assert session.run({"x": np.ones((0, 2), np.float32), "s": step})["y"].shape == (0, 2)


def test_wrong_feeds(mlp: Artifact) -> None:
    """Fails if the session accepts an input with a wrong dtype, or accepts a missing input."""
    with OpenVinoSession(mlp, SessionOptions(threads=1)) as session:
        feeds = session.example_inputs(batch=2)
        with pytest.raises(BadFeeds, match="float64"):
            session.run(feeds | {"a": feeds["a"].astype(np.float64)})
        with pytest.raises(BadFeeds, match="missing input 'z'"):
            session.run({"a": feeds["a"]})


def test_an_index_beyond_the_table(make: Make) -> None:
    """Fails if an index beyond the table returns an arbitrary row. OpenVINO itself returns an arbitrary row."""
    node = helper.make_node("Gather", ["table", "ids"], ["rows"])
    table = {"table": np.arange(12, dtype=np.float32).reshape(4, 3)}
    made = make([node], [("ids", TensorProto.INT64, ["n"])], [("rows", FLOAT, ["n", 3])], table)
    (spec,) = made.signature.inputs
    bounded = replace(made, signature=replace(made.signature, inputs=(replace(spec, values=(0, 3)),)))
    good = {"ids": np.array([1], np.int64)}
    for streams in (1, 2):
        with OpenVinoSession(bounded, SessionOptions(threads=2, streams=streams)) as session:
            for ids in ([4], [-1, 0], [0, 1, 99_999]):
                with pytest.raises(BadFeeds, match=r"it takes 0\.\.3"):
                    session.run({"ids": np.array(ids, np.int64)})
                with pytest.raises(BadFeeds, match=r"it takes 0\.\.3"):
                    session.run_many([good, {"ids": np.array(ids, np.int64)}, good])
            assert len(session.run_many([good] * 5)) == 5
    with OpenVinoSession(bounded, SessionOptions(threads=1)) as session:
        np.testing.assert_array_equal(session.run({"ids": np.array([3, 0])})["rows"], table["table"][[3, 0]])
        assert session.run({"ids": np.empty(0, np.int64)})["rows"].shape == (0, 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_openvino_cant_run_is_an_error_once(threads: int, precision: str, make: Make) -> None:
    """Checks that the user sees an accel error instead of OpenVINO's own error if a matrix product can't multiply two
    valid input shapes. The session must be able to run again. Without accel's checks, OpenVINO with one thread would
    return the outputs of the run before, and a bfloat16 session could never run again."""
    if precision == "bf16" and not has_bf16():
        pytest.skip("this CPU has no bfloat16")
    node = helper.make_node("MatMul", ["x", "y"], ["z"])
    artifact = make([node], [("x", FLOAT, ["a", "b"]), ("y", FLOAT, ["c", "d"])], [("z", FLOAT, ["a", "d"])])
    with OpenVinoSession(artifact, SessionOptions(threads=threads, precision=precision)) as session:
        for step in range(1, 3):
            good = {"x": np.full((2, 3), step, np.float32), "y": np.ones((3, 5), np.float32)}
            for _ in range(2):
                np.testing.assert_array_equal(session.run(good)["z"], np.full((2, 5), 3 * step, np.float32))
            with pytest.raises(AccelError, match=r"can't run .* at x \[2, 3\], y \[4, 5\]: .*incompatible") as caught:
                session.run({"x": np.ones((2, 3), np.float32), "y": np.ones((4, 5), np.float32)})
            assert "\n" not in str(caught.value)


def test_a_size_that_is_too_large(make: Make) -> None:
    """Fails if the error of a run at a larger size than the declared sizes doesn't name the dim."""
    node = helper.make_node("MatMul", ["x", "y"], ["z"])
    made = make([node], [("x", FLOAT, ["a", "b"]), ("y", FLOAT, ["c", "d"])], [("z", FLOAT, ["a", "d"])])
    signature = replace(made.signature, dims={**made.signature.dims, "c": DimRange(1, 2, 3)})
    with (
        OpenVinoSession(replace(made, signature=signature), SessionOptions()) as session,
        pytest.raises(SizeBeyond, match=r"c is 4, beyond its range 1\.\.3: give smaller inputs"),
    ):
        session.run({"x": np.ones((2, 3), np.float32), "y": np.ones((4, 5), np.float32)})


def test_one_of_many_that_openvino_cant_run(make: Make) -> None:
    """Checks that one bad request among concurrent requests gives an error with the shape of the bad request. Also
    checks that the other requests end, and that the session can run again."""
    node = helper.make_node("MatMul", ["x", "y"], ["z"])
    artifact = make([node], [("x", FLOAT, ["a", "b"]), ("y", FLOAT, ["c", "d"])], [("z", FLOAT, ["a", "d"])])

    def feeds(rows: int, inner: int) -> dict[str, np.ndarray]:
        return {"x": np.full((rows, 3), rows, np.float32), "y": np.ones((inner, 5), np.float32)}

    good = [feeds(rows, 3) for rows in range(1, 9)]
    with OpenVinoSession(artifact, SessionOptions(threads=2, streams=2)) as session:
        for place in (0, 5, 8):
            bad = [*good[:place], feeds(7, 4), *good[place:]]
            with pytest.raises(AccelError, match=r"can't run .* at x \[7, 3\], y \[4, 5\]"):
                session.run_many(bad)
            for wanted, found in zip(good, session.run_many(good), strict=True):
                np.testing.assert_array_equal(found["z"], wanted["x"] @ wanted["y"])
            np.testing.assert_array_equal(session.run(good[1])["z"], np.full((2, 5), 6, np.float32))


def test_closed_is_closed(mlp: Artifact) -> None:
    """Checks that a closed session doesn't run, and can be closed twice."""
    session = OpenVinoSession(mlp, SessionOptions(threads=1))
    feeds = session.example_inputs(batch=1)
    session.close()
    session.close()
    with pytest.raises(UsageError, match="closed; open it again with accel"):
        session.run(feeds)


@pytest.mark.parametrize("part", [".xml", ".bin"])
@pytest.mark.parametrize("damage", ["missing", "half"])
def test_a_damaged_ir_is_not_loaded(part: str, damage: str, mlp: Artifact, tmp_path: Path) -> None:
    """Fails if a missing or truncated file ends in OpenVINO's own error."""
    for file in mlp.files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / mlp.path.name
    target = path.with_suffix(part)
    if damage == "missing":
        target.unlink()
    else:
        target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
    broken = Artifact(path=path, kind="openvino", signature=mlp.signature)
    with pytest.raises(
        InvalidModel, match=r"convert the model again|put both files of the IR into one folder"
    ) as caught:
        OpenVinoSession(broken, SessionOptions())
    assert "\n" not in str(caught.value)


def test_a_signature_of_another_model(mlp: Artifact, make: Make) -> None:
    """Fails if a session opens with names that are not in the IR."""
    other = make([helper.make_node("Relu", ["q"], ["r"])], [("q", FLOAT, [4])], [("r", FLOAT, [4])])
    mixed = Artifact(path=mlp.path, kind="openvino", signature=other.signature)
    with pytest.raises(InvalidModel, match=r"has no tensor 'q' \(its tensors: a, z\); convert the model again"):
        OpenVinoSession(mixed, SessionOptions())


def test_overhead_of_a_run(make: Make) -> None:
    """Fails if a run takes much longer than OpenVINO's own call, for example because the session searches names or
    copies arrays twice."""
    node = helper.make_node("Add", ["x", "y"], ["z"])
    artifact = make([node], [("x", FLOAT, ["batch", 64]), ("y", FLOAT, ["batch", 64])], [("z", FLOAT, ["batch", 64])])
    with OpenVinoSession(artifact, SessionOptions(threads=1)) as session:
        feeds = session.example_inputs(batch=4)
        session.run(feeds)
        slot = session._free.get()
        session._free.put(slot)

        def own_call() -> None:  # ``run`` makes the same two calls if the session has one thread
            slot.request.start_async()
            slot.request.wait()

        def microseconds(call: Callable[[], object]) -> float:
            times = []
            for _ in range(400):
                started = time.perf_counter()
                call()
                times.append(time.perf_counter() - started)
            return statistics.quantiles(times, n=10)[0] * 1e6

        overhead = min(microseconds(lambda: session.run(feeds)) - microseconds(own_call) for _ in range(5))
    assert overhead < 100  # on an idle machine, ``run`` adds about 30 µs to OpenVINO's own call


def test_narrower_integers(make: Make) -> None:
    """Fails if a session of either runtime refuses int32 ids for an int64 input, alone or among several requests, or
    if it takes int64 for int32."""
    row = [("ids", TensorProto.INT64, ["batch", 3]), ("small", TensorProto.INT32, ["batch", 3])]
    nodes = [
        helper.make_node("Cast", ["small"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Add", ["ids", "wide"], ["y"]),
    ]
    made = make(nodes, row, [("y", TensorProto.INT64, ["batch", 3])])
    ids, small = np.array([[1, 2, 3]]), np.array([[10, 20, 30]], np.int32)
    wanted = ids + small
    for artifact in (made, open_onnx(made.path.with_suffix(".onnx"), probe=False)):
        with open_session(artifact, options={"streams": 2, "threads": 2}) as session:
            feeds = {"ids": ids.astype(np.int32), "small": small.astype(np.uint8)}
            assert np.array_equal(session.run(feeds)["y"], wanted)
            assert all(np.array_equal(found["y"], wanted) for found in session.run_many([feeds] * 3))
            assert np.array_equal(session(torch.tensor(ids, dtype=torch.int32), torch.tensor(small)), wanted)
            with pytest.raises(BadFeeds, match="'small' has dtype int64, but the model takes int32; cast the input to"):
                session.run({"ids": ids, "small": ids})
