"""Proves that calibration batch by batch gives the same ranges as calibration on all values at once. Also proves that
calibration takes constant memory and can be resumed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.calibrate import HistogramCollector

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.quantize import calibrate
from accel.converters.quantize import ort as quantize_ort
from accel.converters.quantize.calibrate import Histograms, collect
from accel.converters.quantize.histogram import BINS, Histogram, value_range
from accel.converters.quantize.stage import FORMS, QuantizeConfig, QuantizeFailed, Task, quantize
from accel.errors import BadData
from accel.progress import watched_by
from accel.proof.data import Dataset
from accel.proof.gates import OutputGate
from accel.proof.stream import SampleStream
from accel.signature import DimRange, Signature, TensorSpec
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage

FLOAT = TensorProto.FLOAT
METHODS = ("minmax", "percentile", "entropy", "mse")


def conv_net(path: Path, size: int | str = "height") -> Artifact:
    """Makes a net of two convolutions with a Relu between them, for images of any size."""
    rng = np.random.default_rng(0)
    constants = {
        "w1": (rng.standard_normal((8, 3, 3, 3)) / 5).astype(np.float32),
        "w2": (rng.standard_normal((4, 8, 3, 3)) / 8).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c"], name="first"),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "w2"], ["d"], name="second"),
        helper.make_node("GlobalAveragePool", ["d"], ["y"], name="pool"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 3, size, size if size != "height" else "width"])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 4, 1, 1])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))
    dims = {"height": DimRange(8, 16, 64), "width": DimRange(8, 16, 64)} if size == "height" else {}
    return open_onnx(path, probe=False, dims=dims)


def heavy_tailed(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(3, count) * rng.uniform(0.01, 100)).astype(np.float32)


def at_once(values: np.ndarray) -> Histogram:
    found = Histogram()
    found.add(values)
    return found


@pytest.mark.proof(seconds=20)
@given(st.integers(0, 2**31), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_pieces_give_exactly_what_the_whole_gives(seed: int, pieces: int) -> None:
    """Fails if widening a histogram loses or moves a count, or if the result depends on the order of the batches."""
    parts = [heavy_tailed(seed + i, 300) * 10.0 ** (i % 5 - 2) for i in range(pieces)]
    parts = [part.astype(np.float32) for part in parts]
    streamed = Histogram()
    for part in parts:
        streamed.add(part)
    whole = at_once(np.concatenate(parts))
    assert np.array_equal(streamed.counts, whole.counts)
    assert np.array_equal(streamed.to_row(), whole.to_row())
    # With the same bin edges, NumPy's histogram must have the same counts.
    wanted, _ = np.histogram(np.concatenate(parts).astype(np.float64), whole.edges)
    assert np.array_equal(whole.counts, wanted)
    for method in METHODS:
        assert value_range(streamed, method) == value_range(whole, method)


def test_ranges_are_those_of_the_values_themselves() -> None:
    """Checks that each calibration method finds nearly the same range from a histogram as from the raw values."""
    values = np.concatenate([np.random.default_rng(1).standard_normal(200_000), [40.0, -55.0]]).astype(np.float32)
    found = at_once(values)
    bin_width = float(found.edges[1] - found.edges[0])
    assert value_range(found, "minmax") == (-55.0, 40.0)
    low, high = value_range(found, "percentile", percentile=99.9)
    wanted = np.percentile(values, [0.05, 99.95])
    assert np.abs(np.array([low, high]) - wanted).max() < bin_width
    _, high = value_range(found, "percentile", percentile=99.9, symmetric=True)
    assert abs(high - np.percentile(np.abs(values), 99.9)) < bin_width

    def squared_error(low: float, high: float) -> float:
        scale = (high - low) / 255
        steps = np.clip(np.rint(values / scale), np.rint(low / scale), np.rint(high / scale))
        return float(np.square(steps * scale - values).sum())

    best = squared_error(*value_range(found, "mse"))
    assert best < squared_error(*value_range(found, "minmax"))
    assert best <= 1.05 * min(squared_error(-t, t) for t in np.linspace(2, 55, 200))
    assert value_range(at_once(np.zeros(10, np.float32)), "entropy") == (0.0, 0.0)


def test_infinities_and_nan_are_counted_apart() -> None:
    """Checks that the range of a tensor ignores the -inf of a mask and NaN values."""
    found = at_once(np.array([1, 2, -np.inf, np.nan, 3], np.float32))
    assert value_range(found, "minmax") == (1.0, 3.0)
    assert (found.nonfinite, int(found.counts.sum())) == (2, 3)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_entropy_agrees_with_the_library(scale: float) -> None:
    """Fails if the entropy method's range differs by 20% or more from the range of ONNX Runtime's collector."""
    values = (np.random.default_rng(2).laplace(size=100_000) * scale).astype(np.float32)
    collector = HistogramCollector(
        method="entropy", symmetric=True, num_bins=1024, num_quantized_bins=128, percentile=99.99, scenario="same"
    )
    collector.collect({"x": [values]})
    wanted = float(collector.compute_entropy()["x"][1])
    found = value_range(at_once(values), "entropy", symmetric=True)[1]
    assert abs(found - wanted) < 0.2 * wanted


def stacked(path: Path, sizes: list[int], per_file: int) -> Path:
    """Writes a folder of files with different image sizes."""
    path.mkdir()
    rng = np.random.default_rng(3)
    for index, size in enumerate(sizes):
        images = rng.standard_normal((per_file, 3, size, size + 3)).astype(np.float32) * (1 + index)
        np.savez(path / f"{index:03d}.npz", x=images)
    return path


def test_the_stream_is_the_dataset(tmp_path: Path) -> None:
    """Fails if ``SampleStream`` gives other batches than ``Dataset``, or if ``skip`` drops the wrong batch."""
    src = conv_net(tmp_path / "m.onnx")
    data = stacked(tmp_path / "data", [12, 16, 9], 5)
    (tmp_path / "data" / "003.npz").write_bytes(b"")
    np.savez_compressed(tmp_path / "data" / "003.npz", x=np.asfortranarray(np.ones((3, 3, 8, 10), np.float32)))
    dataset, stream = Dataset.load(data, src.signature), SampleStream(data, src.signature)
    assert len(stream) == len(dataset) == 18
    for size, limit in ((2, None), (4, 7), (32, 11)):
        wanted, found = list(dataset.batches(size, limit)), list(stream.batches(size, limit))
        assert len(wanted) == len(found) == stream.batch_count(size, limit)
        for skip in (0, 1, len(wanted) - 1):
            for a, b in zip(wanted[skip:], stream.batches(size, limit, skip), strict=True):
                assert np.array_equal(a["x"], b["x"])
    for start in range(12):
        for sizes in ({"batch": 1}, {"batch": 3}, {"batch": 11}):
            full = {**dict.fromkeys(src.signature.dims, 7), **sizes}
            wanted_one, found_one = dataset.shaped(full, start), stream.shaped(full, start)
            assert np.array_equal(wanted_one["x"], found_one["x"])


def test_a_fixed_batch_is_kept(tmp_path: Path) -> None:
    """Checks that a model with a fixed batch of two gets two batches of two from five samples, and not the fifth
    sample."""
    signature = Signature((TensorSpec("x", "float32", (2, 3)),))
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 3)))
    assert [len(feeds["x"]) for feeds in SampleStream(tmp_path / "d.npz", signature).batches(4)] == [2, 2]


@pytest.mark.parametrize("what", ["text", "truncated", "pickled", "missing", "nan", "flipped", "too many", "number"])
def test_data_that_cannot_be_streamed(what: str, tmp_path: Path) -> None:
    """Fails if numpy or zipfile raises its own error for a bad file. Also checks that no pickle is loaded, and that
    every checksum is compared. Also fails if the reader trusts a header that declares more samples than the file
    contains."""
    src = conv_net(tmp_path / "m.onnx")
    path = tmp_path / "d.npz"
    images = np.zeros((4, 3, 9, 9), np.float32)
    if what == "pickled":
        np.savez(path, x=np.array([{}], object))  # type: ignore[arg-type]
    elif what == "missing":
        np.savez(path, image=images)
    elif what == "number":
        np.savez(path, x=np.float32(1))
    elif what == "too many":
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "<f4", "fortran_order": False, "shape": (10**12, 3, 9, 9)}
        )
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", header.getvalue() + images.tobytes())
    else:
        images[2] = np.nan if what == "nan" else 0
        np.savez(path, x=images)
    if what == "text":
        path.write_text("no archive")
    elif what == "truncated":
        path.write_bytes(path.read_bytes()[:500])
    elif what == "flipped":
        content = bytearray(path.read_bytes())
        content[600] ^= 1  # after the bit flip, the bytes are still a valid number
        path.write_bytes(content)
    with pytest.raises(BadData, match="sample 2" if what == "nan" else "d.npz"):
        list(SampleStream(path, src.signature).batches(1))


def tensors(src: Artifact) -> Histograms:
    return Histograms(onnx.load(str(src.path)), ["x", "c", "r", "d"])


def test_variable_shapes(tmp_path: Path) -> None:
    """Fails if calibration skips images of another size, or requires one shape for all batches."""
    src = conv_net(tmp_path / "m.onnx")
    stream = SampleStream(stacked(tmp_path / "data", [8, 20, 11], 4), src.signature)
    found = tensors(src)
    collect(found, lambda skip: stream.batches(3, None, skip))
    values = np.concatenate([feeds["x"].ravel() for feeds in stream.batches(99)])
    assert np.array_equal(found.found["x"].counts, at_once(values).counts)
    assert int(found.found["r"].counts.sum()) == sum(4 * 8 * (s - 2) * (s + 1) for s in (8, 20, 11))


SCRIPT = """
    import signal, sys
    from functools import partial
    from pathlib import Path
    import numpy as np, onnx
    from accel.converters.quantize import calibrate
    from accel.converters.quantize.calibrate import Histograms, collect
    from accel.sources.onnx.file import open_onnx
    from accel.proof.stream import SampleStream
    src = open_onnx(Path(sys.argv[1]), probe=False)
    stream = SampleStream(Path(sys.argv[2]), src.signature)
    found = Histograms(onnx.load(sys.argv[1]), ["x", "c", "r", "d"])
    state = Path(sys.argv[3]) if sys.argv[3] else None
    calibrate._SAVE_SECONDS = 0.0
    def batches(skip):
        print("from", skip, flush=True)
        for number, feeds in enumerate(stream.batches(4, None, skip), skip):
            print("batch", number, flush=True)
            if number == int(sys.argv[5]):
                signal.pause()  # until it is killed
            yield feeds
    collect(found, batches, state)
    np.savez(sys.argv[4], **found.state())
    status = Path("/proc/self/status").read_text()  # getrusage would know the peak of the process that started this one
    print("peak", status.partition("VmHWM:")[2].split()[0])
