"""Reads the graph of an ncnn net. The layers are read from the ``.param`` file, and the shapes come from a run in
ncnn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel.child import run_in_child
from accel.errors import ChildCrashed, InvalidModel, one_line
from accel.signature import Signature, TensorSpec

from .cost import GATES, Shape
from .foreign import ForeignGraph, Operation

_MAGIC = "7767517"
_FREE = frozenset(
    {
        "Input", "Split", "Reshape", "Permute", "Flatten", "Concat", "Slice", "Crop", "Squeeze", "ExpandDims", "Noop",
        "MemoryData", "Padding", "Embed", "Tile", "Cast", "Packing", "Dropout", "PixelShuffle", "ShuffleChannel",
    }
)  # fmt: skip
_ELEMENT = {"Softmax": 5, "Sigmoid": 4, "TanH": 4, "GELU": 8, "LayerNorm": 8, "Swish": 5}
_ARRAY = -23300  # the key of option i is _ARRAY - i if the option's value is a list


@dataclass(frozen=True)
class Layer:
    """A layer of the net. ``options`` maps each key to a number or a list of numbers."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    options: Mapping[int, float | list[float]]

    def number(self, key: int, default: int = 0) -> int:
        found = self.options.get(key, default)
        return default if isinstance(found, list) else int(found)


def read_layers(path: Path) -> list[Layer]:
    """Returns the layers of a ``.param`` file. Raises ``InvalidModel`` if the file is no ``.param`` file."""
    problem = InvalidModel(f"{path} is no ncnn .param file; convert the model again")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise problem from error
    if not lines or lines[0].strip() != _MAGIC:
        raise problem
    layers = []
    for line in lines[2:]:
        words = line.split()
        if not words:
            continue
        try:
            count_in, count_out = int(words[2]), int(words[3])
            names, rest = words[4 : 4 + count_in + count_out], words[4 + count_in + count_out :]
            options = dict(_option(word) for word in rest)
        except (ValueError, IndexError) as error:
            raise problem from error
        layers.append(Layer(words[0], words[1], tuple(names[:count_in]), tuple(names[count_in:]), options))
    return layers


def _option(word: str) -> tuple[int, float | list[float]]:
    key, _, value = word.partition("=")
    number = int(key)
    if number <= _ARRAY:
        return _ARRAY - number, [float(n) for n in value.split(",")[1:]]
    return number, float(value) if not value.startswith('"') else 0.0


def bare_signature(path: Path) -> Signature:
    """Returns the signature of a net without a manifest. Adds a batch dim to the shapes that the net records."""
    layers = read_layers(path)
    read = {name for layer in layers for name in layer.inputs}
    inputs = [layer for layer in layers if layer.kind == "Input"]
    ends = [name for layer in layers for name in layer.outputs if name not in read]

    def shape(layer: Layer) -> tuple[int | str, ...]:
        sizes = [layer.number(key) for key in (2, 11, 1, 0)]  # the keys of channels, depth, height, width
        return ("batch", *(n for n in sizes if n)) if any(sizes) else ()

    return Signature(
        tuple(TensorSpec(layer.outputs[0], "float32", shape(layer)) for layer in inputs),
        tuple(TensorSpec(name, "float32", ()) for name in ends),
    )


def read_net(path: Path, signature: Signature, sizes: Mapping[str, int]) -> ForeignGraph:
    """Returns the layers of the net in ``path`` with their cost at ``sizes``.

    Raises ``InvalidModel`` if the file isn't a net.
    """
    layers = read_layers(path)
    warnings = []
    shapes: dict[str, Shape] = {}
    if all(spec.shape for spec in signature.inputs):
        try:
            shapes = run_in_child(
                "accel.graph.ncnn_param:shapes_of", path=path, signature=signature, sizes=dict(sizes), timeout=300
            )
        except (ChildCrashed, InvalidModel, TimeoutError) as error:
            warnings.append(f"ncnn can't run it: {one_line(error)}")
    else:
        warnings.append("the file doesn't say which shapes go in, so nothing is counted")
    batch = sizes.get(signature.batch_dim or "", 1)
    operations = tuple(
        Operation(
            kind=layer.kind,
            name=layer.name,
            inputs=layer.inputs,
            outputs=layer.outputs,
            shape=shapes.get(layer.outputs[0]) if layer.outputs else None,
            flops=_flops(layer, shapes, batch),
            parameters=parameters(layer),
            product=_is_product(layer),
            quantized=layer.number(8) > 0 and _is_product(layer),
            attributes={str(key): str(value) for key, value in layer.options.items()},
        )
        for layer in layers
        if layer.kind != "Input"
    )
    read = {name for layer in layers for name in layer.inputs}
    starts = [name for layer in layers if layer.kind == "Input" for name in layer.outputs]
    ends = [name for layer in layers for name in layer.outputs if name not in read]
    weights = path.with_suffix(".bin")
    size = weights.stat().st_size if weights.is_file() else 0
    found = sum(op.parameters for op in operations)
    return ForeignGraph(
        operations=operations,
        inputs=dict(zip(starts, signature.inputs, strict=False)),
        outputs=dict(zip(ends, signature.outputs, strict=False)),
        parameters=found,
        weight_bytes={"float32" if size >= 4 * found else "float16 or int8": size},
        warnings=tuple(warnings),
    )


