"""Measures rows in a separate process. If a row hangs or kills the process, only that row is lost."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

STALLED = 90.0  # The time limit of a row in seconds. Without a limit, a hanging kernel would run forever.
STARTED = 150.0  # The time limit in seconds for the first results of a new process.
LOST = 75  # The exit status of a process that recorded a failed row and can no longer use the GPU.


def supervise(
    command: Sequence[str], seconds: float, file: Path, blame: Callable[[str], bool], stalled: float, go_on: bool
) -> int:
    """Starts ``command`` again and again until ``command`` succeeds or the time is over, and returns the exit status.
    Passes the remaining time to ``command`` as ``--seconds``. Adds ``--go-on`` to every start except the first. If
    ``go_on`` is true, also adds ``--go-on`` to the first start. ``command`` writes ``file`` after each row. Calls
    ``blame(why)`` if ``command`` dies or writes nothing for ``stalled`` seconds. ``blame`` records the cause in the
    failed row, or returns False if all rows already have results."""
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
    """Returns the exit status of a process, or kills a hanging process and returns None. Also returns whether the
    process wrote any results, because a crash before the first results is not the fault of a row."""

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
            # After the last row, the process only measures torch.compile. The compilation may take longer than the time
            # limit of a row.
            if time.monotonic() - since > limit and not no_row_left():
                return None, seen != before
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
        return process.returncode, written() != before
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
