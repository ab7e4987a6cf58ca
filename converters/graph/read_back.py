"""What a file that a stage wrote says of itself: ``accel.stage`` compares that with what went in, and believes no stage
about its own work.

Each function reads one kind: ``path`` and ``known``, the signature of what the file was made of, to the signature and
the properties that the file shows. ``known`` serves for what a format has no place for, and for nothing else: no format
but ONNX (and the IR that accel writes) names its dynamic dims, exported programs and ncnn nets know their tensors by
place alone, and an ncnn net has neither dtypes nor a batch. Engines have no reader: they can't be opened without their
GPU, and what ``engine_from_onnx`` says of one comes from the network that TensorRT built it of.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel.converters.openvino_from_onnx import describe as describe_ir
from accel.signature import Dim, Signature, TensorSpec
from accel.sources.onnx_file import describe as describe_onnx

ReadBack = tuple[Signature, dict[str, Any]]
# An axis as a file has it: its size; a symbol that other axes may share; or None, open with nothing to call it by.
Size = int | str | None
# Name, dtype and sizes of a tensor; None where not even its rank is said.
Row = tuple[str, str, list[Size] | None]


def onnx(path: Path, known: Signature) -> ReadBack:  # noqa: ARG001
    """An ONNX file says all of it."""
    return describe_onnx(path)


def openvino(path: Path, known: Signature) -> ReadBack:  # noqa: ARG001
    """An IR does, too: ``openvino_from_onnx`` writes the names of the dims into it."""
    return describe_ir(path)


def torch(path: Path, known: Signature) -> ReadBack:
    """An exported program (``.pt2``): dtypes, sizes and which axes are open; tensors by place."""
    from torch.export import load

    program = load(path)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}

    def rows(places: Sequence[Any], role: str, like: Sequence[TensorSpec]) -> list[Row]:
        found: list[Row] = []
        for index, place in enumerate(places):
            value = values.get(place)
            if value is None or not hasattr(value, "dtype"):  # a number or nothing, where a tensor was to be
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
    """A SavedModel, from the signature that a runtime looks for in it: names, dtypes, sizes."""
    return _by_tensorflow("saved_model", path.absolute().parent, known)


def tflite(path: Path, known: Signature) -> ReadBack:
    """A TFLite file, the same."""
    return _by_tensorflow("tflite", path.absolute(), known)


def _by_tensorflow(form: str, path: Path, known: Signature) -> ReadBack:
    from accel.sources.tensorflow_process import in_tensorflow
    from accel.sources.tensorflow_source import TensorFlowSpec

    spec = TensorFlowSpec(form=form, path=str(path))
    inputs, outputs = in_tensorflow("accel.sources.tensorflow_model:declared", spec=spec)
    return _named(inputs, outputs, known), {}


def ncnn(path: Path, known: Signature) -> ReadBack:
    """A ``.param``: that each input and output is there (``in0``, ``out0``...), and the sizes of inputs where noted."""
    from accel.graph.ncnn_param import read_layers

    layers = read_layers(path)
    starts = {layer.outputs[0]: layer for layer in layers if layer.kind == "Input" and layer.outputs}
    ends = {name for layer in layers for name in layer.outputs}
    inputs = []
    for index, spec in enumerate(known.inputs):
        if (layer := starts.pop(f"in{index}", None)) is None:
            continue
        noted = [size for key in (2, 11, 1, 0) if (size := layer.number(key))]  # channels, depth, height, width
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
    """Rows as a signature, its open axes called what ``known`` calls them."""
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
    """``sizes`` with the dim names of ``like``. ``symbols``: what each symbol of the file was found to stand for."""
    declared: Sequence[Dim | None] = [None] * len(sizes)
    if like is not None and len(like.shape) == len(sizes):
        declared = like.shape
    dims: list[Dim] = []
    for axis, (size, wanted) in enumerate(zip(sizes, declared, strict=True)):
        own = f"{name}_{axis}"
        if isinstance(size, int):
            dims.append(wanted if isinstance(wanted, str) and _may_be(size, wanted, known, output) else size)
        elif output:
            # What is computed of open sizes may be open to the file although it always comes out the same.
            dims.append(own if wanted is None else wanted)
        elif not isinstance(wanted, str):
            dims.append(own)
        else:
            dims.append(_dim_of(size, wanted, own, symbols))
    return tuple(dims)


def _may_be(size: int, dim: str, known: Signature, output: bool) -> bool:
    """Whether a fixed ``size`` is no loss where ``dim`` was open: that dim may have this size alone, or it is of an
    output and follows no input, so that it was only unknown."""
    allowed = known.dims.get(dim)
    return output if allowed is None else allowed.min == allowed.max == size


def _dim_of(symbol: str | None, dim: str, own: str, symbols: dict[str, str]) -> str:
    """The dim that ``symbol`` stands for: ``dim``, unless it stands for another one, or ``dim`` has another symbol."""
    if symbol is None:
        return dim
    if symbol not in symbols:
        symbols[symbol] = own if dim in symbols.values() else dim
    return symbols[symbol]
