"""A float32 ONNX graph retyped to float16 or bfloat16: who computes in what, and where the Casts go."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from accel.runtimes.onnx_rounded import elem_types, inlined, tensor_types
from accel.signature import numpy_dtype

FLOAT = int(TensorProto.FLOAT)
FORMATS = {"fp16": int(TensorProto.FLOAT16), "bf16": int(TensorProto.BFLOAT16)}
_NAMES = {int(TensorProto.FLOAT16): "float16", int(TensorProto.BFLOAT16): "bfloat16", FLOAT: "float32"}
_ENDINGS = {int(TensorProto.FLOAT16): "fp16", int(TensorProto.BFLOAT16): "bf16", FLOAT: "fp32"}

# Nodes for which the dtype of their float input makes no difference: they take it as it is, without a Cast.
_OBSERVERS = frozenset({"Cast", "Shape", "Size"})

# Nodes whose dtype is an attribute, or follows from one: left alone. (Random numbers would also become others.)
_GENERATORS = frozenset(
    {
        "Bernoulli", "BlackmanWindow", "EyeLike", "HammingWindow", "HannWindow", "MelWeightMatrix", "Multinomial",
        "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "SequenceEmpty",
    }
)  # fmt: skip

# Nodes that move values without computing: between two float32 nodes they stay float32 as well.
MOVEMENT = frozenset(
    {
        "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Slice", "Split",
        "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Typing:
    """How a node is typed: for each float32 input and output by position, float32 or the 16-bit format.

    A position that is not in it isn't float32, or doesn't mind. ``reason``: why nothing of it can be 16-bit.
    """

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    reason: str = ""


class Source:
    """The model before the cast and what is known about it. ``model`` is left as it is."""

    def __init__(self, model: onnx.ModelProto, low: int) -> None:
        self.model = inlined(model)
        self.low = low
        self.nodes = list(self.model.graph.node)
        self.typed = tensor_types(self.model).graph
        self.types = elem_types(self.typed)
        self.opsets = {o.domain if o.domain != "ai.onnx" else "": int(o.version) for o in self.model.opset_import}
        self.constants = {t.name: t for t in self.model.graph.initializer if t.data_type == FLOAT}
        self.producer: dict[str, int] = {}
        self.consumers: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            if (value := constant_value(node)) is not None:
                self.constants[node.output[0]] = value
                self.types[node.output[0]] = FLOAT
            for name in filter(None, node.output):
                self.producer[name] = index
            for name in dict.fromkeys(filter(None, (*node.input, *captured(node)))):
                self.consumers.setdefault(name, []).append(index)
        self.outputs = [value.name for value in self.model.graph.output]
        self._typings = [self._typing(node) for node in self.nodes]

    def is_float(self, name: str) -> bool:
        return self.types.get(name) == FLOAT

    def is_constant_node(self, index: int) -> bool:
        return self.nodes[index].op_type == "Constant" and self.nodes[index].output[0] in self.constants

    def typing(self, index: int) -> Typing:
        """How node ``index`` is typed if nothing forbids it."""
        return self._typings[index]

    def castable(self, index: int) -> bool:
        typing = self._typings[index]
        return self.low in typing.inputs.values() or self.low in typing.outputs.values()

    def label(self, index: int) -> str:
        """What a person calls the node: its name, or what it makes."""
        node = self.nodes[index]
        return node.name or f"{node.op_type} -> {next(filter(None, node.output), '')}"

    def _typing(self, node: NodeProto) -> Typing:
        floats_in = [i for i, name in enumerate(node.input) if self.is_float(name)]
        floats_out = [i for i, name in enumerate(node.output) if self.is_float(name)]
        stay = Typing(dict.fromkeys(floats_in, FLOAT), dict.fromkeys(floats_out, FLOAT))
        if node.op_type == "Constant" or not (floats_in or floats_out):
            return stay
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            return Typing(stay.inputs, stay.outputs, "it holds a subgraph, which stays float32")
        if node.domain not in ("", "ai.onnx"):
            return Typing(stay.inputs, stay.outputs, f"{node.domain}.{node.op_type} is not an ONNX operator")
        if any(name and name not in self.types for name in (*node.input, *node.output)):
            return Typing(stay.inputs, stay.outputs, "one of its tensors has no known dtype")
        if node.op_type in _GENERATORS:
            return Typing(stay.inputs, stay.outputs, f"{node.op_type} says its dtype itself")
        if node.op_type == "Cast":
            to = next(a.i for a in node.attribute if a.name == "to")
            return Typing({}, {0: self.low} if to == FLOAT else {})
        if node.op_type in _OBSERVERS:
            return Typing({}, stay.outputs)
        if node.op_type == "ConstantOfShape":
            return Typing({}, dict.fromkeys(floats_out, self.low))
        return self._by_schema(node, floats_in, floats_out)

    def _by_schema(self, node: NodeProto, floats_in: list[int], floats_out: list[int]) -> Typing:
        schema = onnx.defs.get_schema(node.op_type, self.opsets[""], "")
        wanted = f"tensor({_NAMES[self.low]})"
        allowed = {c.type_param_str: wanted in c.allowed_type_strs for c in schema.type_constraints}

        def formal(formals: list[onnx.defs.OpSchema.FormalParameter], position: int) -> str:
            return formals[min(position, len(formals) - 1)].type_str

        variables = {i: formal(list(schema.inputs), i) for i in floats_in}
        low = {v for v in variables.values() if allowed.get(v)}
        # The format that DequantizeLinear gives follows its scale, unless an attribute says otherwise.
        follows = node.op_type == "DequantizeLinear" and not any(a.name == "output_dtype" for a in node.attribute)
        inputs = {i: self.low if v in low else FLOAT for i, v in variables.items()}
        outputs = {}
        for i in floats_out:
            variable = formal(list(schema.outputs), i)
            tied = variable in low or (follows and allowed.get(variable, False) and self.low in inputs.values())
            outputs[i] = self.low if tied else FLOAT
        if self.low in inputs.values():
            return Typing(inputs, outputs)
        return Typing(inputs, outputs, self._refusal(node.op_type, floats_in))

    def _refusal(self, op_type: str, floats_in: list[int]) -> str:
        """Why the schema at this opset has no 16-bit form, and the opset at which it has one."""
        name, wanted = _NAMES[self.low], f"tensor({_NAMES[self.low]})"
        for opset in range(self.opsets[""] + 1, onnx.defs.onnx_opset_version() + 1):
            schema = onnx.defs.get_schema(op_type, opset, "")
            variables = {formal.type_str for formal in list(schema.inputs)[: len(floats_in)]}
            if any(c.type_param_str in variables and wanted in c.allowed_type_strs for c in schema.type_constraints):
                return f"{op_type} takes {name} from opset {opset}, the model has {self.opsets['']}"
        return f"{op_type} takes no {name}"


def constant_value(node: NodeProto) -> TensorProto | None:
    """The float32 tensor that a Constant node makes; None for any other node."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    attribute = node.attribute[0]
    if attribute.name == "value" and attribute.t.data_type == FLOAT:
        return attribute.t
    if attribute.name == "value_float":
        return numpy_helper.from_array(np.array(attribute.f, np.float32), node.output[0])
    if attribute.name == "value_floats":
        return numpy_helper.from_array(np.array(attribute.floats, np.float32), node.output[0])
    return None


