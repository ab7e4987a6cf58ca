"""Converts ONNX models to ncnn's ``.param`` and ``.bin`` files with pnnx."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from accel.artifact import Artifact
from accel.child import run_in_child, run_program
from accel.errors import BuildFailed, ChildCrashed, MissingExtra, shortened
from accel.progress import report
from accel.signature import Signature
from accel.sources.onnx.file import read_proto
from accel.stage import StageConfig

from ..cast.float64 import refuse_float64

# ncnn tensors have at most 4 dims besides the batch dim.
_MAX_RANK = 5
_DTYPES = {"float32": "f32", "int32": "i32", "int64": "i64"}


@dataclass(frozen=True, kw_only=True)
class NcnnFromOnnxConfig(StageConfig):
    """pnnx is stopped after ``timeout`` seconds."""

    timeout: float = 600.0


class NcnnFailed(BuildFailed):
    """pnnx can't convert the model, or ncnn can't run it. The error message names the operator if known."""


def ncnn_from_onnx(src: Artifact, config: NcnnFromOnnxConfig, out: Path) -> Artifact:
    """Converts ``src`` to ``out`` (``.ncnn.param``) and a file of float32 weights (``.ncnn.bin``) beside ``out``.

    The resulting net takes one sample per run. Raises ``NcnnFailed`` if the model's inputs and outputs don't share a
    batch dim, if an operator has no ncnn layer, or if ncnn can't run the result.
    """
    for module in ("pnnx", "ncnn"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(module, "ncnn")
    refuse_float64(src.signature, "ncnn")
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
            raise NcnnFailed(
                f"ncnn has no layers for the operators {', '.join(left)} of {src.path.name}; use another target"
            )
        companion = out.with_suffix(".bin")
        shutil.copyfile(param, out)
        shutil.copyfile(weights, companion)
    try:
        run_in_child(
            "accel.converters.to_others.ncnn_from_onnx:try_net",
            timeout=config.timeout,
            path=out,
            signature=src.signature,
        )
    except ChildCrashed as error:
        raise NcnnFailed(
            f"ncnn can't run the net that pnnx made of {src.path.name} ({error}); use another target"
        ) from error
    return Artifact(
        path=out,
        kind="ncnn",
        signature=src.signature,
        properties={"precision": "fp32"},
        notes={"pnnx": importlib.metadata.version("pnnx")},
        companions=(companion.name,),
    )


def try_net(path: Path, signature: Signature) -> None:
    """Loads the net and runs it once. Runs in a child process, because a net from pnnx can crash ncnn."""
    from accel.runtimes.ncnn import Net

    Net(path, signature).run(signature.example_inputs())


def _check_signature(signature: Signature) -> None:
    for spec in signature.inputs:
        if spec.dtype not in _DTYPES:
            raise NcnnFailed(f"ncnn has no inputs of dtype {spec.dtype}; cast the input {spec.name!r} inside the model")
        if not 2 <= len(spec.shape) <= _MAX_RANK:
            raise NcnnFailed(
                f"ncnn takes inputs with a batch dim and 1 to 4 more dims, but the model has the input {spec}; use "
                "another target"
            )
    firsts = {spec.shape[0] for spec in (*signature.inputs, *signature.outputs) if spec.shape}
    if len(firsts) != 1 or any(not spec.shape for spec in signature.outputs):
        raise NcnnFailed(
            "ncnn runs one sample at a time, but the model's inputs and outputs have no common batch dim; use another "
            "target"
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
            break  # pnnx needs no second shape, because only the batch dim is dynamic
    try:
        return run_program(words, folder=folder, timeout=timeout)
    except TimeoutError as error:
        raise NcnnFailed(f"{error}; use another target") from error


def _last(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return shortened(lines[-1]) if lines else "it gave no reason"


def _advice(src: Artifact) -> str:
    """Returns the advice for a model that pnnx can't convert.

    If the model has a Loop, Scan or If, simplifying the model doesn't help. Keras's masked recurrent layers become a
    Loop, for example.
    """
    kinds = {node.op_type for node in read_proto(src.path).graph.node}
    if loops := sorted(kinds & {"Loop", "Scan", "If"}):
        named = ", ".join(loops)
        return f"the model holds the operator {named}: keep it as ONNX, which ONNX Runtime runs (the target ort-cpu)"
    return "simplify the model or use another target"


def _left_over(param: Path) -> list[str]:
    """Returns the layer types that ncnn lacks. If pnnx can't translate an operator, pnnx writes the operator's name as
    the layer type."""
    found: dict[str, None] = {}
    for line in param.read_text(encoding="utf-8", errors="replace").splitlines()[2:]:
        kind = line.split()[0] if line.split() else ""
        if "." in kind or "::" in kind or kind.startswith("pnnx"):
            found[kind] = None
    return list(found)
