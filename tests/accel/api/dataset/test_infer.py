"""Tests ``accel.infer``: the results of a dataset, in order and once, whatever the columns look like and whatever
fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto

import accel
from accel import cli
from accel.api.dataset import infer as module
from accel.api.dataset import parquet
from accel.api.dataset.columns import Column
from accel.errors import AccelError, BadData, CannotWrite, UsageError
from accel.folders.owner import owned
from accel.signature import TensorSpec
from tests.support import onnx_builder as build

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3)
TABLE = np.arange(10, dtype=np.float32).reshape(5, 2) + 1


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    """Writes the model ``y = x @ WEIGHTS``."""
    nodes = [build.node("MatMul", "x w", "y")]
    shapes: Any = {"x": (FLOAT, ["batch", 4])}, {"y": (FLOAT, ["batch", 3])}
    return build.artifact(tmp_path / "linear.onnx", nodes, *shapes, {"w": WEIGHTS}).path


@pytest.fixture
def lookup(tmp_path: Path) -> Path:
    """Writes a model that looks up ids [batch, length] in ``TABLE``, and masks the result. ``total`` is the sum over
    the length. An id above 4 fails."""
    nodes = [
        build.node("Gather", "table ids", "rows"),
        build.node("Cast", "mask", "float_mask", to=FLOAT),
        build.node("Unsqueeze", "float_mask last", "wide_mask"),
        build.node("Mul", "rows wide_mask", "vectors"),
        build.node("ReduceSum", "vectors middle", "total", keepdims=0),
    ]
    inputs = {"ids": (INT64, ["batch", "length"]), "mask": (INT64, ["batch", "length"])}
    outputs = {"vectors": (FLOAT, ["batch", "length", 2]), "total": (FLOAT, ["batch", 2])}
    numbers = {"table": TABLE, "last": np.array([2]), "middle": np.array([1])}
    return build.artifact(tmp_path / "lookup.onnx", nodes, inputs, outputs, numbers).path


def write(path: Path, rows: int | None = None, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


def results(out: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(file) for file in sorted(out.glob("part-*.parquet")))


def samples(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32)


def numbers(column: pa.ChunkedArray) -> np.ndarray:
    return np.array(column.to_pylist(), np.float32)


def test_each_row_once_in_order(tmp_path: Path, linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a row is lost, repeated or out of order over files, row groups, parts and batches."""
    monkeypatch.setattr(parquet, "_PART_ROWS", 7)
    x = samples(100)
    write(tmp_path / "data/b/two.parquet", 30, x=list(x[60:]), id=range(60, 100))
    write(tmp_path / "data/a.parquet", 25, x=list(x[:60]), id=range(60))
    (tmp_path / "data/readme.txt").write_text("not a dataset")
    found = accel.infer(linear, tmp_path / "data", out=tmp_path / "out", batch=8)
    table = results(tmp_path / "out")
    assert table.column_names == ["id", "y"]
    assert table["id"].to_pylist() == list(range(100))
    np.testing.assert_allclose(numbers(table["y"]), x @ WEIGHTS, rtol=1e-5)
    assert (found.rows, found.failed, found.earlier, found.failed_in) == (100, 0, 0, None)
    assert table.schema.field("y").type == pa.list_(pa.float32(), 3)


def kinds(x: np.ndarray) -> dict[str, pa.Array]:
    flat = pa.array(x.reshape(-1))
    return {
        "list": pa.array(list(x)),
        "large list": pa.array(list(x), pa.large_list(pa.float32())),
        "fixed-size list": pa.FixedSizeListArray.from_arrays(flat, 4),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), [4]), pa.FixedSizeListArray.from_arrays(flat, 4)
        ),
        "double": pa.array(list(x.astype(np.float64))),
        "half": pa.array(list(x.astype(np.float16)), pa.list_(pa.float16())),
    }


