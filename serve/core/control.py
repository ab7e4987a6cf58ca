"""Defines ``Control``. The methods of ``Control`` are the commands that change a running server. Inference and queries
are not commands.

A server may consist of several processes, and each command has to run in every process. A process sends a command to
another process as a ``Command``. A ``Command`` holds a method's name and the method's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..models.model import ServedModel
from ..protocol.inference import Code, Parameter, ServeError, StatisticsRow


class Control(Protocol):
    """Each method raises ``ServeError`` if the command is refused or fails. ``owner`` is the name of the token that
    owns a region of shared memory, or "" on a server without tokens."""

    def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load or reload a model. ``config`` is a ModelConfig as JSON that replaces the model's ``config.pbtxt``.
        ``files`` maps paths to files that replace the files in the model's folder. Without ``files``, the model is
        loaded from its own folder."""

    def unload(self, name: str, dependents: bool) -> None:
        """Unload a model. ``dependents=True`` also unloads the steps of an ensemble."""

    def unload_others(self, kept: Collection[str]) -> None:
        """Unload every model whose name is not in ``kept``."""

    def register_memory(self, owner: str, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register ``byte_size`` bytes of the POSIX shared memory object ``key``, starting at ``offset``."""

    def unregister_memory(self, owner: str, name: str) -> None:
        """Forget the region ``name`` of POSIX shared memory, or every region of ``owner`` if ``name`` is empty."""

    def register_cuda_memory(self, owner: str, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Register the ``byte_size`` bytes that the CUDA IPC ``handle`` shares on the GPU ``device``."""

    def unregister_cuda_memory(self, owner: str, name: str) -> None:
        """Forget the region ``name`` of GPU memory, or every region of ``owner`` if ``name`` is empty."""

    def change_trace_settings(self, model: str, changes: Mapping[str, list[str] | None]) -> None:
        """Change the trace settings of ``model``, or of the server if ``model`` is empty. None clears a setting."""

    def change_log_settings(self, changes: Mapping[str, Parameter]) -> None:
        """Change the log settings of the server."""


class Processes(Control, Protocol):
    """Represents all processes of one server. A command runs in every process."""

    def statistics(self, models: Sequence[ServedModel]) -> list[StatisticsRow]:
        """Returns the statistics of ``models``, summed over the processes."""

    def counts(self) -> dict[str, int]:
        """Returns what the transports have counted, summed over the processes."""


COMMANDS = frozenset(name for name in vars(Control) if not name.startswith("_"))


class Command(NamedTuple):
    """Holds a call of one method of ``Control``. The call can be pickled and sent to another process."""

    name: str
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, method: Callable[..., None], *arguments: Any) -> Command:
        """Returns the command that calls the method ``method`` of ``Control`` with ``arguments``."""
        return cls(method.__name__, arguments)

    def run(self, control: Control) -> None:
        """Call the command's method on ``control``. Raises ``ServeError`` UNIMPLEMENTED if ``Control`` has no method
        with the command's name."""
        if self.name not in COMMANDS:
            raise ServeError(Code.UNIMPLEMENTED, f"unknown command {self.name!r}")
        getattr(control, self.name)(*self.arguments)
