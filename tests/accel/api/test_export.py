"""Proves that accel export tries several exporters in turn, keeps the requested opset and dynamic dims, and works as
documented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import accel
from accel.artifact import Artifact, manifest_path
from accel.converters.from_torch import onnx_from_torch as stage
from accel.errors import ExportFailed, UsageError

SPEC = "x:float32[batch,3,32,32]"


def test_the_command_of_the_readme(cli: Any, my_model: Path, tmp_path: Path) -> None:
    """Checks that `accel export FILE:FACTORY` with one --input exports a model with a dynamic dim named "batch"."""
    out = tmp_path / "my.onnx"
    ran = cli("export", f"{my_model}:make", "--input", SPEC, "-o", out, "--json")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["signature"]["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 3, 32, 32]}]
    assert body["properties"]["opset"] == 20
    assert all(gate["passed"] for gate in body["gates"])
    model = onnx.load(str(out))
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    onnx.checker.check_model(model, full_check=True)


def test_three_lines_of_python(my_model: Path, tmp_path: Path) -> None:
    """Checks that the Python API needs no more arguments than the command, and that the loaded model agrees with
    PyTorch at several batch sizes."""
    artifact = accel.export(
        f"{my_model}:make", inputs={"x": ("float32", ("batch", 3, 32, 32))}, out=tmp_path / "my.onnx"
    )
    with accel.load(artifact) as session, accel.load(f"{my_model}:make", inputs=[SPEC]) as eager:
        for batch in (1, 2, 7):
            feeds = session.example_inputs(batch=batch)
            np.testing.assert_allclose(session.run(feeds)["output"], eager.run(feeds)["output"], atol=1e-5)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.branches = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        if self.branches and bool(x.sum() > 0):
            found = -found
        return found


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["traced", "scripted", "exported"])
def test_a_file_that_torch_wrote(cli: Any, tmp_path: Path, kind: str) -> None:
    """Checks that `accel export FILE` exports TorchScript files and files of torch.export.save. The batch must stay
    dynamic, and the outputs must not change."""
    net, x = Net().eval(), torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    path, words = tmp_path / "net.pt", ["--input", "x:float32[batch,6]"]
    net.branches = kind == "scripted"
    if kind == "traced":
        torch.jit.trace(net, x[:2]).save(str(path))
    elif kind == "scripted":
        torch.jit.script(net).save(str(path))
    else:
        path, words = tmp_path / "net.pt2", []
        shapes = {"x": {0: torch.export.Dim("batch", min=1, max=16)}}
        torch.export.save(torch.export.export(net, (x,), dynamic_shapes=shapes), path)
    ran = cli("export", path, *words, "-o", tmp_path / "net.onnx", "--json", "-q")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["signature"]["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 6]}]
    assert all(gate["passed"] for gate in body["gates"])
    with accel.load(tmp_path / "net.onnx") as session, torch.inference_mode():
        for scale in (1, -4):  # each input takes a different branch of the scripted module
            (found,) = session.run({"x": x.numpy() * scale}).values()
            np.testing.assert_allclose(found, net(x * scale).numpy(), atol=1e-6)


def test_a_folder_of_transformers(cli: Any, tmp_path: Path) -> None:
    """Checks that `accel export FOLDER` exports a folder of save_pretrained. The dims batch and sequence must stay
    dynamic, and the outputs must not change, even if the attention mask hides the last tokens."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40,
    )  # fmt: skip
    bert = transformers.BertModel(config).eval()
    bert.save_pretrained(tmp_path / "bert")
    ran = cli("export", tmp_path / "bert", "-o", tmp_path / "bert.onnx", "--json", "-q")
    assert ran.code == 0, ran.stderr
    inputs = json.loads(ran.stdout)["signature"]["inputs"]
    assert [spec["name"] for spec in inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert all(spec["shape"] == ["batch", "sequence"] for spec in inputs)
    ids = np.arange(14).reshape(2, 7)
    mask = (np.arange(7) < [[7], [4]]).astype(np.int64)
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    with accel.load(tmp_path / "bert.onnx") as session, torch.inference_mode():
        found = session.run(feeds)["last_hidden_state"]
        wanted = bert(**{name: torch.from_numpy(value) for name, value in feeds.items()}).last_hidden_state.numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("opset", [17, 18, 20, 21])
def test_the_opset_asked_for_is_the_opset_given(my_model: Path, tmp_path: Path, opset: int) -> None:
    """Checks that the file has the requested opset. The check is needed because an exporter may use another opset and
    only log the change."""
    made = accel.export(f"{my_model}:make", inputs=[SPEC], out=tmp_path / "my.onnx", opset=opset)
    assert made.properties["opset"] == opset
    assert {o.domain: o.version for o in onnx.load(str(made.path)).opset_import}[""] == opset


def test_opsets_that_nothing_can_export(cli: Any, my_model: Path, tmp_path: Path) -> None:
    """Checks that the error for an impossible opset names the range that works."""
    ran = cli("export", f"{my_model}:make", "--input", SPEC, "--opset", "7", "-o", tmp_path / "my.onnx")
    assert ran.code == 2
    assert "an opset from 13 to 23 with --opset" in ran.stderr


def test_the_ladder_says_why(my_model: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that accel tries the next exporter if an exporter makes a wrong model, and that the manifest gives the
    reason."""
    right = stage._RUNGS["legacy"]

    def wrong(src: Artifact, opset: int, out: Path) -> None:
        right(src, opset, out)
        model = onnx.load(str(out))
        for tensor in model.graph.initializer:
            if tensor.dims:
                values = onnx.numpy_helper.to_array(tensor) * np.float32(1.01)
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        onnx.save(model, str(out))

    monkeypatch.setitem(stage._RUNGS, "dynamo", wrong)
    made = accel.export(f"{my_model}:make", inputs=[SPEC], out=tmp_path / "my.onnx")
    notes = made.history[0]["notes"]
    assert notes["rung"] == "legacy"
    assert "the file's outputs are off: the output output has an error of" in notes["refused"]["dynamo"]
    assert " at batch=1" in notes["refused"]["dynamo"]


def test_no_rung_is_right(tmp_path: Path, cli: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no exporter can export the model, the error must say why each exporter failed, and must not contain a
    traceback, or advice that doesn't help."""

    def broken(*_: Any) -> None:
        raise RuntimeError("not this one")

    for rung in ("dynamo", "legacy"):
        monkeypatch.setitem(stage._RUNGS, rung, broken)
    source = tmp_path / "odd.py"
    source.write_text("import torch\n\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    ran = cli("export", f"{source}:make", "--input", "x:float32[batch,3]", "-o", tmp_path / "odd.onnx")
    assert ran.code == 1
    assert "no exporter gave a correct model" in ran.stderr
    assert "dynamo:" in ran.stderr
    assert "legacy:" in ran.stderr
    assert "try one size" not in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.glob("odd.onnx*")) == []


LIMITED = """
import torch

class Places(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(50, 4)
        self.places = torch.nn.Embedding(24, 4)

    def forward(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))

def table():
    return Places()

def window():
    return torch.nn.Conv1d(3, 2, 5)
"""


@pytest.mark.parametrize(
    ("factory", "spec", "said", "fix"),
    [
        ("table", "ids:int64[batch,length]{0..49}", "at length 64 (index out of range", "length=2:16:24"),
        ("window", "x:float32[batch,3,length]", "at length 2 (", "length=5:16:64"),
    ],
)
def test_a_dim_that_goes_farther_than_the_model(
    factory: str, spec: str, said: str, fix: str, tmp_path: Path, cli: Any, own_cache: Path, monkeypatch: Any
) -> None:
    """Checks that the error names the largest range that works, and doesn't suggest a fixed size. A range that the user
    doesn't declare becomes the largest range that works, with a note. In this test, a dim is larger than the table of
    position embeddings or smaller than a convolution's window."""

    def broken(*_: Any) -> None:
        raise RuntimeError("not this one")  # the test uses the older exporter, which is faster

    monkeypatch.setitem(stage._RUNGS, "dynamo", broken)
    (tmp_path / "limited.py").write_text(LIMITED)
    words = ["export", f"{tmp_path / 'limited.py'}:{factory}", "--input", spec, "-o", tmp_path / "m.onnx", "-q"]
    ran = cli(*words, "--dim", "length=2:16:64")
    assert (ran.code, len(ran.stderr.splitlines())) == (2, 1), ran.stderr
    assert said in ran.stderr
    assert "one size" not in ran.stderr
    assert ran.stderr.rstrip().endswith(f"give --dim {fix}")
    ran = cli(*words, "--dim", fix)
    assert ran.code == 0, ran.stderr
    ran = cli(*words)
    assert ran.code == 0, ran.stderr
    assert "the range of length" in ran.stderr
    low, _, high = fix.removeprefix("length=").split(":")
    found = accel.Source(tmp_path / "m.onnx").open().signature.dims["length"]
    assert (found.min, found.max) == (int(low), int(high))
    in_steps, fix = {"table": ("8:16:64:8", "8:16:24:8"), "window": ("2:16:64:2", "6:16:64:2")}[factory]
    assert cli(*words, "--dim", f"length={in_steps}").stderr.rstrip().endswith(f"give --dim length={fix}")


def test_an_output_named_like_something_inside(tmp_path: Path) -> None:
    """Checks that a model can be exported if its output has the same name as an inner tensor (`embedding`)."""
    source = tmp_path / "named.py"
    source.write_text(
        "import torch, accel\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(7, 3)\n"
        "    def forward(self, ids):\n"
        "        return self.table(ids).sum(1) * 2\n"
        "@accel.declare(inputs=['ids:int64[batch,n]{0..6}'], outputs=['embedding'], dims={'n': (2, 3, 5)})\n"
        "def make():\n"
        "    return Net()\n"
    )
    made = accel.export(f"{source}:make", out=tmp_path / "named.onnx")
    assert [spec.name for spec in made.signature.outputs] == ["embedding"]
    assert made.signature.dims["n"].max == 5


def test_a_second_export_does_no_work(my_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a second export of the same model runs an exporter again."""
    accel.export(f"{my_model}:make", inputs=[SPEC], out=tmp_path / "a.onnx")

    def never(*_: object) -> None:
        raise AssertionError("exported again")

    monkeypatch.setitem(stage._RUNGS, "dynamo", never)
    monkeypatch.setitem(stage._RUNGS, "legacy", never)
    made = accel.export(f"{my_model}:make", inputs=[SPEC], out=tmp_path / "b.onnx")
    assert made.path.read_bytes() == (tmp_path / "a.onnx").read_bytes()
    my_model.write_text(my_model.read_text().replace("manual_seed(0)", "manual_seed(1)"))
    with pytest.raises(ExportFailed, match="exported again"):
        accel.export(f"{my_model}:make", inputs=[SPEC], out=tmp_path / "c.onnx")


def test_earlier_results_survive_a_failure(my_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a failed export damages the files of an earlier export."""
    out = tmp_path / "my.onnx"
    accel.export(f"{my_model}:make", inputs=[SPEC], out=out)
    before = out.read_bytes(), manifest_path(out).read_bytes()
    for rung in ("dynamo", "legacy"):
        monkeypatch.setitem(stage._RUNGS, rung, lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(ExportFailed):
        accel.export(f"{my_model}:make", inputs=[SPEC], out=out, opset=19)
    assert (out.read_bytes(), manifest_path(out).read_bytes()) == before


def test_minilm(minilm: Artifact) -> None:
    """Fails if the exported all-MiniLM-L6-v2 loses its dynamic batch or length, or differs from PyTorch by more than
    1e-5."""
    assert [s.shape for s in minilm.signature.inputs] == [("batch", "sequence")] * 2
    worst = max(g["value"] for record in minilm.history for g in record["gates"])
    assert worst < 1e-5
    assert {g["case"] for g in minilm.history[-1]["gates"]} >= {"batch=1, sequence=256", "batch=2, sequence=8"}


def test_half_precision_sources(tmp_path: Path) -> None:
    """Checks that a bfloat16 module is exported with bfloat16 weights, and that its outputs can be compared."""
    source = tmp_path / "half.py"
    source.write_text(
        "import torch\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).bfloat16()\n"
    )
    made = accel.export(f"{source}:make", inputs=["input:bfloat16[batch,8]"], out=tmp_path / "half.onnx")
    assert made.properties["precision"] == "bf16"
    assert made.signature.outputs[0].dtype == "bfloat16"


def test_out_has_to_be_onnx(my_model: Path, tmp_path: Path) -> None:
    """Checks that -o refuses a file name that accel can't open later."""
    with pytest.raises(UsageError, match=r"has to end in \.onnx"):
        accel.export(f"{my_model}:make", inputs=[SPEC], out=tmp_path / "my.model")


def test_a_file_that_is_onnx_already(digits: Artifact, tmp_path: Path) -> None:
    """Checks that accel refuses to export an ONNX file, and that the error names the command to use instead."""
    with pytest.raises(UsageError, match="accel optimize"):
        accel.export(digits.path, out=tmp_path / "again.onnx")


def test_numbers_of_a_state_dict_reach_the_file(digits: Artifact, digits_weights: Path) -> None:
    """Fails if the ONNX file holds the factory's own random weights instead of the passed state dict."""
    from safetensors.torch import load_file

    wanted = load_file(str(digits_weights))["12.weight"]
    tensors = [onnx.numpy_helper.to_array(t) for t in onnx.load(str(digits.path)).graph.initializer]
    assert any(t.shape in {(10, 128), (128, 10)} and _same(t, wanted) for t in tensors)


def _same(array: np.ndarray, tensor: torch.Tensor) -> bool:
    other = tensor.numpy()
    return bool(array.shape == other.shape and (array == other).all()) or bool(
        array.T.shape == other.shape and (other == array.T).all()
    )
