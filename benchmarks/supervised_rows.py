"""Measures rows in a separate process. A row that kills the process or hangs costs only itself."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

STALLED = 90.0  # seconds that a row may take, because a hanging kernel never ends
STARTED = 150.0  # seconds until the process has loaded everything and measured a copy
LOST = 75  # exit status of a process that has written a failed row and can't use the GPU any more


def supervise(
    command: Sequence[str], seconds: float, file: Path, blame: Callable[[str], bool], stalled: float, go_on: bool
) -> int:
    """Runs ``command`` with ``--seconds`` until ``command`` finishes or the time is over, and returns the exit status.
    Adds ``--go-on`` from the second start on, or from the first with ``go_on``. ``command`` writes ``file`` after each
    row. If ``command`` dies or writes nothing for ``stalled`` seconds, ``blame`` records why at the row that did it,
    and tells whether there was such a row."""
    end = time.monotonic() + seconds
    if not go_on:
        file.unlink(missing_ok=True)  # from an earlier run
    words = ["--go-on"] if go_on else []
    while True:
        left = end - time.monotonic()
        process = subprocess.Popen([*command, "--seconds", f"{max(left, 0):.0f}", *words])
        code, begun = _watched(process, file, stalled)
        if code == 0 or not begun or end - time.monotonic() < 0:
            return 1 if code is None else code
        why = f"no answer in {stalled:.0f} s" if code is None else f"its process died with status {code}"
        if code != LOST and not blame(why):
            return 1 if code is None else code
        words = ["--go-on"]


def _watched(process: subprocess.Popen[bytes], file: Path, stalled: float) -> tuple[int | None, bool]:
    """Returns the exit status of a process, or None for a hanging process, which is killed. Also tells whether the
    process wrote any results: a crash before the first write is not the fault of a row."""

    def written() -> int:
        return file.stat().st_mtime_ns if file.is_file() else 0

    def no_row_left() -> bool:
        return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("left") == 0

    before = seen = written()
    since = time.monotonic()
    try:
        while process.poll() is None:
            if (now := written()) != seen:
                seen, since = now, time.monotonic()
            limit = stalled if seen != before else STARTED
            # If no row is left, only torch.compile runs, which may take long.
            if time.monotonic() - since > limit and not no_row_left():
                return None, seen != before
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
        return process.returncode, written() != before
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
