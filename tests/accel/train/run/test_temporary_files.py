"""Proves that ``accel train`` leaves nothing in the system's temporary folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from accel.train.config.schema import TrainConfig
from accel.train.run import launch
from accel.train.run.rank import RESULT

# This code replaces torchrun and its ranks. Like torchrun, the code makes a folder in the system's temporary folder and
# never removes the folder.
LEAVES = "import json, sys, tempfile; open(sys.argv[1], 'w').write(json.dumps({'left': tempfile.mkdtemp()}))"


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if temporary files of a run's processes remain after the run has ended."""
    (temporary := tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # makes tempfile forget the earlier folder
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
