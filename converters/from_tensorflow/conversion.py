"""One run of tf2onnx in the TensorFlow process, the same for what comes as a graph and as a TFLite file."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.child import resolve
from accel.converters.onnx_names import Contract, give_names
from accel.converters.onnx_write import check_file, onnx_artifact, write_onnx
from accel.converters.tensorflow_layout import LAYOUTS
from accel.errors import AccelError, ChildCrashed, ExportFailed, StageFailed, UnknownName
from accel.progress import report, watched_by
from accel.sources.onnx_file import one_line, opset_of, read_proto
from accel.sources.tensorflow_process import in_tensorflow, require_tensorflow
from accel.sources.tensorflow_source import TensorFlowSpec
from accel.stage import StageConfig

if TYPE_CHECKING:
    import onnx

# The newest opset that tf2onnx writes; onnx's own converter takes the file from there.
TF2ONNX_OPSET = 18

# The model, how it is laid out, and tensor names of its inputs and outputs by the user's.
Converted = tuple["onnx.ModelProto", dict[str, Any], Mapping[str, str], Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Tf2OnnxConfig(StageConfig):
    """``opset``: what the file will have, exactly. ``layout``: of images inside the graph, ``channels_first``,
    ``channels_last``, or ``auto`` for the one that leaves less to be transposed; at its ends they stay as they are."""

    opset: int = 20
    layout: str = "auto"


class OpNotConverted(ExportFailed):
    """tf2onnx has no ONNX form for an operator of the model; it is named."""


def convert(src: Artifact, config: Tf2OnnxConfig, out: Path, read: str) -> Artifact:
    """``src`` as ONNX in ``out``, inputs and outputs under the names of its signature. ``read`` (``module:function`` of
    a ``TensorFlowSpec``, an opset and a layout) is called in the TensorFlow process and gives ``Converted``.

    ``OpNotConverted`` names the operators that have no ONNX form, ``ExportFailed`` any other reason; where the process
    died, the operator that it was at.
    """
    require_tensorflow("tf2onnx")
    if config.layout not in LAYOUTS:
        raise UnknownName(f"unknown layout {config.layout!r}; it is one of {', '.join(LAYOUTS)}")
    report(f"onnx_from_{src.kind}: tf2onnx")
    made = out.with_name(f"{out.stem}.tf2onnx.onnx")
    last = ""

    def remember(message: str, fraction: float | None) -> None:  # noqa: ARG001 - one of thousands of operators
        nonlocal last
        last = message

    try:
        with watched_by(remember):
            note: dict[str, Any] = in_tensorflow(
                "accel.converters.tf2onnx_conversion:run_tf2onnx",
                spec=TensorFlowSpec.of(src),
                contract=Contract(src.signature.inputs, src.signature.outputs),
                opset=config.opset,
                layout=config.layout,
                read=read,
                out=made,
            )
    except ChildCrashed as error:
        at = f"; it was at {last}, export the part of the model without it" if last else ""
        raise ExportFailed(f"tf2onnx can't convert {src.source.get('spec', src.path)}: {error}{at}") from error
    model = read_proto(made, weights=True)
    made.unlink()
    return onnx_artifact(src, model, out, note)


def run_tf2onnx(
    spec: TensorFlowSpec, contract: Contract, opset: int, layout: str, read: str, out: Path
) -> dict[str, Any]:
    """Convert the model that ``spec`` names into ``out``; what is worth noting. Runs in the TensorFlow process and
    reports what it is at, operator by operator."""
    import tf2onnx

    heard = _Heard()
    log = logging.getLogger("tf2onnx")
    log.addHandler(heard)
    log.setLevel(logging.WARNING)
    first = min(opset, TF2ONNX_OPSET)
    reader: Callable[[TensorFlowSpec, int, str], Converted] = resolve(read)
    try:
        with _operators_reported():
            model, turned, inputs, outputs = reader(spec, first, layout)
    except AccelError:
        raise
    except Exception as error:
        raise _refused(spec.path, heard.lines, error) from error
    finally:
        log.removeHandler(heard)
    foreign = {node.op_type for node in model.graph.node if _is_foreign(node)}
    if left := foreign | _unsupported(heard.lines):
        raise _not_converted(spec.path, sorted(left))
    _as_specified(model)
    give_names(model, {v: k for k, v in inputs.items()} | {v: k for k, v in outputs.items()}, contract)
    model = at_opset(model, opset, spec.path)
    write_onnx(model, out)
    if fault := check_file(out):
        raise ExportFailed(f"what tf2onnx made of {spec.path} fails the checker: {fault}")
    nodes = len(model.graph.node)
    return {"tf2onnx": tf2onnx.__version__, "opset_before": first, "nodes": nodes, "transposes": turned}


@contextmanager
def _operators_reported() -> Iterator[None]:
    """Inside, each operator is reported before tf2onnx converts it: should that end the process, its name is known."""
    from tf2onnx import handler

    kept = (handler.tf_op.create_mapping, handler.tfl_op.create_tfl_to_tf_mapping)

    def reporting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def convert_node(graph: Any, node: Any, **words: Any) -> Any:
            report(f"the operator {node.type} ({node.name})")
            return function(graph, node, **words)

        return convert_node

    def over(mapping: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: {op: (reporting(function), words) for op, (function, words) in mapping(*given).items()}

    handler.tf_op.create_mapping, handler.tfl_op.create_tfl_to_tf_mapping = map(over, kept)
    try:
        yield
    finally:
        handler.tf_op.create_mapping, handler.tfl_op.create_tfl_to_tf_mapping = map(staticmethod, kept)


class _Heard(logging.Handler):
    """What tf2onnx logs: it reports operators it can't convert there and goes on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _unsupported(lines: Sequence[str]) -> set[str]:
    """The operators that tf2onnx says it can't write."""
    pattern = r"op \[\S+: (\w+)\] is not supported|Op (\w+) is not implemented"
    return {match[1] or match[2] for line in lines for match in re.finditer(pattern, line)}


