"""Runs the graphs of TorchDynamo in sessions.

TorchDynamo cuts a function into graphs and passes each graph to ``accel_backend``. A graph that accel can't run stays
in eager mode, with a warning that gives the reason.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch

from accel.cache import StageCache
from accel.errors import AccelError, UsageError, one_line, shortened
from accel.runtimes.base import BaseSession, open_session
from accel.sources.source import Source, SourceOptions
from accel.sources.torch.quiet_export import one_export

from ..as_onnx import as_onnx
from ..optimize import optimize
from .weights import Weights, same_bits, unwatched

# The largest allowed relative error of a part on the inputs of its first call. The limit is high, because the export's
# gates already catch small errors.
_LIMIT = 1e-2
# A part is compiled again if its weights or sizes change. After ``_MOST_COMPILED`` compilations, the part stays in
# eager mode.
_MOST_COMPILED = 4
_OPTIONS = (
    *(name for name, one in inspect.signature(optimize).parameters.items() if one.kind is one.KEYWORD_ONLY),
    *SourceOptions.__annotations__,
)


def accel_backend(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """Returns a function that runs ``graph`` on one of accel's runtimes. If ``graph`` has to stay in eager mode,
    returns ``graph.forward``.

    ``options`` are keyword arguments of ``accel.optimize``, such as ``{"max_drop": 0.01, "budget_seconds": 60}``.
    Without ``options``, the graph is exported in its own precision and runs on ONNX Runtime. A graph stays in eager
    mode in each of these cases:

    - Gradients are on.
    - An input isn't on the CPU.
    - The graph reads a Python number that has changed since an earlier call, and isn't a whole number that the graph
      only computes with.
    - The graph writes to an input, a weight or a buffer, or returns a view of one.
    - Changes of the weights can't be found (see ``unwatched``).
    - The graph can't be exported with equal outputs.

    Raises ``UsageError`` if an option isn't a keyword argument of ``accel.optimize``. torch.compile wraps the error in
    its ``BackendCompilerFailed``.
    """
    for name in options or {}:
        if name not in _OPTIONS:
            close = get_close_matches(name, _OPTIONS, n=1)
            fix = f"write {close[0]!r}" if close else f"the options are those of accel.optimize: {', '.join(_OPTIONS)}"
            raise UsageError(f'torch.compile(backend="accel") has no option {name!r}; {fix}')
    tensors = [one for one in example_inputs if isinstance(one, torch.Tensor)]
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return _eager(graph, "gradients are on; call the model inside torch.inference_mode()")
    if where := {str(one.device.type) for one in tensors} - {"cpu"}:
        return _eager(graph, f"its tensors are on {where.pop()}; move the model to the CPU, or optimize it for the GPU")
    if any("_transformer_encoder_layer_fwd" in str(node.target) for node in graph.graph.nodes):
        fix = "call torch.backends.mha.set_fastpath_enabled(False) before the model's first call"
        return _eager(graph, f"PyTorch has fused its encoder layer into one operator, which has no ONNX form; {fix}")
    if any(node.op == "call_method" and node.target == "item" for node in graph.graph.nodes):
        # TorchDynamo passes a Python number that has changed between two calls as a tensor, and reads it in the graph.
        return _eager(graph, "it reads a Python number that changes between calls; keep the number in a tensor")
    return _Part(graph, dict(options or {}))


def _eager(graph: torch.fx.GraphModule, reason: str) -> Callable[..., Any]:
    """Warns that ``graph`` stays in eager mode, and returns ``graph.forward``."""
    count = sum(node.op in ("call_function", "call_method", "call_module") for node in graph.graph.nodes)
    size = f"{count} operator{'' if count == 1 else 's'}"
    warnings.warn(f"accel: a part of {size} stays in eager mode: {reason}", stacklevel=_user_level())
    return graph.forward


def _user_level() -> int:
    """Returns the ``stacklevel``, for a warning of the calling function, of the innermost line outside PyTorch and
    accel."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("accel", "torch"):
        frame = frame.f_back
        level += 1
    return level


