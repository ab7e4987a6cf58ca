"""accel export: the ladder, the opset, dynamic dims by name, the exact commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import accel
from accel.artifact import Artifact, manifest_path
from accel.converters import onnx_from_torch as stage
from accel.errors import ExportFailed, UsageError
from accel.sources.python_object import load_object

SPEC = "x:float32[batch,3,32,32]"


def test_the_command_of_the_readme(cli: Any, my_model: Path, tmp_path: Path) -> None:
    """Fails if a factory in a file with one --input isn't exported with a batch that is dynamic by name."""
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
    """Fails if the Python API needs more than the command, or if the loaded model differs from PyTorch at any batch."""
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
    """Fails if a whole TorchScript file, or an exported program that torch.export.save wrote, doesn't become ONNX by
    the plain command with its batch dynamic, or if the ONNX computes something else than the module it was made of."""
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
        for scale in (1, -4):  # a script takes both ways of its branch
            (found,) = session.run({"x": x.numpy() * scale}).values()
            np.testing.assert_allclose(found, net(x * scale).numpy(), atol=1e-6)


def test_a_folder_of_transformers(cli: Any, tmp_path: Path) -> None:
    """Fails if what save_pretrained wrote doesn't become ONNX by the plain command with batch and sequence dynamic, or
    if the ONNX computes something else than the model of transformers, with a mask that hides the end."""
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
    """Fails if the file has another opset than asked for: exporters change it and only log that."""
    made = accel.export(f"{my_model}:make", inputs=[SPEC], out=tmp_path / "my.onnx", opset=opset)
    assert made.properties["opset"] == opset
    assert {o.domain: o.version for o in onnx.load(str(made.path)).opset_import}[""] == opset


def test_opsets_that_nothing_can_export(cli: Any, my_model: Path, tmp_path: Path) -> None:
    """Fails if an impossible opset is not refused with the range that works."""
    ran = cli("export", f"{my_model}:make", "--input", SPEC, "--opset", "7", "-o", tmp_path / "my.onnx")
    assert ran.code == 2
    assert "--opset 13 to" in ran.stderr


def test_the_ladder_says_why(my_model: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rung that gives a wrong model is taken, or if the manifest doesn't say why it was not."""
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
    assert "its outputs are off: output at batch=1" in notes["refused"]["dynamo"]


def test_no_rung_is_right(tmp_path: Path, cli: Any) -> None:
    """Fails if a model that no exporter can do gives a traceback, or doesn't say what each of them said."""
    source = tmp_path / "odd.py"
    source.write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * 2 if x.sum().item() > 0 else x - x.flatten().tolist()[0]\n"
        "def make():\n"
        "    return Odd()\n"
    )
    ran = cli("export", f"{source}:make", "--input", "x:float32[batch,3]", "-o", tmp_path / "odd.onnx")
    assert ran.code == 1
    assert "no exporter gave a right model" in ran.stderr
    assert "dynamo:" in ran.stderr
    assert "legacy:" in ran.stderr
    assert "try one size instead of a dynamic one: --input '" in ran.stderr
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
    """Fails if somebody whose dim reaches beyond a table of positions, or below a convolution's window, is told to fix
    its size instead of how far it may go, or if that range isn't the largest one that works."""

    def broken(*_: Any) -> None:
        raise RuntimeError("not this one")  # the older exporter is enough here, and quicker

    monkeypatch.setitem(stage._RUNGS, "dynamo", broken)
    (tmp_path / "limited.py").write_text(LIMITED)
    words = ["export", f"{tmp_path / 'limited.py'}:{factory}", "--input", spec, "-o", tmp_path / "m.onnx", "-q"]
    ran = cli(*words)
    assert (ran.code, len(ran.stderr.splitlines())) == (2, 1), ran.stderr
    assert said in ran.stderr
    assert "one size" not in ran.stderr
    assert ran.stderr.rstrip().endswith(f"give --dim {fix}")
    ran = cli(*words, "--dim", fix)
    assert ran.code == 0, ran.stderr
    in_steps, fix = {"table": ("8:16:64:8", "8:16:24:8"), "window": ("2:16:64:2", "6:16:64:2")}[factory]
    assert cli(*words, "--dim", f"length={in_steps}").stderr.rstrip().endswith(f"give --dim length={fix}")


