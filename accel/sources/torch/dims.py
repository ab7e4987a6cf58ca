"""Converts the dims of a signature for ``torch.export``, and reads the sizes at which an exported program is valid."""

from __future__ import annotations

from typing import Any

import torch

from accel.signature import DimRange, Signature
from accel.signature.conditions import Condition

# torch.export treats the sizes 0 and 1 as constants, so its conditions may leave these sizes out without a reason.
_TRACED = 2
# A bound of torch.export that is at least this large means that any size is valid.
_ANY_SIZE = 1 << 24


def export_dim(name: str, bounds: DimRange, *, open_end: bool = False) -> torch.export.Dim:
    """Returns a ``torch.export.Dim`` with the name ``name`` and the range ``bounds``. If ``open_end`` is True, the dim
    has no upper bound. A dim with a step becomes ``step`` times another dim, so that the exported program records the
    step.
    """
    step = bounds.step
    most = None if open_end else bounds.max // step
    steps = torch.export.Dim(name if step == 1 else f"_{name}", min=bounds.min // step, max=most)
    return steps if step == 1 else step * steps


def conditions_on_sizes(program: torch.export.ExportedProgram, signature: Signature) -> list[str]:
    """Returns the conditions on sizes under which ``program`` equals its source (see ``accel.signature.conditions``),
    as torch.export recorded them. ``signature`` has the program's inputs in their order. Leaves out conditions that
    hold at all sizes, and conditions that need more than integer arithmetic."""
    import sympy
    from torch.utils._sympy.functions import FloorDiv
    from torch.utils._sympy.printers import PythonPrinter

    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    dims: dict[Any, Any] = {}
    environment: Any = None
    for name, spec in zip(program.graph_signature.user_inputs, signature.inputs, strict=False):
        value = values.get(name) if isinstance(name, str) else None
        sizes: list[Any] = list(value.shape) if isinstance(value, torch.Tensor) else []
        for dim, size in zip(spec.shape, sizes, strict=False):
            if isinstance(dim, str) and dim.isidentifier() and dim in signature.dims and not isinstance(size, int):
                environment = size.node.shape_env
                step, symbol = size.node.expr.as_coeff_Mul()
                # With this assumption, sympy finds out which conditions always hold.
                signs = {"positive": True} if signature.dims[dim].min else {"nonnegative": True}
                named = sympy.Symbol(dim, integer=True, **signs)
                dims.setdefault(symbol, named if step == 1 else FloorDiv(named, step))
    if environment is None:
        return []
    recorded = [one.expr for one in environment.guards]
    recorded += [one.expr for group in environment.deferred_runtime_asserts.values() for one in group]
    for symbol in dims:
        if (ends := program.range_constraints.get(symbol)) is not None:
            recorded += [symbol >= ends.lower] if ends.lower > _TRACED else []
            recorded += [symbol <= ends.upper] if ends.upper < _ANY_SIZE else []
    # A condition on a size that depends on values has a symbol that is no dim of an input.
    known = [one for one in recorded if one.free_symbols and one.free_symbols <= set(dims) and not _of_tracing(one)]
    plain = [found for one in known if (found := _plain(one).xreplace(dims)) is not sympy.true]
    texts = dict.fromkeys(PythonPrinter().doprint(one) for one in plain)
    return [text for text in texts if Condition.allows(text)]


def _plain(condition: Any) -> Any:
    """Returns ``n <= 512`` for ``min(512, n) == n``, which torch.export records for a slice of a table of 512 rows."""
    import sympy
    from torch.utils._sympy.functions import Min

    if isinstance(condition, sympy.Eq):
        for one, other in (condition.args, condition.args[::-1]):
            if isinstance(one, Min | sympy.Min) and other in one.args:
                return sympy.And(*(other <= limit for limit in one.args if limit != other))
    return condition


def _of_tracing(condition: Any) -> bool:
    """Tells whether ``condition`` only says that a size isn't 0 or 1."""
    import sympy

    if not isinstance(condition, sympy.Ne):
        return False
    return any(one in (0, 1) for one in condition.args) and any(one.is_Symbol for one in condition.args)
