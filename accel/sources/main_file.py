"""Finds the main file in an artifact's folder."""

from __future__ import annotations

import json
from pathlib import Path

from accel.tables.kinds import main_files

# The report that accel optimize writes beside the main file: all candidates, their measurements and the chosen
# candidate.
REPORT = "optimize.json"


def main_file(folder: Path) -> Path | None:
    """Returns the main file of the artifact in ``folder``. The main file is the file that ``optimize.json`` names as
    chosen, or else the first existing file of ``main_files()``. Returns None if the folder has no main file."""
    try:
        chosen = json.loads((folder / REPORT).read_text(encoding="utf-8"))["chosen"]["file"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        chosen = None
    names = [chosen] if chosen in main_files() else []
    return next((folder / name for name in (*names, *main_files()) if (folder / name).is_file()), None)
