"""Pages in a real browser, headless."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


def _run(folder: Path, *words: str) -> str:
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", profile, *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-500:]
    return ran.stdout


def document(folder: Path, address: str, milliseconds: int = 3000) -> str:
    """The document at ``address`` as the browser has it after so many milliseconds of the page's own time."""
    return _run(folder, "--window-size=1400,900", "--dump-dom", f"--virtual-time-budget={milliseconds}", address)


def screenshot(folder: Path, address: str, *words: str) -> Path:
    """A picture of a window of 1200 by 700 in ``folder``."""
    shot = folder / "shot.png"
    _run(folder, "--window-size=1200,700", f"--screenshot={shot}", *words, address)
    return shot
