"""Converts ONNX models to OpenVINO IR (an ``.xml`` and a ``.bin`` file)."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.child import run_in_child
from accel.errors import BuildFailed, CannotWrite, ChildCrashed, shortened
from accel.progress import report
from accel.runtimes.openvino import reason
from accel.signature import Signature, TensorSpec
from accel.sources.onnx.file import describe as describe_onnx
from accel.sources.onnx.file import external_files, read_without_weights
from accel.spelling import option
from accel.stage import StageConfig

from ..cast.float64 import refuse_float64
from ..graph.read_ir import RT_INFO, describe, load_openvino
from .attention import fuse_attention
from .reductions import keep_reduced_dims
from .softmax_guard import remove_softmax_guards
from .state import make_stateful

_WITH_GRAPH = re.compile(r"-- (Loop|Scan|If)-\d+ with a message: *(.*?)(?= -- | Summary: |$)")


@dataclass(frozen=True, kw_only=True)
class OpenVinoFromOnnxConfig(StageConfig):
    """Has no options. Weights keep their precision, and the session chooses the precision of the computation."""


class IrNotBuilt(BuildFailed):
    """OpenVINO could not convert the model, or crashed during the conversion."""


def openvino_from_onnx(src: Artifact, config: OpenVinoFromOnnxConfig, out: Path) -> Artifact:  # noqa: ARG001
    """Converts the ONNX model ``src`` to ``out`` (.xml) and its weights file (.bin), in a child process.

    The notes have the OpenVINO version and the number of operations. The notes also count the rewritten reductions and
    the removed softmax guards (see the modules ``reductions`` and ``softmax_guard``), and the operations in float64,
    which OpenVINO computes in float32. Raises ``InvalidModel`` if the file is not ONNX, ``ComputesInFloat32`` if an
    input or output is float64, and ``IrNotBuilt`` if OpenVINO can't convert the model. Raises ``MissingExtra`` if
    OpenVINO isn't installed.
    """
    refuse_float64(src.signature, "OpenVINO")
    notes = write_ir(src, out, src.signature)
    signature, found = describe(out)
    ranges = {dim: known for dim, known in src.signature.dims.items() if dim in signature.dims}
    return Artifact(
        path=out,
        kind="openvino",
        signature=signature.with_dims(ranges),
        properties={"precision": describe_onnx(src.path)[1]["precision"]} | found,
        notes=notes,
        companions=(out.with_suffix(".bin").name,),
    )


def write_ir(src: Artifact, out: Path, signature: Signature, *, stateful: bool = False) -> dict[str, Any]:
    """Writes the IR of ``src`` to ``out`` and its weights beside it, in a child process, and returns the notes. The IR
    records the names of ``signature``. With ``stateful``, the runtime keeps the KV cache. Raises the errors of the
    stage."""
    describe_onnx(src.path)
    external_files(read_without_weights(src.path))  # raises if weights are outside the model's folder
    report("openvino_from_onnx: converting")
    try:
        # Both files are first written to a temporary folder. The .xml is moved last, because it refers to the .bin.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            inside = Path(folder) / out.name
            notes: dict[str, Any] = run_in_child(
                "accel.converters.to_openvino.openvino_from_onnx:convert",
                path=src.path,
                out=inside,
                names={"inputs": _names(signature.inputs), "outputs": _names(signature.outputs)},
                stateful=stateful,
            )
            inside.with_suffix(".bin").replace(out.with_suffix(".bin"))
            inside.replace(out)
            return notes
    except ChildCrashed as error:
        raise IrNotBuilt(
            f"OpenVINO died while converting {src.path.name} ({error}); simplify the model or export it with "
            "another opset"
        ) from error
    except OSError as error:
        raise CannotWrite(
            f"can't write the file {out} ({error.strerror or error}); choose another {option('out')}"
        ) from error


def _names(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "dims": list(spec.shape)} for spec in specs]


def convert(path: Path, out: Path, names: Mapping[str, Any], stateful: bool = False) -> dict[str, str | int]:
    """Converts ``path`` to an IR that records ``names``, and returns the notes. Runs in the child process."""
    ov = load_openvino()
    try:
        model = ov.Core().read_model(str(path))
    except RuntimeError as error:
        raise IrNotBuilt(_refusal(path.name, reason(error, 4000))) from error
    guards = remove_softmax_guards(model)
    reductions = keep_reduced_dims(model)
    double = sum(_in_float64(op) for op in model.get_ops())
    fused = 0
    if stateful:
        make_stateful(model)
        fused = fuse_attention(model)
    model.set_rt_info(json.dumps(names), list(RT_INFO))
    try:
        ov.save_model(model, str(out), compress_to_fp16=False)
    except RuntimeError as error:
        raise CannotWrite(f"OpenVINO can't write {out.name} ({reason(error)}); free some space") from error
    return {
        "openvino": str(ov.__version__),
        "operations": len(model.get_ops()),
        "softmax_guards_removed": guards,
        "reductions_rewritten": reductions,
        **({"float64_in_float32": double} if double else {}),
        **({"attention_fused": fused} if stateful else {}),
    }


def _in_float64(op: Any) -> bool:
    return any(port.get_element_type().get_type_name() == "f64" for port in op.outputs())


def _refusal(name: str, said: str) -> str:
    """Returns accel's error message for a model that OpenVINO refuses with the message ``said``.

    OpenVINO refuses some kinds of Loop, Scan and If, at any opset. The masked recurrent layers of Keras become a Loop
    that OpenVINO refuses.
    """
    found = _WITH_GRAPH.search(said)
    if found is None:
        return f"OpenVINO can't convert {name}: {shortened(said)}; export it with another opset"
    return (
        f"OpenVINO can't convert the operator {found[1]} of {name} ({shortened(found[2])}); another opset doesn't "
        "help: keep the model as ONNX, which ONNX Runtime runs (the target ort-cpu)"
    )
