"""8 or 4 bits for the weights of large products alone: what a model gains whose speed is that of reading its weights.

Activations stay float32 in the file, so nothing has to be calibrated. Runs in a child process: see ``quantize``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Iterator
from typing import Any

import onnx
from onnx import TensorProto

from accel.converters.onnx_write import write_onnx
from accel.converters.quantize import Task
from accel.sources.onnx_file import read_proto

_BITS = {"int8-weights": 8, "int4-weights": 4}

# What MatMulNBits may round the activations to inside, block by block: 4 is int8, for which CPUs have instructions.
_ACCURACY_LEVEL = 4


def run_nbits(task: Task) -> dict[str, Any]:
    """ONNX Runtime's MatMulNBits: one float32 scale for ``block_size`` weights of a column, without zero points."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    logging.getLogger().setLevel(logging.ERROR)
    model = onnx.load(str(task.path))
    wanted = _large_products(model, task)
    whole = ONNXModel(model)
    whole.replace_gemm_with_matmul()
    chosen = {name for own in wanted for name in (own, f"{own}_MatMul")}
    others = [node.name for node in model.graph.node if node.op_type == "MatMul" and node.name not in chosen]
    quantizer = MatMulNBitsQuantizer(
        model,
        bits=_BITS[task.config.mode],
        block_size=task.config.block_size,
        is_symmetric=True,
        accuracy_level=_ACCURACY_LEVEL,
        nodes_to_exclude=others,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        quantizer.process()
    write_onnx(quantizer.model.model, task.out)
    return {"block_size": task.config.block_size}


def run_compressed(task: Task) -> dict[str, Any]:
    """NNCF's compress_weights, as OpenVINO runs it: 8 bits with a scale a channel, or 4 with one a block."""
    import nncf

    from accel.converters.quantize_nncf import weights_folder

    nncf.set_log_level(logging.ERROR)
    model = read_proto(task.path)
    wanted = set(_large_products(model, task))
    four = task.config.mode == "int4-weights"
    others = [node.name for node in model.graph.node if node.name not in wanted]
    made = nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_SYM if four else nncf.CompressWeightsMode.INT8_SYM,
        group_size=task.config.block_size if four else -1,
        all_layers=True if four else None,
        ignored_scope=nncf.IgnoredScope(names=others, validate=False),
        advanced_parameters=nncf.AdvancedCompressionParameters(backend_params=weights_folder(task, model)),
    )
    write_onnx(made, task.out)
    return {"block_size": task.config.block_size} if four else {}


def _large_products(model: onnx.ModelProto, task: Task) -> list[str]:
    """Names of the products whose weights are worth it."""
    found = product_weights(model)
    return [name for name, size in found if size >= task.config.smallest and name not in task.excluded]


def product_weights(model: onnx.ModelProto) -> list[tuple[str, int]]:
    """Each MatMul and Gemm with a float32 matrix of constants behind it, and how many weights that has."""
    return list(_products(model))


def _products(model: onnx.ModelProto) -> Iterator[tuple[str, int]]:
    weights = {t.name: t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 2}
    for node in model.graph.node:
        turned = any(a.name == "transA" and a.i for a in node.attribute)
        if node.op_type in ("MatMul", "Gemm") and not turned and node.input[1] in weights:
            yield node.name, math.prod(weights[node.input[1]].dims)
