"""Loads the user's data into memory for calibration, gates and metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from accel.artifact import Artifact, canonical_json
from accel.errors import BadData, one_line
from accel.signature import BATCH, DimRange, IntegerRanges, Signature, numpy_dtype, other_sizes
from accel.spelling import option

if TYPE_CHECKING:
    import numpy as np


# The name of the file that accel writes for a batch in memory.
IN_MEMORY = "{:06d}.in-memory.npz"
# The name of the file that accel writes for labels in memory.
LABELS_IN_MEMORY = "labels.in-memory.npz"
_IN_MEMORY = re.compile(r"(\d{6,})\.in-memory\.npz")


def place(path: Path) -> str:
    """Returns the words for a file or a folder of samples in a message. These are the path, or the number of the batch
    for samples that the user gave in memory."""
    if found := _IN_MEMORY.fullmatch(path.name):
        return f"batch {int(found[1])} of the data"
    return "the data" if (path / IN_MEMORY.format(0)).is_file() else str(path)


def batch_plan(
    signature: Signature, counts: Iterable[int], size: int, limit: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """Yields the tuple (index of the file, first sample, number of samples) for each batch. ``counts`` has the number
    of samples of each file. A batch has at most ``size`` samples. If the model has a fixed batch size, all batches have
    this size. All batches together have at most ``limit`` samples. Reads the number of samples in a file only when a
    batch needs the file.
    """
    unit = signature.batch_unit
    step = signature.fixed_batch or max(size // unit, 1) * unit
    left = math.inf if limit is None else limit
    for part, count in enumerate(counts):
        for start in range(0, count, step):
            take = int(min(step, left, count - start)) // unit * unit
            if take <= 0:
                break
            yield part, start, take
            left -= take
        if left <= 0:
            return


@dataclass(frozen=True)
class Dataset:
    """Samples for a model. Each of ``parts`` holds the arrays of one file, with samples on axis 0. Shapes may differ
    between files. Arrays named like the model's inputs are the feeds. ``extra`` returns the arrays that aren't inputs,
    such as labels.
    """

    path: Path
    signature: Signature
    parts: tuple[Mapping[str, np.ndarray], ...]

    @classmethod
    def load(cls, path: Path, signature: Signature) -> Dataset:
        """Loads an ``.npz`` file (an array for each input, samples on axis 0) or a folder of such files.

        Never unpickles. If the dataset is already in memory and no file has changed, returns the dataset from memory,
        so that all gates of a run share one copy.

        Raises ``BadData`` if a file can't be read, lacks an input, doesn't fit the signature, or holds NaN or infinity.
        """
        files = data_files(path)
        seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        what = signature.to_json()
        key = canonical_json([str(path), seen, what["inputs"], what["dims"]])
        found = _held.get(key)
        if found is None:
            found = _held[key] = cls(path, signature, tuple(_read(file, signature) for file in files))
        return found

    def __len__(self) -> int:
        first = self.signature.inputs[0].name
        return sum(len(part[first]) for part in self.parts)

    def batches(self, size: int, limit: int | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Yields feeds of at most ``size`` samples each, with at most ``limit`` samples in total. If the model has a
        fixed batch size, all feeds have this size. Drops the last samples if they don't fill a fixed batch.
        """
        counts = [len(part[self.signature.inputs[0].name]) for part in self.parts]
        for at, start, take in batch_plan(self.signature, counts, size, limit):
            yield {spec.name: self.parts[at][spec.name][start : start + take] for spec in self.signature.inputs}

    def shaped(self, sizes: Mapping[str, int], start: int = 0) -> dict[str, np.ndarray]:
        """Returns the samples from index ``start`` on, cut or repeated to ``sizes`` (see ``at_sizes``)."""
        return at_sizes(self.signature, self.parts[start % len(self.parts)], sizes, start)

    def extra(self) -> dict[str, np.ndarray]:
        """Returns the arrays that aren't inputs, such as labels or reference scores, concatenated over the files."""
        import numpy as np

        names = {spec.name for spec in self.signature.inputs}
        found: dict[str, list[np.ndarray]] = {}
        for part in self.parts:
            for name, value in part.items():
                if name not in names:
                    found.setdefault(name, []).append(value)
        return {name: values[0] if len(values) == 1 else np.concatenate(values) for name, values in found.items()}


