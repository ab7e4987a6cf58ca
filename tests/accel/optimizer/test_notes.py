"""Proves that the notes of accel optimize say which part of a model is in int8, and what would help if the source was
taken instead of another precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.optimizer.candidate import CandidateResult, Status
from accel.optimizer.judge.comparison import Judgement
from accel.optimizer.notes import not_as_asked, notes_on_making
from tests.support.onnx_builder import FLOAT, INT64, artifact, node

SOURCE = CandidateResult(name="source", precision="fp32")


def rejected(drop: float, problem: str = "") -> CandidateResult:
    row = CandidateResult(name=f"int8 at {drop}", precision="int8", over_budget=True)
    row.judgement = Judgement(
        drop=drop, metric=None, reference_metric=None, max_abs_diff=0.0, judged_on="x", problem=problem
    )
    row.reject("drop")
    return row


def not_faster(**measured: Any) -> CandidateResult:
    return CandidateResult(name="int8", precision="int8", measured={"speedup": 0.98, **measured})


def left_out(reason: str, *, late: bool = False) -> CandidateResult:
    return CandidateResult(
        name="int8 static", precision="int8", status=Status.NOT_TRIED, reason=reason, out_of_time=late
    )


@pytest.mark.parametrize(
    ("rows", "advice"),
    [
        ([rejected(0.0321), rejected(0.5)], "; int8 at 0.0321 passes with max_drop=0.033"),
        ([rejected(0.02)], "; int8 at 0.02 passes with max_drop=0.021"),
        ([rejected(float("inf"))], ""),
        ([rejected(0.02, problem="an output has NaN")], ""),
        ([not_faster()], "; int8 is right but not faster (0.98x) at the measured sizes, and may be at larger ones ("),
        ([left_out("int8 needs data; pass data=")], "; int8 needs data; pass data="),
        ([left_out("no time", late=True)], "; more budget_seconds= leave time for int8 static"),
        ([rejected(0.0321), left_out("no data"), not_faster()], "; int8 at 0.0321 passes with max_drop=0.033; no data"),
        ([CandidateResult(name="fp16", precision="fp16", measured={"speedup": 0.5})], ""),
    ],
)
def test_what_would_help(rows: list[CandidateResult], advice: str) -> None:
    """Fails if a limit in the advice is one that the candidate doesn't pass, if advice is given that can't help, or if
    a precision that nobody asked for is named."""
    said = not_as_asked(SOURCE, SOURCE, rows, ["int8"])
    start = "no candidate in int8 is right and measurably faster: the source itself was taken, in fp32"
    assert said.startswith(start + advice)
    if not advice:
        assert said == start


def test_larger_sizes_are_named_only_if_they_can_help(tmp_path: Path) -> None:
    """Fails if larger sizes are advised for an int8 candidate that computes everything in float."""
    made = artifact(
        tmp_path / "m.onnx",
        [node("MatMul", "x w", "y")],
        {"x": (FLOAT, ["batch", 3])},
        {"y": (FLOAT, ["batch", 4])},
        {"w": np.ones((3, 4), np.float32)},
    )
    row = CandidateResult(name="int8", precision="int8", measured={"speedup": 0.98}, artifact=made)
    said = not_as_asked(SOURCE, SOURCE, [row], ["int8"])
    assert said.endswith("at the measured sizes, because none of its products are in int8")


def test_when_it_is_said() -> None:
    """Fails if the source with other session options counts as another precision, or if the warning comes although
    nothing was asked for or the precision was found."""
    variant = CandidateResult(name="source, 1 thread", precision="fp32", base="source")
    assert not_as_asked(SOURCE, variant, [variant], ["int8"])
    assert not_as_asked(SOURCE, not_faster(), [], ["int8"]) == ""
    assert not_as_asked(SOURCE, SOURCE, [], None) == ""
    assert not_as_asked(SOURCE, SOURCE, [], ["fp32", "int8"]) == ""


def test_an_int8_model_whose_embedding_alone_is_in_int8_says_so(tmp_path: Path) -> None:
    """Fails if an int8 candidate whose products are in float has no note with the shares of the FLOPs and bytes in
    int8, or if a candidate of another precision has the note."""
    made = artifact(
        tmp_path / "m.onnx",
        [
            node("Gather", "table ids", "rows"),
            node("DequantizeLinear", "rows scale zero", "x"),
            node("MatMul", "x w", "y"),
        ],
        {"ids": (INT64, ["batch", 2])},
        {"y": (FLOAT, ["batch", 2, 4])},
        {
            "table": np.ones((100, 3), np.int8),
            "scale": np.array(0.5, np.float32),
            "zero": np.array(0, np.int8),
            "w": np.ones((3, 4), np.float32),
        },
    )
    rows = [CandidateResult(name=f"ort-cpu {name}", precision=name, artifact=made) for name in ("int8 dynamic", "fp32")]
    # 301 bytes of int8 numbers, 52 bytes of float32 numbers
    assert notes_on_making(rows, 0, None) == [
        "ort-cpu int8 dynamic: 0% of the FLOPs of its products and 85% of its weights' bytes are in int8"
    ]
