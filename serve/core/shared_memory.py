"""Manages the memory regions that clients share with the server. A region is in POSIX shared memory or in GPU memory
(see ``cuda_regions``).

The server opens a POSIX region when a client registers it, and checks every slice against the region's size. The server
reads and writes the region by system calls and doesn't map the region into its address space. A client can shrink the
shared memory at any time, and an access to the removed part of a mapped region would kill the server's process.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..protocol.inference import Code, ServeError
from .cuda_regions import CudaRegion, open_region
from .transport import Slice

FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?[^/\x00]{1,250}")
MAX_REGIONS = 1024
_RESERVED = "triton_python_backend_shm_region_"  # of the Python models of a Triton server on the same machine


@dataclass
class Region:
    """A registered region, which is a part of the shared-memory object ``key``. The region starts at byte ``offset`` of
    the object and has ``byte_size`` bytes. ``file`` is the open file descriptor of the object."""

    name: str
    key: str
    offset: int
    byte_size: int
    file: int

    def close(self) -> None:
        os.close(self.file)


class SharedMemory:
    """Holds the registered regions of one owner. All methods are safe to call from any thread."""

    def __init__(self) -> None:
        self._regions: dict[str, Region | CudaRegion] = {}
        self._uses: Counter[str] = Counter()  # requests under way, by region
        self._leaving: set[str] = set()  # unregistered regions that requests still use
        self._lock = threading.Lock()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Registers the region ``name``, which starts at byte ``offset`` of the object ``key`` and has ``byte_size``
        bytes.

        Raises ``ServeError`` ALREADY_EXISTS if the name is taken, and NOT_FOUND if the object ``key`` doesn't exist.
        Raises ``ServeError`` INVALID_ARGUMENT if the object is too small, or if ``key`` can't be an object's name.
        """
        if key.lstrip("/").startswith(_RESERVED):
            raise ServeError(
                Code.INVALID_ARGUMENT,
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved "
                f"prefix '{_RESERVED}'",
            )
        if not name or not _KEY.fullmatch(key) or key.strip("/") in (".", ".."):
            # The words are Triton's.
            text = f"cannot register shared memory region '{name}' - invalid shm key '{key}'"
            raise ServeError(
                Code.INVALID_ARGUMENT, text if name else "failed to register shared memory region: no name"
            )
        if byte_size <= 0 or offset < 0:
            raise ServeError(
                Code.INVALID_ARGUMENT,
                f"failed to register shared memory region '{name}': invalid args: byte_size has to be above 0, and "
                "offset 0 or more",
            )
        with self._lock:
            self._check_new(name)
            self._regions[name] = _open(name, key, offset, byte_size)

    def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Registers the GPU memory of the CUDA IPC ``handle`` under the name ``name``. Raises ``ServeError``
        ALREADY_EXISTS if the name is taken. Also raises the errors of ``open_region``."""
        with self._lock:
            self._check_new(name)
            self._regions[name] = open_region(name, handle, device, byte_size)

    def _check_new(self, name: str) -> None:
        if name in self._regions:
            raise ServeError(Code.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        if len(self._regions) >= MAX_REGIONS:
            raise ServeError(Code.UNAVAILABLE, f"{MAX_REGIONS} shared memory regions exist; unregister a region first")

    def unregister(self, name: str = "", kind: Kind | None = None) -> None:
        """Unregisters the region ``name``, or every region if ``name`` is empty. A ``kind`` of None means both POSIX
        regions and GPU regions. Ignores an unknown name, as Triton does. A region that a request uses stays until the
        last of these requests has ended, as in Triton."""
        with self._lock:
            found = [region for region in self._regions.values() if name in ("", region.name) and _is(region, kind)]
            self._leaving |= {region.name for region in found}
            self._drop([region.name for region in found])

    def hold(self, names: Collection[str]) -> Callable[[], None]:
        """Keeps the regions with these names for a request. Returns the function that ends this."""
        with self._lock:
            kept = [name for name in names if name in self._regions]
            self._uses.update(kept)

        def release() -> None:
            with self._lock:
                self._uses.subtract(kept)
                self._drop(kept)

        return release

    def _drop(self, names: Collection[str]) -> None:
        """Closes the unregistered regions among ``names`` that no request uses. Called with the lock held."""
        for name in names:
            if not self._uses[name]:
                del self._uses[name]
                if name in self._leaving:
                    self._leaving.remove(name)
                    self._regions.pop(name).close()

    def status(self, name: str = "") -> list[Region]:
        """Returns the POSIX region ``name``, or every POSIX region if ``name`` is empty. Raises ``ServeError``
        NOT_FOUND if no region has this name."""
        return [region for region in self._listed(name, Region, "") if isinstance(region, Region)]

    def cuda_status(self, name: str = "") -> list[CudaRegion]:
        """Returns the GPU region ``name``, or every GPU region if ``name`` is empty."""
        return [region for region in self._listed(name, CudaRegion, "CUDA ") if isinstance(region, CudaRegion)]

    def _listed(self, name: str, kind: Kind, called: str) -> list[Region | CudaRegion]:
        with self._lock:
            found = [region for region in self._regions.values() if name in ("", region.name) and _is(region, kind)]
        if name and not found:
            raise ServeError(Code.NOT_FOUND, f"Unable to find {called}shared memory region: '{name}'")
        return found

    def read(self, part: Slice) -> memoryview:
        """Returns a copy of the bytes of a slice. Raises ``ServeError`` NOT_FOUND if the region is not registered, and
        INVALID_ARGUMENT if the slice reaches beyond the region."""
        with self._opened(part) as (file, start):
            if isinstance(file, CudaRegion):
                return file.read(start, part.byte_size)
            found = memoryview(np.empty(part.byte_size, dtype=np.uint8))  # type: ignore[arg-type]
            at = 0
            while at < part.byte_size:  # one system call moves at most 2 GiB
                count = os.preadv(file, [found[at:]], start + at)
                if count == 0:
                    raise _cut_short(part)
                at += count
        return found

    def write(self, part: Slice, body: bytes | bytearray | memoryview) -> None:
        """Writes ``body`` to the start of the slice. ``body`` must not be longer than the slice. Raises the same errors
        as ``read``."""
        with self._opened(part) as (file, start):
            if isinstance(file, CudaRegion):
                file.write(start, body)
                return
            left = memoryview(body).cast("B")
            while left:
                count = os.pwrite(file, left, start)
                left, start = left[count:], start + count

    @contextlib.contextmanager
    def _opened(self, part: Slice) -> Iterator[tuple[int | CudaRegion, int]]:
        """For a slice of a POSIX region, yields the file descriptor and the slice's position in the file. For a slice
        of a GPU region, yields the region and the slice's offset. The file descriptor is a duplicate, because another
        thread may unregister the region during the access."""
        with self._lock:
            region = self._find(part)
            if isinstance(region, Region):
                if os.fstat(region.file).st_size < region.offset + region.byte_size:
                    raise _cut_short(part)
                file = os.dup(region.file)
        if isinstance(region, CudaRegion):
            yield region, part.offset
            return
        try:
            yield file, region.offset + part.offset
        except (OSError, MemoryError) as error:
            raise ServeError(
                Code.UNAVAILABLE, f"shared memory region '{part.region}' can't be read or written: {error}"
            ) from None
        finally:
            os.close(file)

    def _find(self, part: Slice) -> Region | CudaRegion:
        """Returns the region of the slice ``part``, after checking that the slice lies within the region's bounds."""
        found = self._regions.get(part.region)
        if found is None:
            raise ServeError(Code.NOT_FOUND, f"Unable to find shared memory region: '{part.region}'")
        beyond = part.offset < 0 or part.offset + min(part.byte_size, 1) > found.byte_size
        if beyond or part.byte_size < 0 or part.offset + part.byte_size > found.byte_size:
            which = "offset" if beyond else "offset + byte size"
            raise ServeError(Code.INVALID_ARGUMENT, f"Invalid {which} for shared memory region: '{part.region}'")
        return found


