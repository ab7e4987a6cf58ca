"""Proves that sessions can be pickled and copied, as pools of processes and data loaders do."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import BadSource

X = torch.arange(6.0).reshape(2, 3)


def made(kind: str, module: nn.Module, folder: Path) -> Any:
    """Returns an opened model of this kind."""
    if kind == "torch":
        return accel.load(module, example=(X,))
    if kind == "pipeline":
        pipeline = accel.Pipeline(lambda parts, x: parts.one(x), one=module)
        return accel.load(accel.export(pipeline, example=(X,), out=folder / "pipeline"))
    out = folder / ("model.onnx" if kind == "onnx" else kind)
    return accel.load(accel.export(module, example=(X,), to=kind, out=out))


@pytest.mark.parametrize("kind", ["torch", "onnx", "openvino", "pipeline"])
def test_a_copy_runs_alone(kind: str, tmp_path: Path) -> None:
    """Fails if a session can't be pickled or copied, or if the copy ends with the original."""
    module = nn.Linear(3, 2).eval()
    with made(kind, module, tmp_path) as session:
        pickled, copied = pickle.loads(pickle.dumps(session)), copy.deepcopy(session)
    for one in (pickled, copied):
        assert (type(one), one.options) == (type(session), session.options)
        with one:
            torch.testing.assert_close(one(X), module(X).detach())


def test_a_copy_of_other_files_is_refused(tmp_path: Path) -> None:
    """Fails if the copy of a session computes with a file that was changed since, or if a missing file ends in a
    traceback of the runtime."""
    out = tmp_path / "model.onnx"
    with accel.load(accel.export(nn.Linear(3, 2), example=(X,), out=out)) as session:
        kept = pickle.dumps(session)
    accel.export(nn.Linear(3, 2), example=(X,), out=out)
    with pytest.raises(BadSource, match="has changed"):
        pickle.loads(kept)
    out.unlink()
    with pytest.raises(BadSource, match="is gone"):
        pickle.loads(kept)
