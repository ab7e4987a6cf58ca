"""Writes and reads checkpoints. Each checkpoint is written atomically and can be read at any world size and ZeRO stage.

``RUN/checkpoints/step-00000200/`` holds DCP's shards and ``.metadata``, and ``run.json`` with the step, the loss scale,
the config and the model's factory. ``RUN/checkpoints/best.json`` names the best step so far and the metric.
``accel.train.checkpoints.final`` describes ``RUN/final/``, the model for ``accel export``.

A folder without ``run.json`` is unfinished, and no run resumes from an unfinished folder. ``run.json`` is written after
every rank's shards are on disk. Finally, the checkpoint's folder is renamed to its final name. ``run.json`` holds the
size and CRC-32 of each file. If a checkpoint is damaged, a run reports the damage and uses the previous checkpoint.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from accel.errors import BadCheckpoint, BadConfig, CannotWrite, one_line

from ..config.schema import CheckpointConfig
from ..disk.planners import load_planner, save_planner
from ..disk.store import Disk

dcp: Any = torch.distributed.checkpoint  # type checkers don't see the names that this module exports

# DCP's CheckpointException, raised if a rank failed, is not a subclass of Exception.
_FAILED = (Exception, dcp.CheckpointException)

RUN = "run.json"
BEST = "best.json"
# The end of the name of a checkpoint that is being deleted.
_GONE = ".gone"


class Checkpoints:
    """The checkpoints of one run folder.

    Every rank has an instance of this class, but only rank 0 renames and deletes folders. ``disk`` holds the tensors
    that have no memory between steps.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, group: dist.ProcessGroup | None, disk: Disk | None = None
    ) -> None:
        self.folder = folder / "checkpoints"
        self.config = config
        self.disk = disk
        self.group = group  # Background saves use this separate gloo group.
        self.damaged: list[str] = []  # The faults of the damaged checkpoints that were skipped.
        self._passed: set[str] = set()
        self._pending: tuple[Future[Any] | Any, Path, dict[str, Any]] | None = None

    @property
    def _first(self) -> bool:
        return self.group is None or dist.get_rank() == 0

    def complete(self) -> list[Path]:
        """Returns the finished checkpoints, oldest first."""
        found = [f for f in self.folder.glob("step-*") if (f / RUN).is_file() and (f / ".metadata").is_file()]
        return sorted(found)

    def has(self, step: int) -> bool:
        """Tells whether ``step`` has a finished checkpoint."""
        name = f"step-{step:08d}"
        return name not in self._passed and (self.folder / name / RUN).is_file()

    def save(self, state: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Writes a checkpoint of ``state`` and ``run``. ``state`` is a dict of tensors. ``run`` is a dict of plain
        values and includes ``step``. Each rank writes its own shards.

        Waits for the previous save first. If ``asynchronous`` is set, copies the tensors, writes the copies in the
        background and returns. A call of ``wait`` then finishes the save. All ranks have to call ``wait`` together. If
        no rank is ``writing``, ``wait`` returns quickly. With a ``disk``, copies may not fit into memory, so the call
        returns only when the checkpoint is written.
        """
        self.wait()
        final = self.folder / f"step-{int(run['step']):08d}"
        part = _beside(final)
        if self._first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        if self.group is not None:
            dist.barrier(self.group)
        writer = dcp.FileSystemWriter(part, single_file_per_rank=True, thread_count=1, sync_files=True)
        arguments: dict[str, Any] = {
            "storage_writer": writer,
            "process_group": self.group,
            "no_dist": self.group is None,
            "planner": save_planner(self.disk),
        }
        try:
            if self.config.asynchronous and self.group is not None and self.disk is None:
                arguments.pop("no_dist")
                self._pending = (dcp.async_save(dict(state), **arguments), final, dict(run))
                return
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(dict(state), **arguments)
        except _FAILED as error:
            raise self._unwritten(final, error) from error
        self._finish(final, dict(run))

    @property
    def pending(self) -> bool:
        """Tells whether a background save is unfinished. The answer is the same on every rank."""
        return self._pending is not None

    @property
    def writing(self) -> bool:
        """Tells whether this rank is still writing its part of a save in the background."""
        return self._pending is not None and not self._pending[0].done()

    def wait(self) -> None:
        """Waits until the background save is complete and the checkpoint's folder has its final name."""
        if self._pending is None:
            return
        (future, final, run), self._pending = self._pending, None
        try:
            future.result()
        except _FAILED as error:
            raise self._unwritten(final, error) from error
        self._finish(final, run)

    def _finish(self, final: Path, run: dict[str, Any]) -> None:
        part = _beside(final)
        rank = dist.get_rank() if self.group is not None else 0
        own = sorted(part.glob(f"__{rank}_*.distcp")) + ([part / ".metadata"] if rank == 0 else [])
        files = self._together({f.name: [f.stat().st_size, _crc32(f)] for f in own})
        if self._first:
            try:
                _write(part / RUN, {**run, "files": {k: v for one in files for k, v in one.items()}})
                if final.exists():
                    _delete(final)
                part.replace(final)
            except (OSError, CannotWrite) as error:
                raise self._unwritten(final, error) from error
            self._passed.discard(final.name)
            self._keep()
        if self.group is not None:
            dist.barrier(self.group)

    def _unwritten(self, final: Path, error: BaseException) -> CannotWrite:
        if self._first:  # deletes the unfinished folder to make room for the error report
            shutil.rmtree(_beside(final), ignore_errors=True)
        before = "the previous checkpoint is intact" if self.complete() else "there is no previous checkpoint"
        failed = f"the checkpoint {final} could not be written ({_reason(error)})"
        return CannotWrite(f"{failed}; free some space ({before})")

    def _together(self, own: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of the ranks."""
        if self.group is None:
            return [own]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self.group)
        return found

    def mark_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """If ``step`` is the best step so far, records ``step`` and returns True. Only rank 0 calls this method.

        The best step's checkpoint is kept in addition to the ``keep`` newest checkpoints. Raises ``BadConfig`` if
        ``evaluate`` doesn't measure the metric of ``checkpoint.best``.
        """
        name = self.config.best
        if not name:
            return False
        if name.removeprefix("-") not in metrics:
            raise BadConfig(
                f"checkpoint.best is {name!r}, but evaluate measures only {', '.join(metrics) or 'nothing'}; "
                "use one of these metrics"
            )
        value = metrics[name.removeprefix("-")] * (-1 if name.startswith("-") else 1)
        best = self.standing()
        if math.isnan(value) or (best is not None and best["value"] >= value):
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / BEST, {"step": step, "value": value, "metric": name, "metrics": dict(metrics)})
        return True

    def best(self) -> dict[str, Any] | None:
        """Returns the content of ``best.json``, or None if the file can't be read."""
        try:
            body: dict[str, Any] = json.loads((self.folder / BEST).read_text())
        except (OSError, ValueError):
            return None
        return body

    def standing(self) -> dict[str, Any] | None:
        """Returns the record of the best step, or None if there is no valid record.

        A record is invalid if ``config.best`` has changed, or if the step's checkpoint is missing. The checkpoint is
        missing if the run was killed after ``mark_best`` and before the save.
        """
        best = self.best()
        return best if best is not None and best["metric"] == self.config.best and self.has(best["step"]) else None

    def set_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of ``step`` to the step's checkpoint. Deletes all old checkpoints except the best
        checkpoint. Only rank 0 calls this method."""
        file = self.folder / f"step-{step:08d}" / RUN
        _write(file, {**json.loads(file.read_text()), "metrics": dict(metrics)})
        self._keep()

    def _keep(self) -> None:
        best = self.best()
        spare = f"step-{best['step']:08d}" if best else ""
        sound = [path for path in self.complete() if path.name not in self._passed]
        for old in sound[: -self.config.keep]:
            if old.name != spare:
                _delete(old)

    def load_newest(
        self, wanted: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]], model: str
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Reads the newest undamaged checkpoint. Returns the checkpoint's ``run.json`` and tensors, or None if there is
        no checkpoint.

        ``wanted`` takes ``run.json`` and the names of the saved tensors, and returns the tensors to fill. Every
        rank has to call ``load_newest``, and all ranks take the same checkpoint. ``damaged`` lists the skipped
        checkpoints.

        Raises ``BadCheckpoint`` if the checkpoint belongs to another model than ``model``, or if no checkpoint can be
        read. Also raises ``BadCheckpoint`` if the checkpoint lacks a wanted tensor or holds the tensor in another
        shape.
        """
        for gone in self.folder.glob(f".*{_GONE}") if self._first else ():
            shutil.rmtree(gone, ignore_errors=True)
        found = self.complete()
        for path in reversed(found):
            try:
                run = self.check(path, model)
                wrong = self._wrong(path, run)
                if not wrong:
                    saved = self._shapes(path)
                    state = wanted(run, saved)
                    self._same(path, saved, state)
                    self._read(path, state)
                    return run, state
            except _Unreadable as error:
                wrong = str(error)
            self.damaged.append(wrong)
            self._passed.add(path.name)
        if found:
            raise BadCheckpoint(
                f"no checkpoint can be read: {self.damaged[0]}; restore a checkpoint, or start with --fresh"
            )
        return None

    def _shapes(self, path: Path) -> dict[str, list[int] | None]:
        """Returns the shape of each tensor in a checkpoint by name, and None for an entry that is not a tensor."""
        try:
            found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        except _FAILED as error:
            raise _Unreadable(f"{path} can't be read ({_reason(error)})") from error
        return {name: list(one.size) if hasattr(one, "size") else None for name, one in found.items()}

    def _same(self, path: Path, saved: Mapping[str, list[int] | None], state: Mapping[str, Any]) -> None:
        """Raises ``BadCheckpoint`` on every rank if ``saved`` lacks a tensor of ``state`` or lists another shape for
        the tensor."""
        said = ""
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or (name in saved and saved[name] in (None, list(value.shape))):
                continue
            kind, _, own = name.partition(".")
            there = (
                f"had the shape {saved[name]}, and has the shape {list(value.shape)} now"
                if name in saved
                else "is not in the checkpoint"
            )
            said = said or f"the {kind} has changed since the checkpoint {path}: {own} {there}"
        said = next((one for one in self._together(said) if one), "")
        if said:
            raise BadCheckpoint(f"{said}; give another --out, or start with --fresh")

    def _read(self, path: Path, state: dict[str, Any]) -> None:
        try:
            with warnings.catch_warnings():  # torch warns about DCP in a single process
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                reader = dcp.FileSystemReader(path)
                dcp.load(
                    state,
                    storage_reader=reader,
                    planner=load_planner(self.disk),
                    process_group=self.group,
                    no_dist=self.group is None,
                )
        except _FAILED as error:
            raise _Unreadable(f"{path} can't be read ({_reason(error)})") from error

    def check(self, path: Path, model: str) -> dict[str, Any]:
        """Returns ``run.json`` of a finished checkpoint. Raises ``BadCheckpoint`` if the checkpoint belongs to another
        model."""
        try:
            run: dict[str, Any] = json.loads((path / RUN).read_text())
            other = run["model"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _Unreadable(f"{path} has no readable {RUN}") from error
        if other != model:
            raise BadCheckpoint(
                f"{path} is a checkpoint of the model {other}, not of the model {model}; give another --out"
            )
        return run

    def _wrong(self, path: Path, run: dict[str, Any]) -> str:
        """Returns a message that names a damaged file in ``path``, or "" if no file is damaged. Each rank checks some
        of the files."""
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if self.group is not None else (1, 0)
        said = ""
        for name, (size, crc) in list(run["files"].items())[rank::ranks]:
            file = path / name
            if not file.is_file():
                said = f"{file} is missing"
            elif (found := file.stat().st_size) != size:
                said = f"{file} has {found} of {size} bytes"
            elif _crc32(file) != crc:
                said = f"{file} has changed since it was written"
        return next((one for one in self._together(said) if one), "")


class _Unreadable(Exception):
    """Raised if a checkpoint is damaged and has to be skipped."""


def _reason(error: BaseException) -> str:
    """Returns the error of the first rank that failed, without tracebacks."""
    failures = getattr(error, "failures", {})
    first: BaseException | None = failures[min(failures)][0] if failures else error
    said = str(first)
    while first is not None:  # torch.save hides an OSError behind an error of its own
        said = str(first) if isinstance(first, OSError) else said
        first = first.__cause__ or first.__context__
    return one_line(said, None)[-200:]


def _crc32(file: Path) -> int:
    found = 0
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            found = zlib.crc32(block, found)
    return found


def _write(path: Path, body: Mapping[str, Any]) -> None:
    from accel.artifact import beside

    with beside(path) as temporary:
        temporary.write_text(json.dumps(body, indent=2))


def _beside(final: Path) -> Path:
    """Returns the folder of a checkpoint that is still being written."""
    return final.with_name(f".{final.name}.part")


def _delete(checkpoint: Path) -> None:
    """Deletes a checkpoint. Takes its name away first, because a kill may leave a part of the files."""
    gone = checkpoint.with_name(f".{checkpoint.name}{_GONE}")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.replace(gone)
    shutil.rmtree(gone)
