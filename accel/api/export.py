"""From a source to ONNX."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.errors import UnsupportedHere, UsageError
from accel.sources import open_source
from accel.stage import run_stage

if TYPE_CHECKING:
    from accel.sources.declare import Dims, Inputs

MIN_OPSET, MAX_OPSET = 13, 23


def export(
    source: str | Path,
    *,
    out: str | Path,
    inputs: Inputs | None = None,
    weights: str | Path | None = None,
    dims: Dims | None = None,
    opset: int = 20,
    simplify: bool = True,
    use_cache: bool = True,
) -> Artifact:
    """Export ``source`` to the ONNX file ``out`` (its manifest goes beside it) and prove that it computes the same.

    ``source``: ``package.module:factory``, ``file.py:factory``, an exported program (``.pt2``), a TorchScript file, a
    transformers folder. ``inputs``: what the model takes, where the source doesn't say: ``{"x": ("float32", ("batch",
    3, 32, 32))}`` or ``["x:float32[batch,3,32,32]"]``; a named dim is dynamic. ``weights``: a state dict or a training
    checkpoint for the factory's model (``docs/checkpoints.md``). ``dims``: ranges of dynamic dims as (min, opt, max).
    ``opset``: what the file will have, exactly.

    Raises ``BadSource``, ``BadInputSpec``, ``ExportFailed`` (no exporter gave a right model), ``GateFailed``.
    """
    from accel.converters.onnx_from_torch import LIMITS, OnnxFromTorchConfig
    from accel.converters.simplify import SimplifyConfig
    from accel.verify.gates import OutputGate

    out = Path(out)
    if out.suffix != ".onnx":
        raise UsageError(f"{out} has to end in .onnx")
    if not MIN_OPSET <= opset <= MAX_OPSET:
        raise UnsupportedHere(f"opset {opset} can't be exported; pass --opset {MIN_OPSET} to {MAX_OPSET}")
    check_writable(out)
    src = open_source(source, inputs=inputs, weights=Path(weights) if weights else None, dims=dims)
    if src.kind != "torch":
        raise UnsupportedHere(f"{source} is {src.kind} already; use accel optimize to make it faster")
    gates = [OutputGate(limit=LIMITS[src.properties.get("precision", "fp32")])]
    with ExitStack() as stack:
        cache = open_cache(stack, use_cache)
        config = OnnxFromTorchConfig(opset=opset)
        if not simplify:
            return run_stage("onnx_from_torch", src, config, gates=gates, out=out, cache=cache)
        exported = run_stage("onnx_from_torch", src, config, gates=gates, cache=cache)
        return run_stage("simplify", exported, SimplifyConfig(), gates=gates, out=out, cache=cache)


def open_cache(stack: ExitStack, use_cache: bool) -> StageCache:
    """The user's cache, or one that is empty and goes away with ``stack``."""
    if use_cache:
        return StageCache()
    return StageCache(Path(stack.enter_context(TemporaryDirectory(prefix="accel-"))))


def check_writable(out: Path) -> None:
    """Find out before any work is done that ``out`` can't be written. Raises ``OSError`` as the system gives it."""
    from tempfile import NamedTemporaryFile

    if out.is_dir():
        raise IsADirectoryError(21, "is a folder", str(out))
    # The folder itself is made when there is something to put into it.
    there = next(folder for folder in out.absolute().parents if folder.exists())
    try:
        with NamedTemporaryFile(dir=there, prefix=".accel-"):
            pass
    except OSError as error:
        error.filename = str(out)
        raise
