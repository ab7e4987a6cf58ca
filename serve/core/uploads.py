"""Models that clients send with the command to load them, in parameters whose names begin with ``file:``."""

from __future__ import annotations

import base64
import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..models.files import ModelFolder
from ..protocol.inference import Code, ServeError

FILE = "file:"
_MOST_FILES = 1000
_DEEPEST = 6


def read_parameters(
    name: str, parameters: Mapping[str, Any], *, allow_upload: bool
) -> tuple[str | None, dict[str, bytes]]:
    """Returns the config and the files among the parameters of a command to load the model ``name``. The files are
    bytes, or base64 text as JSON has it.

    Raises ``ServeError`` if a parameter is unknown or malformed, or if the server takes no files.
    """
    given = dict(parameters)
    text = given.pop("config", None)
    if text is not None and not isinstance(text, str):
        raise ServeError(Code.INVALID_ARGUMENT, f"failed to load '{name}', the parameter config has to be a text")
    sent = {key[len(FILE) :]: given.pop(key) for key in tuple(given) if key.startswith(FILE)}
    if given:
        raise ServeError(
            Code.UNIMPLEMENTED,
            f"the load parameter '{next(iter(given))[:64]}' is not supported; use config, or {FILE}PATH",
        )
    if not sent:
        return text, {}
    if not allow_upload:
        raise ServeError(
            Code.PERMISSION_DENIED,
            f"failed to load '{name}', this server takes no models from clients; start it with --allow-model-upload",
        )
    if text is None:  # Triton asks for a config too, because the files replace the whole folder
        raise ServeError(
            Code.INTERNAL,
            f"failed to load '{name}', failed to poll from model repository: a model that is sent needs the parameter "
            "config, which may be {}",
        )
    return text, {_checked(name, path): _content(name, path, value) for path, value in sent.items()}


def _checked(name: str, path: str) -> str:
    parts = PurePosixPath(path).parts
    plain = all(part not in ("..", ".", "/") and "\\" not in part and "\0" not in part for part in parts)
    if not parts or not plain or len(parts) > _DEEPEST or path.startswith("/") or len(path) > 1024:
        raise ServeError(
            Code.INVALID_ARGUMENT,
            f"failed to load '{name}', the file path '{path[:64]}' has to stay inside the model's folder; write "
            f"{FILE}1/model.onnx",
        )
    return "/".join(parts)


def _content(name: str, path: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(str(value), validate=True)
    except ValueError:
        raise ServeError(
            Code.INVALID_ARGUMENT, f"failed to load '{name}', the content of '{path[:64]}' is not base64"
        ) from None


class Uploads:
    """Keeps the files that clients sent in folders of this process, one folder for each model."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}

    def store(self, name: str, files: Mapping[str, bytes]) -> ModelFolder:
        """Writes ``files`` into a new folder. Raises ``ServeError`` if that fails. The folder is deleted by ``keep`` or
        ``drop``."""
        if len(files) > _MOST_FILES:
            raise ServeError(
                Code.INVALID_ARGUMENT, f"failed to load '{name}', {len(files)} files are more than {_MOST_FILES}"
            )
        folder = Path(tempfile.mkdtemp(prefix="accel-upload-"))
        try:
            for path, content in files.items():
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            text = f"failed to load '{name}', failed to poll from model repository: can't store the files"
            raise ServeError(Code.INTERNAL, f"{text} ({error.strerror})") from None
        return ModelFolder(folder, alias=name)

    def keep(self, name: str, folder: ModelFolder) -> None:
        """Remembers the folder of a loaded model, and deletes the folder before it."""
        self.drop(name)
        self._folders[name] = folder.path

    def drop(self, name: str) -> None:
        """Deletes the folder of a model. A model that still runs has its files open or in memory."""
        if (folder := self._folders.pop(name, None)) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def files(self, name: str) -> dict[str, bytes]:
        """Returns the files that a client sent for a model, or none."""
        folder = self._folders.get(name)
        found: dict[str, bytes] = {}
        if folder is not None:
            for path in folder.rglob("*"):
                with contextlib.suppress(OSError):  # another thread deletes the folder
                    if path.is_file():
                        found[path.relative_to(folder).as_posix()] = path.read_bytes()
        return found

    def close(self) -> None:
        """Deletes all folders."""
        for name in tuple(self._folders):
            self.drop(name)
