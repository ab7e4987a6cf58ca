"""What can be proven about the kernels on this machine, one row a proof."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from accel.errors import AccelError
from accel.kernels import interpret, sass
from accel.kernels.build import Progress, build, find_library, find_nvcc
from accel.kernels.configs import ARCHS, get, shipped
from accel.kernels.cross import compile_config
from accel.kernels.dispatch import family
from accel.kernels.native import Library
from accel.kernels.tuned import cache_folder
from accel.kernels.units import NATIVE


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One row: ``passed`` is None for what this machine can't prove; ``detail`` says what was found or is missing."""

    what: str
    passed: bool | None
    detail: str


def check(*, every: bool = False, progress: Progress = lambda _message, _fraction: None) -> list[Proof]:
    """Each proof in turn. ``every`` compiles every shipped configuration (minutes) instead of one an architecture."""
    return list(_proofs(every, progress))


def _proofs(every: bool, progress: Progress) -> Iterator[Proof]:
    if importlib.util.find_spec("triton") is None:
        missing = 'Triton is not installed; run: pip install "accel-toolchain[kernels]"'
        yield Proof(what="interpreter", passed=None, detail=missing)
        yield Proof(what="cross-compilation", passed=None, detail=missing)
    else:
        progress("running the kernels in the interpreter", None)
        yield _interpreter()
        yield from _compiled(every, progress)
    yield _hand_written(progress)
    yield _tensor_cores(progress)
    if not torch.cuda.is_available():
        yield Proof(what="correctness and speed on a GPU", passed=None, detail="no NVIDIA GPU here: not run")
        return
    capability = torch.cuda.get_device_capability()
    there = f"{torch.cuda.get_device_name()}, sm_{family(capability) or 'none'}: run pytest -m gpu"
    yield Proof(what="correctness and speed on a GPU", passed=None, detail=there)


def _hand_written(progress: Progress) -> Proof:
    what = "hand-written kernels, compiled"
    if find_nvcc() is None:
        return Proof(what=what, passed=None, detail="no nvcc here: put nvcc on PATH")
    try:
        # In a folder of its own: dispatch must not take a library without a GEMM for the user's.
        built = build(["sm_80", "sm_90a"], units=(), cache=cache_folder() / "check", progress=progress)
        Library(built.path)
    except AccelError as error:
        return Proof(what=what, passed=False, detail=str(error))
    return Proof(what=what, passed=True, detail=f"{', '.join(built.archs)}, the library loads and its interface fits")


def _tensor_cores(progress: Progress) -> Proof:
    what = "tensor-core GEMMs (CUTLASS)"
    path = find_library(capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None)
    if path is None:
        missing = "no library of these sources here; run accel kernels build --arch sm_90a (minutes)"
        return Proof(what=what, passed=None, detail=missing)
    progress("reading the library", None)
    try:
        gemms = Library(path).gemms
        kernels = {name: used for (_, name), used in sass.products(path).items() if "cutlass" in name}
    except AccelError as error:
        return Proof(what=what, passed=False, detail=str(error))
    if not gemms:
        missing = f"{path} has no GEMM; run accel kernels build --arch sm_90a (minutes)"
        return Proof(what=what, passed=None, detail=missing)
    if not kernels:
        return Proof(what=what, passed=False, detail=f"{path} names {len(gemms)} configurations and holds no kernel")
    if unknown := sorted(set(gemms) - set(NATIVE)):
        return Proof(what=what, passed=False, detail=f"{path} holds {unknown[0]}, which accel kernels list doesn't")
    if bare := [name for name, used in kernels.items() if not used]:
        return Proof(
            what=what, passed=False, detail=f"{len(bare)} of {len(kernels)} kernels without a tensor-core product"
        )
    words = ", ".join(sorted(set().union(*kernels.values())))
    return Proof(what=what, passed=True, detail=f"{len(gemms)} configurations, {len(kernels)} kernels, {words}")


def _interpreter() -> Proof:
    what = "interpreter, ragged shapes"
    try:
        found = interpret.run()
    except AccelError as error:
        return Proof(what=what, passed=False, detail=str(error))
    name = max(found, key=lambda case: found[case])
    passed = all(value <= 1 for value in found.values())  # a NaN is not
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
