"""Retypes a float32 ONNX graph to float16 or bfloat16: sets the dtype of each node, and inserts Casts between nodes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from accel.sources.onnx.weights import is_detached, rounded_later

from ..graph.subgraphs import captured, subgraphs
from .source import FLOAT, FORMATS, Source, Typing, to_low

_ENDINGS = {FORMATS["fp16"]: "fp16", FORMATS["bf16"]: "bf16", FLOAT: "fp32"}

# Operators that move values without computing. If the nodes before and after such an operator are float32, the operator
# stays float32 too.
MOVEMENT = frozenset(
    {
        "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Slice", "Split",
        "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip


@dataclass
class Retyped:
    """The model after the cast. ``kept`` has the indices of the float32 nodes. ``casts`` counts the inserted Casts."""

    model: onnx.ModelProto
    kept: frozenset[int]
    casts: int


def retype(source: Source, kept: Collection[int], *, keep_io: bool) -> Retyped:
    """Returns ``source`` in the 16-bit format. Nodes in ``kept`` and nodes that can't compute in 16 bits stay
    float32."""
    everything = frozenset(kept) | _between(source, frozenset(kept))
    return _Writer(source, everything, keep_io).write()


def _between(source: Source, kept: frozenset[int]) -> frozenset[int]:
    """Returns the nodes that only move values between float32 nodes. If such a node were 16-bit, the Casts before and
    after the node would only lose precision."""

    def wants_float(index: int, name: str) -> bool:
        typing = source.typing(index)
        places = [i for i, used in enumerate(source.nodes[index].input) if used == name]
        return index in kept or index in found or all(typing.inputs.get(i) == FLOAT for i in places)

    def gives_float(name: str) -> bool:
        index = source.producer.get(name)
        return name in source.constants or (index is not None and (index in kept or index in found))

    found = {i for i, n in enumerate(source.nodes) if n.op_type in MOVEMENT and i not in kept and source.castable(i)}
    changed = bool(kept)
    while changed:
        changed = False
        for index in sorted(found):
            node = source.nodes[index]
            floats = [name for name in node.input if source.is_float(name)]
            users = [(user, name) for name in node.output for user in source.consumers.get(name, [])]
            inward = any(name not in source.constants for name in floats) and all(map(gives_float, floats))
            if not (inward and users and all(wants_float(user, name) for user, name in users)):
                found.discard(index)
                changed = True
    return frozenset(found) if kept else frozenset()


@dataclass
class _Writer:
    """Writes the retyped graph. ``have`` maps each pair of a tensor's old name and a dtype to the tensor's new name in
    this dtype."""

    source: Source
    kept: frozenset[int]
    keep_io: bool
    have: dict[tuple[str, int], str] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    casts: int = 0

    def write(self) -> Retyped:
        source, low = self.source, self.source.low
        self.used = {*source.types, *source.producer, *(t.name for t in source.model.graph.initializer)}
        self.outer = FLOAT if self.keep_io else low
        native = self._native()
        self.final = {name for name in source.outputs if source.is_float(name)}
        kinds = self._constant_kinds()
        for name in (v.name for v in source.model.graph.input if source.is_float(v.name)):
            self.have[name, native[name]] = name
        for tensor in source.model.graph.initializer:
            if tensor.name in source.constants:
                self.constants += [made for _, made in self._constant_forms(tensor.name, kinds)]
            else:
                self.constants.append(tensor)
        for index, node in enumerate(source.nodes):
            self._emit(index, node, kinds)
        for name in self.final:
            self._get(name, self.outer)
        return Retyped(self._model(), self.kept, self.casts)

    def _typing(self, index: int) -> Typing:
        typing = self.source.typing(index)
        if index not in self.kept:
            return typing
        node = self.source.nodes[index]
        floats = (i for i, name in enumerate(node.input) if self.source.is_float(name))
        return Typing(dict.fromkeys(floats, FLOAT), dict.fromkeys(typing.outputs, FLOAT))

    def _native(self) -> dict[str, int]:
        """Returns the dtype in which each float32 tensor is computed. Leaves out constants."""
        source = self.source
        native = {v.name: self.outer for v in source.model.graph.input if source.is_float(v.name)}
        for index, node in enumerate(source.nodes):
            native |= {node.output[i]: kind for i, kind in self._typing(index).outputs.items()}
        return {name: kind for name, kind in native.items() if name not in source.constants}

    def _constant_kinds(self) -> dict[str, list[int]]:
        """Returns the dtypes in which each constant is needed. A constant that no node reads stays float32."""
        kinds: dict[str, set[int]] = {name: set() for name in self.source.constants}
        for index, node in enumerate(self.source.nodes):
            typing = self._typing(index)
            for position, name in enumerate(node.input):
                if name in kinds:
                    kinds[name].add(typing.inputs.get(position, FLOAT))
            for name in captured(node):
                if name in kinds:
                    kinds[name].add(FLOAT)
        for name in self.final & kinds.keys():
            kinds[name].add(self.outer)
        return {name: sorted(found) or [FLOAT] for name, found in kinds.items()}

    def _constant_forms(self, name: str, kinds: Mapping[str, list[int]]) -> Iterator[tuple[str, TensorProto]]:
        tensor = self.source.constants[name]
        main = self.outer if name in self.final else kinds[name][0]
        for kind in kinds[name]:
            form = name if kind == main else self._fresh(name, kind)
            self.have[name, kind] = form
            if kind == FLOAT and form == tensor.name:
                yield form, tensor
            elif is_detached(tensor):
                yield form, rounded_later(tensor, kind, form)
            else:
                value = numpy_helper.to_array(tensor)
                yield form, numpy_helper.from_array(value if kind == FLOAT else to_low(value, kind), form)

    def _emit(self, index: int, node: NodeProto, kinds: Mapping[str, list[int]]) -> None:
        source = self.source
        if source.is_constant_node(index):
            for form, tensor in self._constant_forms(node.output[0], kinds):
                name = node.name if form == node.output[0] else f"{node.name or 'Constant'}/{form}"
                self.nodes.append(helper.make_node("Constant", [], [form], name=name, value=tensor))
            return
        typing = self._typing(index)
        new = NodeProto()
        new.CopyFrom(node)
        for position, kind in typing.inputs.items():
            new.input[position] = self._get(node.input[position], kind)
        for position, name in enumerate(node.input):
            if position not in typing.inputs and source.is_float(name):
                new.input[position] = self._any(name)
        names = {n: self._get(n, FLOAT) for n in captured(node) if source.is_float(n)}
        for graph in subgraphs(new):
            _rename_free(graph, names)
        for position, kind in typing.outputs.items():
            name = node.output[position]
            if name:
                other = name in self.final and kind != self.outer
                new.output[position] = self._fresh(name, kind) if other else name
                self.have[name, kind] = new.output[position]
        if source.low in typing.outputs.values():
            self._retype_attributes(new)
        self.nodes.append(new)

    def _retype_attributes(self, node: NodeProto) -> None:
        low = self.source.low
        if node.op_type == "Cast":
            next(a for a in node.attribute if a.name == "to").i = low
        elif node.op_type == "ConstantOfShape":
            value = next((a for a in node.attribute if a.name == "value"), None)
            number = numpy_helper.to_array(value.t) if value else np.zeros(1, np.float32)
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(to_low(number, low))))

    def _get(self, name: str, kind: int) -> str:
        """Returns the name of the tensor in the dtype ``kind``. Inserts a Cast if the tensor doesn't exist in the dtype
        ``kind`` yet."""
        if (name, kind) in self.have:
            return self.have[name, kind]
        new = name if name in self.final and kind == self.outer else self._fresh(name, kind)
        self.nodes.append(helper.make_node("Cast", [self._any(name)], [new], name=f"Cast/{new}", to=kind))
        self.casts += 1
        self.have[name, kind] = new
        return new

    def _any(self, name: str) -> str:
        return next(self.have[name, kind] for kind in (self.source.low, FLOAT) if (name, kind) in self.have)

    def _fresh(self, name: str, kind: int) -> str:
        base = f"{name}/{_ENDINGS[kind]}"
        found = next(
            n for n in itertools.chain([base], (f"{base}.{i}" for i in itertools.count(2))) if n not in self.used
        )
        self.used.add(found)
        return found

    def _model(self) -> onnx.ModelProto:
        """Returns a model with the new nodes and the source's header. The model declares the new dtypes."""
        source = self.source
        model = onnx.ModelProto()
        for name in ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string"):
            if source.model.HasField(name):
                setattr(model, name, getattr(source.model, name))
        model.opset_import.extend(source.model.opset_import)
        model.metadata_props.extend(source.model.metadata_props)
        graph = model.graph
        graph.name, graph.doc_string = source.model.graph.name, source.model.graph.doc_string
        graph.node.extend(self.nodes)
        graph.initializer.extend(self.constants)
        graph.sparse_initializer.extend(source.model.graph.sparse_initializer)
        graph.metadata_props.extend(source.model.graph.metadata_props)
        graph.quantization_annotation.extend(source.model.graph.quantization_annotation)
        made = {self.have[name, kind]: kind for name, kind in self.have}
        for old, new in ((source.model.graph.input, graph.input), (source.model.graph.output, graph.output)):
            for declared in old:
                value = new.add()
                value.CopyFrom(declared)
                if source.is_float(declared.name):
                    value.type.tensor_type.elem_type = made[declared.name]
        for declared in source.model.graph.value_info:
            if declared.name in source.types and declared.name not in {v.name for v in graph.output}:
                value = graph.value_info.add()
                value.CopyFrom(declared)
                if source.is_float(declared.name) and declared.name in made:
                    value.type.tensor_type.elem_type = made[declared.name]
        return model


def _rename_free(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Renames the outer tensors that the subgraph ``graph`` reads."""
    own = {t.name for t in graph.initializer} | {v.name for v in graph.input}
    for node in graph.node:
        visible = {old: new for old, new in names.items() if old not in own}
        for position, name in enumerate(node.input):
            node.input[position] = visible.get(name, name)
        for inner in subgraphs(node):
            _rename_free(inner, visible)
        own.update(node.output)
