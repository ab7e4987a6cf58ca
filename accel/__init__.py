"""accel turns a trained model into the fastest correct form for the machine that you name, and proves that this form is
correct.

The public names are imported at first use, so that ``import accel`` takes less than 60 ms and loads neither torch nor
onnxruntime.
"""

from __future__ import annotations

import importlib
import os.path
from typing import TYPE_CHECKING, Any

from accel.version import __version__ as __version__

if TYPE_CHECKING:
    from accel.api.bench import bench
    from accel.api.bench import bench as benchmark  # noqa: F401 - the name of version 0.1.0
    from accel.api.bisect import bisect
    from accel.api.dataset.infer import infer
    from accel.api.decoder.generate import generate
    from accel.api.doctor import doctor
    from accel.api.export import export
    from accel.api.inspect import inspect
    from accel.api.load import load
    from accel.api.optimize import optimize
    from accel.api.verify import verify
    from accel.api.verify import verify as compare  # noqa: F401 - the name of version 0.1.0
    from accel.artifact import Artifact, Manifest, Signature, TensorSpec
    from accel.errors import AccelError
    from accel.kernels.torch.fuse import fuse
    from accel.runtimes.base import Session
    from accel.sources.declare import declare
    from accel.sources.pipeline import Pipeline
    from accel.sources.source import Source
    from accel.tables.target import Target

if os.path.isfile(os.path.join(os.path.dirname(__file__), "kernels")):  # noqa: PTH113, PTH118, PTH120 (quicker)
    raise ImportError(
        "this checkout has text files in place of the links accel/converters, accel/kernels and accel/serve; run: "
        "git config core.symlinks true && git checkout -- accel (or install a wheel, which needs no links)"
    )

_PUBLIC = {
    "AccelError": "accel.errors:AccelError",
    "Artifact": "accel.artifact:Artifact",
    "Manifest": "accel.artifact:Manifest",
    "Pipeline": "accel.sources.pipeline:Pipeline",
    "Session": "accel.runtimes.base:Session",
    "Signature": "accel.artifact:Signature",
    "Source": "accel.sources.source:Source",
    "Target": "accel.tables.target:Target",
    "TensorSpec": "accel.artifact:TensorSpec",
    "bench": "accel.api.bench:bench",
    "bisect": "accel.api.bisect:bisect",
    "declare": "accel.sources.declare:declare",
    "doctor": "accel.api.doctor:doctor",
    "export": "accel.api.export:export",
    "fuse": "accel.kernels.torch.fuse:fuse",
    "generate": "accel.api.decoder.generate:generate",
    "infer": "accel.api.dataset.infer:infer",
    "inspect": "accel.api.inspect:inspect",
    "load": "accel.api.load:load",
    "optimize": "accel.api.optimize:optimize",
    "verify": "accel.api.verify:verify",
    # In version 0.1.0, the functions bench and verify had the names benchmark and compare.
    "benchmark": "accel.api.bench:bench",
    "compare": "accel.api.verify:verify",
}

__all__ = [
    "AccelError",
    "Artifact",
    "Manifest",
    "Pipeline",
    "Session",
    "Signature",
    "Source",
    "Target",
    "TensorSpec",
    "bench",
    "bisect",
    "declare",
    "doctor",
    "export",
    "fuse",
    "generate",
    "infer",
    "inspect",
    "load",
    "optimize",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'accel' has no attribute {name!r}")
    module, attribute = _PUBLIC[name].split(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