"""


def script(*arguments: object, waits_at: int = -1) -> list[str]:
    """Returns the script's command line. At batch ``waits_at``, the script waits until the test kills it."""
    return [sys.executable, "-c", textwrap.dedent(SCRIPT), *(str(a) for a in (*arguments, waits_at))]


def test_ten_times_the_samples_take_the_same_memory(tmp_path: Path) -> None:
    """Fails if samples or activations accumulate in memory. The second run has ten times as many images, which would
    take 70 MB more if they stayed in memory."""
    src = conv_net(tmp_path / "m.onnx", 64)
    peaks = []
    for count in (160, 1600):
        data = tmp_path / f"{count}.npz"
        np.savez(data, x=np.random.default_rng(4).standard_normal((count, 3, 64, 64)).astype(np.float32))
        done = subprocess.run(
            script(src.path, data, "", tmp_path / f"{count}.out.npz"), capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout.split()[-1]) / 1024)
        data.unlink()
    assert peaks[1] - peaks[0] < 20, peaks


def test_a_killed_calibration_goes_on(tmp_path: Path) -> None:
    """Checks that a calibration that was killed continues after the last saved batch and counts every batch once."""
    src = conv_net(tmp_path / "m.onnx", 64)
    data, state = tmp_path / "d.npz", tmp_path / "state.npz"
    np.savez(data, x=np.random.default_rng(5).standard_normal((80, 3, 64, 64)).astype(np.float32))
    with subprocess.Popen(
        script(src.path, data, state, tmp_path / "a.npz", waits_at=9), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "batch 9\n":
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "a.npz").exists()
    second = subprocess.run(
        script(src.path, data, state, tmp_path / "b.npz"), capture_output=True, text=True, check=True
    )
    assert second.stdout.splitlines()[0] == "from 9"
    subprocess.run(script(src.path, data, "", tmp_path / "c.npz"), capture_output=True, check=True)
    with np.load(tmp_path / "b.npz") as resumed, np.load(tmp_path / "c.npz") as whole:
        for name in whole.files:
            assert np.array_equal(resumed[name], whole[name], equal_nan=name == "rows"), name


