"""Proves that accel optimize measures the requested objective, batch and lengths, and that loading keeps the measured
session options."""

from __future__ import annotations

import json
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact, Manifest
from accel.errors import AccelError, BadData, BadInputSpec, UnknownName, UsageError
from accel.machine import available_cores
from accel.optimizer.measure.timing import _a_request
from accel.optimizer.measure.workload import PassCandidate, PassSession, Workload, _few, read_lengths, workload
from accel.proof.stream import SampleStream
from accel.runtimes.base import BaseSession, SessionOptions, open_session
from accel.signature import DimRange, Signature, TensorSpec
from accel.sources.source import Source
from accel.timing.blocks import BlockRunner, Candidate
from accel.timing.paired import measure
from accel.timing.report import Row

TEXT = Signature(
    (TensorSpec("ids", "int64", ("batch", "length"), (0, 99)), TensorSpec("mask", "int64", ("batch", "length"))),
    (TensorSpec("y", "float32", ("batch", 8)),),
    {"batch": DimRange(1, 1, 16), "length": DimRange(4, 16, 128)},
)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Makes a model that multiplies the embeddings of token ids by two matrices and returns the mean over the tokens.
    The batch and the length are dynamic."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 8, name)

    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["words"]),
        helper.make_node("MatMul", ["words", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["each"]),
        helper.make_node("ReduceMean", ["each"], ["y"], axes=[1], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "text",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
        [weight("table", 100, 64), weight("w1", 64, 256), weight("w2", 256, 8)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path_factory.mktemp("text") / "text.onnx"
    onnx.save(model, path)
    return Source(path, inputs=["ids:int64[batch,length]{0..99}"], dims={"length": (4, 16, 128)}).open()


@pytest.mark.proof
@pytest.mark.slow
def test_throughput_as_written(cli: Any, text_model: Artifact, tmp_path: Path) -> None:
    """Fails if accel refuses the options of the throughput objective, or loads the folder without the chosen session
    options. Also checks that the reported samples per second are the batch size divided by the mean time."""
    words = ["optimize", text_model.path, "--input", "ids:int64[batch,length]{0..99}", "--dim", "length=4:16:128"]
    words += ["--objective", "throughput", "--batch", "4", "--lengths", "8,8,64", "--rounds", "5"]
    ran = cli(*words, "--target", "openvino", "--precision", "fp32", "-o", tmp_path / "out", "--json")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    rows = {row["name"]: row for row in body["candidates"]}
    assert {"source", "openvino fp32"} <= set(rows)
    assert any("streams" in name for name in rows)
    for row in rows.values():
        if row["measured"]:
            assert row["measured"]["samples_per_second"] == pytest.approx(4000 / row["measured"]["mean_ms"], rel=0.05)
            assert row["measured"]["p99_ms"] is None
    assert "length 8, 8, 64 in turn" in body["notes"][0]
    chosen = rows[body["chosen"]["name"]]
    assert chosen["name"] == "source" or chosen["measured"]["verdict"] == "faster"
    with accel.load(tmp_path / "out") as session:
        assert session.options == SessionOptions.of(chosen["options"])
        assert len(session.run_many([session.example_inputs(batch=2)] * 5)) == 5
    assert (tmp_path / "out" / "report.html").is_file()
    assert "--lengths 8,8,64" in body["command"]


def test_what_is_recorded_is_what_is_loaded(
    text_model: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that accel.load and accel bench use the session options that accel optimize chose. Also checks that accel
    bench uses the threads and streams that the caller passes."""

    def scripted(source: Any, rows: Any, *_: Any) -> dict[str, Any]:
        for row in (source, *rows):
            ms = 5.0 if row.name.endswith(", no spinning") else 10.0
            verdict = "faster" if ms < 10 else "no measurable difference"
            row.measured = {"median_ms": ms, "round_medians_ms": [ms] * 9, "verdict": verdict}
        return {"noise_floor": 0.02}

    monkeypatch.setattr("accel.optimizer.search.measured", scripted)
    result = accel.optimize(text_model, out=tmp_path / "out", target="ort-cpu", precision="fp32")
    assert result.chosen.endswith(", no spinning")
    options = dict(result.artifact.manifest.session["options"])  # type: ignore[union-attr]
    assert options["spinning"] is False
    with accel.load(tmp_path / "out") as session:
        assert session.options == SessionOptions.of(options)

    seen: list[dict[str, Any]] = []

    def lane(candidate: Candidate, *_: Any) -> None:
        seen.append(dict(candidate.options))
        raise AccelError("enough")

    monkeypatch.setattr("accel.timing.paired.Lane", lane)
    for asked in ({}, {"threads": 1}, {"streams": 3}):
        with pytest.raises(AccelError, match="enough"):
            accel.bench([tmp_path / "out"], **asked)
    assert seen[0] == {"streams": 1, **options}
    assert seen[1] == {"threads": 1, "streams": 1, "spinning": False}
    assert seen[2] == {"threads": available_cores(), "streams": 3, "spinning": False}


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_streams_are_one_session_wherever_it_runs(
    text_model: Artifact, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that accel bench runs an artifact with two streams as two concurrent runs in one session. The commands
    accel optimize and accel serve use concurrent runs in the same way. If the caller asks for one thread, accel bench
    must ignore the two streams in the manifest."""
    feeds = text_model.signature.example_inputs(batch=2, length=8)
    path = text_model.path
    words: dict[str, Any] = {"inputs": ["ids:int64[batch,length]{0..99}"], "dims": {"length": (4, 16, 128)}}
    if runtime == "openvino":
        path = accel.export(path, to="openvino", out=tmp_path / "ir", **words).path
    artifact = Source(path, **words).open() if runtime == "onnxruntime" else Source(path).open()
    recorded = {"runtime": runtime, "options": {"threads": 2, "streams": 2}}
    manifest = Manifest(kind=artifact.kind, signature=artifact.signature, files={}, session=recorded)
    chosen = replace(artifact, manifest=manifest)
    lanes: list[Candidate] = []

    def lane(candidate: Candidate, *_: Any) -> None:
        lanes.append(candidate)
        raise AccelError("enough")

    monkeypatch.setattr("accel.timing.paired.Lane", lane)
    for asked in ({}, {"streams": 2}, {"threads": 1}):
        with pytest.raises(AccelError, match="enough"):
            measure([Candidate("m", chosen)], feeds, **asked)
    opened: list[BaseSession] = []
    together = threading.Barrier(2, timeout=60)
    met: list[int] = []

    def watched(*given: Any) -> BaseSession:
        session = open_session(*given)
        opened.append(session)
        run = session.run

        def both(feeds: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                met.append(together.wait())  # the barrier breaks and the test fails if the runs don't overlap
            return run(feeds)

        monkeypatch.setattr(session, "run", both)
        return session

    monkeypatch.setattr("accel.timing.blocks.open_session", watched)
    for candidate, streams in zip(lanes, (2, 2, 1), strict=True):
        opened.clear()
        met.clear()
        runner = BlockRunner(candidate)
        runner.open()
        runner.first_run([feeds])
        runner._timed([feeds] * 2)
        assert [session.streams for session in opened] == [streams]
        assert sorted(met) == ([0, 1] if streams == 2 else [])
        opened[0].close()
    assert [c.options["threads"] for c in lanes] == [2, available_cores(), 1]


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_several_runs_at_once(text_model: Artifact, runtime: str, tmp_path: Path) -> None:
    """Checks that several threads can send concurrent requests, and that each request gets its own outputs in the right
    order."""
    artifact = text_model
    if runtime == "openvino":
        words: dict[str, Any] = {"inputs": ["ids:int64[batch,length]{0..99}"], "dims": {"length": (4, 16, 128)}}
        accel.export(text_model.path, to="openvino", out=tmp_path / "ir", **words)
        artifact = Source(tmp_path / "ir").open()
    requests = [text_model.signature.example_inputs(seed=i, batch=1 + i % 3, length=4 + i) for i in range(24)]
    with open_session(artifact, runtime, {"threads": 2}) as session:
        assert session.streams == 1
        wanted = [session.run(feeds)["y"] for feeds in requests]
    with open_session(artifact, runtime, {"threads": 2, "streams": 2}) as session:
        assert session.streams == 2
        for _ in range(3):
            for value, found in zip(wanted, session.run_many(requests), strict=True):
                np.testing.assert_allclose(found["y"], value, rtol=1e-4, atol=1e-6)
        found_by: dict[int, list[np.ndarray]] = {}

        def run(number: int) -> None:
            found_by[number] = [session.run(feeds)["y"] for feeds in requests]

        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for found in found_by.values():
            for value, other in zip(wanted, found, strict=True):
                np.testing.assert_allclose(other, value, rtol=1e-4, atol=1e-6)
        assert len(found_by) == 4
        with pytest.raises(AccelError):
            session.run_many([{"ids": np.zeros((1, 4), np.float32)}])


def test_a_pass_is_all_of_its_requests(text_model: Artifact) -> None:
    """A pass runs one request of each length, and then runs the same requests again. Checks that the pass runs every
    length, and returns every request's outputs."""
    mix = tuple(text_model.signature.example_inputs(batch=2, length=n) for n in (4, 16, 32))
    plain = Candidate(name="x", artifact=text_model, runtime="onnxruntime", options={"threads": 1})
    made = PassCandidate(
        name="x", artifact=text_model, runtime="onnxruntime", options={"threads": 1}, mix=mix, repeats=2
    )
    session = PassSession(made)
    ran: list[Any] = []
    inner = session._session.run_many
    session._session.run_many = lambda requests: ran.extend(requests) or inner(requests)  # type: ignore[method-assign,func-returns-value]
    outputs = session.run(mix[0])
    session.close()
    assert [feeds["ids"].shape for feeds in ran] == [(2, 4), (2, 16), (2, 32)] * 2
    with open_session(plain.artifact, plain.runtime, plain.options) as alone:
        for number, feeds in enumerate(mix):
            np.testing.assert_array_equal(outputs[f"y of request {number}"], alone.run(feeds)["y"])


def test_figures_of_a_pass_are_told_by_the_request(text_model: Artifact) -> None:
    """A pass consists of several requests. Fails if the report gives the energy or the phases of the whole pass instead
    of one request. Also fails if the samples per second count a pass as one request, or are computed from the median
    time."""
    mix = tuple(text_model.signature.example_inputs(batch=2, length=n) for n in (4, 16, 32))
    work = Workload(objective="throughput", mix=mix, repeats=2, note="")
    candidate = work.candidate(Candidate(name="x", artifact=text_model, options={"threads": 1}))
    assert isinstance(candidate, PassCandidate)
    session = PassSession(candidate)
    assert session.phases is None  # a CPU runtime doesn't report the phases of a run
    session._session.phases = lambda feeds: {"compute": float(feeds["ids"].shape[1])}  # type: ignore[attr-defined]
    assert session.phases is not None
    a_pass = session.phases(mix[0])
    session.close()
    assert a_pass == {"compute": 2 * (4.0 + 16.0 + 32.0)}
    row = dict.fromkeys(field.name for field in fields(Row)) | {"round_medians_ms": [60.0], "median_ms": 60.0}
    row["samples_per_second"] = 2 / 0.080  # the mean time of a pass, 80 ms, is longer than the median of 60 ms
    found = _a_request(row | {"joules_per_run": 3.0, "phases_ms": a_pass}, [60.0], "onnxruntime", work)
    assert found["joules_per_run"] == 0.5
    assert found["phases_ms"]["compute"] == pytest.approx((4 + 16 + 32) / 3)
    assert found["samples_per_second"] == pytest.approx(2 * 6 / 0.080)
    alone = Workload(objective="latency", mix=mix[:1], repeats=1, note="")
    assert _a_request(row, [60.0], "onnxruntime", alone)["samples_per_second"] == pytest.approx(2 / 0.080)
    assert _a_request(row, [60.0], "onnxruntime", work)["phases_ms"] is None


def test_serving_runs_as_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the server runs one request at a time in a session that can run two requests at once."""
    from accel.serve.protocol.inference import InferenceRequest
    from accel.serve.scheduling.executor import make_executor
    from accel.serve.scheduling.options import Scheduling

    signature = Signature((TensorSpec("x", "float32", ("batch", 2)),), (TensorSpec("y", "float32", ("batch", 2)),))
    together = threading.Barrier(2, timeout=30)

    class Session:
        streams = 2

        def run(self, feeds: Any) -> dict[str, np.ndarray]:
            together.wait()  # the barrier breaks and the test fails if the runs don't overlap
            return {"y": feeds["x"]}

        def close(self) -> None: ...

    executor = make_executor(
        signature,
        Scheduling(max_batch_size=1, eager=False),
        Session,
        name="m",
        version="1",  # type: ignore[arg-type]
    )
    answers: list[Any] = []
    done = threading.Semaphore(0)

    def answer(result: Any) -> None:
        answers.append(result)
        done.release()

    try:
        for _ in range(2):
            executor.submit(InferenceRequest(model="m", inputs={"x": np.ones((1, 2), np.float32)}), answer)
        assert done.acquire(timeout=40)
        assert done.acquire(timeout=40)
    finally:
        executor.close(timeout=5)
    assert all("y" in found.outputs for found in answers)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=300))
def test_few_lengths_stand_for_many(lengths: list[int]) -> None:
    """Checks that accel chooses at most eight lengths, and only lengths in the data. Also checks that the mean of the
    chosen lengths is close to the mean of the data's lengths. The two means may differ by an eighth of the range of
    lengths. The mean matters because the cost of a request grows with its length."""
    found = _few(lengths)
    assert len(found) == min(8, len(lengths))
    assert set(found) <= set(lengths)
    spread = max(lengths) - min(lengths)
    assert abs(np.mean(found) - np.mean(lengths)) <= spread / 8 + 1e-9
    assert abs(np.mean(_few(range(1, 801))) - 400.5) < 1


def test_lengths_in_all_their_forms(tmp_path: Path) -> None:
    """Fails if lengths from a list, a file or the data are misread, or if padding counts as length."""
    assert read_lengths("8, 16,128", TEXT, None) == ("length", [8, 16, 128])
    assert read_lengths([8, 8], TEXT, None) == ("length", [8, 8])
    (tmp_path / "lengths.txt").write_text("8\n16\n16\n")
    assert read_lengths(f"length={tmp_path / 'lengths.txt'}", TEXT, None) == ("length", [8, 16, 16])
    mask = (np.arange(32) < np.array([[5], [32], [9]])).astype(np.int64)
    np.savez(tmp_path / "d.npz", ids=np.zeros((3, 32), np.int64), mask=mask)
    assert read_lengths("data", TEXT, SampleStream(tmp_path / "d.npz", TEXT)) == ("length", [5, 32, 9])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for text, error, words in (
        ("8,x", BadData, "neither numbers nor a file"),
        (str(tmp_path / "binary"), BadData, "whole numbers, one per line"),
        ("0", BadInputSpec, "from 1 on"),
        ("data", UsageError, "pass samples with data="),
        (",", BadInputSpec, "from 1 on"),
    ):
        with pytest.raises(error, match=words):
            read_lengths(text, TEXT, None)
    with pytest.raises(BadInputSpec, match="no dim but the batch"):
        read_lengths("8", Signature((TensorSpec("x", "float32", ("batch", 3)),)), None)


def test_a_workload_that_cannot_be() -> None:
    """Fails if accel optimize measures a batch or length outside the range of the model's dim, or accepts contradictory
    sizes."""
    common: dict[str, Any] = {"objective": "latency", "sizes": {}, "batch": None, "lengths": None, "cores": 2}
    for change, error, words in (
        ({"lengths": "8,256"}, BadInputSpec, r"pass dims=\{'length': '4:16:256'\}"),
        ({"batch": 32}, BadInputSpec, r"pass dims=\{'batch': '1:1:32'\}"),
        ({"batch": 0}, BadInputSpec, "at least 1"),
        ({"batch": 2, "sizes": {"batch": 4}}, UsageError, "contradict"),
        ({"lengths": "8", "sizes": {"length": 4}}, UsageError, "given twice"),
        ({"objective": "speed"}, UsageError, "latency, throughput"),
    ):
        with pytest.raises(error, match=words):
            workload(TEXT, None, **(common | change))
    fixed = Signature((TensorSpec("x", "float32", (2, 3)),))
    with pytest.raises(BadInputSpec, match="batch is fixed"):
        workload(fixed, None, **(common | {"batch": 4}))
    assert workload(fixed, None, **(common | {"batch": 2})).mix[0]["x"].shape == (2, 3)
    made = workload(TEXT, None, **(common | {"objective": "throughput", "lengths": "8,16,128", "batch": 4}))
    assert (len(made.mix), made.requests) == (3, 9)
    assert [feeds["ids"].shape for feeds in made.mix] == [(4, 8), (4, 16), (4, 128)]


def test_session_options_that_are_none() -> None:
    """Fails if accel accepts an unknown or nonsensical session option."""
    with pytest.raises(UnknownName, match="unknown session option 'thread'"):
        SessionOptions.of({"thread": 2})
    with pytest.raises(UnknownName, match="graph level"):
        SessionOptions(graph_level="most")
    with pytest.raises(UsageError, match="streams"):
        SessionOptions(streams=0)


def test_the_note_names_every_measured_size(text_model: Artifact) -> None:
    """Fails if the note about the measured sizes leaves out the batch when there are several lengths. If accel measures
    only some of the given lengths, the note must say that the measured lengths are quantiles."""

    def note(lengths: list[int], batch: int | None) -> str:
        return workload(
            text_model.signature, None, objective="latency", sizes={}, batch=batch, lengths=lengths, cores=1
        ).note

    assert note([8, 64], 4) == "measured at batch 4, length 8, 64 in turn"
    assert note([8, 64], None).startswith("measured at batch ")
    assert note([*range(4, 20)], 2) == (
        "measured at batch 2, length 5, 7, 9, 11, 13, 15, 17, 19 in turn (quantiles of 16 lengths)"
    )
