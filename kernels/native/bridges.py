"""Builds the C++ bridges through which ONNX Runtime and TensorRT call the kernels. The user provides the headers of the
runtimes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

from accel.errors import UnsupportedHere

from ..catalogue.folder import cache_folder
from .build import (
    Built,
    Job,
    Progress,
    compile_library,
    digest_of,
    find_library,
    find_nvcc,
    record_of,
    sources_digest,
    units_in,
)
from .cpu.build import SOURCES as CPU_SOURCES
from .cpu.build import jobs_for_cpu

PLUGINS = Path(__file__).parent / "plugins"
ONNXRUNTIME_LIBRARY = "libaccel_onnxruntime.so"
ONNXRUNTIME_HEADER = "onnxruntime_cxx_api.h"
ONNXRUNTIME_CHOSEN = "ACCEL_ONNXRUNTIME_LIBRARY"  # the environment variable that names a library of operators to load
TENSORRT_LIBRARY = "libaccel_tensorrt.so"
TENSORRT_HEADER = "NvInferRuntime.h"
TENSORRT_CHOSEN = "ACCEL_TENSORRT_LIBRARY"  # the environment variable that names a library of plugins to load
CUDA_HEADER = "cuda_runtime_api.h"


def check_headers(*, onnxruntime: Path | None = None, tensorrt: Path | None = None) -> None:
    """Raises ``UnsupportedHere`` if the folder ``onnxruntime`` or ``tensorrt`` lacks the header that accel needs."""
    if onnxruntime is not None and not (onnxruntime / ONNXRUNTIME_HEADER).is_file():
        raise UnsupportedHere(
            f"the folder {onnxruntime} has no {ONNXRUNTIME_HEADER}; pass the include folder of an ONNX Runtime release"
        )
    if tensorrt is None:
        return
    header = tensorrt / TENSORRT_HEADER
    if not header.is_file() or b"IPluginV3OneRuntime" not in header.read_bytes():
        raise UnsupportedHere(
            f"the folder {tensorrt} has no {TENSORRT_HEADER} with IPluginV3; "
            "pass the include folder of TensorRT 10 or later"
        )


def build_for_onnxruntime(
    include: Path, *, cache: Path | None = None, progress: Progress = lambda _message, _fraction: None
) -> Built:
    """Builds accel's operators for the CPU as a library for ``SessionOptions.register_custom_ops_library``.

    The operators PackedProduct compute with the kernels of ``cpu``, and the others with the reference.

    The name of a convolution's operator contains sizes, and the library doesn't know the sizes. So list each name in
    the session options, under a key such as ``custom_op.FusedConv2d.0``.

    ``include`` is the folder of ``onnxruntime_cxx_api.h``. ``onnxruntime_cxx_api.h`` must not be newer than the
    installed ONNX Runtime. The header is in the release archives of ONNX Runtime, but not in the wheels. Raises
    ``UnsupportedHere`` if the header or g++ is missing, and ``BuildFailed`` with the compiler's first error.
    """
    check_headers(onnxruntime=include)
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnsupportedHere("g++ is not installed here; install it to build the operators for ONNX Runtime")
    flags = [
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wno-unknown-pragmas",
        f"-isystem{include.absolute()}",
    ]
    source = PLUGINS / "onnxruntime.cpp"
    return compile_library(
        [Job(name=source.stem, command=(compiler, *flags, str(source))), *jobs_for_cpu(compiler)],
        [compiler, "-shared", "-pthread"],
        ("host",),
        file=ONNXRUNTIME_LIBRARY,
        also=_operators_digest() + _headers_digest(include),
        noted={"operators": _operators_digest()},
        cache=cache,
        progress=progress,
    )


def _operators_digest() -> str:
    """Returns the sha256 over the sources of the operators for ONNX Runtime."""
    return sha256((digest_of(PLUGINS) + digest_of(CPU_SOURCES)).encode()).hexdigest()


def _headers_digest(include: Path) -> str:
    """Returns the sha256 of each header of ONNX Runtime in the folder ``include``."""
    return "".join(sorted(sha256(file.read_bytes()).hexdigest() for file in include.glob("onnxruntime_*.h")))


def find_onnxruntime_library(cache: Path | None = None) -> Path | None:
    """Returns the library of operators for ONNX Runtime to load, or None. If ``$ACCEL_ONNXRUNTIME_LIBRARY`` names a
    library, returns that library. Otherwise returns the newest library that was built from the current sources."""
    given = os.environ.get(ONNXRUNTIME_CHOSEN)
    if given:
        return Path(given)
    wanted = _operators_digest()
    found = [
        (library.stat().st_mtime, library)
        for library in (cache or cache_folder()).glob(f"*/{ONNXRUNTIME_LIBRARY}")
        if record_of(library).get("operators") == wanted
    ]
    return max(found)[1] if found else None


def build_for_tensorrt(
    include: Path,
    *,
    kernels: Path | None = None,
    cache: Path | None = None,
    progress: Progress = lambda _message, _fraction: None,
) -> Built:
    """Builds ``accel::FusedGemm_gemm_nt_*`` and ``FusedConv2d`` as plugins for TensorRT 10 and later.

    ``IPluginRegistry.load_library`` loads the plugins. ``include`` is the folder of ``NvInferRuntime.h``. The header is
    in TensorRT's archives and -dev packages, but not in the wheels. ``kernels`` is the compiled library that the
    plugins call, by default the library that ``accel kernels build`` made. The plugins load the kernel library
    ``kernels`` from its current path, so don't move the library afterwards.

    Raises ``UnsupportedHere`` if the header, the library or g++ is missing, and ``BuildFailed`` with the compiler's
    first error.
    """
    check_headers(tensorrt=include)
    kernels = kernels or find_library()
    if kernels is None:
        raise UnsupportedHere(
            "the plugins need a kernel library, but none is built; add --arch sm_90a or --arch native"
        )
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnsupportedHere("g++ is not installed here; install it to build the plugins for TensorRT")
    folders = [include.absolute(), *cuda_includes()]
    if not any((folder / CUDA_HEADER).is_file() for folder in folders):
        raise UnsupportedHere(
            f"TensorRT's headers include {CUDA_HEADER}, but it is not installed; install the CUDA toolkit"
        )
    source = PLUGINS / "tensorrt.cpp"
    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", *(f"-isystem{folder}" for folder in folders)]
    return compile_library(
        [Job(name=source.stem, command=(compiler, *flags, str(source)))],
        # On the linker's command line, the library comes before the code that calls the library. Without
        # --no-as-needed, some compilers would drop the library.
        [compiler, "-shared", "-Wl,--no-as-needed", str(kernels.absolute())],
        ("host",),
        file=TENSORRT_LIBRARY,
        also=digest_of(PLUGINS)
        + "".join(sorted(sha256(f.read_bytes()).hexdigest() for f in include.glob("NvInfer*.h"))),
        noted={"kernels": str(kernels.absolute()), "plugins": digest_of(PLUGINS)},
        cache=cache,
        progress=progress,
    )


def find_tensorrt_plugins(capability: tuple[int, int] | None, cache: Path | None = None) -> Path | None:
    """Returns the library of TensorRT plugins to load, or None. If ``$ACCEL_TENSORRT_LIBRARY`` names a library, returns
    that library. Otherwise returns the newest library of plugins that this GPU can use.

    The library of plugins must be built from the current sources. The plugins' kernel library must have tensor-core
    GEMMs for the compute capability ``capability`` (None allows any compute capability).
    """
    given = os.environ.get(TENSORRT_CHOSEN)
    if given:
        return Path(given)
    wanted = {"sources": sources_digest(), "plugins": digest_of(PLUGINS)}
    found = []
    for library in (cache or cache_folder()).glob(f"*/{TENSORRT_LIBRARY}"):
        record = record_of(library)
        kernels = Path(str(record.get("kernels", "")))
        if any(record.get(name) != digest for name, digest in wanted.items()) or not kernels.is_file():
            continue
        if units_in(kernels, capability):
            found.append((library.stat().st_mtime, library))
    return max(found)[1] if found else None


def cuda_includes() -> list[Path]:
    """Returns the folders with CUDA's headers on this machine, from nvcc and from Triton.

    Asks nvcc for its folder, because the nvcc command may be a script that calls another nvcc.
    """
    found: list[Path] = []
    if nvcc := find_nvcc():
        words = [nvcc, "--dryrun", "-x", "cu", os.devnull, "-c", "-o", os.devnull]
        said = subprocess.run(words, capture_output=True, text=True, check=False)
        found += [Path(top) / "include" for top in re.findall(r"^#\$ TOP=(.+)$", said.stderr, re.MULTILINE)]
    if (triton := importlib.util.find_spec("triton")) is not None and triton.origin is not None:
        found.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")
    return [folder.absolute() for folder in found if (folder / CUDA_HEADER).is_file()]
