"""Proves that accel exports, runs and serves a model only at multiples of a dim's step size. The model is a U-Net that
halves an image twice."""

from __future__ import annotations

import json
import queue
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import accel
from accel.api.reproduce import reproduce
from accel.artifact import Artifact, manifest_path
from accel.converters.graph.preprocess import PreprocessConfig
from accel.errors import BadData, BadFeeds, BadInputSpec, BadSource
from accel.proof import reproduce as remaking
from accel.proof.data import Dataset
from accel.runtimes.base import open_session
from accel.serve.core.server import InferenceServer
from accel.serve.core.transport import InferCall, WireInput
from accel.serve.models.repository import Repository
from accel.serve.protocol.inference import Code, ServeError
from accel.signature import DimRange
from accel.sources.python_object import load_object
from accel.sources.source import Source

UNET = """
import torch
from torch import nn

class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.deep, self.pool = nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)
        self.up_deep, self.join = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 4, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        whole = self.first(x).relu()
        half = self.second(self.pool(whole)).relu()
        deep = self.deep(self.pool(half)).relu()
        half = self.join(torch.cat([half, self.up_deep(deep)], 1)).relu()
        return {"mask": self.last(torch.cat([whole, self.up(half)], 1)), "half": half}

def make():
    return UNet()
"""
IMAGE = "x:float32[batch,3,height,width]"
STEPS = {"batch": (1, 1, 2), "height": (16, 32, 64, 4), "width": DimRange(16, 24, 48, 8)}
WORDS = ["--dim", "batch=1:1:2", "--dim", "height=16:32:64:4", "--dim", "width=16:24:48:8"]
RANGES = {"batch": [1, 1, 2], "height": [16, 32, 64, 4], "width": [16, 24, 48, 8]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("unet") / "unet.py"
    path.write_text(UNET)
    return f"{path}:make"


@pytest.fixture(scope="module")
def unet(source: str, _one_cache: None) -> Artifact:
    return accel.export(source, inputs=[IMAGE], dims=STEPS, out=Path(source.rpartition(":")[0]).with_name("unet.onnx"))


def wanted(source: str, x: np.ndarray) -> dict[str, np.ndarray]:
    with accel.load(source, inputs=[IMAGE], dims=STEPS) as eager:
        found: dict[str, np.ndarray] = eager.run({"x": x})
    return found


def test_multiples_are_exported(cli: Any, source: str, unet: Artifact, tmp_path: Path) -> None:
    """Checks that the first exporter that accel tries (dynamo) succeeds, and that every gate runs at a multiple of the
    step. Also checks that the ONNX file gives right outputs at a size that no gate has tried."""
    out = tmp_path / "unet.onnx"
    ran = cli("export", source, "--input", IMAGE, *WORDS, "-o", out, "--json", "-q")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["signature"]["dims"] == RANGES
    assert body["stages"][0]["notes"]["rung"] == "dynamo", body["stages"][0]["notes"]["refused"]
    assert all(gate["passed"] for gate in body["gates"])
    cases = {gate["case"] for stage in unet.history for gate in stage["gates"]}
    assert {"batch=1, height=64, width=48", "batch=2, height=16, width=16"} <= cases
    for case in cases:
        sizes = dict(part.split("=") for part in case.partition(" seed")[0].split(", "))
        assert (int(sizes["height"]) % 4, int(sizes["width"]) % 8) == (0, 0)
    graph = onnx.load(str(out)).graph
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.output}
    assert shapes["mask"] == ["batch", 2, "height", "width"]
    x = np.random.default_rng(0).standard_normal((3, 3, 52, 40)).astype(np.float32)
    with accel.load(out) as session:
        found = session.run({"x": x})
    for name, value in wanted(source, x).items():
        np.testing.assert_allclose(found[name], value, atol=1e-5)
    assert found["half"].shape == (3, 4, 26, 20)
    ran = cli("inspect", out)
    assert "dim  height 16:32:64:4" in ran.stdout


