"""Passes tensors between two processes through shared memory.

The sender writes the tensors into the memory, and sends rows that say where each tensor is. The receiver copies the
tensors out before the sender writes again.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..protocol.tensors import decode_raw, encode

TAKEN, CANCELLED = b"taken", b"cancelled"  # what the receiver answers after it has copied the tensors
_ALIGNED = 64
_KEPT = 64 << 20  # more memory is returned to the system after each use


class Arena:
    """A piece of shared memory that grows as needed. ``fd`` is its file descriptor, which both processes have."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        self._size = 0

    @classmethod
    def new(cls) -> Arena:
        return cls(os.memfd_create("accel-tensors", os.MFD_CLOEXEC))

    def write(self, tensors: Iterable[tuple[str, str, np.ndarray]]) -> list[dict[str, Any]]:
        """Writes tensors, given by name, datatype and array. Returns one row for each tensor."""
        rows: list[dict[str, Any]] = []
        contents = []
        at = 0
        for name, datatype, array in tensors:
            content = encode(array, datatype)
            rows.append(
                {"name": name, "datatype": datatype, "shape": list(array.shape), "at": at, "size": len(content)}
            )
            contents.append(content)
            at += -(-len(content) // _ALIGNED) * _ALIGNED
        memory = self._fit(at)
        for row, content in zip(rows, contents, strict=True):
            memory[row["at"] : row["at"] + row["size"]] = content
        return rows

    def read(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Returns copies of the tensors that ``rows`` describe. Raises ``ServeError`` if a row contradicts itself."""
        memory = self._fit(0)
        found = {}
        for row in rows:
            content = memory[row["at"] : row["at"] + row["size"]]  # a copy
            found[row["name"]] = decode_raw(row["name"], row["datatype"], row["shape"], content, "Python code")
        return found

    def _fit(self, size: int) -> Any:
        """Returns the memory with at least ``size`` bytes. The other process may have changed the memory's size."""
        there = os.fstat(self.fd).st_size
        if there < size:
            os.ftruncate(self.fd, size)
            there = size
        if self._map is None or self._size != there:
            if self._map is not None:
                self._map.close()
            self._map, self._size = (mmap.mmap(self.fd, there) if there else None), there
        return self._map if self._map is not None else b""

    def shrink(self) -> None:
        """Returns the memory to the system if it is large."""
        if os.fstat(self.fd).st_size > _KEPT:
            os.ftruncate(self.fd, 0)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        os.close(self.fd)