def captured(node: NodeProto) -> list[str]:
    """Names that the subgraphs of ``node`` take from around it."""
    return list(dict.fromkeys(name for graph in _subgraphs(node) for name in _free_names(graph)))


def _subgraphs(node: NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _free_names(graph: onnx.GraphProto) -> Iterator[str]:
    own = {t.name for t in graph.initializer} | {v.name for v in graph.input}
    for node in graph.node:
        yield from (n for n in (*node.input, *captured(node)) if n and n not in own)
        own.update(node.output)
    yield from (v.name for v in graph.output if v.name not in own)


def _rename_free(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Give tensors from around ``graph`` their new names inside it."""
    own = {t.name for t in graph.initializer} | {v.name for v in graph.input}
    for node in graph.node:
        visible = {old: new for old, new in names.items() if old not in own}
        for position, name in enumerate(node.input):
            node.input[position] = visible.get(name, name)
        for inner in _subgraphs(node):
            _rename_free(inner, visible)
        own.update(node.output)


def to_low(value: np.ndarray, low: int) -> np.ndarray:
    """``value`` rounded to the format. What is finite stays finite: a mask of -1e9 becomes the lowest finite number."""
    import ml_dtypes

    kind = numpy_dtype(_NAMES[low])
    top = float(ml_dtypes.finfo(kind).max)
    bounded = np.where(np.isfinite(value), np.clip(value, -top, top), value)
    return bounded.astype(kind)


def largest(low: int) -> float:
    """The format's largest finite number."""
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(_NAMES[low])).max)


@dataclass
class Retyped:
    """The model after the cast. ``kept``: nodes that compute in float32; ``casts``: how many Casts were put in."""

    model: onnx.ModelProto
    kept: frozenset[int]
    casts: int
    native: Mapping[str, int]


def retype(source: Source, kept: Collection[int], *, keep_io: bool) -> Retyped:
    """``source`` with every float32 node in the 16-bit format but those in ``kept`` and those that have no such form."""
    everything = frozenset(kept) | _between(source, frozenset(kept))
    return _Writer(source, everything, keep_io).write()


def _between(source: Source, kept: frozenset[int]) -> frozenset[int]:
    """Nodes that only move values from float32 nodes to float32 nodes: casting there and back would round for nothing."""

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
    """Emits the retyped graph. ``have``: the name under which a tensor is there in a format."""

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
        return Retyped(self._model(native, kinds), self.kept, self.casts, native)

    def _typing(self, index: int) -> Typing:
        typing = self.source.typing(index)
        if index not in self.kept:
            return typing
        node = self.source.nodes[index]
        floats = (i for i, name in enumerate(node.input) if self.source.is_float(name))
        return Typing(dict.fromkeys(floats, FLOAT), dict.fromkeys(typing.outputs, FLOAT))

    def _native(self) -> dict[str, int]:
        """The format that each float32 tensor that is no constant is made in."""
        source = self.source
        native = {v.name: self.outer for v in source.model.graph.input if source.is_float(v.name)}
        for index, node in enumerate(source.nodes):
            native |= {node.output[i]: kind for i, kind in self._typing(index).outputs.items()}
        return {name: kind for name, kind in native.items() if name not in source.constants}

    def _constant_kinds(self) -> dict[str, list[int]]:
        """The formats that each constant is wanted in; as it is, where nobody wants it."""
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
        for graph in _subgraphs(new):
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
        """The name of the tensor in the format; a Cast is put in where it isn't there yet."""
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

    def _model(self, native: Mapping[str, int], kinds: Mapping[str, list[int]]) -> onnx.ModelProto:
        """The header of the source around the new nodes, with the declared dtypes brought up to date."""
        source = self.source
        model = onnx.ModelProto()
        for name, value in source.model.ListFields():
            if name.name not in ("graph", "functions"):
                getattr(model, name.name).extend(value) if name.is_repeated else setattr(model, name.name, value)
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
        del native, kinds
        return model
