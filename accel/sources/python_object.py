"""Objects of the user's own Python: factories and metrics, from a module or a file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from accel.artifact import text_sha256
from accel.errors import BadSource, one_line

_ACCEL = Path(__file__).resolve().parents[1]
_INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
SOURCE = "accel_source_"  # what the names of modules that were a file begin with


def load_object(spec: str, role: str) -> tuple[ModuleType, Any]:
    """The module and the object that ``package.module:name`` or ``file.py:name`` names.

    Raises ``BadSource`` where there is no such thing, or where importing it raised.
    """
    where, _, name = spec.rpartition(":")
    if not where:
        where, name = spec, ""
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where, spec)
    if not name or not hasattr(module, name):
        own = [n for n, f in vars(module).items() if callable(f) and getattr(f, "__module__", "") == module.__name__]
        problem = f"has no {name!r}" if name else f"needs the name of a {role}"
        raise BadSource(f"{where} {problem}; write {where}:NAME with one of: {', '.join(own) or 'none found'}")
    return module, getattr(module, name)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadSource(f"{path} does not exist; check the path")
    name = f"{SOURCE}{path.stem}_{text_sha256(str(path.absolute()))[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.absolute().parent)
    sys.path.insert(0, folder)  # so that the file can import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise raised(f"importing {path}", error) from error
    finally:
        sys.path.remove(folder)
    return module


def _import_module(name: str, spec: str) -> ModuleType:
    if Path(spec).is_file():
        raise BadSource(
            f"{spec} is a file of a kind that accel doesn't know by its ending; rename it to .onnx, .pt2, .pt "
            "(TorchScript) or .py, whichever it is"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise BadSource(
                f"{spec!r} is no file, folder or importable module; "
                "give a path, file.py:factory or package.module:factory"
            ) from error
        raise raised(f"importing {name}", error) from error
    except ValueError as error:
        raise BadSource(
            f"{spec!r} is no module name; give a path, file.py:factory or package.module:factory"
        ) from error
    except (Exception, SystemExit) as error:
        raise raised(f"importing {name}", error) from error


def raised(what: str, error: Exception | SystemExit) -> BadSource:
    """What the user's own code raised, in one line with the place: where that code was, rather than the library that it
    called. (What ends the process is no way to end a call.)"""
    frames = [f for f in reversed(traceback.extract_tb(error.__traceback__)) if not _within(f.filename, _ACCEL)]
    frame = next((f for f in frames if Path(f.filename).is_file() and not _within(f.filename, *_INSTALLED)), None)
    frame = frame or next(iter(frames), None)
    place = f"{Path(frame.filename).name} line {frame.lineno}" if frame else ""
    if isinstance(error, SyntaxError) and error.filename:  # it has not run: the last frame is the import's own
        place = f"{Path(error.filename).name} line {error.lineno}"
    there = f" ({place}); mend it there" if place else "; mend it"  # a call that it doesn't take, say
    return BadSource(f"{what} raised {type(error).__name__}: {one_line(error, 200)}{there}")


def _within(file: str, *folders: Path) -> bool:
    path = Path(file).resolve()
    return not path.is_relative_to(_ACCEL / "examples") and any(path.is_relative_to(folder) for folder in folders)
