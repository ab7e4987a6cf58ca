"""ONNX to ncnn's .param and .bin, by pnnx."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.child import run_in_child, run_program
from accel.errors import BuildFailed, ChildCrashed, MissingExtra, shortened
from accel.progress import report
from accel.signature import Signature
from accel.sources.onnx_file import read_proto
from accel.stage import StageConfig

# ncnn counts its dims without the batch.
_MAX_RANK = 5
_DTYPES = {"float32": "f32", "int32": "i32", "int64": "i64"}


@dataclass(frozen=True, kw_only=True)
class NcnnFromOnnxConfig(StageConfig):
    """``timeout``: seconds until pnnx is given up."""

    timeout: float = 600.0


class NcnnFailed(BuildFailed):
    """pnnx or ncnn can't take the model; the operator is named where they name it."""


def ncnn_from_onnx(src: Artifact, config: NcnnFromOnnxConfig, out: Path) -> Artifact:
    """Convert ``src`` to ``out`` (``.ncnn.param``) with its ``.ncnn.bin`` beside it, float32, one sample at a time.

    ``NcnnFailed`` where the model's inputs don't share a batch dim, where pnnx leaves an operator that ncnn hasn't, or
    where ncnn can't run what came out.
    """
    for module in ("pnnx", "ncnn"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(module, "ncnn")
    _check_signature(src.signature)
    report("ncnn_from_onnx: pnnx")
    with tempfile.TemporaryDirectory(prefix="pnnx-", dir=out.parent) as text:
        folder = Path(text)
        shutil.copyfile(src.path, folder / "model.onnx")
        for name in src.companions:
            shutil.copyfile(src.path.with_name(name), folder / name)
        said = _pnnx(folder, src.signature, config.timeout)
        param, weights = folder / "model.ncnn.param", folder / "model.ncnn.bin"
        if not param.is_file() or not weights.is_file():
            raise NcnnFailed(f"pnnx can't convert {src.path.name}: {_last(said)}; {_advice(src)}")
        if left := _left_over(param):
            raise NcnnFailed(f"ncnn has no layer for {', '.join(left)} of {src.path.name}; use another target")
        companion = out.with_suffix(".bin")
        shutil.copyfile(param, out)
        shutil.copyfile(weights, companion)
    try:
        run_in_child(
            "accel.converters.ncnn_from_onnx:try_net", timeout=config.timeout, path=out, signature=src.signature
        )
    except ChildCrashed as error:
        raise NcnnFailed(f"ncnn can't run what pnnx made of {src.path.name} ({error}); use another target") from error
    return Artifact(
        path=out,
        kind="ncnn",
        signature=src.signature,
        properties={"precision": "fp32"},
        notes={"pnnx": _version()},
        companions=(companion.name,),
    )


def try_net(path: Path, signature: Signature) -> None:
    """Load the net and run it once. In a child process: what pnnx wrote can end it."""
    from accel.runtimes.ncnn import Net

    Net(path, signature).run(signature.example_inputs())


def _check_signature(signature: Signature) -> None:
    for spec in signature.inputs:
        if spec.dtype not in _DTYPES:
            raise NcnnFailed(f"ncnn takes no {spec.dtype} like the input {spec.name!r}; cast it inside the model")
        if not 2 <= len(spec.shape) <= _MAX_RANK:
            raise NcnnFailed(f"ncnn needs a batch dim and 1 to 4 others, the input is {spec}; use another target")
    firsts = {spec.shape[0] for spec in (*signature.inputs, *signature.outputs) if spec.shape}
    if len(firsts) != 1 or any(not spec.shape for spec in signature.outputs):
        raise NcnnFailed(
            "ncnn runs one sample at a time, and the inputs and outputs share no batch dim; use another target"
        )


def _pnnx(folder: Path, signature: Signature, timeout: float) -> str:
    found = importlib.util.find_spec("pnnx")
    assert found is not None
    assert found.origin is not None
    small, large = signature.sizes(), {d: r.max for d, r in signature.dims.items()}
    batch = signature.batch_dim
    words = [str(Path(found.origin).with_name("pnnx")), "model.onnx", "fp16=0"]
    for option, sizes in (("inputshape", small), ("inputshape2", large)):
        one = {**sizes, **({batch: 1} if batch else {})}
        shapes = [f"[{','.join(map(str, spec.resolve(one)))}]{_DTYPES[spec.dtype]}" for spec in signature.inputs]
        words.append(f"{option}={','.join(shapes)}")
        if set(signature.dims) <= {batch}:
            break  # nothing but the batch is open: one shape says it all
    try:
        return run_program(words, folder=folder, timeout=timeout)
    except TimeoutError as error:
        raise NcnnFailed(f"{error}; use another target") from error


def _last(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return shortened(lines[-1]) if lines else "it said nothing"


def _advice(src: Artifact) -> str:
    """What remains of a model that pnnx failed on: what holds an operator with a graph inside (a loop of Keras'
    masked recurrent layers) gets no simpler."""
    kinds = {node.op_type for node in read_proto(src.path).graph.node}
    if loops := sorted(kinds & {"Loop", "Scan", "If"}):
        named = ", ".join(loops)
        return f"it holds the operator {named}: keep it as ONNX, which ONNX Runtime runs (the target ort-cpu)"
    return "simplify the model or use another target"


def _left_over(param: Path) -> list[str]:
    """Layer types that are no layers of ncnn: pnnx writes what it couldn't translate under its own name."""
    found: dict[str, None] = {}
    for line in param.read_text(encoding="utf-8", errors="replace").splitlines()[2:]:
        kind = line.split()[0] if line.split() else ""
        if "." in kind or "::" in kind or kind.startswith("pnnx"):
            found[kind] = None
    return list(found)


def _version() -> Any:
    from importlib.metadata import version

    return version("pnnx")
