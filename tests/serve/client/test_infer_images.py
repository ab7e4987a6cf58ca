"""Proves that ``accel infer`` converts images to the model's input layout and shows classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from PIL import Image

from accel.errors import BadData
from accel.serve.client.images import ImageInput, image_files
from tests.support import onnx_builder as build
from tests.support.serving import FLOAT, Start

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
LABELLED = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [3, 4, 5] }
output { name: "scores" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" }
"""


def model(folder: Path, shape: list[Any], dtype: int = FLOAT, *, scores: bool = False) -> None:
    """Writes a model that returns ``x`` unchanged. If ``scores`` is true, the model returns the mean of each channel of
    an NCHW image."""
    folder.mkdir(parents=True)
    if scores:
        nodes, out = [build.node("GlobalAveragePool", "x", "g"), build.node("Flatten", "g", "scores")], ["batch", 3]
        build.artifact(folder / "model.onnx", nodes, {"x": (dtype, shape)}, {"scores": (dtype, out)})
    else:
        nodes = [build.node("Identity", "x", "y")]
        build.artifact(folder / "model.onnx", nodes, {"x": (dtype, shape)}, {"y": (dtype, shape)})


@pytest.fixture
def url(tmp_path: Path, start: Start) -> str:
    models = tmp_path / "models"
    model(models / "colours" / "1", ["batch", 3, 4, 5], scores=True)
    (models / "colours" / "config.pbtxt").write_text(LABELLED)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    model(models / "any" / "1", ["batch", 3, "height", "width"], scores=True)
    model(models / "nchw" / "1", ["batch", 3, 4, 5])
    model(models / "bytes" / "1", ["batch", 4, 5, 3], TensorProto.UINT8)
    model(models / "single" / "1", [4, 5, 1])
    model(models / "rows" / "1", ["batch", 4])
    return f"127.0.0.1:{start(models, mode='explicit', models=('*',)).ports['grpc']}"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Makes the images ``a-red.png``, ``b-green.jpg`` and ``c-blue.PNG`` in different sizes."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, size in (("a-red.png", (5, 4)), ("b-green.jpg", (50, 40)), ("c-blue.PNG", (3, 9))):
        Image.new("RGB", size, COLOURS[name[2:].split(".")[0]]).save(folder / name)
    return folder


def test_classes_of_many(url: str, pictures: Path, cli: Any) -> None:
    """Fails if an image gets another image's classes, a label is wrong, batches have the wrong size, or no progress is
    shown."""
    ran = cli("infer", "colours", "--url", url, "--input", pictures, "--batch", "2", "--classes", "2", "--json")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["requests"] == 2
    assert [Path(name).name for name in body["images"]] == ["a-red.png", "b-green.jpg", "c-blue.PNG"]
    best = [row[0] for row in body["classes"]["scores"]]
    assert [(one["index"], one["label"]) for one in best] == [(0, "red"), (1, "green"), (2, "blue")]
    assert all(one["score"] == pytest.approx(1, abs=0.02) for one in best)  # jpeg is not exact
    assert [len(row) for row in body["classes"]["scores"]] == [2, 2, 2]
    assert "sending 3 images" in ran.stderr
    table = cli("infer", "colours", "--url", url, "--input", pictures / "b-green.jpg", "-q").stdout
    lines = [line for line in table.splitlines() if "scores" in line]
    assert len(lines) == 3  # by default
    assert "b-green.jpg" in lines[0]
    assert "green" in lines[0]


