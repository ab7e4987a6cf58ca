"""Calls the hand-written kernels on buffers of exact size, in a process that has loaded a sanitizer.

The command line is ``python host_kernels.py library calls.npz results.npz``. For each call, ``calls.npz`` has a
description in JSON and the named operands.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from accel.kernels.native.library import Library

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]


def buffer(array: np.ndarray[Any, Any]) -> int:
    """Copies the bytes of ``array`` into memory from malloc, because the sanitizer knows the bounds of memory from
    malloc. Returns the address."""
    address = LIBC.malloc(array.nbytes)
    ctypes.memmove(address, array.ctypes.data, array.nbytes)
    return int(address)


def main() -> None:
    library, calls, results = Library(Path(sys.argv[1])), np.load(sys.argv[2]), {}
    for name in (key for key in calls.files if key.endswith("/call")):
        case = name.removesuffix("/call")
        call = json.loads(str(calls[name]))
        given = {key.split("/")[1]: calls[key] for key in calls.files if key.startswith(f"{case}/") and key != name}
        addresses = {key: buffer(array) for key, array in given.items()}
        getattr(library, call["function"])(**addresses, **call["numbers"])
        for out in call["outputs"]:
            array = np.empty_like(given[out])
            ctypes.memmove(array.ctypes.data, addresses[out], array.nbytes)
            results[f"{case}/{out}"] = array
    np.savez(sys.argv[3], **results)


if __name__ == "__main__":
    main()
