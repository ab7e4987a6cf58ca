"""Controls access with bearer tokens. Each token allows certain models and commands.

The tokens are in a TOML file. The file should hold the sha256 of a token instead of the token itself. An example file:

    [[token]]
    name = "ci"
    sha256 = "<hex of the token's sha256>"   # or token = "..."
    models = ["minilm", "image-*"]           # patterns of the models that the token may call and list
    control = true                           # the token may load, unload, share memory and change settings
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from accel.errors import BadRepository, one_line

from ..protocol.inference import Code, ServeError


@dataclass(frozen=True)
class Permission:
    """Holds the permission of one token. ``sha256`` is the token's hash in hex, ``models`` are its model patterns, and
    ``control`` is True if the token may control the server."""

    name: str
    sha256: str
    models: tuple[str, ...] = ("*",)
    control: bool = False


class Access:
    """Checks calls. If no permissions are given, every caller may do everything."""

    def __init__(self, permissions: tuple[Permission, ...] = ()) -> None:
        self._permissions = permissions

    @property
    def open(self) -> bool:
        return not self._permissions

    def check(self, token: str | None, *, model: str | None = None, control: bool = False) -> str:
        """Returns the name of the token, or "" if the server has no token file. Raises ``ServeError`` UNAUTHENTICATED
        if the token is unknown. Raises PERMISSION_DENIED if the token doesn't allow ``model``. With ``control``, also
        raises PERMISSION_DENIED if the token may not control the server."""
        if not self._permissions:
            return ""
        found = self._find(token)
        if control and not found.control:
            raise ServeError(Code.PERMISSION_DENIED, f"the token '{found.name}' may not control the server")
        if model is not None and not any(fnmatchcase(model, pattern) for pattern in found.models):
            raise ServeError(Code.PERMISSION_DENIED, f"the token '{found.name}' doesn't allow model '{model[:256]}'")
        return found.name

    @property
    def names(self) -> frozenset[str]:
        """Returns the names of all tokens."""
        return frozenset(p.name for p in self._permissions)

    def allowed(self, token: str | None, model: str) -> bool:
        """Returns True if the token allows ``model``."""
        try:
            self.check(token, model=model)
        except ServeError:
            return False
        return True

    def _find(self, token: str | None) -> Permission:
        digest = hashlib.sha256((token or "").encode("utf-8", "surrogateescape")).hexdigest()
        # Every token is compared, so that the time of the check doesn't reveal which token matches.
        matching = [p for p in self._permissions if hmac.compare_digest(p.sha256, digest)]
        if token is None or not matching:
            raise ServeError(
                Code.UNAUTHENTICATED,
                "this server requires a known token; send a token in the header 'authorization: Bearer TOKEN'",
            )
        return matching[0]


def bearer(header: str | None) -> str | None:
    """Returns the token in an ``authorization`` header, or None if the header has no bearer token."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def read_tokens(path: Path) -> Access:
    """Returns an ``Access`` with the tokens in ``path``. Raises ``BadRepository`` if the file is malformed or has no
    token."""
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRepository(f"can't read the tokens in the file {path}: {one_line(error)}") from None
    rows = body.get("token")
    if not isinstance(rows, list) or not rows:
        raise BadRepository(f"the file {path} has no [[token]] table; add a [[token]] with name, sha256 and models")
    return Access(tuple(_permission(path, row) for row in rows))


def _permission(path: Path, row: Any) -> Permission:
    if not isinstance(row, dict) or set(row) - {"name", "sha256", "token", "models", "control"}:
        raise BadRepository(
            f"token file {path}: a [[token]] may only have the keys name, sha256 (or token), models and control"
        )
    name, digest, token = row.get("name"), row.get("sha256"), row.get("token")
    if not isinstance(name, str) or (digest is None) == (token is None):
        raise BadRepository(f"token file {path}: each [[token]] needs a name and either sha256 or token")
    if token is not None:
        if not isinstance(token, str) or not token:
            raise BadRepository(f"token file {path}: the token '{name}' has to be a non-empty string")
        digest = hashlib.sha256(token.encode()).hexdigest()
    if not isinstance(digest, str) or len(digest) != 64 or set(digest.lower()) - set("0123456789abcdef"):
        raise BadRepository(f"token file {path}: the sha256 of the token '{name}' has to be 64 hex digits")
    models, control = row.get("models", ["*"]), row.get("control", False)
    if not isinstance(models, list) or not all(isinstance(m, str) for m in models) or not isinstance(control, bool):
        raise BadRepository(
            f"token file {path}: 'models' of the token '{name}' has to be a list of patterns, "
            "and 'control' has to be true or false"
        )
    return Permission(name, digest.lower(), tuple(models), control)
