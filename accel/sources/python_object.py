"""Loads the user's own Python objects (factories, metrics) from a module or a file."""

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

from .hub.model_id import or_hub_id
from .nearby import nearby, or_nearby

_ACCEL = Path(__file__).resolve().parents[1]
_INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
MODEL = "factory"  # the role of an object that makes a model
SOURCE = "accel_source_"  # prefix of module names for modules loaded from a file


def load_object(spec: str, role: str) -> tuple[ModuleType, Any]:
    """Loads an object from ``package.module:name`` or ``file.py:name``. Returns the object's module and the object
    itself. ``role`` is the word for this kind of object in error messages.

    Raises ``BadSource`` if the object does not exist, or if the import of its module fails.
    """
    where, _, name = spec.rpartition(":")
    if not where:
        where, name = spec, ""
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where, spec, role)
    if not name or not hasattr(module, name):
        called, has_arguments, _ = name.partition("(")
        if has_arguments and hasattr(module, called):
            alone = f"a function without arguments that returns {name}" if role == MODEL else "a function that calls it"
            raise BadSource(
                f"{spec} has arguments, but accel takes the name of a {role}; give {where}:{called}, or write {alone}, "
                f"and give {where}:FUNCTION"
            )
        own = [n for n, f in vars(module).items() if callable(f) and _is_users(f, module)]
        problem = f"has no {name!r}" if name else f"needs the name of a {role}"
        names = ", ".join(own) or "none found"
        raise BadSource(f"{where} {problem}; write {where}:NAME, where NAME is one of these: {names}")
    return module, getattr(module, name)


def _is_users(found: Any, module: ModuleType) -> bool:
    """Tells whether an object of ``module`` is the user's own code, perhaps of another module of the user."""
    home = getattr(found, "__module__", None)
    return home == module.__name__ or (isinstance(home, str) and home in sys.modules and not is_installed(home))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadSource(f"{path} does not exist; {or_nearby(str(path))}")
    name = f"{SOURCE}{path.stem}_{text_sha256(str(path.absolute()))[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.absolute().parent)
    sys.path.insert(0, folder)  # lets the file import modules from its own folder
    try:
        # An import would take the compiled file in __pycache__, even if the source was rewritten in the same second
        # with the same size.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise raised(f"importing {path}", error) from error
    finally:
        sys.path.remove(folder)
    return module


def _import_module(name: str, spec: str, role: str) -> ModuleType:
    if Path(spec).is_file():
        raise BadSource(
            f"the file ending of {spec} is unknown; rename the file so that its ending shows its format: .onnx, .pt2, "
            ".pt (TorchScript) or .py"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            if role != MODEL:
                forms = f"file.py:{role.upper()} or package.module:{role.upper()}"
                raise BadSource(f"{spec!r} is no importable {role}; give {forms}") from error
            near = nearby(spec)
            here = f"give {near} if you mean that, or " if near else ""
            raise BadSource(
                f"{spec!r} is no file, folder or importable module; {here}give a path, file.py:factory, "
                f"package.module:factory{or_hub_id(spec)}"
            ) from error
        raise raised(f"importing {name}", error) from error
    except ValueError as error:
        raise BadSource(
            f"{spec!r} is no module name; give a path, file.py:factory or package.module:factory"
        ) from error
    except (Exception, SystemExit) as error:
        raise raised(f"importing {name}", error) from error


def raised(what: str, error: Exception | SystemExit) -> BadSource:
    """Returns a one-line error for an exception in the user's own code, with the exception's location. The location is
    in the user's file, even if a library raised the exception. In the message, ``what`` names the code that raised the
    exception.
    """
    frames = [f for f in reversed(traceback.extract_tb(error.__traceback__)) if not _within(f.filename, _ACCEL)]
    place = place_in_user_code(error) or (
        f" ({Path(frames[0].filename).name} line {frames[0].lineno})" if frames else ""
    )
    if isinstance(error, SyntaxError) and error.filename:  # a syntax error has no stack frame in the file
        place = f" ({Path(error.filename).name} line {error.lineno})"
    there = f"{place}; correct that line" if place else "; correct it"  # a wrong call has no frame
    return BadSource(f"{what} raised {type(error).__name__}: {one_line(error, 200)}{there}")


def place_in_user_code(error: BaseException) -> str:
    """Returns the file and the line of the user's code that raised ``error``, as in `` (net.py line 7)``, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_file() and not _within(frame.filename, _ACCEL, *_INSTALLED):
            return f" ({Path(frame.filename).name} line {frame.lineno})"
    return ""


def is_installed(module: str) -> bool:
    """Tells whether ``module`` is loaded and belongs to an installed package, to accel or to Python."""
    found = sys.modules.get(module)
    if found is None or module == "__main__":
        return False
    file = getattr(found, "__file__", None)
    return module in sys.builtin_module_names if file is None else _within(file, _ACCEL, *_INSTALLED)


def _within(file: str, *folders: Path) -> bool:
    path = Path(file).resolve()
    return not path.is_relative_to(_ACCEL / "examples") and any(path.is_relative_to(folder) for folder in folders)
