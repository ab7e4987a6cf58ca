"""Reads the signature and properties of the files that stages write.

A stage doesn't check its own output. Instead, ``accel.stage`` compares the signature of the written file with the
signature of the stage's input. Each function reads one kind of file. ``path`` is the file, and ``known`` is the
signature of the source model. ``known`` supplies only the information that the file's format can't store. The names of
dynamic dims are stored only in ONNX files, and in OpenVINO IRs from accel. A torch.export program identifies its inputs
and outputs by position, and so does an ncnn net. An ncnn net stores neither dtypes nor a batch dim.

This module has no reader for TensorRT engines, because an engine can only be opened on a machine with the right GPU.
``engine_from_onnx`` takes an engine's signature from its TensorRT network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel.signature import Dim, Signature, TensorSpec
from accel.sources.onnx.file import describe as describe_onnx

from .read_ir import describe as describe_ir

ReadBack = tuple[Signature, dict[str, Any]]
# The size of an axis in a file: an int for a fixed size, a str for a symbol, None for a dynamic axis without a symbol.
Size = int | str | None
# The name, dtype and sizes of a tensor. The sizes are None if the rank is unknown.
Row = tuple[str, str, list[Size] | None]


def onnx(path: Path, known: Signature) -> ReadBack:  # noqa: ARG001
    """Reads an ONNX file. ``known`` is not needed."""
    return describe_onnx(path)


def openvino(path: Path, known: Signature) -> ReadBack:  # noqa: ARG001
    """Reads an OpenVINO IR, in which ``openvino_from_onnx`` has stored the names of the dims."""
    return describe_ir(path)


def torch(path: Path, known: Signature) -> ReadBack:
    """Reads dtypes, sizes and dynamic axes of a program of torch.export (``.pt2``).

    Tensors are identified by position.
    """
    from torch.export import load

    program = load(path)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}

    def rows(places: Sequence[Any], role: str, like: Sequence[TensorSpec]) -> list[Row]:
        found: list[Row] = []
        for index, place in enumerate(places):
            value = values.get(place)
            if value is None or not hasattr(value, "dtype"):  # the value is a number or None, not a tensor
                continue
            name = like[index].name if index < len(like) else f"{role}_{index}"
            sizes: list[Size] = [size if isinstance(size, int) else str(size.node.expr) for size in value.shape]
            found.append((name, str(value.dtype).removeprefix("torch."), sizes))
        return found

    signature = program.graph_signature
    return _named(
        rows(signature.user_inputs, "input", known.inputs), rows(signature.user_outputs, "output", known.outputs), known
    ), {}


def tensorflow(path: Path, known: Signature) -> ReadBack:
    """Reads the serving signature of a SavedModel: names, dtypes, sizes."""
    return _by_tensorflow("saved_model", path.absolute().parent, known)


def tflite(path: Path, known: Signature) -> ReadBack:
    """Reads the signature of a TFLite file: names, dtypes, sizes."""
    return _by_tensorflow("tflite", path.absolute(), known)


def _by_tensorflow(form: str, path: Path, known: Signature) -> ReadBack:
    from accel.sources.tensorflow.process import in_tensorflow
    from accel.sources.tensorflow.source import TensorFlowSpec

    spec = TensorFlowSpec(form=form, path=str(path))
    inputs, outputs = in_tensorflow("accel.sources.tensorflow.model:declared", spec=spec)
    return _named(inputs, outputs, known), {}


def ncnn(path: Path, known: Signature) -> ReadBack:
    """Reads the inputs and outputs (``in0``, ``out0``...) of a ``.param`` file, and the sizes of inputs if stated."""
    from accel.graph.ncnn_param import read_layers

    layers = read_layers(path)
    starts = {layer.outputs[0]: layer for layer in layers if layer.kind == "Input" and layer.outputs}
    ends = {name for layer in layers for name in layer.outputs}
    inputs = []
    for index, spec in enumerate(known.inputs):
        if (layer := starts.pop(f"in{index}", None)) is None:
            continue
        # ncnn stores the channels, depth, height and width of an Input layer under these keys.
        noted = [size for key in (2, 11, 1, 0) if (size := layer.number(key))]
        dims = spec.shape
        if noted:
            dims = _shape(spec.name, [None, *noted], spec, known, {})
        inputs.append(TensorSpec(spec.name, spec.dtype, dims))
    inputs += [TensorSpec(name, "float32", ()) for name in starts]
    given = [spec for index, spec in enumerate(known.outputs) if f"out{index}" in ends]
    wanted = {f"out{index}" for index in range(len(known.outputs))}
    more = sorted(name for name in ends - wanted if re.fullmatch(r"out\d+", name))
    return Signature(tuple(inputs), (*given, *(TensorSpec(name, "float32", ()) for name in more))), {}


def _named(
    inputs: Sequence[Row],
    outputs: Sequence[Row],
    known: Signature,
) -> Signature:
    """Makes a signature from the names, dtypes and sizes of the inputs and outputs. Dynamic axes get their names from
    ``known``."""
    symbols: dict[str, str] = {}

    def specs(rows: Sequence[Row], role: str) -> tuple[TensorSpec, ...]:
        said = {spec.name: spec for spec in (known.inputs if role == "input" else known.outputs)}
        found = []
        for name, dtype, sizes in rows:
            like = said.get(name)
            if sizes is None:
                dims = like.shape if like is not None else ()
            else:
                dims = _shape(name, sizes, like, known, symbols, output=role == "output")
            found.append(TensorSpec(name, dtype, dims))
        return tuple(found)

    return Signature(specs(inputs, "input"), specs(outputs, "output"))


def _shape(
    name: str,
    sizes: Sequence[Size],
    like: TensorSpec | None,
    known: Signature,
    symbols: dict[str, str],
    *,
    output: bool = False,
) -> tuple[Dim, ...]:
    """Returns a shape with the sizes from the file (``sizes``) and the names of dims from ``like``. ``symbols`` maps
    each symbol in the file to a dim's name."""
    declared: Sequence[Dim | None] = [None] * len(sizes)
    if like is not None and len(like.shape) == len(sizes):
        declared = like.shape
    dims: list[Dim] = []
    for axis, (size, wanted) in enumerate(zip(sizes, declared, strict=True)):
        own = f"{name}_{axis}"
        if isinstance(size, int):
            dims.append(wanted if isinstance(wanted, str) and _may_be(size, wanted, known, output) else size)
        elif output:
            # The file may declare an output size as dynamic although the size never changes, because the model computes
            # this size from dynamic sizes.
            dims.append(own if wanted is None else wanted)
        elif not isinstance(wanted, str):
            dims.append(own)
        else:
            dims.append(_dim_of(size, wanted, own, symbols))
    return tuple(dims)


def _may_be(size: int, dim: str, known: Signature, output: bool) -> bool:
    """Tells whether the file may have a fixed ``size`` although the source model has a dynamic dim called ``dim``. A
    fixed size is allowed if the dim's range has only this size, or if the dim occurs in an output but in no input."""
    allowed = known.dims.get(dim)
    return output if allowed is None else allowed.min == allowed.max == size


def _dim_of(symbol: str | None, dim: str, own: str, symbols: dict[str, str]) -> str:
    """Returns the name of the dim that ``symbol`` stands for, which is usually ``dim``.

    If ``symbols`` already maps ``symbol`` to a dim, returns this dim. If another symbol already stands for ``dim``,
    returns ``own``.
    """
    if symbol is None:
        return dim
    if symbol not in symbols:
        symbols[symbol] = own if dim in symbols.values() else dim
    return symbols[symbol]
