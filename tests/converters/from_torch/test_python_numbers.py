"""Proves that accel correctly exports models that read tensor values as Python numbers, or suggests a rewrite that
works."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import accel
from accel.converters.from_torch import exporters
from accel.errors import ExportFailed
from accel.sources.python_object import load_object
from accel.sources.torch.call import flatten, to_array

HEAD = """
import math
import numpy as np
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(4, 4)
        self.register_buffer("flag", torch.tensor(1))

    def forward(self, x, n):
        y = super().forward(x)
"""
TAIL = "        return y + 0 * n\n\ndef make():\n    return Net()\n"
INPUTS = ["x:float32[batch,4]", "n:int64[]{1..3}"]


def written(folder: Path, lines: str) -> str:
    """Writes a model whose ``forward`` contains ``lines``. Returns the source."""
    path = folder / "net.py"
    path.write_text(HEAD + "".join(f"        {line}\n" for line in lines.splitlines()) + TAIL)
    return f"{path}:make"


def only(result: Any) -> np.ndarray:
    """Returns the only tensor in the result of a model."""
    (tensor,) = flatten(result).values()
    return to_array(tensor)


def agrees(source: str, made: Any) -> None:
    """Compares the exported file with PyTorch on inputs that no gate has tried."""
    net = load_object(source, "factory")[1]().eval()
    rng = np.random.default_rng(7)
    with accel.load(made) as session:
        for scale, n, batch in ((-30, 1, 1), (0.01, 2, 5), (700, 3, 3)):
            x = (abs(rng.standard_normal((batch, 4))) * scale).astype(np.float32)
            (found,) = session.run({"x": x, "n": np.array(n)}).values()
            with torch.inference_mode():
                wanted = only(net(torch.from_numpy(x), torch.tensor(n)))
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * (1 + abs(wanted).max()))


FUNCTIONS = """y = y * round(x.abs().sum().item()) + round(float(x.mean()), 1)
y = y / math.sqrt(x.square().sum().item() + 1) / math.sqrt(x.mean().abs() + 1)
y = y * math.sqrt(x.shape[0]) + max(x.mean().item(), 0.5)"""
SIZES = """y = y + int(x.sum()) + float(x.detach().numpy().max()) + x.amin() + len(x[x > 0])
y = y + torch.zeros(n.item(), 4).sum() + x[:, : n.item()].sum()"""
CHECKS = """assert x.abs().max() < 1e6
if torch.isnan(x).any():
    raise ValueError("x has NaN")
if self.flag:
    y = y * 2
y = y * math.exp(self.flag.item())
print(f"mean {y.mean().item():.3f}", y)"""


@pytest.mark.parametrize("lines", [FUNCTIONS, SIZES, CHECKS])
def test_numbers_that_the_exporters_follow(lines: str, tmp_path: Path) -> None:
    """Checks that export accepts models that use ``round``, ``math.sqrt`` or a size from ``item()``. Fails if the
    exported file has a number that was computed from the example inputs as a constant. Also checks that export accepts
    an ``if`` that only raises an error, and code that reads a buffer's value."""
    source = written(tmp_path, lines)
    agrees(source, accel.export(source, inputs=INPUTS, out=tmp_path / "net.onnx", simplify=False))


