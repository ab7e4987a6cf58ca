"""Proves that accel bench sweeps over shapes and streams, measures energy, and reports in JSON, Markdown and HTML."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rich.console import Console

from accel.artifact import Artifact, Manifest, manifest_path
from accel.errors import UsageError
from accel.optimizer.candidate import CandidateResult
from accel.signature import DimRange, Signature, TensorSpec
from accel.sources.source import Source
from accel.timing import page
from accel.timing.blocks import Block
from accel.timing.columns import named
from accel.timing.energy import EnergyCounter
from accel.timing.paired import Candidate, measure
from accel.timing.report import AsWideAsFits, BenchReport, Row, table
from tests.support.browser import browser, document, screenshot

QUICK = ("--rounds", "5", "--block-seconds", "0.01", "--budget-seconds", "0", "-q")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def save(path: Path, *shape: str | int) -> Path:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Makes an ONNX model that computes ``y = relu(x)`` for ``x`` of float32[batch, length]."""
    return save(tmp_path / "m.onnx", "batch", "length")


def test_a_sweep_measures_every_shape(cli: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    """Fails if a shape is left out or measured at other sizes, or if a report file lacks a shape. Also fails if the
    report says that an ONNX model ran as a CUDA graph."""
    outs = [tmp_path / f"r{ending}" for ending in page.ENDINGS]
    words = [w for out in outs for w in ("-o", out)]
    ran = cli("bench", model, "--batch", "1,3", "--length", "8, 16", "--cuda-graph", *QUICK, "--json", *words)
    assert ran.code == 0, ran.stderr
    points = json.loads(ran.stdout)["points"]
    assert not any("cuda_graph" in p["results"][0]["options"] for p in points)
    assert [p["sizes"] for p in points] == [{"batch": b, "length": n} for b in (1, 3) for n in (8, 16)]
    assert all(p["results"][0]["iterations"] > 0 for p in points)
    assert json.loads(outs[0].read_text()) == json.loads(ran.stdout)
    for out in outs[1:]:
        text = out.read_text()
        assert all(f"batch {b}, length {n}" in text for b in (1, 3) for n in (8, 16))


def test_data_is_brought_to_each_shape(cli: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    """Checks that bench adapts the user's data to each requested batch and length."""
    np.savez(tmp_path / "d.npz", x=np.full((4, 8), 7, np.float32))
    words = ["--data", tmp_path / "d.npz", "--batch", "2", "--length", "4,16"]
    ran = cli("bench", model, *words, *QUICK, "--json")
    assert ran.code == 0, ran.stderr
    assert [p["sizes"] for p in json.loads(ran.stdout)["points"]] == [
        {"batch": 2, "length": 4},
        {"batch": 2, "length": 16},
    ]


def test_a_size_beyond_what_was_declared(cli: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that bench refuses a size outside the declared range before timing begins. The error must name the range
    and the option that widens the range. If the user declares no range of batch sizes, bench must accept more than the
    default of 8 samples."""
    made = Source(model).open()
    signature = made.signature.with_dims({"length": DimRange(8, 16, 32)})
    manifest = Manifest(kind="onnx", signature=signature, files=made.hashes(), properties=made.properties)
    manifest.write(manifest_path(model))
    timed: list[Any] = []

    def measure(_: Any, feeds: Any, **__: Any) -> BenchReport:
        timed.append(feeds)
        raise UsageError("it would be timed")

    monkeypatch.setattr("accel.api.bench.measure", measure)
    for words in (("--length", "8,33"), ("--sizes", "length=33"), ("--sizes", "batch=2,length=33")):
        ran = cli("bench", model, *words, *QUICK)
        assert (ran.code, len(ran.stderr.splitlines()), timed) == (2, 1, []), ran.stderr
        assert "size 33 of dim length is outside the range 8..32" in ran.stderr
        assert "--dim length=8:16:33" in ran.stderr
    assert "it would be timed" in cli("bench", model, "--sizes", "batch=64,length=32", *QUICK).stderr
    assert len(timed) == 1


def test_a_range_that_a_source_has_from_an_artifact(
    cli: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the error of bench about a size outside a dim's range, for an artifact and a source. If the range is from
    the artifact, the error must name the artifact and say how to widen the range. If the user declared the range for
    the source, the error must name the source."""

    def declare(most: int) -> None:
        made = Source(model).open()
        signature = made.signature.with_dims({"length": DimRange(8, 16, most)})
        Manifest(kind="onnx", signature=signature, files=made.hashes(), properties=made.properties).write(
            manifest_path(model)
        )

    monkeypatch.setattr("accel.api.bench.measure", lambda *_, **__: (_ for _ in ()).throw(UsageError("timed now")))
    (tmp_path / "net.py").write_text("import torch\n\ndef make():\n    return torch.nn.ReLU()\n")
    words = ("bench", model, "--against", f"{tmp_path / 'net.py'}:make", "--length", "33", *QUICK)
    declare(32)
    said = cli(*words).stderr
    assert f"size 33 of dim length is outside the range 8..32 of the model {model}; " in said
    assert said.endswith("or export or optimize the model again with --dim length=8:16:33\n")
    declare(33)
    assert "timed now" in cli(*words).stderr
    said = cli(*words, "--dim", "length=8:16:30").stderr
    assert "size 33 of dim length is outside the range 8..30 of the model net.py; " in said
    assert said.endswith("or pass --dim length=8:16:33\n")


def test_a_size_beyond_the_range_of_another_candidate(
    cli: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if bench looks at the baseline's ranges alone, or if a file that was made at the default sizes is timed at
    a larger size without a note that says so. A range that the user declared is refused instead."""
    other = save(tmp_path / "other.onnx", "batch", "length")
    made = Source(other).open()
    stages = ({"name": "simplify", "gates": []},)

    def declare(length: DimRange) -> None:
        signature = made.signature.with_dims({"length": length})
        manifest = Manifest(
            kind="onnx", signature=signature, files=made.hashes(), properties=made.properties, stages=stages
        )
        manifest.write(manifest_path(other))

    declare(DimRange(8, 16, 32))
    for words in (("--sizes", "length=33"), ("--length", "16,33")):
        ran = cli("bench", model, other, *words, *QUICK)
        assert (ran.code, len(ran.stderr.splitlines())) == (2, 1)
        assert f"size 33 of dim length is outside the range 8..32 of the model {other}; " in ran.stderr
    declare(DimRange.default("length"))
    words = ("--sizes", "length=65", "--rounds", "5", "--block-seconds", "0.01", "--json")
    ran = cli("bench", model, other, *words)
    note = "was compared with its source at length 2..64, not at 65; export or optimize it again with --dim"
    assert note in ran.stderr
    assert note in "".join(json.loads(ran.stdout)["notes"])
    assert "not at" not in cli("bench", model, other, *words[2:], "--sizes", "length=64").stderr


def test_the_foot_says_what_speedups_compare() -> None:
    """Fails if a table with a speedup beside medians of another ratio doesn't say why, or if other tables do."""
    rows = [
        {"verdict": "baseline", "median_ms": 2.0, "speedup": 1.0},
        {"verdict": "faster", "median_ms": 1.0, "speedup": 1.7},
    ]
    point = {"noise_floor": 0.02, "baseline": "base", "streams": 1, "results": rows}
    assert page.noise_of(point).endswith(page.PAIRED)
    rows[1]["speedup"] = 2.005
    assert page.PAIRED not in page.noise_of(point)
    rows[1]["speedup"] = 1.7
    assert page.PAIRED not in page.noise_of(point | {"statistic": "fast runs"})  # the warning says it
    assert page.PAIRED not in page.noise_of(point | {"streams": 2})


@pytest.mark.parametrize(
    ("shape", "words", "says"),
    [
        ((2, "length"), ("--batch", "1"), "fixed batch"),
        (("batch", 4), ("--length", "8"), "has no dynamic dim besides the batch"),
        (("batch", "height", "width"), ("--length", "8"), "has the dynamic dims height, width besides the batch"),
        (("batch", "length"), ("--batch", "1,,2"), "write numbers from 1 up"),
        (("batch", "length"), ("--batch", "0"), "write numbers from 1 up"),
        (("batch", "length"), ("--length", "-8"), "write numbers from 1 up"),
        (("batch", "length"), ("-o", "report.pdf"), ".json, .md or .html"),
        (("batch", "length"), ("-o", "report"), ".json, .md or .html"),
        (("batch", "length"), ("--streams", "0"), "x>=1"),
    ],
)
def test_what_makes_no_sense(
    cli: Callable[..., Any], tmp_path: Path, shape: tuple[str | int, ...], words: tuple[str, ...], says: str
) -> None:
    """Checks that bench refuses options that contradict the model before timing begins, and that the message names the
    fix."""
    path = save(tmp_path / "m.onnx", *shape)
    ran = cli("bench", path, *words, *QUICK)
    assert ran.code == 2
    assert says in ran.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_streams_run_at_once_and_share_the_threads(tmp_path: Path) -> None:
    """If a session accepts only one run at a time, bench opens a session for each stream. Checks that the streams run
    at the same time, and share the threads. Each run in this test waits until all streams are in a run."""
    log = tmp_path / "threads"
    signature = Signature((TensorSpec("x", "float32", ("batch",)),), (TensorSpec("y", "float32", ("batch",)),))
    artifact = Artifact(path=Path("m.fake"), kind="fake", signature=signature)
    candidate = Candidate("m", artifact, options={"log": str(log)}, opener="bench_sessions:meeting")
    feeds = {"x": np.ones(3, np.float32)}
    report = measure([candidate], feeds, rounds=5, block_seconds=0.05, threads=6, streams=3)
    row = report.rows[0]
    assert report.streams == 3
    assert set(log.read_text().split()) == {"2"}
    assert row.iterations % 3 == 0
    # Three runs overlap, so the throughput is higher than with one stream.
    assert row.samples_per_second > 1.5 * 3 * 1000 / row.mean_ms
    assert (row.options["threads"], row.options["streams"]) == (6, 3)
    with pytest.raises(UsageError, match="1 or more"):
        measure([candidate], feeds, streams=0)


def test_a_row_says_what_it_ran_with() -> None:
    """Checks that the rows of the report show the session options that differ between candidates. Also checks that the
    text above the table shows the session options that all candidates share."""
    point = body(name="other", options={"threads": 1, "streams": 1, "spinning": False, "graph_level": "extended"})
    point["results"][0]["options"] = {"threads": 2, "streams": 2, "precision": "fp32"}
    titles, first, other = page.cells(point)
    found = [dict(zip(titles, row, strict=True))["session"] for row in (first, other)]
    assert found == ["2 threads, 2 streams", "1 thread, no spinning, graph level extended"]
    assert page.shape_of(point) == "batch 1"
    point["results"][1]["options"] = point["results"][0]["options"]
    assert "session" not in page.cells(point)[0]
    assert page.shape_of(point) == "batch 1, 2 threads, 2 streams"
    assert "throughput" not in page.noise_of(point)
    assert "throughput" in page.noise_of({**point, "streams": 2})


def test_throughput_is_of_the_time_that_passed() -> None:
    """Checks that the throughput of several streams is computed from the elapsed time, not from the sum of the runs'
    latencies."""
    block = Block(times=np.full(10, 4_000_000), seconds=0.02)
    assert block.ms_a_run == pytest.approx(2.0)


def test_energy_is_the_packages_and_wraps(tmp_path: Path) -> None:
    """Fails if the energy of part of a CPU package is counted twice, or if an overflow of the counter gives a negative
    number. Also fails if an unreadable counter stops the benchmark."""
    assert EnergyCounter.find(tmp_path) is None
    for name, value in (("intel-rapl:0", 900), ("intel-rapl:1", 5), ("intel-rapl:0:0", 70), ("intel-rapl", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{value}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("999\n")
    (tmp_path / "intel-rapl:2").mkdir()  # a folder without a readable file
    counter = EnergyCounter.find(tmp_path)
    assert counter is not None
    before = counter.read()
    assert before == (900, 5)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100\n")
    assert counter.joules(before, counter.read()) == pytest.approx(200e-6)


def body(**row: Any) -> dict[str, Any]:
    empty = dict.fromkeys(f.name for f in fields(Row))
    base = {**empty, "name": "base", "median_ms": 1234.5, "speedup": 1.0, "ci95": [1.0, 1.0], "verdict": "baseline"}
    machine = {"cpu": "<b>cpu", "threads": 2, "memory_gb": 4.0, "gpus": [], "system": "Linux", "versions": {"a": "1"}}
    machine |= {"cores": 2, "energy": "not available", "date": "2026-01-01", "load_average": 0.1}
    return {
        "results": [base, {**empty, **row}],
        "baseline": "base",
        "noise_floor": 0.02,
        "sizes": {"batch": 1},
        "environment": machine,
        "seed": 0,
        "streams": 1,
    }


def test_the_terminal_has_the_same_columns() -> None:
    """Fails if the table in a wide terminal lacks a column of the HTML report, shows another value, or renders a name
    as markup. Also checks that the table in a narrow terminal wraps no cell, and lists the columns that it leaves
    out."""
    row = {"median_ms": 26.123, "p90_ms": 30.0, "p99_ms": 123.4, "speedup": 4.0, "ci95": (3.0, 5.0), "cosine": 0.99999}
    phases = {"host_to_device": 0.5, "compute": 2.0, "device_to_host": 0.25}
    rows = (
        Row(name="base", median_ms=1234.5, speedup=1.0, ci95=(1.0, 1.0), verdict="baseline"),
        Row(name="[bold]x", verdict="faster", joules_per_run=0.75, phases_ms=phases, **row),
        Row(name="lost", error="[1] crashed"),
    )
    point = body(name="other")
    report = BenchReport(
        rows=rows, baseline="base", noise_floor=0.02, twin=None, sizes={"batch": 1}, order=(), block_seconds=0.1,
        environment=point["environment"], seed=0,
    )  # fmt: skip
    assert report.warnings == ()
    assert "noisy" not in repr(report)
    noisy = replace(report, noise_floor=25.0)
    assert noisy.too_noisy
    assert repr(noisy).endswith(", too noisy to tell (noise floor 2500%)>")
    hidden = replace(noisy, rows=(rows[0], replace(rows[1], verdict="too noisy")))
    assert "[bold]x too noisy, too noisy to tell (noise floor 2500%)" in repr(hidden)
    for whole in (hidden.table(), hidden._repr_html_()):
        assert "1234" in whole
        assert "26.12" in whole
        assert "too noisy" in " ".join(whole.split())
    other = replace(report, rows=(rows[0], replace(rows[1], cosine=-0.07)))
    assert [line for line in other.warnings if "[bold]x gives other outputs than base (cosine -0.07)" in line]
    alone = replace(rows[0], name="base, 1 thread", median_ms=20.0)
    waiting = replace(report, rows=(rows[0], alone)).warnings
    assert [line for line in waiting if "base is 61.7 times as slow as base, 1 thread" in line]
    assert replace(report, rows=(rows[0], replace(alone, median_ms=1000.0))).warnings == ()
    made = table(report)
    titles, *cells = page.cells(report.to_json())
    assert [column.header for column in made.columns] == titles
    shown = [[cell.plain for cell in column.cells] for column in made.columns]
    assert [list(cells) for cells in zip(*shown, strict=True)] == cells
    second = dict(zip(titles, cells[1], strict=True))
    assert (second["candidate"], second["median ms"], second["p99 ms"]) == ("[bold]x", "26.12", "123.4")
    assert (second["95% interval"], second["verdict"], cells[2][titles.index("verdict")]) == (
        "3.00 to 5.00", "faster", "[1] crashed",
    )  # fmt: skip
    assert cells[0][titles.index("95% interval")] == ""
    for width in (70, 80, 100, 120, 160, 240):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(AsWideAsFits(report))
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= width
        kept = [str(column.header) for column in table(report, width).columns]
        assert {"candidate", "median ms", "speedup", "95% interval", "verdict"} <= set(kept)
        shown = {row[titles.index(title)] for row in cells for title in kept}
        assert not [cell for cell in shown if cell not in text]
        words = " ".join(text.split())
        assert (", ".join(title for title in titles if title not in kept) + ";" in words) == (len(kept) < len(titles))
    assert kept == titles


def test_columns_without_values_are_left_out() -> None:
    """Checks that the report shows every column with values, and no empty column."""
    titles = page.cells(body(name="other", error="crashed"))[0]
    assert "J a run" not in titles
    assert "median ms" in titles
    phases = {"host_to_device": 0.5, "compute": 2.0, "device_to_host": 0.25}
    rows = page.cells(body(name="other", joules_per_run=0.75, phases_ms=phases, verdict="faster"))
    assert dict(zip(rows[0], rows[2], strict=True))["J a run"] == "0.750"
    assert dict(zip(rows[0], rows[2], strict=True))["to device / compute / to host ms"] == "0.500 / 2.00 / 0.250"


def test_a_ratio_below_the_noise_is_not_shown() -> None:
    """Fails if the table or the plot shows the speedup or the interval of a row with the verdict "too noisy". Also
    fails if the JSON form loses the speedup or the interval."""
    point = body(name="other", median_ms=1.0, speedup=189.8, ci95=(10.2, 3655.8), verdict="too noisy")
    titles, _, other = page.cells(point)
    shown = dict(zip(titles, other, strict=True))
    assert [shown[title] for title in ("speedup", "95% interval", "verdict")] == ["-", "-", "too noisy"]
    assert [bar["name"] for bar in page.bars(point)] == ["base"]
    measured = {name: value for name, value in point["results"][1].items() if value is not None}
    row = CandidateResult(name="other", status="passed", measured=measured)
    assert (row.bench_row()["speedup"], row.bench_row()["ci95"]) == (None, None)
    assert row.to_json()["measured"]["speedup"] == 189.8
    (speedup,) = named("speedup")
    assert speedup.text(row.bench_row()) == "too noisy"


@browser
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Checks that every shape and candidate is drawn, and that each bar has the color of its verdict. Also checks that
    the page is dark in a system with a dark color scheme."""
    from PIL import Image

    row = {"median_ms": 1.0, "p99_ms": 1.5, "speedup": 2.0, "ci95": [1.5, 2.5], "verdict": "faster"}
    points = [body(name="a <i>name</i>", **row), body(name="b", **{**row, "verdict": "slower", "ci95": [0.4, 0.6]})]
    points[1]["sizes"] = {"batch": 8}
    page.write(tmp_path / "p.html", {"points": points})
    address = f"file://{tmp_path / 'p.html'}"
    shown = document(tmp_path, address)
    assert [m[1] for m in re.finditer(r"<h2>(.*?)</h2>", shown)] == ["batch 1", "batch 8"]
    assert shown.count("<svg") == 2
    assert shown.count("<circle") == 4
    assert "a &lt;i&gt;name" in shown
    assert "<i>" not in shown
    assert re.findall(r'<g [^>]*class="(\w+)"', shown) == ["baseline", "faster", "baseline", "slower"]
    lightness = []
    for scheme in ("0", "1"):  # dark, light
        shot = screenshot(tmp_path, address, f"--blink-settings=preferredColorScheme={scheme}")
        with Image.open(shot) as picture:
            lightness.append(picture.convert("L").getpixel((3, 690)))
            assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 20
    assert lightness[0] < 60
    assert lightness[1] > 200


class Tags(HTMLParser):
    """Collects every opening HTML tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_offline_and_names_are_text(tmp_path: Path) -> None:
    """Fails if the report renders a name as markup, or loads anything from the network."""
    name = "<script>alert(1)</script> | x\ny"
    point = body(name=name, median_ms=1.0, speedup=2.0, ci95=[1.5, 2.5], verdict="faster")
    page.write(tmp_path / "p.html", point)
    tags = Tags()
    tags.feed((tmp_path / "p.html").read_text())
    names = [tag for tag, _ in tags.seen]
    assert "script" not in names
    assert "b" not in names
    assert not [a for _, attrs in tags.seen for a in attrs if a in ("src", "href")]
    assert name in tags.text
    assert names.count("circle") == 2
    page.write(tmp_path / "p.md", point)
    table = [line for line in (tmp_path / "p.md").read_text().splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_the_axis_holds_all_intervals() -> None:
    """Checks that no interval's bar leaves the plot, and that the bar of a faster candidate is farther to the right."""
    found = page.bars(body(name="other", speedup=4.0, ci95=[3.0, 5.0], verdict="faster"))
    assert all(0 <= bar[key] <= page.WIDTH for bar in found for key in ("low", "value", "high", "one"))
    assert found[1]["low"] < found[1]["value"] < found[1]["high"]
    assert found[0]["value"] == found[0]["one"] < found[1]["low"]
