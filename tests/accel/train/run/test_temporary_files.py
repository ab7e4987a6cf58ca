"""What ``accel train`` leaves in the system's temporary folder: nothing."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from accel.train import launch
from accel.train.config import TrainConfig
from accel.train.rank import RESULT

# In place of torchrun and its ranks, which leave their logs in the temporary folder and end without clean-up.
LEAVES = "import json, sys, tempfile; open(sys.argv[1], 'w').write(json.dumps({'left': tempfile.mkdtemp()}))"


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what the processes of a run put there stays when it has ended."""
    (temporary := tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which remembers the one from before
    start = subprocess.Popen

    def instead(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert "torch.distributed.run" in words
        return start([sys.executable, "-c", LEAVES, str(tmp_path / "run" / RESULT)], **options)

    monkeypatch.setattr(launch.subprocess, "Popen", instead)
    config = TrainConfig.from_dict({"model": "m:model", "data": "m:data", "global_batch": 8, "micro_batch": 4})
    left = Path(launch.train(config, tmp_path / "run", nproc=2)["left"])
    assert left.is_relative_to(temporary)
    assert not left.exists()
    assert [path.name for path in temporary.iterdir()] == []
