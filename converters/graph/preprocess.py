"""Adds preprocessing and postprocessing to an ONNX model, so that the model takes image bytes and returns classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.errors import BadInputSpec, StageFailed
from accel.signature import Dim, DimRange, Signature, TensorSpec, merged_ranges
from accel.sources.onnx.file import opset_of, read_proto
from accel.spelling import option
from accel.stage import StageConfig

from .names import rename_in_nodes
from .write import onnx_artifact

if TYPE_CHECKING:
    import numpy as np
    import onnx

_CHANNELS = (1, 3, 4)
_POSTPROCESS = ("softmax", "argmax", "topk")


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(StageConfig):
    """The preprocessing and postprocessing of a model.

    ``mean`` and ``std`` have one number for all channels or one number for each channel. ``mean`` and ``std`` apply to
    pixels from 0 to 1, so uint8 pixels are divided by 255 first. ``layout`` and ``dtype`` describe the incoming images.
    ``resize`` is the height and width that the model takes. If ``resize`` is set, images of any size are resized
    bilinearly with half-pixel centers, as in OpenCV. ``postprocess`` applies ``softmax``, ``argmax`` or ``topk:K`` to
    the only output. ``dims`` maps dims of the incoming images, such as ``height`` and ``width``, to ranges.
    """

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
    """The model's inputs or outputs don't allow the preprocessing or postprocessing."""


def preprocess(src: Artifact, config: PreprocessConfig, out: Path) -> Artifact:
    """Adds the preprocessing and postprocessing of ``config`` to ``src``, and writes the result to ``out``.

    The input and the output keep their names. With ``topk``, the outputs are ``<output>_values`` and
    ``<output>_indices``. Raises ``NotPreprocessed`` if the model takes no image or several images, or if the model's
    only output isn't a float tensor of scores.
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
    """Adapts the ranges in ``dims`` to the new input. If the model resizes its images, an incoming image may have any
    height and width, so the ranges of both dims get the step 1."""
    if config.resize is None:
        return dict(dims)
    return {d: replace(r, step=1) if d in ("height", "width") else r for d, r in dims.items()}


def image_input(signature: Signature) -> tuple[TensorSpec, int]:
    """Returns the only image input of a model, and the axis of its channels (1 or 3).

    Raises ``NotPreprocessed`` if the model takes no image or several images, or if the channel axis is ambiguous.
    """
    images = [spec for spec in signature.inputs if len(spec.shape) == 4 and spec.dtype in ("float32", "float16")]
    if len(images) != 1:
        given = ", ".join(map(str, signature.inputs))
        raise NotPreprocessed(f"preprocessing needs one float image (four dims) as input, but the model takes {given}")
    axes = [axis for axis in (1, 3) if images[0].shape[axis] in _CHANNELS]
    if len(axes) != 1:
        raise NotPreprocessed(
            f"can't tell which dim of the input {images[0]} holds the channels; exactly one of dims 1 and 3 must have "
            "size 1, 3 or 4"
        )
    return images[0], axes[0]


class _Steps:
    """Collects the preprocessing nodes that are inserted after the input ``name``, in order."""

    def __init__(self, graph: onnx.GraphProto, name: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._graph, self._name, self._last = graph, name, name

    def add(self, kind: str, *others: str, **attributes: Any) -> None:
        """Appends a node that reads the output of the previous node."""
        from onnx import helper

        result = f"{self._name}_{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, [self._last, *others], [result], name=result, **attributes))
        self._last = result

    def constant(self, name: str, array: np.ndarray) -> str:
        """Adds an initializer to the graph, and returns its full name."""
        from onnx import numpy_helper

        full = f"{self._name}_{name}"
        self._graph.initializer.append(numpy_helper.from_array(array, full))
        return full


def _before(model: onnx.ModelProto, signature: Signature, config: PreprocessConfig) -> None:
    import numpy as np
    import onnx
    from onnx import helper

    spec, axis = image_input(signature)
    channels = int(spec.shape[axis])
    own = "NCHW" if axis == 1 else "NHWC"
    layout, dtype = config.layout or own, config.dtype or spec.dtype
    if layout not in ("NCHW", "NHWC"):
        raise BadInputSpec(f"unknown layout {layout!r}; use NCHW or NHWC")
    if dtype not in ("uint8", "float32", "float16"):
        raise BadInputSpec(f"images can't have the dtype {dtype!r}; use uint8, float32 or float16")
    scale, shift = _affine(config, channels, dtype)
    height, width = _incoming_size(spec, axis, signature, config)
    shape = [spec.shape[0], channels, height, width] if layout == "NCHW" else [spec.shape[0], height, width, channels]
    graph = model.graph
    inner = f"{spec.name}_prepared"
    while any(inner in (*node.input, *node.output) for node in graph.node):
        inner += "_"
    rename_in_nodes(graph.node, {spec.name: inner})
    steps = _Steps(graph, spec.name)
    if dtype != "float32":
        steps.add("Cast", to=onnx.TensorProto.FLOAT)
    if layout == "NHWC" and (own == "NCHW" or config.resize is not None):
        steps.add("Transpose", perm=[0, 3, 1, 2])
        layout = "NCHW"
    if config.resize is not None:  # ONNX Runtime's Resize needs the layout NCHW
        sizes = steps.constant("resize", np.array(config.resize, dtype=np.int64))
        if opset_of(model) < 18:
            raise NotPreprocessed(
                f"a resize needs opset 18, but the model has opset {opset_of(model)}; pass {option('opset', 18)}"
            )
        steps.add("Resize", "", "", sizes, mode="linear", coordinate_transformation_mode="half_pixel", axes=[2, 3])
    around = (channels, 1, 1) if layout == "NCHW" else (channels,)
    if np.any(scale != 1):
        steps.add("Mul", steps.constant("scale", scale.reshape(around)))
    if np.any(shift != 0):
        steps.add("Add", steps.constant("shift", shift.reshape(around)))
    back = [0, 2, 3, 1] if own == "NHWC" else [0, 3, 1, 2]
    if layout != own and not _spared(graph, inner, back):
        steps.add("Transpose", perm=back)
    if spec.dtype == "float16":
        steps.add("Cast", to=onnx.TensorProto.FLOAT16)
    if not steps.nodes:
        steps.add("Identity")
    steps.nodes[-1].output[0] = inner
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*steps.nodes, *rest])
    for index, declared in enumerate(graph.input):
        if declared.name == spec.name:
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            graph.input[index].CopyFrom(helper.make_tensor_value_info(spec.name, kind, shape))


