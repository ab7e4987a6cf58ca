"""Provides a fake Hugging Face Hub on this machine, which serves files from a dict. The hub answers the four kinds of
requests that huggingface_hub sends."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Serves ``files`` by repository and name. ``refused`` maps a repository to the status and the X-Error-Code of its
    answers. A repository in ``gated`` is listed, but its files are refused. If ``cut`` names a file, the first download
    of the file ends after half of its bytes. ``asked`` lists the requests with their Range header."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files: dict[str, dict[str, bytes]] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.gated: set[str] = set()
        self.cut = ""
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((f"{self.command} {path}", self.headers.get("Range", "")))
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        files = self.server.files.get(repo)
        if repo in self.server.refused:
            status, code = self.server.refused[repo]
            return self._send(status, b"{}", {"X-Error-Code": code} if code else {})
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if rest[:1] == ["resolve"]:
            return self._file(repo, files, "/".join(rest[2:]))
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": _oid(b)} for n, b in files.items()]
            return self._send(200, json.dumps(tree).encode())
        info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        return self._send(200, json.dumps(info).encode())

    def _file(self, repo: str, files: Mapping[str, bytes], name: str) -> None:
        if repo in self.server.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        body = files[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(body)}"', "Accept-Ranges": "bytes"}
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        return self._send(206 if begin else 200, body[begin:], headers, cut=name == self.server.cut)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut:
            self.server.cut, body = "", body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)


def _oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Runs a hub until the end of the ``with`` block."""
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def into_cache(cache: Path, repo: str, files: Mapping[str, bytes]) -> Path:
    """Writes ``files`` to a cache of ``repo``. The cache has huggingface_hub's layout, with symbolic links to blobs.
    Returns the snapshot folder."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    (root / "blobs").mkdir()
    snapshot = root / "snapshots" / COMMIT
    for name, body in files.items():
        (root / "blobs" / _oid(body)).write_bytes(body)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(root / "blobs" / _oid(body))
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the contents of the files below ``folder`` by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
