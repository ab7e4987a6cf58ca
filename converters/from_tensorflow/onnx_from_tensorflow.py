"""Freezes a TensorFlow model and converts it to ONNX with tf2onnx, in the TensorFlow process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.progress import report
from accel.sources.tensorflow.source import TensorFlowSpec

from .conversion import Converted, Tf2OnnxConfig, convert
from .layout import converted


@dataclass(frozen=True, kw_only=True)
class OnnxFromTensorFlowConfig(Tf2OnnxConfig):
    """The options are ``opset`` and ``layout``, as in every conversion by tf2onnx."""


def onnx_from_tensorflow(src: Artifact, config: OnnxFromTensorFlowConfig, out: Path) -> Artifact:
    """Converts ``src`` (kind ``tensorflow``) to ``out``. Inputs and outputs get the names in the signature of ``src``.

    Raises ``OpNotConverted`` with the operators that have no ONNX translation, and ``ExportFailed`` for other failures.
    """
    return convert(src, config, out, "accel.converters.from_tensorflow.onnx_from_tensorflow:from_graph")


def from_graph(spec: TensorFlowSpec, opset: int, layout: str) -> Converted:
    """Freezes the model, folds its constants, and converts the result with tf2onnx. Runs in the TensorFlow process."""
    import tensorflow as tf
    from tf2onnx import tf_loader

    from accel.sources.tensorflow.model import load

    report("freezing the graph")
    frozen = load(spec).freeze()
    taken, given = list(frozen.inputs.values()), list(frozen.outputs.values())
    graph = _without_xla(_as_erf(tf_loader.fix_freezing_errors_part2(frozen.graph)), [*taken, *given])
    report("folding constants")
    with tf.Graph().as_default() as whole, tf.compat.v1.Session(graph=whole):
        tf.import_graph_def(graph, name="")
        graph = tf_loader.tf_optimize(taken, given, graph)
    with tf.device("/cpu:0"):
        model, turned = converted(layout, graph, opset=opset, input_names=taken, output_names=given)
    return model, turned, frozen.inputs, frozen.outputs


def _as_erf(graph: Any) -> Any:
    """Returns ``graph`` with 1 - erf(x) in place of erfc(x), because ONNX has no erfc. Keras's exact gelu uses erfc."""
    import tensorflow as tf

    made = tf.compat.v1.GraphDef()
    made.CopyFrom(graph)
    for node in [node for node in made.node if node.op == "Erfc"]:
        kind = node.attr["T"].type
        erf = made.node.add(op="Erf", name=f"{node.name}/erf", input=list(node.input), device=node.device)
        erf.attr["T"].type = kind
        one = made.node.add(op="Const", name=f"{node.name}/one", device=node.device)
        one.attr["dtype"].type = kind
        one.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(1.0, dtype=kind, shape=[]))
        node.op = "Sub"
        node.input[:] = [one.name, erf.name]
    return made


def _without_xla(graph: Any, ends: list[str]) -> Any:
    """Returns ``graph`` after inlining the functions that are marked for XLA. ``ends`` are the graph's inputs and
    outputs.

    Keras marks each grouped convolution for XLA, for example in ConvNeXt and ResNeXt.
    """
    import tensorflow as tf
    from tensorflow.python.grappler import tf_optimizer

    functions = graph.library.function
    parts = (*graph.node, *functions, *(node for function in functions for node in function.node_def))
    compiled = [part for part in parts if "_XlaMustCompile" in part.attr]
    if not compiled:
        return graph
    for part in compiled:
        del part.attr["_XlaMustCompile"]
    with tf.Graph().as_default():
        tf.import_graph_def(graph, name="")
        whole = tf.compat.v1.train.export_meta_graph(graph_def=graph)
    whole.collection_def["train_op"].node_list.value.extend(ends)
    config = tf.compat.v1.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.min_graph_nodes = -1
    rewrite.optimizers.append("function")
    rewrite.function_optimization = type(rewrite).AGGRESSIVE
    return tf_optimizer.OptimizeGraph(config, whole)
