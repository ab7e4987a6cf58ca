"""The program of one rank: ``python -m accel.train.rank CONFIG.json OUT``, started by ``accel.train.launch``."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from accel.errors import AccelError
from accel.train import watchdog

RESULT = "result.json"
ERRORS = "errors"


def main(config_file: Path, out: Path) -> int:
    """Run this rank. What stops it is written to ``OUT/errors/rank-K.json``: when, what, and the traceback."""
    import torch.distributed as dist

    from accel.train.config import TrainConfig
    from accel.train.layout import join
    from accel.train.loop import Trainer

    rank = int(os.environ.get("RANK", "0"))
    watchdog.enrol(out, rank)
    (out / ERRORS / f"rank-{rank}.json").unlink(missing_ok=True)  # of what this is the restart of
    try:
        config = TrainConfig.from_dict(json.loads(config_file.read_text()))
        ranks = join(config)
        result = Trainer(config, out, ranks).run()
        if rank == 0:
            (out / RESULT).write_text(json.dumps(result))
    except BaseException as error:
        folder = out / ERRORS
        folder.mkdir(exist_ok=True)
        body = {
            "rank": rank,
            "time": time.time(),
            "error": f"{type(error).__name__}: {' '.join(str(error).split())}",
            "message": str(error) if isinstance(error, AccelError) else "",
            "kind": type(error).__name__,
            "traceback": traceback.format_exc(),
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(body))
        traceback.print_exc()
        return 1
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed must not wait for the others in the destructors of its process groups.
    os._exit(code)
