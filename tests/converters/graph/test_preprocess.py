"""Proves that `accel export` with preprocessing accepts raw images in every layout, dtype and size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact
from accel.converters.graph.preprocess import PreprocessConfig
from accel.errors import BadInputSpec
from accel.proof.preprocess_gate import resize_bilinear
from accel.signature import DimRange

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def channels_last(tensorflow_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Returns a net whose input has three channels in the last dim, as in TensorFlow's models."""
    out = tmp_path_factory.mktemp("channels_last") / "net.onnx"
    return accel.export(tensorflow_models / "sequential.keras", out=out)


def first_nodes(path: Path, number: int) -> list[str]:
    return [node.op_type for node in onnx.load(str(path)).graph.node[:number]]


def test_one_affine(digits: Artifact, tmp_path: Path) -> None:
    """Fails if the division by 255, the mean and the deviation take more than one Mul and one Add. Also fails if the
    Mul and the Add come before the Cast. Also fails if the graph has a second Transpose."""
    config = PreprocessConfig(mean=(0.25,), std=(0.5,), layout="NHWC", dtype="uint8")
    made = accel.export(digits.path, preprocess=config, out=tmp_path / "p.onnx")
    assert first_nodes(made.path, 5) == ["Cast", "Transpose", "Mul", "Add", "Conv"]
    weights = {t.name: numpy_helper.to_array(t).item() for t in onnx.load(str(made.path)).graph.initializer[-2:]}
    np.testing.assert_allclose(list(weights.values()), [1 / (255 * 0.5), -0.25 / 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("layout", "resize", "before"),
    [
        ("NHWC", None, ["Cast", "Mul", "Add"]),
        ("", None, ["Cast", "Mul", "Add"]),
        ("NCHW", None, ["Cast", "Mul", "Add", "Conv"]),
        ("NHWC", (8, 8), ["Cast", "Transpose", "Resize", "Mul", "Add", "Conv"]),
        ("NCHW", (8, 8), ["Cast", "Resize", "Mul", "Add", "Conv"]),
    ],
)
def test_a_model_with_channels_last(
    channels_last: Artifact, tmp_path: Path, layout: str, resize: tuple[int, int] | None, before: list[str]
) -> None:
    """Fails if a mean per channel is applied along the wrong axis of a channels-last net. Also fails if image bytes
    give other scores than the preprocessed image. Also fails if a channels-first image is transposed to channels last
    and back before the first convolution."""
    config = PreprocessConfig(mean=MEAN, std=STD, layout=layout, dtype="uint8", resize=resize)
    made = accel.export(channels_last.path, preprocess=config, out=tmp_path / "p.onnx")
    assert first_nodes(made.path, len(before)) == before
    size = (20, 12) if resize else (8, 8)
    image = np.random.default_rng(0).integers(0, 256, (3, *size, 3)).astype(np.uint8)
    pixels = resize_bilinear(image.astype(np.float64), resize) if resize else image
    prepared = ((pixels / 255 - MEAN) / STD).astype(np.float32)
    with accel.load(made) as served, accel.load(channels_last) as plain:
        (name,) = (spec.name for spec in plain.signature.inputs)
        (wanted,) = plain.run({name: prepared}).values()
        (found,) = served.run({name: image.transpose(0, 3, 1, 2) if layout == "NCHW" else image}).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert np.ptp(wanted) > 1e-2


@pytest.mark.parametrize("other", ["nothing", "a branch", "an output", "another turn"])
def test_turns_that_are_needed(tmp_path: Path, other: str) -> None:
    """Fails if the transpose to channels last stays although only the reverse transpose reads its output. Also fails if
    the transpose to channels last is removed although another node needs its output."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["first"], perm=[0, 3, 1, 2]),
        helper.make_node("GlobalAveragePool", ["first"], ["pooled"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 6, 4, 3])
    outputs: dict[str, list[int] | None] = {"pooled": [3, 1, 1]}
    if other == "a branch":
        there = helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0)
        branches = {
            name: helper.make_graph([node], name, [], [helper.make_tensor_value_info("most", TensorProto.FLOAT, [])])
            for name, node in (("then_branch", there), ("else_branch", there))
        }
        nodes += [helper.make_node("ReduceSum", ["pooled"], ["sum"], keepdims=0)]
        nodes += [helper.make_node("Cast", ["sum"], ["asked"], to=TensorProto.BOOL)]
        nodes += [helper.make_node("If", ["asked"], ["highest"], **branches)]
        outputs["highest"] = None
    elif other == "an output":
        outputs["first"] = [3, 6, 4]
    elif other == "another turn":
        nodes.append(helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 2, 1, 3]))
        outputs["turned"] = [4, 6, 3]
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [] if d is None else ["batch", *d])
        for n, d in outputs.items()
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], ends), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    onnx.save(model, tmp_path / "t.onnx")
    made = accel.export(tmp_path / "t.onnx", preprocess=PreprocessConfig(layout="NCHW"), out=tmp_path / "p.onnx")
    turns = [node.op_type for node in onnx.load(str(made.path)).graph.node].count("Transpose")
    assert turns == {"nothing": 0, "a branch": 2, "an output": 2, "another turn": 3}[other]
    image = np.random.default_rng(0).random((2, 6, 4, 3)).astype(np.float32)
    with accel.load(tmp_path / "t.onnx") as plain, accel.load(made) as turned:
        wanted, found = plain.run({"x": image}), turned.run({"x": image.transpose(0, 3, 1, 2)})
    for name in outputs:
        np.testing.assert_array_equal(found[name], wanted[name])


@pytest.mark.parametrize("dtype", ["uint8", "float16", ""])
def test_a_model_in_half_precision(tmp_path: Path, dtype: str) -> None:
    """Fails if preprocessing feeds float32 values or wrong values to a net with float16 inputs."""
    kind = TensorProto.FLOAT16
    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["a"]), helper.make_node("Flatten", ["a"], ["y"])]
    x = helper.make_tensor_value_info("x", kind, ["batch", 3, 6, 6])
    y = helper.make_tensor_value_info("y", kind, ["batch", 3])
    opset = [helper.make_opsetid("", 18)]
    onnx.save(
        helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=opset, ir_version=9),
        tmp_path / "h.onnx",
    )
    config = PreprocessConfig(mean=MEAN, std=STD, layout="NHWC", dtype=dtype)
    made = accel.export(tmp_path / "h.onnx", preprocess=config, out=tmp_path / "p.onnx")
    assert made.signature.inputs[0].dtype == (dtype or "float16")
    assert made.signature.outputs[0].dtype == "float16"
    pixels = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3))
    given = pixels.astype(np.uint8) if dtype == "uint8" else (pixels / 255).astype(np.float16)
    with accel.load(made) as session:
        (found,) = session.run({"x": given}).values()
    np.testing.assert_allclose(found, ((pixels / 255 - MEAN) / STD).mean((1, 2)), atol=5e-3)


def test_sizes_that_come_in(cli: Any, digits: Artifact, tmp_path: Path) -> None:
    """Checks that --dim can set the sizes of the images before the resize, and that the gate compares at these sizes.
    Also fails if the image sizes get the range of the batch dim."""
    out = tmp_path / "p.onnx"
    dims = ["--dim", "height=16:32:48", "--dim", "width=12:24:40", "--dim", "batch=1:2:4"]
    ran = cli("export", digits.path, "--resize", "8x8", "--dtype", "uint8", *dims, "-o", out, "--json", "-q")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["signature"]["dims"] == {"batch": [1, 2, 4], "height": [16, 32, 48], "width": [12, 24, 40]}
    cases = " ".join(gate["summary"] for gate in body["gates"])
    assert "height=" in cases


def test_sizes_of_what_is_not_resized(cli: Any, digits: Artifact, tmp_path: Path) -> None:
    """Checks that --dim refuses image sizes if --resize is missing. Even with --resize, --dim must refuse an unknown
    dim."""
    words = ["export", digits.path, "--dtype", "uint8", "-o", tmp_path / "p.onnx", "-q"]
    ran = cli(*words, "--dim", "height=16:32:48")
    assert (ran.code, "no input has a dim called 'height'" in ran.stderr) == (2, True)
    ran = cli(*words, "--resize", "8x8", "--dim", "heigth=16:32:48")
    assert (ran.code, "no input has a dim called 'heigth'" in ran.stderr) == (2, True)
    config = PreprocessConfig(resize=(8, 8), dims={"depth": DimRange(1, 2, 3)})
    with pytest.raises(BadInputSpec, match="no input has a dim called 'depth'"):
        accel.export(digits.path, preprocess=config, out=tmp_path / "p.onnx")
    assert not (tmp_path / "p.onnx").exists()
