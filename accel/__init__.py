"""accel: a trained model to the fastest correct form for the machine you name, with the proof.

Names are imported on first use, so that ``import accel`` stays under 60 ms and loads neither torch nor onnxruntime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from accel.api.bench import bench as benchmark
    from accel.api.doctor import doctor
    from accel.api.export import export
    from accel.api.inspect import inspect
    from accel.api.load import load
    from accel.api.optimize import optimize
    from accel.api.verify import verify as compare
    from accel.artifact import Artifact, Manifest, Signature, TensorSpec
    from accel.errors import AccelError
    from accel.runtimes.base import Session
    from accel.sources.declare import declare
    from accel.target import Target

_PUBLIC = {
    "AccelError": "accel.errors:AccelError",
    "Artifact": "accel.artifact:Artifact",
    "Manifest": "accel.artifact:Manifest",
    "Session": "accel.runtimes.base:Session",
    "Signature": "accel.artifact:Signature",
    "Target": "accel.target:Target",
    "TensorSpec": "accel.artifact:TensorSpec",
    # `accel.bench` and `accel.verify` are the packages behind these two, hence the other names.
    "benchmark": "accel.api.bench:bench",
    "compare": "accel.api.verify:verify",
    "declare": "accel.sources.declare:declare",
    "doctor": "accel.api.doctor:doctor",
    "export": "accel.api.export:export",
    "inspect": "accel.api.inspect:inspect",
    "load": "accel.api.load:load",
    "optimize": "accel.api.optimize:optimize",
}

__all__ = [
    "AccelError",
    "Artifact",
    "Manifest",
    "Session",
    "Signature",
    "Target",
    "TensorSpec",
    "benchmark",
    "compare",
    "declare",
    "doctor",
    "export",
    "inspect",
    "load",
    "optimize",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'accel' has no attribute {name!r}")
    module, attribute = _PUBLIC[name].split(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def _of_kernels(name: str) -> Any:
    if name != "fuse":
        raise AttributeError(f"module 'accel.kernels' has no attribute {name!r}")
    return importlib.import_module("accel.kernels.fuse")


# ``accel.kernels.fuse(module)`` after ``import accel`` alone. That folder has no ``__init__.py`` that could say so.
vars(importlib.import_module("accel.kernels")).setdefault("__getattr__", _of_kernels)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
