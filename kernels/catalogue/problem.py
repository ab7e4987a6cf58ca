"""Makes a spec from tensors and checks the operands. The error message for a wrong operand says how to fix the
operand."""

from __future__ import annotations

import torch

from accel.errors import BadFeeds

from .reference import TORCH_DTYPES
from .spec import IN_DTYPES, OUT_DTYPES, ConvSpec, EpilogueSpec, GemmSpec

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
Pair = tuple[int, int]


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that specs use for a torch dtype, such as ``fp16``. Raises ``BadFeeds`` if no kernel takes the
    dtype."""
    if dtype not in NAMES:
        raise BadFeeds(f"no kernel takes {dtype} operands; cast them to one of {', '.join(IN_DTYPES)}")
    return NAMES[dtype]


def out_dtype(asked: torch.dtype | None, a: torch.Tensor) -> torch.dtype:
    """Returns ``asked`` as the output dtype, or the dtype of ``a`` if ``asked`` is None. With an int8 or fp8 input,
    ``asked`` must not be None."""
    found = a.dtype if asked is None else asked
    if NAMES.get(found) not in OUT_DTYPES:
        wanted = "pass out_dtype=torch.float16, torch.bfloat16 or torch.float32"
        raise BadFeeds(f"the output can't have the dtype {found}; {wanted}")
    return found


def gemm_spec(
    a: torch.Tensor,
    b: torch.Tensor,
    operands: dict[str, torch.Tensor],
    act: str,
    out: torch.dtype | None,
) -> GemmSpec:
    """Returns the spec of the product of ``a`` and ``b``. Raises ``BadFeeds`` if shapes, dtypes or devices don't
    match."""
    if a.dim() != 2 or b.dim() != 2:
        raise BadFeeds(
            f"operand a has the shape {list(a.shape)} and operand b {list(b.shape)}; reshape both to matrices"
        )
    if a.shape[1] != b.shape[0]:
        raise BadFeeds(
            f"operand a has the shape {list(a.shape)} and operand b {list(b.shape)}; "
            "give b as many rows as a has columns"
        )
    if a.dtype != b.dtype:
        raise BadFeeds(
            f"operand a has the dtype {a.dtype} and operand b {b.dtype}; "
            "cast one of the operands, because a kernel never casts silently"
        )
    m, n = a.shape[0], b.shape[1]
    _check(a, b, operands, {"bias": [n], "residual": [m, n], "row_scale": [m], "col_scale": [n]})
    return GemmSpec(
        m=m, n=n, k=a.shape[1], in_dtype=dtype_name(a.dtype), epilogue=_epilogue(operands, act, out_dtype(out, a))
    )


def conv_spec(
    x: torch.Tensor,
    weight: torch.Tensor,
    operands: dict[str, torch.Tensor],
    geometry: tuple[Pair, Pair, Pair],
    act: str,
    out: torch.dtype | None,
) -> ConvSpec:
    """Returns the spec of the convolution of ``x`` with ``weight``.

    ``geometry`` is (stride, padding, dilation). Raises ``BadFeeds`` if shapes, dtypes or devices don't match.
    """
    if x.dim() != 4 or weight.dim() != 4:
        raise BadFeeds("fused_conv2d takes x as (N, H, W, C) and weight as (O, kernel height, kernel width, C)")
    if x.shape[3] != weight.shape[3]:
        raise BadFeeds(
            f"x has {x.shape[3]} channels, but weight takes {weight.shape[3]} channels; pass x as NHWC and weight as "
            "OHWI, or use torch.nn.functional.conv2d for a grouped convolution"
        )
    if x.dtype != weight.dtype:
        raise BadFeeds(
            f"x has the dtype {x.dtype}, but weight has the dtype {weight.dtype}; "
            "cast one of the two, because a kernel never casts silently"
        )
    stride, padding, dilation = geometry
    spec = ConvSpec(
        images=x.shape[0],
        height=x.shape[1],
        width=x.shape[2],
        c_in=x.shape[3],
        c_out=weight.shape[0],
        kernel=(weight.shape[1], weight.shape[2]),
        stride=stride,
        padding=padding,
        dilation=dilation,
        in_dtype=dtype_name(x.dtype),
        epilogue=_epilogue(operands, act, out_dtype(out, x)),
    )
    full = [spec.images, spec.out_height, spec.out_width, spec.c_out]
    _check(x, weight, operands, {"bias": [spec.c_out], "residual": full, "col_scale": [spec.c_out]})
    return spec


def quantized_dtype(x: torch.Tensor, dtype: torch.dtype) -> str:
    """Returns the name of ``dtype`` in a spec, after checking that the rows of ``x`` can be quantized to ``dtype``.

    Raises ``BadFeeds`` if ``x`` isn't a float matrix, or ``dtype`` is neither int8 nor float8_e4m3fn.
    """
    if x.dim() != 2 or min(x.shape) < 1 or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise BadFeeds(f"quantize_rowwise takes a non-empty float matrix, got {x.dtype} with shape {list(x.shape)}")
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        raise BadFeeds(f"quantize_rowwise can't quantize to {dtype}; pass torch.int8 or torch.float8_e4m3fn")
    return NAMES[dtype]


def _epilogue(operands: dict[str, torch.Tensor], act: str, out: torch.dtype) -> EpilogueSpec:
    flags = {name: name in operands for name in ("bias", "residual", "row_scale", "col_scale")}
    return EpilogueSpec(act=act, out_dtype=NAMES[out], **flags)


def _check(a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor], shapes: dict[str, list[int]]) -> None:
    for name, tensor in {"b": b, **operands}.items():
        if tensor.device != a.device:
            raise BadFeeds(
                f"the tensor {name} is on the device {tensor.device}, but the input is on {a.device}; "
                f"move the tensor to {a.device}"
            )
    for name, tensor in operands.items():
        if list(tensor.shape) != shapes[name]:
            raise BadFeeds(f"{name} has the shape {list(tensor.shape)}, but needs the shape {shapes[name]}; reshape it")
        if NAMES.get(tensor.dtype) not in OUT_DTYPES:
            raise BadFeeds(f"{name} has the dtype {tensor.dtype}; cast it to float32, float16 or bfloat16")