# Each entry has some lines of a model's code, the rewrite that the error advises, and the rewritten lines.
REWRITES = [
    ("y = y * math.exp(x.mean().item() / 1000)",
     "write `torch.exp(x.mean() / 1000)` instead of `math.exp(x.mean().item() / 1000)`",
     "y = y * torch.exp(x.mean() / 1000)"),
    ("y = y * math.log(x.square().mean() + 1)",
     "write `torch.log(x.square().mean() + 1)` instead of `math.log(x.square().mean() + 1)`",
     "y = y * torch.log(x.square().mean() + 1)"),
    ("if x.abs().sum().item() > 1000:\n    y *= 2",
     "write `y = torch.where(x.abs().sum() > 1000, y * 2, y)` instead of `if x.abs().sum().item() > 1000`",
     "y = torch.where(x.abs().sum() > 1000, y * 2, y)"),
    ("mask = x > 1\nif bool(mask.any()) and not n:\n    y = y.masked_fill(mask, 0.0)\nelse:\n    y = y - 1",
     "write `y = torch.where(mask.any() & ~(n != 0), y.masked_fill(mask, 0.0), y - 1)` instead of",
     "mask = x > 1\ny = torch.where(mask.any() & ~(n != 0), y.masked_fill(mask, 0.0), y - 1)"),
    ("y = y * (2.0 if 0 < x.mean().item() < 5 else 0.5)",
     "write `torch.where((0 < x.mean()) & (x.mean() < 5), 2.0, 0.5)` instead of",
     "y = y * (torch.where((0 < x.mean()) & (x.mean() < 5), 2.0, 0.5))"),
    ("if x.mean() > 0:\n    return y * n\nreturn y - n",
     "write `return torch.where(x.mean() > 0, y * n, y - n)` instead of `if x.mean() > 0`",
     "return torch.where(x.mean() > 0, y * n, y - n)"),
    ("if x.mean() > 0:\n    return {'out': y * n}\nreturn {'out': y - n}",
     "write `return {'out': torch.where(x.mean() > 0, y * n, y - n)}` instead of `if x.mean() > 0`",
     "return {'out': torch.where(x.mean() > 0, y * n, y - n)}"),
    ("if x.mean() > 0:\n    return (y * n,)\nreturn {'out': y - n}",
     "compute both results, and choose with torch.where(x.mean() > 0, this, that) instead of `if x.mean() > 0`",
     "return {'out': torch.where(x.mean() > 0, y * n, y - n)}"),
    ("mask = x > 0\nif mask.all():\n    mask = None\ny = y if mask is None else torch.where(mask, y, 0.0)",
     "keep a tensor in both cases, such as a mask that changes nothing, instead of `if mask.all()`",
     "y = torch.where(x > 0, y, 0.0)"),
    ("z = torch.nn.functional.interpolate(y[None], size=int(n.item() > 0) + 3)\ny = y + z.mean(2)[0, :, None]",
     "give a fixed number instead of `int(n.item() > 0) + 3`",
     "z = torch.nn.functional.interpolate(y[None], size=4)\ny = y + z.mean(2)[0, :, None]"),
    ("k = int(n.item() > 1) + 3\ny = y + torch.nn.functional.layer_norm(x[:, :k], (k,)).square().sum()",
     "keep the whole length, and mask the rest, as in torch.where(torch.arange(length) < (n > 1).long() + 3, x, 0), "
     "instead of `int(n.item() > 1) + 3`",
     "k = (n > 1).long() + 3\n"
     "kept = torch.arange(4) < k\n"
     "near = torch.where(kept, x - torch.where(kept, x, 0).sum(1, keepdim=True) / k, 0)\n"
     "y = y + (near / (near.square().sum(1, keepdim=True) / k + 1e-5).sqrt()).square().sum()"),
    ("for _ in range(n.item()):\n    y = torch.tanh(y)",
     "loop over range(N) with the largest N that the model needs, and keep the result of a step with "
     "torch.where(i < n, new, old), instead of `range(n.item())`",
     "for i in range(3):\n    y = torch.where(i < n, torch.tanh(y), y)"),
    ("while y.abs().max() > 1000:\n    y = y / 2",
     "repeat a fixed number of times, and keep the result of a step with "
     "torch.where(y.abs().max() > 1000, new, old), instead of `while y.abs().max() > 1000`",
     "for _ in range(8):\n    y = torch.where(y.abs().max() > 1000, y / 2, y)"),
    ("y = y * {1: 0.5, 2: 2.0}.get(n.item(), 1.0)",
     "look up in a tensor, as in torch.tensor(values)[n], instead of `{1: 0.5, 2: 2.0}.get(n.item(), 1.0)`",
     "y = y * torch.tensor([1.0, 0.5, 2.0, 1.0])[n]"),
    ("for i in (x[:, 0] > 0).nonzero().flatten():\n    y[i] = 0.0",
     "compute all rows at once, by a mask with torch.where instead of `for i in (x[:, 0] > 0).nonzero().flatten()`",
     "y = torch.where(x[:, :1] > 0, 0.0, y)"),
    ("hits = x[x > 0]\nif hits.numel() > 0:\n    y = y * hits.mean()",
     "choose by a mask with torch.where instead of `hits.numel() > 0`",
     "mask = x > 0\nmean = torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)\n"
     "y = torch.where(mask.any(), y * mean, y)"),
    ("k = n.item() + 1\ny = y + torch.nn.functional.one_hot(n, k).sum()",
     "compute with the tensor `n`, or give a fixed number, instead of `n.item()`",
     "k = 4\ny = y + torch.nn.functional.one_hot(n, k).sum()"),
    ("y = y + torch.from_numpy(np.interp(x.numpy(), [0, 1], [0, 2])).float()",
     "use functions of tensors there instead of `np.interp(x.numpy(), [0, 1], [0, 2])`",
     "y = y + 2 * x.clamp(0, 1)"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "advice", "followed"), REWRITES)
