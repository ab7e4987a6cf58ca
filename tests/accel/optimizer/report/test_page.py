"""Proves that report.html of accel optimize shows the whole search, in a real browser and without a network."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accel
from accel.artifact import Artifact, Manifest
from accel.converters.quantize.sensitivity import Sensitivity
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.judge.comparison import Judgement
from accel.optimizer.mixed.trajectory import Trajectory, Try
from accel.optimizer.report.page import Axis, figures, pareto, sensitivity, write_page
from accel.signature import Signature, TensorSpec
from tests.support.browser import browser, chromium

HOSTILE = "</title></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&amp;"


def looked_at(page: Path, *words: str) -> str:
    """Runs Chromium with the given arguments and returns Chromium's output. Chromium opens the page from the disk,
    without a network."""
    command = chromium(page.parent, "--window-size=1100,1700", "--virtual-time-budget=2000", *words, f"file://{page}")
    for _ in range(2):  # tries again if the browser itself crashes, because a crash says nothing about the page
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ran.returncode == 0:
            return ran.stdout
    pytest.fail(ran.stderr[-500:])


def candidate(name: str, ms: float | None, drop: float | None, status: str = "passed", **more: Any) -> CandidateResult:
    measured = None
    if ms is not None:
        percentiles = [ms * f for f in (0.9, 0.92, 0.94, 0.97, 1.0, 1.05, 1.2, 1.4, 1.9)]
        measured = {
            "median_ms": ms, "p99_ms": 1.9 * ms, "speedup": 10 / ms, "ci95": [9.8 / ms, 10.2 / ms],
            "samples_per_second": 1000 / ms, "percentiles_ms": percentiles,
        }  # fmt: skip
    judgement = None
    if drop is not None:
        judgement = Judgement(drop=drop, metric=None, reference_metric=None, max_abs_diff=0.1, judged_on="x")
    return CandidateResult(name=name, status=status, measured=measured, judgement=judgement, **more)


def artifact(name: str = "model") -> Artifact:
    """Makes an artifact ``name`` with one stage. The stage has a value for everything that a report can show."""
    gate = {
        "gate": "outputs", "case": f"batch=1 {name}", "output": name, "metric": "rel_l2", "value": 0.003, "limit": 0.02,
        "passed": True, "note": "",
    }  # fmt: skip
    kernels = [
        {"name": name, "type": "gemm", "inputs": ["float16"], "outputs": ["float16"], "onnx": [name, "relu"]},
        {"name": "reformat", "type": "copy", "inputs": ["float32"], "outputs": ["float16"], "onnx": []},
    ]
    record = {
        "name": "engine_from_onnx", "key": "k", "options": {"toolkit": name, "profiles": []}, "versions": {"onnx": "1"},
        "input": "0" * 64, "input_path": "/x", "output": ["1" * 64], "seconds": 1.5, "gates": [gate],
        "notes": {"kernels": kernels, "kept_fp32": [{"node": name, "op": "Exp", "reason": name}]},
    }  # fmt: skip
    signature = Signature((TensorSpec("x", "float32", ("batch", 2)),))
    source = {"spec": name, "files": [{"path": f"/{name}", "sha256": "2" * 64}]}
    manifest = Manifest(
        kind="engine", signature=signature, files={"model.engine": "3" * 64}, source=source, stages=(record,)
    )
    return Artifact(path=Path("model.engine"), kind="engine", signature=signature, manifest=manifest, source=source)


def written(path: Path, name: str = "model", notes: tuple[str, ...] = ("measured at x [1, 2]",)) -> str:
    made = artifact(name)
    rows = [
        candidate("source", 10.0, None, artifact=None),
        candidate(f"best {name}", 2.5, 0.004, "chosen", artifact=made),
        candidate("wrong", 1.5, 0.4, "rejected", reason=f"drop 0.4 is over the budget {name}", artifact=made),
        candidate("broken", None, math.inf, "rejected", reason="NaN"),
        candidate("late", None, None, "not tried", reason="8 s of the budget of 9 s were spent before it was measured"),
    ]
    write_page(
        path,
        title=name,
        artifact=made,
        candidates=rows,
        max_drop=0.01,
        environment={"cpu": name, "versions": {"onnx": "1"}, "load_average": None},
        notes=notes,
        command=f"accel optimize '{name}' -o out",
        objective="latency",
    )
    return path.read_text(encoding="utf-8")


@browser
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Fails if a part of the page is missing, or if a point lies outside the plot. Also checks that the page draws a
    more accurate candidate higher, and a faster candidate farther left."""
    text = written(tmp_path / "report.html")
    # The page loads no files and runs no code.
    assert not re.search(r"(src|href)=|https?://|@import|url\(|<script", text)
    shown = looked_at(tmp_path / "report.html", "--dump-dom")
    for part in ('id="pareto"', 'id="candidates"', 'id="latency"', 'id="stages"', 'class="sensitivity"', 'id="kernels"',
                 'id="chain"', 'id="command"', "not tried", "1 fused from several nodes"):  # fmt: skip
        assert part in shown, part
    points = {
        match[1].split(":")[0]: (float(match[2]), float(match[3]))
        for match in re.finditer(r"<g><title>(.*?)</title>\s*<circle[^>]*cx=\"([\d.]+)\" cy=\"([\d.]+)\"", shown)
    }
    assert set(points) == {"source", "best model", "wrong"}
    assert all(64 <= x <= 696 and 16 <= y <= 316 for x, y in points.values())
    assert points["wrong"][0] < points["best model"][0] < points["source"][0]
    assert points["source"][1] < points["best model"][1] < points["wrong"][1]  # in SVG, y grows downwards


