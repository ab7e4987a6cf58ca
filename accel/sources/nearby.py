"""Finds the path that a user may mean: one with almost the same name, or a model in the given folder."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from accel.tables.kinds import artifact_suffixes, framework_suffixes

from .main_file import main_file


def nearby(path: str) -> str:
    """Returns the existing path that differs from ``path`` only in a few letters of its last name, or ""."""
    given = Path(path)
    try:
        names = [entry.name for entry in given.absolute().parent.iterdir()]
    except OSError:
        return ""
    close = get_close_matches(given.name, names, n=1, cutoff=0.75)
    return str(given.with_name(close[0])) if close and given.name else ""


def or_nearby(path: str) -> str:
    """Returns the advice to check ``path``, with an existing path that is close to it."""
    near = nearby(path)
    return f"check the path (did you mean {near}?)" if near else "check the path"


def no_model(folder: Path) -> str:
    """Returns what is wrong with a folder that isn't a model: which model in it to give, or that it holds none."""
    suffixes = (*artifact_suffixes(), *framework_suffixes())
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        entries = []
    files = [entry for entry in entries if entry.suffix in suffixes and entry.is_file()]
    found = files or [entry for entry in entries if entry.is_dir() and main_file(entry) is not None]
    if found:
        return f"is no model itself; give a model in it, such as {found[0]}"
    code = next((entry for entry in entries if entry.suffix == ".py"), Path("FILE.py"))
    return (
        f"holds no model; give a model's file, {code}:FUNCTION for a function that returns the model, or a folder "
        "that accel, accel train or save_pretrained wrote"
    )
