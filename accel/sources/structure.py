"""Describes the nested structure of a model's arguments and result as JSON values.

A template is a JSON value in which each tensor is replaced by its name, as in ``{"tensor": "x"}``. Other values and
containers have the templates ``{"value": 2}``, ``{"list": [...]}``, ``{"tuple": [...]}`` and ``{"dict": [[key,
template], ...]}``. Dataclasses and named tuples have the template ``{"class": "module:Name", "fields": [[name,
template], ...]}``.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from accel.errors import BadFeeds, shortened

Template = Mapping[str, Any]

# The packages that define the classes of model outputs. accel imports the output classes named in a manifest only from
# these packages, because a manifest may name any module, and importing a module runs its code.
_IMPORTED_FROM = ("transformers", "diffusers", "torch")
PLAIN = (bool, int, float, str, type(None))


def is_array(value: Any) -> bool:
    """Tells whether ``value`` is a tensor of PyTorch or TensorFlow, or a numpy array."""
    if isinstance(value, type) or not hasattr(value, "dtype"):
        return False
    return getattr(value, "is_nested", False) is True or hasattr(value, "shape")  # a nested tensor has no shape


def describe(
    value: Any,
    name: str = "",
    *,
    strict: bool = False,
    names: Mapping[str, str] | None = None,
    taken: set[str] | None = None,
) -> tuple[Template, dict[str, Any]]:
    """Returns the template of ``value``, and the tensors in ``value`` by name.

    A tensor is named after its key in a dict, or after its field in a dataclass or a named tuple. The only tensor of a
    result is called ``output``, and the tensors in a tuple or a list are called ``output_0``, ``output_1``... If
    ``name`` is given, ``name`` replaces ``output``, and tensors named after keys or fields are called ``<name>_<key>``.
    An object that has no template becomes None, or raises ``BadFeeds`` if ``strict`` is set. ``names`` maps the names
    of tensors to new names. ``taken`` holds the names of earlier tensors, and gets the names of these tensors. A tensor
    whose name is taken, as in ``{"a_b": x, "a": {"b": y}}``, gets a number behind its name.
    """
    taken = set() if taken is None else taken
    if is_array(value):
        name = name or "output"
        name = next(
            one for one in itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2))) if one not in taken
        )
        taken.add(name)
        name = (names or {}).get(name, name)
        return {"tensor": name}, {name: value}
    if isinstance(value, PLAIN):
        return {"value": value}, {}
    items = items_of(value)
    if items is None:
        if strict:
            raise BadFeeds(
                f"the argument {name} has the type {type(value).__name__}; give tensors, numbers, strings, or "
                "containers of them (tuple, list or dict)"
            )
        return {"value": None}, {}
    found: dict[str, Any] = {}
    inner: list[tuple[Any, Template]] = []
    sequence = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    single = sequence and sum(item is not None for _, item in items) == 1
    for key, item in items:
        prefix = f"{name}_{key}" if name else f"output_{key}" if sequence else str(key)
        template, tensors = describe(item, name if single else prefix, strict=strict, names=names, taken=taken)
        inner.append((key, template))
        found |= tensors
    if sequence:
        return {"list" if isinstance(value, list) else "tuple": [template for _, template in inner]}, found
    if type(value) is dict or not _made_by_fields(value, dict(items)):
        return {"dict": [list(pair) for pair in inner]}, found
    kind = type(value)
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": [list(pair) for pair in inner]}, found


def _made_by_fields(value: Any, fields: Mapping[Any, Any]) -> bool:
    """Tells whether the class of ``value`` can be called with its fields as keyword arguments. Returns False for a
    tokenizer's output, which is described as a dict."""
    try:
        type(value)(**fields)
    except Exception:  # a class may raise any type of error
        return False
    return True