Kind = type[Region] | type[CudaRegion]


def _is(region: Region | CudaRegion, kind: Kind | None) -> bool:
    return kind is None or isinstance(region, kind)


class OwnedMemory:
    """Holds the regions of a server, grouped by the owner who registered them. Only the owner can read, write, list and
    unregister a region, or learn that the region exists. Two owners may use the same name."""

    def __init__(self) -> None:
        self._owners: dict[str, SharedMemory] = {}
        self._lock = threading.Lock()

    def of(self, owner: str) -> SharedMemory:
        """Returns the shared memory of ``owner``. An owner is the name of a token, or "" on a server without tokens."""
        found = self._owners.get(owner)
        if found is None:
            with self._lock:
                found = self._owners.setdefault(owner, SharedMemory())
        return found

    def regions(self) -> list[tuple[str, Region | CudaRegion]]:
        """Returns every region with its owner."""
        with self._lock:
            owners = list(self._owners.items())
        found: list[tuple[str, Region | CudaRegion]] = []
        for owner, regions in owners:
            found += [(owner, region) for region in regions.status()]
            found += [(owner, region) for region in regions.cuda_status()]
        return found

    def keep(self, owners: Collection[str]) -> None:
        """Unregisters the regions of every owner who is not in ``owners``."""
        with self._lock:
            gone = [self._owners.pop(owner) for owner in list(self._owners) if owner not in owners]
        for regions in gone:
            regions.unregister()


def _cut_short(part: Slice) -> ServeError:
    return ServeError(Code.INVALID_ARGUMENT, f"the shared memory behind region '{part.region}' was made smaller")


def _open(name: str, key: str, offset: int, byte_size: int) -> Region:
    path = FOLDER / key.lstrip("/")
    try:
        # Don't follow links: any user may create a name in /dev/shm.
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ServeError(Code.NOT_FOUND, f"Unable to open shared memory region: '{key}' ({error.strerror})") from None
    try:
        size = os.fstat(file).st_size
        if size < offset + byte_size:
            raise ServeError(
                Code.INVALID_ARGUMENT,
                f"failed to register shared memory region '{name}': invalid args: the shared memory '{key}' has {size} "
                f"bytes, but offset {offset} and byte_size {byte_size} need {offset + byte_size} bytes",
            )
    except BaseException:
        os.close(file)
        raise
    return Region(name, key, offset, byte_size, file)
