"""Proves that accel optimize --labels computes metrics from labels alone, and refuses labels that don't fit the
outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.artifact import Artifact
from accel.errors import BadData, UnknownName, UsageError
from accel.optimizer.judge.label_metric import mean_iou, read_labels, spearman


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@settings(deadline=None)  # importing scipy takes longer than Hypothesis's deadline
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=30))
def test_spearman_is_scipys(pairs: list[tuple[int, int]]) -> None:
    """Fails if Spearman's rank correlation differs from scipy's, for example because equal values get different
    ranks."""
    from scipy.stats import spearmanr

    a, b = (np.array(values, np.float64) for values in zip(*pairs, strict=True))
    if len(set(a)) > 1 and len(set(b)) > 1:
        assert spearman(a, b) == pytest.approx(float(spearmanr(a, b).statistic), abs=1e-12)
    else:
        assert spearman(a, b) == 0.0


def test_top_k(tmp_path: Path) -> None:
    """Checks that top-k accuracy counts a label as right if the label is among the k largest scores, and only then."""
    scores = np.array([[3, 2, 1, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6]], np.float32)
    labels = save(tmp_path / "y.npz", label=np.array([1, 2]))
    assert read_labels(labels)({"logits": scores}, {}) == 0.0
    assert read_labels(labels, "top5")({"logits": scores}, {}) == 1.0


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_iou_is_scikit_learns(seed: int, classes: int) -> None:
    """Checks that IoU ignores unlabeled pixels, and equals the mean of scikit-learn's Jaccard indices over the classes
    that occur."""
    from sklearn.metrics import jaccard_score

    rng = np.random.default_rng(seed)
    found, labels = rng.integers(0, classes, (2, 3, 4, 4))
    labels[rng.random(labels.shape) < 0.2] = -1
    there = labels >= 0
    occurring = sorted(set(found[there]) | set(labels[there]))
    wanted = jaccard_score(labels[there], found[there], labels=occurring, average="macro") if occurring else 0.0
    assert mean_iou(found, labels, classes) == pytest.approx(wanted)


def test_iou_of_a_segmentation(tmp_path: Path) -> None:
    """Checks that IoU is the default metric for labels per pixel, and that accel compares the labels with an output of
    the same shape."""
    labels = np.array([[[0, 1], [1, 1]], [[0, 0], [2, -1]]])
    scores = np.full((2, 3, 2, 2), -1.0, np.float32)
    for (sample, y, x), label in np.ndenumerate(labels):
        scores[sample, max(label, 0), y, x] = 1.0
    metric = read_labels(save(tmp_path / "y.npz", label=labels))
    assert metric.kind == "iou"
    assert metric({"logits": scores, "features": np.ones((2, 8))}, {}) == 1.0
    scores[0, 0, 0, 0] = -2.0  # one pixel of class 0 becomes class 1, so the IoUs are 2/3 and 3/4
    scores[0, 1, 0, 0] = 2.0
    assert metric({"logits": scores}, {}) == pytest.approx((2 / 3 + 3 / 4 + 1) / 3)
    with pytest.raises(UsageError, match=r"\[samples, classes, 2, 2\]"):
        metric({"logits": scores[:, :, :1]}, {})
    with pytest.raises(BadData, match="a class number for each place"):
        read_labels(save(tmp_path / "flat.npz", label=np.arange(4)), "iou")


def test_iou_with_channels_last(tmp_path: Path) -> None:
    """Fails if the position of the class axis changes the metric. The shape of the scores is [samples, classes, ...],
    or [samples, ..., classes] as in Keras. Also fails if the judge mistakes another axis of the same size for the class
    axis, or mistakes features per pixel for class scores."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(4, 3, 6, 5)).astype(np.float32)
    labels = rng.integers(-1, 3, (4, 6, 5))
    wanted = mean_iou(scores.argmax(1), labels, 3)
    metric = read_labels(save(tmp_path / "y.npz", label=labels))
    last = np.moveaxis(scores, 1, -1)
    assert metric({"mask": last, "pooled": np.ones((4, 8))}, {}) == metric({"mask": scores}, {}) == wanted
    assert metric({"mask": scores, "features": np.ones((4, 6, 5, 16))}, {}) == wanted
    with pytest.raises(UsageError, match=r"2 outputs fit .*pass metric= with a function that reads the right output"):
        metric({"mask": last, "features": np.ones((4, 6, 5, 16))}, {})
    pictures = read_labels(save(tmp_path / "p.npz", label=labels[..., None]))
    assert pictures({"mask": last}, {}) == wanted
    narrow = read_labels(save(tmp_path / "n.npz", label=labels[:, :, :1]))
    assert narrow({"mask": scores[..., :1]}, {}) == mean_iou(scores[..., :1].argmax(1), labels[:, :, :1], 3)
    tokens = read_labels(save(tmp_path / "t.npz", label=labels[:, :, 0]))
    assert tokens({"tags": last[:, :, 0]}, {}) == mean_iou(scores[..., 0].argmax(1), labels[:, :, 0], 3)
    either, square = rng.normal(size=(4, 3, 3)), labels[:, :3, 0]
    read = read_labels(save(tmp_path / "s.npz", label=square))
    assert read({"y": either}, {}) == mean_iou(either.argmax(1), square, 3) != mean_iou(either.argmax(2), square, 3)
    with pytest.raises(UsageError, match="2 outputs"):  # the judge can't know which output has the classes
        read({"y": either, "z": rng.normal(size=(4, 3, 7))}, {})
    with pytest.raises(
        BadData, match=r"the label of sample \d at \[\d, \d\] is 2, but the output 'mask' has the 2 classes"
    ):
        metric({"mask": last[..., :2]}, {})


