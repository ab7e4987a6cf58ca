"""Reads and writes the tuned table, a JSON file with the fastest configuration of each problem on a GPU.

``accel kernels tune`` writes the table, and dispatch reads the table. Each write replaces the whole file.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from accel.errors import CannotWrite

from ..catalogue.folder import cache_folder
from ..catalogue.spec import ConvSpec, GemmSpec

FORMAT = 1
LARGEST_BUCKET = 8192


def bucket(m: int) -> int:
    """Returns the smallest power of two that is at least ``m``, but no more than 8192. Problems whose M gives the same
    power of two share an entry of the tuned table."""
    return min(1 << (m - 1).bit_length(), LARGEST_BUCKET)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Describes the device for which a measurement is valid.

    ``library`` is a hash of the kernel sources, Triton's version and the names of the compiled kernels.
    """

    gpu: str
    capability: tuple[int, int]
    driver: str
    library: str


@dataclass(frozen=True, kw_only=True)
class Key:
    """Holds the device, and the features of a problem that determine the choice of a kernel. The ``op`` of a
    convolution includes kernel size, stride, padding and dilation."""

    device: Device
    op: str
    dtype: str
    epilogue: str
    n: int
    k: int
    m_bucket: int

    @property
    def text(self) -> str:
        """Returns this key as readable text for the file. Equal keys have equal texts."""
        d = self.device
        where = [d.gpu, f"sm_{d.capability[0]}{d.capability[1]}", d.driver, d.library]
        what = [self.op, self.dtype, self.epilogue, f"n{self.n}", f"k{self.k}", f"m{self.m_bucket}"]
        return " | ".join([*where, *what])


def key_of(spec: GemmSpec | ConvSpec, device: Device) -> Key:
    """Returns the key of a problem on a device."""
    g = spec.gemm if isinstance(spec, ConvSpec) else spec
    op = "gemm"
    if isinstance(spec, ConvSpec):
        pairs = (spec.kernel, spec.stride, spec.padding, spec.dilation)
        op = "conv2d " + " ".join(f"{height}x{width}" for height, width in pairs)
    return Key(device=device, op=op, dtype=g.in_dtype, epilogue=g.epilogue.key, n=g.n, k=g.k, m_bucket=bucket(g.m))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Holds the fastest configuration of a problem, its median time, and its largest ratio of error to bound (at most
    1)."""

    config: str
    microseconds: float
    error: float


class Table:
    """Holds the entries of a tuned table's file. A missing or damaged file, or a file of another format, counts as
    empty."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()
        self.entries: dict[str, Entry] = {}
        self.damaged = False
        try:
            body = json.loads(self.path.read_text(encoding="utf-8"))
            if body["format"] == FORMAT:
                self.entries = {str(key): _entry(value) for key, value in body["entries"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self.damaged = True

    def get(self, key: Key) -> Entry | None:
        return self.entries.get(key.text)

    def put(self, key: Key, entry: Entry) -> None:
        """Adds ``entry`` and writes the file. Keeps the entries that other processes added meanwhile.

        Raises ``CannotWrite``.
        """
        self.entries = {**Table(self.path).entries, **self.entries, key.text: entry}
        body = {"format": FORMAT, "entries": {name: asdict(e) for name, e in sorted(self.entries.items())}}
        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            raise CannotWrite(
                f"can't write {self.path} ({error.strerror}); set ACCEL_CACHE_DIR to a writable folder"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)


def _entry(body: Any) -> Entry:
    return Entry(config=str(body["config"]), microseconds=float(body["microseconds"]), error=float(body["error"]))


def default_path() -> Path:
    """Returns the path of ``tuned.json`` in the cache folder."""
    return cache_folder() / "tuned.json"


def lookup(key: Key) -> Entry | None:
    """Returns the entry for ``key`` in the default table, or None."""
    table = current()
    return None if table is None else table.get(key)


def current() -> Table | None:
    """Returns the default table, or None if there is no file. Reads the file again if the file has changed."""
    path = default_path()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read(path, stamp)


@lru_cache(maxsize=2)
def _read(path: Path, stamp: int) -> Table:  # noqa: ARG001 - the stamp is part of the cache key
    return Table(path)