def killed_in_the_fifth_batch(task: Task) -> Any:
    """Runs ``run_static`` in a child process that kills itself when it first reaches its fifth batch."""
    calibrate._SAVE_SECONDS = 0.0
    plain = quantize_ort.calibration_feeds

    def feeds(task: Task, size: int, skip: int = 0) -> Iterator[dict[str, np.ndarray]]:
        for number, batch in enumerate(plain(task, size, skip), skip):
            if number == 4 and skip == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    quantize_ort.calibration_feeds = feeds
    return quantize_ort.run_static(task)


def test_a_stage_whose_calibration_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the stage keeps the saved state of a killed calibration until the next run, and that the next run
    continues from this state. Also fails if the ranges differ from the ranges of an uninterrupted run."""
    src = conv_net(tmp_path / "m.onnx", 16)
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(6).standard_normal((32, 3, 16, 16)).astype(np.float32))
    config = QuantizeConfig(data=tmp_path / "d.npz")
    whole = run_stage("quantize", src, config, cache=StageCache(tmp_path / "other"))
    form = replace(FORMS["ort-cpu"], runs={"static": f"{__name__}:killed_in_the_fifth_batch"})
    monkeypatch.setitem(FORMS, "ort-cpu", form)
    cache = StageCache(tmp_path / "cache")
    with pytest.raises(QuantizeFailed, match="SIGKILL"):
        run_stage("quantize", src, config, cache=cache)
    said: list[str] = []
    with watched_by(lambda message, _: said.append(message)):
        made = run_stage("quantize", src, config, cache=cache)
    batches = [message for message in said if message.startswith("calibrating, batch")]
    assert batches == [f"calibrating, batch {number} of 8" for number in (5, 6, 7, 8)]
    assert made.path.read_bytes() == whole.path.read_bytes()
    assert not list((cache.root / "unfinished").glob("*"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "of another model"])
def test_a_damaged_state_is_not_believed(damage: str, tmp_path: Path) -> None:
    """Fails if calibration loads ranges from a state file that is truncated, changed, or written for another model."""
    src = conv_net(tmp_path / "m.onnx")
    feeds = src.signature.example_inputs(batch=2)
    state = tmp_path / "state.npz"
    known: dict[str, Any] = {"done": np.array(1), **tensors(src).state()}
    known["rows"][:] = [3, -1e6, 1e6, 0, 0]  # a planted wrong range
    if damage == "of another model":
        known["names"] = np.array(["a", "b", "c", "d"])
    np.savez(state, **known)
    content = bytearray(state.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 255
    state.write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    found = tensors(src)
    collect(found, lambda skip: iter([feeds][skip:]), state)
    assert found.found["x"].high == feeds["x"].max()
    assert found.found["x"].counts.shape == (BINS,)


def test_a_planted_wrong_range_fails_the_gate(tmp_path: Path) -> None:
    """Fails if the gate passes a model whose activation scale is a thousand times too small."""
    src = conv_net(tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **src.signature.example_inputs(batch=8))  # type: ignore[arg-type]
    made = quantize(src, QuantizeConfig(data=tmp_path / "d.npz"), tmp_path / "q.onnx")
    gate = OutputGate(limit=0.2)
    assert all(result.passed for result in gate.check(src, made))
    model = onnx.load(str(made.path))
    scale = next(t for t in model.graph.initializer if t.name == "x_scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) / np.float32(1000), scale.name))
    onnx.save(model, str(tmp_path / "wrong.onnx"))
    wrong = open_onnx(tmp_path / "wrong.onnx", probe=False, dims=src.signature.dims)
    assert not any(result.passed for result in gate.check(src, wrong))
