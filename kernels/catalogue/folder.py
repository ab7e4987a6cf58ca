"""Finds the folder in which compiled libraries and the tuned table are kept."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder of compiled libraries and of the tuned table.

    The folder is ``kernels`` in ``$ACCEL_CACHE_DIR``, or in the user's cache.
    """
    return _folder(os.environ.get("ACCEL_CACHE_DIR"))


@lru_cache(maxsize=4)  # cached, because every launch calls this function
def _folder(given: str | None) -> Path:
    if given:
        return Path(given) / "kernels"
    import platformdirs

    return Path(platformdirs.user_cache_dir("accel")) / "kernels"
