"""Proves that the copies of live PyTorch modules compute the same as the modules, and that the modules stay
unchanged."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
import textwrap
import threading
import warnings
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from transformers import BatchEncoding

import accel
from accel.child import Child
from accel.errors import BadFeeds, BadInputSpec, BadSource, UsageError
from accel.signature import DimRange
from accel.sources.notes import source_notes


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: dict[str, Any]


class Options(nn.Module):
    """Takes an optional mask and constants, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0, *, halve: bool = False
    ) -> Output:
        y = self.linear(x) * scale
        y = y if mask is None else y * mask[:, None]
        return Output(y / 2 if halve else y, {"mean": y.mean(1), "nothing": None})


class Nested(nn.Module):
    def forward(self, pair: list[torch.Tensor], named: dict[str, torch.Tensor]) -> Any:
        return [pair[0] - pair[1], (named["a"] * 2, named["b"] + 1)]


class Star(nn.Module):
    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return xs[0] - xs[1]


class Features(nn.Module):
    """Takes one dict, like the models of sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"embedding": (self.table(features["ids"]) * features["weight"][..., None]).mean(1)}


class PassedOn(nn.Module):
    """Returns the doubled input ``x``, and also returns the unchanged input ``ids`` as the output ``ids``."""

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"ids": ids, "y": x * 2}


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Mixed(nn.Module):
    def forward(self, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return features.mean(1) + ids.mean(1)


class Act(nn.Module):
    """Holds a function as an attribute, and calls the function."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.act = lambda value: value.relu() * factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.inner.lock = threading.Lock()  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def scripted(module: nn.Module) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.script(module)


X = torch.arange(8.0).reshape(2, 4) / 8
CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "dataclass": (Options(), (X,), {}),
    "keywords": (Options(), (), {"x": X, "mask": torch.ones(2), "halve": True}),
    "constants": (Options(), (X, None, 3.0), {}),
    "nested": (Nested(), ([X, X + 1], {"a": X, "b": torch.arange(2)}), {}),
    "star": (Star(), (X, X * 3), {}),
    "one dict": (Features(), ({"ids": torch.tensor([[1, 2], [3, 4]]), "weight": torch.rand(2, 2)},), {}),
    "encoding": (PassedOn(), (), BatchEncoding({"ids": torch.tensor([[1, 2], [3, 4]]), "x": X})),
    "function": (lambda a, b: a @ b.T, (X, X), {}),
    "lambda": (Act(2.0), (X,), {}),
    "scripted": (scripted(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), (X,), {}),
    "compiled": (torch.compile(nn.Linear(4, 3), backend="eager"), (X,), {}),
    "data parallel": (nn.DataParallel(nn.Linear(4, 3)), (X,), {}),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (X,), {}),
}


def flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, torch.Tensor):
        return [value.detach().numpy()]
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return [] if value is None else [array for item in value for array in flat(item)]


