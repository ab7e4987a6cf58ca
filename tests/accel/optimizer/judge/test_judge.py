"""Proves that the judge of candidates uses the right samples, notices a changed metric, and reports a source that gives
NaN."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.errors import BadSource, UsageError
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.judge.comparison import Judge, Judgement
from accel.optimizer.notes import seen_note
from accel.proof.gates import OutputGate
from tests.support.onnx_builder import FLOAT, artifact, node, save_data


def twice(folder: Path, factor: float = 2.0, name: str = "m.onnx") -> Artifact:
    """Makes ``y = log(factor * x)``, which is NaN for negative x."""
    nodes = [node("Mul", "x f", "m"), node("Log", "m", "y")]
    shape = ["batch", 3]
    constants = {"f": np.float32(factor)}
    return artifact(folder / name, nodes, {"x": (FLOAT, shape)}, {"y": (FLOAT, shape)}, constants)


def samples(folder: Path, count: int, negative: int = 0) -> Path:
    x = np.arange(1, 3 * count + 1, dtype=np.float32).reshape(count, 3)
    x[:negative, 1] *= -1
    return save_data(folder / f"{count}.npz", x=x)


METRIC = """
import sys
from {helper} import factor
level = {level}

def score(outputs, data):
    return scaled(outputs["y"])

def scaled(y):
    return {inside} * factor() * level * float(y.mean())
"""


@pytest.mark.parametrize("part", ["inside", "level", "helper"])
def test_a_metric_that_was_changed_is_computed_anew(part: str, tmp_path: Path) -> None:
    """Fails if the judge reuses a cached judgement after the metric's code has changed. The change is in a function, a
    module constant or an imported file. A reused judgement would compare a candidate's old metric with the source's new
    metric."""
    source, data = twice(tmp_path), samples(tmp_path, 4)
    keys, values = [], []
    for turn in (1, 2):
        helper = f"factors_{part}_{turn}"
        number = turn if part == "helper" else 1
        (tmp_path / f"{helper}.py").write_text(f"def factor():\n    return {number}\n")
        said = {name: turn if name == part else 1 for name in ("inside", "level")}
        file = tmp_path / "metric.py"
        # In the case "helper", only the content of the imported file changes.
        body = METRIC.format(helper="factors" if part == "helper" else helper, **said)
        if part == "helper":
            (tmp_path / f"{helper}.py").replace(tmp_path / "factors.py")
            sys.modules.pop("factors", None)
            (tmp_path / "factors.py").touch()
            for cached in tmp_path.glob("__pycache__/factors*"):
                cached.unlink()
        file.write_text(body)
        judge = Judge(source, data, f"{file}:score")
        keys.append(judge.key(source, {}))
        values.append(judge.reference_metric())
        assert judge.key(source, {}) == keys[-1]
    assert values[1] == pytest.approx(2 * values[0])
    assert keys[0] != keys[1]


def test_a_closure_is_never_taken_for_another(tmp_path: Path) -> None:
    """Fails if two metrics with the same code and different closure variables share a cache entry."""
    source, data = twice(tmp_path), samples(tmp_path, 4)

    def made(factor: float) -> Any:
        def metric(outputs: Any, data: Any) -> float:
            return factor * float(outputs["y"].mean())

        return metric

    assert Judge(source, data, made(1)).key(source, {}) != Judge(source, data, made(2)).key(source, {})


def test_a_metric_that_is_nan_for_a_candidate(tmp_path: Path) -> None:
    """Checks that accel rejects a candidate, without ending the run, if the metric returns NaN for the candidate's
    outputs. For example, the correlation of constant outputs is NaN. Also checks that accel refuses a source if the
    metric returns NaN for the source's outputs."""
    source, other, data = twice(tmp_path), twice(tmp_path, 3.0, "other.onnx"), samples(tmp_path, 4)
    expected = np.log(2 * np.load(data)["x"]).mean()

    def metric(outputs: Any, data: Any) -> float:
        value = float(outputs["y"].mean())
        return value if abs(value - expected) < 0.01 else math.nan

    found = Judge(source, data, metric).judge(other, {})
    assert found.problem == "the metric metric is nan for its outputs"
    assert found.drop == math.inf
    with pytest.raises(UsageError, match="returned nan"):
        Judge(other, data, metric).check(StageCache(tmp_path / "cache"))


def test_a_name_that_is_no_function(tmp_path: Path) -> None:
    """Fails if the advice for a word that names no function is about models."""
    with pytest.raises(
        BadSource, match=r"^'acc' is no importable metric; give file.py:METRIC or package.module:METRIC$"
    ):
        Judge(twice(tmp_path), samples(tmp_path, 4), "acc")