def _is_foreign(node: onnx.NodeProto) -> bool:
    """Whether ``node`` is no operator of ONNX: of another domain, or one of TensorFlow that was left as it was."""
    import onnx

    if node.domain not in ("", "ai.onnx", "ai.onnx.ml"):
        return True
    return not onnx.defs.has(node.op_type, "" if node.domain == "ai.onnx" else node.domain)


def _as_specified(model: onnx.ModelProto) -> None:
    """Say nearest neighbours of pixel centres in today's words: tf2onnx writes ``tf_half_pixel_for_nn``, which opset 13
    took out. The floor of ``v`` is ``v - 0.5`` rounded, halves up."""
    for node in model.graph.node:
        said = {a.name: a for a in node.attribute}
        mode = said.get("coordinate_transformation_mode")
        if node.op_type != "Resize" or mode is None or mode.s != b"tf_half_pixel_for_nn":
            continue
        nearest = said.get("nearest_mode")
        if nearest is not None and nearest.s == b"floor":
            mode.s, nearest.s = b"half_pixel", b"round_prefer_ceil"


def _not_converted(where: str, ops: list[str]) -> OpNotConverted:
    what = f"the operator {ops[0]}" if len(ops) == 1 else f"the operators {', '.join(ops)}"
    cut = "export the part of the model without it" if len(ops) == 1 else "export the part of the model without them"
    if where.endswith(".tflite"):
        cut = "export the SavedModel or Keras file that it was made of"
    elif any(op.startswith("LookupTable") for op in ops):
        cut = "tables of strings aren't supported: look them up before the model and export it from the numbers on"
    return OpNotConverted(f"{where} uses {what}, which tf2onnx can't write as ONNX; {cut}")


def _refused(where: str, lines: list[str], error: Exception) -> StageFailed:
    if left := _unsupported([*lines, str(error)]):
        return _not_converted(where, sorted(left))
    told = next((line for line in reversed(lines) if "rror" in line or "ailed" in line), "")
    reason = one_line(f"{type(error).__name__}: {error}")
    return ExportFailed(f"tf2onnx can't convert {where}: {reason}" + (f" ({one_line(told)[:160]})" if told else ""))


def at_opset(model: onnx.ModelProto, opset: int, where: str) -> onnx.ModelProto:
    """``model`` at ``opset``, by onnx's version converter; the IR that goes with it."""
    import onnx
    from onnx import version_converter

    if opset_of(model) != opset:
        try:
            model = version_converter.convert_version(model, opset)
        except Exception as error:
            raise ExportFailed(
                f"{where} can't be brought from opset {opset_of(model)} to {opset} ({one_line(error)}); "
                f"pass --opset {opset_of(model)}"
            ) from error
    del model.graph.value_info[:]  # with symbols of the converter's own, which would win over the names of the dims
    model.ir_version = max(onnx.helper.find_min_ir_version_for(list(model.opset_import), True), 8)
    return model
