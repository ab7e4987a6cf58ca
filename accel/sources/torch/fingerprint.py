"""Hashes a module's weights, code and attributes."""

from __future__ import annotations

import hashlib
import inspect
import io
import sys
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from accel.artifact import file_sha256
from accel.errors import BadSource

from ..python_object import is_installed

# The attributes that every PyTorch module has. The hash leaves these attributes out. ``state_sha256`` hashes the
# parameters and buffers.
_OWN = {
    "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
    "_version", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_compiled_call_impl",
}  # fmt: skip

# Attributes of transformers that the hash leaves out: where a model was found, because a model that was moved is the
# same model, and Python's hash of a generation config, which differs between runs.
_NOT_THE_MODEL = {"name_or_path", "_name_or_path", "_commit_hash", "_original_object_hash"}


def state_sha256(module: torch.nn.Module) -> str:
    """Returns the sha256 of the names, dtypes, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Returns the sha256 of the dtype, shape and bytes of ``tensor``."""
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode() + bytes(_bytes(tensor))).hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of ``tensor`` as uint8[bytes]. A dim of size 1 may have any stride in a contiguous tensor, such
    as ``tokens[:, 0]`` of one row, but torch only views a tensor of stride 1 as bytes."""
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return as_bytes(tensor.cpu()).numpy().data


def code_and_attributes_sha256(module: torch.nn.Module) -> str:
    """Returns the sha256 of the class, the code and the attributes of ``module`` and all its submodules.

    A class of an installed package is hashed by its file and the version of the package. Any other class is hashed by
    the bytecode of its functions. The hash also covers the functions, classes and values that the hashed functions use
    by name, also those of other modules. An object is hashed by the parts from which ``pickle`` makes a copy. The hash
    doesn't use a pickle of the whole module, because the pickle's bytes differ between two runs of the same program.

    Raises ``BadSource`` if the attributes are nested too deeply.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return hashlib.sha256(script_bytes(module)).hexdigest()
    walk = _Walk()
    try:
        _add_modules(walk, module)
    except RecursionError as error:
        raise BadSource(
            f"the attributes of {type(module).__name__} are nested too deeply to compare them; remove the nested "
            "attribute, such as a linked list"
        ) from error
    return walk.digest.hexdigest()


def _add_modules(walk: _Walk, module: torch.nn.Module) -> None:
    for name, part in module.named_modules(remove_duplicate=False):
        walk.add("module", name)
        walk.kind(type(part))
        is_graph = isinstance(part, torch.fx.GraphModule)
        if is_graph:
            walk.value(type(part).forward)  # the class is of torch, and its code was made for this module
        for key, value in vars(part).items():
            if key not in _OWN | _NOT_THE_MODEL and (not is_graph or isinstance(value, torch.Tensor)):
                walk.add(key)
                # Hashes the hooks without their ids. Torch counts the ids over all modules of a process, so the id of
                # a hook differs between runs.
                walk.value(list(value.values()) if key.startswith("_forward_") else value)
        walk.value({key: part._buffers[key] for key in sorted(part._non_persistent_buffers_set)})
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and vars(tensor):  # attributes that the user's code sets
                walk.add(key)
                walk.value(dict(vars(tensor)))
    walk.value([list(hooks.values()) for hooks in (_global_forward_pre_hooks, _global_forward_hooks)])


def function_sha256(function: Any) -> str:
    """Returns the sha256 of a function's code and of all functions, classes and plain values that the code uses by
    name."""
    walk = _Walk()
    walk.value(function)
    return walk.digest.hexdigest()


def script_bytes(module: torch.jit.ScriptModule) -> bytes:
    """Returns the bytes of the file that ``torch.jit.save`` writes for a TorchScript module."""
    body = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides the warning that TorchScript is deprecated
        torch.jit.save(module, body)
    return body.getvalue()