def test_pixels_as_the_model_takes_them(url: str, tmp_path: Path, cli: Any) -> None:
    """Checks that each pixel reaches the model at the right position, in the right channel, and with the right
    value."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    mean, std = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.25, 0.5])

    def sent(name: str, *words: str) -> np.ndarray:
        ran = cli("infer", name, "--url", url, "--input", tmp_path / "p.png", "-o", tmp_path / "y.npz", "-q", *words)
        assert ran.code == 0, ran.stderr
        found: np.ndarray = np.load(tmp_path / "y.npz")["y"]
        return found

    np.testing.assert_array_equal(sent("bytes")[0], pixels)
    np.testing.assert_allclose(sent("nchw")[0], pixels.transpose(2, 0, 1) / 255, rtol=1e-6)
    normalized = (pixels / 255 - mean) / std
    found = sent("nchw", "--normalize", "0.4:0.5:0.6,0.2:0.25:0.5")[0]
    np.testing.assert_allclose(found, normalized.transpose(2, 0, 1), rtol=1e-4, atol=1e-5)
    grey = np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None] / 255
    np.testing.assert_allclose(sent("single")[0], grey, rtol=1e-6)


def test_images_of_any_size_go_as_they_are(url: str, pictures: Path, cli: Any) -> None:
    """Fails if an image is resized for a model that takes any size, or if images of different sizes share a batch."""
    Image.new("RGB", (3, 9), COLOURS["red"]).save(pictures / "d-red.png")
    ran = cli("infer", "any", "--url", url, "--input", pictures, "--json", "-q", "--classes", "0")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["requests"] == 3  # two of the four images have the same size
    assert body["outputs"]["scores"]["shape"] == [4, 3]
    np.testing.assert_allclose(body["outputs"]["scores"]["data"][-3:], [1, 0, 0], atol=1e-6)


def test_the_way_up(tmp_path: Path) -> None:
    """Checks that an image is rotated according to its EXIF orientation."""
    upright = np.zeros((2, 4, 3), np.uint8)
    upright[0, 0] = 255
    turned = Image.fromarray(np.rot90(upright).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF: rotate by 90 degrees clockwise
    turned.save(tmp_path / "t.png", exif=exif)
    image = ImageInput(
        name="x", datatype="UINT8", channels=3, height=None, width=None, channels_first=False, batched=True
    )
    np.testing.assert_array_equal(image.read(tmp_path / "t.png"), upright)


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("broken.png", (), "can't read"),
        ("cut.png", (), "can't read"),
        ("gif.png", (), "give PNG or JPEG"),
        ("empty", (), "holds no images"),
        ("good.png", ("--input", "x.npz"), "can't be sent together"),
        (
            "good.png",
            ("--normalize", "0.5:0.5,1"),
            "the mean of --normalize needs 1 number, or 3 numbers for 3 channels",
        ),
        ("good.png", ("--normalize", "0.5"), "write MEAN,STD"),
        ("good.png", ("--normalize", "0.5,0"), "the deviation of --normalize has to be above 0"),
        ("x.npz", ("--normalize", "0.5,1"), "--normalize is for images"),
        ("x.npz", ("--input", "x.npz"), "several --input are for images"),
    ],
)
def test_what_is_refused(url: str, tmp_path: Path, cli: Any, name: str, words: tuple[str, ...], says: str) -> None:
    """Checks that a bad image or a bad option is refused before the server gets a request, with an error that names the
    cause."""
    good = Image.new("RGB", (64, 64), COLOURS["red"])
    good.save(tmp_path / "good.png")
    good.save(tmp_path / "gif.png", format="GIF")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 3, 4, 5), np.float32))
    given = [tmp_path / word if word.endswith(".npz") else word for word in words]
    ran = cli("infer", "nchw", "--url", url, "--input", tmp_path / name, *given, "-q")
    assert ran.code == 2
    assert says in " ".join(ran.stderr.split())


def test_a_model_that_takes_no_image(url: str, pictures: Path, cli: Any) -> None:
    """Checks that images are refused for a model without an image input, and that --normalize is refused for an input
    of UINT8 pixels."""
    ran = cli("infer", "rows", "--url", url, "--input", pictures, "-q")
    assert ran.code == 2
    assert "images need a model with a single input" in ran.stderr
    assert "x FP32 [-1, 4]" in ran.stderr
    ran = cli("infer", "bytes", "--url", url, "--input", pictures, "-q", "--normalize", "0.5,0.5")
    assert ran.code == 2
    assert "takes UINT8 pixels" in ran.stderr


def test_a_picture_that_unpacks_to_a_huge_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a small file that decompresses to a huge image is refused, so that the image can't fill the
    memory."""
    Image.new("RGB", (60, 50)).save(tmp_path / "bomb.png")
    image = ImageInput(name="x", datatype="FP32", channels=3, height=4, width=4, channels_first=True, batched=True)
    assert image.read(tmp_path / "bomb.png").shape == (3, 4, 4)
    # The image has 3000 pixels. Pillow warns above the limit, and raises an error above twice the limit.
    for limit in (2000, 1000):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(BadData, match="can't read"):
            image.read(tmp_path / "bomb.png")


def test_classes_of_arrays(url: str, tmp_path: Path, cli: Any) -> None:
    """Checks that ``--classes`` also works for arrays."""
    np.savez(tmp_path / "x.npz", x=np.stack([np.full((3, 4, 5), [[[1.0]], [[3.0]], [[2.0]]], np.float32)] * 9))
    ran = cli("infer", "colours", "--url", url, "--input", tmp_path / "x.npz", "--classes", "1", "--json", "-q")
    assert ran.code == 0, ran.stderr
    rows = json.loads(ran.stdout)["classes"]["scores"]
    assert rows == [[{"score": 3.0, "index": 1, "label": "green"}]] * 9
    assert image_files([tmp_path / "x.npz"]) == []
