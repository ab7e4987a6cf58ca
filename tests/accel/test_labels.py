"""accel optimize --labels: metrics that need nothing but labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.artifact import Artifact
from accel.errors import BadData, UsageError
from accel.optimizer.label_metric import read_labels, spearman


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@settings(deadline=None)  # importing scipy takes longer than a sample may
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=30))
def test_spearman_is_scipys(pairs: list[tuple[int, int]]) -> None:
    """Fails if equal values don't share their rank, or anything else makes it another number than scipy's."""
    from scipy.stats import spearmanr

    a, b = (np.array(values, np.float64) for values in zip(*pairs, strict=True))
    if len(set(a)) > 1 and len(set(b)) > 1:
        assert spearman(a, b) == pytest.approx(float(spearmanr(a, b).statistic), abs=1e-12)
    else:
        assert spearman(a, b) == 0.0


def test_top_k(tmp_path: Path) -> None:
    """Fails if a label among the k largest isn't counted, or one outside is."""
    scores = np.array([[3, 2, 1, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6]], np.float32)
    labels = save(tmp_path / "y.npz", label=np.array([1, 2]))
    assert read_labels(labels)({"logits": scores}, {}) == 0.0
    assert read_labels(labels, "top5")({"logits": scores}, {}) == 1.0


def test_labels_judge_a_real_net(
    cli: Any, digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path, own_cache: Path
) -> None:
    """Fails if the judgement isn't the accuracy on these labels, or if other labels take the cached one."""
    test = np.load(digits_data[1])
    inputs = save(tmp_path / "x.npz", image=test["image"])
    words = ["optimize", digits.path, "--target", "tensorrt-rtx", "--precision", "fp32", "--data", inputs, "--json"]
    found = []
    for name, labels in (("right", test["label"]), ("shifted", (test["label"] + 1) % 10)):
        path = save(tmp_path / f"{name}.npz", label=labels)
        ran = cli(*words, "--labels", path, "-o", tmp_path / name)
        assert ran.code == 0, ran.stderr
        found.append(json.loads(ran.stdout)["candidates"][1]["judgement"]["metric"])
    assert found[0] > 0.95
    assert found[1] < 0.05


def test_labels_that_do_not_fit(cli: Any, digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path) -> None:
    """Fails if a wrong file of labels is a traceback, or judges anyway."""
    words = ["optimize", digits.path, "--target", "ort-cpu", "--data", digits_data[0], "-o", tmp_path / "out"]
    short = save(tmp_path / "short.npz", label=np.arange(3))
    for extra, message in (
        (["--labels", short], "3 labels for 128 samples"),
        (["--labels", tmp_path / "none.npz"], "does not exist; check --labels"),
        (["--labels", short, "--metric", "accel.examples.digits:top1"], "either --metric or --labels"),
        (["--labels", short, "--label-metric", "f1"], "unknown label metric"),
        (["--label-metric", "top1"], "pass --labels"),
    ):
        ran = cli(*words, *extra)
        assert (ran.code, "Traceback" in ran.stderr) == (2, False), ran.stderr
        assert message in ran.stderr
    with pytest.raises(BadData, match="whole numbers"):
        read_labels(save(tmp_path / "f.npz", label=np.ones(3)), "top1")
    with pytest.raises(BadData, match="one finite number a sample"):
        read_labels(save(tmp_path / "n.npz", label=np.array([np.nan])))
    with pytest.raises(UsageError, match="0 outputs are one number a sample"):
        read_labels(save(tmp_path / "s.npz", label=np.ones(3)))({"y": np.ones((3, 4))}, {})
