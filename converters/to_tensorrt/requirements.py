"""What an ONNX file has to be before TensorRT sees it: its parser takes things silently that it gets wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel.converters.engine_from_onnx import EngineNotBuilt
from accel.converters.preflight import preflight, refused
from accel.errors import InvalidModel, one_line

if TYPE_CHECKING:
    import onnx


def check_onnx(
    path: Path, model: onnx.ModelProto, capabilities: Sequence[str] = (), supported: Mapping[str, bool] | None = None
) -> None:
    """``InvalidModel`` for what the ONNX checker refuses (TensorRT takes an empty or text file for an empty network),
    ``EngineNotBuilt`` with every node that TensorRT will refuse, or reads as something else without a word. ``model``:
    what ``read_proto`` gave of ``path``."""
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        # An operator nobody knows is for the parser to name; it says which node it is.
        if "No Op registered" not in str(error) and "No opset import" not in str(error):
            raise InvalidModel(f"{path} fails the ONNX checker ({one_line(error)}); export it again") from error
    if not model.graph.node or not model.graph.output:
        raise InvalidModel(f"{path} holds no nodes or no outputs; export it again")
    if refusals := preflight(path, capabilities, supported, model):
        raise EngineNotBuilt(refused(refusals, path.name))
