"""Proves that accel opens each kind of source, or names the mistake in one line."""

from __future__ import annotations

import json
import os
import pickle
import py_compile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import save_file

import accel
from accel.errors import AccelError, BadInputSpec, BadSource, InvalidModel, UsageError
from accel.runtimes.base import open_session
from accel.signature import DimRange, Signature, TensorSpec
from accel.sources.onnx.file import describe, open_onnx
from accel.sources.source import Source
from accel.sources.torch.call import NamedModule, flatten

IMAGE = ["x:float32[batch,3,32,32]"]


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()


NET = """
import torch
from torch.nn import Linear, ReLU, Sequential
def make():
    return Sequential(Linear(6, 4), ReLU(), Linear(4, 2))
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return f"{path}:make"


def test_a_factory_in_a_file(my_model: Path) -> None:
    """Checks that accel runs the factory's model to find the outputs, their dtypes and their batch dims."""
    found = Source(f"{my_model}:make", inputs=IMAGE).open()
    assert found.signature.inputs == (TensorSpec.parse(IMAGE[0]),)
    assert found.signature.outputs == (TensorSpec("output", "float32", ("batch", 5)),)
    assert [Path(f["path"]).name for f in found.source["files"]] == ["my_model.py"]


def test_a_factory_that_is_rewritten_in_the_same_second(tmp_path: Path) -> None:
    """Fails if Python's compiled file stands in for a factory's file that was rewritten in the same second with the
    same size."""
    file = tmp_path / "net.py"
    code = "import torch\n\n\ndef make():\n    return torch.nn.Linear(2, {})\n"
    for width in (3, 4):
        file.write_text(code.format(width))
        os.utime(file, (1_700_000_000, 1_700_000_000))
        opened = accel.Source(f"{file}:make", inputs=["x:float32[batch,2]"]).open()
        assert opened.signature.outputs[0].shape == ("batch", width)
        py_compile.compile(str(file))  # as the user's own import of the file does


def test_a_factory_that_needs_an_argument(tmp_path: Path) -> None:
    """Fails if the error is Python's own, which doesn't say that accel passes no arguments."""
    (tmp_path / "net.py").write_text("import torch\ndef make(width):\n    return torch.nn.Linear(width, 2)\n")
    with pytest.raises(BadSource, match="needs the argument 'width', but accel calls a factory without arguments"):
        Source(f"{tmp_path / 'net.py'}:make", inputs=["input:float32[batch,6]"]).open()


def test_a_factory_in_a_module_declares_itself() -> None:
    """Fails if the declared inputs, ranges, output names or weight files are ignored."""
    found = Source("accel.examples.minilm:model").open()
    assert str(found.signature.inputs[0]) == "input_ids:int64[batch,sequence]{0..30521}"
    assert found.signature.outputs == (TensorSpec("embedding", "float32", ("batch", 384)),)
    assert found.signature.dims["sequence"] == DimRange(8, 128, 512)
    assert Path(found.source["files"][0]["path"]).name == "model.safetensors"


@pytest.mark.parametrize("form", ["safetensors", "pt", "sharded", "nested", "ddp"])
def test_weights_for_a_factory(factory: str, tmp_path: Path, form: str) -> None:
    """Checks that accel loads the common file layouts of a state dict, and records the weights file as part of the
    source."""
    state = {k: v.clone() for k, v in net().state_dict().items()}
    path = tmp_path / "w.pt"
    if form == "safetensors":
        path = tmp_path / "w.safetensors"
        save_file(state, str(path))
    elif form == "sharded":
        path = tmp_path / "model.safetensors.index.json"
        names = sorted(state)
        save_file({names[0]: state[names[0]]}, str(tmp_path / "a.safetensors"))
        save_file({n: state[n] for n in names[1:]}, str(tmp_path / "b.safetensors"))
        files = {n: "a.safetensors" if n == names[0] else "b.safetensors" for n in names}
        path.write_text(json.dumps({"weight_map": files}))
    elif form == "nested":
        torch.save({"epoch": 3, "state_dict": state}, path)
    else:
        torch.save({f"module.{k}": v for k, v in state.items()} if form == "ddp" else state, path)
    found = Source(factory, inputs=["input:float32[batch,6]"], weights=path).open()
    feeds = found.signature.example_inputs(batch=3)
    with open_session(found) as session, torch.inference_mode():
        wanted = net()(torch.from_numpy(feeds["input"])).numpy()
        np.testing.assert_array_equal(session.run(feeds)["output"], wanted)
    assert str(path) in [f["path"] for f in found.source["files"]]