SMALL_NUMBERS = """
import torch

class Pooled(torch.nn.Module):
    def forward(self, x, mask):
        kept = mask.to(x.dtype)
        return (x * kept).sum(1) / (kept.sum(1) * 1.000009 + 1e-9)

def pooled():
    return Pooled()

class InPlace(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x):
        x -= 0.5
        x /= 0.25
        return self.conv(x)

def in_place():
    torch.manual_seed(0)
    return InPlace()
"""


def test_small_numbers_are_numbers(tmp_path: Path) -> None:
    """Fails if what keeps a division from being by zero is taken for zero, or a factor near one for one."""
    (tmp_path / "small.py").write_text(SMALL_NUMBERS)
    inputs = {"x": ("float32", ("batch", 8)), "mask": ("int64", ("batch", 8))}
    made = accel.export(f"{tmp_path / 'small.py'}:pooled", inputs=inputs, out=tmp_path / "m.onnx")
    with accel.load(made) as session:
        (found,) = session.run({"x": np.ones((2, 8), np.float32), "mask": np.array([[0] * 8, [1] * 8])}).values()
    np.testing.assert_allclose(found, [0, 1 / 1.000009], rtol=2e-7)


OVERFLOWS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)

def logsigmoid():
    return Net(torch.nn.functional.logsigmoid)

def logaddexp():
    return Net(lambda x: torch.logaddexp(x, x.flip(1)))
"""


@pytest.mark.parametrize("factory", ["logsigmoid", "logaddexp"])
def test_scores_that_are_large(factory: str, tmp_path: Path) -> None:
    """Fails if a logarithm of exponentials is infinite, or no number, where PyTorch's isn't, or coarser than that: the
    gate's own inputs are too small to show it."""
    (tmp_path / "scores.py").write_text(OVERFLOWS)
    made = accel.export(f"{tmp_path / 'scores.py'}:{factory}", inputs=["x:float32[batch,4]"], out=tmp_path / "m.onnx")
    net = load_object(f"{tmp_path / 'scores.py'}:{factory}", "factory")[1]()
    x = np.array(
        [[300, -300, 12, -1e-3], [np.inf, -np.inf, -20, 20], [1e30, -1e30, 1e30, 7], [0, 0, -8, -8]], np.float32
    )
    x = np.concatenate([x, np.full((2, 4), [[np.inf], [-np.inf]], np.float32)])
    with accel.load(made) as session:
        found = session.run({"x": x})["output"]
    np.testing.assert_allclose(found, net(torch.from_numpy(x.astype(np.float64))).numpy(), rtol=1e-6, atol=1e-38)


def test_a_model_that_writes_to_its_input(tmp_path: Path) -> None:
    """Fails if the samples are another model's input after the first run, so that a right export is called wrong."""
    (tmp_path / "small.py").write_text(SMALL_NUMBERS)
    source = f"{tmp_path / 'small.py'}:in_place"
    made = accel.export(source, inputs={"x": ("float32", ("batch", 3, 8, 8))}, out=tmp_path / "m.onnx")
    assert made.notes.get("rung", "dynamo") == "dynamo"
    with accel.load(source, inputs={"x": ("float32", ("batch", 3, 8, 8))}) as session:
        feeds = session.example_inputs(batch=2)
        given = feeds["x"].copy()
        first, again = session.run(feeds), session.run(feeds)
    np.testing.assert_array_equal(feeds["x"], given)
    np.testing.assert_array_equal(*first.values(), *again.values())