def at_sizes(
    signature: Signature, part: Mapping[str, np.ndarray], sizes: Mapping[str, int], start: int
) -> dict[str, np.ndarray]:
    """Returns the samples of ``part`` from index ``start`` on. Cuts or repeats the samples along each axis to get
    ``sizes``. If the bounds of an integer input depend on dims, such as the length of a sequence, the integers are
    clipped to these bounds.
    """
    import numpy as np

    feeds = {}
    for spec in signature.inputs:
        value = part[spec.name]
        for axis, size in enumerate(spec.resolve(sizes)):
            first = start if axis == 0 else 0
            value = np.take(value, np.arange(first, first + size) % value.shape[axis], axis=axis)
        if spec.bound_dims and (found := spec.range_at(sizes)):
            value = np.clip(value, *found)
        feeds[spec.name] = np.ascontiguousarray(value)
    return feeds


def data_files(path: Path) -> list[Path]:
    """Returns the sorted .npz files in the folder ``path``, or ``path`` itself if it is a file. Raises ``BadData`` if
    there is no .npz file."""
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise BadData(f"{path} holds no .npz file; save one array per input with numpy.savez")
        return files
    if not path.is_file():
        raise BadData(f"the path {path} does not exist; check {option('data')}")
    return [path]


# The datasets that are in use, keyed by path, files and signature.
_held: WeakValueDictionary[str, Dataset] = WeakValueDictionary()


def widened(artifact: Artifact, data: Path | None, declared: Collection[str]) -> Artifact:
    """Returns ``artifact`` with the ranges of its dims widened to hold the sizes in ``data``. The ranges of the dims in
    ``declared`` aren't changed. If the artifact has a manifest or is not an ONNX file, the ranges stay unchanged. Skips
    unreadable files, which ``Dataset.load`` reports.
    """
    if data is None or artifact.kind != "onnx" or artifact.manifest is not None:
        return artifact
    signature = artifact.signature
    seen: dict[str, list[int]] = {}
    for file in filter(Path.is_file, sorted(data.glob("*.npz")) if data.is_dir() else [data]):  # a pipe would block
        try:
            with open_npz(file) as archive:
                shapes = {s.name: _header(archive, s.name)[0] for s in signature.inputs if s.name in archive.files}
        except (BadData, KeyError):
            continue
        for spec in signature.inputs:
            shape = shapes.get(spec.name, ())
            for dim, size in list(zip(spec.shape, shape, strict=False))[1:]:
                if isinstance(dim, str) and dim not in declared and size and len(shape) == len(spec.shape):
                    seen.setdefault(dim, []).append(int(size))
    ranges = {}
    for dim, sizes in seen.items():
        old, low, high = signature.dims[dim], min(sizes), max(sizes)
        if not old.min <= low <= high <= old.max:
            ranges[dim] = DimRange(min(old.min, low), min(max(old.opt, low), high), max(old.max, high))
    return replace(artifact, signature=signature.with_dims(ranges)) if ranges else artifact


def _header(archive: np.lib.npyio.NpzFile, name: str) -> tuple[tuple[int, ...], str]:
    """Returns the shape and the name of the dtype of an array, read from its header. For a header of an unknown
    version, returns an empty shape and no name."""
    from numpy.lib import format as npy

    assert archive.zip is not None, "it is open"
    with archive.zip.open(f"{name}.npy") as stream:
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        reader = readers.get(npy.read_magic(stream))
        if reader is None:
            return (), ""
        shape, _, dtype = reader(stream)
        return shape, str(dtype)


def rounding_note(data: Path | None, signature: Signature) -> str:
    """Returns a note that names the inputs whose numbers in ``data`` are rounded to the narrower floats that the model
    takes, or "". Reads only the headers of the arrays. Skips unreadable files, which ``Dataset.load`` reports."""
    found: dict[str, str] = {}
    floats = {spec.name: spec.dtype for spec in signature.inputs if spec.dtype in ("float32", "float16", "bfloat16")}
    for file in filter(Path.is_file, data_files(data)) if data is not None and floats else ():
        try:
            with open_npz(file) as archive:
                for name in floats.keys() & set(archive.files):
                    if _header(archive, name)[1] == "float64":
                        found.setdefault(name, floats[name])
        except BadData:
            continue
    if not found:
        return ""
    names = " and ".join(sorted(found))
    return f"the data holds {names} as float64; the numbers are rounded to {found[min(found)]}, which the model takes"


