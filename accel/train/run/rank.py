"""Runs one rank. ``launch`` starts this module as ``python -m accel.train.run.rank CONFIG.json OUT LAUNCHER``, where
LAUNCHER is the number of the launcher's process."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.child import die_with_parent
from accel.errors import AccelError, BadConfig, CannotWrite, no_space, one_line

from . import watchdog

if TYPE_CHECKING:
    from ..ranks import Ranks

RESULT = "result.json"
ERRORS = "errors"
_IN_LOADER = " (in a process of the loader)"


def main(config_file: Path, out: Path) -> int:
    """Runs this rank and returns the exit code. If the rank fails, writes the error with its time and traceback to
    ``OUT/errors/rank-K.json``."""
    import torch.distributed as dist

    from accel.artifact import beside

    from ..config.schema import TrainConfig
    from ..loop import Trainer
    from ..parallel.layout import join

    rank = int(os.environ.get("RANK", "0"))
    watchdog.enrol(out, rank)
    (out / ERRORS / f"rank-{rank}.json").unlink(missing_ok=True)  # from before a restart
    try:
        config = TrainConfig.from_dict(json.loads(config_file.read_text()))
        ranks = join(config)
        one_folder(out, ranks)
        result = Trainer(config, out, ranks).run()
        if os.environ.get("LOCAL_RANK", "0") == "0":  # each machine's launcher waits for the result file
            with beside(out / RESULT) as temporary:
                temporary.write_text(json.dumps(result))
    except BaseException as error:
        with suppress(OSError):  # a full disk may prevent this report, but the launcher notices a full disk itself
            leave(out, rank, error)
            traceback.print_exc()
        return 1
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def leave(out: Path, rank: int, error: BaseException) -> None:
    """Writes the error that stopped this rank to a file that the launcher reads."""
    said: BaseException = error
    if not isinstance(error, AccelError) and (full := no_space(error)) is not None:
        said = disk_full(full.filename or out)
    folder = out / ERRORS
    folder.mkdir(exist_ok=True)
    body = {
        "rank": rank,
        "time": time.time(),
        "error": _of_the_loader(said) or f"{type(said).__name__}: {one_line(said, None)}",
        "message": _message(said) if isinstance(said, AccelError) else "",
        "kind": type(said).__name__,
        "lost": _is_lost(said),
        "traceback": traceback.format_exc(),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(body))


def _of_the_loader(error: BaseException) -> str:
    """Returns the error of a DataLoader worker process, or "" if ``error`` comes from this process. Takes only the last
    line of a worker's error, because the whole error is a traceback.
    """
    text = str(error).strip()
    if not re.match(r"Caught \w+ in DataLoader worker", text):
        return ""
    return f"{one_line(text.splitlines()[-1], None)}{_IN_LOADER}"


def _message(error: AccelError) -> str:
    """Returns the sentence of ``error``. A process of the loader sends it at the end of a traceback."""
    of_the_loader = _of_the_loader(error)
    return of_the_loader.partition(": ")[2].removesuffix(_IN_LOADER) if of_the_loader else str(error)


def _is_lost(error: BaseException) -> bool:
    """Tells whether ``error`` may come from the end of another rank, because it is an error of gloo or NCCL."""
    from torch.distributed import DistError

    if isinstance(error, AccelError):
        return False
    return isinstance(error, DistError) or bool(re.search(r"/gloo/|Connection closed by peer", str(error)))


def disk_full(where: Path | str) -> CannotWrite:
    """Returns the error that reports a full disk."""
    return CannotWrite(f"no space left for {where}; free some space and run the same command again")


def one_folder(out: Path, ranks: Ranks) -> None:
    """Raises ``BadConfig`` if a rank can't see rank 0's folder ``out``. Every rank writes its shards into ``out``.

    Every rank has to call this function.
    """
    import torch.distributed as dist

    if ranks.world == int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world)):  # all on one machine
        return
    said: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(said, src=0, group=ranks.saving)
    sign = out / f".{said[0]}"
    if ranks.rank == 0:
        sign.touch()
    dist.barrier(ranks.saving)
    seen: list[Any] = [None] * ranks.world
    dist.all_gather_object(seen, sign.exists(), group=ranks.saving)
    if ranks.rank == 0:
        sign.unlink()
    if not all(seen):
        raise BadConfig(
            f"rank {seen.index(False)} can't see the files that rank 0 writes into --out; "
            "give an --out folder on a network file system that all machines share"
        )


def end_with(launcher: int) -> None:
    """Makes this rank end when its parent ends. Exits at once if ``launcher`` has already ended.

    The parent is the process ``launcher``, or torchrun, which is a child of ``launcher`` and ends with ``launcher``.
    """
    parent = os.getppid()
    die_with_parent(parent)
    grandparent = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
    if str(launcher) not in (str(parent), grandparent):
        sys.exit(1)


def end(code: int) -> None:
    """Ends this process without a cleanup.

    ``os._exit`` skips the destructors of the process groups, in which a failed rank would wait for other ranks. A
    process group in a device mesh also keeps gloo's threads alive while the interpreter shuts down, and these threads
    can crash the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_with(int(sys.argv[3]))
    end(main(Path(sys.argv[1]), Path(sys.argv[2])))