def _in_user_words(error: Exception) -> str:
    """Returns the text of ``error`` in one line. Files that accel wrote to its cache are named "the compiled part", and
    lines of code that PyTorch generated are left out."""
    root = re.escape(str(StageCache().root))
    text = re.sub(rf"(the model )?{root}/[^\s:;,'\"]*", "the compiled part", one_line(error, None))
    text = re.sub(r" at <eval_with_key>\S*:\d+( and <eval_with_key>\S*:\d+)*", "", text)
    return shortened(text)


class _Part:
    """Runs one graph in a session. The session is made at the first call, and contains the weights."""

    def __init__(self, graph: torch.fx.GraphModule, options: Mapping[str, Any]) -> None:
        self._graph = graph
        self._options = options
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._sizes = [i for i, node in enumerate(nodes) if not isinstance(_value(node), torch.Tensor)]
        self._weights = [i for i, node in enumerate(nodes) if "_dynamo_static_input_type" in _about(node)]
        tensors = [i for i in range(len(nodes)) if i not in {*self._sizes, *self._weights}]
        # Maps (input, axis) to the symbol of each dynamic dim. If torch.compile fixed the size of a dim, the size is a
        # plain number and is left out of this dict.
        self._symbols = {
            (i, axis): str(size)
            for i in tensors
            for axis, size in enumerate(_value(nodes[i]).shape)
            if isinstance(size, torch.SymInt) and not str(size).isdigit()
        }
        # A whole number that isn't the size of an input is a number of the user, such as ``f(x, k=2)``, which has
        # changed between two calls. The session takes it as a tensor.
        self._numbers = {i for i in self._sizes if str(_value(nodes[i])) not in self._symbols.values()}
        self._size_symbols = {i: str(_value(nodes[i])) for i in self._sizes if i not in self._numbers}
        self._inputs = sorted({*tensors, *self._numbers}) if tensors else []
        # Maps (input, axis) to the only size that the session takes on this axis. Contains each axis that is dynamic in
        # the graph and fixed in the session.
        self._fixed: dict[tuple[int, int], int] = {}
        self._session: BaseSession | None = None
        self._run: Callable[..., Any] = self._compiled
        self._seen = Weights([])
        self._count = 0

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def _compiled(self, *args: Any) -> Any:
        """Runs the session. Makes a session at the first call, and makes a new session if a weight was replaced or
        overwritten. If the session takes only one size, also makes a new session for every other size."""
        if (
            self._session is None
            or any(args[i].shape[axis] != size for (i, axis), size in self._fixed.items())
            or self._seen.changed([args[i] for i in self._weights])
        ):
            self._count += 1
            # Inference mode is off, because PyTorch doesn't count writes to inference tensors. The runs of the
            # compilation draw no numbers from the user's generator.
            with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
                reason = "its weights or sizes change often" if self._count > _MOST_COMPILED else self._compile(args)
            if reason:
                self._run = _eager(self._graph, reason)
                return self._run(*args)
        assert self._session is not None
        return self._session(*(self._tensor(args, i) for i in self._inputs))

    def _tensor(self, args: Sequence[Any], i: int) -> torch.Tensor:
        return torch.tensor(args[i]) if i in self._numbers else args[i]

    def _compile(self, args: Sequence[Any]) -> str:
        """Makes the session and compares the session's outputs with the graph's outputs. If the graph has to stay in
        eager mode, returns the reason. Otherwise returns ""."""
        if not self._inputs:
            return "it has no inputs"
        weights = [args[i] for i in self._weights]
        if reason := unwatched(weights):
            return reason
        seen = Weights(weights)
        inputs = [self._tensor(args, i).detach().clone() for i in self._inputs]
        wanted, reason = self._tried(args, inputs)
        if reason:
            return reason
        # torch.compile may make an axis dynamic although its size is constant in this model, for example if two models
        # with the same code have different sizes. With such a dynamic axis, the exported part may fail at other sizes
        # than the example's. The export is tried with all dynamic axes, then with only axis 0 dynamic, and then with
        # fixed sizes.
        for dynamic in dict.fromkeys(
            (tuple(self._symbols), tuple(place for place in self._symbols if place[1] == 0), ())
        ):
            try:
                session = self._made(args, inputs, dynamic)
                found = session(*inputs)
            except (AccelError, OSError) as error:
                reason = reason or _in_user_words(error)
                continue
            except Exception as error:  # the exporters may raise any type of error
                reason = reason or f"{type(error).__name__}: {_in_user_words(error)}"
                continue
            if not all(map(_close, found, wanted)):
                return "its outputs differ from those of PyTorch"
            self._session = session
            self._fixed = {(i, axis): args[i].shape[axis] for i, axis in self._symbols if (i, axis) not in dynamic}
            self._seen = seen
            return ""
        if self._numbers:
            return f"it reads a Python number that changes between calls; keep the number in a tensor ({reason})"
        return reason

    def _tried(self, args: Sequence[Any], inputs: Sequence[torch.Tensor]) -> tuple[Sequence[Any], str]:
        """Returns the graph's outputs on copies of ``inputs`` and of the weights. Also returns the reason why the graph
        has to stay in eager mode because of what it writes or returns, or ""."""
        originals = {
            **{i: value for i, value in zip(self._inputs, inputs, strict=True) if i not in self._numbers},
            **{i: args[i] for i in self._weights},
        }
        copies = list(args)
        for i, value in originals.items():
            copies[i] = value.detach().clone()
        before = {i: copies[i]._version for i in originals}
        wanted: Sequence[Any] = self._graph.forward(*copies)
        # The values are compared too, because PyTorch doesn't count the writes of a batch norm to its running mean.
        written = {
            i for i, value in originals.items() if copies[i]._version != before[i] or not same_bits(copies[i], value)
        }
        if written:
            return wanted, f"it writes to its {'inputs' if written & {*self._inputs} else 'weights or buffers'}"
        if not all(isinstance(one, torch.Tensor) for one in wanted):
            return wanted, "it returns something besides tensors"
        held = {copies[i].untyped_storage().data_ptr() for i in originals}
        if any(one.untyped_storage().data_ptr() in held for one in wanted):
            return wanted, "it returns a view of an input or a weight"
        return wanted, ""

    def _made(
        self, args: Sequence[Any], inputs: Sequence[torch.Tensor], dynamic: Collection[tuple[int, int]]
    ) -> BaseSession:
        """Returns a session that runs the graph. ``dynamic`` lists the axes with dynamic sizes, as (input, axis)."""
        module = _Bound(self, self._graph, args)
        dims = dict.fromkeys(self._symbols.values(), torch.export.Dim.DYNAMIC)
        shapes = tuple(
            {axis: dims[self._symbols[i, axis]] for axis in range(value.ndim) if (i, axis) in dynamic}
            for i, value in zip(self._inputs, inputs, strict=True)
        )
        # torch.export marks the dynamic dims in the tensors themselves, and would find the marks of the last attempt.
        own = tuple(value.clone() for value in inputs)
        with one_export:
            program = torch.export.export(module, own, dynamic_shapes=(shapes,) if any(shapes) else None)
        if self._options:
            return optimize(program, **self._options).session
        return open_session(as_onnx(Source.of(program), StageCache()).artifact)


