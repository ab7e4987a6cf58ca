"""``LocalControl`` runs the commands of ``Control`` in this process."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from accel.errors import AccelError, BadRepository

from ..models.config import ModelConfig, parse_json
from ..models.model import ServedModel
from ..models.repository import Repository
from ..protocol.inference import Code, Parameter, ServeError, StatisticsRow
from .control import Command, Control
from .cuda_regions import CudaRegion
from .settings import LogSettings, TraceSettings
from .shared_memory import OwnedMemory, Region
from .uploads import Uploads


class LocalControl:
    """Changes the repository, the shared memory and the settings of one process. Any thread can call the methods."""

    def __init__(self, repository: Repository, memory: OwnedMemory, trace: TraceSettings, logging: LogSettings) -> None:
        self._repository, self._memory, self.trace, self.logging = repository, memory, trace, logging
        self.uploads = Uploads()
        self.counters: list[Callable[[], Mapping[str, int]]] = []  # of the transports
        self._configs: dict[str, str] = {}  # maps each model to the config of the last load command

    def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        sent = self.uploads.store(name, files) if files else None
        try:
            with _as_invalid():
                self._repository.load(name, read_config(name, config), sent)
        except BaseException:
            if sent is not None:
                shutil.rmtree(sent.path, ignore_errors=True)
            raise
        self._configs.pop(name, None)
        if config is not None:
            self._configs[name] = config
        if sent is not None:
            self.uploads.keep(name, sent)
        else:
            self.uploads.drop(name)

    def unload(self, name: str, dependents: bool) -> None:
        with _as_invalid():
            self._repository.unload(name, dependents)
        self._configs.pop(name, None)
        self.uploads.drop(name)

    def unload_others(self, kept: Collection[str]) -> None:
        with _as_invalid():
            for name in set(self._repository.loaded()) - set(kept):
                self._repository.unload(name)

    def register_memory(self, owner: str, name: str, key: str, offset: int, byte_size: int) -> None:
        self._memory.of(owner).register(name, key, offset, byte_size)

    def unregister_memory(self, owner: str, name: str) -> None:
        self._memory.of(owner).unregister(name, Region)

    def register_cuda_memory(self, owner: str, name: str, handle: bytes, device: int, byte_size: int) -> None:
        with _as_invalid():
            self._memory.of(owner).register_cuda(name, handle, device, byte_size)

    def unregister_cuda_memory(self, owner: str, name: str) -> None:
        with _as_invalid():
            self._memory.of(owner).unregister(name, CudaRegion)

    def change_trace_settings(self, model: str, changes: Mapping[str, list[str] | None]) -> None:
        self.trace.change(model, changes)

    def change_log_settings(self, changes: Mapping[str, Parameter]) -> None:
        self.logging.change(changes)

    def statistics(self, models: Sequence[ServedModel]) -> list[StatisticsRow]:
        """Returns the statistics of ``models`` in this process."""
        return [(model.name, model.version, model.statistics()) for model in models]

    def counts(self) -> dict[str, int]:
        """Returns what the transports of this process have counted."""
        found: Counter[str] = Counter()
        for count in self.counters:
            found.update(count())
        return dict(found)

    def statistics_of(self, versions: Collection[tuple[str, str]]) -> list[StatisticsRow]:
        """Returns the statistics of each version in ``versions`` that this process has loaded. ``versions`` holds pairs
        of a model's name and a version."""
        return self.statistics([m for m in self._repository.models() if (m.name, m.version) in versions])

    def commands(self) -> list[Command]:
        """Returns the commands that bring a new process of the same server into the state of this process."""
        found: list[Command] = []
        if self._repository.mode == "explicit":
            loaded = self._repository.loaded()
            found += [
                Command.of(Control.load, name, self._configs.get(name), self.uploads.files(name)) for name in loaded
            ]
            found.append(Command.of(Control.unload_others, loaded))
        for owner, region in self._memory.regions():
            if isinstance(region, Region):
                found.append(
                    Command.of(Control.register_memory, owner, region.name, region.key, region.offset, region.byte_size)
                )
            else:
                found.append(
                    Command.of(
                        Control.register_cuda_memory,
                        owner,
                        region.name,
                        region.handle,
                        region.device,
                        region.byte_size,
                    )
                )
        found += [Command.of(Control.change_trace_settings, *change) for change in self.trace.changed().items()]
        logging_changes = {key: value for key, value in self.logging.all().items() if key != "log_file"}
        return [*found, Command.of(Control.change_log_settings, logging_changes)]


def read_config(name: str, text: str | None) -> ModelConfig | None:
    """Returns the config that a load command sent as JSON, or None if ``text`` is None. Raises ``ServeError``
    INVALID_ARGUMENT if ``text`` is not a ModelConfig."""
    if text is None:
        return None
    try:
        return parse_json(text, "the config in the request")
    except BadRepository as error:
        raise ServeError(Code.INVALID_ARGUMENT, f"failed to load '{name[:256]}', {error}") from None


@contextlib.contextmanager
def _as_invalid() -> Iterator[None]:
    """Raise accel's own errors as ``ServeError`` INVALID_ARGUMENT, which the server sends to the client."""
    try:
        yield
    except ServeError:
        raise
    except AccelError as error:
        raise ServeError(Code.INVALID_ARGUMENT, str(error)) from None
