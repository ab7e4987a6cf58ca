"""Compiling ``csrc/*.cu``: with nvcc for GPUs, with a C++ compiler for the host (the tests' sanitizers)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from accel.errors import BuildFailed, UnknownName, UnsupportedHere

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libaccel_kernels.so"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_120", "sm_120a")
Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, kw_only=True)
class Built:
    """The library, what it holds, and whether it was there already."""

    path: Path
    archs: tuple[str, ...]
    cached: bool


def find_nvcc() -> str | None:
    """The nvcc on PATH, in CUDA_HOME, or in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def build(
    archs: Sequence[str],
    *,
    jobs: int | None = None,
    cache: Path | None = None,
    progress: Progress = lambda _message, _fraction: None,
) -> Built:
    """The library for these architectures (``sm_90a``), from the cache where the same sources were compiled before.

    ``jobs``: how many files at a time (default: the cores). Raises ``UnknownName`` for another architecture,
    ``UnsupportedHere`` without nvcc, ``BuildFailed`` with the compiler's first error.
    """
    for arch in archs:
        if arch not in ARCHS:
            raise UnknownName(f"unknown architecture {arch!r}; there are {', '.join(ARCHS)}")
    nvcc = find_nvcc()
    if nvcc is None:
        raise UnsupportedHere("nvcc is not installed here; install the CUDA toolkit or put nvcc on PATH")
    wanted = tuple(sorted(set(archs)))
    flags = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-lineinfo"]
    for arch in wanted:
        # The long form: -arch=sm_90a also compiles for plain sm_90 with some versions of nvcc.
        flags.append(f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}")
    return _compile([nvcc], flags, ["-shared", "-cudart=static"], wanted, jobs, cache, progress)


def build_for_host(sanitize: str, *, cache: Path | None = None) -> Built:
    """The same sources for the CPU; ``sanitize`` as for -fsanitize (``address,undefined``). For the tests."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnsupportedHere("g++ is not installed here; install it to run the kernels on the host")
    flags = ["-x", "c++", "-std=c++20", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    link = ["-shared", "-pthread", f"-fsanitize={sanitize}"]
    return _compile([compiler], flags, link, ("host",), None, cache, lambda _message, _fraction: None)


def _compile(
    compiler: list[str],
    flags: list[str],
    link: list[str],
    archs: tuple[str, ...],
    jobs: int | None,
    cache: Path | None,
    progress: Progress,
) -> Built:
    sources = sorted(SOURCES.glob("*.cu"))
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256("\0".join([version, *flags, *link]).encode())
    for file in sorted(SOURCES.iterdir()):
        key.update(file.name.encode() + b"\0" + file.read_bytes())
    library = (cache or _cache_folder()) / key.hexdigest()[:32] / LIBRARY
    if library.is_file():
        return Built(path=library, archs=archs, cached=True)
    scratch = library.parent.with_name(f".{library.parent.name}.{uuid.uuid4().hex[:8]}")
    scratch.mkdir(parents=True)
    try:
        objects = [scratch / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            running = {
                pool.submit(_run, [*compiler, *flags, "-c", str(source), "-o", str(target)]): source.name
                for source, target in zip(sources, objects, strict=True)
            }
            progress(f"compiling {len(sources)} files", 0.0)
            for done, future in enumerate(as_completed(running), 1):
                future.result()
                progress(f"compiled {running[future]}", done / (len(sources) + 1))
        _run([*compiler, *link, *map(str, objects), "-o", str(scratch / LIBRARY)])
        for target in objects:
            target.unlink()
        if library.parent.exists():  # somebody else was faster: same sources, same library
            return Built(path=library, archs=archs, cached=True)
        scratch.rename(library.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress("linked", 1.0)
    return Built(path=library, archs=archs, cached=False)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if re.search(r"error|fatal", line)]
        first = lines[0] if lines else f"exit code {done.returncode}"
        raise BuildFailed(f"{Path(command[0]).name} failed: {first[:300]}; run it by hand: {' '.join(command)}")


def _cache_folder() -> Path:
    import platformdirs

    given = os.environ.get("ACCEL_CACHE_DIR")
    return (Path(given) if given else Path(platformdirs.user_cache_dir("accel"))) / "kernels"
