"""Simplifies ONNX without changing its outputs: folds constants, merges batch norms, removes dead nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.child import run_in_child
from accel.errors import AccelError, StageFailed, one_line
from accel.progress import report
from accel.signature import Signature
from accel.sources.onnx.file import describe_model, read_proto
from accel.sources.onnx.value_spec import optional_inputs
from accel.sources.onnx.weights import attach, detached_bytes, is_detached, read_detached
from accel.stage import StageConfig

from . import write as onnx_write
from .unfoldable import unfoldable
from .write import as_inputs, as_weights, check_file, onnx_artifact, weight_bytes

if TYPE_CHECKING:
    import onnx

# This onnxsim pass replaces every MatMul and Add on three dims by a Gemm between two Reshapes with computed shapes. The
# graph gets more nodes, and runtimes no longer recognize the Linear layer. MiniLM has 288 nodes before the
# simplification. MiniLM has 279 nodes after a simplification without the pass, and 339 nodes after a simplification
# with the pass.
_SKIPPED = ("fuse_matmul_add_bias_into_gemm_batched",)
# onnxsim imports these if they are installed, but doesn't need them here. Importing sympy takes half a second.
_HIDDEN = ("torch", "sympy")


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
    interface, size = describe_model(before)[0], weight_bytes(before)
    notes: dict[str, Any] = {"nodes_before": len(before.graph.node)}
    report("onnxsim")
    with tempfile.TemporaryDirectory(prefix="simplify-", dir=out.parent) as folder:
        made = Path(folder) / "simplified.onnx"
        try:
            apart = as_inputs(before, _stays_apart(before))
            for tensor in filter(is_detached, before.graph.initializer):
                attach(tensor)
            given = Path(folder) / "given.onnx"
            given.write_bytes(before.SerializeToString())
            run_in_child(
                "accel.converters.graph.simplify:run_onnxsim",
                timeout=config.timeout,
                hidden=_HIDDEN,
                path=given,
                out=made,
                skip=[*_SKIPPED, *config.skip],
            )
            drift = check_file(made)
            after = read_proto(made)
            as_weights(after, apart)
            drift = drift or _drift(before, interface, size, after)
        except (AccelError, TimeoutError, OSError) as error:
            drift = one_line(error)
        if drift:
            after = read_detached(src.path)
            notes["kept"] = f"the model is unsimplified: {drift}"
        notes["nodes_after"] = len(after.graph.node)
        try:
            return onnx_artifact(src, after, out, notes, before)
        except StageFailed as error:
            raise SimplifyFailed(str(error)) from error


def _stays_apart(model: onnx.ModelProto) -> Callable[[onnx.TensorProto], bool]:
    """Returns a function that tells which weights onnxsim doesn't get.

    onnxsim can't fold a weight that it doesn't get, and would fold the defaults of optional inputs. A model over 2 GB
    doesn't fit into a protobuf message, so onnxsim gets none of its large weights.
    """
    optional = {spec.name for spec in optional_inputs(model)}
    if detached_bytes(model) > onnx_write.SINGLE_FILE_BYTES:
        return lambda tensor: is_detached(tensor) or tensor.name in optional
    names = {*unfoldable(model), *optional}
    return lambda tensor: tensor.name in names


def run_onnxsim(path: Path, out: Path, skip: list[str]) -> None:
    """Simplifies the model ``path``, restores its header, and writes it to ``out``. Runs in a child process."""
    import onnxsim

    before = read_proto(path, weights=True)
    after, _ = onnxsim.simplify(before, skipped_optimizers=skip, certify=False)
    own = [prop for prop in after.metadata_props if not prop.key.startswith("onnxsim.")]
    del after.metadata_props[:]
    after.metadata_props.extend(own)
    _restore_dims(before, after)
    after.ir_version = before.ir_version
    after.producer_name, after.producer_version = before.producer_name, before.producer_version
    out.write_bytes(after.SerializeToString())


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


def _drift(before: onnx.ModelProto, was: Signature, size: int, after: onnx.ModelProto) -> str | None:
    """Describes the first forbidden change from ``before`` to ``after``. ``was`` is the signature of ``before``, and
    ``size`` the size of its weights and nodes in bytes. Returns None if no change is forbidden."""
    now, _ = describe_model(after)
    for old, new in zip((*was.inputs, *was.outputs), (*now.inputs, *now.outputs), strict=False):
        # onnxsim may rename the dims of an output, and may find out an unknown shape.
        same = (old.name, old.dtype, len(old.shape)) == (new.name, new.dtype, len(new.shape))
        if not same or any(isinstance(a, str) != isinstance(b, str) for a, b in zip(old.shape, new.shape, strict=True)):
            return f"onnxsim changed {old} to {new}"
    if (len(was.inputs), len(was.outputs)) != (len(now.inputs), len(now.outputs)) or was.optional != now.optional:
        return "onnxsim changed the number of inputs or outputs"
    versions = {entry.domain: entry.version for entry in before.opset_import}
    for entry in after.opset_import:
        if versions.get(entry.domain) != entry.version:
            return f"onnxsim changed the opset of {entry.domain or 'ai.onnx'} to {entry.version}"
    if weight_bytes(after) > 2 * size + (1 << 20):
        return "folding constants more than doubled the size of the model"
    return None
