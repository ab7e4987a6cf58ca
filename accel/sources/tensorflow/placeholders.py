"""Sets placeholders of a frozen graph that are not inputs, such as a keep probability or a switch ``is_training``.

Only the child process that runs TensorFlow imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from accel.errors import BadInputSpec, BadSource, RandomOps
from accel.spelling import arguments, option

from .folding import folded, training_ops
from .graph import constant, operation
from .loaded import Frozen
from .source import TensorFlowSpec

_KINDS = ("Placeholder", "PlaceholderWithDefault", "PlaceholderV2")
_WORDS = {"true": True, "1": True, "false": False, "0": False}


def left_out(frozen: Frozen) -> dict[str, Any]:
    """Returns the placeholders that the outputs depend on and that are not inputs, by name."""
    nodes = {node.name: node for node in frozen.graph.node}
    inputs = {_tensor(name) for name in frozen.inputs.values()}
    found: dict[str, Any] = {}
    queue, seen = [_tensor(name) for name in frozen.outputs.values()], set()
    while queue:
        name = queue.pop()
        if name in inputs or operation(name) in seen:
            continue
        node = nodes[operation(name)]
        seen.add(node.name)
        if node.op in _KINDS:
            found[node.name] = node
        else:
            queue += [_tensor(read) for read in node.input]
    return {node.name: node for node in frozen.graph.node if node.name in found}


def _tensor(name: str) -> str:
    return name if ":" in name or name[0] == "^" else f"{name}:0"


def with_placeholders(frozen: Frozen, spec: TensorFlowSpec) -> tuple[Frozen, dict[str, str]]:
    """Returns ``frozen`` with constants in place of the placeholders that the user left out of the inputs. Also returns
    the values of these placeholders by name. A placeholder gets the user's value if the user gave a value. If
    ``spec.strip`` is True, the other placeholders get the values that suit inference. The remaining placeholders get
    their defaults.

    Raises ``BadInputSpec`` for a value that can't be set. Raises ``BadSource`` if a placeholder has no value.
    """
    needed = left_out(frozen)
    given = {name: _read(name, text, frozen, spec) for name, text in spec.placeholders}
    best, used = _at_inference(frozen, given, needed)
    values = {**given, **best} if spec.strip else given
    missing = [n for n in used if n not in values and (n in best or needed[n].op != "PlaceholderWithDefault")]
    if missing:
        raise _missing(missing, needed, best, spec)
    idle = {name: _any_value(node) for name, node in needed.items() if name not in used and name not in values}
    made = _with_defaults(_with_constants(frozen, {**idle, **values}), needed)
    return made, {name: str(value) for name, value in values.items() if name in needed}


def _missing(names: list[str], needed: Mapping[str, Any], best: Mapping[str, Any], spec: TensorFlowSpec) -> BadSource:
    """Returns the error for placeholders without a value. The error is ``RandomOps`` if ``strip_training_ops`` would
    set all these placeholders."""
    bare = spec.form != "saved_model"
    where = option("graph_inputs") if bare else "the signature"
    start = (
        f"{spec.path} needs a value for the placeholder{'s' * (len(names) > 1)} {', '.join(names)}, left out of {where}"
    )
    known = {name: best[name] for name in names if name in best}
    unknown = [name for name in names if name not in best]
    if not unknown:
        strip = option("strip_training_ops", True)
        given = option("placeholders", known)
        return RandomOps(f"{start}; pass {given} for inference, or {strip}, which sets the same")
    fixes = []
    if bare:
        added = {"graph_inputs": [*spec.inputs, *(f"{name}:0" for name in unknown)]}
        fixes.append(f"pass {arguments(**added, placeholders=known) if known else arguments(**added)}")
    if all(_shape(needed[name]) is not None for name in unknown):
        fixes.append(f"pass {option('placeholders', {**known, **dict.fromkeys(unknown, 'VALUE')})}")
    if not bare:
        fixes.append(f"save it again with {', '.join(unknown)} among the inputs of the signature")
    return BadSource(f"{start}; {', or '.join(fixes)}")


def _read(name: str, text: str, frozen: Frozen, spec: TensorFlowSpec) -> Any:
    """Converts ``text`` to a value in the dtype of the placeholder ``name``."""
    nodes = {node.name: node for node in frozen.graph.node}
    if name not in nodes or nodes[name].op not in _KINDS:
        others = ", ".join(left_out(frozen)) or "none"
        raise BadInputSpec(
            f"the outputs of the model {spec.path} depend on no placeholder {name!r}; the placeholders for "
            f"{option('placeholders')} are: {others}"
        )
    if _tensor(name) in map(_tensor, frozen.inputs.values()):
        raise BadInputSpec(
            f"the placeholder {name} is an input of the model {spec.path}; leave {name} out of {option('placeholders')}"
        )
    kind = tf.as_dtype(nodes[name].attr["dtype"].type)
    try:
        value = _WORDS[text.lower()] if kind.is_bool else text if kind == tf.string else _number(text, kind)
    except (KeyError, ValueError, OverflowError) as error:
        example = {name: False if kind.is_bool else 1 if kind.is_integer else 1.0}
        raise BadInputSpec(
            f"the placeholder {name} of {spec.path} has the dtype {kind.name} and can't take the value {text!r}; "
            f"pass e.g. {option('placeholders', example)}"
        ) from error
    if _shape(nodes[name]) is None:
        raise BadInputSpec(
            f"the placeholder {name} of {spec.path} has an unknown shape, so it can't be set; make the placeholder an "
            "input" + (f": {option('graph_inputs', [*spec.inputs, f'{name}:0'])}" if spec.inputs else "")
        )
    return value


def _number(text: str, kind: Any) -> Any:
    value = int(text) if kind.is_integer else float(text)
    np.array(value, kind.as_numpy_dtype)  # raises OverflowError
    return value


def _shape(node: Any) -> list[int] | None:
    """Returns the shape of the constant that replaces a placeholder. A placeholder of unknown rank becomes a single
    number. Returns None if the size of a dim is unknown."""
    shape = tf.TensorShape(node.attr["shape"].shape)
    if shape.rank is None:
        return []
    return shape.as_list() if shape.is_fully_defined() else None


def _with_constants(frozen: Frozen, values: Mapping[str, Any]) -> Frozen:
    """Returns ``frozen`` with each placeholder in ``values`` replaced by a constant with the placeholder's value."""
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(frozen.graph)
    for node in graph.node:
        if node.name in values:
            kind = tf.as_dtype(node.attr["dtype"].type)
            proto = tf.make_tensor_proto(values[node.name], kind, shape=_shape(node) or [])
            node.op = "Const"
            del node.input[:]
            node.attr.clear()
            node.attr["dtype"].type = kind.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(proto)
    return replace(frozen, graph=graph)