def check_values(data: Path, signature: Signature, *, declared: bool = False) -> None:
    """Raises ``BadData`` for the first integer in ``data`` that is outside the range of its input. ``declared`` tells
    whether the user declared the ranges. Reads only the inputs with a range. Skips missing arrays, and arrays whose
    values aren't integers, because ``Dataset.load`` reports both."""
    ranges = IntegerRanges(signature.inputs)
    for file in data_files(data) if ranges.names else ():
        with open_npz(file) as archive:
            shapes = {
                spec.name: _header(archive, spec.name)[0] for spec in signature.inputs if spec.name in archive.files
            }
            found = ranges.first_outside({name: archive[name] for name in ranges.names if name in shapes}, shapes)
        if found is not None:
            fix = "correct the sample or leave it out"
            if declared:
                fix += f", or declare a range that holds {found.value} with {option('inputs')} if the model takes it"
            raise BadData(
                f"{place(file)}: input {found.input!r} holds the number {found.value} in sample {found.sample}, but "
                f"the model takes numbers in the range {found.low}..{found.high}; {fix}"
            )


def check_samples_first(signature: Signature) -> None:
    """Raises ``BadData`` if the batch of an input isn't on axis 0, along which the samples of the data lie."""
    for spec in signature.inputs:
        if BATCH in spec.shape[1:] and spec.shape[0] != BATCH:
            axis = spec.shape.index(BATCH)
            raise BadData(
                f"input {spec.name!r} has the {BATCH} on axis {axis}, but the samples of the data lie along axis 0; "
                f"wrap the model in a module that passes on {spec.name}.transpose(0, {axis}), and give the batch first "
                "in the example and in the data"
            )


def single_array(file: Path) -> BadData:
    """Returns the error to raise if ``file`` is a .npy file instead of an .npz file."""
    return BadData(f"{file} is a single array; save it by name, one array per input: numpy.savez({file.stem}, x=...)")


