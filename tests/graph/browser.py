"""Pages in a real browser, headless."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
MISSING = "needs Chromium: apt-get install chromium"
browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)

# A container's /dev/shm is too small for a browser, and its first run asks questions.
QUIET = ("--disable-dev-shm-usage", "--no-first-run")


def _run(folder: Path, *words: str) -> str:
    if CHROMIUM is None:
        pytest.fail(MISSING)
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", profile, *QUIET, *words]
    for _ in range(2):  # that the browser itself fell over says nothing of a page
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ran.returncode == 0:
            return ran.stdout
    pytest.fail(ran.stderr[-500:])


def document(folder: Path, address: str, milliseconds: int = 3000) -> str:
    """The document at ``address`` as the browser has it after so many milliseconds of the page's own time."""
    return _run(folder, "--window-size=1400,900", "--dump-dom", f"--virtual-time-budget={milliseconds}", address)


def screenshot(folder: Path, address: str, *words: str) -> Path:
    """A picture of a window of 1200 by 700 in ``folder``."""
    shot = folder / "shot.png"
    _run(folder, "--window-size=1200,700", f"--screenshot={shot}", *words, address)
    return shot
