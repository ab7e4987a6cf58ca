"""Hashes a module's weights, code and attributes."""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
import types
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from accel.artifact import combined_sha256, file_sha256

from ..python_object import is_installed

# The attributes that every PyTorch module has. The hash leaves these attributes out. ``state_sha256`` hashes the
# parameters and buffers.
_OWN = {
    "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
    "_version", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_compiled_call_impl",
}  # fmt: skip


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


def code_sha256(module: torch.nn.Module) -> str:
    """Returns the sha256 of the files that define the classes of the module and its submodules."""
    files = set()
    for kind in {type(m) for m in module.modules()}:
        try:
            files.add(inspect.getfile(kind))
        except (TypeError, OSError):
            continue
    return combined_sha256(sorted({file_sha256(Path(f)) for f in files if Path(f).is_file()}) or [""])


def code_and_attributes_sha256(module: torch.nn.Module) -> str:
    """Returns the sha256 of the class, the code and the attributes of ``module`` and all its submodules.

    A class of an installed package is hashed by its file. Any other class is hashed by the bytecode of its functions.
    The hash also covers the functions, classes and plain values that the hashed functions use as globals. An object
    that can't be pickled and has no ``__dict__`` is hashed by the name of its class. The hash doesn't use a
    pickle of the whole module, because the pickle's bytes differ between two runs of the same program.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return hashlib.sha256(script_bytes(module)).hexdigest()
    walk = _Walk()
    for name, part in module.named_modules(remove_duplicate=False):
        walk.add("module", name)
        walk.kind(type(part))
        for key, value in vars(part).items():
            if key not in _OWN:
                walk.add(key)
                # Hashes the hooks without their ids. Torch counts the ids over all modules of a process, so the id of
                # a hook differs between runs.
                walk.value(list(value.values()) if key.startswith("_forward_") else value)
        walk.value({key: part._buffers[key] for key in sorted(part._non_persistent_buffers_set)})
    return walk.digest.hexdigest()


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
        self._kept: list[Any] = []  # keeps the objects alive, so that no id is used twice

    def add(self, *texts: str) -> None:
        for text in texts:
            self.digest.update(f"{len(text)} {text}\n".encode(errors="backslashreplace"))

    def value(self, value: Any) -> None:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self.add(type(value).__name__, repr(value))
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
        if isinstance(value, torch.Tensor):
            self.add(tensor_sha256(value))
        elif isinstance(value, type):
            self.kind(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__)
            self.value(value.__self__)
        elif isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            self.add(value.__name__)
        elif isinstance(value, Mapping):
            self._all(pair for item in value.items() for pair in item)
        elif isinstance(value, set | frozenset):
            self._all(sorted(value, key=repr))
        elif isinstance(value, list | tuple):
            self._all(value)
        elif not self._pickled(value) and hasattr(value, "__dict__"):
            self.kind(type(value))
            self.value(dict(vars(value)))

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.value(value)

    def _pickled(self, value: Any) -> bool:
        """Adds the pickle of ``value`` to the digest if the class of ``value`` is from an installed package. Returns
        False for any other class, because a pickle doesn't contain the code of the class."""
        if isinstance(value, torch.nn.Module) or not is_installed(type(value).__module__):
            return False
        try:
            self.digest.update(pickle.dumps(value))
        except Exception:  # an object may raise any type of error
            return False
        return True

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
                self.add(file_sha256(Path(file)) if file and Path(file).is_file() else "")
                continue
            for name, member in sorted(vars(base).items()):
                if name not in ("__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__"):
                    self.add(name)
                    inner = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
                    self.value(inner if not isinstance(inner, types.GetSetDescriptorType) else name)

    def _function(self, function: types.FunctionType) -> None:
        if is_installed(function.__module__ or ""):
            self.add(function.__module__, function.__qualname__)
            return
        self._code(function.__code__, function.__globals__)
        self.value(function.__defaults__)
        self.value(function.__kwdefaults__)
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
        for name in code.co_names:
            if name in names:
                self.value(names[name])


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
