"""What TensorRT and TensorRT-RTX have in common, so that building and running have one interface for both.

What a toolkit can do is probed on the module itself: versions of the two are numbered apart.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from accel.errors import BadConfig, BadInputSpec, MissingExtra, UnknownName, UnsupportedHere, one_line
from accel.runtimes.base import RUNTIMES, Runtime

TOOLKITS = ("tensorrt-rtx", "tensorrt")
PLUGIN_LIBRARY = "plugin library"  # what an engine's properties say of nodes whose kernels aren't in the engine

_CAPABILITY = re.compile(r"^(\d+)\.(\d)$")
_MEMBER = re.compile(r"^SM(\d+)(\d)$")

# Bits of EngineInvalidityDiagnostics, by the name of the member.
DIAGNOSTICS = {
    "VERSION_MISMATCH": "it was built by another version of the toolkit",
    "UNSUPPORTED_CC": "it was not built for the compute capability of this GPU",
    "OLD_CUDA_DRIVER": "the CUDA driver is too old for it",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old for it",
    "INSUFFICIENT_GPU_MEMORY": "this GPU has too little memory for it",
    "MALFORMED_ENGINE": "it is no engine file, or a corrupt one",
}


def toolkit_runtime(toolkit: str) -> Runtime:
    """The row of the table of runtimes that stands for this toolkit."""
    if toolkit not in TOOLKITS:
        raise UnknownName(f"unknown toolkit {toolkit!r}; use one of {', '.join(TOOLKITS)}")
    return RUNTIMES[toolkit]


def load_toolkit(toolkit: str) -> Any:
    """The toolkit's Python module. ``MissingExtra`` where it, or a library it needs, is not installed."""
    runtime = toolkit_runtime(toolkit)
    try:
        return importlib.import_module(runtime.module)
    except (ImportError, OSError) as error:  # OSError: the bindings without the library they load
        raise MissingExtra(toolkit, runtime.extra or toolkit) from error


def field_dtype(trt: Any, dtype: Any) -> str:
    """A TensorRT data type as one of ``accel.signature.DTYPES``."""
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
    raise UnsupportedHere(f"TensorRT's data type {dtype} can't go in or out of a session; cast it inside the model")


def check_capability(text: str) -> str:
    """``text`` where it is written like a compute capability; ``BadInputSpec`` otherwise."""
    if _CAPABILITY.match(text) is None:
        raise BadInputSpec(f"can't read the compute capability {text!r}; write major.minor, e.g. 8.6")
    return text


def offered_capabilities(trt: Any) -> dict[str, Any]:
    """What the toolkit can be told to build for, by name (``8.6``); empty where it builds for the GPU that is here."""
    members = getattr(getattr(trt, "ComputeCapability", None), "__members__", {})
    found = {f"{match[1]}.{match[2]}": member for name, member in members.items() if (match := _MEMBER.match(name))}
    return dict(sorted(found.items(), key=lambda item: tuple(map(int, item[0].split(".")))))


def choose_capabilities(toolkit: str, offered: dict[str, Any], asked: tuple[str, ...]) -> list[Any]:
    """The toolkit's members for the capabilities asked for, each once; ``UnsupportedHere`` lists what there is."""
    if asked and not offered:
        raise UnsupportedHere(
            f"{toolkit} builds only for the GPU of the machine it runs on; leave out --compute-capability, or for an "
            "RTX GPU build with --target tensorrt-rtx"
        )
    for text in asked:
        if check_capability(text) not in offered:
            other = ", or for a data-centre GPU build with --target tensorrt where that GPU is"
            raise UnsupportedHere(
                f"{toolkit} can't build for compute capability {text}; it offers {', '.join(offered)}: "
                f"name one of these{other if toolkit != 'tensorrt' else ''}"
            )
    return [offered[text] for text in dict.fromkeys(asked)]


class Log:
    """What a toolkit said: errors and warnings, and the last listing of the engine's layers."""

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
    """A logger of the toolkit that writes to ``log`` and prints nothing. Keep it as long as what was made with it."""
    severe = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)
    warning = trt.ILogger.WARNING

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            log.add(message, error=severity in severe, warning=severity == warning)

    return Logger()


def engine_problem(trt: Any, log: Log, runtime: Any, data: bytes) -> str | None:
    """What the toolkit's own look at an engine's header finds; None where nothing, or where it has no such look.

    Without a GPU the look can't finish, and then finds nothing unless the header itself is wrong.
    """
    if not hasattr(runtime, "get_engine_validity"):
        return None
    header = data[: int(getattr(runtime, "engine_header_size", 64))]
    log.errors.clear()
    _, found = runtime.get_engine_validity(header)
    members = getattr(trt.EngineInvalidityDiagnostics, "__members__", {})
    reasons = [text for name, text in DIAGNOSTICS.items() if name in members and int(found) & int(members[name])]
    return " and ".join(reasons) or None


def load_plugin_library(trt: Any, capability: str) -> Path | None:
    """Register accel's plugins for a GPU of this compute capability (``9.0``) with TensorRT, once a process; the
    library they are in, None where none was built.

    A session, a build and a check of an engine all load it here. Raises ``BadConfig`` where the environment names a
    library and TensorRT can't load it, ``UnsupportedHere`` where that is one that was built: nothing goes on without it
    in silence.
    """
    from accel.kernels.bridges import TENSORRT_CHOSEN, find_tensorrt_plugins

    major, minor = (int(part) for part in capability.split("."))
    library = find_tensorrt_plugins((major, minor))
    if library is None:
        return None
    registry = trt.get_plugin_registry()
    if registry.get_creator("FusedGemm", "1", "") is not None:
        return library
    reason = "it is no such file"
    if library.is_file():  # None is TensorRT's word for every failure
        try:
            if registry.load_library(str(library)) is not None:
                return library
            reason = "TensorRT refuses it"
        except (RuntimeError, TypeError) as error:
            reason = one_line(error)
    fix = "run accel kernels build --tensorrt-include DIR again"
    if os.environ.get(TENSORRT_CHOSEN):
        raise BadConfig(f"{TENSORRT_CHOSEN} is {library}, which can't be loaded ({reason}); {fix}, or unset it")
    raise UnsupportedHere(f"the plugins in {library} can't be loaded ({reason}); {fix}")