def _with_defaults(frozen: Frozen, needed: Mapping[str, Any]) -> Frozen:
    """Replaces each remaining placeholder in ``needed`` by its default, and returns ``frozen``."""
    for node in frozen.graph.node:
        if node.name in needed and node.op == "PlaceholderWithDefault":
            kind = node.attr["dtype"].type
            node.op = "Identity"
            node.attr.clear()
            node.attr["T"].type = kind
    return frozen


def _at_inference(
    frozen: Frozen, given: Mapping[str, Any], needed: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Maps the names of placeholders to their values for inference. The value for inference is the value that leaves
    the fewest training ops in the graph. Leaves out a placeholder if all its values are equally good, or if its default
    is the value for inference.

    Also returns the names of the placeholders that the outputs depend on.
    """
    found: dict[str, Any] = {}
    while True:
        now = _with_constants(frozen, {**given, **found})
        rest = left_out(folded(now))
        for name in rest:
            if name in found or (choices := _choices(needed[name])) is None:
                continue
            count = {value: training_ops(folded(_with_constants(now, {name: value}))) for value in choices}
            if len(set(count.values())) == 2:
                found[name] = min(count, key=lambda value: count[value])
                break
        else:
            used = [name for name in needed if name in rest or name in found]
            return {name: value for name, value in found.items() if value != _default(needed[name], frozen)}, used


def _default(node: Any, frozen: Frozen) -> Any:
    """Returns the default of a placeholder if the default is one constant number, else None."""
    if node.op != "PlaceholderWithDefault":
        return None
    value = constant(node.input[0], {other.name: other for other in frozen.graph.node})
    return value.item() if value is not None and value.size == 1 else None


def _any_value(node: Any) -> Any:
    """Returns a value for a placeholder that no output depends on."""
    kind = tf.as_dtype(node.attr["dtype"].type)
    return "" if kind == tf.string else kind.as_numpy_dtype(1)


def _choices(node: Any) -> tuple[Any, Any] | None:
    kind, shape = tf.as_dtype(node.attr["dtype"].type), _shape(node)
    if shape is None or np.prod(shape) != 1:
        return None
    if kind.is_bool:
        return False, True
    if kind.is_integer:
        return 0, 1
    return (0.0, 1.0) if kind.is_floating else None
