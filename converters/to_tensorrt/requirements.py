"""Checks an ONNX file before TensorRT reads the file, because TensorRT's parser misreads some models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel.errors import InvalidModel
from accel.sources.onnx.refusal import is_unknown_operator, plain_reason

from .engine_from_onnx import EngineNotBuilt
from .preflight import preflight, refused

if TYPE_CHECKING:
    import onnx


def check_onnx(
    path: Path, model: onnx.ModelProto, capabilities: Sequence[str] = (), supported: Mapping[str, bool] | None = None
) -> None:
    """Raises an error if TensorRT can't build an engine from the ONNX file ``path``. ``model`` is the result of
    ``read_proto(path)``.

    Raises ``InvalidModel`` if the ONNX checker refuses the file. TensorRT itself doesn't refuse an empty file or a text
    file, but reads an empty network. Raises ``EngineNotBuilt`` with every node that TensorRT refuses or silently
    computes in another dtype.
    """
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        # Unknown operators are left to TensorRT's parser, because the parser's error names the node.
        if not is_unknown_operator(error):
            raise InvalidModel(
                f"the ONNX file {path} fails the ONNX checker ({plain_reason(error)}); export it again"
            ) from error
    if not model.graph.node or not model.graph.output:
        raise InvalidModel(f"the graph in {path} has no nodes or no outputs; export the model again")
    if refusals := preflight(path, capabilities, supported, model):
        raise EngineNotBuilt(refused(refusals, path.name))
