"""Quantizes the weights of large products to 8 or 4 bits, for models whose speed is limited by reading weights.

Activations stay float32 in the file, so only AWQ needs calibration. ``quantize`` runs this module in a child process.
"""

from __future__ import annotations

import logging
from typing import Any

import onnx

from accel.sources.onnx.file import read_proto
from accel.sources.onnx.weights import weight_array

from ..graph.write import write_onnx
from .nbits import ACCURACY_LEVEL, add_weights, finish, replace_product, rounded_blocks
from .products import product_weights, turn_matrices
from .stage import AWQ, Task

_BITS = {"int8-weights": 8, "int4-weights": 4, AWQ: 4}


def run_nbits(task: Task) -> dict[str, Any]:
    """Quantizes weights for ONNX Runtime's MatMulNBits, with one float32 scale for every ``block_size`` weights of a
    column.

    There are no zero points. Returns the notes.
    """
    model = onnx.load(str(task.path))
    bits, size = _BITS[task.config.mode], task.config.block_size
    nodes = chosen_products(model, task)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    made: dict[str, list[str]] = {}
    for node in nodes:
        name = node.input[1]
        if name not in made:
            made[name] = add_weights(model, name, *rounded_blocks(weight_array(tensors[name]), bits, size), bits, size)
        replace_product(node, made[name], tensors[name].dims, bits, size)
    finish(model, list(made))
    write_onnx(model, task.out)
    return {"block_size": size}


def run_compressed(task: Task) -> dict[str, Any]:
    """Quantizes weights with NNCF's compress_weights, and returns the notes.

    Weights of 8 bits have one scale for each channel. Weights of 4 bits have one scale for each block. In mode
    ``AWQ``, weights of important channels are scaled up before rounding, and the scales are chosen by the activations
    of the texts.
    """
    import nncf

    from .nncf import weights_folder

    nncf.set_log_level(logging.ERROR)
    model = read_proto(task.path)
    wanted = set(_large_products(model, task))
    four = _BITS[task.config.mode] == 4
    others = [node.name for node in model.graph.node if node.name not in wanted]
    calibrated = _calibrated(model, task) if task.config.mode == AWQ else {}
    made = nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_SYM if four else nncf.CompressWeightsMode.INT8_SYM,
        group_size=task.config.block_size if four else -1,
        all_layers=True if four else None,
        ignored_scope=nncf.IgnoredScope(names=others, validate=False),
        advanced_parameters=nncf.AdvancedCompressionParameters(backend_params=weights_folder(task, model)),
        **calibrated,
    )
    for node in made.graph.node:
        for attribute in node.attribute if node.op_type == "MatMulNBits" else ():
            attribute.i = ACCURACY_LEVEL if attribute.name == "accuracy_level" else attribute.i
    write_onnx(made, task.out)
    return {"block_size": task.config.block_size} if four else {}


def _calibrated(model: onnx.ModelProto, task: Task) -> dict[str, Any]:
    """Returns the arguments of AWQ and scale estimation. Adds to ``model`` what NNCF needs to see its whole graph."""
    import nncf

    from .texts import describe_other_domains, text_feeds

    describe_other_domains(model, task)
    texts = list(text_feeds(task))
    return {"dataset": nncf.Dataset(texts), "subset_size": len(texts), "awq": True, "scale_estimation": True}


def chosen_products(model: onnx.ModelProto, task: Task) -> list[onnx.NodeProto]:
    """Returns the products to quantize, after turning every Gemm of ``model`` into a MatMul."""
    from onnxruntime.quantization.onnx_model import ONNXModel

    wanted = _large_products(model, task)
    turn_matrices(model)
    ONNXModel(model).replace_gemm_with_matmul()
    chosen = {name for own in wanted for name in (own, f"{own}_MatMul")}
    return [node for node in model.graph.node if node.op_type == "MatMul" and node.name in chosen]


def _large_products(model: onnx.ModelProto, task: Task) -> list[str]:
    """Returns the names of the products that have at least ``smallest`` weights and are not excluded."""
    found = product_weights(model)
    return [name for name, size in found if size >= task.config.smallest and name not in task.excluded]
