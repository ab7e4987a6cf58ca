"""Proves that export detects three faults of an exporter: changed outputs, an unsupported model, and constants copied
from the example inputs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import accel
from accel.converters.from_torch import onnx_from_torch as stage
from accel.errors import BadSource, ExportFailed
from accel.sources.python_object import load_object
from accel.sources.source import Source
from accel.sources.torch.source import module_of

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
    """Fails if a small constant that prevents a division by zero becomes zero, or if a factor near one becomes exactly
    one."""
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
    """Checks that an exported logsigmoid or logaddexp doesn't overflow, and gives the same outputs as PyTorch in
    float64. The test uses large inputs, because the gate's inputs are too small for an overflow."""
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
    """Fails if a model that writes to its input changes the gate's samples. With changed samples, the gate would reject
    a correct export."""
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
        (
            "Drawn",
            r"differs from run to run on the same inputs: forward draws random numbers at changing.py:6; make them an",
        ),
        (
            "Counted",
            r"differs from run to run on the same inputs: forward changes the buffer 'count', so a call depends",
        ),
        (
            "Complex",
            r"'output' has the unknown dtype 'complex64'; give its real and imaginary parts .* torch.view_as_real",
        ),
    ],
)
def test_outputs_that_no_file_can_give(factory: str, said: str, tmp_path: Path, cli: Any) -> None:
    """Fails if the error suggests other sizes for a model that draws random numbers, keeps a state or returns complex
    numbers."""
    (tmp_path / "changing.py").write_text(CHANGING)
    ran = cli(
        "export", f"{tmp_path / 'changing.py'}:{factory}", "--input", "x:float32[batch,8]", "-o", tmp_path / "m.onnx"
    )
    assert (ran.code, len(ran.stderr.splitlines())) == (2, 1), ran.stderr
    assert re.search(said, ran.stderr), ran.stderr


def test_random_numbers_as_an_input(tmp_path: Path) -> None:
    """Follows the advice about random numbers. Also fails if the error for a dropout that stays on names a line of
    PyTorch."""
    source = tmp_path / "drawn.py"
    source.write_text(
        "import torch\n"
        "class Dropped(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.dropout(x, 0.5, training=True)\n"
        "class Given(torch.nn.Module):\n"
        "    def forward(self, x, kept):\n"
        "        return x * kept / 0.5\n"
    )
    with pytest.raises(BadSource, match=r"draws random numbers at drawn.py:4; make them an input of forward, or"):
        accel.export(f"{source}:Dropped", inputs=["x:float32[batch,8]"], out=tmp_path / "m.onnx")
    inputs = ["x:float32[batch,8]", "kept:float32[batch,8]"]
    assert accel.export(f"{source}:Given", inputs=inputs, out=tmp_path / "m.onnx").path.is_file()


def test_an_operator_that_onnx_has_not(tmp_path: Path, cli: Any, capfd: Any) -> None:
    """Fails if an exporter prints to the terminal. Also checks that the error names the operator that ONNX lacks, and
    doesn't suggest a fixed size. The error also names the line that calls the operator."""
    bessel = "def bessel():\n    return Net(lambda x: torch.special.bessel_j0(x))\n"
    (tmp_path / "net.py").write_text(OVERFLOWS + bessel)
    words = ["--input", "x:float32[batch,4]", "-o", tmp_path / "m.onnx", "-q"]
    ran = cli("export", f"{tmp_path / 'net.py'}:bessel", *words)
    assert ran.code == 1
    assert ran.stderr.count("\n") == 1
    line = (OVERFLOWS + bessel).count("\n")
    said = f"uses aten::special_bessel_j0 at net.py:{line}, which no exporter can write in ONNX; compute it from other"
    assert said in ran.stderr
    assert (ran.stdout, *capfd.readouterr()) == ("", "", "")


def test_a_branch_by_values(tmp_path: Path, cli: Any) -> None:
    """Checks that export doesn't silently drop a branch that no example input reaches, and that the error names the
    source line."""
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
    assert "write `x = torch.where(x.abs().max() > 100, x / 100, x)`" in ran.stderr
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
    """Checks that an RNN on a packed sequence can be exported. The model returns the RNN's last state or the RNN's
    outputs. Also fails if padding changes the outputs, or if the exporter prints messages. For the exporter, accel adds
    an output to the model, and this output must not stay in the file."""
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
    """Checks that the error for a packed sequence that can't be exported takes one line and names the packing and the
    fix."""
    (tmp_path / "packed.py").write_text(PACKED)

    def broken(*_: Any) -> None:
        raise RuntimeError("vector::_M_range_check")

    monkeypatch.setitem(stage._RUNGS, "legacy", broken)
    words = ["--input", "ids:int64[batch,sequence]{0..29}", "-o", tmp_path / "m.onnx", "-q"]
    ran = cli("export", f"{tmp_path / 'packed.py'}:last", *words)
    assert ran.code == 1
    assert len(ran.stderr.splitlines()) == 1
    assert "pack_padded_sequence" in ran.stderr
    assert "select its outputs by the lengths or a mask" in ran.stderr
    assert "one size instead of a dynamic one" not in ran.stderr


