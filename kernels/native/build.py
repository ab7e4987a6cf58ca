"""Compiles ``csrc/*.cu`` with nvcc for GPUs, and with a C++ compiler and its sanitizers for tests on the CPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel.errors import UnknownName, UnsupportedHere

from ..catalogue.folder import cache_folder
from ..catalogue.units import UNITS, cutlass_includes, has_code_for, units_for

if TYPE_CHECKING:
    from .compilers import Compilers

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libaccel_kernels.so"
RECORD = "library.json"
CHOSEN = "ACCEL_KERNEL_LIBRARY"  # the environment variable that names a library to run
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_120", "sm_120a")
Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, kw_only=True)
class Built:
    """Describes a built library, with its path, its architectures, and whether the library came from the cache.

    ``warnings`` has the GPU assembler's warnings about speed (spilled registers, serialized wgmma).
    """

    path: Path
    archs: tuple[str, ...]
    cached: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Job:
    """A file to compile. ``command`` doesn't include the output option, and ``name`` is shown in progress messages."""

    name: str
    command: tuple[str, ...]


def find_nvcc() -> str | None:
    """Returns the path of nvcc from PATH, or else from CUDA_HOME (by default /usr/local/cuda). Returns None if nvcc
    isn't found."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def build(
    archs: Sequence[str],
    *,
    units: Sequence[str] | None = None,
    jobs: int | None = None,
    cache: Path | None = None,
    progress: Progress = lambda _message, _fraction: None,
) -> Built:
    """Builds the library for architectures such as ``sm_90a``, or takes the library from the cache if the sources are
    unchanged.

    ``units`` names the CUTLASS units to compile, by default all units of these architectures. If ``units`` is ``()``,
    no unit is compiled, and CUTLASS isn't needed. ``jobs`` is the number of files to compile at a time, by default one
    per core. Compiling a file takes up to 3 GB of memory.

    Raises ``UnknownName`` for an unknown architecture or unit, ``UnsupportedHere`` without nvcc, ``MissingExtra``
    without the headers of CUTLASS, and ``BuildFailed`` with the compiler's first error.
    """
    for arch in archs:
        if arch not in ARCHS:
            raise UnknownName(f"unknown architecture {arch!r}; use one of {', '.join(ARCHS)}")
    for name in units or ():
        if name not in (known := [unit.name for unit in UNITS]):
            raise UnknownName(f"unknown unit {name!r}; use one of {', '.join(known)}")
    nvcc = find_nvcc()
    if nvcc is None:
        raise UnsupportedHere("nvcc is not installed here; install the CUDA toolkit or put nvcc on PATH")
    wanted = tuple(sorted(set(archs)))
    flags = [nvcc, "-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-Xptxas", "-warn-spills"]
    jobs_found = [
        Job(name=unit.name, command=(*flags, *unit.flags, *_includes(), *_codes(own), str(SOURCES / unit.source)))
        for unit, own in units_for(wanted)
        if units is None or unit.name in units
    ]  # the longest compilations come first
    link = [nvcc, "-shared", "-cudart=static"]
    # The version of CUTLASS is part of the cache key, because an upgrade puts other headers at the same path.
    headers = (cutlass_includes()[0] / "cutlass" / "version.h").read_text() if jobs_found else ""
    jobs_found += [
        Job(name=s.stem, command=(*flags, "-lineinfo", *_codes(wanted), str(s))) for s in sorted(SOURCES.glob("*.cu"))
    ]
    return compile_library(jobs_found, link, wanted, also=headers, jobs=jobs, cache=cache, progress=progress)


def _codes(archs: Sequence[str]) -> list[str]:
    # The option -gencode is needed, because -arch=sm_90a also compiles for plain sm_90 with some versions of nvcc.
    return [f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" for arch in archs]


def _includes() -> list[str]:
    return [f"-I{folder}" for folder in cutlass_includes()]


def build_for_host(sanitize: str, *, cache: Path | None = None) -> Built:
    """Builds the kernel sources for the CPU, for tests. ``sanitize`` is the value of the compiler option -fsanitize,
    such as ``address,undefined``."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnsupportedHere("g++ is not installed here; install it to run the kernels on the host")
    flags = [
        compiler,
        "-x",
        "c++",
        "-std=c++20",
        "-O1",
        "-g",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
    ]
    flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    link = [compiler, "-shared", "-pthread", f"-fsanitize={sanitize}"]
    jobs = [Job(name=source.stem, command=(*flags, str(source))) for source in sorted(SOURCES.glob("*.cu"))]
    return compile_library(jobs, link, ("host",), cache=cache)


