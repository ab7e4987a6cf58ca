"""The graph of a model of any kind, and what it costs: of ONNX, of an IR and of a net as they are, of what is no graph
in a file (TensorFlow, TFLite, PyTorch) in the ONNX form that accel makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.errors import AccelError, UnsupportedHere, one_line
from accel.graph.cost import GraphCost, graph_cost
from accel.sources.onnx_file import read_proto

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, kw_only=True)
class ReadGraph:
    """``model``: what is drawn, None where there is nothing to draw. ``counted_as``: the format that FLOPs are counted
    on where it isn't the file's own. ``known``: what the format itself says of its operators and weights; it wins over
    what is counted. ``warnings``: on top of those of ``cost``."""

    model: onnx.ModelProto | None = None
    cost: GraphCost | None = None
    counted_as: str = ""
    known: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """``nodes``, ``parameters``, ``operators``, and where it could be counted what ``GraphCost.to_json`` gives."""
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
    """The graph of ``artifact`` at ``sizes`` (default: the usual ones). ``as_onnx`` makes ONNX of what isn't a graph
    in a file; where it can't, the reason is among the warnings.

    Raises ``UnsupportedHere`` for an engine, ``InvalidModel`` where a file can't be read.
    """
    at = artifact.signature.sizes(**(sizes or {}))
    if artifact.kind == "onnx":
        model = read_proto(artifact.path)
        return ReadGraph(model=model, cost=graph_cost(model, artifact.signature, at))
    if artifact.kind in ("openvino", "ncnn"):
        from accel.graph.ncnn_param import read_net
        from accel.graph.openvino_ir import read_ir

        read = read_ir if artifact.kind == "openvino" else read_net
        foreign = read(artifact.path, artifact.signature, at)
        return ReadGraph(model=foreign.drawn(), cost=foreign.cost(artifact.signature, at))
    if artifact.kind == "engine":
        raise UnsupportedHere(f"{artifact.path} is an engine, which has kernels and no graph; give the ONNX behind it")
    known = _known(artifact)
    try:
        made = as_onnx(artifact)
    except AccelError as error:
        return ReadGraph(known=known, warnings=(f"FLOPs aren't counted: {one_line(error)}",))
    model = read_proto(made.path)
    return ReadGraph(model=model, cost=graph_cost(model, made.signature, at), counted_as="onnx", known=known)


def _known(artifact: Artifact) -> dict[str, Any]:
    """Operators and weights as the format itself has them."""
    if artifact.kind == "torch":
        from accel.sources.torch_source import module_of

        weights: Counter[str] = Counter()
        module = module_of(artifact)
        for parameter in module.parameters():
            weights[str(parameter.dtype).removeprefix("torch.")] += parameter.numel() * parameter.element_size()
        parameters = sum(p.numel() for p in module.parameters())
        return {"parameters": parameters, "weight_bytes": dict(weights.most_common())}
    from accel.sources.tensorflow_process import in_tensorflow
    from accel.sources.tensorflow_source import TensorFlowSpec

    found: dict[str, Any] = in_tensorflow("accel.sources.tensorflow_model:count", spec=TensorFlowSpec.of(artifact))
    return found
