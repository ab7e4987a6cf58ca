"""TensorRT's timing cache: what the builder has measured of its kernels on this GPU, to be measured once.

(TensorRT's developer guide, "The timing cache".) For the data-centre toolkit alone: TensorRT for RTX measures nothing
when it builds, it has a cache of its own where the engine runs. It is kept by the version of the toolkit and the GPU
that was measured; TensorRT checks the same itself.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from accel.artifact import beside
from accel.progress import report

_SUM_BYTES = 32


def timing_file(folder: Path, version: str, capability: str) -> Path:
    """Where it is kept."""
    return folder / f"tensorrt-{version}-sm{capability.replace('.', '')}.timing"


def use_timing_cache(config: Any, file: Path) -> None:
    """Give the builder's ``config`` what is known, or an empty cache to fill. What is damaged, or of another GPU, is
    left out: it makes builds quicker and nothing else."""
    for known in (_read(file), b""):
        cache = config.create_timing_cache(known)
        if cache is not None and config.set_timing_cache(cache, False):
            return


def keep_timing_cache(config: Any, file: Path) -> None:
    """Write down what the builder knows now. A build that succeeded doesn't fail for it."""
    cache = config.get_timing_cache()
    if cache is None:
        return
    known = bytes(cache.serialize())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside(file) as temporary:
            temporary.write_bytes(hashlib.sha256(known).digest() + known)
    except OSError as error:
        report(f"the timing cache can't be kept ({error.strerror or error})")


def _read(file: Path) -> bytes:
    """The bytes that were kept, if they are all there: native code reads them next."""
    try:
        content = file.read_bytes()
    except OSError:
        return b""
    known = content[_SUM_BYTES:]
    return known if content[:_SUM_BYTES] == hashlib.sha256(known).digest() else b""
