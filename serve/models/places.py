"""Finds the folders of the models: in a repository, or where the command line names single models.

``accel serve my.onnx``, ``accel serve out/`` and ``accel serve a=out/ b=other.onnx`` serve single models. A single
model is a model file, a folder that ``accel optimize`` wrote, or a model's folder in Triton's layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from accel.errors import BadRepository, UsageError
from accel.sources.main_file import main_file

from .files import CONFIG, PYTHON_FILE, Fingerprint, ModelFolder, stamp, valid_name, valid_version


class Places(Protocol):
    """The folders of the models of a server."""

    def folders(self) -> list[ModelFolder]:
        """Returns the folders of all models, sorted by name. Raises ``OSError`` if the folders can't be listed."""
        ...

    def folder(self, name: str) -> ModelFolder | None:
        """Returns the folder of the model ``name``, or None if there is no such model."""
        ...

    def reachable(self) -> bool:
        """Tells whether the models can be listed. Returns False for an unreachable network share."""
        ...


@dataclass(frozen=True)
class RepositoryFolder:
    """A repository: the folder ``root`` with one folder for each model."""

    root: Path

    def folders(self) -> list[ModelFolder]:
        paths = sorted(path for path in self.root.iterdir() if path.is_dir() and valid_name(path.name))
        return [ModelFolder(path) for path in paths]

    def folder(self, name: str) -> ModelFolder | None:
        found = ModelFolder(self.root / name) if valid_name(name) else None
        return found if found is not None and found.path.is_dir() else None

    def reachable(self) -> bool:
        return self.root.is_dir()


class NamedModels:
    """Single models, whose names map to their files or folders."""

    def __init__(self, named: Mapping[str, Path]) -> None:
        self._found = {name: _folder(name, path) for name, path in sorted(named.items())}

    def folders(self) -> list[ModelFolder]:
        return list(self._found.values())

    def folder(self, name: str) -> ModelFolder | None:
        return self._found.get(name)

    def reachable(self) -> bool:
        return True


@dataclass(frozen=True)
class SingleModel(ModelFolder):
    """The folder of a single model, which has version 1 and no version folders. If ``file`` is "", the folder's main
    file is the model. A folder may have a ``config.pbtxt``; beside a single file, a ``config.pbtxt`` is not read."""

    file: str = ""

    def versions(self) -> list[str]:
        return ["1"]

    def version_folder(self, version: str) -> Path:  # noqa: ARG002
        return self.path

    def model_file(self, version: str, named: str) -> tuple[Path | None, str]:
        return super().model_file(version, named or self.file)

    def config_text(self) -> str | None:
        return None if self.file else super().config_text()

    def files(self) -> Fingerprint:
        if not self.file:
            return super().files()
        # The folder of a single file may be a home folder with many files, so only files of the same name are read.
        stem = Path(self.file).stem
        beside = (path for path in self.path.iterdir() if path.name.startswith(stem) and path.is_file())
        return tuple(sorted(stamp(path, self.path) for path in beside))

    def version_files(self, version: str) -> Fingerprint:  # noqa: ARG002
        return ()  # ``files`` has all files


def _folder(name: str, path: Path) -> ModelFolder:
    if not valid_name(name):
        raise UsageError(
            f"{name!r} can't be a model's name; write NAME=PATH with a name of the letters a-z and A-Z and of digits"
        )
    if path.is_file():
        return SingleModel(path.parent, alias=name, file=path.name)
    if not path.is_dir():
        raise BadRepository(f"{path} does not exist; check the path of the model")
    if main_file(path) is not None:
        return SingleModel(path, alias=name)
    if _has_versions(path):
        return ModelFolder(path, alias=name)
    raise BadRepository(
        f"{path} holds no model; name a model file, the folder that accel optimize -o wrote, or a folder with the "
        "versions of one model"
    )


def _has_versions(path: Path) -> bool:
    """Tells whether ``path`` is the folder of one model in Triton's layout."""
    if (path / CONFIG).is_file():
        return True
    try:
        inner = [sub for sub in path.iterdir() if sub.is_dir()]
    except OSError as error:
        raise BadRepository(f"can't read the folder {path} ({error.strerror}); check its permissions") from None
    return any(
        valid_version(sub.name) and (main_file(sub) is not None or (sub / PYTHON_FILE).is_file()) for sub in inner
    )


def read_words(words: Sequence[str]) -> tuple[str, dict[str, Path]]:
    """Returns the repository that the words of the command line name, or "" and the single models by name.

    Raises ``UsageError`` if the words name several repositories, two models of one name, or both a repository and a
    model. Raises ``BadRepository`` if a word names nothing that exists.
    """
    named: dict[str, Path] = {}
    repositories: list[str] = []
    for word in words:
        name, path = _split(word)
        if path is None or (not name and path.is_dir() and main_file(path) is None and not _has_versions(path)):
            repositories.append(word)
            continue
        name = name or _name_of(path)
        if name in named:
            raise UsageError(f"two models have the name {name!r}; give each its own name: NAME=PATH")
        named[name] = path
    if len(repositories) > 1 or (repositories and named):
        raise UsageError(f"{repositories[-1]} is a repository, which is served alone; start a second server for it")
    return (repositories[0] if repositories else ""), named


def why_empty(repository: str, polled: bool) -> str:
    """Returns a sentence that says what ``repository`` lacks if it is a folder without a model, else "". Doesn't read a
    repository at an address. ``polled`` tells whether the server finds models that are added later."""
    root = Path(repository)
    if not repository or "://" in repository or not root.is_dir() or RepositoryFolder(root).folders():
        return ""
    add = "add one, which the server then finds" if polled else "add one and start the server again"
    return (
        f"the folder {repository} has no model: a repository has a subfolder for each model, with the model's file or "
        f"its numbered versions in it; {add}, or name a model file"
    )


def _split(word: str) -> tuple[str, Path | None]:
    """Returns the name and the path in ``NAME=PATH`` or ``PATH``. The path is None if ``word`` is an address."""
    if "://" in word.partition("=")[0]:
        return "", None
    with contextlib.suppress(OSError, ValueError):  # a word may be too long for a path
        if Path(word).exists():
            return "", Path(word)
    name, equals, path = word.partition("=")
    if equals and name and path:
        if "://" in path:
            raise UsageError(f"{path} is the address of a repository, which takes no name; write {path} alone")
        return name, Path(path)
    raise BadRepository(
        f"{word[:256]} does not exist; give a model file, a folder that accel optimize wrote, or a repository: a "
        "folder with one subfolder for each model"
    )


def _name_of(path: Path) -> str:
    """Returns the name of a model without ``NAME=``: the file's name without its suffix, or the folder's name."""
    found = path.absolute()
    if found.is_file() and found.stem != "model":
        return found.stem
    found = found.parent if found.is_file() else found
    return found.parent.name if valid_version(found.name) else found.resolve().name
