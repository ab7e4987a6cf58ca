"""Proves that replacing a served model's files changes no answers, and that processes share mapped weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.support import onnx_builder as build
from tests.support.serving import Start, client, linear, pids, tensor

SIZE = 1024  # 4 MiB of weights: large enough to be memory-mapped


def weighted(folder: Path, kind: str, scale: float) -> Path:
    """Writes a model with a square weight matrix that multiplies each input value by ``scale``, and returns the file of
    the matrix."""
    folder.mkdir(parents=True, exist_ok=True)
    made = build.artifact(
        folder / ("model.onnx" if kind == "onnx" else "source.onnx"),
        [build.node("MatMul", "x w", "y")],
        {"x": (onnx.TensorProto.FLOAT, ["batch", SIZE])},
        {"y": (onnx.TensorProto.FLOAT, ["batch", SIZE])},
        {"w": np.eye(SIZE, dtype=np.float32) * np.float32(scale)},
    ).path
    if kind == "onnx":
        return made
    if kind == "openvino":
        ov = pytest.importorskip("openvino")
        ov.save_model(ov.convert_model(str(made)), str(folder / "model.xml"), compress_to_fp16=False)
        made.unlink()
        return folder / "model.bin"
    model = onnx.load(made)
    made.unlink()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights.data", size_threshold=0)
    return folder / "weights.data"


def scale(made: Any) -> float:
    """Returns the factor between the model's inputs and its outputs."""
    x = (2.0 ** (np.arange(SIZE) % 8)).astype(np.float32)[None]  # bfloat16 represents these powers of two exactly
    found = made.infer("wide", [tensor("x", x, "FP32")]).as_numpy("y") / x
    np.testing.assert_allclose(found, found[0, 0], rtol=1e-5)
    return round(float(found[0, 0]), 3)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["onnx", "external", "openvino"])
def test_weights_that_are_renamed_over(tmp_path: Path, start: Start, kind: str) -> None:
    """Fails if replacing the file of the weights changes an answer before the model is reloaded. Also checks that a
    reload notices new weights even if no other file changed."""
    weights = weighted(tmp_path / "models" / "wide" / "1", kind, 1)
    process = start(tmp_path / "models", mode="explicit", models=("*",))
    with client(process.ports["grpc"]) as made:
        for before, after in ((1, 2), (2, 3)):
            assert scale(made) == before
            new = weighted(tmp_path / f"new-{after}", kind, after)
            assert new.stat().st_size >= 4 * SIZE * SIZE
            new.replace(weights)
            assert [scale(made) for _ in range(3)] == [before] * 3
            made.load_model("wide")
            assert scale(made) == after


def mapped(pid: int, file: Path) -> tuple[int, int]:
    """Returns the resident set size and the proportional set size of ``file`` in the process, in KiB."""
    found = {"Rss": 0, "Pss": 0}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and (key := line.partition(":")[0]) in found:
            found[key] += int(line.split()[1])
    return found["Rss"], found["Pss"]


@pytest.mark.proof
def test_processes_share_weights(tmp_path: Path, serve: Any) -> None:
    """Checks that two processes that serve an OpenVINO model share the memory pages of the model's weights."""
    weights = weighted(tmp_path / "models" / "wide" / "1", "openvino", 1)
    linear(tmp_path / "models" / "linear" / "1")
    served = serve(str(tmp_path / "models"), "--processes", "2")
    served.wait_for("all processes serve")
    for pid in pids(served):
        resident, share = mapped(pid, weights)
        assert resident >= 0.9 * 4 * SIZE * SIZE / 1024
        assert share <= 0.6 * resident