def find_library(cache: Path | None = None, *, capability: tuple[int, int] | None = None) -> Path | None:
    """Returns the library to run, or None. If ``$ACCEL_KERNEL_LIBRARY`` names a library, returns that library.
    Otherwise returns the best library that was built from the current sources.

    The best library has the most tensor-core GEMMs. Among libraries with the same number of GEMMs, the newest is the
    best. Libraries without code for the compute capability ``capability`` (None for any) are left out.
    """
    given = os.environ.get(CHOSEN)
    if given:
        return Path(given)
    digest = sources_digest()
    found = []
    for record in (cache or cache_folder()).glob(f"*/{RECORD}"):
        library, body = record.with_name(LIBRARY), _record(record)
        archs = body.get("archs", ["host"])
        if body.get("sources") != digest or not _has_code(archs, capability):
            continue
        found.append((len(units_in(library, capability) or ()), record.stat().st_mtime, library))
    return max(found)[2] if found else None


def units_in(library: Path, capability: tuple[int, int] | None = None) -> frozenset[str] | None:
    """Returns the CUTLASS units of a library that have code for this compute capability (None for any).

    Reads the record ``library.json`` beside the library. Returns None if there is no record.
    """
    body = _record(library.with_name(RECORD))
    if "files" not in body:
        return None
    built = {unit.name: archs for unit, archs in units_for(body.get("archs", ()))}
    return frozenset(name for name in body["files"] if name in built and _has_code(built[name], capability))


def has_code(library: Path, capability: tuple[int, int] | None = None) -> bool:
    """Tells whether a library has code for this compute capability, according to the record beside the library.

    Returns True if there is no record.
    """
    body = _record(library.with_name(RECORD))
    return "archs" not in body or capability is None or _has_code(body["archs"], capability)


def record_of(library: Path) -> dict[str, Any]:
    """Returns the record beside a library, or an empty dict if there is no record."""
    return _record(library.with_name(RECORD))


def _has_code(archs: Sequence[str], capability: tuple[int, int] | None) -> bool:
    real = [arch for arch in archs if arch in ARCHS]  # not "host"
    return any(capability is None or has_code_for(arch, capability) for arch in real)


def sources_digest() -> str:
    """Returns the sha256 over every file under ``csrc``."""
    return digest_of(SOURCES)


def digest_of(folder: Path) -> str:
    """Returns the sha256 over the files under ``folder`` and their names."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _record(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def compile_library(
    compiled: Sequence[Job],
    link: list[str],
    archs: tuple[str, ...],
    *,
    file: str = LIBRARY,
    also: str = "",
    noted: Mapping[str, str] = MappingProxyType({}),
    jobs: int | None = None,
    cache: Path | None = None,
    progress: Progress = lambda _message, _fraction: None,
) -> Built:
    """Runs the compile jobs in ``compiled`` in parallel, and links the object files to the library ``file`` in the
    cache.

    The text in ``also`` describes further inputs of the library, and is part of the cache key. The entries in ``noted``
    are added to the library's record.
    """
    from .compilers import Compilers, scratch_beside  # imported here, because compilers.py needs POSIX

    version = subprocess.run([link[0], "--version"], capture_output=True, text=True, check=True).stdout
    digest = sources_digest()
    commands = [" ".join(job.command).replace(str(SOURCES), "") for job in compiled]
    key = hashlib.sha256("\0".join([version, digest, also, *commands, *link]).encode()).hexdigest()
    library = (cache or cache_folder()) / key[:32] / file
    if library.is_file():
        warnings = tuple(map(str, _record(library.with_name(RECORD)).get("warnings", ())))
        return Built(path=library, archs=archs, cached=True, warnings=warnings)
    with scratch_beside(library.parent) as scratch, Compilers(scratch) as compilers:
        objects = [scratch / f"{job.name}.o" for job in compiled]
        warnings = _compile_all(compilers, compiled, objects, jobs, progress)
        made = scratch / "library"
        made.mkdir()
        compilers.run([*link, *map(str, objects), "-o", str(made / file)])
        body = {
            "sources": digest,
            "archs": archs,
            "files": [job.name for job in compiled],
            "compiler": version.strip().splitlines()[-1],
            "warnings": warnings,
            **noted,
        }
        (made / RECORD).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
        if library.parent.exists():  # another process built the same library meanwhile
            return Built(path=library, archs=archs, cached=True, warnings=warnings)
        made.rename(library.parent)
    progress("linked", 1.0)
    return Built(path=library, archs=archs, cached=False, warnings=warnings)


def _compile_all(
    compilers: Compilers, compiled: Sequence[Job], objects: Sequence[Path], jobs: int | None, progress: Progress
) -> tuple[str, ...]:
    warnings: list[str] = []
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        running = {
            pool.submit(compilers.run, [*job.command, "-c", "-o", str(target)]): job.name
            for job, target in zip(compiled, objects, strict=True)
        }
        progress(f"compiling {len(compiled)} files", 0.0)
        try:
            for done, future in enumerate(as_completed(running), 1):
                name = running[future]
                warnings += [f"{name}: {line}" for line in slow_code(future.result())]
                progress(f"compiled {name}", done / (len(compiled) + 1))
        except BaseException:
            compilers.end()  # without this call, the compilers would run on for minutes
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(sorted(warnings))


def slow_code(said: str) -> list[str]:
    """Returns the warnings of ptxas about slow code, such as spilled registers or serialized wgmma."""
    return [line.strip() for line in said.splitlines() if re.search(r"spilled|C7510", line)]