def test_weights_for_a_model_that_has_its_own(factory: str, tmp_path: Path) -> None:
    """Fails if weights are ignored for an exported program, TorchScript or a folder, or if the advice doesn't work.
    Beside a factory, the weights are for the factory."""
    torch.save(net().state_dict(), tmp_path / "w.pt")
    x = torch.randn(2, 6)
    program = torch.export.export(net(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "net.pt2")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    for name in ("net.pt2", "llama"):
        words = rf"{name} has its own weights; leave out weights=, or load .*w.pt into the module of a factory"
        with pytest.raises(UsageError, match=words):
            accel.inspect(tmp_path / name, weights=tmp_path / "w.pt")
    about: Any = {"inputs": ["input:float32[batch,6]"]}
    assert Source(tmp_path / "net.pt2").open().kind == "torch"
    found = accel.verify(tmp_path / "net.pt2", factory, weights=tmp_path / "w.pt", **about)
    assert found.passed
    assert not accel.verify(tmp_path / "net.pt2", factory, **about).passed


def test_weights_that_are_wrong(factory: str, tmp_path: Path) -> None:
    """Checks that code in a pickle doesn't run, and that the error for wrong, truncated, empty or missing weights names
    the problem."""
    state = net().state_dict()
    mark = tmp_path / "ran"

    class Touch:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (mark,)

    def refused(name: str, write: object, error: type[AccelError], words: str) -> None:
        path = tmp_path / name
        if callable(write):
            write(path)
        with pytest.raises(error, match=words):
            Source(factory, inputs=["input:float32[batch,6]"], weights=path).open()

    refused("evil.pt", lambda p: torch.save({"a": Touch()}, p), BadSource, "refuses to unpickle")
    refused("evil2.pt", lambda p: p.write_bytes(pickle.dumps(Touch())), BadSource, "refuses to unpickle")
    assert not mark.exists(), "the code in a pickle ran"
    refused("gone.pt", None, BadSource, "does not exist")
    refused("empty.pt", lambda p: p.touch(), InvalidModel, "is empty")
    refused("list.pt", lambda p: torch.save([1, 2], p), BadSource, "no state dict")
    refused("less.pt", lambda p: torch.save({"0.weight": state["0.weight"]}, p), BadSource, "lacks '0.bias'")
    refused("more.pt", lambda p: torch.save({**state, "new": torch.ones(1)}, p), BadSource, "holds 'new'")
    shape = {**state, "0.bias": torch.ones(9)}
    refused("shape.pt", lambda p: torch.save(shape, p), BadSource, r"shape \[9\], but the model needs \[4\]")

    def truncated(path: Path) -> None:
        save_file(state, str(path))
        path.write_bytes(path.read_bytes()[:-20])

    refused("cut.safetensors", truncated, InvalidModel, "truncated")
    refused(
        "cut.pt", lambda p: (torch.save(state, p), p.write_bytes(p.read_bytes()[:300])), AccelError, "save the weights"
    )
    index = {"weight_map": {"0.weight": "../out.safetensors"}}
    refused("up.index.json", lambda p: p.write_text(json.dumps(index)), InvalidModel, "outside its folder")
    lost = {"weight_map": {"0.weight": "lost.safetensors"}}
    refused("lost.index.json", lambda p: p.write_text(json.dumps(lost)), BadSource, "lost.safetensors")
    refused("no.index.json", lambda p: p.write_text("[]"), InvalidModel, "no weight_map")


def test_an_exported_program(tmp_path: Path) -> None:
    """Fails if a .pt2 file loses its dynamic batch or its declared range, or gives other outputs."""
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(net(), (torch.ones(2, 6),), dynamic_shapes=({0: batch},))
    path = tmp_path / "net.pt2"
    torch.export.save(program, path)
    found = Source(path).open()
    assert found.signature.inputs[0].shape == ("batch", 6)
    assert found.signature.dims["batch"] == DimRange(1, 2, 16)
    feeds = found.signature.example_inputs(batch=5)
    with open_session(found) as session, torch.inference_mode():
        wanted = net()(torch.from_numpy(feeds["input"])).numpy()
        np.testing.assert_allclose(session.run(feeds)["output"], wanted, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torchscript(tmp_path: Path) -> None:
    """Checks that accel opens a TorchScript file, and that a file of weights without code doesn't count as
    TorchScript."""
    path = tmp_path / "net.pt"
    torch.jit.trace(net(), torch.ones(2, 6)).save(str(path))
    found = Source(path, inputs=["input:float32[batch,6]"]).open()
    with open_session(found) as session:
        assert session.run(session.example_inputs(batch=4))["output"].shape == (4, 2)
    weights = tmp_path / "weights.pt"
    torch.save(net().state_dict(), weights)
    with pytest.raises(BadSource, match=r"FILE\.py:FACTORY with weights="):
        Source(weights).open()


def test_a_transformers_folder(tmp_path: Path) -> None:
    """Checks that accel reads the inputs of a transformers model from its config, and that the vocabulary size limits
    the token ids."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    found = Source(tmp_path / "bert").open()
    assert [spec.name for spec in found.signature.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert found.signature.input("input_ids").values == (0, 49)
    assert found.signature.dims["sequence"].max == 40
    assert found.signature.outputs[0] == TensorSpec("last_hidden_state", "float32", ("batch", "sequence", 16))
    for file in (tmp_path / "bert").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(BadSource, match=r"no \.safetensors"):
        Source(tmp_path / "bert").open()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no/such/file.py:make", "does not exist"),
        ("no_such_package.module:make", "no file, folder or importable module"),
        ("json:nothing", "has no 'nothing'"),
        ("{dir}/boom.py:make", "raised ZeroDivisionError.*boom.py line 3"),
        ("{dir}/syntax.py:make", "raised SyntaxError"),
        ("{dir}/number.py:make", "returned int"),
        ("{dir}/number.py", "write .*number.py:NAME, where NAME is one of these: make"),
        ("{dir}/net.py:make", "pass inputs="),
        ("{dir}", "is no model itself"),
        ("{dir}/text.pt", "is no PyTorch file or is damaged"),
        ("{dir}/text.pt2", "no exported program"),
        ("{dir}/gone.pt2", "does not exist"),
        ("{dir}/gone.onnx", "does not exist"),
    ],
)
def test_sources_that_are_not_there(tmp_path: Path, source: str, words: str) -> None:
    """Checks that an invalid source gives a message with the reason, and no traceback."""
    (tmp_path / "boom.py").write_text("def make():\n    x = 1\n    return x / 0\n")
    (tmp_path / "syntax.py").write_text("def make(:\n")
    (tmp_path / "number.py").write_text("def make():\n    return 3\n")
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "text.pt2").write_text("hello")
    with pytest.raises(UsageError, match=words):
        Source(source.format(dir=tmp_path)).open()


def test_inputs_that_do_not_fit(my_model: Path) -> None:
    """Checks that accel notices a wrong shape or an unknown dim before the export."""
    with pytest.raises(BadSource, match=r"fails in PyTorch on the inputs x \[1, 4, 32, 32\]"):
        Source(f"{my_model}:make", inputs=["x:float32[batch,4,32,32]"]).open()
    with pytest.raises(BadInputSpec, match="no input has a dim called 'sequence'; the dims are batch"):
        Source(f"{my_model}:make", inputs=IMAGE, dims={"sequence": (1, 2, 3)}).open()


def test_outputs_by_name() -> None:
    """Fails if a nested output gets a wrong name, or if an output that is None gets a name. Also fails if inputs are
    matched by their order instead of their names."""
    t = torch.ones(1)
    assert list(flatten({"a": t, "b": [t, t], "c": None})) == ["a", "b_0", "b_1"]
    assert list(flatten((t, {"k": t}))) == ["output_0", "output_1_k"]
    assert list(flatten([t])) == ["output"]

    class TwoInputs(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - b

    by_keyword = NamedModule(TwoInputs(), ["b", "a"])
    assert by_keyword.by_name(by_keyword.call(torch.tensor(1.0), torch.tensor(5.0)))["output"] == 4.0


def _onnx(tmp_path: Path, model: onnx.ModelProto) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(model, str(path))
    return path


def _gather(vocabulary: int = 11) -> onnx.ModelProto:
    table = helper.make_tensor("table", TensorProto.FLOAT, [vocabulary, 2], [0.5] * (2 * vocabulary))
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", None])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", None, 2])],
        [table],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_what_an_onnx_file_declares(tmp_path: Path) -> None:
    """Fails if accel misreads the opset, the IR version, unnamed dims or the index bounds of an embedding. Random token
    ids beyond the table would crash every gate."""
    path = _onnx(tmp_path, _gather())
    signature, properties = describe(path)
    assert (properties["opset"], properties["ir"], properties["precision"]) == (17, 8, "fp32")
    assert signature.inputs == (TensorSpec("ids", "int64", ("n", "ids_1"), (0, 10)),)
    found = open_onnx(path)
    assert isinstance(found.signature, Signature)
    with open_session(found) as session:
        session.run(session.example_inputs(n=3))


def test_bit_flips_never_reach_this_process(tmp_path: Path) -> None:
    """Checks that a damaged ONNX file raises an accel error, and doesn't crash the process."""
    good = _gather().SerializeToString()
    path = tmp_path / "flipped.onnx"
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(6):
        bad = bytearray(good)
        for position in rng.integers(0, len(bad), 3):
            bad[position] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(bad)
        try:
            open_onnx(path)
        except AccelError:
            refused += 1
    assert refused > 0
    for length in (1, 7, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(AccelError):
            open_onnx(path)


def test_two_factories_of_one_file(tmp_path: Path) -> None:
    """Fails if two models with the same class and weights, but different settings, have the same hash. If two models
    had the same hash, the cache would return the first model's result for the second model."""
    path = tmp_path / "two_factories.py"
    path.write_text(
        "import torch\n\n\nclass Times(torch.nn.Module):\n    def __init__(self, by):\n        super().__init__()\n"
        "        self.by = by\n\n    def forward(self, x):\n        return x * self.by\n\n\n"
        "def twice():\n    return Times(2.0)\n\n\ndef thrice():\n    return Times(3.0)\n"
    )
    found = {name: Source(f"{path}:{name}", inputs=["x:float32[batch,1]"]).open() for name in ("twice", "thrice")}
    assert found["twice"].digest != found["thrice"].digest
    for name, by in (("twice", 2.0), ("thrice", 3.0)):
        with open_session(found[name]) as session:
            assert session.run({"x": np.ones((1, 1), np.float32)})["output"] == by


def test_a_single_input_under_another_name(tmp_path: Path, cli: Any, factory: str) -> None:
    """Checks that stderr and the manifest record the new name if --input renames the model's only input. If --input
    keeps the name of the parameter of ``forward``, stderr and the manifest must not report a new name."""
    for name, said in (("pixels", {"pixels": "input"}), ("input", None)):
        out = tmp_path / f"{name}.onnx"
        ran = cli("export", factory, "--input", f"{name}:float32[batch,6]", "-o", out, "-q")
        assert ran.code == 0, ran.stderr
        manifest = json.loads(Path(f"{out}.manifest.json").read_text())
        assert manifest["source"].get("renamed") == said
        assert ("forward calls its input 'input'; the artifact calls it 'pixels'" in ran.stderr) is (said is not None)


def test_an_input_that_forward_does_not_have(tmp_path: Path, cli: Any) -> None:
    """Checks that accel raises an error if the name of an input isn't a parameter of forward. Accel must not pass the
    input to another parameter."""
    path = tmp_path / "two.py"
    path.write_text(
        "import torch\n\n\nclass Two(torch.nn.Module):\n    def forward(self, a, b):\n        return a - 2 * b\n\n\n"
        "def make():\n    return Two()\n"
    )
    words = ["export", f"{path}:make", "-o", tmp_path / "m.onnx", "--input", "a:float32[batch,4]"]
    ran = cli(*words, "--input", "bb:float32[batch,4]")
    assert ran.code == 2
    assert "forward has no parameter 'bb'; name the inputs like its parameters: a, b" in ran.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("takes", r"needs the argument 'width', but accel calls a factory without arguments; give width a default"),
        ("calls", r"cannot be multiplied.* \(raises.py line 3\); correct that line$"),
        ("says", r"ValueError: no weights \(raises.py line 4\); correct that line$"),
    ],
)
def test_where_a_factory_raised(tmp_path: Path, name: str, said: str) -> None:
    """Fails if the error names a line in accel or in a library instead of the line in the user's file."""
    (tmp_path / "raises.py").write_text(
        "import torch\ndef takes(width): return width\ndef calls(): return torch.zeros(1, 4) @ torch.zeros(3, 2)\n"
        "def says(): raise ValueError('no weights')\n"
    )
    with pytest.raises(BadSource, match=said):
        Source(f"{tmp_path}/raises.py:{name}").open()


STRIDED = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Conv1d(2, 4, 5, stride=100)
"""


@pytest.mark.parametrize("bounds", [(600, 1600, 3200), (1590, 1600, 3200)])
def test_an_output_that_follows_its_input_in_steps(tmp_path: Path, bounds: tuple[int, int, int]) -> None:
    """Fails if accel concludes that an output size is fixed because similar input lengths give the same output size."""
    (tmp_path / "strided.py").write_text(STRIDED)
    found = accel.export(
        f"{tmp_path / 'strided.py'}:make",
        inputs={"x": ("float32", ("batch", 2, "length"))},
        dims={"length": bounds},
        out=tmp_path / "m.onnx",
    )
    (out,) = found.signature.outputs
    assert out.shape[:2] == ("batch", 4)
    assert isinstance(out.shape[2], str)
    with accel.load(found) as session:
        assert session.run(session.example_inputs(batch=1, length=bounds[2]))[out.name].shape == (1, 4, 32)
