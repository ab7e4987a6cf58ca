"""Checkpoints: written beside and renamed, whole or not there; read back on any world size and ZeRO stage.

    RUN/checkpoints/step-00000200/   DCP shards and its .metadata, and run.json: step, loss scale, config, model
    RUN/checkpoints/best.json        which step is the best so far, by which metric
    RUN/final/                       what ``accel export`` takes (see ``accel.train.final``)

A folder without ``run.json`` is unfinished and is never resumed from: that file is written last, after every rank's
shards
are on disk, and the folder gets its name after that.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from accel.errors import BadCheckpoint, CannotWrite
from accel.train.config import CheckpointConfig

dcp: Any = torch.distributed.checkpoint  # its names are not declared as exported

RUN = "run.json"
BEST = "best.json"


class Checkpoints:
    """The checkpoints of one run folder. Every rank makes one; rank 0 alone renames and deletes."""

    def __init__(self, folder: Path, config: CheckpointConfig, group: dist.ProcessGroup | None) -> None:
        self.folder = folder / "checkpoints"
        self.config = config
        self.group = group  # a gloo group of its own, so that a save in the background meets no other collective
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
        return (self.folder / f"step-{step:08d}" / RUN).is_file()

    def save(self, state: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Write ``state`` (tensors by name, shards of DTensors by rank) and ``run`` (plain values, with ``step``).

        Asynchronous where the config says so: the tensors are copied first, and the save before it is waited for.
        """
        self.wait()
        final = self.folder / f"step-{int(run['step']):08d}"
        part = final.with_name(f".{final.name}.part")
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
        except Exception as error:
            raise _unwritten(part, error) from error
        self._finish(final, dict(run))

    def wait(self) -> None:
        """Until the save in the background is whole."""
        if self._pending is None:
            return
        (future, final, run), self._pending = self._pending, None
        try:
            future.result()
        except Exception as error:
            raise _unwritten(final, error) from error
        self._finish(final, run)

    def _finish(self, final: Path, run: dict[str, Any]) -> None:
        if self._first:
            part = final.with_name(f".{final.name}.part")
            _write(part / RUN, run)
            if final.exists():
                shutil.rmtree(final)
            part.replace(final)
            self._keep()
        if self.group is not None:
            dist.barrier(self.group)

    def mark_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """On rank 0: note that ``step`` is the best, where it is. The folder is kept whatever ``keep`` says."""
        name = self.config.best
        if not name or name.removeprefix("-") not in metrics:
            return False
        value = metrics[name.removeprefix("-")] * (-1 if name.startswith("-") else 1)
        best = self.best()
        if best is not None and best["value"] >= value:
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

    def _keep(self) -> None:
        best = self.best()
        spare = f"step-{best['step']:08d}" if best else ""
        for old in self.complete()[: -self.config.keep]:
            if old.name != spare:
                shutil.rmtree(old)

    def load(self, path: Path, state: dict[str, Any], model: str) -> dict[str, Any]:
        """Read the checkpoint in ``path`` into the tensors of ``state``, in place; returns its ``run.json``.

        Raises ``BadCheckpoint`` where it is unfinished, damaged or of another model than ``model``.
        """
        run = self.check(path, model)
        reader = dcp.FileSystemReader(path)
        try:
            with warnings.catch_warnings():  # alone, torch warns that it is
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(state, storage_reader=reader, process_group=self.group, no_dist=self.group is None)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise BadCheckpoint(f"{path} can't be read ({reason}); delete it to resume from the one before") from error
        return run

    def check(self, path: Path, model: str) -> dict[str, Any]:
        """``run.json`` of a finished checkpoint of ``model`` whose shards have the sizes it records."""
        try:
            run: dict[str, Any] = json.loads((path / RUN).read_text())
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{path} has no readable {RUN}: it was never finished; delete it") from error
        if run["model"] != model:
            raise BadCheckpoint(f"{path} is of the model {run['model']}, not {model}; give another --out")
        for name, size in run.get("files", {}).items():
            if not (path / name).is_file() or (path / name).stat().st_size != size:
                raise BadCheckpoint(f"{path / name} is missing or cut short; delete {path.name} to resume before it")
        return run


def shard_sizes(folder: Path) -> dict[str, int]:
    """Bytes by name of the shards in ``folder``."""
    return {f.name: f.stat().st_size for f in sorted(folder.glob("*.distcp"))}


def _write(path: Path, body: Mapping[str, Any]) -> None:
    from accel.artifact import beside

    body = {**body, "files": shard_sizes(path.parent)} if path.name == RUN else body
    with beside(path) as temporary:
        temporary.write_text(json.dumps(body, indent=2))


def _unwritten(path: Path, error: BaseException) -> CannotWrite:
    reason = " ".join(str(error).split())[-200:]
    return CannotWrite(
        f"the checkpoint {path} could not be written ({reason}); free some space, the one before is whole"
    )


def plain(module: torch.nn.Module) -> dict[str, Any]:
    """Parameters and buffers by the names the model's own ``state_dict`` has."""
    return dict(module.state_dict())