@contextmanager
def open_npz(file: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Opens a file of arrays. Raises ``BadData`` if ``file`` is not an .npz file or if reading the file fails inside
    the ``with`` block."""
    import zipfile

    import numpy as np

    try:
        # The file is opened here, because numpy doesn't close a file that it can't read.
        with file.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise single_array(file)
            with archive:
                yield archive
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, MemoryError) as error:
        reason = one_line(error, 120)
        raise unreadable(file, reason) from error


# How to write the file of other formats as .npz. Each recipe runs in Python.
_RECIPES = {
    ".csv": "np.savez({npz!r}, INPUT=np.loadtxt({file!r}, delimiter=',', dtype='float32', ndmin=2))",
    ".tsv": "np.savez({npz!r}, INPUT=np.loadtxt({file!r}, dtype='float32', ndmin=2))",
    ".jsonl": "rows = [json.loads(row) for row in pathlib.Path({file!r}).read_text().splitlines()]; "
    "np.savez({npz!r}, **{{name: np.array([row[name] for row in rows]) for name in rows[0]}})",
    ".json": "inputs = json.loads(pathlib.Path({file!r}).read_text()); "
    "np.savez({npz!r}, **{{name: np.array(rows) for name, rows in inputs.items()}})",
    ".safetensors": "np.savez({npz!r}, **safetensors.numpy.load_file({file!r}))",
}


def unreadable(file: Path, reason: str) -> BadData:
    """Returns the error to raise if ``file`` isn't a readable .npz file. ``reason`` says why. For a file of another
    known format, the message says how to write the file as .npz."""
    recipe = _RECIPES.get(file.suffix.lower())
    if recipe is None:
        return BadData(f"can't read {place(file)} as .npz ({reason}); write the file with numpy.savez")
    code = recipe.format(file=str(file), npz=str(file.with_suffix(".npz")))
    named = ", with the input's name for INPUT" if "INPUT" in code else ""
    return BadData(
        f"{place(file)} is not an .npz file, but {option('data')} takes .npz: one array per input, samples on axis 0; "
        f"convert it with {code}{named}"
    )


def _read(file: Path, signature: Signature) -> dict[str, np.ndarray]:
    import numpy as np

    where = place(file)
    check_samples_first(signature)
    with open_npz(file) as archive:
        # For an archive member without an array header, numpy returns bytes.
        arrays = {name: np.asarray(archive[name]) for name in archive.files}
    first = signature.inputs[0].name
    for spec in signature.inputs:
        if spec.name not in arrays:
            has = ", ".join(arrays) or "none"
            raise BadData(
                f"{where} has no array {spec.name!r} (its arrays: {has}); name the arrays like the model's inputs"
            )
        arrays[spec.name] = fitting(file, arrays[spec.name], spec.name, signature)
        if len(arrays[spec.name]) != len(arrays[first]):
            raise BadData(
                f"{where}: input {spec.name!r} has {len(arrays[spec.name])} samples, but input {first!r} has "
                f"{len(arrays[first])} samples; give every input the same number of samples"
            )
    if len(arrays[first]) == 0:
        raise BadData(f"{where} holds no samples; save at least one")
    return arrays


def fitting(file: Path, value: np.ndarray, name: str, signature: Signature, start: int = 0) -> np.ndarray:
    """Returns the samples ``value`` of the input ``name`` in the dtype that the model takes.

    In error messages, sample numbers begin at ``start``. Raises ``BadData`` if the model doesn't take the shape, the
    dtype or the numbers.
    """
    import numpy as np

    spec, where = signature.input(name), place(file)
    if value.ndim != len(spec.shape) or value.ndim == 0:
        shape = list(value.shape)
        raise BadData(f"{where}: input {name!r} has shape {shape}, but the model takes {spec}; change the shape")
    for axis, (dim, size) in enumerate(zip(spec.shape, value.shape, strict=True)):
        if axis and isinstance(dim, int) and dim != size:
            raise BadData(
                f"{where}: input {name!r} has shape {list(value.shape)}, but the model takes {spec}; change the shape "
                f"({other_sizes(spec, (spec.shape[0], *value.shape[1:]), signature.inputs, signature.dims)})"
            )
        if axis and isinstance(dim, str):
            bounds = signature.dims[dim]
            if size % bounds.step:
                raise BadData(
                    f"{where}: input {name!r} has the dim {dim} of size {size}, but the model takes multiples of "
                    f"{bounds.step}; pad or cut the dim to {bounds.beside(size)}"
                )
            if not bounds.holds(size):
                raise BadData(
                    f"{where}: input {name!r} has the dim {dim} of size {size}, outside the range "
                    f"{bounds.min}..{bounds.max}; widen the range with {option('dims', {dim: bounds.to_hold(size)})}"
                )
    wanted = numpy_dtype(spec.dtype)
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        rows = sorted({int(i) for i in np.argwhere(~np.isfinite(value))[:, 0]})
        raise BadData(
            f"{where}: input {name!r} holds NaN or infinity in sample {start + rows[0]} ({len(rows)} such samples in "
            "all); remove these samples"
        )
    if value.dtype == wanted:
        return value
    # The default widths of numpy (int64, float64) often differ from the model's widths, so numbers are converted to the
    # model's width if they fit.
    same = value.dtype.kind == wanted.kind or {value.dtype.kind, wanted.kind} <= {"i", "u", "b"}
    if not (same or (value.dtype.kind == "f" and spec.dtype == "bfloat16")):
        raise BadData(
            f"{where}: input {name!r} has dtype {value.dtype}, but the model takes {spec.dtype}; save the array as "
            f"{spec.dtype}"
        )
    with np.errstate(over="ignore"):
        converted = value.astype(wanted)
    if value.dtype.kind == "f" and (lost := ~np.isfinite(converted.astype(np.float64))).any():
        raise BadData(
            f"{where}: input {name!r} in sample {start + int(np.argwhere(lost)[0, 0])} holds {value.dtype} "
            f"numbers that are too large for the dtype {spec.dtype}; scale the numbers"
        )
    if value.dtype == np.float64 and (lost := _changed_integers(value, converted)).any():
        row, number = int(np.argwhere(lost)[0, 0]), value[lost][0]
        raise BadData(
            f"{where}: input {name!r} in sample {start + row} holds the whole number {number:.0f} as float64, which "
            f"{spec.dtype} would change to {float(converted[lost][0]):.0f}; subtract an offset from the numbers or "
            f"scale them, or save them as {spec.dtype} if the change is harmless"
        )
    if not np.array_equal(converted.astype(value.dtype), value) and value.dtype.kind in "iub":
        raise BadData(
            f"{where}: input {name!r} holds numbers that don't fit the dtype {spec.dtype}; correct the numbers"
        )
    return converted


def _changed_integers(value: np.ndarray, converted: np.ndarray) -> np.ndarray:
    """Returns True for each whole number, such as an id or a time stamp, that is exact as float64 but not as
    ``converted``. Fractions are always rounded, and beyond 2^53, float64 itself holds only whole numbers."""
    import numpy as np

    changed: np.ndarray = converted.astype(np.float64) != value
    if changed.any():
        changed &= (np.abs(value) <= 2.0**53) & (value == np.trunc(value))
    return changed