def items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the keys and items of a container, or None for any other object."""
    if isinstance(value, Mapping):  # an output of transformers is both a mapping and a dataclass
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    return list(enumerate(value)) if isinstance(value, tuple | list) else None


def items_of_template(template: Template) -> list[tuple[Any, Template]]:
    """Returns the keys and templates of the items of a container, or an empty list for a tensor or a constant."""
    kind, body = next(iter(template.items()))
    if kind in ("tensor", "value"):
        return []
    pairs = enumerate(body) if kind in ("list", "tuple") else template["fields"] if kind == "class" else body
    return [(key, item) for key, item in pairs]


def fill(template: Template, tensors: Mapping[str, Any]) -> Any:
    """Builds the object that ``template`` describes, with the tensors of ``tensors`` in place of their names.

    A class that this process may not import becomes a namespace with the same fields.
    """
    kind, body = next(iter(template.items()))
    if kind == "tensor":
        return tensors[body]
    if kind == "value":
        return body
    if kind in ("list", "tuple"):
        made = [fill(item, tensors) for item in body]
        return made if kind == "list" else tuple(made)
    if kind == "dict":
        return {key: fill(item, tensors) for key, item in body}
    fields = {key: fill(item, tensors) for key, item in template["fields"]}
    return _class(body)(**fields)


def _class(path: str) -> Callable[..., Any]:
    """Returns the dataclass, named tuple or mapping class at ``path``, or ``SimpleNamespace`` if there is no such
    class."""
    module, _, name = path.partition(":")
    try:
        known = sys.modules.get(module)
        if known is None and module.partition(".")[0] in _IMPORTED_FROM:
            known = importlib.import_module(module)
        kind = operator.attrgetter(name)(known)
    except (ImportError, AttributeError):
        return SimpleNamespace
    fits = isinstance(kind, type) and (
        dataclasses.is_dataclass(kind)
        or issubclass(kind, Mapping)
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    )
    return kind if fits else SimpleNamespace


def constants_in(template: Template, name: str = "") -> dict[str, Any]:
    """Returns the constants in the template of a result, such as numbers and strings, by names like those of tensors
    (see ``describe``)."""
    kind, body = next(iter(template.items()))
    if kind == "tensor":
        return {}
    if kind == "value":
        return {} if body is None else {name or "output": body}
    sequence = kind in ("list", "tuple")
    found: dict[str, Any] = {}
    for key, item in items_of_template(template):
        found |= constants_in(item, f"{name}_{key}" if name else f"output_{key}" if sequence else str(key))
    return found


def arguments_of(
    parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], rest: str = ""
) -> dict[str, Any]:
    """Maps the names of ``parameters`` to the arguments of a call. ``rest`` is the name of a ``*args`` parameter, which
    takes the further positional arguments as a tuple.

    Raises ``BadFeeds`` if there are too many arguments, or if an argument is given twice.
    """
    if len(args) > len(parameters) and not rest:
        takes = ", ".join(parameters) or "none"
        raise BadFeeds(f"{len(args)} arguments are given, but the model takes only the arguments {takes}")
    named = dict(zip(parameters, args, strict=False))
    if len(args) > len(parameters):
        named[rest] = tuple(args[len(parameters) :])
    if twice := set(named) & set(kwargs):
        raise BadFeeds(f"the argument {sorted(twice)[0]!r} is given twice; give it once")
    return {**named, **kwargs}


def tensors_in(
    templates: Mapping[str, Template],
    given: Mapping[str, Any],
    defaults: Mapping[str, str] | None = None,
    left_out: Mapping[str, Template] | None = None,
) -> dict[str, Any]:
    """Returns a dict of all tensors in the arguments ``given``. The arguments must match ``templates``. ``defaults``
    holds the defaults of the model's function that differ from the constants in ``templates``, as texts. ``left_out``
    holds the defaults of the arguments that aren't in ``templates``. Such an argument may be given with its default.

    Raises ``BadFeeds`` if an argument's structure or a constant in an argument differs from the template, or if an
    argument is left out whose default differs.
    """
    usual = {name: template for name, template in (left_out or {}).items() if isinstance(given.get(name), PLAIN)}
    if unknown := [name for name in given if name not in templates and name not in usual]:
        takes = ", ".join(templates)
        raise BadFeeds(
            f"the model was exported without the argument {unknown[0]!r}; give only the arguments {takes}, or export "
            f"the model again with an example that has {unknown[0]!r}"
        )
    found: dict[str, Any] = {}
    for name, template in {**templates, **usual}.items():
        if name in given:
            found |= _match(template, given[name], name)
        elif _has_tensor(template):
            raise BadFeeds(f"the argument {name!r} is missing; the model takes {', '.join(templates)}")
        elif name in (defaults or {}):
            value = fill(template, {})
            raise BadFeeds(
                f"the argument {name!r} is left out and has the default {(defaults or {})[name]}, but was {value!r} "
                f"when the model was exported; give {name}={value!r}, or export the model again with the default"
            )
    return found


def _has_tensor(template: Template) -> bool:
    return "tensor" in template or any(_has_tensor(item) for _, item in items_of_template(template))


def _match(template: Template, value: Any, where: str) -> dict[str, Any]:
    kind, body = next(iter(template.items()))
    if kind == "tensor":
        if not is_array(value):
            raise BadFeeds(f"the argument {where} is a {type(value).__name__}; give a tensor or an array")
        return {body: value}
    if kind == "value":
        if isinstance(value, PLAIN) and value == body:
            return {}
        said = shortened(repr(value), 40) if isinstance(value, PLAIN) else f"a {type(value).__name__}"
        raise BadFeeds(
            f"the argument {where} is {said}, but was {body!r} when the model was exported, so the model always uses "
            f"the value {body!r}; give {body!r}, or export the model again with another value of {where}"
        )
    items = items_of(value)
    if items is None:
        raise BadFeeds(f"the argument {where} is a {type(value).__name__}, but the model takes a {kind}")
    wanted = dict(template["fields"] if kind == "class" else body if kind == "dict" else enumerate(body))
    given = dict(items)
    if set(wanted) != set(given):
        has, takes = (", ".join(map(str, keys)) for keys in (given, wanted))
        raise BadFeeds(f"the argument {where} has the items {has}, but must have the items {takes}")
    found: dict[str, Any] = {}
    for key, item in wanted.items():
        found |= _match(item, given[key], f"{where}[{key!r}]")
    return found
