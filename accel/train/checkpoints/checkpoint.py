"""Checkpoints: written beside and renamed, whole or not there; read back on any world size and ZeRO stage.

    RUN/checkpoints/step-00000200/   DCP shards and its .metadata, and run.json: step, loss scale, config, model
    RUN/checkpoints/best.json        which step is the best so far, by which metric
    RUN/final/                       what ``accel export`` takes (see ``accel.train.final``)

A folder without ``run.json`` is unfinished and is never resumed from: that file is written last, after every rank's
shards are on disk, and the folder gets its name after that. It holds size and CRC-32 of each file: a checkpoint that is
damaged is named and the one before it used.
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
from accel.train.config import CheckpointConfig

dcp: Any = torch.distributed.checkpoint  # its names are not declared as exported

# What DCP raises where a rank failed is no Exception.
_FAILED = (Exception, dcp.CheckpointException)

RUN = "run.json"
BEST = "best.json"


class Checkpoints:
    """The checkpoints of one run folder. Every rank makes one; rank 0 alone renames and deletes."""

    def __init__(self, folder: Path, config: CheckpointConfig, group: dist.ProcessGroup | None) -> None:
        self.folder = folder / "checkpoints"
        self.config = config
        self.group = group  # a gloo group of its own, so that a save in the background meets no other collective
        self.damaged: list[str] = []  # what was wrong with each checkpoint that was passed over
        self._passed: set[str] = set()
        self._pending: tuple[Future[Any] | Any, Path, dict[str, Any]] | None = None

    @property
    def _first(self) -> bool:
        return self.group is None or dist.get_rank() == 0

    def complete(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        found = [f for f in self.folder.glob("step-*") if (f / RUN).is_file() and (f / ".metadata").is_file()]
        return sorted(found)

    def has(self, step: int) -> bool:
        """Whether ``step`` has a finished checkpoint."""
        name = f"step-{step:08d}"
        return name not in self._passed and (self.folder / name / RUN).is_file()

    def save(self, state: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Write ``state`` (tensors by name, shards of DTensors by rank) and ``run`` (plain values, with ``step``).

        Asynchronous where the config says so: the tensors are copied first, and the save before it is waited for. It is
        finished by ``wait``, which every rank has to call together: best as soon as no rank is ``writing`` any more.
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
        }
        try:
            if self.config.asynchronous and self.group is not None:
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
        """Whether a save in the background isn't finished; the same on every rank."""
        return self._pending is not None

    @property
    def writing(self) -> bool:
        """Whether this rank's part of the save in the background is still on its way to the disk."""
        return self._pending is not None and not self._pending[0].done()

    def wait(self) -> None:
        """Until the save in the background is whole, and has its name."""
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
                    shutil.rmtree(final)
                part.replace(final)
            except OSError as error:
                raise self._unwritten(final, error) from error
            self._passed.discard(final.name)
            self._keep()
        if self.group is not None:
            dist.barrier(self.group)

    def _unwritten(self, final: Path, error: BaseException) -> CannotWrite:
        if self._first:  # what is half written takes the room that saying so needs
            shutil.rmtree(_beside(final), ignore_errors=True)
        before = "the one before is whole" if self.complete() else "there is none before it"
        return CannotWrite(f"the checkpoint {final} could not be written ({_reason(error)}); free some space, {before}")

    def _together(self, own: Any) -> list[Any]:
        """What every rank has, in the order of the ranks."""
        if self.group is None:
            return [own]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self.group)
        return found

    def mark_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """On rank 0: note that ``step`` is the best, where it is. The folder is kept whatever ``keep`` says."""
        name = self.config.best
        if not name:
            return False
        if name.removeprefix("-") not in metrics:
            raise BadConfig(
                f"checkpoint.best is {name!r}, and evaluate measures {', '.join(metrics) or 'nothing'}; "
                "name one of them"
            )
        value = metrics[name.removeprefix("-")] * (-1 if name.startswith("-") else 1)
        best = self.standing()
        if math.isnan(value) or (best is not None and best["value"] >= value):
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / BEST, {"step": step, "value": value, "metric": name, "metrics": dict(metrics)})
        return True

    def best(self) -> dict[str, Any] | None:
        """What ``best.json`` says."""
        try:
            body: dict[str, Any] = json.loads((self.folder / BEST).read_text())
        except (OSError, ValueError):
            return None
        return body

    def standing(self) -> dict[str, Any] | None:
        """The best so far by ``config.best``, where its checkpoint is there: a run that was killed between noting and
        writing it, or is asked for another metric now, has none."""
        best = self.best()
        return best if best is not None and best["metric"] == self.config.best and self.has(best["step"]) else None

    def set_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """On rank 0: note what was measured of ``step`` after it was saved, and keep what is kept now."""
        file = self.folder / f"step-{step:08d}" / RUN
        _write(file, {**json.loads(file.read_text()), "metrics": dict(metrics)})
        self._keep()

    def _keep(self) -> None:
        best = self.best()
        spare = f"step-{best['step']:08d}" if best else ""
        sound = [path for path in self.complete() if path.name not in self._passed]
        for old in sound[: -self.config.keep]:
            if old.name != spare:
                shutil.rmtree(old)

    def load_newest(
        self, wanted: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]], model: str
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Read the newest sound checkpoint into the tensors that ``wanted`` gives for its ``run.json`` and the names
        that all ranks saved, in place.

        Returns ``run.json`` and the tensors, None where there is no checkpoint. Every rank calls it and takes the same
        one; ``damaged`` says what was passed over.

        Raises ``BadCheckpoint`` where it is of another model than ``model``, a tensor has another shape there or is
        missing, or none can be read.
        """
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
            raise BadCheckpoint(f"no checkpoint can be read: {self.damaged[0]}; restore it, or start with --fresh")
        return None

    def _shapes(self, path: Path) -> dict[str, list[int] | None]:
        """Of the tensors that all ranks saved, by name; None of what isn't one."""
        try:
            found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        except _FAILED as error:
            raise _Unreadable(f"{path} can't be read ({_reason(error)})") from error
        return {name: list(one.size) if hasattr(one, "size") else None for name, one in found.items()}

    def _same(self, path: Path, saved: Mapping[str, list[int] | None], state: Mapping[str, Any]) -> None:
        """Raise ``BadCheckpoint``, on every rank, where a tensor of ``state`` isn't in a sound checkpoint as it is."""
        said = ""
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or (name in saved and saved[name] in (None, list(value.shape))):
                continue
            kind, _, own = name.partition(".")
            there = f"is {saved[name]} there and {list(value.shape)} now" if name in saved else "is not in it"
            said = said or f"the {kind} has changed since {path}: {own} {there}"
        said = next((one for one in self._together(said) if one), "")
        if said:
            raise BadCheckpoint(f"{said}; give another --out, or start with --fresh")

    def _read(self, path: Path, state: dict[str, Any]) -> None:
        try:
            with warnings.catch_warnings():  # alone, torch warns that it is
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                reader = dcp.FileSystemReader(path)
                dcp.load(state, storage_reader=reader, process_group=self.group, no_dist=self.group is None)
        except _FAILED as error:
            raise _Unreadable(f"{path} can't be read ({_reason(error)})") from error

    def check(self, path: Path, model: str) -> dict[str, Any]:
        """``run.json`` of a finished checkpoint. Raises ``BadCheckpoint`` where it is of another model."""
        try:
            run: dict[str, Any] = json.loads((path / RUN).read_text())
            other = run["model"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _Unreadable(f"{path} has no readable {RUN}") from error
        if other != model:
            raise BadCheckpoint(f"{path} is of the model {other}, not {model}; give another --out")
        return run

    def _wrong(self, path: Path, run: dict[str, Any]) -> str:
        """What is wrong with the files in ``path``, "" for nothing; each rank looks at some of them."""
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if self.group is not None else (1, 0)
        said = ""
        for name, (size, crc) in list(run["files"].items())[rank::ranks]:
            file = path / name
            if not file.is_file() or file.stat().st_size != size:
                said = f"{file} is missing or cut short"
            elif _crc32(file) != crc:
                said = f"{file} is not what was written"
        return next((one for one in self._together(said) if one), "")


class _Unreadable(Exception):
    """A checkpoint that is to be passed over."""


def _reason(error: BaseException) -> str:
    """What the first rank that failed met, without the tracebacks."""
    failures = getattr(error, "failures", {})
    first: BaseException | None = failures[min(failures)][0] if failures else error
    said = str(first)
    while first is not None:  # torch.save hides what the disk said behind what it didn't expect
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
    """Where a checkpoint is written until it is whole."""
    return final.with_name(f".{final.name}.part")
