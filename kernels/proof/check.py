"""Runs the proofs about the kernels. Marks the proofs that this machine can't run."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from accel.errors import AccelError, MissingExtra, one_line

from ..catalogue.configs import ARCHS, get, shipped
from ..catalogue.folder import cache_folder
from ..catalogue.units import NATIVE
from ..choose.choices import family
from ..native import sass
from ..native.build import Progress, build, build_for_host, find_library, find_nvcc
from ..native.library import Library
from ..triton.cross import compile_config
from . import host as check_host
from . import interpret


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of a proof. ``passed`` is None if this machine can't run the proof. ``detail`` describes the result,
    or names the missing tool.
    """

    what: str
    passed: bool | None
    detail: str


def check(*, every: bool = False, progress: Progress = lambda _message, _fraction: None) -> list[Proof]:
    """Returns the proofs. By default, compiles two configurations per architecture. ``every`` compiles all shipped
    configurations, which takes minutes."""
    return list(_proofs(every, progress))


def _proofs(every: bool, progress: Progress) -> Iterator[Proof]:
    if importlib.util.find_spec("triton") is None:
        missing = str(MissingExtra("Triton", "kernels"))
        yield Proof(what="interpreter", passed=None, detail=missing)
        yield Proof(what="cross-compilation", passed=None, detail=missing)
    else:
        progress("running the kernels in the interpreter", None)
        yield _within("interpreter, ragged shapes", interpret.run)
        yield from _compiled(every, progress)
    yield _hand_written(progress)
    yield _on_host(progress)
    yield _within("ONNX bodies in ONNX Runtime", check_host.body_errors, "ONNX Runtime is not installed")
    yield _tensor_cores(progress)
    if not torch.cuda.is_available():
        yield Proof(what="correctness and speed on a GPU", passed=None, detail="no NVIDIA GPU here: not run")
        return
    capability = torch.cuda.get_device_capability()
    there = f"{torch.cuda.get_device_name()}, sm_{family(capability) or 'none'}: run pytest -m gpu"
    yield Proof(what="correctness and speed on a GPU", passed=None, detail=there)


def _own_cache() -> Path:
    """Returns a separate cache folder for the proofs. The proofs build a library without
    GEMMs, which the kernels' normal dispatch must not find."""
    return cache_folder() / "check"


def _hand_written(progress: Progress) -> Proof:
    what = "hand-written kernels, compiled"
    if find_nvcc() is None:
        return Proof(what=what, passed=None, detail="no nvcc here: put nvcc on PATH")
    try:
        built = build(["sm_80", "sm_90a"], units=(), cache=_own_cache(), progress=progress)
        Library(built.path)
    except AccelError as error:
        return Proof(what=what, passed=False, detail=str(error))
    return Proof(what=what, passed=True, detail=f"{', '.join(built.archs)}, the library loads and its interface fits")


def _tensor_cores(progress: Progress) -> Proof:
    what = "tensor-core GEMMs (CUTLASS)"
    path = find_library(capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None)
    if path is None:
        missing = "no library was built from these sources; run accel kernels build --arch sm_90a (minutes)"
        return Proof(what=what, passed=None, detail=missing)
    progress("reading the library", None)
    try:
        gemms = Library(path).gemms
        if not gemms:
            missing = f"{path} has no GEMM; run accel kernels build --arch sm_90a (minutes)"
            return Proof(what=what, passed=None, detail=missing)
        if unknown := sorted(set(gemms) - set(NATIVE)):
            return Proof(what=what, passed=False, detail=f"{path} holds {unknown[0]}, which accel kernels list doesn't")
        kernels = {name: used for (_, name), used in sass.products(path).items() if "cutlass" in name}
    except AccelError as error:
        return Proof(what=what, passed=False, detail=str(error))
    if not kernels:
        return Proof(what=what, passed=False, detail=f"{path} names {len(gemms)} configurations and holds no kernel")
    if bare := [name for name, used in kernels.items() if not used]:
        return Proof(
            what=what, passed=False, detail=f"{len(bare)} of {len(kernels)} kernels without a tensor-core product"
        )
    words = ", ".join(sorted(set().union(*kernels.values())))
    return Proof(what=what, passed=True, detail=f"{len(gemms)} configurations, {len(kernels)} kernels, {words}")


def _on_host(progress: Progress) -> Proof:
    what = "hand-written kernels, run on the CPU"
    if shutil.which("g++") is None:
        return Proof(what=what, passed=None, detail="no g++ here: install it")
    progress("compiling the hand-written kernels for the CPU", None)

    def errors() -> dict[str, float]:
        return check_host.hand_written_errors(Library(build_for_host("undefined", cache=_own_cache()).path))

    return _within(what, errors)


def _within(what: str, errors: Callable[[], dict[str, float]], missing: str = "nothing was run") -> Proof:
    """Returns a proof that all errors are within their bounds.

    The proof is marked as not run if ``errors`` returns an empty dict.
    """
    try:
        found = errors()
    except Exception as error:  # a runtime may raise any type of exception if an operator's function body is wrong
        return Proof(what=what, passed=False, detail=one_line(error, 300))
    if not found:
        return Proof(what=what, passed=None, detail=missing)
    name = max(found, key=lambda case: found[case])
    passed = all(value <= 1 for value in found.values())  # False for NaN
    return Proof(
        what=what, passed=passed, detail=f"{len(found)} cases, largest {found[name]:.2f} of its bound ({name})"
    )


def _compiled(every: bool, progress: Progress) -> Iterator[Proof]:
    for at, arch in enumerate(ARCHS):
        one = [("gemm_128x128", "fp16"), ("gemm_64x64", "int8")]
        wanted = [(get(name), dtype) for name, dtype in one]
        if every:
            wanted = [(config, dtype) for config, dtype, on in shipped() if on == arch]
        wrong, instructions = [], set()
        for config, dtype in wanted:
            progress(f"compiling {config.name} {dtype} for sm_{arch}", at / len(ARCHS))
            try:
                made = compile_config(config, dtype, arch)
            except AccelError as error:
                wrong.append(f"{config.name} {dtype}: {error}")
                continue
            instructions.add(made.instruction)
            if made.problem:
                wrong.append(f"{config.name} {dtype}: {made.problem}")
        named = ", ".join(sorted(filter(None, instructions)))
        detail = wrong[0] if wrong else f"{len(wanted)} configurations, {named}, no spills, shared memory fits"
        yield Proof(what=f"cross-compilation for sm_{arch}", passed=not wrong, detail=detail)