def test_the_rewrite_works(lines: str, advice: str, followed: str, tmp_path: Path, cli: Any) -> None:
    """Each model in this test reads a tensor's value in an unsupported way. Checks that the error names the line of
    code and a rewrite. Also checks that the rewritten model can be exported and gives the same outputs as the original
    model."""
    source = written(tmp_path, lines)
    words = [word for text in INPUTS for word in ("--input", text)]
    ran = cli("export", source, *words, "-o", tmp_path / "net.onnx", "-q")
    assert (ran.code, len(ran.stderr.splitlines())) == (1, 1), ran.stderr
    line = HEAD.count("\n") + 1 + lines.startswith(("mask", "hits"))  # these two models fail in their second line
    assert f"at net.py:{line} {advice}" in ran.stderr
    original = load_object(source, "factory")[1]().eval()
    source = written(tmp_path, followed)
    made = accel.export(source, inputs=INPUTS, out=tmp_path / "net.onnx", simplify=False)
    agrees(source, made)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))
    with accel.load(made) as session, torch.inference_mode():
        for scale, n in ((1, 1), (2000, 2)):
            (found,) = session.run({"x": x.numpy() * scale, "n": np.array(n)}).values()
            wanted = only(original(x * scale, torch.tensor(n)))
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_all_lines_are_named(tmp_path: Path, cli: Any) -> None:
    """Fails if a message names only a branch, so that the next export fails at a number."""
    source = written(tmp_path, "k = round(x.abs().sum().item())\nif x.mean() > 0:\n    y = y * 2\ny = y + k")
    ran = cli("export", source, *(word for text in INPUTS for word in ("--input", text)), "-o", tmp_path / "net.onnx")
    assert "write `y = torch.where(x.mean() > 0, y * 2, y)` instead of `if x.mean() > 0`; at net.py" in ran.stderr
    assert "instead of `round(x.abs().sum().item())`" in ran.stderr


class Live(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if x.abs().sum().item() > 1000 else 1.0)


def test_a_live_module(tmp_path: Path) -> None:
    """If the source is a module object in memory, the error must name a line of the user's file, and not of accel's
    cached copy."""
    with pytest.raises(ExportFailed, match=r"^Live computes .* at test_python_numbers.py:\d+ write `torch.where\("):
        accel.export(Live(4, 4), example=torch.randn(2, 4), out=tmp_path / "m.onnx")


def test_other_threads_keep_pythons_own_root() -> None:
    """Fails if an export changes ``math.sqrt`` of a tensor in another thread of the user, or if two exports at the same
    time leave ``math.sqrt`` replaced."""
    own = math.sqrt
    inside, outside, done = threading.Event(), threading.Event(), threading.Event()

    def export() -> None:
        with exporters._roots():
            inside.set()
            outside.wait(20)
        done.set()

    thread = threading.Thread(target=export)
    thread.start()
    assert inside.wait(20)
    assert type(math.sqrt(torch.tensor(4.0))) is float  # this thread doesn't export
    with exporters._roots():
        assert isinstance(math.sqrt(torch.tensor(4.0)), torch.Tensor)
        outside.set()  # the other export ends first
        assert done.wait(20)
        assert isinstance(math.sqrt(torch.tensor(4.0)), torch.Tensor)
    thread.join()
    assert math.sqrt is own
