"""Finds the lines at which a model turns values of its inputs into Python numbers.

A tracing exporter would record the example's numbers as constants.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

from .rewrite import Rewrite, Span, branch, rewrite

if TYPE_CHECKING:
    import torch

# The methods of a tensor that return Python numbers, or an array of numbers.
_READS = (
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("__format__", "__repr__", "__str__", "__contains__"),
)
# Operators whose results have a size that depends on values.
_SIZED = ("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive")
# Operators whose results depend on the shapes of their arguments, but not on the values.
SHAPE_ONLY = ("_like", "new_empty", "new_full", "new_ones", "new_zeros")
_LIBRARIES = ("torch", "numpy", "accel")
# The modules that may be on the call stack between the user's line and the method that reads the tensor.
_METHODS = ("torch._tensor", "torch._tensor_str", "torch.overrides", __name__)


@dataclass(frozen=True)
class Place:
    """A line of the user's code that reads values of the inputs, and a rewrite of the line that uses only tensors."""

    file: str
    line: int
    rewrite: Rewrite

    @property
    def where(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        text = " ".join(self.rewrite.text.split())
        instead = f" instead of `{text if len(text) <= 80 else text[:77] + '...'}`" if text else ""
        return f"at {self.where} {self.rewrite.fix}{instead}"


@dataclass
class _Found:
    """``values`` has the tensors that depend on values of the inputs. ``sizes`` has the tensors whose size depends on
    values of the inputs.

    ``spans`` has the places in the user's code that read a tensor in ``values``. ``others`` has the lines that read a
    tensor outside ``values``.
    """

    values: _Storages = field(default_factory=lambda: _Storages())
    sizes: _Storages = field(default_factory=lambda: _Storages())
    spans: dict[tuple[str, Span], None] = field(default_factory=dict)
    others: set[tuple[str, int]] = field(default_factory=set)


class _Storages(dict[int, Any]):
    """Maps addresses to the storages of tensors. A tensor and its views share a storage.

    The dict keeps the storages alive, so that no new storage gets the same address.
    """

    def add(self, value: Any) -> None:
        if _is_strided(value):
            storage = value.untyped_storage()
            self[storage._cdata] = storage

    def has(self, value: Any) -> bool:
        return _is_strided(value) and value.untyped_storage()._cdata in self


def _is_strided(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def places(module: torch.nn.Module, example: Sequence[Any], branches: Collection[tuple[str, int]] = ()) -> list[Place]:
    """Runs ``module`` on ``example``, and returns the places at which ``module`` reads values of its inputs.

    A place that only prints or checks values is left out, because it doesn't change the outputs. A place is also left
    out if the tensors that it reads are independent of the inputs, such as buffers. ``branches`` has the files and
    lines of branches that only a tracing exporter sees, such as a branch on a size that depends on values.
    """
    import torch

    found = _Found()
    tensors = [value.clone() if isinstance(value, torch.Tensor) else value for value in example]
    for tensor in tensors:
        found.values.add(tensor)
    try:
        with torch.no_grad(), _follow(found), _watch(found):
            module(*tensors)
    except Exception:  # the exporters report why the model fails
        pass
    made = [Place(file, span[0], one) for file, span in found.spans if (one := rewrite(file, span))]
    lines = found.others | {(file, span[0]) for file, span in found.spans}
    made += [Place(file, line, one) for file, line in set(branches) - lines if (one := branch(file, line))]
    return list(dict.fromkeys(made))


@contextlib.contextmanager
def during_export() -> Iterator[None]:
    """Within the ``with`` block, ``torch.compiler.is_exporting()`` and ``is_compiling()`` are true."""
    import torch

    names = [name for name in ("_is_exporting_flag", "_is_compiling_flag") if hasattr(torch.compiler, name)]
    with mock.patch.dict(vars(torch.compiler), dict.fromkeys(names, True)):
        yield


def _follow(found: _Found) -> Any:
    """Returns a dispatch mode that adds the results of an operator to ``found.values`` if an argument of the operator
    is in ``found.values``."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Follow(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func._schema.name.partition("::")[2]
            given = tree_leaves((args, kwargs or {}))
            made = tree_leaves(result) + (given if func._schema.is_mutable else [])
            if not name.endswith(SHAPE_ONLY) and any(map(found.values.has, given)):
                for value in made:
                    found.values.add(value)
                if name in _SIZED or any(map(found.sizes.has, given)):
                    for value in made:
                        found.sizes.add(value)
            return result

    return Follow()


def _watch(found: _Found) -> Any:
    """Returns a torch function mode that notes the line of the user's code for every read of values."""
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if args and (name in _READS or (name == "unbind" and found.sizes.has(args[0]))):
                frame = users_frame(sys._getframe(1))
                if frame is not None:
                    file, line = frame.f_code.co_filename, frame.f_lineno
                    first, last, start, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
                    if found.values.has(args[0]):
                        found.spans[file, (first or line, last, start, end)] = None
                    else:
                        found.others.add((file, line))
            return func(*args, **(kwargs or {}))

    return Watch()


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the code that reads a tensor, or None if this code belongs to a library.

    The exporters support the functions of the libraries in ``_LIBRARIES``.
    """
    while frame is not None and frame.f_globals.get("__name__", "") in _METHODS:
        frame = frame.f_back
    package, _, rest = frame.f_globals.get("__name__", "").partition(".") if frame else ("torch", "", "")
    return frame if package not in _LIBRARIES or (package == "accel" and rest.startswith("examples")) else None
