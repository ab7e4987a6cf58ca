"""Finds the model that ``accel train`` wrote, in a run folder or in its subfolder ``final``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = "config.json"


def final_folder(folder: Path) -> Path | None:
    """Returns the folder of the trained model, which is ``folder`` or its subfolder ``final``. Returns None if accel
    train wrote neither folder.
    """
    return next((found for found in (folder, folder / "final") if trained_config(found) is not None), None)


def trained_config(folder: Path) -> dict[str, Any] | None:
    """Returns what ``accel train`` recorded about the model in ``folder``, or None if another tool wrote the folder."""
    try:
        body = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) and "accel_train" in body else None
