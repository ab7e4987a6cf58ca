"""Provides metrics that compare outputs with labels, for ``accel optimize --labels``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from accel.artifact import file_sha256
from accel.errors import BadData, UnknownName, UsageError
from accel.proof.data import LABELS_IN_MEMORY, open_npz
from accel.signature import shapes_of
from accel.spelling import option

if TYPE_CHECKING:
    import numpy as np

KINDS = ("top1", "top5", "spearman", "iou")


@dataclass(frozen=True)
class LabelMetric:
    """A metric ``f(outputs, data) -> float`` that compares the labels with the only output whose shape fits. Higher is
    better.

    ``kind`` names the metric. ``topK`` (``top1``, ``top5``) is the share of samples whose label is one of the K classes
    with the largest values in the output [samples, classes]. ``spearman`` is the rank correlation of the labels with an
    output that has one number per sample. ``iou`` is the mean intersection over union of the classes. For ``iou``, the
    output is [samples, classes, ...] or [samples, ..., classes], and the labels hold a class number for each pixel.
    ``where`` names the labels' file and array.

    The ``repr`` of the metric is part of the cache key of a judgement, and includes the sha256 of the labels.
    """

    kind: str
    sha256: str
    labels: np.ndarray = field(repr=False, compare=False)
    where: str = field(default="labels", repr=False, compare=False)

    @property
    def __name__(self) -> str:
        return self.kind

    def __call__(self, outputs: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> float:  # noqa: ARG002
        import numpy as np

        value, labels = self._output(outputs)
        if len(value) != len(labels):
            raise UsageError(
                f"{self.where}: {len(labels)} labels for {len(value)} samples of the data; "
                "give one label per sample, in the order of the samples"
            )
        if self.kind == "spearman":
            return spearman(value.reshape(len(value)), labels)
        if self.kind == "iou":
            return mean_iou(value.argmax(axis=1), labels, value.shape[1])
        count = int(self.kind.removeprefix("top"))
        best = np.argsort(-value.astype(np.float64), axis=1, kind="stable")[:, :count]
        return float((best == labels[:, None]).any(axis=1).mean())

    def _output(self, outputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the only output whose shape fits, transposed to have its classes on axis 1. Also returns the labels
        in a matching shape.

        Raises ``BadData`` if a label is not a class of the output, and ``UsageError`` if no output fits or several
        outputs fit.
        """
        labels = self.labels
        if self.kind == "spearman":
            wanted = "one number a sample"
            fitting = {n: v for n, v in outputs.items() if v.ndim >= 1 and v.size == len(v)}
        elif self.kind == "iou":
            places = ", ".join(map(str, labels.shape[1:]))
            wanted = f"[samples, classes, {places}] or [samples, {places}, classes]"
            fitting = self._segmentations(outputs, labels)
            if not fitting and labels.ndim > 2 and labels.shape[-1] == 1:  # masks with a channel axis
                labels = labels[..., 0]
                fitting = self._segmentations(outputs, labels)
        else:
            count = int(self.kind.removeprefix("top"))
            wanted = f"[samples, more than {count} classes]"
            fitting = {n: v for n, v in outputs.items() if v.ndim == 2 and v.shape[1] > count}
        if fitting and self.kind != "spearman":
            # Outputs are chosen by their shape, not by the largest label. With the largest label as the criterion, a
            # single wrong label could select an output that holds features instead of classes.
            widest = max(fitting, key=lambda name: fitting[name].shape[1])
            self._check_classes(widest, fitting[widest].shape[1], labels)
        if len(fitting) != 1:
            has = shapes_of(outputs)
            raise UsageError(
                f"for the labels {self.where} {list(self.labels.shape)}, the metric {self.kind} needs exactly one "
                f"output of {wanted}, but {len(fitting)} outputs fit (the outputs are {has}); "
                f"{self._way_out(outputs, len(fitting))}"
            )
        return next(iter(fitting.values())), labels

    @staticmethod
    def _segmentations(outputs: Mapping[str, np.ndarray], labels: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the outputs that have classes for each pixel of ``labels``, transposed to [samples, classes, ...]."""
        import numpy as np

        places = labels.shape[1:]
        first = {n: v for n, v in outputs.items() if v.ndim > 2 and v.shape[2:] == places and v.shape[1] > 1}
        last = {
            n: np.moveaxis(v, -1, 1)
            for n, v in outputs.items()
            if v.ndim > 2 and v.shape[1:-1] == places and v.shape[-1] > 1
        }
        # If the shape of an output fits both [samples, classes, ...] and [samples, ..., classes], the classes are
        # assumed to be on axis 1. If an output fits only [samples, ..., classes], its last axis may hold features of
        # each pixel instead of classes. If one output fits only [samples, classes, ...], the outputs that fit only
        # [samples, ..., classes] are ignored.
        certain = first.keys() - last.keys()
        return first if certain else last | first

    def _way_out(self, outputs: Mapping[str, np.ndarray], fitting: int) -> str:
        if fitting:
            return f"pass {option('metric')} with a function that reads the right output"
        if hint := _one_hot(self.labels):
            return hint
        classes = any(v.ndim == 2 and v.shape[1] > 1 for v in outputs.values())
        if self.kind == "spearman" and classes and (hint := _whole(self.labels)):
            return f"if they are classes, {hint}"
        return f"give other labels, or pass {option('metric')}"

    def _check_classes(self, output: str, classes: int, labels: np.ndarray) -> None:
        import numpy as np

        # ``iou`` ignores pixels with negative labels. For all metrics except ``iou``, each label has to be a class
        # number.
        wrong = (labels >= classes) | ((labels < 0) & (self.kind != "iou"))
        if not wrong.any():
            return
        sample, *place = np.argwhere(wrong)[0].tolist()
        value = labels[(sample, *place)]
        at = f" at {place}" if place else ""
        several = f" ({int(wrong.sum())} labels are not a class)" if wrong.sum() > 1 else ""
        counted = labels[labels >= 0] if self.kind == "iou" else labels
        from_one = labels.max() == classes and counted.min() == 1
        way_out = "the labels start at 1: save y - 1" if from_one else "correct the labels or leave these samples out"
        raise BadData(
            f"{self.where}: the label of sample {sample}{at} is {value}, but the output {output!r} has the {classes} "
            f"classes 0 to {classes - 1}{several}; {way_out}"
        )


def _one_hot(labels: np.ndarray) -> str:
    """Returns advice for labels that are one-hot rows, or an empty text for other labels."""
    if labels.dtype.kind not in "biuf" or not labels.size or not ((labels == 0) | (labels == 1)).all():
        return ""
    for axis in sorted({1, labels.ndim - 1} - {0}):
        if labels.ndim > 1 and labels.shape[axis] > 1 and (labels.sum(axis=axis) == 1).all():
            return f"they look one-hot: save y.argmax({axis})"
    return ""


def _whole(labels: np.ndarray) -> str:
    """Returns advice for labels that are whole numbers as floats, or an empty text for other labels."""
    if labels.dtype.kind != "f" or not (labels == labels.round()).all():
        return ""
    return "save them as integers, y.astype('int64')"


def read_labels(path: Path, kind: str | None = None) -> LabelMetric:
    """Returns the metric for the labels in ``path``.

    The file is an .npz with one array, or with an array called ``label`` or ``labels``. The array has one number per
    sample, [samples] or [samples, 1]. For ``iou`` the array has a class number for each pixel, and negative numbers are
    ignored. If ``kind`` is None, the metric is ``top1`` for integers, ``spearman`` for floats, and ``iou`` for several
    numbers per sample.

    Raises ``BadData`` if the file can't be read or its labels don't suit ``kind``. Raises ``UnknownName`` for an
    unknown ``kind``.
    """
    import numpy as np

    if kind is not None and kind not in KINDS and not re.fullmatch(r"top[1-9]\d{0,5}", kind):
        raise UnknownName(f"unknown label metric {kind!r}; use one of {', '.join(KINDS)} or another top<K>")
    if not path.is_file():
        raise BadData(f"{path} does not exist; check {option('labels')}")
    with open_npz(path) as archive:
        names = list(archive.files)
        chosen = names if len(names) == 1 else [n for n in names if n in ("label", "labels")]
        if len(chosen) != 1:
            raise BadData(
                f"the file {path} has the arrays {', '.join(names) or 'none'}; rename the array of labels to 'label'"
            )
        labels = archive[chosen[0]]
    where = "the labels" if path.name == LABELS_IN_MEMORY else f"{path}: {chosen[0]!r}"
    if kind != "iou" and labels.ndim == 2 and labels.shape[1] == 1:  # [samples, 1], as in Keras' datasets
        labels = labels[:, 0]
    kind = kind or ("iou" if labels.ndim > 1 else "spearman" if labels.dtype.kind == "f" else "top1")
    right = labels.ndim > 1 if kind == "iou" else labels.ndim == 1
    if not right or labels.dtype.kind not in "iuf" or not labels.size or not np.isfinite(labels).all():
        wanted = "a class number for each place" if kind == "iou" else "one finite number a sample"
        hint = _one_hot(labels)
        raise BadData(
            f"{where}: the metric {kind} needs {wanted} as labels, but the array is {labels.dtype}{list(labels.shape)}"
            + (f"; {hint}" if hint else "")
        )
    if kind != "spearman" and labels.dtype.kind == "f":
        hint = _one_hot(labels) or _whole(labels)
        raise BadData(
            f"{where}: the metric {kind} needs whole numbers as labels, but the labels are {labels.dtype}"
            + (f"; {hint}" if hint else "")
        )
    return LabelMetric(kind, file_sha256(path), labels, where)


def mean_iou(found: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """Returns the mean of |found ∩ labels| / |found ∪ labels| (the Jaccard index) over all classes that occur in
    ``found`` or ``labels``. ``found`` and ``labels`` are arrays of class numbers with the same shape. Ignores pixels
    with a negative label, and returns 0 if no pixel is left.
    """
    import numpy as np

    counted = labels >= 0
    a, b = found[counted].astype(np.int64), labels[counted].astype(np.int64)
    both = np.bincount(a[a == b], minlength=classes)
    union = np.bincount(a, minlength=classes) + np.bincount(b, minlength=classes) - both
    there = union > 0
    return float((both[there] / union[there]).mean()) if there.any() else 0.0


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Returns Spearman's rho, which is Pearson's r of the ranks. Equal values all get the mean of their ranks. Returns
    0 for constants."""
    import numpy as np

    def ranks(values: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        last = np.cumsum(counts)
        return np.asarray((last - (counts - 1) / 2)[inverse], np.float64)

    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / norm) if norm else 0.0