LENGTHS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.Parameter(torch.randn(2, 6))

    def forward(self, x):
        queries = self.query.tile([len(x), 1, 1])
        return (x.unsqueeze(1) * queries).reshape(len(x), -1)

def make():
    torch.manual_seed(0)
    return Net()
"""


@pytest.mark.parametrize("rung", ["dynamo", "legacy"])
def test_the_length_of_a_tensor(tmp_path: Path, rung: str) -> None:
    """Fails if ``len(x)`` becomes the example's batch size. During the export, accel puts a ``len`` of its own into the
    model's Python module, and must remove this ``len`` afterwards."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    source = Source(f"{tmp_path / 'lengths.py'}:make", inputs=["x:float32[batch,6]"]).open()
    out = tmp_path / "m.onnx"
    assert stage.onnx_from_torch(source, stage.OnnxFromTorchConfig(ladder=(rung,)), out).notes["rung"] == rung
    assert "len" not in vars(sys.modules[type(module_of(source)).__module__])


class Masked(torch.nn.Module):
    """Attends to the last two tokens that ``mask`` keeps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        place = torch.arange(x.shape[1])
        near = (place[:, None] >= place) & (place[:, None] < place + 2)
        kept = near & (mask > 0)[:, None, None, :]
        found: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
        return found.transpose(1, 2).flatten(2)


def test_a_query_without_keys(tmp_path: Path) -> None:
    """Checks that the attention of a token is 0 if the mask excludes all its keys, as in PyTorch. Fails if the result
    is the mean of all values, as in the file of torch's exporter."""
    x, mask = torch.randn(2, 5, 8), torch.tensor([[0, 0, 0, 1, 1], [1, 1, 0, 0, 0]])
    dynamic = {"x": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "length"}}
    made = accel.export(Masked(), example=(x, mask), dynamic=dynamic, out=tmp_path / "m.onnx")
    with accel.load(made) as session:
        found = session(x, mask)
    torch.testing.assert_close(found, Masked()(x, mask), rtol=1e-5, atol=1e-6)
    assert not found[0, :3].any()
    assert not found[1, 3:].any()


class Attends(torch.nn.Module):
    """Calls attention with ``words``. ``heads`` is the number of heads of the keys and the values."""

    def __init__(self, heads: int = 2, **words: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.words = heads, words
        self.project = torch.nn.Linear(8, 8 + 8 * heads)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        sizes = (8, 4 * self.heads, 4 * self.heads)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.project(x).split(sizes, -1))
        masked = {} if self.words.get("is_causal") else {"attn_mask": bias[:, None, None, :]}
        found: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, **masked, **self.words)
        return found.transpose(1, 2).flatten(2) + bias[..., None]


@pytest.mark.parametrize(
    ("net", "plain"),
    [
        (Attends(), True),
        (Attends(scale=0.3), True),
        (Attends(scale=-0.3), True),
        (Attends(is_causal=True), False),
        (Attends(heads=1, enable_gqa=True), False),
    ],
    ids=["mask", "scale", "negative scale", "causal", "grouped"],
)
def test_attention_without_shapes(net: torch.nn.Module, plain: bool, tmp_path: Path) -> None:
    """Fails if the file computes shapes to transpose the keys, or if an argument of the attention is lost."""
    given = (torch.randn(2, 5, 8), torch.randn(2, 5))
    dynamic = {name: {0: "batch", 1: "length"} for name in ("x", "bias")}
    made = accel.export(net, example=given, dynamic=dynamic, out=tmp_path / "m.onnx")
    swaps = [list(n.attribute[0].ints) for n in onnx.load(made.path).graph.node if n.op_type == "Transpose"]
    assert ([0, 2, 1] not in swaps) == plain
    with accel.load(made) as session:
        torch.testing.assert_close(session(*given), net(*given), rtol=1e-4, atol=1e-5)


class Shortcut(torch.nn.Module):
    """Reads the mask's values only outside an export, like many libraries. Adds up ``x`` in a loop over its length,
    which no exporter can write for a dynamic length."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and mask.all():
            return x.cumsum(1)
        rows = [x[:, 0]]
        for index in range(1, x.shape[1]):
            rows.append(rows[-1] + x[:, index] * mask[:, index, None])
        return torch.stack(rows, 1)


def test_values_that_are_read_only_outside_an_export() -> None:
    """Fails if the message blames a line that never runs during an export, and hides the real reason."""
    dynamic = {"x": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "length"}}
    with pytest.raises(ExportFailed) as caught:
        accel.export(Shortcut(), example=(torch.randn(2, 5, 3), torch.ones(2, 5, dtype=torch.bool)), dynamic=dynamic)
    assert "turned the dim 'length' of the " in str(caught.value)
    assert "instead of `" not in str(caught.value)


def test_a_branch_of_torch_cond(tmp_path: Path) -> None:
    """Fails if a live model with ``torch.cond`` can't be opened, or has only one branch in the file."""

    class Cond(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
            return found

    made = accel.export(Cond(), example=(torch.randn(2, 3),), out=tmp_path / "m.onnx")
    with accel.load(made) as session:
        for x in (torch.ones(2, 3), -torch.ones(2, 3)):
            torch.testing.assert_close(session(x), Cond()(x))
