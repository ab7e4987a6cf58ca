"""Tests that a session checks its feeds, whatever feeds it ran before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.errors import BadFeeds, ValuesOutOfRange
from accel.runtimes.base import SessionOptions
from accel.runtimes.onnxruntime import OnnxRuntimeSession
from tests.support.onnx_builder import FLOAT, INT64, artifact, node


def test_feeds_are_checked_after_right_feeds(tmp_path: Path) -> None:
    """Fails if feeds of the form of earlier feeds are run without a check of their integers, if a wrong shape, dtype,
    name or type passes after right feeds, or if a narrower dtype is taken for the right one."""
    made = artifact(
        tmp_path / "rows.onnx",
        [node("Gather", "table ids", "rows"), node("Add", "rows x", "y")],
        {"ids": (INT64, ["batch"]), "x": (FLOAT, ["batch", 2])},
        {"y": (FLOAT, ["batch", 2])},
        {"table": np.arange(6, dtype=np.float32).reshape(3, 2)},
    )
    ids, x = np.array([2, 0]), np.zeros((2, 2), np.float32)
    with OnnxRuntimeSession(made, SessionOptions(threads=1)) as session:
        for given in (ids, ids.astype(np.int32), ids, ids.astype(np.int32)):
            found = session.run({"ids": given, "x": x})
            np.testing.assert_array_equal(found["y"], [[4, 5], [0, 1]])
            assert len(session.run({"ids": given[:1], "x": x[:1]})["y"]) == 1
        for wrong in (
            {"ids": ids, "x": x[:1]},
            {"ids": ids, "x": x.astype(np.float64)},
            {"ids": ids, "y": x},
            {"ids": ids},
            {"ids": [2, 0], "x": x},
        ):
            session.run({"ids": ids, "x": x})
            with pytest.raises(BadFeeds):
                session.run(wrong)
        with pytest.raises(ValuesOutOfRange):
            session.run({"ids": np.array([7, 0]), "x": x})
        assert session.run({"ids": ids[:0], "x": x[:0]})["y"].shape == (0, 2)
