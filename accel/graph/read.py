"""Reads the graph of a model of any kind, with its cost. ONNX models, IRs and ncnn nets are read directly. TensorFlow,
TFLite and PyTorch models are exported to ONNX, and the graph is read from the ONNX file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.errors import AccelError, UnsupportedHere, one_line
from accel.sources.onnx.file import read_without_weights

from .cost import GraphCost, graph_cost

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, kw_only=True)
class ReadGraph:
    """A graph that was read. ``model`` is the graph to draw, or None. ``cost`` is the graph's cost, or None. If the
    FLOPs were counted in an ONNX export of the model, ``counted_as`` is "onnx". If the FLOPs were counted in the
    model's own file, ``counted_as`` is empty. ``known`` holds the operators and weights that were counted in the
    model's own format. In the JSON output, the values of ``known`` replace the values that were counted in an ONNX
    export. ``warnings`` lists further warnings, which aren't in ``cost``. If there is no graph, ``problem`` is the
    reason.
    """

    model: onnx.ModelProto | None = None
    cost: GraphCost | None = None
    counted_as: str = ""
    known: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns ``nodes``, ``parameters``, ``operators`` and the cost, without unknown values."""
        body: dict[str, Any] = {}
        if self.cost is not None:
            operators = Counter(node.operator for node in self.cost.nodes)
            body = {
                "nodes": len(self.cost.nodes),
                "parameters": self.cost.parameters,
                "operators": dict(operators.most_common()),
                **self.cost.to_json(),
            }
        body |= self.known
        body["warnings"] = [*self.warnings, *body.get("warnings", [])]
        return body | ({"counted_as": self.counted_as} if self.counted_as else {})


def read_graph(
    artifact: Artifact, sizes: Mapping[str, int] | None, as_onnx: Callable[[Artifact], Artifact]
) -> ReadGraph:
    """Returns the graph of ``artifact`` at ``sizes``, by default the usual sizes of the dynamic dims.

    ``as_onnx`` exports a model whose file can't be read directly. If the export fails, ``problem`` of the result is the
    reason.

    Raises ``UnsupportedHere`` for an engine, and ``InvalidModel`` if a file can't be read.
    """
    at = artifact.signature.sizes(**(sizes or {}))
    if artifact.kind == "onnx":
        model = read_without_weights(artifact.path)
        return ReadGraph(model=model, cost=graph_cost(model, artifact.signature, at))
    if artifact.kind in ("openvino", "ncnn"):
        from .ncnn_param import read_net
        from .openvino_ir import read_ir

        read = read_ir if artifact.kind == "openvino" else read_net
        foreign = read(artifact.path, artifact.signature, at)
        return ReadGraph(model=foreign.drawn(), cost=foreign.cost(artifact.signature, at))
    if artifact.kind == "engine":
        raise UnsupportedHere(f"{artifact.path} is an engine, which has kernels and no graph; give its ONNX file")
    known = _known(artifact)
    try:
        made = as_onnx(artifact)
    except AccelError as error:
        problem = one_line(error)
        return ReadGraph(known=known, warnings=(f"FLOPs aren't counted: {problem}",), problem=problem)
    model = read_without_weights(made.path)
    return ReadGraph(model=model, cost=graph_cost(model, made.signature, at), counted_as="onnx", known=known)


def _known(artifact: Artifact) -> dict[str, Any]:
    """Counts the operators and weights in the model's own format, without the ONNX export."""
    if artifact.kind == "torch":
        from accel.sources.torch.source import module_of

        weights: Counter[str] = Counter()
        module = module_of(artifact)
        for parameter in module.parameters():
            weights[str(parameter.dtype).removeprefix("torch.")] += parameter.numel() * parameter.element_size()
        parameters = sum(p.numel() for p in module.parameters())
        return {"parameters": parameters, "weight_bytes": dict(weights.most_common())}
    from accel.sources.tensorflow.process import in_tensorflow
    from accel.sources.tensorflow.source import TensorFlowSpec

    found: dict[str, Any] = in_tensorflow("accel.sources.tensorflow.model:count", spec=TensorFlowSpec.of(artifact))
    return found
