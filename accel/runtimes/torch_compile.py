"""Runs modules with ``torch.compile``, the second baseline of a benchmark."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from accel.artifact import Artifact
from accel.errors import BuildFailed, UnsupportedHere
from accel.progress import report
from accel.signature import Feeds

from .base import SessionOptions
from .torch_eager import TorchSession

if TYPE_CHECKING:
    import numpy as np

# The modules that this process has compiled. torch caches the compiled code of these modules.
_compiled: WeakSet[torch.nn.Module] = WeakSet()


class TorchCompileSession(TorchSession):
    """Runs a module in eval mode on the CPU, compiled by ``torch.compile`` with its default settings.

    The first run compiles the module, which takes seconds to minutes. The first run at a new shape compiles the module
    again, unless torch already treats the changed dim as dynamic. A session never falls back to eager mode. Raises
    ``BuildFailed`` with torch's reason if compiling fails. Raises ``UnsupportedHere`` if there is no C++ compiler, or
    if torch finds nothing to compile in the module. ``graph_breaks`` counts the places where the compiled code returns
    to Python.
    """

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            raise UnsupportedHere(
                f"torch.compile needs the C++ compiler {compiler}, which is not on the PATH; "
                "install the compiler, set CXX to another compiler, or use the runtime torch"
            )
        super().__init__(artifact, options)
        self._original = self.module.module
        if isinstance(self._original, torch.jit.ScriptModule):
            raise UnsupportedHere(
                f"torch.compile can't compile the TorchScript in {artifact.path}; use the runtime torch"
            )
        # With ``dynamic=None``, torch assumes static dims until a dim varies.
        dynamic = None if artifact.signature.dims else False
        with _torch_warns_of_itself():
            compiled: Any = torch.compile(self._original, dynamic=dynamic)
        self.module.module = compiled
        self.graph_breaks = 0
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        shapes = tuple(feeds[spec.name].shape for spec in self.signature.inputs)
        if shapes not in self._shapes:
            outputs = self._compile(feeds)
            self._shapes.add(shapes)
            return outputs
        return super()._run(feeds)

    def _compile(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Compiles the module for the shapes of ``feeds`` and runs it. Raises errors that torch would only log."""
        from torch._dynamo import config
        from torch._dynamo.utils import counters

        report("torch.compile: compiling")
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        try:
            # By default, torch logs a line after too many recompilations and runs the module in eager mode.
            with config.patch(fail_on_recompile_limit_hit=True, suppress_errors=False), _torch_warns_of_itself():
                outputs = self._run_bare(feeds)
        except Exception as error:
            raise BuildFailed(
                f"torch.compile failed on {self.artifact.path} ({_reason(error)}); use the runtime torch"
            ) from error
        if counters["stats"]["unique_graphs"] == graphs and self._original not in _compiled:
            raise UnsupportedHere(
                f"torch.compile found nothing to compile in {self.artifact.path}; use the runtime torch"
            )
        _compiled.add(self._original)
        self.graph_breaks += sum(counters["graph_break"].values()) - breaks
        if self.graph_breaks:
            report(f"torch.compile: {self.graph_breaks} graph breaks; the code between the parts runs in Python")
        return outputs


@contextmanager
def _torch_warns_of_itself() -> Iterator[None]:
    """Hides the deprecation warnings that torch's compiler triggers inside torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


def _reason(error: BaseException) -> str:
    """Returns the innermost cause of an error in one line. The line includes a C++ compiler's output, but not torch's
    debugging advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:1]
    if "Output:" in lines[:-1]:
        said.append(lines[lines.index("Output:") + 1])
    return ": ".join([type(error).__name__, *said])[:300]
