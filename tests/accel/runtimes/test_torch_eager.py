"""Tests the errors of PyTorch's sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accel.errors import RunFailed, SizeBeyond
from accel.runtimes.base import open_session
from accel.signature import DimRange
from accel.sources.source import Source

PLACES = """
import torch


class Places(torch.nn.Module):
    def forward(self, x):
        return x + torch.zeros(99)[: len(x)]
"""


def test_a_size_that_is_too_large(tmp_path: Path) -> None:
    """Fails if the error of a run at a larger size than the declared sizes doesn't name the dim, as the errors of the
    other runtimes do. Also fails if the error of a run at a declared size blames the size."""
    (tmp_path / "places.py").write_text(PLACES)
    model = Source(f"{tmp_path / 'places.py'}:Places", inputs=["x:float32[n]"]).open()
    for most, error, said in (
        (64, SizeBeyond, r"; n is 100, beyond its range 1\.\.64: give"),
        (200, RunFailed, "check the inputs' values$"),
    ):
        signature = replace(model.signature, dims={"n": DimRange(1, 4, most)})
        with open_session(replace(model, signature=signature), "torch") as session:
            session.run({"x": np.zeros(99, np.float32)})
            with pytest.raises(RunFailed, match=said) as caught:
                session.run({"x": np.zeros(100, np.float32)})
            assert type(caught.value) is error