class _Walk:
    """Adds objects to one digest. Adds the content of an object only once, and later only a number that stands for the
    object."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._entered: set[tuple[Any, ...]] = set()  # the modules whose attributes were looked up, with the names
        self._kept: list[Any] = []  # keeps the objects alive, so that no id is used twice

    def add(self, *texts: str) -> None:
        for text in texts:
            self.digest.update(f"{len(text)} {text}\n".encode(errors="backslashreplace"))

    def value(self, value: Any) -> None:
        if value is None or type(value) in (bool, int, float, complex, str):
            self.add(type(value).__name__, repr(value))
        elif type(value) in (bytes, bytearray):
            self.add(type(value).__name__, str(len(value)))
            self.digest.update(value)
        elif isinstance(value, torch.dtype | torch.device | torch.Size | types.EllipsisType | slice):
            self.add(str(value))
        elif id(value) in self._seen:
            self.add("seen", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
            self._object(value)

    def _object(self, value: Any) -> None:
        self.add(type(value).__module__, type(value).__qualname__)
        if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_nested):
            self._parts(value)
        elif isinstance(value, torch.Tensor):
            try:
                self.add(tensor_sha256(value))
            except RuntimeError:  # a tensor without values, such as one on the device "meta"
                self.add(str(value.dtype), str(tuple(value.shape)))
            self.value(dict(vars(value)))
        elif isinstance(value, type):
            self.kind(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__)
            self.value(value.__self__)
        elif isinstance(value, torch.jit.ScriptFunction):
            self.add(str(value.code))
        elif isinstance(value, types.ModuleType):
            self.add(value.__name__, _version(value.__name__))
        elif isinstance(value, types.BuiltinFunctionType):
            self.add(value.__name__)
            self.value(value.__self__)  # the object of a method, or the module of a function
        elif isinstance(value, torch.nn.Module):
            self.kind(type(value))
            self.value(dict(vars(value)))
        elif type(value) is dict or isinstance(value, types.MappingProxyType):
            self._all(pair for item in value.items() for pair in item)
        elif type(value) in (set, frozenset):
            self._all(sorted(value, key=repr))
        elif type(value) in (list, tuple):
            self._all(value)
        else:
            self._parts(value)

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.value(value)

    def _parts(self, value: Any) -> None:
        """Adds the parts from which ``pickle`` makes a copy of ``value``. They also cover slots, the arguments of a
        ``functools.partial``, and the attributes of a subclass of ``list`` or ``str``. If an object can't be pickled,
        adds its class and its attributes."""
        self.kind(type(value))
        try:
            parts = value.__reduce_ex__(4)
        except Exception:  # an object may raise any type of error
            self.value(dict(vars(value)) if hasattr(value, "__dict__") else None)
            return
        if isinstance(parts, str):  # the name of a global
            self.add(parts)
            self.value(getattr(value, "__wrapped__", None))  # the function behind functools.lru_cache
            return
        make, arguments, *rest = parts
        self.value(make)
        self.value(arguments)
        state, elements, pairs = [*rest, None, None, None][:3]
        self.value({k: v for k, v in state.items() if k not in _NOT_THE_MODEL} if type(state) is dict else state)
        self.value(list(elements or ()))
        self.value(list(pairs or ()))

    def kind(self, kind: type) -> None:
        """Adds the names and the code of a class and its base classes to the digest."""
        for base in kind.__mro__:
            if id(base) in self._seen and base is not kind:
                continue
            self._seen.setdefault(id(base), len(self._seen))
            self.add(base.__module__, base.__qualname__)
            if base.__module__.partition(".")[0] in ("builtins", "torch"):
                continue
            if is_installed(base.__module__):
                file = _source_file(base)
                self.add(file_sha256(Path(file)) if file and Path(file).is_file() else "", _version(base.__module__))
                continue
            for name, member in sorted(vars(base).items()):
                if name not in ("__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__"):
                    self.add(name)
                    inner = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
                    self.value(inner if not isinstance(inner, types.GetSetDescriptorType) else name)

    def _function(self, function: types.FunctionType) -> None:
        if is_installed(function.__module__ or "") and _has_its_name(function):
            self.add(function.__module__, function.__qualname__, _version(function.__module__))
            return
        self._code(function.__code__, function.__globals__)
        self.value(function.__defaults__)
        self.value(function.__kwdefaults__)
        self.value(vars(function))
        for cell in function.__closure__ or ():
            self.value(_content(cell))

    def _code(self, code: types.CodeType, names: Mapping[str, Any]) -> None:
        self.digest.update(code.co_code)
        self.add(*code.co_names, *code.co_varnames, *code.co_freevars)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, names)
            else:
                self.value(constant)
        self._named(code.co_names, names)

    def _named(self, wanted: Sequence[str], names: Mapping[str, Any]) -> None:
        """Adds the values that a code uses by name. A name may also be an attribute of one of the user's modules that
        the code uses, and a module may be imported in the code itself."""
        for name in wanted:
            if name not in names and name not in sys.modules:
                continue
            value = names.get(name, sys.modules.get(name))
            self.value(value)
            lookup = (id(value), *wanted)
            if isinstance(value, types.ModuleType) and not is_installed(value.__name__) and lookup not in self._entered:
                self._entered.add(lookup)
                self._named(wanted, {key: one for key, one in vars(value).items() if not key.startswith("__")})


def _has_its_name(function: types.FunctionType) -> bool:
    """Tells whether the name of a function stands for the function. The name of a lambda, or of a function made by
    another function, stands for many functions."""
    found: Any = sys.modules[function.__module__]
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _version(module: str) -> str:
    """Returns the version of the package of a module, or "" if the package has none."""
    return str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", ""))


def _source_file(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except TypeError:  # a class of Python itself, such as itertools.repeat, has no file
        return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None