def test_the_older_exporter(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the older exporter traces only at multiples of the step. If two dims have the same typical size
    (``opt``), the exporter must trace them at different sizes, to tell them apart."""
    from accel.converters.from_torch import exporters as torch_exporters
    from accel.converters.from_torch import onnx_from_torch as stage

    dims = {"height": (16, 32, 64, 4), "width": (16, 32, 64, 4)}
    seen: list[tuple[int, ...]] = []
    real = torch_exporters.example
    monkeypatch.setattr(torch_exporters, "example", lambda src: seen.append(real(src)[0].shape) or real(src))
    src = Source(source, inputs=[IMAGE], dims=dims).open()
    stage.onnx_from_torch(src, stage.OnnxFromTorchConfig(ladder=("legacy",)), tmp_path / "m.onnx")
    assert seen == [(2, 3, 32, 36)]


def test_other_sizes_are_refused(cli: Any, unet: Artifact, tmp_path: Path) -> None:
    """Checks that a runtime only gets inputs with sizes that are multiples of the step. For any other size, the error
    must name sizes that work."""
    with accel.load(unet.path) as session:
        with pytest.raises(
            BadFeeds, match="'height' has size 33, but the model takes multiples of 4; pad or cut it to 32"
        ):
            session.run({"x": np.zeros((1, 3, 33, 16), np.float32)})
        says = "'width' can't have the size 20, because its sizes are multiples of 8; use 16 or 24"
        with pytest.raises(BadInputSpec, match=says):
            session.example_inputs(width=20)
    ran = cli("bench", unet.path, "--sizes", "batch=1,height=30,width=16")
    assert (ran.code, "use 28 or 32" in ran.stderr, "Traceback" in ran.stderr) == (2, True, False)
    np.savez(tmp_path / "odd.npz", x=np.zeros((4, 3, 30, 16), np.float32))
    with pytest.raises(BadData, match=r"odd.npz: input 'x' has the dim height of size 30, but .* of 4; .* 28 or 32"):
        Dataset.load(tmp_path / "odd.npz", unet.signature)
    np.savez(tmp_path / "large.npz", x=np.zeros((4, 3, 72, 16), np.float32))
    with pytest.raises(BadData, match=r"height of size 72, outside .* 16\.\.64; .* dims=\{'height': '16:32:72:4'\}"):
        Dataset.load(tmp_path / "large.npz", unet.signature)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("height=16:33:64:4", "33 is no multiple of the step 4; write the range 16:32:64:4"),
        ("height=15:30:63:8", "15 is no multiple of the step 8; write the range 16:32:64:8"),
        ("height=1:32:64:4", "1 is no multiple of the step 4; write the range 4:32:64:4"),
        ("height=16:32:64:0", "a step of at least 1, but got the range 16:32:64:0"),
        ("height=16:32:64:4:1", "write min:opt:max"),
        ("height=16:32:64:four", "write min:opt:max"),
    ],
)
def test_ranges_that_contradict_their_step(cli: Any, source: str, tmp_path: Path, text: str, words: str) -> None:
    """Checks that accel refuses a range of a dim if the range's sizes aren't multiples of the step. The error must name
    the fix."""
    ran = cli("export", source, "--input", IMAGE, "--dim", text, "-o", tmp_path / "m.onnx", "-q")
    assert (ran.code, len(ran.stderr.splitlines())) == (2, 1)
    assert words in ran.stderr


def test_the_step_that_nobody_said(source: str, unet: Artifact, tmp_path: Path) -> None:
    """Checks that accel finds the step of a model that runs only at certain sizes, if the user gives no step. The error
    must name the ``dims`` to pass. The model comes from a factory or from a foreign ONNX file."""
    fix = r"; it runs at multiples of 4: pass dims={{'height': '{0}', 'width': '{0}'}}$"
    with pytest.raises(BadSource, match=r"fails in PyTorch on .*" + fix.format("16:32:64:4")):
        Source(source, inputs=[IMAGE], dims={"height": (16, 32, 64), "width": (16, 32, 64)}).open()
    with pytest.raises(BadSource, match=r"it runs at multiples of 4: pass dims={'height': '16:32:64:4'}$"):
        Source(source, inputs=["x:float32[batch,3,height,32]"], dims={"height": (15, 33, 66)}).open()
    foreign = shutil.copy(unet.path, tmp_path / "foreign.onnx")
    with pytest.raises(BadInputSpec, match=r"foreign.onnx fails at .*" + fix.format("4:16:64:4")):
        accel.optimize(foreign, target="ort-cpu", out=tmp_path / "out")
    dims = {"height": (17, 33, 65), "width": (16, 32, 64)}
    with pytest.raises(accel.AccelError, match=r"doesn't run on inputs of the shapes x .*'height': '20:32:64:4'"):
        accel.export(foreign, dims=dims, out=tmp_path / "again.onnx")
    dims = {"height": (16, 32, 64, 4), "width": (16, 32, 64, 4)}
    made = accel.export(foreign, dims=dims, out=tmp_path / "again.onnx")
    assert made.signature.dims["height"] == DimRange(16, 32, 64, 4)


def test_a_net_that_only_takes_large_images(tmp_path: Path) -> None:
    """Checks that the error doesn't suggest a step for a net that runs at every size above a minimum. A net with a
    minimum size also runs at all multiples of a large step, so accel could wrongly conclude that the net needs the
    step."""
    path = tmp_path / "wide.py"
    path.write_text("import torch\n\ndef make():\n    return torch.nn.Conv2d(3, 2, 20)\n")
    with pytest.raises(BadSource, match=r"correct inputs= or dims=$"):
        Source(f"{path}:make", inputs=[IMAGE]).open()


def test_optimize_keeps_the_step(cli: Any, unet: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that `accel optimize` makes, checks and measures candidates only at multiples of the step. Also checks
    that the result keeps the step if --dim narrows the range without repeating the step."""
    monkeypatch.setattr("accel.optimizer.search._SECONDS_OF_CANDIDATES", 0.2)
    words = ["--target", "ort-cpu", "--precision", "fp32", "--fixed-session", "--rounds", "5"]
    ran = cli("optimize", unet.path, *words, "--dim", "height=16:24:32", "-o", tmp_path / "out", "--json", "-q")
    assert ran.code == 0, ran.stderr
    with accel.load(tmp_path / "out") as session:
        dims = session.signature.dims
    assert (dims["height"].step, dims["width"].step) == (4, 8)
    assert "x [1, 3, 24, 24]" in json.loads(ran.stdout)["notes"][0]
    assert accel.verify(unet.path, tmp_path / "out").passed


def test_two_models_in_different_steps(unet: Artifact, tmp_path: Path) -> None:
    """Fails if `accel verify` or `accel bench` compares two models at sizes that only one of the models accepts."""
    dims = {"height": (24, 36, 60, 12), "width": (24, 24, 96, 24)}
    other = accel.export(unet.path, dims=dims, out=tmp_path / "m.onnx")
    found = accel.verify(unet.path, other.path)
    assert found.passed
    sizes = [dict(part.split("=") for part in case.split(", ")) for case in found.cases]
    assert {int(size["height"]) for size in sizes} == {24, 36, 60}
    assert {int(size["width"]) for size in sizes} == {24, 48}


@pytest.mark.proof
def test_an_exported_program_keeps_its_step(source: str, unet: Artifact, tmp_path: Path) -> None:
    """Checks that a .pt2 file with a dim like ``4 * Dim(...)`` runs only at multiples of 4. Also checks that a .pt2
    file from accel declares the step of each dim."""
    factory = load_object(source, "factory")[1]
    batch, columns = torch.export.Dim("batch", max=16), torch.export.Dim("columns")
    rows = torch.export.Dim("rows", min=2, max=24)
    shapes = {"x": {0: batch, 2: 4 * rows, 3: 8 * columns}}
    program = torch.export.export(factory().eval(), (torch.ones(2, 3, 32, 24),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "mine.pt2")
    found = Source(tmp_path / "mine.pt2").open()
    _, _, height, width = found.signature.inputs[0].shape
    assert found.signature.dims[height] == DimRange(8, 32, 96, 4)
    assert found.signature.dims[width].step == 8
    with open_session(found) as session:
        session.run(found.signature.example_inputs(**{height: 20}))

    accel.export(unet.path, to="torch", out=tmp_path / "torch")
    written = tmp_path / "torch" / "model.pt2"
    manifest_path(written).unlink()
    again = Source(written).open()
    steps = [again.signature.dims[dim].step for dim in again.signature.inputs[0].shape if isinstance(dim, str)]
    assert steps == [1, 4, 8]
    x = np.random.default_rng(1).standard_normal((2, 3, 20, 32)).astype(np.float32)
    with open_session(again) as session:
        (mask, half) = session.run({again.signature.inputs[0].name: x}).values()
    right = wanted(source, x)
    np.testing.assert_allclose(mask, right["mask"], atol=1e-5)
    np.testing.assert_allclose(half, right["half"], atol=1e-5)


def test_a_server_refuses_other_sizes(source: str, unet: Artifact, tmp_path: Path) -> None:
    """Checks that the server only accepts multiples of the step, and tells the client which sizes work."""
    (tmp_path / "unet" / "1").mkdir(parents=True)
    unet.copy_to(tmp_path / "unet" / "1" / "model.onnx")
    repository = Repository(tmp_path, mode="explicit", startup=["*"])
    repository.start()
    server = InferenceServer(repository)

    def call(x: np.ndarray, answers: queue.Queue[Any]) -> None:
        server.infer(InferCall("unet", inputs=[WireInput("x", "FP32", x.shape, raw=x.tobytes())]), answers.put)

    try:
        for shape, words in (((1, 3, 33, 32), "33 in dim 'height'"), ((1, 3, 32, 20), "20 in dim 'width'")):
            with pytest.raises(
                ServeError, match=f"has the size {words}, but model 'unet' takes multiples of"
            ) as caught:
                call(np.zeros(shape, np.float32), queue.Queue())
            assert caught.value.code is Code.INVALID_ARGUMENT
        x = np.random.default_rng(2).standard_normal((2, 3, 28, 32)).astype(np.float32)
        answers: queue.Queue[Any] = queue.Queue()
        call(x, answers)
        outputs = {tensor.name: tensor.array for tensor in answers.get(timeout=60).outputs}
        np.testing.assert_allclose(outputs["mask"], wanted(source, x)["mask"], atol=1e-5)
    finally:
        server.close()


def test_images_that_are_resized_come_in_any_size(unet: Artifact, tmp_path: Path) -> None:
    """Checks that an exported file accepts images of any size if its preprocessing resizes images. Also checks that
    preprocessing can't resize images to a size that the net refuses."""
    says = "'height' can't have the size 30, because its sizes are multiples of 4; use 28 or 32"
    with pytest.raises(BadInputSpec, match=says):
        accel.export(unet.path, preprocess=PreprocessConfig(resize=(30, 32)), out=tmp_path / "p.onnx")
    made = accel.export(unet.path, preprocess=PreprocessConfig(resize=(32, 32)), out=tmp_path / "p.onnx")
    with accel.load(made) as session:
        assert session.run(session.example_inputs(height=33, width=17))["mask"].shape == (1, 2, 32, 32)


def test_what_goes_in_steps_is_made_again(unet: Artifact, tmp_path: Path) -> None:
    """Checks that `accel reproduce` runs a source only at sizes that the source accepts. Also checks that a repeated
    stage gets the same ranges of dims as in the first run."""
    assert unet.manifest is not None
    assert remaking._source(unet.manifest).signature.dims["height"] == DimRange(16, 32, 64, 4)
    foreign = shutil.copy(unet.path, tmp_path / "foreign.onnx")
    dims = {"height": (16, 32, 64, 4), "width": (16, 32, 64, 4)}
    made = accel.export(foreign, inputs=[IMAGE], dims=dims, out=tmp_path / "again.onnx")
    assert [row.status for row in reproduce(made).stages] == ["identical"]
