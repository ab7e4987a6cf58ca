"""What a user has, into the graph: bytes of an image in, a class out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.converters.onnx_names import rename_in_nodes
from accel.converters.onnx_write import onnx_artifact
from accel.errors import BadInputSpec, StageFailed
from accel.signature import DimRange, Signature, TensorSpec, merged_ranges
from accel.sources.onnx_file import opset_of, read_proto
from accel.stage import StageConfig

if TYPE_CHECKING:
    import numpy as np
    import onnx

_CHANNELS = (1, 3, 4)
_POSTPROCESS = ("softmax", "argmax", "topk")


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(StageConfig):
    """``mean``, ``std``: one number or one a channel, of pixels in 0..1 (bytes are divided by 255 first). ``layout``,
    ``dtype``: of what comes in. ``resize``: the (height, width) the model takes; any size comes in, and is scaled
    bilinearly between pixel centres, as OpenCV does. ``postprocess``: ``softmax``, ``argmax`` or ``topk:K`` of the one
    output. ``dims``: ranges of the ``height`` and ``width`` that come in to be resized."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    layout: str = ""
    dtype: str = ""
    resize: tuple[int, int] | None = None
    postprocess: str = ""
    dims: Mapping[str, DimRange] = field(default_factory=dict)

    @property
    def on_the_input(self) -> bool:
        return bool(self.mean or self.std or self.layout or self.dtype or self.resize)


class NotPreprocessed(StageFailed):
    """The model's input or output is not what this can go before or after."""


def preprocess(src: Artifact, config: PreprocessConfig, out: Path) -> Artifact:
    """Put ``config`` before and after ``src``. The input keeps its name; so does the output, but ``topk`` gives
    ``<output>_values`` and ``<output>_indices``.

    ``NotPreprocessed`` where the model doesn't take one image or doesn't give one row of scores.
    """
    model = read_proto(src.path, weights=True)
    if config.on_the_input:
        _before(model, src.signature, config)
    if config.postprocess:
        _after(model, src.signature, config.postprocess)
    del model.graph.value_info[:]
    made = onnx_artifact(src, model, out, {"input": str(src.signature.inputs[0])})
    known = made.signature.dynamic_dims
    if unknown := set(config.dims) - set(known):
        raise BadInputSpec(f"no input has a dim called {min(unknown)!r}; the dims are {', '.join(known) or 'none'}")
    ranges = merged_ranges(_incoming(src.signature.dims, config), config.dims)
    ranges = {d: r for d, r in ranges.items() if d in known}
    values = {"uint8": (0, 255)}
    inputs = tuple(TensorSpec(s.name, s.dtype, s.shape, values.get(s.dtype)) for s in made.signature.inputs)
    signature = Signature(inputs, made.signature.outputs, ranges)
    return Artifact(
        path=made.path,
        kind="onnx",
        signature=signature,
        properties=made.properties,
        notes=made.notes,
        companions=made.companions,
    )


def _incoming(dims: Mapping[str, DimRange], config: PreprocessConfig) -> dict[str, DimRange]:
    """``dims`` of the model as they are before it: images that are resized come in any size."""
    if config.resize is None:
        return dict(dims)
    return {d: replace(r, step=1) if d in ("height", "width") else r for d, r in dims.items()}


def image_input(signature: Signature) -> tuple[TensorSpec, int]:
    """The one image that a model takes, and the axis its channels are on (1 or 3)."""
    images = [spec for spec in signature.inputs if len(spec.shape) == 4 and spec.dtype in ("float32", "float16")]
    if len(images) != 1:
        given = ", ".join(map(str, signature.inputs))
        raise NotPreprocessed(f"preprocessing needs one float image (four dims) as input, the model takes {given}")
    axes = [axis for axis in (1, 3) if images[0].shape[axis] in _CHANNELS]
    if len(axes) != 1:
        raise NotPreprocessed(
            f"can't tell which dim of {images[0]} is the channels; it has to be 1, 3 or 4 on one of them"
        )
    return images[0], axes[0]


