"""Implements ONNX operators as differentiable torch functions.

Values are tensors. Computed shapes are lists of integers. During an export, a computed shape has symbols for dynamic
dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from accel.errors import StageFailed

Attributes = Mapping[str, Any]
_DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16,
    11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip


class OperatorNotThere(StageFailed):
    """An ONNX operator, or one of its options, has no translation to torch."""


def listed(value: Any) -> list[Any]:
    """Turns a shape, axes or sizes into a list. ``value`` is a list, a number or a constant tensor."""
    if isinstance(value, list):
        return value
    if not isinstance(value, torch.Tensor):
        return [value]
    found = value.tolist()
    return found if isinstance(found, list) else [found]


def tensor(value: Any) -> torch.Tensor:
    """Returns ``value`` as a tensor. ``value`` may be a list of sizes, because a graph may compute with both sizes
    and tensors."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _filled(given: Sequence[Any], count: int) -> list[Any]:
    """Returns ``count`` values: the ``given`` inputs, and then None for each missing optional input."""
    return [*given, *[None] * (count - len(given))]


def _pads(a: Attributes, x: torch.Tensor, spatial: int) -> tuple[torch.Tensor, list[int]]:
    """Returns the input, and the padding that the caller still has to apply.

    This function itself applies asymmetric padding to the input, and leaves symmetric padding to the caller.
    """
    if a.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        kind = a["auto_pad"].decode()
        raise OperatorNotThere(f"accel can't translate auto_pad {kind} to PyTorch; simplify the model first")
    pads = list(a.get("pads", [0] * 2 * spatial))
    begin, end = pads[:spatial], pads[spatial:]
    if begin == end:
        return x, begin
    around = [n for pair in reversed(list(zip(begin, end, strict=True))) for n in pair]
    return F.pad(x, around), [0] * spatial


