"""The bridges in C++, compiled against headers of another runtime that the user has."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

from accel.errors import UnsupportedHere
from accel.kernels.build import Built, Job, Progress, compile_library, digest_of

PLUGINS = Path(__file__).parent / "plugins"
ONNXRUNTIME_LIBRARY = "libaccel_onnxruntime.so"
ONNXRUNTIME_HEADER = "onnxruntime_cxx_api.h"


def build_for_onnxruntime(
    include: Path, *, cache: Path | None = None, progress: Progress = lambda _message, _fraction: None
) -> Built:
    """The operators ``accel::FusedGemm_*`` as a library for ``SessionOptions.register_custom_ops_library``, on the CPU.

    ``include``: the folder of ``onnxruntime_cxx_api.h``, of the runtime's version or an older one (the archives of ONNX
    Runtime's releases have it, its wheels don't). Raises ``UnsupportedHere`` without it or without g++, ``BuildFailed``
    with the compiler's first error.
    """
    if not (include / ONNXRUNTIME_HEADER).is_file():
        raise UnsupportedHere(
            f"{include} holds no {ONNXRUNTIME_HEADER}; pass the include folder of an ONNX Runtime release"
        )
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
    headers = include.glob("onnxruntime_*.h")
    return compile_library(
        [Job(name=source.stem, command=(compiler, *flags, str(source)))],
        [compiler, "-shared", "-pthread"],
        ("host",),
        file=ONNXRUNTIME_LIBRARY,
        also=digest_of(PLUGINS) + "".join(sorted(sha256(file.read_bytes()).hexdigest() for file in headers)),
        cache=cache,
        progress=progress,
    )
