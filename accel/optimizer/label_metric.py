"""Metrics that need nothing but labels: what ``accel optimize --labels`` judges by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from accel.artifact import file_sha256
from accel.errors import BadData, UnknownName, UsageError
from accel.verify.data import open_npz

if TYPE_CHECKING:
    import numpy as np

KINDS = ("top1", "top5", "spearman", "iou")


@dataclass(frozen=True)
class LabelMetric:
    """``f(outputs, data) -> float``, higher is better. ``top1``, ``top5``, ``topK``: the share of samples whose label
    is among the K largest values of the output [samples, classes]. ``spearman``: rank correlation of the output, one
    number a sample, with the labels. ``iou``: mean over the classes of intersection over union, where the output is
    [samples, classes, ...] and there is a class number for each place of it. Its repr, sha256 of the labels included,
    is what a cached judgement depends on."""

    kind: str
    sha256: str
    labels: np.ndarray = field(repr=False, compare=False)
    where: str = field(default="labels", repr=False, compare=False)  # the file and the array in it

    @property
    def __name__(self) -> str:
        return self.kind

    def __call__(self, outputs: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> float:  # noqa: ARG002
        import numpy as np

        value = self._output(outputs)
        if len(value) != len(self.labels):
            raise UsageError(
                f"{self.where} has {len(self.labels)} labels for {len(value)} samples of the data; "
                "give one a sample, in their order"
            )
        if self.kind == "spearman":
            return spearman(value.reshape(len(value)), self.labels)
        if self.kind == "iou":
            return mean_iou(value.argmax(axis=1), self.labels, value.shape[1])
        count = int(self.kind.removeprefix("top"))
        best = np.argsort(-value.astype(np.float64), axis=1, kind="stable")[:, :count]
        return float((best == self.labels[:, None]).any(axis=1).mean())

    def _output(self, outputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """The one output that has the right shape."""
        if self.kind == "spearman":
            wanted = "one number a sample"
            fitting = {n: v for n, v in outputs.items() if v.ndim >= 1 and v.size == len(v)}
        elif self.kind == "iou":
            places = self.labels.shape[1:]
            wanted = f"[samples, classes, {', '.join(map(str, places))}]"
            least = max(2, int(self.labels.max()) + 1)
            fitting = {n: v for n, v in outputs.items() if v.ndim > 2 and v.shape[2:] == places and v.shape[1] >= least}
        else:
            count = int(self.kind.removeprefix("top"))
            wanted = f"[samples, more than {count} classes]"
            least = max(count, int(self.labels.max())) + 1
            fitting = {n: v for n, v in outputs.items() if v.ndim == 2 and v.shape[1] >= least}
        if len(fitting) != 1:
            has = ", ".join(f"{n} {list(v.shape)}" for n, v in outputs.items())
            raise UsageError(
                f"{len(fitting)} outputs are {wanted} as {self.kind} with {self.where} {list(self.labels.shape)} needs "
                f"(there are {has}); give other labels, or pass --metric"
            )
        return next(iter(fitting.values()))


def read_labels(path: Path, kind: str | None = None) -> LabelMetric:
    """The metric for the labels in ``path``: .npz with one array, or one called ``label`` or ``labels``, that has one
    number a sample, or for ``iou`` a class number for each place (negative ones don't count). Without ``kind`` integers
    are judged by top1, floats by spearman, and more than one number a sample by iou.

    Raises ``BadData`` for what can't be read or is no list of labels, ``UnknownName`` for a kind that is none.
    """
    import numpy as np

    if kind is not None and kind not in KINDS and not re.fullmatch(r"top[1-9]\d{0,5}", kind):
        raise UnknownName(f"unknown label metric {kind!r}; use one of {', '.join(KINDS)} or another top<K>")
    if not path.is_file():
        raise BadData(f"{path} does not exist; check --labels")
    with open_npz(path) as archive:
        names = list(archive.files)
        chosen = names if len(names) == 1 else [n for n in names if n in ("label", "labels")]
        if len(chosen) != 1:
            raise BadData(f"{path} has the arrays {', '.join(names) or 'none'}; call the one with labels 'label'")
        labels = archive[chosen[0]]
    where = f"{path}: {chosen[0]!r}"
    kind = kind or ("iou" if labels.ndim > 1 else "spearman" if labels.dtype.kind == "f" else "top1")
    right = labels.ndim > 1 if kind == "iou" else labels.ndim == 1
    if not right or labels.dtype.kind not in "iuf" or not labels.size or not np.isfinite(labels).all():
        wanted = "a class number for each place" if kind == "iou" else "one finite number a sample"
        raise BadData(f"{where}: labels for {kind} are {wanted}, this is {labels.dtype}{list(labels.shape)}")
    if kind != "spearman" and labels.dtype.kind == "f":
        raise BadData(f"{where}: {kind} needs whole numbers as labels, these are {labels.dtype}")
    return LabelMetric(kind, file_sha256(path), labels, where)


def mean_iou(found: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """Mean over the classes that occur in either of |found ∩ labels| / |found ∪ labels| (the Jaccard index), both class
    numbers of one shape; places whose label is negative don't count. 0 where none is left."""
    import numpy as np

    counted = labels >= 0
    a, b = found[counted].astype(np.int64), labels[counted].astype(np.int64)
    both = np.bincount(a[a == b], minlength=classes)
    union = np.bincount(a, minlength=classes) + np.bincount(b, minlength=classes) - both
    there = union > 0
    return float((both[there] / union[there]).mean()) if there.any() else 0.0


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rho: Pearson's r of the ranks, equal values sharing their mean rank; 0 where either is constant."""
    import numpy as np

    def ranks(values: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        last = np.cumsum(counts)
        return np.asarray((last - (counts - 1) / 2)[inverse], np.float64)

    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / norm) if norm else 0.0
