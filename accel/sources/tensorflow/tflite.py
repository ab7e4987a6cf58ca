"""Describes and runs TFLite files with TensorFlow's own interpreter. Only the child process that runs TensorFlow
imports this module."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from accel.errors import BadSource, InvalidModel, one_line

from .loaded import Frozen, Loaded, Row, plain_name

if TYPE_CHECKING:
    from .source import TensorFlowSpec


def load(spec: TensorFlowSpec) -> Loaded:
    """Loads a ``.tflite`` file. Raises ``InvalidModel`` with the reason if the interpreter refuses the file."""
    path = Path(spec.path)
    if path.read_bytes()[4:8] != b"TFL3":
        raise InvalidModel(f"the file {path} is not a TFLite file; convert the model again")
    try:
        interpreter = _interpreter(path)
    except Exception as error:
        raise InvalidModel(f"TFLite can't load the file {path} ({one_line(error)}); convert the model again") from error
    inputs, outputs = names(interpreter)
    starts, ends = interpreter.get_input_details(), interpreter.get_output_details()
    specs = _rows(inputs, starts)
    # The converter writes an output of unknown rank as a scalar.
    declared = [(name, dtype, shape or None) for name, dtype, shape in _rows(outputs, ends)]

    def call(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, index in inputs.items():
            interpreter.resize_tensor_input(index, feeds[name].shape)
        interpreter.allocate_tensors()
        for name, index in inputs.items():
            interpreter.set_tensor(index, feeds[name])
        interpreter.invoke()
        return {name: np.array(interpreter.get_tensor(index)) for name, index in outputs.items()}

    def freeze() -> Frozen:
        raise BadSource(f"{path} is a TFLite file and has no TensorFlow graph; give the model it was made from")

    return Loaded(call=call, inputs=specs, outputs=list(outputs), freeze=freeze, declared=declared)


def _rows(places: Mapping[str, int], details: Sequence[Mapping[str, Any]]) -> list[Row]:
    found = {int(d["index"]): d for d in details}
    rows: list[Row] = []
    for name, index in places.items():
        shape: list[int | None] = [int(d) if d >= 0 else None for d in found[index]["shape_signature"]]
        rows.append((name, np.dtype(found[index]["dtype"]).name, shape))
    return rows


def _interpreter(path: Path) -> Any:
    import warnings

    with warnings.catch_warnings():
        # hides the notice that the interpreter will move to another package
        warnings.simplefilter("ignore")
        # The interpreter's built-in kernels define the correct outputs of the file. XNNPACK's kernels may compute other
        # outputs.
        interpreter = tf.lite.Interpreter(
            str(path),
            num_threads=1,
            experimental_op_resolver_type=tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )
    interpreter.allocate_tensors()
    return interpreter


def names(interpreter: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Maps the user's names of inputs and outputs to tensor indices. The names come from the file's signature, or from
    the tensors if the file has no signature."""
    signatures = interpreter.get_signature_list()
    if signatures:
        runner = interpreter.get_signature_runner(
            "serving_default" if "serving_default" in signatures else next(iter(signatures))
        )
        inputs = {name: int(d["index"]) for name, d in runner.get_input_details().items()}
        outputs = {name: int(d["index"]) for name, d in runner.get_output_details().items()}
        return inputs, outputs
    return (
        {_plain(d["name"]): int(d["index"]) for d in interpreter.get_input_details()},
        {_plain(d["name"]): int(d["index"]) for d in interpreter.get_output_details()},
    )


def is_quantized(path: Path) -> bool:
    """Tells whether weights or activations of the file are quantized to 8 bits."""
    details = _interpreter(path).get_tensor_details()
    return any(d["quantization_parameters"]["scales"].size and d["dtype"] in (np.int8, np.uint8) for d in details)


def operators(path: Path) -> set[str]:
    """Returns the TFLite names of the operators in the file."""
    return {str(op["op_name"]) for op in _interpreter(path)._get_ops_details()}


def count_file(path: Path) -> dict[str, Any]:
    """Counts nodes, operators, parameters and bytes of a ``.tflite`` file for ``model.count``. A weight is a float or
    quantized tensor with stored values."""
    from tensorflow.lite.python import schema_py_generated as schema

    kinds = {value: name.lower() for name, value in vars(schema.TensorType).items() if not name.startswith("_")}
    model = schema.Model.GetRootAs(path.read_bytes(), 0)
    parameters, weights = 0, Counter[str]()
    for graph in (model.Subgraphs(i) for i in range(model.SubgraphsLength())):
        for tensor in (graph.Tensors(i) for i in range(graph.TensorsLength())):
            kind, size = kinds[tensor.Type()], model.Buffers(tensor.Buffer()).DataLength()
            number = math.prod(tensor.Shape(axis) for axis in range(tensor.ShapeLength()))
            # A quantized file has int32 tensors for axes, sizes and biases, but only the biases have a scale.
            scaled = tensor.Quantization() is not None and tensor.Quantization().ScaleLength() > 0
            if size and number > 1 and (kind.startswith("float") or scaled):
                parameters += number
                weights[kind] += size
    operators = Counter(str(op["op_name"]) for op in _interpreter(path)._get_ops_details())
    return {
        "nodes": sum(operators.values()),
        "parameters": parameters,
        "operators": dict(operators.most_common()),
        "weight_bytes": dict(weights.most_common()),
    }


def tensor_names(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Maps the user's names of inputs and outputs to the file's own tensor names."""
    interpreter = _interpreter(path)
    inputs, outputs = names(interpreter)
    at = {int(d["index"]): str(d["name"]) for d in interpreter.get_tensor_details()}
    return {n: at[i] for n, i in inputs.items()}, {n: at[i] for n, i in outputs.items()}


def _plain(name: str) -> str:
    """Returns the user's name of a tensor, such as ``x`` for ``serving_default_x:0``."""
    return plain_name(name.removeprefix("serving_default_"))