@pytest.mark.parametrize("kind", kinds(samples(1)))
def test_kinds_of_columns(tmp_path: Path, linear: Path, kind: str) -> None:
    """Fails if one of the ways in which libraries write tensors into Parquet files gives wrong numbers."""
    x = samples(50).astype(np.float16).astype(np.float32)
    data = write(tmp_path / "x.parquet", 20, x=kinds(x)[kind])
    accel.infer(linear, data, out=tmp_path / "out")
    np.testing.assert_allclose(numbers(results(tmp_path / "out")["y"]), x @ WEIGHTS, rtol=1e-5)


def test_pictures(tmp_path: Path) -> None:
    """Fails if nested lists, or flat lists of a tensor with a fixed shape, are read in the wrong order."""
    nodes = [build.node("Transpose", "x", "y", perm=[0, 2, 3, 1])]
    model = build.artifact(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["batch", 3, 2, 4])}, {"y": (FLOAT, ["batch", 2, 4, 3])}
    ).path
    x = np.random.default_rng(0).random((9, 3, 2, 4), np.float32)
    for name, rows in {"nested": x.tolist(), "flat": x.reshape(9, -1).tolist()}.items():
        data = write(tmp_path / f"{name}.parquet", x=rows)
        accel.infer(model, data, out=tmp_path / name)
        np.testing.assert_array_equal(numbers(results(tmp_path / name)["y"]), x.transpose(0, 2, 3, 1))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=20),
    batch=st.integers(1, 5),
    padded=st.booleans(),
    bad=st.sets(st.integers(0, 19)),
)
def test_rows_of_any_length(
    tmp_path_factory: pytest.TempPathFactory, lookup: Path, lengths: list[int], batch: int, padded: bool, bad: set[int]
) -> None:
    """Fails if a row's outputs depend on the rows beside it, keep padding, or are lost since another row fails."""
    folder = tmp_path_factory.mktemp("lengths")
    draw = np.random.default_rng(0)
    ids = [draw.integers(0, 5, n) for n in lengths]
    bad = {row for row in bad if row < len(ids)}
    if len(bad) == len(ids):
        bad.pop()
    for row in bad:
        ids[row][-1] = 77
    data = write(folder / "x.parquet", ids=ids, mask=[np.ones(n, np.int64) for n in lengths], row=range(len(ids)))
    found = accel.infer(lookup, data, out=folder / "out", batch=batch, pad={"ids": 0, "mask": 0} if padded else None)
    table = results(folder / "out")
    good = [row for row in range(len(ids)) if row not in bad]
    assert table["row"].to_pylist() == good
    for at, row in enumerate(good):
        np.testing.assert_array_equal(np.array(table["vectors"][at].as_py()), TABLE[ids[row]])
        np.testing.assert_allclose(table["total"][at].as_py(), TABLE[ids[row]].sum(0), rtol=1e-6)
    assert found.failed == len(bad)
    if bad:
        aside = pq.read_table(folder / "out/failed")
        assert aside["accel_row"].to_pylist() == sorted(bad)
        assert [row[-1] for row in aside["ids"].to_pylist()] == [77] * len(bad)
        assert all("ids" in reason or "Gather" in reason for reason in aside["accel_error"].to_pylist())


@pytest.mark.parametrize("padded", [False, True])
def test_inputs_of_unequal_lengths(tmp_path: Path, lookup: Path, padded: bool) -> None:
    """Fails if padding hides that a mask is longer or shorter than its ids, so that the row gets an invented result."""
    ids, mask = [[1, 2, 3], [1, 2, 3], [1, 2]], [[1, 1, 1], [1, 1, 1, 1], [1]]
    pad = {"ids": 0, "mask": 0} if padded else None
    data = write(tmp_path / "x.parquet", ids=ids, mask=mask, row=range(3))
    assert accel.infer(lookup, data, out=tmp_path / "out", pad=pad).failed == 2
    assert results(tmp_path / "out")["row"].to_pylist() == [0]
    aside = pq.read_table(tmp_path / "out/failed")["accel_error"].to_pylist()
    assert aside[0] == "the dim 'length' has size 3 in the column ids, but size 4 in the column mask"


