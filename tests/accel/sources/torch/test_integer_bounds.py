"""Proves that integers such as the lengths of sequences stay within their bounds, even if a bound depends on a dim."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel
from accel.artifact import Artifact
from accel.cli import group, run
from accel.errors import BadData, BadFeeds, BadInputSpec
from accel.proof.data import at_sizes, check_values
from accel.proof.gates import OutputGate
from accel.signature import DimRange, IntegerRanges, Signature, TensorSpec
from accel.signature.bounds import bound_at, dims_of, parse_bound, substituted
from accel.sources.notes import source_notes
from accel.sources.torch.probe.checked_bags import checked_bags

NET = """
import torch

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, ids, lengths):
        x = self.embed(ids)
        last = (lengths - 1)[:, None, None].expand(-1, 1, x.shape[2])
        return self.head(x.gather(1, last)[:, 0])

def make():
    torch.manual_seed(0)
    return Tagger()
"""
INPUTS = ["ids:int64[batch,length]{0..19}", "lengths:int64[batch]{1..length}"]


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:make"


def live(net: str) -> torch.nn.Module:
    space: dict[str, object] = {"__name__": "__main__"}
    exec(NET, space)
    return space["make"]()  # type: ignore[operator,no-any-return]


def test_declared_bounds(net: str, tmp_path: Path) -> None:
    """Fails if verify feeds the model a length that is larger than the sequence, or if the check of the data accepts
    such a length. Also fails if the artifact loses the bounds."""
    out = tmp_path / "net.onnx"
    made = accel.export(net, inputs=INPUTS, out=out)
    assert list(map(str, made.signature.inputs)) == INPUTS
    assert list(map(str, accel.load(out).signature.inputs)) == INPUTS
    assert accel.verify(net, out, inputs=INPUTS).passed
    ids = np.zeros((3, 6), np.int64)
    np.savez(tmp_path / "bad.npz", ids=ids, lengths=np.array([1, 7, 2]))
    with pytest.raises(BadData, match=r"'lengths' holds the number 7 in sample 1, but .* range 1\.\.6"):
        accel.optimize(out, data=tmp_path / "bad.npz", max_drop=0.1)
    bounds = IntegerRanges(made.signature.inputs)
    found = bounds.first_outside({"ids": ids, "lengths": np.array([6, 0, 3])})
    assert str(found) == "input 'lengths' holds 0, it takes 1..6"


def test_bounds_of_openvino(net: str, tmp_path: Path) -> None:
    """Fails if OpenVINO gets a length that is larger than the sequence. OpenVINO would read past the end of the
    sequence without an error."""
    made = accel.export(net, inputs=INPUTS, to="openvino", out=tmp_path / "net")
    with accel.load(made.path) as session:
        session.run({"ids": np.zeros((2, 5), np.int64), "lengths": np.array([1, 5])})
        with pytest.raises(BadFeeds, match=r"'lengths' holds 6, it takes 1\.\.5"):
            session.run({"ids": np.zeros((2, 5), np.int64), "lengths": np.array([1, 6])})


def test_bounds_of_a_live_model_are_found(net: str) -> None:
    """Fails if accel refuses a model that takes the lengths of sequences as an input, or exports the model without
    bounds. The user declares no bounds for this input."""
    example = (torch.randint(0, 20, (3, 12)), torch.tensor([3, 12, 7]))
    dynamic = {"ids": {0: "batch", 1: "length"}, "lengths": {0: "batch"}}
    made = accel.Source(live(net), example=example, dynamic=dynamic).open()
    assert made.signature.input("lengths").values == (1, "length")
    assert "lengths is in 1..length" in made.source["bounds"]


def test_table_ranges_of_a_live_model_are_found() -> None:
    """Fails if the rows of an embedding go unnoticed because the outputs of an earlier run are reused."""
    model = torch.nn.Sequential(torch.nn.Embedding(20, 4), torch.nn.Linear(4, 2))
    made = accel.Source(model, example=torch.randint(3, 20, (1, 11))).open()
    assert [one.values for one in made.signature.inputs] == [(0, 19)]


def test_bounds_of_indices_are_found(tmp_path: Path) -> None:
    """Fails if the upper bound of an index into a sequence is one too large."""

    class Pick(torch.nn.Module):
        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return x[torch.arange(len(x)), places]

    example = (torch.randn(2, 5, 3), torch.tensor([0, 4]))
    source = accel.Source(Pick(), example=example, dynamic={"x": {0: "batch", 1: "n"}, "places": {0: "batch"}})
    assert source.open().signature.input("places").values == (0, "n-1")


TABLES = """
import torch

