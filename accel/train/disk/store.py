"""Keeps tensors in a file, so that they take memory only while they are in use.

One thread reads ahead of use, and another writes behind. Each tensor has its own place in the file, and a CRC-32 that
every read is compared with. The file has no name, so it ends with its process, also with one that is killed.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from accel.errors import CannotWrite, TrainingFailed, no_space, one_line

from ..shards import local, with_layout


@dataclass
class _Place:
    """A tensor's place in the file. ``reading`` and ``writing`` are the last read and write, while nobody waited for
    them. ``ahead`` takes the bytes of a read. ``freed`` tells whether the tensor has no memory."""

    storage: torch.UntypedStorage
    offset: int
    size: int
    crc: int = 0
    freed: bool = False
    ahead: torch.Tensor | None = None
    reading: Future[None] | None = None
    writing: Future[None] | None = None


class Disk:
    """Tensors that are kept in a file in ``folder``. Works on plain tensors and on a rank's shards of DTensors.

    ``read`` and ``written`` count the bytes of ``fetch`` and ``keep``. Raises ``CannotWrite`` if the folder can't hold
    a file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(prefix=".accel-states-", dir=folder)
            Path(name).unlink()
        except OSError as error:
            raise self._unwritable(error) from error
        weakref.finalize(self, os.close, self._file)
        self._places: dict[int, _Place] = {}  # by the address of the storage, which the place keeps alive
        self._end = 0
        self._reader, self._writer = (ThreadPoolExecutor(1, f"accel-disk-{what}") for what in ("read", "write"))
        self.read = self.written = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tells whether ``tensor`` has a place in the file."""
        return _storage(tensor)._cdata in self._places

    def keep(self, tensor: torch.Tensor) -> None:
        """Writes ``tensor`` behind, and then frees its memory. Nobody may use ``tensor`` before the next ``load``."""
        storage = _storage(tensor)
        if not storage.nbytes():
            return
        place = self._places.get(storage._cdata)
        if place is None:
            place = _Place(storage, self._end, storage.nbytes())
            self._places[storage._cdata], self._end = place, self._end + place.size
        host = _bytes(storage).cpu()
        if storage.device.type != "cpu":
            storage.resize_(0)
        self.written += place.size
        place.freed, place.writing = True, self._writer.submit(self._write, place, host)

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Starts to read ``tensors`` ahead of a ``load``."""
        for tensor in tensors:
            place = self._places.get(_storage(tensor)._cdata)
            if place is None or not place.freed or place.reading is not None:
                continue
            self._wait_for_write(place)
            if place.storage.device.type == "cpu":
                place.storage.resize_(place.size)
                place.ahead = _bytes(place.storage)
            else:
                place.ahead = torch.empty(place.size, dtype=torch.uint8, pin_memory=True)
            self.read += place.size
            place.reading = self._reader.submit(self._read, place, place.ahead)

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Frees the memory of ``tensors`` that were not changed since the last ``load``. Leaves tensors that were never
        kept as they are."""
        for tensor in tensors:
            place = self._places.get(_storage(tensor)._cdata)
            if place is None:
                continue
            if place.reading is not None:
                place.reading.result()
                place.ahead, place.reading, place.freed = None, None, place.storage.device.type != "cpu"
            if not place.freed:
                place.storage.resize_(0)
                place.freed = True

    def load(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gives ``tensors`` their memory and their values back. Leaves tensors that were never kept as they are.

        Raises ``TrainingFailed`` if the file no longer holds what was written.
        """
        tensors = list(tensors)
        self.fetch(tensors)
        for tensor in tensors:
            place = self._places.get(_storage(tensor)._cdata)
            if place is None or place.reading is None or place.ahead is None:
                continue
            place.reading.result()
            if place.storage.device.type != "cpu":
                place.storage.resize_(place.size)
                _bytes(place.storage).copy_(place.ahead)
            place.ahead, place.reading, place.freed = None, None, False

    def renew(self, tensor: torch.Tensor) -> None:
        """Gives ``tensor`` its memory back without its values, which nobody needs any more."""
        place = self._places.get(_storage(tensor)._cdata)
        if place is None:
            return
        self._wait_for_write(place)
        self.release([tensor])
        place.storage.resize_(place.size)
        place.freed = False

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of ``tensor`` in memory, and leaves ``tensor`` on the disk. Returns ``tensor`` itself if it
        isn't on the disk."""
        place = self._places.get(_storage(tensor)._cdata)
        if place is not None and place.reading is not None:
            self.load([tensor])
        if place is None or not place.freed:
            return tensor
        self._wait_for_write(place)
        host = torch.empty(place.size, dtype=torch.uint8)
        self._read(place, host)
        part = local(tensor).detach()
        filled = torch.empty(0, dtype=part.dtype, device=part.device)
        filled.set_(host.to(part.device).untyped_storage(), part.storage_offset(), part.shape, part.stride())
        return with_layout(filled, tensor)

    def take(self, own: torch.Tensor, value: torch.Tensor) -> None:
        """Copies ``value`` into ``own``. Each of the two may be on the disk."""
        if _storage(own)._cdata == _storage(value)._cdata:
            return  # a checkpoint was read onto the disk
        value = self.copy(value)
        if not self.holds(own):
            own.copy_(value)
            return
        self.load([own])
        own.copy_(value)
        self.keep(own)
        self.wait([own])

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gives up the places of ``tensors``, which nobody will use again."""
        for tensor in tensors:
            place = self._places.pop(_storage(tensor)._cdata, None)
            if place is not None:
                self._wait_for_write(place)

    def wait(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Waits until ``tensors``, or all tensors, are written. Raises ``CannotWrite`` if the disk is full."""
        if tensors is None:
            places = list(self._places.values())
        else:
            places = [place for t in tensors if (place := self._places.get(_storage(t)._cdata)) is not None]
        for place in places:
            self._wait_for_write(place)

    def _wait_for_write(self, place: _Place) -> None:
        if place.writing is not None:
            writing, place.writing = place.writing, None
            writing.result()

    def _write(self, place: _Place, host: torch.Tensor) -> None:
        view = _view(host)
        place.crc, done = zlib.crc32(view), 0
        try:
            while done < place.size:
                done += os.pwrite(self._file, view[done:], place.offset + done)
        except OSError as error:
            raise self._unwritable(error) from error
        if place.storage.device.type == "cpu":
            place.storage.resize_(0)

    def _read(self, place: _Place, host: torch.Tensor) -> None:
        view, done = _view(host), 0
        said = "it has changed since it was written"
        try:
            while done < place.size and (got := os.preadv(self._file, [view[done:]], place.offset + done)):
                done += got
        except OSError as error:
            said = one_line(error, 200)
        if done < place.size or zlib.crc32(view) != place.crc:
            raise TrainingFailed(
                f"the file of states in {self.folder} can't be read ({said}); check this disk, and run the "
                "same command again to continue from the last checkpoint"
            )

    def _unwritable(self, error: OSError) -> CannotWrite:
        if no_space(error) is not None:
            return CannotWrite(
                f"no space left for the states in {self.folder}; free some space or name another folder as "
                "parallel.disk, and run the same command again"
            )
        return CannotWrite(
            f"the states can't be kept in {self.folder} ({one_line(error, 200)}); name a folder as "
            "parallel.disk that this user may write to"
        )


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return local(tensor).detach().untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns the memory of ``storage`` as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(host: torch.Tensor) -> memoryview:
    """Returns the memory of a uint8 tensor on the CPU. After ``host.numpy()``, its storage couldn't be freed."""
    return memoryview((ctypes.c_ubyte * host.numel()).from_address(host.data_ptr())).cast("B")