def test_rows_that_cannot_be_inputs(tmp_path: Path, linear: Path) -> None:
    """Fails if a null, a short list or an overflow stops the run, or goes into the model as another number."""
    x: list[Any] = [[1.0, 2, 3, 4], None, [1, 2, None, 4], [1, 2, 3], [], [1e300, 0, 0, 0], [0, 0, 0, 1]]
    data = write(tmp_path / "x.parquet", x=pa.array(x, pa.list_(pa.float64())), id=range(7))
    found = accel.infer(linear, data, out=tmp_path / "out")
    assert results(tmp_path / "out")["id"].to_pylist() == [0, 6]
    np.testing.assert_allclose(numbers(results(tmp_path / "out")["y"]), np.array([x[0], x[6]]) @ WEIGHTS)
    aside = pq.read_table(tmp_path / "out/failed").to_pydict()
    assert found.failed == 5
    assert aside["id"] == [1, 2, 3, 4, 5]
    for word, reason in zip(("is null", "a null", "[1, 3]", "[1, 0]", "float32"), aside["accel_error"], strict=True):
        assert word in reason


def test_other_names_and_strings(tmp_path: Path) -> None:
    """Checks renamed columns, kept columns, scalars and strings."""
    nodes = [build.node("Add", "a b", "total"), build.node("Identity", "text", "same")]
    model = build.artifact(
        tmp_path / "m.onnx",
        nodes,
        {"a": (INT64, ["batch"]), "b": (INT64, ["batch"]), "text": (STRING, ["batch"])},
        {"total": (INT64, ["batch"]), "same": (STRING, ["batch"])},
    ).path
    texts = ["", "hé", "x" * 300]
    data = write(tmp_path / "x.parquet", left=[1, 2, 3], b=pa.array([4, 5, 6], pa.int8()), text=texts, id=[7, 8, 9])
    accel.infer(model, data, out=tmp_path / "out", columns={"a": "left"}, keep=["left"])
    assert results(tmp_path / "out").to_pydict() == {"left": [1, 2, 3], "total": [5, 7, 9], "same": texts}


def test_a_fixed_batch(tmp_path: Path) -> None:
    """Fails if the rows that fill up a fixed batch reach the results."""
    model = build.artifact(
        tmp_path / "m.onnx", [build.node("Neg", "x", "y")], {"x": (FLOAT, [4, 2])}, {"y": (FLOAT, [4, 2])}
    ).path
    x = np.arange(20, dtype=np.float32).reshape(10, 2)
    accel.infer(model, write(tmp_path / "x.parquet", x=list(x)), out=tmp_path / "out")
    np.testing.assert_array_equal(numbers(results(tmp_path / "out")["y"]), -x)


