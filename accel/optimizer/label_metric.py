"""Metrics that need nothing but labels: what ``accel optimize --labels`` judges by."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from accel.artifact import file_sha256
from accel.errors import BadData, UnknownName, UsageError

if TYPE_CHECKING:
    import numpy as np

KINDS = ("top1", "top5", "spearman")


@dataclass(frozen=True)
class LabelMetric:
    """``f(outputs, data) -> float``, higher is better. ``top1``, ``top5``: the share of samples whose label is among
    the 1 or 5 largest values of the output [samples, classes]. ``spearman``: rank correlation of the output, one number
    a sample, with the labels. Its repr, sha256 of the labels included, is what a cached judgement depends on."""

    kind: str
    sha256: str
    labels: np.ndarray = field(repr=False, compare=False)

    @property
    def __name__(self) -> str:
        return self.kind

    def __call__(self, outputs: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> float:  # noqa: ARG002
        import numpy as np

        value = self._output(outputs)
        if len(value) != len(self.labels):
            raise UsageError(
                f"there are {len(self.labels)} labels for {len(value)} samples; give one a sample, in order"
            )
        if self.kind == "spearman":
            return spearman(value.reshape(len(value)), self.labels)
        count = int(self.kind.removeprefix("top"))
        best = np.argsort(-value.astype(np.float64), axis=1, kind="stable")[:, :count]
        return float((best == self.labels[:, None]).any(axis=1).mean())

    def _output(self, outputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """The one output that has the right shape."""
        if self.kind == "spearman":
            fitting = {n: v for n, v in outputs.items() if v.ndim >= 1 and v.size == len(v)}
        else:
            fitting = {n: v for n, v in outputs.items() if v.ndim == 2 and v.shape[1] > int(self.labels.max(initial=1))}
        if len(fitting) != 1:
            wanted = "one number a sample" if self.kind == "spearman" else "[samples, classes]"
            has = ", ".join(f"{n} {list(v.shape)}" for n, v in outputs.items())
            raise UsageError(
                f"{len(fitting)} outputs are {wanted} as {self.kind} needs (there are {has}); pass --metric"
            )
        return next(iter(fitting.values()))


def read_labels(path: Path, kind: str | None = None) -> LabelMetric:
    """The metric for the labels in ``path``, one a sample: .npz with one array, or one called ``label`` or ``labels``.
    Without ``kind`` integers are judged by top1, floats by spearman.

    Raises ``BadData`` for what can't be read or is no list of labels, ``UnknownName`` for a kind that is none.
    """
    import numpy as np

    if kind is not None and kind not in KINDS:
        raise UnknownName(f"unknown label metric {kind!r}; use one of {', '.join(KINDS)}")
    if not path.is_file():
        raise BadData(f"{path} does not exist; check --labels")
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise BadData(f"{path} is a single array; save it with numpy.savez({path.stem}, label=...)")
            names = list(archive.files)
            chosen = names if len(names) == 1 else [n for n in names if n in ("label", "labels")]
            if len(chosen) != 1:
                raise BadData(f"{path} has the arrays {', '.join(names) or 'none'}; call the one with labels 'label'")
            labels = archive[chosen[0]]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, MemoryError) as error:
        raise BadData(
            f"can't read {path} as .npz ({' '.join(str(error).split())[:120]}); write it with numpy.savez"
        ) from error
    if labels.ndim != 1 or labels.dtype.kind not in "iuf" or not len(labels) or not np.isfinite(labels).all():
        raise BadData(f"{path}: labels are one finite number a sample, this is {labels.dtype}{list(labels.shape)}")
    kind = kind or ("spearman" if labels.dtype.kind == "f" else "top1")
    if kind != "spearman" and labels.dtype.kind == "f":
        raise BadData(f"{path}: {kind} needs whole numbers as labels, these are {labels.dtype}")
    return LabelMetric(kind, file_sha256(path), labels)


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
