"""Takes the user's samples: files, arrays, tensors, or the batches of a data loader."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, TypeVar

from accel.proof.batches import write_batches, write_labels
from accel.sources.source import Source, SourceOptions

# Samples are given as the path of an .npz file, the path of a folder of .npz files, a batch, or an iterable of batches
# such as a DataLoader. A batch is an array, a dict of arrays, or a tuple of arrays in the order of the inputs.
Data: TypeAlias = "str | PathLike[str] | Mapping[str, Any] | Iterable[Any]"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_files(data: Data | None, source: Source, folder: Path) -> Path | None:
    """Returns the path of the samples. If the samples are in memory, first writes them to ``folder``. ``source`` is the
    model whose inputs the samples are."""
    if _in_files(data):
        return path_of(data)
    return write_batches(data, [spec.name for spec in source.open().signature.inputs], folder)


def labels_as_file(labels: Any, folder: Path) -> Path | None:
    """Returns the path of the labels. If the labels are in memory, first writes them to ``folder``."""
    return path_of(labels) if _in_files(labels) else write_labels(labels, folder)


def path_of(given: Data | None) -> Path | None:
    """Returns the path of what is in files, or None if nothing is given."""
    assert given is None or isinstance(given, str | PathLike)
    return Path(given) if given else None


def _in_files(given: Data | None) -> bool:
    return given is None or isinstance(given, str | PathLike)


def takes_samples(function: _Function) -> _Function:
    """Decorates a function of a model, or of several models, whose argument ``data`` is a path. Samples in memory are
    written to files for the time of the call."""

    @functools.wraps(function)
    def with_files(models: Any, *args: Any, data: Data | None = None, **kwargs: Any) -> Any:
        if _in_files(data):
            return function(models, *args, data=data, **kwargs)
        first = models[0] if isinstance(models, Sequence) and not isinstance(models, str) else models
        about: Any = {name: value for name, value in kwargs.items() if name in SourceOptions.__annotations__}
        with TemporaryDirectory(prefix="accel-") as folder:
            files = as_files(data, Source.of(first, **about), Path(folder) / "data")
            return function(models, *args, data=files, **kwargs)

    return with_files  # type: ignore[return-value]