def _value(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")


def _about(node: torch.fx.Node) -> Mapping[str, Any]:
    found: Mapping[str, Any] = node.meta.get("tensor_dict") or {}
    return found


class _Bound(torch.nn.Module):
    """Wraps a graph in a module that holds the weights as buffers and reads the dynamic sizes from the inputs."""

    def __init__(self, part: _Part, graph: torch.fx.GraphModule, args: Sequence[Any]) -> None:
        super().__init__()
        self.function = graph
        self.count = len(args)
        self.inputs = part._inputs
        for i in part._weights:
            own = args[i].detach()
            # torch.export saves the whole storage of a weight that is a part of it, and warns.
            is_part = own.untyped_storage().nbytes() != own.nbytes
            self.register_buffer(f"weight_{i}", own.clone() if is_part else own)
        self.weights = part._weights
        where = {symbol: place for place, symbol in reversed(part._symbols.items())}
        self.sizes = {i: where[symbol] for i, symbol in part._size_symbols.items()}

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args: list[Any] = [None] * self.count
        for i, value in zip(self.inputs, tensors, strict=True):
            args[i] = value
        for i in self.weights:
            args[i] = getattr(self, f"weight_{i}")
        for i, (place, axis) in self.sizes.items():
            args[i] = args[place].shape[axis]
        return tuple(self.function(*args))


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    one, other = found.double().numpy(), wanted.double().numpy()
    return bool(np.linalg.norm(one - other) <= _LIMIT * np.linalg.norm(other) + 1e-12)