@pytest.mark.parametrize("name", CASES)
def test_a_session_is_called_like_the_module(name: str) -> None:
    """Checks that accel opens a live module. Also checks that the module's session takes and returns the same
    structures and values as the module."""
    module, args, kwargs = CASES[name]
    with torch.no_grad():
        wanted = module(*args, **kwargs)
    with accel.load(module, example=kwargs or args) as session:
        found = session(*args, **kwargs)
    assert type(found) is type(wanted)
    for one, other in zip(flat(found), flat(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_left_out_argument_means_its_default() -> None:
    """Fails if a call without an argument computes with the example's value although ``forward`` has another
    default."""
    with accel.load(Options(), example={"x": X, "scale": 2.0, "halve": False}) as session:
        with pytest.raises(BadFeeds, match=r"'scale' is left out and has the default 1.0, but was 2.0.*; give scale=2"):
            session(X)
        with pytest.raises(BadFeeds, match=r"scale is 3.0, but was 2.0 .* uses the value 2.0; give 2.0, or export"):
            session(X, scale=3.0)
        assert torch.equal(session(X, scale=2.0).logits, session(X, scale=2.0, halve=False).logits)


def test_numbers_that_are_not_finite_are_noted() -> None:
    """Fails if an example with NaN or infinity gives no note, or the name of a finite argument."""
    holes = torch.ones(4, 12).index_fill(1, torch.tensor([3]), torch.nan)
    found = accel.Source(Mixed(), example=(holes, torch.ones(4, 6))).open()
    assert "the example's features holds NaN or infinity; give finite numbers with example=" in source_notes(found)
    finite = accel.Source(Mixed(), example=(torch.ones(4, 12), torch.ones(4, 6))).open()
    assert not any("NaN" in note for note in source_notes(finite))


def test_a_tensor_is_no_array() -> None:
    """Fails if the error for a tensor in place of an array gives advice that doesn't help."""
    with accel.load(nn.Linear(4, 3), example=(X,)) as session:
        with pytest.raises(BadFeeds, match=r"is a tensor of torch, .*; give input.numpy\(\), or call the session"):
            session.run({"input": X})  # type: ignore[dict-item]
        moving = X.clone().requires_grad_()
        with pytest.raises(BadFeeds, match=r"give input.numpy\(force=True\), or call"):
            session.run({"input": moving})  # type: ignore[dict-item]
        array = session.run({"input": moving.numpy(force=True)})["output"]
        np.testing.assert_array_equal(array, session(moving).numpy())


def test_the_module_is_not_changed() -> None:
    """Fails if the capture of a module changes the module's mode, calls a hook, or changes a buffer or a gradient."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    seen: list[int] = []
    module[0].register_forward_hook(lambda *_: seen.append(1))
    module[0].weight.grad = torch.ones(3, 4)
    before = copy.deepcopy(module.state_dict())
    accel.Source(module, example=(X,))
    assert module.training
    assert not seen
    assert torch.equal(module[0].weight.grad, torch.ones(3, 4))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("module", "example", "dynamic", "shapes"),
    [
        (nn.Linear(4, 3), (X,), None, [("batch", 4)]),
        (Fixed(), (torch.randn(4, 3),), None, [(4, 3)]),
        (nn.Conv2d(3, 2, 3), (torch.randn(1, 3, 9, 8),), {"input": {2: "height"}}, [("batch", 3, "height", 8)]),
        (nn.Conv2d(3, 2, 3), (torch.randn(1, 3, 9, 8),), {"input": {0: None, 2: "h"}}, [(1, 3, "h", 8)]),
        (Mixed(), (torch.ones(4, 12), torch.ones(4, 6)), {"ids": {1: "length"}}, [("batch", 12), ("batch", "length")]),
        (Mixed(), (torch.ones(4, 12), torch.ones(4, 6)), {"ids": {1: "batch"}}, [(4, 12), (4, "batch")]),
        (nn.Linear(4, 3), (X,), {}, [(2, 4)]),
        (nn.Linear(4, 3), (X,), {"input": (torch.export.Dim("rows", min=2, max=6), None)}, [("rows", 4)]),
    ],
    ids=[
        "the batch is found",
        "a fixed batch is found",
        "named axes",
        "a first axis is fixed",
        "the batch stays beside a named axis",
        "another axis has the name of the batch",
        "no dynamic axis",
        "torch's Dim",
    ],
)
def test_dynamic_dims(module: nn.Module, example: Any, dynamic: Any, shapes: list[Any]) -> None:
    """Fails if accel treats a fixed axis as dynamic, or ignores the dynamic axes that the user declared."""
    artifact = accel.Source(module, example=example, dynamic=dynamic).open()
    assert [spec.shape for spec in artifact.signature.inputs] == shapes
    if dynamic is None:
        assert "axis" in artifact.source["live"]["note"]


def test_the_range_of_ids_is_that_of_the_table() -> None:
    """Checks that the declared range of ids is the range of the embedding table."""
    ids = {"ids": torch.tensor([[7, 2], [3, 4]]), "weight": torch.rand(2, 2)}
    artifact = accel.Source(Features(), example=(ids,)).open()
    assert artifact.signature.input("ids").values == (0, 49)


def test_another_process_opens_a_class_of_a_script(tmp_path: Path, own_cache: Path) -> None:
    """Checks that another process can open a model with a class in ``__main__``, and that two runs of a script give the
    model the same path."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch, accel
        FACTOR = 3
        def scaled(value): return value * FACTOR
        class Net(torch.nn.Module):
            def forward(self, x): return scaled(x)
        print(accel.Source(Net(), example=(torch.ones(2, 2),)).text)
        """)
    )
    found = {
        subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1
    path = found.pop().strip()
    with Child("accel.api.load:load", {"model": path}) as child:
        outputs = child.call("run", feeds={"x": np.ones((2, 2), np.float32)})
    assert np.array_equal(outputs["output"], np.full((2, 2), 3, np.float32))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: accel.Source(Locked(), example=(X,)), BadSource, r"'inner\.lock' is a lock"),
        (lambda: accel.Source(nn.Linear(4, 3), example=(X, X)), BadInputSpec, "too many positional arguments"),
        (lambda: accel.Source(nn.Linear(4, 3), example=()), BadInputSpec, "missing a required argument"),
        (lambda: accel.Source(nn.Linear(4, 3), example=("x",)), BadInputSpec, "holds no tensor"),
        (lambda: accel.Source(nn.Linear(4, 3), example=(torch.ones(2, 5),)), BadSource, "fails on its example"),
        (
            lambda: accel.Source(nn.Linear(4, 3), example=(torch.ones(2, 4).double(),)),
            BadSource,
            r"cast it in example=, as in input.to\(torch.float32\)",
        ),
        (lambda: accel.Source(nn.Linear(4, 3), example=(object(),)), BadInputSpec, "input has the type object"),
        (
            lambda: accel.Source(nn.Linear(4, 3), example=(X,), dynamic={"y": {0: "n"}}),
            BadInputSpec,
            "'y', which is not an input",
        ),
        (lambda: accel.Source(nn.Linear(4, 3), example=(X,), dynamic={"input": {5: "n"}}), BadInputSpec, "the axis 5"),
        (
            lambda: accel.Source(nn.Linear(4, 3), example=(torch.ones(0, 4),)),
            BadInputSpec,
            r"the shape \[0, 4\], which holds no sample; .* as in torch.zeros\(\[1, 4\]\)",
        ),
        (lambda: accel.Source(nn.Linear(4, 3)).open(), BadInputSpec, "pass example arguments with example="),
        (lambda: accel.Source("net.py:make", example=(X,)), UsageError, "is not a model in memory"),
        (lambda: accel.Source(3), BadSource, "int is not a model that accel reads"),  # type: ignore[arg-type]
        (lambda: accel.Source(nn.Linear), BadSource, r"a class, not a model; give an instance of it: Linear\("),
        (lambda: accel.bench(["a.onnx"], example=(X,)), UsageError, "none of the models is in memory"),
    ],
)
def test_bad_calls(make: Any, error: type[Exception], message: str) -> None:
    """Checks that accel refuses an unusable module or example, and that the message names the reason."""
    with pytest.raises(error, match=message):
        make()


class Pairs(nn.Module):
    """Uses classes of Python's standard library."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(chain((x,), repeat(x, 2))))


def test_a_class_without_a_file() -> None:
    """Checks that accel can hash the code of a module that uses a class without a source file, such as
    ``itertools.chain``."""
    assert accel.Source(Pairs(), example=(X,)).open().signature.outputs[0].shape[0] == 3


def test_scalars_keep_their_shape(tmp_path: Path) -> None:
    """Fails if a scalar among the arguments or the results gets a dim of size one."""
    scaled = accel.export(lambda x, by: (x * by).mean(), example=(X, torch.tensor(2.0)), out=tmp_path / "m.onnx")
    with accel.load(scaled) as session:
        torch.testing.assert_close(session(X, torch.tensor(3.0)), (X * 3).mean())


def test_a_column_of_one_row_is_an_example() -> None:
    """Fails if a column of a batch of one row, a tensor of one element with the stride of the row, breaks the hash of
    the example."""
    module = nn.Sequential(nn.Embedding(60, 4))
    tokens = torch.arange(7)[None]
    assert tokens[:, 0].stride() == (7,)
    made = accel.export(module, example=(tokens[:, 0],), dynamic={"input": {}})
    torch.testing.assert_close(accel.load(made)(tokens[:, 0]), module(tokens[:, 0]))


def test_random_numbers_are_the_reason() -> None:
    """Checks that the error for a model that draws random numbers names the random numbers as the reason."""
    with pytest.raises(BadSource, match="draws random numbers"):
        accel.Source(lambda x: x + torch.rand_like(x), example=(X,)).open()


class Best(nn.Module):
    """Fails for inputs with fewer than three rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sum(1).topk(3).values


def test_a_first_dim_gets_the_sizes_that_run() -> None:
    """Checks that a dynamic first dim that isn't named batch gets a range of sizes at which the module runs."""
    source = accel.Source(Best(), example=(torch.randn(5, 2),), dynamic={"rows": {0: "rows"}})
    assert source.open().signature.dims["rows"] == DimRange(3, 5, 20)


class Weighted(nn.Module):
    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (ids * weights).sum(1)


def test_axes_of_one_size_get_one_name() -> None:
    """Fails if the message about two axes that have to be of one size doesn't say so, or if its advice doesn't work."""
    example = (torch.arange(20).reshape(4, 5), torch.rand(4, 5))
    with pytest.raises(BadSource, match="the axes have one size, so give them one name: declare inputs=") as raised:
        accel.Source(Weighted(), example=example, dynamic={"ids": {1: "n"}}).open()
    declared = eval(str(raised.value).rpartition("inputs=")[2])
    assert [text.partition("[")[2].partition("]")[0] for text in declared] == ["batch,n", "batch,n"]
    for words in ({"inputs": declared}, {"inputs": declared, "example": example}):
        assert accel.Source(Weighted(), **words).open().signature.dynamic_dims == ("batch", "n")


def test_a_pickle_of_a_stranger_is_not_opened(tmp_path: Path) -> None:
    """Fails if accel unpickles a model file outside the user's cache."""
    source = accel.Source(nn.Linear(4, 3), example=(X,))
    copied = tmp_path / "Linear.module"
    copied.write_bytes(Path(source.text).read_bytes())
    with pytest.raises(BadSource, match="not in the cache of this user"):
        accel.Source(copied).open()
    with pytest.raises(BadSource, match="no longer in the cache"):
        accel.Source(tmp_path / "Gone.module").open()


def test_models_in_memory_of_other_kinds(tmp_path: Path) -> None:
    """Checks that a user can pass an ONNX ModelProto or an exported program. Also checks that accel refuses the
    argument ``example`` for these models, which need no example inputs."""
    program = torch.export.export(nn.Linear(4, 3).eval(), (X,), dynamic_shapes=({0: torch.export.Dim("n")},))
    made = accel.export(program, out=tmp_path / "a.onnx")
    proto = onnx.load(made.path)
    for model in (program, proto):
        with accel.load(model) as session:
            assert session(X).shape == (2, 3)
        with pytest.raises(UsageError, match="leave out example="):
            accel.load(model, example=(X,))
    proto.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    with pytest.raises(accel.AccelError, match=r"give the path of the \.onnx file"):
        accel.load(proto)
