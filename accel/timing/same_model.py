"""Finds candidates that are the baseline under another name: the same files in the same session."""

from __future__ import annotations

from accel.runtimes.base import default_runtime
from accel.tables.kinds import KINDS

from .blocks import Candidate


def is_same_model(one: Candidate, other: Candidate) -> bool:
    """Tells whether both candidates run files with equal bytes in a session with equal options. Returns False for
    sources, because the files of a source may lack its code."""
    kinds = [KINDS.get(candidate.artifact.kind) for candidate in (one, other)]
    if kinds[0] is not kinds[1] or kinds[0] is None or kinds[0].framework:
        return False
    sessions = [
        (type(c), c.opener, c.streams, dict(c.options), c.runtime or default_runtime(c.artifact).name)
        for c in (one, other)
    ]
    files = [candidate.artifact.files for candidate in (one, other)]
    if sessions[0] != sessions[1] or not all(path.is_file() for path in (*files[0], *files[1])):
        return False
    # Sizes are compared first, because a hash of a large file takes seconds.
    sizes = [[path.stat().st_size for path in paths] for paths in files]
    hashes = (list(candidate.artifact.hashes().values()) for candidate in (one, other))
    return sizes[0] == sizes[1] and next(hashes) == next(hashes)