def test_labels_one_by_one_in_columns(tmp_path: Path) -> None:
    """Checks that labels of shape [samples, 1], as in Keras' datasets, are read as one integer or float per sample."""
    scores = np.eye(5, dtype=np.float32)
    column = read_labels(save(tmp_path / "y.npz", label=np.array([[0], [1], [2], [3], [0]], np.uint8)))
    assert (column.kind, column({"logits": scores}, {})) == ("top1", 0.8)
    prices = read_labels(save(tmp_path / "p.npz", label=np.array([[0.5], [1.5], [2.0]])))
    assert (prices.kind, prices({"price": np.array([[1.0], [2.0], [3.0]])}, {})) == ("spearman", 1.0)


def test_labels_in_another_form(tmp_path: Path) -> None:
    """Checks the errors for one-hot labels, for float class numbers, and for class numbers that start at 1. Each error
    must say which labels to save. The error for labels that match none of these forms must not suggest labels to
    save."""
    classes = np.arange(20) % 7
    logits = {"logits": np.eye(7)[classes], "pooled": np.ones((20, 3, 4))}

    def refused(labels: Any, kind: str | None = None) -> str:
        with pytest.raises((BadData, UsageError)) as caught:
            read_labels(save(tmp_path / "y.npz", label=labels), kind)(logits, {})
        return str(caught.value)

    for dtype in (np.int64, np.uint8, np.float32, np.bool_):
        for kind in (None, "top1"):
            assert "they look one-hot: save y.argmax(1)" in refused(np.eye(7)[classes].astype(dtype), kind)
    assert "save y.argmax(3)" in refused(np.eye(7)[np.tile(classes[:, None, None], (1, 4, 4))])
    assert "one-hot" not in refused(np.eye(7, dtype=np.int64)[classes] * 2)
    assert "one-hot" not in refused(np.ones((20, 7), np.int64))
    found = refused(classes.astype(np.float32))
    assert "needs exactly one output of one number a sample, but 0 outputs fit" in found
    assert "if they are classes, save them as integers, y.astype('int64')" in found
    assert "save them as integers" in refused(classes.astype(np.float64), "top1")
    assert "save them as integers" not in refused(classes + 0.5)
    found = refused(classes + 1)
    assert (
        "the label of sample 6 is 7, but the output 'logits' has the 7 classes 0 to 6 (2 labels are not a class)"
        in found
    )
    assert found.endswith("; the labels start at 1: save y - 1")
    for other in (np.where(classes == 0, -1, classes + 1), classes + 2, np.where(classes == 0, 8, classes)):
        assert refused(other).endswith("leave these samples out")


def test_any_top_k(tmp_path: Path) -> None:
    """Checks that top-k accuracy uses the requested k, and that accel refuses a k as large as the number of classes."""
    scores = np.array([[3, 2, 1, 0], [0, 1, 2, 3]], np.float32)
    labels = save(tmp_path / "y.npz", label=np.array([1, 1]))
    assert read_labels(labels, "top2")({"logits": scores}, {}) == 0.5
    assert read_labels(labels, "top3")({"logits": scores}, {}) == 1.0
    with pytest.raises(UsageError, match="more than 4 classes"):
        read_labels(labels, "top4")({"logits": scores}, {})
    with pytest.raises(UnknownName, match="another top<K>"):
        read_labels(labels, "top0")