def _incoming_size(spec: TensorSpec, axis: int, signature: Signature, config: PreprocessConfig) -> tuple[Dim, Dim]:
    """Returns the height and width of incoming images. If ``config`` resizes images, height and width are dynamic.

    Raises ``BadInputSpec`` if the model does not take the size that ``config`` resizes to.
    """
    height, width = (spec.shape[2], spec.shape[3]) if axis == 1 else (spec.shape[1], spec.shape[2])
    if config.resize is None:
        return height, width
    for has, wanted in zip((height, width), config.resize, strict=True):
        if isinstance(has, int) and has != wanted:
            raise BadInputSpec(
                f"the model takes {height}x{width} pixels, not {config.resize[0]}x{config.resize[1]}; correct the size"
            )
        if isinstance(has, str):
            signature.known({has: wanted})
    return "height", "width"


def _spared(graph: onnx.GraphProto, name: str, perm: list[int]) -> bool:
    """If all nodes that read the value ``name`` are Transposes that undo ``perm``, removes these Transposes.

    Returns whether a node was removed. Models from TensorFlow begin with a Transpose that undoes ``perm``. The nodes
    after a removed Transpose read ``name`` directly.
    """
    readers = [node for node in graph.node if name in node.input]
    ends = {value.name for value in graph.output}
    for node in readers:
        turn = [list(a.ints) for a in node.attribute if a.name == "perm"]
        if node.op_type != "Transpose" or turn != [[perm.index(axis) for axis in range(4)]] or node.output[0] in ends:
            return False
    # A branch of an If may also read the value ``name``.
    if not readers or any(a.HasField("g") for node in graph.node for a in node.attribute):
        return False
    gone = {node.output[0]: name for node in readers}
    for node in readers:
        graph.node.remove(node)
    rename_in_nodes(graph.node, gone)
    return True


def _affine(config: PreprocessConfig, channels: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the float32 arrays ``scale`` and ``shift``. For each channel, ``x * scale + shift`` equals ``(x / top -
    mean) / std``."""
    import numpy as np

    for name, numbers in (("mean", config.mean), ("std", config.std)):
        if len(numbers) not in (0, 1, channels):
            raise BadInputSpec(
                f"the {name} has {len(numbers)} numbers, which don't fit {channels} channels; give 1 number or "
                f"{channels} numbers"
            )
        if not np.isfinite(numbers).all() or (name == "std" and not all(numbers)):
            raise BadInputSpec(f"the {name} can't be {numbers}; give finite numbers, and a std other than 0")
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
        raise NotPreprocessed(f"postprocessing needs one output of scores, but the model gives {given}")
    spec = signature.outputs[0]
    classes = spec.shape[-1] if spec.shape else 1
    if isinstance(classes, int) and count > classes:
        raise BadInputSpec(f"topk:{count} asks for more than the model's {classes} classes; give at most {classes}")
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
    """Splits a text such as ``topk:5`` into its kind and its number. For ``softmax`` and ``argmax``, returns 0 as the
    number.

    Raises ``BadInputSpec`` if the text has another form.
    """
    kind, colon, number = text.partition(":")
    if (
        kind not in _POSTPROCESS
        or (kind == "topk") != bool(colon)
        or (colon and (not number.isdigit() or number == "0"))
    ):
        raise BadInputSpec(f"unknown postprocessing {text!r}; use softmax, argmax or topk:K, e.g. topk:5")
    return kind, int(number or 0)
