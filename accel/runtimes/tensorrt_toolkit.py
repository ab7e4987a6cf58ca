"""Gives TensorRT and TensorRT-RTX a common interface for building and running engines. To find out whether a toolkit
has a feature, accel looks for the feature in the toolkit's module. Versions aren't compared, because the two toolkits
have unrelated version numbers.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from accel.errors import BadConfig, BadInputSpec, MissingExtra, UnknownName, UnsupportedHere, one_line
from accel.spelling import option

from .base import RUNTIMES, Runtime

TOOLKITS = ("tensorrt-rtx", "tensorrt")
PLUGIN_LIBRARY = "plugin library"  # in a manifest, marks an operator that runs in accel's plugin library

_CAPABILITY = re.compile(r"^(\d+)\.(\d)$")
_MEMBER = re.compile(r"^SM(\d+)(\d)$")

# Maps each member of EngineInvalidityDiagnostics to its meaning.
DIAGNOSTICS = {
    "VERSION_MISMATCH": "it was built by another version of the toolkit",
    "UNSUPPORTED_CC": "it was not built for the compute capability of this GPU",
    "OLD_CUDA_DRIVER": "the CUDA driver is too old for it",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old for it",
    "INSUFFICIENT_GPU_MEMORY": "this GPU has too little memory for it",
    "MALFORMED_ENGINE": "it is no engine file, or a corrupt one",
}


def toolkit_runtime(toolkit: str) -> Runtime:
    """Returns the runtime of this toolkit. Raises ``UnknownName`` for an unknown toolkit."""
    if toolkit not in TOOLKITS:
        raise UnknownName(f"unknown toolkit {toolkit!r}; use one of {', '.join(TOOLKITS)}")
    return RUNTIMES[toolkit]


def load_toolkit(toolkit: str) -> Any:
    """Imports the toolkit's Python module. Raises ``MissingExtra`` if the module or a library it needs is missing."""
    runtime = toolkit_runtime(toolkit)
    try:
        return importlib.import_module(runtime.module)
    except (ImportError, OSError) as error:  # OSError means that the bindings' native library is missing
        raise MissingExtra(toolkit, runtime.extra or toolkit) from error


def field_dtype(trt: Any, dtype: Any) -> str:
    """Returns a TensorRT data type as a name from ``accel.signature.DTYPES``.

    Raises ``UnsupportedHere`` for a data type that ``DTYPES`` lacks.
    """
    names = {
        "FLOAT": "float32",
        "HALF": "float16",
        "BF16": "bfloat16",
        "FP8": "float8_e4m3fn",
        "INT8": "int8",
        "UINT8": "uint8",
        "INT32": "int32",
        "INT64": "int64",
        "BOOL": "bool",
    }
    for member, name in names.items():
        if getattr(trt.DataType, member, None) == dtype:
            return name
    raise UnsupportedHere(
        f"a session can't have inputs or outputs of TensorRT's data type {dtype}; cast the tensor inside the model"
    )


def check_capability(text: str) -> str:
    """Returns ``text``. Raises ``BadInputSpec`` if ``text`` is not written like a compute capability."""
    if _CAPABILITY.match(text) is None:
        raise BadInputSpec(f"can't read the compute capability {text!r}; write major.minor, e.g. 8.6")
    return text


def offered_capabilities(trt: Any) -> dict[str, Any]:
    """Returns the compute capabilities that a build can target, such as ``8.6``. The result is empty if the toolkit
    builds only for this GPU."""
    members = getattr(getattr(trt, "ComputeCapability", None), "__members__", {})
    found = {f"{match[1]}.{match[2]}": member for name, member in members.items() if (match := _MEMBER.match(name))}
    return dict(sorted(found.items(), key=lambda item: tuple(map(int, item[0].split(".")))))


def choose_capabilities(toolkit: str, offered: dict[str, Any], asked: tuple[str, ...]) -> list[Any]:
    """Returns the toolkit's enum members for the compute capabilities in ``asked``, without duplicates. Raises
    ``UnsupportedHere`` if the toolkit doesn't offer a requested capability.
    """
    if asked and not offered:
        raise UnsupportedHere(
            f"{toolkit} builds engines only for the GPU of this machine; leave out "
            f"{option('compute_capabilities')}, or build for an RTX GPU with {option('target', 'tensorrt-rtx')}"
        )
    for text in asked:
        if check_capability(text) not in offered:
            build = option("target", "tensorrt")
            other = f", or build for a data-center GPU with {build} on a machine with that GPU"
            raise UnsupportedHere(
                f"{toolkit} can't build for compute capability {text}; use one of the capabilities "
                f"{', '.join(offered)}{other if toolkit != 'tensorrt' else ''}"
            )
    return [offered[text] for text in dict.fromkeys(asked)]