def shapes_of(path: Path, signature: Signature, sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Returns the shape of each blob for one sample, from a run on example inputs. Runs in a child process."""
    from accel.runtimes.ncnn import Net

    net = Net(path, signature)
    feeds = signature.example_inputs(**sizes)
    names = [name for layer in read_layers(path) for name in layer.outputs]
    return net.shapes({name: value[0] for name, value in feeds.items()}, names)


def parameters(layer: Layer) -> int:
    """Returns the number of weights of a layer, computed from its options by the rules in ncnn's documentation."""
    kind, n = layer.kind, layer.number
    if kind.startswith(("Convolution", "Deconvolution")):
        return n(6) + (n(0) if n(5) else 0)
    if kind in GATES:
        hidden, directions = n(0), 2 if n(2) == 2 else 1
        biases = {"LSTM": 4, "GRU": 4, "RNN": 1}[kind]
        return n(1) + directions * hidden * (GATES[kind] * (n(3) or hidden) + biases)
    if kind == "MultiHeadAttention":
        return 2 * n(2) + n(0) * (n(3, n(0)) + n(4, n(0))) + 4 * n(0)
    if kind == "Gemm":
        rows, columns, inner = n(7), n(8), n(9)
        bias = {1: rows, 2: rows, 3: rows * columns, 4: columns}.get(n(10), 1 if n(10) == 0 else 0)
        return rows * inner * (n(4) > 0) + inner * columns * (n(5) > 0) + bias * (n(6) > 0)
    if kind == "MemoryData":
        return math.prod(size for size in (n(0), n(1), n(2), n(11)) if size)
    return {
        "InnerProduct": n(2) + (n(0) if n(1) else 0),
        "Embed": n(3) + (n(0) if n(2) else 0),
        "BatchNorm": 4 * n(0),
        "Scale": max(n(0), 0) * (1 + n(1)),
        "PReLU": n(0),
        "InstanceNorm": 2 * n(0) * n(2, 1),
        "LayerNorm": 2 * n(0) * n(2, 1),
        "GroupNorm": 2 * n(1) * n(3, 1),
        "RMSNorm": n(0) * n(2, 1),
    }.get(kind, 0)


def _is_product(layer: Layer) -> bool:
    kinds = ("InnerProduct", "Gemm", "MatMul", "MultiHeadAttention", "SDPA", *GATES)
    return layer.kind.startswith(("Convolution", "Deconvolution")) or layer.kind in kinds


def _flops(layer: Layer, shapes: Mapping[str, Shape], batch: int) -> int | None:
    """Returns the FLOPs for ``batch`` samples, counted as in ``accel.graph.cost``, or None if a shape isn't known."""
    kind, n = layer.kind, layer.number
    if kind in _FREE or not layer.outputs:
        return 0
    out, ins = shapes.get(layer.outputs[0]), [shapes.get(name) for name in layer.inputs]
    if out is None or any(shape is None for shape in ins):
        return None
    given = [shape for shape in ins if shape is not None]
    if kind.startswith("Convolution"):
        found = 2 * math.prod(out[1:]) * n(6)
    elif kind.startswith("Deconvolution"):
        found = 2 * math.prod(given[0][1:]) * n(6)
    elif kind == "InnerProduct":
        found = 2 * math.prod(out) // max(n(0), 1) * n(2)
    elif kind == "Gemm":
        inner = n(9) or (given[0][-2 if n(2) else -1] if not n(4) else given[0][-1 if n(3) else -2])
        found = 2 * math.prod(out) * inner
    elif kind == "MatMul":
        found = 2 * math.prod(out) * given[0][-1]
    elif kind == "MultiHeadAttention":
        found = 2 * given[0][0] * parameters(layer) + 4 * given[0][0] * given[-1][0] * n(0)
    elif kind in GATES:
        directions = 2 if n(2) == 2 else 1
        found = 2 * given[0][0] * (n(1) + directions * n(0) * GATES[kind] * (n(3) or n(0)))
    elif kind == "Pooling":
        found = math.prod(given[0]) if n(4) else math.prod(out) * n(1, 1) * n(11, n(1, 1))
    elif kind == "Reduction":
        found = math.prod(given[0])
    else:
        found = math.prod(out) * _ELEMENT.get(kind, 1)
    return batch * found