def _before(model: onnx.ModelProto, signature: Signature, config: PreprocessConfig) -> None:
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    spec, axis = image_input(signature)
    channels = int(spec.shape[axis])
    own = "NCHW" if axis == 1 else "NHWC"
    layout, dtype = config.layout or own, config.dtype or spec.dtype
    if layout not in ("NCHW", "NHWC"):
        raise BadInputSpec(f"unknown layout {layout!r}; --layout takes NCHW or NHWC")
    if dtype not in ("uint8", "float32", "float16"):
        raise BadInputSpec(f"images come as uint8, float32 or float16, not {dtype!r}; correct --dtype")
    scale, shift = _affine(config, channels, dtype)
    height, width = (spec.shape[2], spec.shape[3]) if axis == 1 else (spec.shape[1], spec.shape[2])
    if config.resize is not None:
        for has, wanted in zip((height, width), config.resize, strict=True):
            if isinstance(has, int) and has != wanted:
                raise BadInputSpec(
                    f"the model takes {height}x{width} pixels, not {config.resize[0]}x{config.resize[1]}"
                )
            if isinstance(has, str):
                signature.known({has: wanted})
        height, width = "height", "width"
    inner = f"{spec.name}_prepared"
    graph = model.graph
    while any(inner in (*node.input, *node.output) for node in graph.node):
        inner += "_"
    rename_in_nodes(graph.node, {spec.name: inner})
    shape = [spec.shape[0], channels, height, width] if layout == "NCHW" else [spec.shape[0], height, width, channels]
    nodes: list[onnx.NodeProto] = []
    value = spec.name

    def step(kind: str, *others: str, **attributes: Any) -> None:
        nonlocal value
        result = f"{spec.name}_{kind.lower()}_{len(nodes)}"
        nodes.append(helper.make_node(kind, [value, *others], [result], name=result, **attributes))
        value = result

    def constant(name: str, array: np.ndarray) -> str:
        full = f"{spec.name}_{name}"
        graph.initializer.append(numpy_helper.from_array(array, full))
        return full

    if dtype != "float32":
        step("Cast", to=onnx.TensorProto.FLOAT)
    if layout == "NHWC" and (own == "NCHW" or config.resize is not None):
        step("Transpose", perm=[0, 3, 1, 2])
        layout = "NCHW"
    if config.resize is not None:  # ONNX Runtime scales images with channels first
        sizes = constant("resize", np.array(config.resize, dtype=np.int64))
        if opset_of(model) < 18:
            raise NotPreprocessed(f"--resize needs opset 18, the model has {opset_of(model)}; pass --opset 18")
        step("Resize", "", "", sizes, mode="linear", coordinate_transformation_mode="half_pixel", axes=[2, 3])
    around = (channels, 1, 1) if layout == "NCHW" else (channels,)
    if np.any(scale != 1):
        step("Mul", constant("scale", scale.reshape(around)))
    if np.any(shift != 0):
        step("Add", constant("shift", shift.reshape(around)))
    back = [0, 2, 3, 1] if own == "NHWC" else [0, 3, 1, 2]
    if layout != own and not _spared(graph, inner, back):
        step("Transpose", perm=back)
    if spec.dtype == "float16":
        step("Cast", to=onnx.TensorProto.FLOAT16)
    if not nodes:
        step("Identity")
    nodes[-1].output[0] = inner
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
    for index, declared in enumerate(graph.input):
        if declared.name == spec.name:
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            graph.input[index].CopyFrom(helper.make_tensor_value_info(spec.name, kind, shape))