def test_a_metric_without_its_array(tmp_path: Path) -> None:
    """Checks the error for a metric that reads a missing array. The error must list the arrays in the data, and name
    the option for other data. If the metric fails for another reason, the error must not list the arrays."""
    source, data = twice(tmp_path), samples(tmp_path, 4)

    def labels(outputs: Any, data: Any) -> float:
        return float(data["label"].mean())

    def lengths(outputs: Any, data: Any) -> float:
        return {4: 1.0}[len(outputs["y"]) + 1]

    def no_key(outputs: Any, data: Any) -> float:
        raise KeyError

    with pytest.raises(BadSource, match=r"raised KeyError: .* correct that line") as caught:
        Judge(source, data, labels).check(StageCache(tmp_path / "cache"))
    assert str(caught.value).endswith(f"({data} has x; the outputs are y), or pass eval_data= with the array 'label'")
    for metric in (lengths, no_key):
        with pytest.raises(BadSource, match=r"correct that line$"):
            Judge(source, data, metric).check(StageCache(tmp_path / "cache"))


@pytest.mark.parametrize(("count", "judged"), [(2, 1), (5, 3), (8, 4), (9, 1), (30, 14)])
def test_few_samples_are_judged_on_the_other_half_too(count: int, judged: int, tmp_path: Path) -> None:
    """Fails if the judge uses calibration samples although the data has other samples. Also fails if the judge claims
    that it used all samples."""
    judge = Judge(twice(tmp_path), samples(tmp_path, count), None, skip=count // 2)
    rows = np.concatenate([feeds["x"] for feeds in judge._feeds()])
    assert len(rows) == judged
    assert rows.min() > 3 * (count // 2)  # sample n has the number n
    assert not judge.saw_all


def test_a_judgement_counts_for_its_samples_alone(tmp_path: Path) -> None:
    """Fails if a judgement on two samples and a judgement on only the second sample share a cache entry."""
    source, data = twice(tmp_path), samples(tmp_path, 2)
    assert Judge(source, data, None).key(source, {}) != Judge(source, data, None, skip=1).key(source, {})
    assert Judge(source, data, None).key(source, {}) == Judge(source, data, None).key(source, {})


def test_one_sample_calibrates_and_judges(tmp_path: Path) -> None:
    """Checks that a warning says that int8 was calibrated and judged on the same single sample. Also fails if the
    warning appears when the judge has other samples or when no candidate is quantized."""
    source, one, two = twice(tmp_path), samples(tmp_path, 1), samples(tmp_path, 2)
    judgement = Judgement(drop=0.0, metric=None, reference_metric=None, max_abs_diff=0.0, judged_on="x")
    int8, fp32 = (CandidateResult(name=p, precision=p, judgement=judgement) for p in ("int8", "fp32"))
    said = seen_note([fp32, int8], Judge(source, one, None, skip=1))
    assert said.startswith("quantized candidates are judged on the samples that calibrated them")
    assert "eval_data=" in said
    assert seen_note([fp32], Judge(source, one, None, skip=1)) == ""
    assert seen_note([int8], Judge(source, two, None, skip=1)) == ""
    assert seen_note([int8], Judge(source, one, None)) == ""


def test_a_source_that_gives_nan_on_the_data(tmp_path: Path) -> None:
    """Checks that the report counts the samples with NaN in the source's outputs, and doesn't claim NaN for a source
    without NaN."""
    source = twice(tmp_path)
    judge = Judge(source, samples(tmp_path, 20, negative=5), None)
    assert "the source itself gives NaN for 5 of 20 samples of" in judge.nan_note()
    assert Judge(source, samples(tmp_path, 21), None).nan_note() == ""
    found = accel.optimize(
        source, data=tmp_path / "20.npz", out=tmp_path / "out", target="ort-cpu", precision="int8", budget_seconds=0.01
    )
    assert any("gives NaN for 5 of 10 samples" in warning for warning in found.warnings)


def test_random_inputs_are_those_of_the_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the source runs again for the judge, although a gate has run it on random inputs at all sizes."""
    source, other = twice(tmp_path), twice(tmp_path, 2.5, "other.onnx")
    OutputGate(limit=1.0).check(source, other)
    judge = Judge(source, None, None)
    for name in ("accel.proof.gates", "accel.optimizer.judge.comparison"):
        monkeypatch.setattr(f"{name}.open_session", None)
    judge.check(StageCache(tmp_path / "cache"))
    assert "NaN" in judge.nan_note()
