"""Runs tf2onnx in the TensorFlow process, for TensorFlow graphs and for TFLite files."""

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
from accel.errors import AccelError, ChildCrashed, ExportFailed, StageFailed, UnknownName
from accel.progress import report
from accel.sources.onnx.file import one_line, opset_of, read_proto
from accel.sources.tensorflow.process import in_tensorflow, require_tensorflow
from accel.sources.tensorflow.source import TensorFlowSpec
from accel.spelling import option, options
from accel.stage import StageConfig

from ..graph.names import Contract, give_names
from ..graph.padding import keep_zero_padding
from ..graph.sigmoids import exact_sigmoids
from ..graph.write import check_file, onnx_artifact, write_onnx
from .layout import LAYOUTS

if TYPE_CHECKING:
    import onnx

# The newest opset that tf2onnx writes. For a newer opset, onnx's version converter converts the file.
TF2ONNX_OPSET = 18

# The result of a conversion: the model, notes on its layout, the names of the inputs, and the names of the outputs.
# Each dict of names maps the name that the user sees to the name in the graph.
Converted = tuple["onnx.ModelProto", dict[str, Any], Mapping[str, str], Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Tf2OnnxConfig(StageConfig):
    """``opset`` is the exact opset of the file. ``layout`` is the layout of images inside the graph:
    ``channels_first``, ``channels_last`` or ``auto``. ``auto`` chooses the layout with fewer transposes. Inputs and
    outputs of the model keep their layout."""

    opset: int = 20
    layout: str = "auto"


class OpNotConverted(ExportFailed):
    """Raised if tf2onnx has no ONNX translation for an operator of the model. The message names the operator."""


def convert(src: Artifact, config: Tf2OnnxConfig, out: Path, read: str) -> Artifact:
    """Writes ``src`` as ONNX to ``out``. Inputs and outputs get the names in the signature of ``src``.

    The TensorFlow process calls ``read`` (``module:function``) with a ``TensorFlowSpec``, an opset and a layout.
    ``read`` returns ``Converted``.

    Raises ``OpNotConverted`` with the operators that have no ONNX translation, and ``ExportFailed`` for other failures.
    If the process died, the message names the last operator that was being converted.
    """
    require_tensorflow("tf2onnx")
    if config.layout not in LAYOUTS:
        raise UnknownName(f"unknown layout {config.layout!r}; use one of {', '.join(LAYOUTS)}")
    report(f"onnx_from_{src.kind}: tf2onnx")
    made = out.with_name(f"{out.stem}.tf2onnx.onnx")
    operator = made.with_suffix(".operator")
    try:
        note: dict[str, Any] = in_tensorflow(
            "accel.converters.from_tensorflow.conversion:run_tf2onnx",
            spec=TensorFlowSpec.of(src),
            contract=Contract(src.signature.inputs, src.signature.outputs),
            opset=config.opset,
            layout=config.layout,
            read=read,
            out=made,
            operator=operator,
        )
    except ChildCrashed as error:
        spec = TensorFlowSpec.of(src)
        raise ExportFailed(f"tf2onnx can't convert {spec.shown}: {error}{_at(operator, spec)}") from error
    finally:
        operator.unlink(missing_ok=True)
    model = read_proto(made, weights=True)
    made.unlink()
    return onnx_artifact(src, model, out, note)


def run_tf2onnx(
    spec: TensorFlowSpec, contract: Contract, opset: int, layout: str, read: str, out: Path, operator: Path
) -> dict[str, Any]:
    """Converts the model of ``spec``, writes the result to ``out``, and returns the notes of the stage.

    Runs in the TensorFlow process. The file ``operator`` holds the name of the operator that is being converted.
    """
    import tf2onnx

    heard = _Heard()
    log = logging.getLogger("tf2onnx")
    log.addHandler(heard)
    log.setLevel(logging.WARNING)
    first = min(opset, TF2ONNX_OPSET)
    reader: Callable[[TensorFlowSpec, int, str], Converted] = resolve(read)
    try:
        with _operators_noted(operator):
            model, turned, inputs, outputs = reader(spec, first, layout)
    except AccelError:
        raise
    except Exception as error:
        raise _refused(spec, heard.lines, error, operator) from error
    finally:
        log.removeHandler(heard)
    foreign = {node.op_type for node in model.graph.node if _is_foreign(node)}
    if left := foreign | _unsupported(heard.lines):
        raise _not_converted(spec, sorted(left))
    _as_specified(model)
    give_names(model, {v: k for k, v in inputs.items()} | {v: k for k, v in outputs.items()}, contract)
    model = at_opset(model, opset, spec.shown)
    keep_zero_padding(model)
    exact_sigmoids(model)
    write_onnx(model, out)
    if fault := check_file(out):
        other = option("opset", first if first != opset else opset - 1)
        raise ExportFailed(
            f"the file that tf2onnx made of {spec.shown} fails the ONNX checker ({fault}); pass another opset, such as "
            f"{other}"
        )
    nodes = len(model.graph.node)
    return {"tf2onnx": tf2onnx.__version__, "opset_before": first, "nodes": nodes, "transposes": turned}


@contextmanager
def _operators_noted(file: Path) -> Iterator[None]:
    """Before each operator is converted, writes the operator's name to ``file``, because the conversion may crash the
    process."""
    from tf2onnx import handler

    kept = (handler.tf_op.create_mapping, handler.tfl_op.create_tfl_to_tf_mapping)

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def convert_node(graph: Any, node: Any, **words: Any) -> Any:
            file.write_text(f"{node.type} ({node.name})")
            return function(graph, node, **words)

        return convert_node

    def over(mapping: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: {op: (noting(function), words) for op, (function, words) in mapping(*given).items()}

    handler.tf_op.create_mapping, handler.tfl_op.create_tfl_to_tf_mapping = map(over, kept)
    try:
        yield
    finally:
        handler.tf_op.create_mapping, handler.tfl_op.create_tfl_to_tf_mapping = map(staticmethod, kept)


class _Heard(logging.Handler):
    """Collects the log lines of tf2onnx. The converter tf2onnx logs an operator that it can't convert, and
    continues."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _unsupported(lines: Sequence[str]) -> set[str]:
    """Returns the operators that tf2onnx reports as unsupported in its log."""
    pattern = r"op \[\S+: (\w+)\] is not supported|Op (\w+) is not implemented"
    return {match[1] or match[2] for line in lines for match in re.finditer(pattern, line)}


def _is_foreign(node: onnx.NodeProto) -> bool:
    """Tells whether ``node`` has a domain outside ONNX, or is a TensorFlow operator that was not converted."""
    import onnx

    if node.domain not in ("", "ai.onnx", "ai.onnx.ml"):
        return True
    return not onnx.defs.has(node.op_type, "" if node.domain == "ai.onnx" else node.domain)


def _as_specified(model: onnx.ModelProto) -> None:
    """Replaces the mode ``tf_half_pixel_for_nn`` in Resize nodes. Opset 13 removed the mode ``tf_half_pixel_for_nn``,
    but tf2onnx still writes it.

    The replacement, ``half_pixel`` with ``round_prefer_ceil``, gives the same result: ``half_pixel`` subtracts 0.5 from
    a position ``v``, and rounding ``v - 0.5`` to the nearest integer, halves up, equals ``floor(v)``.
    """
    for node in model.graph.node:
        said = {a.name: a for a in node.attribute}
        mode = said.get("coordinate_transformation_mode")
        if node.op_type != "Resize" or mode is None or mode.s != b"tf_half_pixel_for_nn":
            continue
        nearest = said.get("nearest_mode")
        if nearest is not None and nearest.s == b"floor":
            mode.s, nearest.s = b"half_pixel", b"round_prefer_ceil"


def _not_converted(spec: TensorFlowSpec, ops: list[str]) -> OpNotConverted:
    what = f"the operator {ops[0]}" if len(ops) == 1 else f"the operators {', '.join(ops)}"
    cut = _cut(spec, "it" if len(ops) == 1 else "them")
    if spec.form != "tflite" and any(op.startswith("LookupTable") for op in ops):
        cut = f"such tables aren't supported: look the values up before the model, and {_cut(spec, 'the table')}"
    return OpNotConverted(f"{spec.shown} uses {what}, which tf2onnx can't write as ONNX; {cut}")


def _cut(spec: TensorFlowSpec, what: str) -> str:
    """Returns the advice that exports the model without the operators ``what``, for the form of the user's file."""
    if spec.form == "tflite":
        return "export the SavedModel or Keras file that the TFLite file was made from"
    if spec.form in ("graph", "checkpoint"):
        names = options("graph_inputs", "graph_outputs")
        return f"export the part of the graph without {what}: name tensors behind or before {what} with {names}"
    if spec.shown != spec.path:
        return f"pass the part of the model without {what}"
    return f"export a FILE.py:FUNCTION that returns the part of the model without {what}"


def _at(operator: Path, spec: TensorFlowSpec) -> str:
    """Returns a phrase with the operator that was being converted, and the advice to leave it out."""
    last = operator.read_text() if operator.is_file() else ""
    return f"; it was at the operator {last}, {_cut(spec, 'it')}" if last else f"; {_cut(spec, 'the cause')}"


def _refused(spec: TensorFlowSpec, lines: list[str], error: Exception, operator: Path) -> StageFailed:
    if left := _unsupported([*lines, str(error)]):
        return _not_converted(spec, sorted(left))
    told = next((line for line in reversed(lines) if "rror" in line or "ailed" in line), "")
    reason = one_line(f"{type(error).__name__}: {error}") + (f" ({one_line(told)[:160]})" if told else "")
    return ExportFailed(f"tf2onnx can't convert {spec.shown}: {reason}{_at(operator, spec)}")


def at_opset(model: onnx.ModelProto, opset: int, where: str) -> onnx.ModelProto:
    """Returns ``model`` converted to ``opset`` by onnx's version converter, with an IR version that fits the opset."""
    import onnx
    from onnx import version_converter

    if opset_of(model) != opset:
        try:
            model = version_converter.convert_version(model, opset)
        except Exception as error:
            raise ExportFailed(
                f"{where} can't be converted from opset {opset_of(model)} to opset {opset} "
                f"({one_line(error)}); pass {option('opset', opset_of(model))} to keep the opset"
            ) from error
    del model.graph.value_info[:]  # the version converter's symbols for dims would replace the dims' names
    model.ir_version = max(onnx.helper.find_min_ir_version_for(list(model.opset_import), True), 8)
    return model