def _spared(graph: onnx.GraphProto, name: str, perm: list[int]) -> bool:
    """Whether everything that reads the value ``name`` turns it back from ``perm`` at once, as nets from TensorFlow do:
    then neither is needed, and what they made is called ``name``."""
    readers = [node for node in graph.node if name in node.input]
    ends = {value.name for value in graph.output}
    for node in readers:
        turn = [list(a.ints) for a in node.attribute if a.name == "perm"]
        if node.op_type != "Transpose" or turn != [[perm.index(axis) for axis in range(4)]] or node.output[0] in ends:
            return False
    if not readers or any(a.HasField("g") for node in graph.node for a in node.attribute):  # a branch may read it
        return False
    gone = {node.output[0]: name for node in readers}
    for node in readers:
        graph.node.remove(node)
    rename_in_nodes(graph.node, gone)
    return True


def _affine(config: PreprocessConfig, channels: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """``(x / top - mean) / std`` as ``x * scale + shift``, float32, one of each a channel."""
    import numpy as np

    for name, numbers in (("mean", config.mean), ("std", config.std)):
        if len(numbers) not in (0, 1, channels):
            raise BadInputSpec(f"{len(numbers)} numbers of {name} don't fit {channels} channels; give 1 or {channels}")
        if not np.isfinite(numbers).all() or (name == "std" and not all(numbers)):
            raise BadInputSpec(f"{name} {numbers} can't be used; give finite numbers, and no std of 0")
    top = 255.0 if dtype == "uint8" else 1.0
    mean, std = np.array(config.mean or [0.0]), np.array(config.std or [1.0])
    scale = np.broadcast_to(1 / (top * std), (channels,))
    shift = np.broadcast_to(-mean / std, (channels,))
    return scale.astype(np.float32), shift.astype(np.float32)


def _after(model: onnx.ModelProto, signature: Signature, what: str) -> None:
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    kind, count = parse_postprocess(what)
    if len(signature.outputs) != 1 or not signature.outputs[0].dtype.startswith("float"):
        given = ", ".join(map(str, signature.outputs))
        raise NotPreprocessed(f"--postprocess needs one output of scores, the model gives {given}")
    spec = signature.outputs[0]
    classes = spec.shape[-1] if spec.shape else 1
    if isinstance(classes, int) and count > classes:
        raise BadInputSpec(f"topk:{count} of {classes} classes can't be; give at most {classes}")
    graph = model.graph
    inner = f"{spec.name}_scores"
    while any(inner in (*node.input, *node.output) for node in graph.node):
        inner += "_"
    rename_in_nodes(graph.node, {spec.name: inner})
    del graph.output[:]
    float_kind = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
    if kind == "softmax":
        graph.node.append(helper.make_node("Softmax", [inner], [spec.name], axis=-1))
        graph.output.append(helper.make_tensor_value_info(spec.name, float_kind, list(spec.shape)))
    elif kind == "argmax":
        graph.node.append(helper.make_node("ArgMax", [inner], [spec.name], axis=-1, keepdims=0))
        graph.output.append(helper.make_tensor_value_info(spec.name, TensorProto.INT64, list(spec.shape[:-1])))
    else:
        graph.initializer.append(numpy_helper.from_array(np.array([count], np.int64), f"{spec.name}_k"))
        ends = [f"{spec.name}_values", f"{spec.name}_indices"]
        graph.node.append(helper.make_node("TopK", [inner, f"{spec.name}_k"], ends, axis=-1))
        for name, element in zip(ends, (float_kind, TensorProto.INT64), strict=True):
            graph.output.append(helper.make_tensor_value_info(name, element, [*spec.shape[:-1], count]))


def parse_postprocess(text: str) -> tuple[str, int]:
    """``topk:5`` as its kind and number (0 for the others). ``BadInputSpec`` for anything unknown."""
    kind, colon, number = text.partition(":")
    if (
        kind not in _POSTPROCESS
        or (kind == "topk") != bool(colon)
        or (colon and (not number.isdigit() or number == "0"))
    ):
        raise BadInputSpec(f"unknown --postprocess {text!r}; it takes softmax, argmax or topk:K, e.g. topk:5")
    return kind, int(number or 0)