def test_everything_measured_is_in_the_table() -> None:
    """Fails if the table leaves out a measured value, shows a value under the wrong title, or has an empty column."""
    rows = [candidate("source", 10.0, None), candidate("best", 2.5, 0.004, "chosen", megabytes=3.25)]
    more = {"load_ms": 12.5, "first_run_ms": 3.0, "peak_rss_mb": 345.6, "joules_per_run": 0.25}
    phases = {"host_to_device": 0.5, "compute": 2.0, "device_to_host": 0.25}
    rows[1].measured = {**(rows[1].measured or {}), **more, "phases_ms": phases, "verdict": "faster"}
    found = figures(rows)
    titles = [column.title for column in found["columns"]]
    (row, texts) = found["rows"][1]
    assert row is rows[1]
    assert dict(zip(titles, texts, strict=True)) == {
        "median ms": "2.50", "p99 ms": "4.75", "samples/s": "400.0", "speedup": "4.00x",
        "95% interval": "3.92 to 4.08", "drop": "0.00400", "MB": "3.2", "load ms": "12.50", "first run ms": "3.00",
        "peak MiB": "345.6", "J a run": "0.250", "to device / compute / to host ms": "0.500 / 2.00 / 0.250",
    }  # fmt: skip


def test_names_in_the_plot_are_apart() -> None:
    """Fails if the names of close points overlap."""
    rows = [candidate("source", 10.0, None)]
    rows += [candidate(f"openvino int8 and more {i}", 5 + i / 100, 0.004 + i / 1e5) for i in range(4)]
    drawn = pareto(rows, 0.01)
    assert drawn is not None
    heights = sorted(p["label_y"] for p in drawn["points"] if p["name"] != "source")
    assert all(b - a >= 11 for a, b in pairwise(heights))