def check_this_gpu(toolkit: str, offered: dict[str, Any], capability: str) -> None:
    """Raises ``UnsupportedHere`` if the toolkit has no engines for a GPU of the given compute capability, such as
    ``9.0``. TensorRT-RTX has no engines for most data-center GPUs, but builds for these GPUs without an error."""
    if offered and capability not in offered:
        raise UnsupportedHere(
            f"{toolkit} has no engines for the GPU of this machine (compute capability {capability}); build with "
            f"{option('target', 'tensorrt')}, or for another GPU with {option('compute_capabilities', ['8.6'])}"
        )


class Log:
    """Collects a toolkit's messages: errors, warnings, and the most recent list of an engine's layers."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.layers = ""

    def add(self, message: str, *, error: bool, warning: bool) -> None:
        if message.startswith("Layers:"):
            self.layers = message
        elif error:
            self.errors.append(message)
        elif warning and message not in self.warnings and not message.endswith("has Int64 binding."):
            self.warnings.append(message)


def make_logger(trt: Any, log: Log) -> Any:
    """Returns a logger that writes to ``log`` and prints nothing. The logger has to outlive all objects created with
    it."""
    severe = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)
    warning = trt.ILogger.WARNING

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            log.add(message, error=severity in severe, warning=severity == warning)

    return Logger()


def engine_problem(trt: Any, log: Log, runtime: Any, data: bytes, *, for_any_gpu: bool = False) -> str | None:
    """Returns the problems that the toolkit finds in an engine's header. Returns None if the header has no problems, or
    if the toolkit can't check headers. Without a GPU, the toolkit finds only malformed headers.

    If ``for_any_gpu`` is true, an engine for other GPUs than this machine's is no problem.
    """
    if not hasattr(runtime, "get_engine_validity"):
        return None
    header = data[: int(getattr(runtime, "engine_header_size", 64))]
    log.errors.clear()
    _, found = runtime.get_engine_validity(header)
    members = getattr(trt.EngineInvalidityDiagnostics, "__members__", {})
    asked = [name for name in DIAGNOSTICS if name in members and not (for_any_gpu and name == "UNSUPPORTED_CC")]
    reasons = [DIAGNOSTICS[name] for name in asked if int(found) & int(members[name])]
    return " and ".join(reasons) or None


def load_plugin_library(trt: Any, capability: str) -> Path | None:
    """Registers accel's TensorRT plugins for GPUs of the given compute capability, such as ``9.0``, once per process.

    Returns the path of the plugin library, or None if no library was built.

    Raises ``BadConfig`` if ``ACCEL_TENSORRT_LIBRARY`` names a library that TensorRT can't load. Raises
    ``UnsupportedHere`` if TensorRT can't load the library that was built on this machine.
    """
    from accel.kernels.native.bridges import TENSORRT_CHOSEN, find_tensorrt_plugins

    major, minor = (int(part) for part in capability.split("."))
    library = find_tensorrt_plugins((major, minor))
    if library is None:
        return None
    registry = trt.get_plugin_registry()
    if registry.get_creator("FusedGemm", "1", "") is not None:
        return library
    reason = "it is no such file"
    if library.is_file():  # TensorRT returns None on failure
        try:
            if registry.load_library(str(library)) is not None:
                return library
            reason = "TensorRT refuses it"
        except (RuntimeError, TypeError) as error:
            reason = one_line(error)
    fix = "run accel kernels build --tensorrt-include DIR again"
    if os.environ.get(TENSORRT_CHOSEN):
        raise BadConfig(
            f"{TENSORRT_CHOSEN} names the library {library}, which can't be loaded ({reason}); {fix}, or unset the "
            "variable"
        )
    raise UnsupportedHere(f"the plugins in {library} can't be loaded ({reason}); {fix}")
