"""Simplifies ONNX without changing its outputs: folds constants, merges batch norms, removes dead nodes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.child import run_in_child
from accel.errors import AccelError, StageFailed, one_line
from accel.progress import report
from accel.sources.onnx.file import describe_model, read_proto
from accel.sources.onnx.weights import detached_bytes, read_detached
from accel.stage import StageConfig

from . import write as onnx_write
from .write import as_inputs, as_weights, check_file, onnx_artifact, weight_bytes, write_onnx

if TYPE_CHECKING:
    import onnx

# This onnxsim pass replaces every MatMul and Add on three dims by a Gemm between two Reshapes with computed shapes. The
# graph gets more nodes, and runtimes no longer recognize the Linear layer. MiniLM has 288 nodes before the
# simplification. MiniLM has 279 nodes after a simplification without the pass, and 339 nodes after a simplification
# with the pass.
_SKIPPED = ("fuse_matmul_add_bias_into_gemm_batched",)


class SimplifyFailed(StageFailed):
    """The model could not be written, even without simplification."""


@dataclass(frozen=True, kw_only=True)
class SimplifyConfig(StageConfig):
    """``skip`` names further onnxsim passes to leave out. If onnxsim takes longer than ``timeout`` seconds, the model
    stays unsimplified."""

    skip: tuple[str, ...] = ()
    timeout: float = 600.0


def simplify(src: Artifact, config: SimplifyConfig, out: Path) -> Artifact:
    """Simplifies ``src`` with onnxsim in a child process. The opset, the IR version and the signature don't change.

    If onnxsim fails, crashes or changes the signature, the model stays unsimplified and ``notes["kept"]`` says why.
    Raises ``SimplifyFailed`` if the model itself fails the checker.
    """
    before = read_detached(src.path)
    light = detached_bytes(before) > onnx_write.SINGLE_FILE_BYTES
    notes: dict[str, Any] = {"nodes_before": len(before.graph.node)}
    report("onnxsim")
    with tempfile.TemporaryDirectory(prefix="simplify-", dir=out.parent) as folder:
        made = Path(folder) / "simplified.onnx"
        try:
            run_in_child(
                "accel.converters.graph.simplify:run_onnxsim",
                timeout=config.timeout,
                hidden=("torch",),
                path=src.path,
                out=made,
                skip=[*_SKIPPED, *config.skip],
                light=light,
            )
            after = read_proto(made) if light else read_detached(made)
            drift = _drift(before, after) or (None if light else check_file(made))
        except (AccelError, TimeoutError, OSError) as error:
            drift = one_line(error)
        if drift:
            after = before
            notes["kept"] = f"the model is unsimplified: {drift}"
        notes["nodes_after"] = len(after.graph.node)
        try:
            return onnx_artifact(src, after, out, notes)
        except StageFailed as error:
            raise SimplifyFailed(str(error)) from error


def run_onnxsim(path: Path, out: Path, skip: list[str], light: bool = False) -> None:
    """Simplifies the model ``path``, restores its header, and writes it to ``out``. Runs in a child process.

    If ``light`` is true, the large weights stay in their file. With ``light``, onnxsim treats the large weights as
    inputs and can't fold them. Models over 2 GB need ``light``, because a protobuf message can't be larger.
    """
    import onnxsim

    before = read_detached(path) if light else read_proto(path, weights=True)
    apart = as_inputs(before) if light else []
    after, _ = onnxsim.simplify(before, skipped_optimizers=skip, certify=False)
    own = [prop for prop in after.metadata_props if not prop.key.startswith("onnxsim.")]
    del after.metadata_props[:]
    after.metadata_props.extend(own)
    _restore_dims(before, after)
    after.ir_version = before.ir_version
    after.producer_name, after.producer_version = before.producer_name, before.producer_version
    if light:
        as_weights(after, apart)
        out.write_bytes(after.SerializeToString())
    else:
        write_onnx(after, out)


def _restore_dims(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Gives each dim in ``after`` the name that the dim has in ``before``.

    If a Reshape computes a dim, onnxsim names the dim ``unk__0``. Even the batch dim may get the name ``unk__0``.
    """
    had = {value.name: value for value in before.graph.input}
    names: dict[str, str] = {}
    for value in after.graph.input:
        if value.name in had:
            dims = zip(had[value.name].type.tensor_type.shape.dim, value.type.tensor_type.shape.dim, strict=False)
            names |= {now.dim_param: was.dim_param for was, now in dims if now.dim_param and was.dim_param}
    for value in (*after.graph.input, *after.graph.output, *after.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


def _drift(before: onnx.ModelProto, after: onnx.ModelProto) -> str | None:
    """Describes the first forbidden change from ``before`` to ``after``. Returns None if no change is forbidden."""
    (was, _), (now, _) = describe_model(before), describe_model(after)
    for old, new in zip((*was.inputs, *was.outputs), (*now.inputs, *now.outputs), strict=False):
        # onnxsim may rename the dims of an output, and may find out an unknown shape.
        same = (old.name, old.dtype, len(old.shape)) == (new.name, new.dtype, len(new.shape))
        if not same or any(isinstance(a, str) != isinstance(b, str) for a, b in zip(old.shape, new.shape, strict=True)):
            return f"onnxsim changed {old} to {new}"
    if (len(was.inputs), len(was.outputs)) != (len(now.inputs), len(now.outputs)):
        return "onnxsim changed the number of inputs or outputs"
    versions = {entry.domain: entry.version for entry in before.opset_import}
    for entry in after.opset_import:
        if versions.get(entry.domain) != entry.version:
            return f"onnxsim changed the opset of {entry.domain or 'ai.onnx'} to {entry.version}"
    if weight_bytes(after) > 2 * weight_bytes(before) + (1 << 20):
        return "folding constants more than doubled the size of the model"
    return None
