"""Rewrites a PyTorch module that computes with complex numbers, so that it computes with their real and imaginary
parts. ONNX has no operators on complex numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from ..exporters import NoComplexRule
from .fourier import Pair
from .operators import pair, rule_of

# The number of times that operators are decomposed. A decomposition may contain operators with decompositions.
_ROUNDS = 5


def in_real_numbers(module: torch.nn.Module, example: Sequence[torch.Tensor], shapes: Any) -> torch.nn.Module:
    """Returns a module that computes the same results without complex numbers. If ``module`` doesn't use complex
    numbers, returns ``module`` itself.

    ``shapes`` has the dynamic dims, as for ``torch.export.export``. Raises ``NoComplexRule`` if an operator on complex
    numbers has no rule in ``operators``.
    """
    if not _computes_with_complex(module, example):
        return module
    try:
        program = _exported(module, example, shapes)
    except Exception:  # torch.onnx.export has more ways to export a module, and reports why they fail
        return module
    return _InRealNumbers(module, _decomposed(program))


def _exported(module: torch.nn.Module, example: Sequence[torch.Tensor], shapes: Any) -> torch.export.ExportedProgram:
    words: dict[str, Any] = {"prefer_deferred_runtime_asserts_over_guards": True}  # as in torch.onnx.export
    known = inspect.signature(torch.export.export).parameters  # older versions of torch lack this parameter
    words = {name: value for name, value in words.items() if name in known}
    return torch.export.export(module, tuple(example), dynamic_shapes=shapes, strict=False, **words)


def _computes_with_complex(module: torch.nn.Module, example: Sequence[torch.Tensor]) -> bool:
    """Runs the module once, and tells whether an operator returns complex numbers."""
    found = False

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal found
            result = func(*args, **(kwargs or {}))
            found = found or tree_any(_is_complex, result)
            return result

    try:
        with torch.no_grad(), Watch():
            module(*(one.clone() for one in example))
    except Exception:  # the exporter reports why the module fails
        return False
    return found


def _is_complex(value: Any) -> bool:
    return isinstance(value, Pair | complex) or (isinstance(value, torch.Tensor) and value.is_complex())


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Decomposes the operators on complex numbers into operators that have a rule. Keeps all operators that only occur
    with real numbers."""
    known = {**torch._decomp.decomposition_table, **dict(torch.export.default_decompositions().items())}
    program = program.run_decompositions({})  # removes writes into parts of tensors
    for _ in range(_ROUNDS):
        open_ = {node.target for node in _on_complex(program) if rule_of(node.target) is None}
        table = {target: known[target] for target in open_ if target in known}
        if not table:
            break
        program = program.run_decompositions(table)
    if missing := sorted({str(node.target) for node in _on_complex(program) if rule_of(node.target) is None}):
        raise NoComplexRule(
            f"no exporter can write {missing[0]} of complex numbers in ONNX; compute it from the real and imaginary "
            "parts, which torch.view_as_real gives"
        )
    return program


def _on_complex(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    """Yields the calls that take or return complex numbers."""
    for node in program.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") != "getitem":
            values = [value.meta.get("val") for value in node.all_input_nodes]
            if any(map(_is_complex, tree_leaves([node.meta.get("val"), values, node.args, node.kwargs]))):
                yield node


class _InRealNumbers(torch.nn.Module):
    """Runs ``program``, an export of ``module``, with pairs in the place of complex tensors."""

    def __init__(self, module: torch.nn.Module, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self.module = module
        self.program = (program,)  # the tuple hides the program's copies of the weights from torch

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (program,) = self.program
        given = iter(tensors)
        inputs = [self._value(one, given) for one in program.graph_signature.input_specs]
        outputs = _Interpreter(program.graph_module).run(*inputs)
        kinds = [one.kind for one in program.graph_signature.output_specs]
        return tuple(value for value, kind in zip(outputs, kinds, strict=True) if kind is OutputKind.USER_OUTPUT)

    def _value(self, spec: Any, given: Iterator[torch.Tensor]) -> Any:
        if spec.kind is InputKind.USER_INPUT:
            return next(given)
        if spec.kind is InputKind.PARAMETER:
            return self.module.get_parameter(spec.target)
        if spec.kind is InputKind.BUFFER:
            return self.module.get_buffer(spec.target)
        return self.program[0].constants[spec.target]


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph, and computes the operators on complex numbers by the rules of ``operators``."""

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = tree_map(_paired, self.fetch_args_kwargs_from_env(n))
        target = n.target
        if any(map(_is_complex, tree_leaves([args, kwargs, n.meta.get("val")]))):
            target = rule_of(target) or target
        elif target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default  # the strides may differ from those of the complex program
        return target(*args, **kwargs)  # type: ignore[operator]


def _paired(value: Any) -> Any:
    return pair(value) if isinstance(value, torch.Tensor) and value.is_complex() else value