CHANGING = """
import torch

class Drawn(torch.nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)

class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count

class Complex(torch.nn.Module):
    def forward(self, x):
        return torch.fft.fft(x)
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("Drawn", r"differs from run to run on the same inputs: forward draws random numbers, or changes a buffer"),
        ("Counted", r"differs from run to run on the same inputs: forward draws random numbers, or changes a buffer"),
        ("Complex", r"'output' has unknown dtype 'complex64'; give its real and imaginary parts .* torch.view_as_real"),
    ],
)
def test_outputs_that_no_file_can_give(factory: str, said: str, tmp_path: Path, cli: Any) -> None:
    """Fails if somebody whose model draws numbers, keeps a state or returns complex ones is told to try other sizes."""
    (tmp_path / "changing.py").write_text(CHANGING)
    ran = cli(
        "export", f"{tmp_path / 'changing.py'}:{factory}", "--input", "x:float32[batch,8]", "-o", tmp_path / "m.onnx"
    )
    assert (ran.code, len(ran.stderr.splitlines())) == (2, 1), ran.stderr
    assert re.search(said, ran.stderr), ran.stderr


def test_an_operator_that_onnx_has_not(tmp_path: Path, cli: Any, capfd: Any) -> None:
    """Fails if it isn't named, if a fixed size is advised, which helps nothing, or if an exporter prints."""
    hypot = "def hypot():\n    return Net(lambda x: torch.hypot(x, x.flip(1)))\n"
    (tmp_path / "net.py").write_text(OVERFLOWS + hypot)
    words = ["--input", "x:float32[batch,4]", "-o", tmp_path / "m.onnx", "-q"]
    ran = cli("export", f"{tmp_path / 'net.py'}:hypot", *words)
    assert ran.code == 1
    assert ran.stderr.count("\n") == 1
    assert "net.py:hypot uses aten::hypot, which no exporter can write in ONNX; compute it from" in ran.stderr
    assert (ran.stdout, *capfd.readouterr()) == ("", "", "")


def test_a_branch_by_values(tmp_path: Path, cli: Any) -> None:
    """Fails if a model whose other branch no example takes is exported without it, or if the line isn't named."""
    source = tmp_path / "rare.py"
    source.write_text(
        "import torch\n"
        "class Rare(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if x.abs().max() > 100:\n"
        "            x = x / 100\n"
        "        return super().forward(x)\n"
        "def make():\n"
        "    return Rare(4, 2)\n"
    )
    ran = cli("export", f"{source}:make", "--input", "x:float32[batch,4]", "-o", tmp_path / "rare.onnx", "-q")
    assert ran.code == 1
    assert len(ran.stderr.splitlines()) == 1
    assert "at rare.py:4" in ran.stderr
    assert "torch.where or torch.cond" in ran.stderr
    assert list(tmp_path.glob("rare.onnx*")) == []


PACKED = """
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Tagger(torch.nn.Module):
    def __init__(self, last):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(30, 8, padding_idx=0)
        self.rnn = torch.nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.last = last

    def forward(self, ids):
        lengths = (ids != 0).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        output, hidden = self.rnn(packed)
        if self.last:
            return torch.cat([hidden[0], hidden[1]], dim=1)
        return pad_packed_sequence(output, batch_first=True)[0].sum(1)

def last():
    return Tagger(True)

def every():
    return Tagger(False)
"""


@pytest.mark.parametrize("factory", ["last", "every"])
def test_an_rnn_on_a_packed_sequence(factory: str, tmp_path: Path, cli: Any, capfd: Any) -> None:
    """Fails if a packed sequence of uneven lengths isn't exported, by its last state or by its outputs, if the padding
    counts in the file, if what is added for the exporter stays an output, or if the exporter's own words get out."""
    (tmp_path / "packed.py").write_text(PACKED)
    spec = f"{tmp_path / 'packed.py'}:{factory}"
    out = tmp_path / "m.onnx"
    ran = cli("export", spec, "--input", "ids:int64[batch,sequence]{0..29}", "-o", out, "-q")
    assert ran.code == 0, ran.stderr
    assert "Torch IR graph" not in capfd.readouterr().err
    ids = np.array([[3, 4, 0, 0, 0], [5, 6, 7, 8, 9], [1, 0, 0, 0, 0]])
    with accel.load(spec, inputs=["ids:int64[batch,sequence]{0..29}"]) as one, accel.load(out) as other:
        wanted, found = one.run({"ids": ids}), other.run({"ids": ids})
    assert list(found) == list(wanted) == ["output"]
    np.testing.assert_allclose(found["output"], wanted["output"], atol=1e-5)


