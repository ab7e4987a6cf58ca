"""Compiles the extension on libnghttp2 when ``--transport native`` first asks for it, and keeps it in the cache, where
``--transport auto`` finds it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from accel.errors import BuildFailed, UnsupportedHere
from accel.kernels.catalogue.folder import cache_folder
from accel.kernels.native.compilers import Compilers, scratch_beside

SOURCES = Path(__file__).parent / "csrc"
MODULE = "accel_port"
_FLAGS = ("-std=c17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror")
_LIBRARIES = ("-lnghttp2", "-lssl", "-lcrypto", "-lm")
_CHECK = """#include <Python.h>
#include <nghttp2/nghttp2.h>
#include <openssl/ssl.h>
int main(void) { return !nghttp2_version(0) || !TLS_server_method(); }
"""
NOT_BUILT = "the native transport isn't built; accel serve MODELS --transport native compiles it once"
ADVICE = "install a C compiler, the headers of Python, libnghttp2 and OpenSSL (Debian: gcc libnghttp2-dev libssl-dev)"


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@cache
def why_not() -> str:
    """Returns the reason why the extension can't be compiled here, or "" if it can. Takes a moment."""
    compiler = _compiler()
    if compiler is None:
        return f"there is no C compiler; {ADVICE}"
    with tempfile.TemporaryDirectory() as name:
        words = [compiler, "-x", "c", "-", f"-I{sysconfig.get_path('include')}", "-o", f"{name}/check", *_LIBRARIES]
        words += ["-shared", "-fPIC"]  # without Python's library
        try:
            found = subprocess.run(words, input=_CHECK, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} can't be run ({error}); {ADVICE}"
    if found.returncode:
        lines = [line for line in found.stderr.splitlines() if "error" in line or "cannot find" in line]
        return f"{(lines or ['the compiler failed'])[0].strip()[:200]}; {ADVICE}"
    return ""


def _place(flags: tuple[str, ...], folder: Path | None = None) -> Path:
    """Returns the path of the library that is compiled with ``flags``. Another compiler, or another version of Python,
    would make a library that works as well."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.[ch]"))]
    made_of = "\0".join([platform.machine(), *flags, *_LIBRARIES, *texts])
    key = hashlib.sha256(made_of.encode()).hexdigest()[:32]
    return (folder or cache_folder().parent / "native") / key / f"{MODULE}.abi3.so"


def find() -> Path | None:
    """Returns the library that ``ACCEL_PORT_LIBRARY`` names, or else the one in the cache, or None if there is none."""
    given = os.environ.get("ACCEL_PORT_LIBRARY")
    library = Path(given) if given else _place(_FLAGS)
    return library if given or library.is_file() else None


def why_not_built() -> str:
    """Returns the reason why there is no library that can be used at once, or "" if there is one."""
    if find() is None:
        return NOT_BUILT
    try:
        port_library()
    except (UnsupportedHere, BuildFailed) as error:
        return str(error)
    return ""


def build(*, sanitize: str = "", folder: Path | None = None) -> Path:
    """Compiles the extension, or takes it from the cache if the sources are unchanged. Returns the library's path.

    ``sanitize`` is the value of the compiler option -fsanitize, for tests. Raises ``UnsupportedHere`` if a compiler or
    a library is missing, and ``BuildFailed`` if the compiler fails.
    """
    flags: tuple[str, ...] = _FLAGS
    if sanitize:
        flags += (f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
    library = _place(flags, folder)
    if library.is_file():
        return library
    compiler = _compiler()
    reason = why_not()
    if compiler is None or reason:
        raise UnsupportedHere(f"can't compile the native transport: {reason}")
    sources = map(str, sorted(SOURCES.glob("*.c")))
    with scratch_beside(library.parent) as scratch, Compilers(scratch) as compilers:
        made = scratch / "library"
        made.mkdir()
        words = [compiler, *flags, f"-I{sysconfig.get_path('include')}", "-shared", *sources]
        compilers.run([*words, "-o", str(made / library.name), *_LIBRARIES])
        try:
            made.rename(library.parent)
        except OSError:
            if not library.is_file():  # another process may have built it meanwhile
                raise
    return library


@cache
def port_library() -> Any:
    """Returns the extension module. Raises ``UnsupportedHere`` or ``BuildFailed`` if there is none."""
    return load(find() or build())


def load(library: Path) -> Any:
    """Returns the extension module in the file ``library``."""
    spec = importlib.util.spec_from_file_location(MODULE, library)
    if spec is None or spec.loader is None:
        raise BuildFailed(f"{library} is no extension of Python; remove the file and try again")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UnsupportedHere(f"can't load {library}: {error}; remove the file and try again, or {ADVICE}") from None
    return module
