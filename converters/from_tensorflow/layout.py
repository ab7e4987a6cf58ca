"""TensorFlow's images have their channels last, ONNX's convolutions want them first: what that costs in transposes.

Written operator by operator, each convolution stands between two Transposes. tf2onnx can sink them through the graph
until they cancel. What comes in and goes out keeps its layout, so that at most the ends are turned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

LAYOUTS = ("auto", "channels_first", "channels_last")


def converted(layout: str, graph: Any, **arguments: Any) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """What tf2onnx makes of ``graph`` (None: of the ``tflite_path`` among ``arguments``), and how it is laid out:
    ``layout``, the transposes of activations ``before`` any was sunk or cancelled, those that are ``left``, and how
    many of these are ``inside``, neither at an input nor at an output.

    ``auto`` is channels first. Where that leaves some inside a net with convolutions, both are tried, and the one with
    fewer left is taken; ``tried`` has the number of each. In the TensorFlow process.
    """
    chosen = "channels_last" if layout == "channels_last" else "channels_first"
    model, found = _tf2onnx(chosen, graph, arguments)
    convolves = any(node.op_type.startswith(("Conv", "QLinearConv")) for node in model.graph.node)
    if layout != "auto" or not found["inside"] or not convolves:
        return model, found
    other, instead = _tf2onnx("channels_last", graph, arguments)
    tried = {row["layout"]: row["left"] for row in (found, instead)}
    if instead["left"] < found["left"]:
        model, found = other, instead
    return model, {**found, "tried": tried}


def _tf2onnx(layout: str, graph: Any, arguments: dict[str, Any]) -> tuple[onnx.ModelProto, dict[str, Any]]:
    from tf2onnx import convert, optimizer

    counted: list[int] = []

    class Count:
        """Stands among tf2onnx's optimizers, the first of them, and changes nothing."""

        graph_been_opt = False

        def optimize(self, graph: Any, iteration: int) -> Any:
            if iteration == 0:
                turned = [node for node in graph.get_nodes() if node.type == "Transpose"]
                counted.append(sum(not node.inputs[0].is_const() for node in turned))
            return graph

    passes: dict[str, Any] = {"count": Count, **optimizer._get_optimizers()}
    if layout == "channels_last":
        del passes["optimize_transpose"]
    model, _ = convert._convert_common(graph, name="model", continue_on_error=True, optimizers=passes, **arguments)
    left, inside = transposes(model)
    return model, {"layout": layout, "before": counted[0], "left": left, "inside": inside}


def transposes(model: onnx.ModelProto) -> tuple[int, int]:
    """How many Transposes turn what is computed (not weights), and how many of them neither read an input of the model
    nor make an output."""
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    turned = [n for n in model.graph.node if n.op_type == "Transpose" and n.input[0] not in constants]
    return len(turned), sum(not ends & {*node.input, *node.output} for node in turned)
