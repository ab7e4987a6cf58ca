"""Saves TensorRT's timing cache, the builder's measurements of kernels on this GPU, for later builds.

TensorRT's developer guide describes timing caches in "The timing cache". Only the data-center toolkit has a timing
cache. TensorRT for RTX measures nothing during a build, and caches kernels on the machine that runs the engine. The
file name of a timing cache contains the version of the toolkit and the compute capability of the GPU. TensorRT also
checks the version and the GPU when it loads a timing cache.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from accel.artifact import beside
from accel.errors import CannotWrite
from accel.folders.writing import make_folder
from accel.progress import report

_SUM_BYTES = 32


def timing_file(folder: Path, version: str, capability: str) -> Path:
    """Returns the path of the timing cache."""
    return folder / f"tensorrt-{version}-sm{capability.replace('.', '')}.timing"


def use_timing_cache(config: Any, file: Path) -> None:
    """Puts the saved timing cache into the builder's ``config``. If there is no usable timing cache, puts an empty
    timing cache into ``config``, which the builder then fills.

    Ignores a timing cache that is damaged or belongs to another GPU, because a build also works without the cache.
    """
    for known in (_read(file), b""):
        cache = config.create_timing_cache(known)
        if cache is not None and config.set_timing_cache(cache, False):
            return


def keep_timing_cache(config: Any, file: Path) -> None:
    """Writes the measurements of the builder to ``file``. A write error is reported and does not fail the build."""
    cache = config.get_timing_cache()
    if cache is None:
        return
    known = bytes(cache.serialize())
    try:
        make_folder(file.parent)
        with beside(file) as temporary:
            temporary.write_bytes(hashlib.sha256(known).digest() + known)
    except CannotWrite as error:
        report(f"the timing cache can't be kept ({error})")


def _read(file: Path) -> bytes:
    """Returns the saved bytes, or empty bytes if their checksum is wrong. The checksum keeps damaged bytes away from
    TensorRT's native code."""
    try:
        content = file.read_bytes()
    except OSError:
        return b""
    known = content[_SUM_BYTES:]
    return known if content[:_SUM_BYTES] == hashlib.sha256(known).digest() else b""
