"""Tests what a gate does if a case is too large for the machine, or if the runtime can't load the stage's result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import accel
from accel import kept_outputs
from accel.errors import GateFailed
from accel.proof import gates, room
from accel.proof.gates import OutputGate

MIB = 1 << 20


def test_a_case_that_needs_too_much_memory_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a gate runs a case that doesn't fit into memory, or if it doesn't say that the case was left out. The
    model of this test seems to need 100 MiB for each row. The second gate must know this from the first gate, because
    it finds the outputs of the smaller cases in a cache."""
    accel.export(torch.nn.Linear(3, 2), example=(torch.randn(2, 3),), out=tmp_path / "net.onnx")
    model = accel.Source(tmp_path / "net.onnx").open()
    monkeypatch.setattr(kept_outputs, "_kept", type(kept_outputs._kept)())
    monkeypatch.setattr(gates, "_rooms", {})
    ran = [0]
    plain = gates.open_session

    def opened(*arguments: object) -> object:
        ran[:] = [0]
        session = plain(*arguments)  # type: ignore[arg-type]
        run = session.run
        monkeypatch.setattr(session, "run", lambda feeds: (ran.append(len(feeds["input"])), run(feeds))[1])
        return session

    monkeypatch.setattr(gates, "open_session", opened)
    monkeypatch.setattr(room, "_resident", lambda: max(ran) * 100 * MIB)
    monkeypatch.setattr(room, "available_memory", lambda: 1000 * MIB)
    for _ in range(2):
        *compared, left_out = OutputGate(limit=1e-6).check(model, model)
        assert {result.case.partition(" ")[0] for result in compared} == {"batch=1", "batch=2"}
        assert all(result.passed for result in compared)
        assert (left_out.case, left_out.passed) == ("batch=8", None)
        assert "needs about 0.8 GiB of memory, and 1.0 GiB are free" in left_out.note
        assert max(ran) == 2
    monkeypatch.setattr(room, "available_memory", lambda: 1300 * MIB)
    assert "batch=8" in {result.case for result in OutputGate(limit=1e-6).check(model, model) if result.passed}


def test_a_result_that_its_runtime_cannot_load_fails_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the gate blames the user's file when a runtime can't load a model that accel made. A usage error would
    end ``accel optimize``, although other candidates may work. The error must leave out the path of the temporary file
    and the advice for the user's file."""
    source = accel.export(torch.nn.Linear(3, 2), example=(torch.randn(2, 3),), out=tmp_path / "net.onnx")
    made = accel.export(tmp_path / "net.onnx", to="openvino", out=tmp_path / "ir")
    made.path.with_suffix(".bin").write_bytes(b"")
    monkeypatch.setattr(kept_outputs, "_kept", type(kept_outputs._kept)())  # the export has already run the model
    with pytest.raises(GateFailed, match=r"^openvino can't load the model that the stage made: ") as failed:
        OutputGate(limit=1e-6).check(source, made)
    assert str(tmp_path) not in str(failed.value)
    assert "again" not in str(failed.value)
