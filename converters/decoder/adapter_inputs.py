"""Makes the matrices of LoRA adapters inputs of a decoder, so that one file serves the base model and its adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

from accel.artifact import ADAPTER_SUFFIX, Artifact
from accel.errors import StageFailed
from accel.runtimes.kv.lora import write_lora
from accel.sources.onnx.weights import read_detached, weight_array
from accel.spelling import option
from accel.stage import StageConfig

from ..graph.write import onnx_artifact

if TYPE_CHECKING:
    from accel.sources.torch.pretrained.adapter_folder import Adapter

# The folder of the adapters' files, beside the decoder.
_FOLDER = "adapters"


@dataclass(frozen=True, kw_only=True)
class AdapterInputsConfig(StageConfig):
    """``adapters`` are folders that PEFT wrote. ``layers`` maps each layer that an adapter adapts to the sha256 of its
    weights (see ``layers_of``)."""

    adapters: tuple[Path, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)


class LayerNotFound(StageFailed):
    """The graph has no product with the weights of a layer that an adapter adapts."""


def adapter_inputs(src: Artifact, config: AdapterInputsConfig, out: Path) -> Artifact:
    """Adds the inputs ``LAYER.lora_A`` [inputs, rank] and ``LAYER.lora_B`` [rank, outputs] to the decoder ``src`` for
    each layer. The layer then computes base(x) + (x @ A) @ B. The defaults have rank 0, so a run without these inputs
    gives the outputs of ``src``. Writes the file of each adapter to a folder beside ``out``.

    The ranks of two layers have different names, because ONNX Runtime shares memory between values of equal dims.
    Raises ``LayerNotFound`` if the graph has no such layer.
    """
    from accel.sources.torch.pretrained.adapter_folder import read_adapter

    model = read_detached(src.path)
    places = _places(model)
    kept = list(model.graph.node)  # keeps the nodes alive, so that their ids stay unique
    added: dict[int, list[onnx.NodeProto]] = {}
    for number, (layer, sha256) in enumerate(sorted(config.layers.items())):
        nodes = places.get(sha256, [])
        if not nodes:
            raise LayerNotFound(
                f"{src.path.name} has no product with the weights of {layer}, so its adapter can't be an input; merge "
                f"the adapter: give it alone, without {option('adapters_as', 'inputs')}"
            )
        _add_inputs(model.graph, layer, nodes[0][1], f"rank_{number}")
        for index, (node, _) in enumerate(nodes):
            added[id(node)] = _branch(node, layer, index)
    placed = [one for node in kept for one in (node, *added.get(id(node), ()))]
    del model.graph.node[:]
    model.graph.node.extend(placed)
    adapters = [read_adapter(folder) for folder in config.adapters]
    facts = {one.folder.absolute().name: _about(one) for one in adapters}
    made = onnx_artifact(src, model, out, {"adapters": facts})
    files = [_write(one, out.parent) for one in adapters]
    return replace(made, companions=(*made.companions, *files))


def _about(adapter: Adapter) -> dict[str, object]:
    """Returns the facts about an adapter for the manifest."""
    return {
        "path": str(adapter.folder.absolute()),
        "layers": len(adapter.pairs),
        "rank": max(pair.a.shape[0] for pair in adapter.pairs.values()),
    }


def _write(adapter: Adapter, folder: Path) -> str:
    """Writes the file of an adapter below ``folder``, and returns its path in ``folder``."""
    from accel.sources.torch.pretrained.adapter_inputs import matrices

    name = f"{_FOLDER}/{adapter.folder.absolute().name}{ADAPTER_SUFFIX}"
    (folder / _FOLDER).mkdir(exist_ok=True)
    found = matrices(adapter).items()
    write_lora(folder / name, {_name(layer, part): pair[at] for layer, pair in found for at, part in enumerate("AB")})
    return name


def _name(layer: str, part: str) -> str:
    return f"{layer}.lora_{part}"


def _places(model: onnx.ModelProto) -> dict[str, list[tuple[onnx.NodeProto, tuple[int, ...]]]]:
    """Returns the products with constant weights and the numbers of their inputs and outputs, by the sha256 of the
    weights [inputs, outputs]."""
    from accel.sources.torch.pretrained.adapter_inputs import matrix_sha256

    found: dict[str, list[tuple[onnx.NodeProto, tuple[int, ...]]]] = {}
    for node, weights, turned in _products(model):
        array = weight_array(weights)
        array = array.T if turned else array
        found.setdefault(matrix_sha256(array), []).append((node, array.shape))
    return found


def _products(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, onnx.TensorProto, bool]]:
    """Yields each product x @ W with constant weights in float32, the weights, and whether they are turned."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
            continue
        flags = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        if flags.get("transA") or flags.get("alpha", 1.0) != 1.0:
            continue
        name, turned = node.input[1], bool(flags.get("transB"))
        maker = makers.get(name)
        if maker is not None and maker.op_type == "Transpose":
            name, turned = maker.input[0], not turned
        weights = constants.get(name)
        if weights is not None and len(weights.dims) == 2 and weights.data_type == onnx.TensorProto.FLOAT:
            yield node, weights, turned


def _add_inputs(graph: onnx.GraphProto, layer: str, sizes: tuple[int, ...], rank: str) -> None:
    """Adds the inputs of a layer, with defaults of rank 0."""
    inputs, outputs = sizes
    shapes: dict[str, tuple[list[int | str], tuple[int, int]]] = {
        "A": ([inputs, rank], (inputs, 0)), "B": ([rank, outputs], (0, outputs)),
    }  # fmt: skip
    for part, (shape, empty) in shapes.items():
        name = _name(layer, part)
        graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
        graph.initializer.append(numpy_helper.from_array(np.zeros(empty, np.float32), name))


def _branch(node: onnx.NodeProto, layer: str, index: int) -> list[onnx.NodeProto]:
    """Returns the nodes that add (x @ A) @ B to the output of ``node``, whose own output gets another name."""
    output, x = node.output[0], node.input[0]
    base, low, high = (f"{layer}.lora/{part}_{index}" for part in ("base", "low", "high"))
    node.output[0] = base
    return [
        helper.make_node("MatMul", [x, _name(layer, "A")], [low], name=f"{low}/MatMul"),
        helper.make_node("MatMul", [low, _name(layer, "B")], [high], name=f"{high}/MatMul"),
        helper.make_node("Add", [base, high], [output], name=f"{high}/Add"),
    ]