def test_an_interrupted_run_goes_on(tmp_path: Path, linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run after an interruption repeats a finished part, loses a row, or takes over a half-written file."""
    monkeypatch.setattr(parquet, "_PART_ROWS", 10)
    x = samples(95)
    data = write(tmp_path / "x.parquet", x=list(x), id=range(95))
    out = tmp_path / "out"
    seen: list[int] = []

    def stop(message: str, fraction: float | None = None) -> None:
        seen.append(1)
        if len(seen) >= 12:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "report", stop)
        with pytest.raises(KeyboardInterrupt):
            accel.infer(linear, data, out=out)
    (out / ".part-00008.parquet.12345678.part").write_bytes(b"half")
    written = {file: file.stat().st_mtime_ns for file in out.glob("part-*")}
    assert 3 <= len(written) < 10
    monkeypatch.setattr(parquet, "_PART_ROWS", 1000)  # the parts are those of the first run
    found = accel.infer(linear, data, out=out)
    assert found.earlier == 10 * len(written)
    assert {file: file.stat().st_mtime_ns for file in written} == written
    assert results(out)["id"].to_pylist() == list(range(95))
    np.testing.assert_allclose(numbers(results(out)["y"]), x @ WEIGHTS, rtol=1e-5)
    assert not list(out.glob(".part*"))
    assert accel.infer(linear, data, out=out).earlier == 95


def test_kill_at_any_time(tmp_path: Path, linear: Path) -> None:
    """Fails if a process that is killed leaves a file that a later run takes for finished, or keeps the folder."""
    x = samples(4000)
    data = write(tmp_path / "x.parquet", 40, x=list(x), id=range(4000))
    out = tmp_path / "out"
    words = [sys.executable, "-m", "accel", "infer", str(linear), "--dataset", str(data), "-o", str(out)]
    for parts in (1, 30):
        with subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and len(list(out.glob("part-*"))) < parts:
                pass
            os.kill(process.pid, signal.SIGKILL)
    accel.infer(linear, data, out=out)
    assert results(out)["id"].to_pylist() == list(range(4000))
    np.testing.assert_allclose(numbers(results(out)["y"]), x @ WEIGHTS, rtol=1e-4)


def refused(kind: type[AccelError], *words: str, **arguments: Any) -> None:
    with pytest.raises(kind) as caught:
        accel.infer(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_what_is_refused(tmp_path: Path, linear: Path, lookup: Path) -> None:
    """Fails if a wrong dataset, folder or argument is found late, or the error doesn't say what to do."""
    out = tmp_path / "out"
    about: dict[str, Any] = {"model": linear, "out": out}
    good = write(tmp_path / "good.parquet", x=list(samples(5)))
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.parquet").write_bytes(good.read_bytes()[:-20])
    (tmp_path / "none.parquet").write_bytes(b"")
    refused(BadData, "does not exist", dataset=tmp_path / "no", **about)
    refused(BadData, "has no files", dataset=tmp_path / "empty", **about)
    for name in ("torn", "none"):
        refused(BadData, "no complete Parquet file", dataset=tmp_path / f"{name}.parquet", **about)
    rowless = write(tmp_path / "rowless.parquet", x=pa.array([], pa.list_(pa.float32())))
    refused(BadData, "has no rows", dataset=rowless, **about)
    refused(BadData, "no column x", "z", "columns=", dataset=write(tmp_path / "z.parquet", z=[1.0]), **about)
    texts = write(tmp_path / "texts.parquet", x=["a", "b"])
    refused(BadData, "holds values of the type string", "float32", dataset=texts, **about)
    deep = write(tmp_path / "deep.parquet", x=[[[1.0, 2, 3, 4]]])
    refused(BadData, "2 axes", "1", dataset=deep, **about)
    short = write(tmp_path / "short.parquet", x=[[1.0, 2]] * 300)
    refused(BadData, "all of the first", "row 0", dataset=short, **about)
    refused(AccelError, "no input q", dataset=good, columns={"q": "x"}, **about)
    refused(AccelError, "no dynamic dim to pad", dataset=good, pad={"x": 0}, **about)
    refused(BadData, "no column w", dataset=good, keep=["w"], **about)
    named = write(tmp_path / "named.parquet", x=list(samples(3)), y=[1, 2, 3])
    refused(UsageError, "column y and an output", "keep=", dataset=named, **about)
    mixed = tmp_path / "mixed"
    write(mixed / "a.parquet", x=list(samples(2)), id=[1, 2])
    write(mixed / "b.parquet", x=list(samples(2)), id=["1", "2"])
    refused(BadData, "has the type string", "keep=", dataset=mixed, **about)
    refused(UsageError, "is a file", model=linear, dataset=good, out=good)
    refused(UsageError, "holds other files", model=linear, dataset=good, out=mixed)


def test_a_folder_with_other_results(tmp_path: Path, linear: Path) -> None:
    """Fails if results of other inputs are mixed, or if two processes write into one folder."""
    out = tmp_path / "out"
    good = write(tmp_path / "good.parquet", x=list(samples(5)), id=range(5))
    accel.infer(linear, good, out=out)
    refused(UsageError, "other kept columns", "out=", model=linear, dataset=good, out=out, keep=[])
    write(good, x=list(samples(5, seed=1)), id=range(5))
    refused(UsageError, "another dataset", model=linear, dataset=good, out=out)
    with owned(out, None):
        refused(CannotWrite, "another run writes", model=linear, dataset=good, out=out)
    (out / "dataset.json").write_text("{")
    refused(UsageError, "is damaged", model=linear, dataset=good, out=out)


def test_damaged_rows(tmp_path: Path, linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if rows that can't be read are left out without an error. The parts before them stay."""
    monkeypatch.setattr(parquet, "_PART_ROWS", 100)
    data = write(tmp_path / "x.parquet", 100, x=list(samples(300)))
    place = pq.read_metadata(data).row_group(2).column(0).data_page_offset
    body = bytearray(data.read_bytes())
    body[place : place + 200] = b"\xff" * 200
    data.write_bytes(bytes(body))
    refused(BadData, "row group 2", "write the file again", model=linear, dataset=data, out=tmp_path / "out")
    assert len(list((tmp_path / "out").glob("part-*"))) >= 1


def test_a_scalar_for_each_row(tmp_path: Path) -> None:
    """Fails if an input without a batch dim gets the value of another row."""
    model = build.artifact(
        tmp_path / "m.onnx",
        [build.node("Mul", "x scale", "y")],
        {"x": (FLOAT, ["batch", 2]), "scale": (FLOAT, [])},
        {"y": (FLOAT, ["batch", 2])},
    ).path
    x, scale = np.ones((4, 2), np.float32), np.arange(4, dtype=np.float32)
    accel.infer(model, write(tmp_path / "x.parquet", x=list(x), scale=scale), out=tmp_path / "out")
    np.testing.assert_array_equal(numbers(results(tmp_path / "out")["y"]), x * scale[:, None])


def test_the_command(tmp_path: Path, linear: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks the options, the exit code, the text and the JSON of ``accel infer --dataset``."""
    data = str(write(tmp_path / "x.parquet", v=[*map(list, samples(5)), [1.0]], id=range(6)))
    out = str(tmp_path / "out")
    words = ["infer", str(linear), "--dataset", data, "-o", out, "--column", "x=v", "--keep", "id"]
    assert cli.run(cli.group, [*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["rows"], body["failed"], body["failed_in"]) == (6, 1, str(tmp_path / "out/failed"))
    assert results(tmp_path / "out").column_names == ["id", "y"]
    assert cli.run(cli.group, words) == 0
    assert "6 rows were finished before" in capsys.readouterr().out
    for wrong, said in {
        ("--dataset", data): "pass -o",
        ("--dataset", data, "-o", "o", "--url", "a:1"): "--url is for --input; leave it out",
        ("--dataset", data, "-o", "o", "--pad", "x"): "e.g. input_ids=0",
        ("--input", "x.npz", "--keep", "id"): "--keep is for --dataset; leave it out",
        (): "either --input",
        ("--input", "x.npz", "--dataset", data): "either --input",
    }.items():
        assert cli.run(cli.group, ["infer", str(linear), *wrong]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "kind", "value"), [("int32", pa.int64(), 2**40), ("int64", pa.float32(), 1.0)])
def test_numbers_that_do_not_fit(dtype: str, kind: pa.DataType, value: Any) -> None:
    """Fails if an integer that doesn't fit wraps, or a float becomes an integer."""
    spec = TensorSpec("n", dtype, ("batch",))
    column = pa.chunked_array([pa.array([1, value], kind)])
    if dtype == "int64":
        with pytest.raises(BadData, match="the input is n:int64"):
            Column("n", column, spec, ())
    else:
        assert Column("n", column, spec, ()).bad == {1: "the column n holds a number that int32 doesn't have"}
