"""Writes arrays, tensors or the batches of a data loader to ``.npz`` files, which the rest of accel reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accel.errors import BadData, one_line
from accel.progress import report
from accel.sources.structure import describe, is_array
from accel.spelling import option

from .data import IN_MEMORY, LABELS_IN_MEMORY

# The number of samples after which no more batches are written. A data loader may be endless, and calibration and
# comparison need only a few hundred samples.
MOST_SAMPLES = 1024
# The name of the array of labels, which follows the inputs in a batch.
LABELS = "labels"


def write_batches(data: Any, names: Sequence[str], folder: Path) -> Path:
    """Writes samples to ``folder``, with one ``.npz`` file per batch. Returns ``folder``.

    ``data`` is a batch or an iterable of batches, such as a ``DataLoader``. A batch is a dict from input names to
    arrays, a tuple of arrays in the order of ``names``, or a single array. A tuple may have one more array at the end,
    which is saved under the name ``labels``. Stops after the batch that reaches ``MOST_SAMPLES`` samples. Raises
    ``BadData`` if the arrays of a batch don't fit the inputs, or if there is no batch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for number, batch in enumerate(_batches(data, len(names))):
        arrays = _named(batch, names)
        np.savez(folder / IN_MEMORY.format(number), **arrays)  # type: ignore[arg-type]
        count += len(next(iter(arrays.values())))
        if count >= MOST_SAMPLES:
            report(f"data: the first {count} samples")
            break
    if not count:
        raise BadData(f"the data holds no samples; give at least one batch with {option('data')}")
    return folder


def write_labels(labels: Any, folder: Path) -> Path:
    """Writes labels, which are an array, a tensor or a sequence of numbers, to an ``.npz`` file in ``folder``. Returns
    the path of the file. Raises ``BadData`` if ``labels`` holds no numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LABELS_IN_MEMORY
    np.savez(path, labels=_array(labels, LABELS))
    return path


def _batches(data: Any, inputs: int) -> Iterable[Any]:
    """Returns the batches of ``data``, which may be a single batch."""
    if is_array(data) or isinstance(data, Mapping):
        return [data]
    if not isinstance(data, Iterable):
        raise BadData(f"the data has the type {type(data).__name__}; give arrays, a path or an iterable of batches")
    if isinstance(data, tuple) and len(data) in (inputs, inputs + 1) and all(map(is_array, data)):
        return [data]
    return data


def _named(batch: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch by name."""
    if is_array(batch):
        batch = (batch,)
    if isinstance(batch, Mapping):
        found = describe(dict(batch))[1]
    else:
        values = list(batch)
        if len(values) not in (len(names), len(names) + 1):
            raise BadData(
                f"a batch has {len(values)} arrays, but the model takes {len(names)} inputs ({', '.join(names)}); give "
                "one array per input, and labels at the end if a metric needs labels"
            )
        found = dict(zip([*names, LABELS], values, strict=False))
    arrays = {name: _array(value, name) for name, value in found.items()}
    if missing := [name for name in names if name not in arrays]:
        raise BadData(
            f"a batch has no array {missing[0]!r} (its arrays: {', '.join(arrays)}); name the arrays like the model's "
            "inputs"
        )
    return arrays


def _array(value: Any, name: str) -> np.ndarray:
    try:
        if hasattr(value, "detach"):  # a tensor of PyTorch
            value = value.detach().cpu()
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a sparse tensor, a tensor without values, a ragged list
        raise BadData(
            f"the array {name!r} of a batch can't be read ({one_line(error, 120)}); give an array, or a dense tensor"
        ) from error
    if array.dtype.kind in "OUS":
        raise BadData(f"the array {name!r} of a batch holds no numbers; give an array or a tensor of numbers")
    return array if array.ndim else array[None]