def test_labels_that_are_no_classes(tmp_path: Path) -> None:
    """Fails if a label outside the range of classes counts as a wrong answer instead of an error. Also checks that the
    error names the label, its sample and the number of classes."""
    scores = {"logits": np.zeros((4, 10), np.float32), "pooled": np.zeros((4, 3, 2), np.float32)}
    for wrong, kind in ((10, "top1"), (-1, "top1"), (10, "top5")):
        path = save(tmp_path / "y.npz", label=np.array([0, 9, wrong, wrong]))
        with pytest.raises(BadData) as caught:
            read_labels(path, kind)(scores, {})
        assert f"the label of sample 2 is {wrong}, but the output 'logits' has the 10 classes 0 to 9" in str(
            caught.value
        )
        assert "(2 labels are not a class)" in str(caught.value)
        with pytest.raises((BadData, UsageError)):  # a wide embedding isn't mistaken for class scores
            read_labels(path, kind)({**scores, "embedding": np.zeros((4, 512), np.float32)}, {})
    places = np.zeros((2, 3, 3), np.int64)
    places[1, 2, 0], places[0, 0, 0] = 5, -1  # the label -1 excludes its pixel
    segmented = read_labels(save(tmp_path / "s.npz", label=places))
    with pytest.raises(BadData, match=r"sample 1 at \[2, 0\] is 5, but the output 'masks' has the 5 classes 0 to 4;"):
        segmented({"masks": np.zeros((2, 5, 3, 3), np.float32)}, {})


def test_labels_judge_a_real_net(
    cli: Any, digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path, own_cache: Path
) -> None:
    """Checks that the judgement is the accuracy on the given labels. Also fails if accel reuses a cached judgement
    after the labels changed."""
    with np.load(digits_data[1]) as archive:
        test = dict(archive)
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
    """Fails if accel accepts an invalid labels file, or shows a traceback instead of an error."""
    words = ["optimize", digits.path, "--target", "ort-cpu", "--data", digits_data[0], "-o", tmp_path / "out"]
    short = save(tmp_path / "short.npz", label=np.arange(3))
    flat = save(tmp_path / "flat.npz", label=np.zeros((128, 2), np.int64))
    one_hot = save(tmp_path / "hot.npz", label=np.eye(10, dtype=np.int64)[np.arange(128) % 10])
    beyond = save(tmp_path / "beyond.npz", label=np.where(np.arange(128) == 7, 10, 0))
    for extra, message in (
        (["--labels", short], "short.npz: 'label': 3 labels for 128 samples"),
        (["--labels", one_hot], "outputs fit (the outputs are logits [128, 10]); they look one-hot: save y.argmax(1)"),
        (["--labels", beyond], "the label of sample 7 is 10, but the output 'logits' has the 10 classes"),
        (
            ["--labels", flat, "--label-metric", "top1"],
            "flat.npz: 'label': the metric top1 needs one finite number a sample as labels, but the array is "
            "int64[128, 2]",
        ),
        (["--labels", tmp_path / "none.npz"], "does not exist; check --labels"),
        (["--labels", short, "--metric", "accel.examples.digits:top1"], "either --metric or --labels"),
        (["--labels", short, "--label-metric", "f1"], "unknown label metric"),
        (["--label-metric", "top1"], "pass the labels with --labels"),
    ):
        ran = cli(*words, *extra)
        assert (ran.code, "Traceback" in ran.stderr) == (2, False), ran.stderr
        assert message in ran.stderr
    with pytest.raises(BadData, match="whole numbers"):
        read_labels(save(tmp_path / "f.npz", label=np.ones(3)), "top1")
    with pytest.raises(BadData, match="one finite number a sample"):
        read_labels(save(tmp_path / "n.npz", label=np.array([np.nan])))
    with pytest.raises(UsageError, match="needs exactly one output of one number a sample, but 0 outputs fit"):
        read_labels(save(tmp_path / "s.npz", label=np.ones(3)))({"y": np.ones((3, 4))}, {})
