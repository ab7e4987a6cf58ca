"""What an ONNX file has to be before TensorRT sees it: its parser takes things silently that it gets wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from accel.converters.engine_from_onnx import EngineNotBuilt
from accel.errors import InvalidModel
from accel.sources.onnx_file import one_line, read_proto

if TYPE_CHECKING:
    import onnx


def check_onnx(path: Path) -> None:
    """``InvalidModel`` for what the ONNX checker refuses (TensorRT takes an empty or text file for an empty network),
    ``EngineNotBuilt`` for unsigned QDQ, which TensorRT reads as signed without a word."""
    import onnx

    model = read_proto(path)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        # An operator nobody knows is for the parser to name; it says which node it is.
        if "No Op registered" not in str(error) and "No opset import" not in str(error):
            raise InvalidModel(f"{path} fails the ONNX checker ({one_line(error)}); export it again") from error
    if not model.graph.node or not model.graph.output:
        raise InvalidModel(f"{path} holds no nodes or no outputs; export it again")
    if node := unsigned_qdq(model.graph):
        raise EngineNotBuilt(
            f"TensorRT has no uint8 quantization: node {node.name or node.output[0]!r} ({node.op_type}) of {path.name} "
            "is unsigned; quantize it symmetrically to int8 (accel optimize does for this target)"
        )


def unsigned_qdq(graph: onnx.GraphProto) -> onnx.NodeProto | None:
    """The first QuantizeLinear or DequantizeLinear whose 8-bit numbers are unsigned."""
    from onnx import TensorProto

    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = list(graph.node)
    for node in nodes:
        if node.op_type == "Constant":
            types[node.output[0]] = next((a.t.data_type for a in node.attribute if a.name == "value"), 0)
    for node in nodes:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.domain not in ("", "ai.onnx"):
            continue
        if len(node.input) > 2 and node.input[2]:
            kind = types.get(node.input[2])
        elif node.op_type == "QuantizeLinear":
            # The standard: no zero point means uint8, unless the node says otherwise (opset 21 and later).
            kind = next((a.i for a in node.attribute if a.name == "output_dtype" and a.i), TensorProto.UINT8)
        else:
            kind = types.get(node.input[0])
        if kind in (TensorProto.UINT8, TensorProto.UINT16):
            return node
    return None
