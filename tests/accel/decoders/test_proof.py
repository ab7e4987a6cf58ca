"""Proves that the gate of decoders finds faults in the cache, the mask and the positions, and passes a right model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact
from accel.decoders.proof import DecoderGate, scenarios
from accel.sources.source import Source
from tests.support.small_decoder import save_decoder


@dataclass(frozen=True)
class Made:
    """A decoder, as it was opened and as it was exported."""

    source: Artifact
    exported: Artifact


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @cache
    def make(kind: str) -> Made:
        folder = save_decoder(tmp_path_factory.mktemp("decoder") / kind, kind)
        exported = accel.export(folder, out=tmp_path_factory.mktemp("exported") / kind)
        return Made(Source(folder, decoder=True).open(), exported)

    return make


Edit = Callable[[onnx.ModelProto], None]


def _input_through(name: str, *nodes: onnx.NodeProto) -> Edit:
    """Returns an edit that puts ``nodes`` between the input ``name`` and its readers. The last node writes
    ``<name>_new``."""

    def edit(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for index, value in enumerate(node.input):
                if value == name:
                    node.input[index] = f"{name}_new"
        for position, node in enumerate(nodes):
            model.graph.node.insert(position, node)

    return edit


def _output_through(name: str, op: str, *inputs: str, **attributes: object) -> Edit:
    """Returns an edit that puts a node between the value ``name`` and the output ``name``."""

    def edit(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for values in (node.input, node.output):
                for index, value in enumerate(values):
                    if value == name:
                        values[index] = f"{name}_old"
        model.graph.node.append(helper.make_node(op, [f"{name}_old", *inputs], [name], **attributes))

    return edit


def _constant(name: str, value: np.ndarray) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(value, name))

    return edit


def _swapped(model: onnx.ModelProto) -> None:
    names = {"present.1.key": "present.1.value", "present.1.value": "present.1.key"}
    for node in model.graph.node:
        for values in (node.input, node.output):
            for index, value in enumerate(values):
                values[index] = names.get(value, value)


def _other_base(model: onnx.ModelProto) -> None:
    """Changes the constant of the rotary frequencies, which has 1 as its largest number and halves of the head."""
    changed = 0
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor)
        if value.dtype == np.float32 and value.size == 4 and value.max() == 1.0 and 0 < value.min() < 0.01:
            tensor.CopyFrom(numpy_helper.from_array(value**1.1, tensor.name))
            changed += 1
    assert changed


def _cast(model: onnx.ModelProto) -> None:
    """Rounds the output of every matrix product to bfloat16."""
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type in ("MatMul", "Gemm"):
            name = node.output[0]
            node.output[0] = f"{name}_exact"
            nodes.append(helper.make_node("Cast", [f"{name}_exact"], [f"{name}_bf16"], to=TensorProto.BFLOAT16))
            nodes.append(helper.make_node("Cast", [f"{name}_bf16"], [name], to=TensorProto.FLOAT))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


ORDER = np.array([1, 0], np.int64)
# The shape of the mask and of the positions is kept, but their values are not.
ALL_SEEN = [
    helper.make_node("Shape", ["attention_mask"], ["mask_shape"]),
    helper.make_node(
        "ConstantOfShape", ["mask_shape"], ["attention_mask_new"], value=numpy_helper.from_array(np.array([1]))
    ),
]
COUNTED = [
    helper.make_node("Shape", ["input_ids"], ["ids_shape"]),
    helper.make_node("ConstantOfShape", ["ids_shape"], ["ones"], value=numpy_helper.from_array(np.array([1]))),
    helper.make_node("Shape", ["past_key_values.0.key"], ["past_length"], start=2, end=3),
    helper.make_node("CumSum", ["ones", "axis_one"], ["counted"], exclusive=1),
    helper.make_node("Add", ["counted", "past_length"], ["position_ids_new"]),
]
FAULTS: dict[str, list[Edit]] = {
    "the cache of a layer is shifted by one token": [
        _constant("shift", np.array([0, 0, 1, 0, 0, 0, -1, 0], np.int64)),
        _output_through("present.0.key", "Pad", "shift"),
    ],
    "positions ignore the padding": [
        _constant("axis_one", np.array(1, np.int64)), _input_through("position_ids", *COUNTED),
    ],
    "the mask is pruned": [_input_through("attention_mask", *ALL_SEEN)],
    "the rotary base is wrong": [_other_base],
    "keys and values of a layer are swapped": [_swapped],
    "heads of keys are mapped wrongly": [
        _constant("order", ORDER), _output_through("present.1.key", "Gather", "order", axis=1),
    ],
    "products are rounded to bfloat16": [_cast],
}  # fmt: skip


# Rotary positions may begin at any number, so only a model with learned positions shows whether padding is counted.
KINDS = {"positions ignore the padding": "gpt2"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Fails if the gate passes a decoder with the fault."""
    right = made(KINDS.get(fault, "llama"))
    model = onnx.load(right.exported.path)
    for edit in FAULTS[fault]:
        edit(model)
    onnx.save(model, tmp_path / "model.onnx")
    faulty = Source(tmp_path / "model.onnx").open()
    results = DecoderGate(limit=1e-4, context=160).check(right.source, faulty)
    failed = [result.case for result in results if not result.passed]
    assert failed, [(result.case, result.value) for result in results]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_right_decoder_passes_every_scenario(kind: str, made: Callable[[str], Made]) -> None:
    """Fails if a scenario is left out, or its error is above rounding."""
    results = DecoderGate(limit=1e-5, context=160).check(made(kind).source, made(kind).exported)
    assert [result.case for result in results if not result.passed] == []
    assert {scenario.name for scenario in scenarios(160)} < {result.case for result in results}