def test_a_packed_sequence_that_no_exporter_does(
    tmp_path: Path, cli: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a model that packs and can't be exported isn't told that this is why, in one sentence with the fix."""
    (tmp_path / "packed.py").write_text(PACKED)

    def broken(*_: Any) -> None:
        raise RuntimeError("vector::_M_range_check")

    monkeypatch.setitem(stage._RUNGS, "legacy", broken)
    words = ["--input", "ids:int64[batch,sequence]{0..29}", "-o", tmp_path / "m.onnx", "-q"]
    ran = cli("export", f"{tmp_path / 'packed.py'}:last", *words)
    assert ran.code == 1
    assert len(ran.stderr.splitlines()) == 1
    assert "pack_padded_sequence" in ran.stderr
    assert "take its outputs by the lengths or a mask" in ran.stderr
    assert "one size instead of a dynamic one" not in ran.stderr


def test_an_output_named_like_something_inside(tmp_path: Path) -> None:
    """Fails if a model whose output has the name of an inner value (`embedding`) can't be exported."""
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
    """Fails if an exporter runs again for an identical export."""
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
    """Fails if an export that fails damages what an earlier one wrote."""
    out = tmp_path / "my.onnx"
    accel.export(f"{my_model}:make", inputs=[SPEC], out=out)
    before = out.read_bytes(), manifest_path(out).read_bytes()
    for rung in ("dynamo", "legacy"):
        monkeypatch.setitem(stage._RUNGS, rung, lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(ExportFailed):
        accel.export(f"{my_model}:make", inputs=[SPEC], out=out, opset=19)
    assert (out.read_bytes(), manifest_path(out).read_bytes()) == before


def test_minilm(minilm: Artifact) -> None:
    """Fails if the real text model loses its dynamic batch or length, or is further than 1e-5 from PyTorch."""
    assert [s.shape for s in minilm.signature.inputs] == [("batch", "sequence")] * 2
    worst = max(g["value"] for record in minilm.history for g in record["gates"])
    assert worst < 1e-5
    assert {g["case"] for g in minilm.history[0]["gates"]} >= {"batch=4, sequence=256", "batch=2, sequence=8"}


def test_half_precision_sources(tmp_path: Path) -> None:
    """Fails if a bfloat16 module is exported with float32 weights, or can't be compared."""
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
    """Fails if a name that nothing could open later is accepted."""
    with pytest.raises(UsageError, match=r"has to end in \.onnx"):
        accel.export(f"{my_model}:make", inputs=[SPEC], out=tmp_path / "my.model")


def test_a_file_that_is_onnx_already(digits: Artifact, tmp_path: Path) -> None:
    """Fails if exporting an ONNX file does anything but say what to do instead."""
    with pytest.raises(UsageError, match="accel optimize"):
        accel.export(digits.path, out=tmp_path / "again.onnx")


def test_numbers_of_a_state_dict_reach_the_file(digits: Artifact, digits_weights: Path) -> None:
    """Fails if the weights that were given are not the ones in the ONNX file (the factory's own are random)."""
    from safetensors.torch import load_file

    wanted = load_file(str(digits_weights))["12.weight"]
    tensors = [onnx.numpy_helper.to_array(t) for t in onnx.load(str(digits.path)).graph.initializer]
    assert any(t.shape in {(10, 128), (128, 10)} and _same(t, wanted) for t in tensors)


def _same(array: np.ndarray, tensor: torch.Tensor) -> bool:
    other = tensor.numpy()
    return bool(array.shape == other.shape and (array == other).all()) or bool(
        array.T.shape == other.shape and (other == array.T).all()
    )
