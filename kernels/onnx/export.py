"""Exports fused modules with ``torch.onnx.export`` to ``accel::FusedGemm`` and similar ONNX operators.

Pass ``dynamo=True`` and ``custom_translation_table=translation_table()`` to ``torch.onnx.export``, which writes the
nodes. Then call ``add_functions(program.model_proto)``, which gives each node a function body. With the function
bodies, any runtime can run the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
from accel.errors import UnsupportedHere
from onnx import helper

from ..torch import operators
from .function import DOMAIN, DTYPES, VERSION, FusedConv2d, FusedGemm, QuantizeRowwise, parse

TYPES = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(int8)", "tensor(float8e4m3fn)"]


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    return {
        operators.fused_gemm: _fused_gemm,
        operators.fused_conv2d: _fused_conv2d,
        operators.quantize_rowwise: _quantize_rowwise,
    }


def add_functions(model: onnx.ModelProto) -> list[str]:
    """Adds the missing function bodies of all nodes in the domain ``accel``, in place. Returns the names of the added
    bodies.

    Raises ``UnknownName`` for a node that is not one of accel's operators.
    """
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
    there = {function.name for function in model.functions if function.domain == DOMAIN}
    wanted = {node.op_type: None for node in model.graph.node if node.domain == DOMAIN and node.op_type not in there}
    model.functions.extend(parse(name).function(opset) for name in wanted)
    if wanted and all(o.domain != DOMAIN for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    return list(wanted)


def _call(name: str, inputs: Sequence[Any], outputs: int = 1) -> Any:
    """Adds a node ``accel::name`` to the current graph."""
    from onnxscript import values

    schema = onnx.defs.OpSchema(
        name,
        DOMAIN,
        VERSION,
        inputs=[onnx.defs.OpSchema.FormalParameter(f"x{at}", f"T{at}") for at in range(len(inputs))],
        outputs=[onnx.defs.OpSchema.FormalParameter(f"y{at}", f"U{at}") for at in range(outputs)],
        type_constraints=[
            (name, TYPES, "")
            for name in [*(f"T{at}" for at in range(len(inputs))), *(f"U{at}" for at in range(outputs))]
        ],
    )
    return values.Op(values.Opset(DOMAIN, VERSION), name, schema)(*inputs)


def _fused_gemm(
    a: Any,
    b: Any,
    bias: Any = None,
    residual: Any = None,
    row_scale: Any = None,
    col_scale: Any = None,
    act: str = "none",
    out_dtype: int | None = None,
) -> Any:
    operand = int(a.dtype)
    function = FusedGemm(
        product="gemm_nn",
        act=act,
        bias=bias is not None,
        residual=residual is not None,
        row_scale=row_scale is not None,
        col_scale=col_scale is not None,
        operand=operand,
        dtype=operand if out_dtype is None else int(out_dtype),
    )
    operands = [x for x in (a, b, bias, row_scale, col_scale, residual) if x is not None]
    # The ONNX function fixes the dtypes of bias and residual, while the PyTorch operator takes any dtype.
    return _call(function.name, _cast(operands, function.dtypes))


def _fused_conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    col_scale: Any = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    act: str = "none",
    out_dtype: int | None = None,
) -> Any:
    from onnxscript import opset20 as op

    dtype = int(x.dtype)
    if col_scale is not None or dtype not in DTYPES or (out_dtype is not None and int(out_dtype) != dtype):
        raise UnsupportedHere(
            "an accel::fused_conv2d with scales, or with different dtypes of input and output, has no ONNX operator; "
            "export the unfused module"
        )
    geometry = {"stride": stride, "padding": padding, "dilation": dilation}
    function = FusedConv2d(
        kernel=(int(weight.shape[1]), int(weight.shape[2])),
        **{name: (int(pair[0]), int(pair[-1])) for name, pair in geometry.items()},
        act=act,
        bias=bias is not None,
        residual=residual is not None,
        dtype=dtype,
    )
    given = [value for value in (x, weight, bias, residual) if value is not None]
    nchw = [
        same if value is bias else op.Transpose(same, perm=[0, 3, 1, 2])
        for value, same in zip(given, _cast(given, [dtype] * len(given)), strict=True)
    ]
    return op.Transpose(_call(function.name, nchw), perm=[0, 2, 3, 1])


def _quantize_rowwise(x: Any, dtype: int) -> Any:
    return _call(QuantizeRowwise(source=int(x.dtype), dtype=int(dtype)).name, [x], outputs=2)


def _cast(operands: Sequence[Any], dtypes: Sequence[int]) -> list[Any]:
    from onnxscript import opset20 as op

    pairs = zip(operands, dtypes, strict=True)
    return [x if int(x.dtype) == dtype else op.Cast(x, to=dtype) for x, dtype in pairs]