class Tables(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(20, 4)
        self.places = torch.nn.Parameter(torch.zeros(30, 4))
        self.columns = torch.nn.ModuleList([torch.nn.Embedding(7, 4), torch.nn.EmbeddingBag(5, 4)])

    def forward(self, ids, at, mixed, other):
        x = self.words(ids.long()) + torch.nn.functional.embedding(at.view(-1), self.places).view(*at.shape, 4)
        x = x + self.columns[0](mixed[:, :1]) + self.columns[1](mixed[:, 1:])[:, None]
        return x * (other > 5)[:, None, None]

class Classes(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + torch.nn.functional.one_hot(ids, 4).float()

def make():
    torch.manual_seed(0)
    return Tables()

def classes():
    return Classes(20, 4)
"""


def test_the_rows_of_a_table_bound_its_indices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that accel limits an input of indices to the rows of the embedding, even after a cast or a view. In this
    test, the columns of the input ``mixed`` are indices of tables of different sizes. Accel must limit the random
    values of ``mixed`` to the smallest table, because the user's data may hold larger integers in one column. A note
    must name every integer
    input without a known bound."""
    (tmp_path / "tables.py").write_text(TABLES)
    inputs = ["ids:int32[batch,n]", "at:int64[batch,n]", "mixed:int64[batch,4]", "other:int64[batch]"]
    source = f"{tmp_path / 'tables.py'}:make"
    words = [word for text in inputs for word in ("--input", text)]
    assert run(group, ["export", source, *words, "-o", str(tmp_path / "x.onnx")]) == 0
    note = "the valid integers of other are unknown, so random inputs hold only 0 and 1; declare them: --input"
    assert capsys.readouterr().err.count(note) == 1
    opened = accel.Source(source, inputs=inputs).open().signature
    assert [(spec.values, spec.seen) for spec in opened.inputs] == [
        ((0, 19), None), ((0, 29), None), ((0, 6), (0, 4)), (None, None),
    ]  # fmt: skip
    assert run(group, ["verify", source, str(tmp_path / "x.onnx")]) == 0
    assert note in capsys.readouterr().err
    inputs[3] += "{0..999}"
    assert accel.verify(source, tmp_path / "x.onnx", inputs=inputs).notes == ()


class Columns(torch.nn.Module):
    """Looks up two columns of an input in tables of 9 and 4 rows. With ``rest``, adds the third column."""

    def __init__(self, view: Callable[[torch.Tensor], Sequence[torch.Tensor]], rest: bool = False) -> None:
        super().__init__()
        self.many, self.few = torch.nn.Embedding(9, 4), torch.nn.Embedding(4, 4)
        self.view, self.rest = view, rest

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        one, two, *rest = self.view(ids)
        return self.many(one) + self.few(two) + (rest[0].float()[:, None] if self.rest else 0)


@pytest.mark.parametrize(
    "view",
    [
        lambda ids: (ids[:, 0], ids[:, 1]),
        lambda ids: ids.unbind(1),
        lambda ids: ids.T.contiguous().long(),
        lambda ids: (ids.int()[:, 0], ids[:, 1].clone()),
        lambda ids: [one.squeeze(1).to(torch.int32) for one in ids.split(1, 1)],
    ],
)
def test_columns_with_tables_of_their_own(view: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
    """Fails if a column of an input takes -1 or an integer beyond its own table, because PyTorch refuses both. Also
    fails if the column of the larger table takes only the integers of the smaller one, or if random inputs do."""
    made = accel.Source(Columns(view), example=torch.zeros(2, 2, dtype=torch.int64)).open()
    (ids,) = made.signature.inputs
    assert (ids.values, ids.seen) == ((0, 8), (0, 3))
    assert "tables of 4 to 9 rows, and each column takes the rows of its own" in " ".join(source_notes(made))
    signature = Signature.from_json(json.loads(json.dumps(made.signature.to_json())))
    ranges = IntegerRanges(signature.inputs)
    for row, good in [([0, 0], True), ([8, 3], True), ([-1, 0], False), ([9, 0], False), ([0, 4], False)]:
        assert (ranges.first_outside({"ids": np.array([[0, 0], row])}) is None) == good
    found = ranges.first_outside({"ids": np.array([[8, 3], [8, 5]])})
    assert found is not None
    assert (str(found), found.sample) == ("input 'ids' holds 5, it takes 0..3", 1)
    drawn = np.concatenate([signature.example_inputs(seed=seed)["ids"] for seed in range(32)])
    assert drawn.max(0).tolist() == [8, 3]


def test_a_file_refuses_integers_beyond_the_table_of_their_column(tmp_path: Path) -> None:
    """Fails if an exported model takes an integer that is beyond the table of its column, or refuses the last row."""
    model = Columns(lambda ids: ids.unbind(1)).eval()
    made = accel.export(model, example=torch.zeros(2, 2, dtype=torch.int64), out=tmp_path / "net.onnx")
    served = Artifact.open(made.path).integer_ranges  # which a server checks
    assert str(served.first_outside({"ids": np.array([[8, 5]])})) == "input 'ids' holds 5, it takes 0..3"
    session = accel.load(made)
    last = torch.tensor([[8, 3], [0, 3]])
    torch.testing.assert_close(session(last), model(last))
    with pytest.raises(BadFeeds, match=r"'ids' holds 5, it takes 0\.\.3"):
        session(torch.tensor([[8, 5]]))


def test_columns_on_another_axis() -> None:
    """Fails if columns are looked for on the last axis alone, or are kept for an axis whose size is dynamic."""
    example = torch.zeros(3, 2, 5, dtype=torch.int64)
    columns = Columns(lambda ids: (ids[:, 0], ids[:, 1]))
    made = accel.Source(columns, example=example, dynamic={"ids": {2: "length"}}).open()
    assert made.signature.inputs[0].columns == ((8,), (3,))


def test_a_column_that_selects_no_row() -> None:
    """Fails if accel refuses integers of a column that isn't an index, such as a count or a year."""
    view = lambda ids: (ids[:, 0], ids[:, 2], ids[:, 1])  # noqa: E731
    made = accel.Source(Columns(view, rest=True), example=torch.zeros(2, 3, dtype=torch.int64)).open()
    assert [(one.values, one.seen) for one in made.signature.inputs] == [(None, (0, 3))]


def test_a_model_that_fails_on_a_row_of_its_table(tmp_path: Path) -> None:
    """Checks that accel accepts a model that fails for some valid indices of its embedding. The model of this test has
    fewer classes than the embedding has rows."""
    (tmp_path / "tables.py").write_text(TABLES)
    opened = accel.Source(f"{tmp_path / 'tables.py'}:classes", inputs=["ids:int64[batch]"]).open()
    assert opened.signature.inputs[0].values is None


def test_a_sample_cut_to_a_shape_that_the_source_refuses(net: str, tmp_path: Path) -> None:
    """Fails if a gate blames a candidate for a sample although the source can't run the sample either. If a gate cuts a
    sequence to another length, integers without a declared bound may become too large. Also fails if a gate passes
    without any comparison."""
    made = accel.export(net, inputs=INPUTS, out=tmp_path / "net.onnx")
    bare = accel.Source(made.path, inputs=["lengths:int64[batch]{1..20}"]).open()
    np.savez(tmp_path / "long.npz", ids=np.ones((8, 20), np.int64), lengths=np.arange(13, 21))
    results = OutputGate(limit=1e-6, data=tmp_path / "long.npz").check(bare, bare)
    assert any("long.npz batch" in result.case for result in results)
    assert all(result.passed for result in results)
    never = accel.Source(made.path, inputs=["lengths:int64[batch]{1000..1001}"]).open()
    with pytest.raises(accel.errors.RunFailed, match="lengths"):
        OutputGate(limit=1e-6).check(never, never)


def test_samples_keep_to_the_bounds_at_other_sizes(tmp_path: Path) -> None:
    """Fails if samples that are cut to a shorter length still hold integers above the bound for this length."""
    signature = Signature(tuple(map(TensorSpec.parse, INPUTS)), (), {"length": DimRange(2, 4, 8)})
    part = {"ids": np.zeros((2, 8), np.int64), "lengths": np.array([8, 1])}
    assert at_sizes(signature, part, {"batch": 3, "length": 2}, 0)["lengths"].tolist() == [2, 1, 2]
    np.savez(tmp_path / "two.npz", **part)
    check_values(tmp_path / "two.npz", signature)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("n:int64[batch]{0..3*length}", "can't read the bound '3*length'"),
        ("n:int64[batch]{0..length+}", "can't read the bound"),
        ("n:int64[batch]{0..len}", "'len', which is not a dim of an input"),
    ],
)
def test_bad_bounds(net: str, tmp_path: Path, spec: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that accel refuses an unreadable bound, and a bound with an unknown dim."""

    words = ["export", net, "--input", INPUTS[0], "--input", spec, "-o", str(tmp_path / "x.onnx")]
    assert run(group, words) == 2
    assert word in capsys.readouterr().err


def test_no_valid_integer_at_a_size() -> None:
    """The bounds of an integer input can depend on a dim. If the bounds allow no integer at the requested size, the
    error must name the size."""
    spec = TensorSpec.parse("at:int64[batch]{2..n-1}")
    signature = Signature((TensorSpec.parse("x:float32[batch,n]"), spec), (), {"n": DimRange(2, 4, 8)})
    assert signature.example_inputs(n=3)["at"].tolist() == [2]
    with pytest.raises(BadInputSpec, match="empty range at the size n 2"):
        signature.example_inputs(n=2)


terms = st.lists(st.tuples(st.sampled_from("+-"), st.one_of(st.integers(0, 99), st.sampled_from("abc"))), min_size=1)


@given(terms, st.fixed_dictionaries({"a": st.integers(1, 9), "b": st.integers(1, 9), "c": st.integers(1, 9)}))
def test_a_bound_is_the_sum_that_it_states(found: list[tuple[str, int | str]], sizes: dict[str, int]) -> None:
    """A bound is a sum of integers and dims, such as ``n-1``. Fails if parsing or printing a bound changes the sum, or
    if replacing a dim by its size changes the sum."""
    bound = parse_bound("".join(f"{sign}{term}" for sign, term in found))
    total = sum((-1 if sign == "-" else 1) * sizes.get(str(term), term) for sign, term in found)  # type: ignore[call-overload,misc]
    assert bound_at(bound, sizes) == total
    assert parse_bound(bound) == bound
    for dim in dims_of(bound):
        fixed = substituted(bound, {dim: sizes[dim]})
        assert dim not in dims_of(fixed)
        assert bound_at(fixed, sizes) == total


class Widths(torch.nn.Module):
    """Looks up the width of each box in a table, so a second corner left of the first corner is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 4)

    def forward(self, boxes: torch.Tensor) -> torch.Tensor:
        return self.table(boxes[..., 2] - boxes[..., 0]) + self.table(boxes[..., 3] - boxes[..., 1])


class Places(Widths):
    """Also looks up the place of each box in the table, which has 64 rows."""

    def forward(self, ids: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return super().forward(boxes) + self.table(torch.arange(ids.shape[1])) + ids[..., None]


class Bags(torch.nn.Module):
    """Sums the rows of each bag. The first offset has to be 0, and the offsets have to be sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(20, 4, mode="sum")

    def forward(self, items: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bag(items, offsets)


def test_integers_of_the_example(tmp_path: Path) -> None:
    """Fails if accel refuses a model because the model fails on random integers. Accel then has to use the integers of
    the example, also after the model was loaded from its file."""
    corners = torch.randint(0, 30, (2, 5, 2))
    boxes = torch.cat([corners, corners + torch.randint(0, 30, (2, 5, 2))], -1)
    source = accel.Source(Widths(), example=(boxes,), dynamic={"boxes": {0: "batch", 1: "n"}})
    assert "so boxes repeats the integers of an example" in " ".join(source_notes(source.open()))
    accel.export(source, out=tmp_path / "widths.onnx")
    spec = accel.Source(tmp_path / "widths.onnx").open().signature.input("boxes")
    assert spec.sample is not None
    assert spec.repeated((3, 7, 4), start=1).tolist()[0][:2] == boxes[1, :2].tolist()
    bags = (torch.arange(7), torch.tensor([0, 2, 5]))
    accel.export(Bags(), example=bags, dynamic={"offsets": {0: "bags"}}, out=tmp_path / "bags.onnx")
    spec = accel.Source(tmp_path / "bags.onnx").open().signature.input("offsets")
    assert spec.repeated((5,)).tolist() == [0, 2, 5, 5, 5]
    long = torch.arange(40).repeat(2, 1)  # four times the example's size is beyond the table
    both = accel.Source(Places(), example=(long, boxes.repeat(1, 8, 1)), dynamic={"ids": {1: "n"}, "boxes": {1: "n"}})
    assert both.open().signature.dims["n"].max == 64
    (tmp_path / "net.py").write_text(
        "from tests.accel.sources.torch.test_integer_bounds import Widths, torch\n"
        "def make():\n    return Widths(), (torch.tensor([[[1, 2, 30, 40]]]),)\n"
    )
    made = accel.export(f"{tmp_path / 'net.py'}:make", out=tmp_path / "factory.onnx")
    assert made.signature.input("boxes").sample == (((1, 2, 30, 40),),)
    torch.export.save(torch.export.export(Bags(), bags), tmp_path / "bags.pt2")
    accel.export(tmp_path / "bags.pt2", out=tmp_path / "again.onnx")


BAGS = """
import torch
import accel

class Bags(torch.nn.Module):
    def __init__(self, include: bool):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(20, 4))
        self.include = include

    def forward(self, items, offsets):
        return torch.nn.functional.embedding_bag(
            items, self.rows, offsets, padding_idx=0, include_last_offset=self.include
        )

example = (torch.tensor([1, 2, 0, 3, 4, 5]), torch.tensor([0, 2, 4, 6]))
axes = {"items": {0: "n"}, "offsets": {0: "bags"}}
for model in (Bags(False), Bags(True), torch.jit.script(Bags(True))):
    made = accel.Source(model, example=example, dynamic=axes, dims={"bags": (2, 4, 8)}).open()
    print(made.signature.input("offsets"), made.source["not_empty"]["bags"])
"""


def test_no_bags_do_not_end_the_process(tmp_path: Path) -> None:
    """Fails if accel runs a model on no bags. PyTorch then reads beyond the end of the offsets, if the model has a
    ``padding_idx``, and the user's process ends with a segmentation fault."""
    (tmp_path / "bags.py").write_text(BAGS)
    ran = subprocess.run([sys.executable, tmp_path / "bags.py"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    plain, ended, script = ran.stdout.splitlines()
    said = "offsets:int64[bags] the 0 offsets of an embedding bag make no bag; give at least"
    assert [plain, ended] == [f"{said} 1", f"{said} 2"]
    assert "failed in the TorchScript interpreter" in script


def test_one_offset_is_an_error_if_it_ends_the_last_bag() -> None:
    """Fails if a single offset that ends the last bag isn't refused, although there is no bag then."""
    bags = torch.nn.EmbeddingBag(20, 4, mode="sum", padding_idx=0, include_last_offset=True)
    with pytest.raises(ValueError, match="the 1 offsets of an embedding bag make no bag"), checked_bags(bags):
        bags(torch.arange(3), torch.tensor([0]))
    with (
        pytest.raises(ValueError, match="have to be sorted, from 0 to the number of its indices 3"),
        checked_bags(bags),
    ):
        bags(torch.arange(3), torch.tensor([0, 3, 1]))
    with checked_bags(bags):
        assert bags(torch.arange(3), torch.tensor([0, 1, 1, 3])).shape == (3, 4)


def test_bags_without_named_axes(tmp_path: Path) -> None:
    """Fails if accel refuses a model of bags because it takes the items for a batch of any size, while their number is
    at least the last offset of the example. The advice of the session for other offsets is followed."""
    model, items = Bags(), torch.arange(6)
    example = (items, torch.tensor([0, 2, 4]))
    source = accel.Source(model, example=example)
    assert "the range of batch begins at 4" in " ".join(source_notes(source.open()))
    with accel.load(accel.export(source, out=tmp_path / "bags.onnx")) as session:
        more = (torch.arange(8), torch.tensor([0, 3, 3]))
        torch.testing.assert_close(session(*more), model(*more))
        with pytest.raises(BadFeeds, match=r"with dynamic=\{'offsets': \{0: 'size_0'\}\}"):
            session(items, torch.tensor([0, 1, 2, 4]))
    advised = accel.export(model, example=example, dynamic={"offsets": {0: "size_0"}}, out=tmp_path / "advised.onnx")
    with accel.load(advised) as session:
        fewer = (items, torch.tensor([0, 3]))
        torch.testing.assert_close(session(*fewer), model(*fewer))
