"""Loads, reloads and unloads the models of a repository: once at the start, by polling, or by command.

When a new version replaces an old version, the old version still answers its accepted requests. If a version fails to
load, the old version keeps serving and the index gives the reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel.errors import AccelError, BadRepository, one_line

from ..protocol.inference import Code, ServeError
from .config import ModelConfig
from .ensembles.config import StepMissing, step_names, steps_first
from .entries import READY, UNLOADED, Entry, IndexRow
from .files import ModelFolder, valid_name, valid_version
from .loading import Loading, load_version
from .model import ServedModel, unknown
from .places import Places, RepositoryFolder

log = logging.getLogger("accel.serve")

MODES = ("none", "poll", "explicit")


class Repository:
    """Holds the models in ``places``: a folder that contains a folder for each model, or single models.

    Mode ``none`` loads all models once. Mode ``poll`` also looks for changes every ``poll_seconds`` seconds. Mode
    ``explicit`` loads the models in ``startup`` at the start, and other models by command. The name ``*`` in
    ``startup`` means all models. A replaced or unloaded version has ``drain`` seconds to answer its accepted requests.
    The function ``refresh`` updates the folder, or one model's folder, from a remote address. ``refresh`` returns the
    error of each failed model.
    """

    def __init__(
        self,
        places: Path | Places,
        *,
        mode: str = "none",
        startup: Sequence[str] = (),
        loading: Loading | None = None,
        poll_seconds: float = 15.0,
        drain: float = 30.0,
        refresh: Callable[[str | None], Mapping[str, str]] | None = None,
    ) -> None:
        self._places: Places = RepositoryFolder(places) if isinstance(places, Path) else places
        if not self._places.reachable():
            raise BadRepository(f"{places} is not a folder; give a folder with one subfolder for each model")
        if mode not in MODES:
            raise BadRepository(f"unknown mode {mode!r}; use one of {', '.join(MODES)}")
        self.mode, self.drain = mode, drain
        self._fetch = refresh
        self._unfetched: dict[str, str] = {}
        self._startup = tuple(startup)
        self._loading = replace(loading or Loading(), get=self.get)
        self._poll_seconds = poll_seconds
        self._entries: dict[str, Entry] = {}
        # Requests look up models in ``_table``. The table is replaced as a whole, so that a lookup needs no lock.
        self._table: dict[str, dict[str, ServedModel]] = {}
        self._lock = threading.Lock()
        self._control = threading.Lock()  # serializes all loads and unloads
        self._stop = threading.Event()
        self._poller: threading.Thread | None = None
        self._retiring: list[threading.Thread] = []
        self.started = False
        self.changed: Callable[[], None] = lambda: None  # called after changes that may make a model serve or fail

    # Looking up

    def get(self, name: str, version: str = "") -> ServedModel:
        """Returns the requested version, by default the newest. Raises ``ServeError`` (NOT_FOUND, UNAVAILABLE,
        INVALID_ARGUMENT) if the version isn't served."""
        versions = self._table.get(name)
        if version and not valid_version(version):
            raise ServeError(
                Code.INVALID_ARGUMENT,
                f"failed to get model version from specified version string '{version[:64]}', "
                "version should be an integral value > 0",
            )
        if not versions:
            self._raise_missing(name)
        assert versions is not None
        found = versions.get(version or next(reversed(versions)))
        if found is None:
            entry = self._entries.get(name)
            if entry and version in entry.failed:
                raise ServeError(
                    Code.UNAVAILABLE,
                    f"Request for unknown model: '{name}' version {version} is not at ready state",
                )
            raise unknown(name, version)
        return found

    def _raise_missing(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is not None and (entry.loading or set(entry.failed.values()) - {UNLOADED}):
            raise ServeError(Code.UNAVAILABLE, f"Request for unknown model: '{name}' has no available versions")
        raise unknown(name[:256])

    def versions(self, name: str) -> list[ServedModel]:
        """Returns the serving versions of a model, oldest first."""
        return list(self._table.get(name, {}).values())

    def models(self) -> Iterator[ServedModel]:
        """Yields the serving versions of all models."""
        for versions in self._table.copy().values():
            yield from versions.values()

    def broken(self) -> list[str]:
        """Returns the names of the models that should serve but failed to load."""
        with self._lock:
            found = [
                name
                for name, entry in self._entries.items()
                if not entry.versions and set(entry.failed.values()) - {UNLOADED}
            ]
            return found + [name for name in self._unfetched if name not in self._entries]

    def index(self, *, ready: bool = False) -> list[IndexRow]:
        """Returns the entries of all versions, sorted by model. ``ready=True`` leaves out versions that don't serve."""
        rows: list[IndexRow] = []
        with self._lock:
            names = sorted({*self._entries, *self._unfetched, *(folder.name for folder in self.folders())})
            for name in names:
                rows += (self._entries.get(name) or Entry()).rows(name, self._unfetched.get(name))
        return [row for row in rows if row.state == READY or not ready]

    def folders(self) -> list[ModelFolder]:
        """Returns the folders of all models, or none if the repository is unreadable."""
        try:
            return self._places.folders()
        except OSError as error:
            log.error("repository unreadable", extra={"reason": str(error)})
            return []

    # Starting and ending

    def start(self) -> None:
        """Loads the models that have to serve from the start. Logs and skips a model that can't be loaded."""
        if self.mode != "explicit" or "*" in self._startup:
            self._refresh()
        names = [folder.name for folder in self.folders()]
        if self.mode == "explicit" and "*" not in self._startup:
            names = list(self._startup)
            for name in filter(valid_name, names):
                self._refresh(name)
        for name in steps_first(names, self._fetched_steps):
            if name not in names and self._places.folder(name) is None:
                continue  # loading the ensemble reports that the step's model is missing
            try:
                self._load(name)
            except ServeError as error:
                log.error("model not loaded", extra={"model": name, "reason": str(error)})
        self.started = True
        self.changed()
        if self.mode == "poll":
            self._poller = threading.Thread(target=self._poll, name="accel-poll", daemon=True)
            self._poller.start()

    def close(self, timeout: float) -> None:
        """Waits at most ``timeout`` seconds for accepted requests and releases every model."""
        self._stop.set()
        if self._poller is not None:
            self._poller.join(timeout)
        with self._lock:
            models = list(self.models())
            self._table = {}
            self._entries = {}
        for model in models:
            self._retire(model, timeout)
        for thread in self._retiring:
            thread.join(timeout + 1)

    # Loading and unloading by command

    def load(self, name: str, override: ModelConfig | None = None, sent: ModelFolder | None = None) -> None:
        """Loads or reloads a model by command. For an ensemble, also loads each step that isn't served yet. ``sent`` is
        a folder with files that the client sent, which replaces the model's own folder."""
        steps = self.steps_to_load(name, override)
        if reason := self._unfetched.get(name):
            raise ServeError(Code.UNAVAILABLE, f"failed to load '{name}': {reason}")
        for step in steps:
            try:
                self._load(step)
            except ServeError as error:  # loading the ensemble reports that the step's model is missing
                log.error("model not loaded", extra={"model": step, "reason": str(error)})
        self._load(name, override, sent)
        self._try_ensembles()

    def steps_to_load(self, name: str, override: ModelConfig | None = None) -> list[str]:
        """Returns the unserved steps of the ensemble ``name``. ``load`` loads the steps before the ensemble."""
        self._explicit()
        if valid_name(name):
            self._refresh(name)

        def steps_of(one: str) -> list[str]:
            if one == name and override is not None:
                return step_names(override)
            return self._fetched_steps(one)

        return [one for one in steps_first([name], steps_of) if one != name and one not in self._table]

    def _fetched_steps(self, name: str) -> list[str]:
        """Returns the step names of the ensemble ``name``. In explicit mode, also fetches the steps' models."""
        steps = self._steps_in_config(name)
        if self.mode == "explicit":
            for step in filter(valid_name, steps):
                if step not in self._table:
                    self._refresh(step)
        return steps

    def _steps_in_config(self, name: str) -> list[str]:
        """Returns the steps in an ensemble's ``config.pbtxt``, or an empty list if the model is no ensemble."""
        folder = self._places.folder(name)
        try:
            return step_names(folder.config()[0]) if folder is not None else []
        except (AccelError, OSError):
            return []

    def _try_ensembles(self) -> None:
        """Tries to load the ensembles that lacked a step. Repeats the attempt until no further ensemble can be
        loaded."""
        while True:
            with self._lock:
                waiting = [name for name, entry in self._entries.items() if entry.lacks_step]
            served = 0
            for name in waiting:
                try:
                    self._load(name)
                    served += 1
                except ServeError:
                    continue
            if not served:
                return

    def _refresh(self, name: str | None = None) -> None:
        """Updates models from the remote address. A model that can't be fetched stays unchanged, and the index says
        why."""
        if self._fetch is None:
            return
        failed = self._fetch(name)
        with self._lock:
            kept = {} if name is None else {k: v for k, v in self._unfetched.items() if k != name}
            self._unfetched = {**kept, **failed}
        for one, reason in failed.items():
            log.error("model not fetched", extra={"model": one, "reason": reason})

    def steps_of(self, name: str) -> list[str]:
        """Returns the steps of a serving ensemble, including the steps of nested ensembles."""
        found: dict[str, None] = {}
        left = [name]
        while left:
            for model in self.versions(left.pop()):
                new = step_names(model.config)
                left += [one for one in new if one not in found and one != name]
                found |= dict.fromkeys(new)
        return [one for one in found if one != name]

    def unload(self, name: str, dependents: bool = False) -> None:
        """Unloads a model by command. If ``dependents`` is True, also unloads the steps of an ensemble."""
        self._explicit()
        steps = self.steps_of(name) if dependents else []
        if name not in self._entries:
            if self._places.folder(name) is None:
                raise ServeError(Code.NOT_FOUND, f"failed to unload '{name[:256]}', unknown model")
            return
        self._unload(name)
        for step in steps:
            if step in self._entries:
                self._unload(step)

    def _explicit(self) -> None:
        if self.mode != "explicit":
            raise ServeError(
                Code.UNAVAILABLE,
                "explicit model load / unload is not allowed if polling is enabled; start with --mode explicit",
            )

    def _load(self, name: str, override: ModelConfig | None = None, sent: ModelFolder | None = None) -> None:
        if not valid_name(name):
            raise ServeError(Code.INVALID_ARGUMENT, f"failed to load '{name[:256]}', which can't be a model's name")
        folder = sent or self._places.folder(name)
        if folder is None:
            raise ServeError(Code.INTERNAL, f"failed to load '{name}', failed to poll from model repository")
        with self._control:
            with self._lock:  # another thread may iterate over the entries at the same time
                entry = self._entries.setdefault(name, Entry())
            entry.loading = True
            try:
                self._swap(name, entry, folder, override)
            finally:
                entry.loading = False

    def _swap(self, name: str, entry: Entry, folder: ModelFolder, override: ModelConfig | None) -> None:
        failed: dict[str, str] = {}
        made: dict[str, ServedModel] = {}
        entry.lacks_step = False
        try:
            entry.seen = _state(folder)
            config = override if override is not None else folder.config()[0]
            wanted = folder.chosen(config)
            prints = folder.fingerprints(wanted)
        except (AccelError, OSError) as error:
            failed[""] = _reason(error)
            wanted, prints = [], {}
        for version in wanted:
            old = entry.versions.get(version)
            # A load command may override the config without changing a file, so the override is compared too.
            files = (prints[version], override.SerializeToString() if override is not None else b"")
            if old is not None and old.files == files:
                made[version] = old
                continue
            try:
                made[version] = load_version(folder, version, self._loading, override, files)
            except Exception as error:  # a runtime may raise any exception, but the other versions keep serving
                failed[version] = _reason(error)
                entry.lacks_step = isinstance(error, StepMissing) and override is None
                if old is not None:
                    made[version] = old
        # If all new versions are broken, the old versions keep serving.
        if not made:
            made = dict(entry.versions)
        self._publish(name, entry, dict(sorted(made.items(), key=lambda item: int(item[0]))), failed)
        if failed:
            reasons = "; ".join(f"failed to load '{name}' version {v}: {r}" if v else r for v, r in failed.items())
            raise ServeError(Code.INVALID_ARGUMENT, f"load failed for model '{name}': {reasons}")

    def _publish(self, name: str, entry: Entry, versions: dict[str, ServedModel], failed: dict[str, str]) -> None:
        with self._lock:
            old = entry.versions
            entry.versions, entry.failed = versions, failed
            table = {**self._table, name: versions}
            if not versions:
                del table[name]
            self._table = table
        for version in (v for v, model in versions.items() if old.get(v) is not model):
            log.info("model loaded", extra={"model": name, "version": version})
        for version, model in old.items():
            if versions.get(version) is not model:
                self._retire(model, self.drain)
        self.changed()

    def _retire(self, model: ServedModel, timeout: float) -> None:
        def end() -> None:
            try:
                model.retire(timeout)
            except Exception:
                log.exception("model not released cleanly", extra={"model": model.name, "version": model.version})

        self._retiring = [thread for thread in self._retiring if thread.is_alive()]
        thread = threading.Thread(target=end, name=f"accel-retire-{model.name}", daemon=True)
        self._retiring.append(thread)
        thread.start()

    def _unload(self, name: str) -> None:
        with self._control:
            entry = self._entries[name]
            entry.seen, entry.lacks_step = None, False
            self._publish(name, entry, {}, dict.fromkeys(entry.versions, UNLOADED))
            log.info("model unloaded", extra={"model": name})

    # Polling

    def _poll(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            try:
                self.poll_once()
            except AccelError as error:
                log.error("polling the repository failed", extra={"reason": str(error)})
            except Exception:
                log.exception("polling the repository failed")

    def poll_once(self) -> None:
        """Loads new and changed models and unloads removed models. If the remote address can't be read, raises
        ``BadRepository`` and changes nothing."""
        self._refresh()
        loaded = False
        folders = {folder.name: folder for folder in self.folders()}
        for name in steps_first(folders, self._steps_in_config):
            if (folder := folders.get(name)) is None:
                continue
            entry = self._entries.get(name)
            try:
                if entry is not None and entry.seen == _state(folder):
                    continue
                self._load(name)
                loaded = True
            except (ServeError, OSError) as error:
                log.error("model not loaded", extra={"model": name, "reason": str(error)})
        if loaded:
            self._try_ensembles()
        for name in [name for name in self._entries if name not in folders]:
            if not self._places.reachable():  # the models of an unreachable network share keep serving
                return
            self._unload(name)
            with self._lock:
                self._entries.pop(name, None)

    def loaded(self) -> list[str]:
        """Returns the names of the models that are ready."""
        return list(self._table)


def _state(folder: ModelFolder) -> Any:
    return folder.fingerprints(folder.versions())


def _reason(error: BaseException) -> str:
    text = one_line(error, 500)
    return text if isinstance(error, AccelError) else f"{type(error).__name__}: {text}"