def _conv(a: Attributes, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    spatial = w.ndim - 2
    x, pads = _pads(a, x, spatial)
    kind = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[spatial]
    strides, dilations = a.get("strides", [1] * spatial), a.get("dilations", [1] * spatial)
    return kind(x, w, b, tuple(strides), tuple(pads), tuple(dilations), a.get("group", 1))


def _conv_transpose(a: Attributes, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    spatial = w.ndim - 2
    pads = list(a.get("pads", [0] * 2 * spatial))
    if pads[:spatial] != pads[spatial:] or "output_shape" in a:
        raise OperatorNotThere(
            "accel can't translate ConvTranspose with uneven pads or an output_shape to PyTorch; export the part of "
            "the model without this operator"
        )
    kind = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[spatial]
    extra, strides = a.get("output_padding", [0] * spatial), a.get("strides", [1] * spatial)
    dilations = a.get("dilations", [1] * spatial)
    return kind(x, w, b, tuple(strides), tuple(pads[:spatial]), tuple(extra), a.get("group", 1), tuple(dilations))


def _max_pool(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    spatial = x.ndim - 2
    pads = list(a.get("pads", [0] * 2 * spatial))
    if pads[:spatial] != pads[spatial:] or a.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        around = [n for i in reversed(range(spatial)) for n in (pads[i], pads[spatial + i])]
        x, pads = F.pad(x, around, value=-math.inf), [0] * 2 * spatial
    kind = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[spatial]
    strides, dilations = a.get("strides", [1] * spatial), a.get("dilations", [1] * spatial)
    found: torch.Tensor = kind(
        x, a["kernel_shape"], strides, pads[:spatial], dilations, ceil_mode=bool(a.get("ceil_mode", 0))
    )
    return found


def _average_pool(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    spatial = x.ndim - 2
    inside = bool(a.get("count_include_pad", 0))
    pads = list(a.get("pads", [0] * 2 * spatial))
    if pads[:spatial] != pads[spatial:]:
        raise OperatorNotThere("accel can't translate AveragePool with uneven pads; export the part without it")
    kind = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[spatial]
    found: torch.Tensor = kind(
        x,
        a["kernel_shape"],
        a.get("strides", [1] * spatial),
        pads[:spatial],
        ceil_mode=bool(a.get("ceil_mode", 0)),
        count_include_pad=inside,
    )
    return found


def _gemm(a: Attributes, x: torch.Tensor, y: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    x = x.mT if a.get("transA", 0) else x
    y = y.mT if a.get("transB", 0) else y
    found: torch.Tensor = a.get("alpha", 1.0) * (x @ y)
    return found if c is None else found + a.get("beta", 1.0) * c


def _reshape(a: Attributes, x: Any, shape: Any) -> Any:
    sizes = listed(shape)
    if isinstance(x, list):
        return x
    if not a.get("allowzero", 0):
        sizes = [x.shape[i] if isinstance(s, int) and s == 0 else s for i, s in enumerate(sizes)]
    return x.reshape(sizes)


def _axes(a: Attributes, given: Any) -> list[int] | None:
    if given is not None:
        return listed(given)
    return list(a["axes"]) if "axes" in a else None


def _squeeze(a: Attributes, x: Any, given: Any = None) -> Any:
    if isinstance(x, list):
        return x[0]
    axes = _axes(a, given)
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _unsqueeze(a: Attributes, x: Any, given: Any = None) -> Any:
    axes = _axes(a, given) or [0]
    if not isinstance(x, torch.Tensor):
        return x if isinstance(x, list) else [x]
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _gather(a: Attributes, x: Any, index: Any) -> Any:
    if isinstance(x, list):
        places = index.tolist() if isinstance(index, torch.Tensor) else index
        return [x[i] for i in places] if isinstance(places, list) else x[places]
    axis = a.get("axis", 0) % x.ndim
    index = tensor(index).to(torch.int64)
    index = torch.where(index < 0, index + x.shape[axis], index)
    found = x.index_select(axis, index.reshape(-1))
    return found.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


def _gather_elements(a: Attributes, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    axis = a.get("axis", 0) % x.ndim
    index = torch.where(index < 0, index + x.shape[axis], index)
    # ONNX requires that ``x`` and ``index`` have equal sizes on all dims except ``axis``. torch also accepts an
    # ``index`` that is smaller than ``x``.
    return torch.gather(x, axis, index)


def _gather_nd(a: Attributes, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if a.get("batch_dims", 0):
        raise OperatorNotThere("accel can't translate GatherND with batch_dims; export the part without GatherND")
    return x[tuple(index.unbind(-1))]


def _range(_: Attributes, *ends: Any) -> torch.Tensor:
    start, stop, step = (end.item() if isinstance(end, torch.Tensor) else listed(end)[0] for end in ends)
    return torch.arange(start, stop, step)


def _slice(a: Attributes, x: Any, *given: Any) -> Any:
    starts, ends, axes, steps = _filled(given, 4)
    first = listed(starts) if starts is not None else list(a["starts"])
    last = listed(ends) if ends is not None else list(a["ends"])
    where = listed(axes) if axes is not None else list(a.get("axes", range(len(first))))
    by = listed(steps) if steps is not None else [1] * len(first)
    if isinstance(x, list):
        return x[first[0] : last[0] : by[0]]
    for start, end, axis, step in zip(first, last, where, by, strict=True):
        if step < 0:
            if start != -1 or end > -x.shape[axis]:
                raise OperatorNotThere(
                    "accel can't translate a Slice that reverses only a part of a dim to PyTorch; export the part of "
                    "the model without this operator"
                )
            x = x.flip(axis)[(slice(None),) * (axis % x.ndim) + (slice(None, None, -step),)]
            continue
        x = x[(slice(None),) * (axis % x.ndim) + (slice(start, None if end >= 2**31 - 1 else end, step),)]
    return x


def _concat(a: Attributes, *values: Any) -> Any:
    if any(isinstance(v, list) for v in values):
        return [n for v in values for n in listed(v)]
    return torch.cat(values, a["axis"])


def _split(a: Attributes, x: torch.Tensor, sizes: Any = None) -> list[torch.Tensor]:
    axis = a.get("axis", 0)
    parts = listed(sizes) if sizes is not None else list(a["split"]) if "split" in a else None
    if parts is None:
        count = a.get("num_outputs", a["__outputs__"])
        return list(x.split(-(-x.shape[axis] // count), axis))
    return list(x.split(parts, axis))


def _reduce(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce(a: Attributes, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        axes = _axes(a, given)
        if not axes:
            if a.get("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.ndim))
        return function(x, axes, bool(a.get("keepdims", 1)))

    return reduce


def _batch_norm(a: Attributes, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    scale, bias, mean, var = rest
    return F.batch_norm(x, mean, var, scale, bias, False, 0.0, a.get("epsilon", 1e-5))


def _layer_norm(a: Attributes, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    axis = a.get("axis", -1) % x.ndim
    return F.layer_norm(x, list(x.shape[axis:]), w, b, a.get("epsilon", 1e-5))


def _pad(a: Attributes, x: torch.Tensor, pads: Any = None, value: Any = None, axes: Any = None) -> torch.Tensor:
    amounts = listed(pads) if pads is not None else list(a["pads"])
    mode = a.get("mode", b"constant").decode()
    where = [n % x.ndim for n in listed(axes)] if axes is not None else list(range(x.ndim))
    half = len(amounts) // 2
    by_axis = {axis: (amounts[i], amounts[half + i]) for i, axis in enumerate(where)}
    around = [n for axis in reversed(range(x.ndim)) for n in by_axis.get(axis, (0, 0))]
    if mode == "constant":
        return F.pad(x, around, value=float(value) if value is not None else a.get("value", 0.0))
    while around[-2:] == [0, 0] and len(around) > 2:
        around = around[:-2]
    return F.pad(x, around, mode={"edge": "replicate", "reflect": "reflect"}[mode])


def _resize(a: Attributes, x: torch.Tensor, *given: Any) -> torch.Tensor:
    _, scales, sizes = _filled(given, 3)
    mode, where = a.get("mode", b"nearest"), a.get("coordinate_transformation_mode", b"half_pixel")
    linear = mode == b"linear" and where in (b"half_pixel", b"pytorch_half_pixel", b"align_corners")
    nearest = mode == b"nearest" and where == b"asymmetric" and a.get("nearest_mode", b"floor") == b"floor"
    if not (linear or nearest) or x.ndim != 4 or "axes" in a:
        raise OperatorNotThere(
            f"Resize with mode {mode.decode()} and coordinates {where.decode()} has no translation; export the part "
            "without it"
        )
    if sizes is not None:
        size = [int(n) for n in listed(sizes)[2:]]
    else:
        size = [int(n * s) for n, s in zip(x.shape[2:], listed(scales)[2:], strict=True)]
    if nearest:
        return F.interpolate(x, size, mode="nearest")
    return F.interpolate(x, size, mode="bilinear", align_corners=where == b"align_corners")


def _cast(a: Attributes, x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x if a["to"] in (6, 7) else tensor(x).to(_DTYPES[a["to"]])
    return x.to(_DTYPES[a["to"]])


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Returns an operator for tensors and for lists of sizes. In lists, the operator works element by element."""

    def compute(a: Attributes, x: Any, y: Any) -> Any:  # noqa: ARG001
        if not isinstance(x, torch.Tensor) and not isinstance(y, torch.Tensor):
            left, right = listed(x), listed(y)
            count = max(len(left), len(right))
            left, right = left * (count // len(left)), right * (count // len(right))
            found = [function(p, q) for p, q in zip(left, right, strict=True)]
            return found if isinstance(x, list) or isinstance(y, list) else found[0]
        return function(tensor(x), tensor(y))

    return compute


def _divide(x: Any, y: Any) -> Any:
    if isinstance(x, torch.Tensor) and not x.is_floating_point():
        return torch.div(x, y, rounding_mode="trunc")
    return x / y if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) else x // y


def _expand(_: Attributes, x: torch.Tensor, shape: Any) -> torch.Tensor:
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(listed(shape))))


def _each(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda a, *values: function(*map(tensor, values))  # noqa: ARG005


def _gelu(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate=a.get("approximate", b"none").decode())


def _clip(a: Attributes, x: torch.Tensor, low: Any = None, high: Any = None) -> torch.Tensor:
    low = a.get("min") if low is None else low
    high = a.get("max") if high is None else high
    return torch.clamp(x, low, high) if low is not None or high is not None else x


def _top_k(a: Attributes, x: torch.Tensor, k: Any) -> list[torch.Tensor]:
    return list(x.topk(listed(k)[0], a.get("axis", -1), bool(a.get("largest", 1)), bool(a.get("sorted", 1))))


def _argmax(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    return x.argmax(a.get("axis", 0), bool(a.get("keepdims", 1)))


def _flatten(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    axis = a.get("axis", 1)
    return x.reshape([math.prod(x.shape[:axis]), -1])


def _constant_of_shape(a: Attributes, shape: Any) -> torch.Tensor:
    value = torch.from_numpy(a["value"].copy()) if "value" in a else torch.zeros(1)
    return torch.full(listed(shape), value.item(), dtype=value.dtype)


def _global_average(_: Attributes, x: torch.Tensor) -> torch.Tensor:
    return x.mean(list(range(2, x.ndim)), keepdim=True)


def _shape(a: Attributes, x: torch.Tensor) -> list[Any]:
    return list(x.shape)[a.get("start", 0) : a.get("end")]


def _transpose(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    return x.permute(a.get("perm", list(reversed(range(x.ndim)))))


def _prelu(_: Attributes, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return torch.where(x < 0, slope * x, x)


def _einsum(a: Attributes, *values: torch.Tensor) -> torch.Tensor:
    return torch.einsum(a["equation"].decode(), *values)


def _mean(x: torch.Tensor, axes: Sequence[int], keep: bool) -> torch.Tensor:
    return x.mean(list(axes), keepdim=keep)


def _hard_sigmoid(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = a.get("alpha", 0.2) * x + a.get("beta", 0.5)
    return found.clamp(0, 1)


OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": _arithmetic(lambda x, y: x + y),
    "And": _each(torch.logical_and),
    "ArgMax": _argmax,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Ceil": _each(torch.ceil),
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Cos": _each(torch.cos),
    "Div": _arithmetic(_divide),
    "Dropout": lambda a, x, *_: x,  # noqa: ARG005
    "Einsum": _einsum,
    "Elu": lambda a, x: F.elu(x, a.get("alpha", 1.0)),
    "Equal": _each(torch.eq),
    "Erf": _each(torch.erf),
    "Exp": _each(torch.exp),
    "Expand": _expand,
    "Flatten": _flatten,
    "Floor": _each(torch.floor),
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "Greater": _each(torch.gt),
    "GreaterOrEqual": _each(torch.ge),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _each(F.hardswish),
    "Identity": lambda a, x: x,  # noqa: ARG005
    "IsNaN": _each(torch.isnan),
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda a, x: F.leaky_relu(x, a.get("alpha", 0.01)),
    "Less": _each(torch.lt),
    "LessOrEqual": _each(torch.le),
    "Log": _each(torch.log),
    "LogSoftmax": lambda a, x: F.log_softmax(x, a.get("axis", -1)),
    "MatMul": _each(torch.matmul),
    "Max": lambda a, x, *more: torch.maximum(x, tensor(more[0])) if more else x,  # noqa: ARG005
    "MaxPool": _max_pool,
    "Min": lambda a, x, *more: torch.minimum(x, tensor(more[0])) if more else x,  # noqa: ARG005
    "Mul": _arithmetic(lambda x, y: x * y),
    "Neg": _each(torch.neg),
    "Not": _each(torch.logical_not),
    "Or": _each(torch.logical_or),
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": _each(torch.pow),
    "Range": _range,
    "Reciprocal": _each(torch.reciprocal),
    "ReduceL2": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: x.amax(axes, keep)),
    "ReduceMean": _reduce(_mean),
    "ReduceMin": _reduce(lambda x, axes, keep: x.amin(axes, keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "Relu": _each(torch.relu),
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": _shape,
    "Sigmoid": _each(torch.sigmoid),
    "Sin": _each(torch.sin),
    "Slice": _slice,
    "Softmax": lambda a, x: F.softmax(x, a.get("axis", -1)),
    "Softplus": _each(F.softplus),
    "Split": _split,
    "Sqrt": _each(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _arithmetic(lambda x, y: x - y),
    "Tanh": _each(torch.tanh),
    "TopK": _top_k,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _each(torch.where),
}
