"""Proves that integers that an operator of ONNX Runtime refuses are said to be the caller's fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from accel.errors import RunFailed, ValuesOutOfRange
from accel.runtimes.base import open_session
from tests.support.onnx_builder import FLOAT, artifact


def test_integers_that_an_operator_refuses_are_the_callers_fault(tmp_path: Path) -> None:
    """Fails if lengths or counts beyond a dim raise another error than an index beyond a table, or if the message
    doesn't name the input. Integers that the model computes itself aren't the caller's."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((1, 8, 3)), "r": rng.standard_normal((1, 8, 2)), "one": np.array([1])}
    constants = {name: array.astype(np.int64 if name == "one" else np.float32) for name, array in weights.items()}
    lstm = helper.make_node("LSTM", ["x", "w", "r", "", "short"], ["", "y"], hidden_size=2)
    cast = helper.make_node("Cast", ["n"], ["short"], to=TensorProto.INT32)
    top = [helper.make_node("TopK", ["x", name], ["y", "i"], axis=0) for name in ("n", "more")]
    more = helper.make_node("Add", ["n", "one"], ["more"])
    ends = {"x": (FLOAT, ["t", "b", 3]), "n": (TensorProto.INT64, ["b"])}
    for name, nodes, fault in (
        ("lstm", [cast, lstm], ValuesOutOfRange),
        ("top", top[:1], ValuesOutOfRange),
        ("own", [more, top[1]], RunFailed),
    ):
        model = artifact(tmp_path / f"{name}.onnx", nodes, ends, {"y": (FLOAT, ["k", "b", "w"])}, constants)
        with open_session(model, "onnxruntime") as session:
            feeds = {"x": np.ones((4, 1, 3), np.float32), "n": np.array([9])}
            with pytest.raises(
                RunFailed, match="check the values of 'n'" if fault is ValuesOutOfRange else "TopK"
            ) as said:
                session.run(feeds)
            assert type(said.value) is fault
            assert session.run(feeds | {"n": np.array([3])})["y"].size
