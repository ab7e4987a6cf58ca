"""Compiles the CPU kernels with a C++ compiler. Each kernel's file is compiled for the instructions that it uses."""

from __future__ import annotations

import platform
import shutil
from functools import lru_cache
from pathlib import Path

from accel.errors import AccelError, UnsupportedHere

from ...catalogue.folder import cache_folder
from ..build import Built, Job, Progress, compile_library, digest_of, record_of
from .library import CpuLibrary

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libaccel_cpu.so"

_ANY = ("product", "pool", "portable")
# The instructions of each further file, by the machine.
_INSTRUCTIONS = {
    "x86_64": {
        "avx512_vnni": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "fma", "f16c"),
        "avx2": ("avx2", "fma", "f16c"),
    }
}
# Kernels agree bit by bit only if the compiler joins no products and sums by itself. GCC 12 warns about uninitialized
# values in its own headers.
_FLAGS = (
    "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-uninitialized",
    "-Wno-maybe-uninitialized", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip


def compiler_for_cpu() -> str:
    """Returns the path of g++. Raises ``UnsupportedHere`` if it isn't installed."""
    found = shutil.which("g++")
    if found is None:
        raise UnsupportedHere("g++ is not installed here; install it to build the kernels for CPUs")
    return found


def jobs_for_cpu(compiler: str, flags: tuple[str, ...] = ("-O3",)) -> list[Job]:
    """Returns the files to compile on this machine."""
    own = dict.fromkeys(_ANY, ()) | _INSTRUCTIONS.get(platform.machine(), {})
    return [
        Job(
            name=f"cpu_{name}",
            command=(compiler, *_FLAGS, *flags, *(f"-m{one}" for one in needs), str(SOURCES / f"{name}.cpp")),
        )
        for name, needs in own.items()
    ]


def build_for_cpu(
    *,
    sanitize: str | None = None,
    cache: Path | None = None,
    progress: Progress = lambda _message, _fraction: None,
) -> Built:
    """Builds the CPU kernels as a library with a C interface, or takes the library from the cache.

    ``sanitize`` is the value of the compiler option -fsanitize, for tests. Raises ``UnsupportedHere`` without g++, and
    ``BuildFailed`` with the compiler's first error.
    """
    compiler = compiler_for_cpu()
    flags: tuple[str, ...] = ("-O3",)
    link = [compiler, "-shared", "-pthread"]
    if sanitize is not None:
        flags = ("-O1", "-g", f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
        link.append(f"-fsanitize={sanitize}")
    return compile_library(
        jobs_for_cpu(compiler, flags),
        link,
        ("host",),
        file=LIBRARY,
        also=digest_of(SOURCES),
        noted={"cpu": digest_of(SOURCES), "sanitize": sanitize or ""},
        cache=cache,
        progress=progress,
    )


def find_cpu_library(cache: Path | None = None) -> Path | None:
    """Returns the newest library that ``build_for_cpu`` built from the current sources, or None."""
    wanted = digest_of(SOURCES)
    found = [
        (library.stat().st_mtime, library)
        for library in (cache or cache_folder()).glob(f"*/{LIBRARY}")
        if record_of(library).get("cpu") == wanted and not record_of(library).get("sanitize")
    ]
    return max(found)[1] if found else None


@lru_cache(maxsize=1)
def cpu_library() -> CpuLibrary | None:
    """Returns the library of CPU kernels that ``accel kernels build --cpu`` made, or None. Loads it only once."""
    path = find_cpu_library()
    try:
        return None if path is None else CpuLibrary(path)
    except AccelError:
        return None
