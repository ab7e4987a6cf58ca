"""What ``accel train`` leaves in the system's temporary folder: nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from runs import SMALL, config_of

from accel.train.launch import train


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if torchrun's logs stay when a run has ended, or what its ranks (which end without clean-up) leave."""
    (temporary := tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which remembers the one from before
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nimport tempfile\nfrom pathlib import Path\n\n"
        "def leaves(outputs, targets):\n"
        "    from accel.train.loss import cross_entropy\n"
        "    Path(__file__).with_name('left').write_text(tempfile.mkdtemp())\n"
        "    return cross_entropy(outputs, targets)\n"
    )
    assert train(config_of(steps=1, loss=f"{source}:leaves"), tmp_path / "run", nproc=2)["steps"] == 1
    assert Path((tmp_path / "left").read_text()).is_relative_to(temporary)
    assert [path.name for path in temporary.iterdir()] == []
