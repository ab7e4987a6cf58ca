"""Runs the hand-written kernels (compiled for the host) and the function bodies of ONNX operators on the CPU, and
checks the results."""

from __future__ import annotations

from typing import Any

import torch

from ..catalogue import reference
from ..catalogue.configs import HAND_WRITTEN
from ..catalogue.reference import TORCH_DTYPES
from ..catalogue.spec import ACTS, EpilogueSpec, GemmSpec
from ..native.library import Library
from .interpret import random

M, N, K = 3, 5, 33


def hand_written_errors(library: Library) -> dict[str, float]:
    """Returns the largest ratio of an error to its bound for each kernel of a host library, by dtype and activation. A
    ratio of 1 is the limit.

    The results of quantization and patches have to be exact, so any difference gives a ratio of infinity.
    """
    found = {}
    for dtype in HAND_WRITTEN["gemv"].dtypes:
        for act in ACTS:
            spec, a, b, operands = _problem(dtype, act)
            out = torch.empty(M, N, dtype=a.dtype)
            addresses = {name: tensor.data_ptr() for name, tensor in operands.items()}
            library.gemv(a.data_ptr(), b.data_ptr(), out.data_ptr(), **addresses, dtype=dtype, act=act, m=M, n=N, k=K)
            found[f"gemv {dtype} {act}"] = _error(spec, a, b.t(), operands, out)
        x = random(torch.Generator().manual_seed(1), dtype, M, K)
        for to in ("int8", "fp8_e4m3"):
            q, scales = torch.empty(M, K, dtype=TORCH_DTYPES[to]), torch.empty(M)
            library.quantize_rowwise(x.data_ptr(), dtype, q.data_ptr(), to, scales.data_ptr(), M, K, K)
            right, right_scales = reference.quantize_rowwise_torch(x, to)
            same = torch.equal(q.float(), right.float()) and torch.equal(scales, right_scales)
            found[f"quantize_rowwise {dtype} {to}"] = 0.0 if same else float("inf")
        image, columns = x[:, :32].reshape(2, 4, 3, -1).contiguous(), torch.empty(2 * 2 * 3, 2 * 1 * 4, dtype=x.dtype)
        library.im2col(image.data_ptr(), columns.data_ptr(), x.element_size(), (2, 4, 3, 4), (2, 1, 2, 1, 0, 0, 1, 1))
        right = image.reshape(2, 2, 2, 3, 4).permute(0, 1, 3, 2, 4).reshape(columns.shape)
        found[f"im2col {dtype}"] = 0.0 if torch.equal(columns, right) else float("inf")
    return found


def body_errors() -> dict[str, float]:
    """Runs the function bodies in ONNX Runtime. Returns the largest ratio of an error to its bound for each product and
    activation, or an empty dict if ONNX Runtime isn't installed."""
    try:
        import onnxruntime
    except ImportError:
        return {}
    from onnx import TensorProto, helper

    from ..onnx.function import DOMAIN, MIN_IR, PRODUCTS, VERSION, FusedGemm

    found = {}
    for product in PRODUCTS:
        for act in ACTS:
            spec, a, b, operands = _problem("fp32", act, scales=False)
            feeds = {"a": a, "b": b if product == "gemm_nt" else b.t(), **operands}
            function = FusedGemm(product=product, act=act, bias=True, residual=True, dtype=TensorProto.FLOAT)
            inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, t.shape) for n, t in feeds.items()]
            out = helper.make_tensor_value_info("out", TensorProto.FLOAT, (M, N))
            node = helper.make_node(function.name, list(feeds), ["out"], domain=DOMAIN)
            opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
            graph = helper.make_graph([node], "body", inputs, [out])
            model = helper.make_model(graph, opset_imports=opsets, functions=[function.function(17)], ir_version=MIN_IR)
            session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            (got,) = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
            found[f"{product} {act}"] = _error(spec, a, b.t(), operands, torch.from_numpy(got))
    return found


def _problem(
    dtype: str, act: str, scales: bool = True
) -> tuple[GemmSpec, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Makes a small product whose sizes don't fill a tile. Returns the spec, ``a`` (M, K), ``b`` (N, K), and every
    operand of the epilogue."""
    g = torch.Generator().manual_seed(0)
    epilogue = EpilogueSpec(act=act, bias=True, residual=True, row_scale=scales, col_scale=scales, out_dtype=dtype)
    made: dict[str, Any] = {"bias": torch.randn(N, generator=g), "residual": random(g, dtype, M, N)}
    if scales:
        made |= {"row_scale": torch.rand(M, generator=g) + 0.5, "col_scale": torch.rand(N, generator=g) + 0.5}
    spec = GemmSpec(m=M, n=N, k=K, in_dtype=dtype, epilogue=epilogue)
    return spec, random(g, dtype, M, K), random(g, dtype, N, K), made


def _error(
    spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor], got: torch.Tensor
) -> float:
    bound = reference.gemm_bound(spec, a, b, operands)
    return reference.error_over_bound(got, reference.gemm_torch(spec, a, b, operands), bound)