@browser
def test_light_and_dark(tmp_path: Path) -> None:
    """Checks that the page isn't empty, and that the background is dark when the system's theme is dark."""
    page = tmp_path / "report.html"
    look = """
    <script>
      const style = getComputedStyle(document.body);
      document.body.dataset.colours = style.backgroundColor + "/" + style.color;
    </script></body>"""
    page.write_text(written(page).replace("</body>", look))
    paper, ink = {}, {}
    for name, words in (("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])):
        shot = tmp_path / f"{name}.png"
        looked_at(page, f"--screenshot={shot}", *words)
        assert shot.read_bytes()[:4] == b"\x89PNG"
        assert shot.stat().st_size > 30_000  # a screenshot of an empty window takes about 3,000 bytes
        match = re.search(r'data-colours="([^"]*)"', looked_at(page, "--dump-dom", *words))
        assert match
        paper[name], ink[name] = (sum(map(int, re.findall(r"\d+", colour))) for colour in match[1].split("/"))
    assert paper["light"] > 700
    assert paper["dark"] < 120
    assert ink["light"] < 200
    assert ink["dark"] > 600


@browser
def test_hostile_names(tmp_path: Path) -> None:
    """Fails if a name from a model, a manifest or a command becomes part of the page's markup."""
    text = written(tmp_path / "report.html", HOSTILE, notes=(HOSTILE,))
    assert "<img" not in text
    assert "<script" not in text
    shown = looked_at(tmp_path / "report.html", "--dump-dom")
    assert "<img" not in shown
    assert "<title>owned" not in shown
    assert shown.count("onerror=") >= 8  # the names appear as text


def test_the_frontier() -> None:
    """Fails if the frontier includes a candidate that another candidate beats in both speed and quality. Also fails if
    the frontier leaves out any other candidate."""
    rows = [candidate("source", 10, None), candidate("a", 5, 1e-3), candidate("b", 6, 1e-2), candidate("c", 2, 0.1)]
    drawn = pareto(rows, 0.01)
    assert drawn is not None
    on_line = set(drawn["frontier"].split())
    assert {p["name"] for p in drawn["points"] if f"{p['x']:.1f},{p['y']:.1f}" in on_line} == {"source", "a", "c"}
    assert pareto(rows[:1], 0.01) is None
    for row, metric in zip(rows, (0.9, 0.91, 0.9, 0.5), strict=True):
        row.judgement = Judgement(drop=0, metric=metric, reference_metric=0.9, max_abs_diff=0, judged_on="x")
    drawn = pareto(rows, 0.01)
    assert drawn is not None
    heights = {p["name"]: p["y"] for p in drawn["points"]}
    assert heights["a"] < heights["source"] == heights["b"] < heights["c"]


def test_what_stays_float_and_why() -> None:
    """Checks that a candidate of a mixed search has exactly one sensitivity table. Also checks that each layer shows
    the right precision, and that the page lists the nodes that a cast kept in float32."""
    layers = [
        Sensitivity(node="a", op="MatMul", error=0.5, work=3e6),
        Sensitivity(node="b", op="Gemm", error=1e-5, work=1e6),
    ]
    tries = [Try(kept=(), drop=math.inf, within=False, judged_on="search")]
    found = Trajectory(base="bf16", layers=layers, tries=tries, kept=("a",), confirmed=False)
    rows = [
        candidate("mixed", 1, 0, trajectory=found),
        candidate("mixed, 1 thread", 1, 0, trajectory=found, base="mixed"),
    ]
    history = [
        {"name": "cast", "notes": {"kept_fp32": [{"node": "c", "op": "Exp", "reason": "it reaches 9e+04"}]}},
        {"name": "simplify", "notes": {"kept_fp32": []}},
        {"name": "none", "notes": {}},
    ]
    first, tried, kept = sensitivity(rows, history)
    assert first["title"] == "Sensitivity (mixed)"
    assert first["rows"] == [["a", "MatMul", "0.5", "bf16", "75.0%"], ["b", "Gemm", "1e-05", "int8", "25.0%"]]
    assert first["text"].startswith("1 of 2 layers stay bf16, not confirmed")
    assert tried["rows"] == [["0", "inf", "no", "search"]]
    assert kept["title"] == "Kept in float32 (cast)"
    assert kept["rows"] == [["c", "Exp", "it reaches 9e+04"]]


def test_without_jinja(digits: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a run without the extra ``report`` succeeds, and that a warning names the extra. Also fails if the
    page of an earlier run stays in the folder."""
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "optimize.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    words: dict[str, Any] = {"target": "tensorrt-rtx", "precision": "fp32", "compute_capabilities": ["8.6"]}
    result = accel.optimize(digits.path, out=tmp_path, **words)
    assert any("accel-toolchain[report]" in note for note in result.notes)
    assert not (tmp_path / "report.html").exists()


def test_somebody_elses_report(digits: Artifact, tmp_path: Path) -> None:
    """Fails if accel overwrites a report.html that accel did not write."""
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(accel.AccelError, match="not made by accel"):
        accel.optimize(digits.path, out=tmp_path, target="ort-cpu")
    assert (tmp_path / "report.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("values", "log", "texts"),
    [
        ([0.9107, 0.9199], False, ["0.91", "0.912", "0.914", "0.916", "0.918", "0.92"]),
        ([0.46, 11.8], True, ["0.5", "1", "2", "5", "10"]),
        ([0.7, 2.9], True, ["1", "1.5", "2", "2.5", "3"]),
        ([1e-12, 1e-2], True, ["1e-12", "1e-10", "1e-08", "1e-06", "0.0001", "0.01"]),
    ],
)
def test_ticks_are_round_numbers(values: list[float], log: bool, texts: list[str]) -> None:
    """Checks that tick labels are round numbers, and that each tick is at the position of its number. If only the
    labels were rounded and not the positions, the labels would not match the positions."""
    axis = Axis(values, 0, 600, log=log)
    ticks = axis.ticks()
    assert [tick["text"] for tick in ticks] == texts
    assert [tick["at"] for tick in ticks] == [axis.at(float(text)) for text in texts]
    assert all(0 <= a["at"] < b["at"] <= 600 for a, b in pairwise(ticks))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4), st.booleans())
def test_an_axis_of_any_numbers_has_its_ticks(values: list[float], log: bool) -> None:
    """Fails if an axis has no ticks, more than seven ticks, or ticks beyond its ends. Hypothesis draws the axis's
    numbers."""
    ticks = Axis(values, 0.0, 100.0, log=log).ticks()
    assert 1 <= len(ticks) <= 7
    assert all(0 <= tick["at"] <= 100 for tick in ticks)
    assert all(a["at"] < b["at"] for a, b in pairwise(ticks))
