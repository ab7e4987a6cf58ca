"""Chooses the layout of images in models from TensorFlow, and counts the transposes that a layout needs.

TensorFlow's images have their channels last, and ONNX's convolutions take channels first. If each operator is
translated separately, every convolution has a Transpose before it and after it. The tool tf2onnx can move Transposes
through the graph until they cancel. Inputs and outputs keep their layout, so in the best case Transposes remain only at
the ends of the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

LAYOUTS = ("auto", "channels_first", "channels_last")


def converted(layout: str, graph: Any, **arguments: Any) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Converts ``graph``, or ``tflite_path`` if ``graph`` is None. Returns the model and notes on its layout.

    In the notes, ``before`` counts the transposes of activations before tf2onnx moves them. ``left`` counts the
    transposes in the result. ``inside`` counts the transposes in the result that aren't directly at an input or output
    of the model.

    ``auto`` tries channels first. If the model has convolutions and transposes remain inside its graph, ``auto`` also
    tries channels last. ``auto`` then takes the layout with fewer transposes. ``tried`` has the counts of both layouts.
    Runs in the TensorFlow process.
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

    from .missing_operators import translations

    counted: list[int] = []

    class Count:
        """Counts the transposes and changes nothing. This class is the first optimizer that tf2onnx runs."""

        graph_been_opt = False

        def optimize(self, graph: Any, iteration: int) -> Any:
            if iteration == 0:
                turned = [node for node in graph.get_nodes() if node.type == "Transpose"]
                counted.append(sum(not node.inputs[0].is_const() for node in turned))
            return graph

    passes: dict[str, Any] = {"count": Count, **optimizer._get_optimizers()}
    if layout == "channels_last":
        del passes["optimize_transpose"]
    arguments = {**arguments, "optimizers": passes, "custom_op_handlers": translations()}
    model, _ = convert._convert_common(graph, name="model", continue_on_error=True, **arguments)
    left, inside = transposes(model)
    return model, {"layout": layout, "before": counted[0], "left": left, "inside": inside}


def transposes(model: onnx.ModelProto) -> tuple[int, int]:
    """Counts all Transposes of activations, and the Transposes that are not next to an input or output of the model."""
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    turned = [n for n in model.graph.node if n.op_type == "Transpose" and n.input[0] not in constants]
    return len(turned), sum(not ends & {*node.input, *node.output} for node in turned)
