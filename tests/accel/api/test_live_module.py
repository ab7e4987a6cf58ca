"""Proves that the public functions optimize, call, compare, save and load a live module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.errors import BadData, BadFeeds, BadSource, UsageError
from accel.spelling import on_command_line


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(image)
        return {"logits": logits, "probabilities": logits.softmax(-1)}


@pytest.fixture(scope="module")
def model() -> Classifier:
    return Classifier().eval()


@pytest.fixture(scope="module")
def loader(model: Classifier) -> DataLoader[Any]:
    images = torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        labels = model(images)["logits"].argmax(-1)
    return DataLoader(TensorDataset(images, labels), batch_size=32)


def accuracy(outputs: dict[str, np.ndarray], data: dict[str, np.ndarray]) -> float:
    return float((outputs["logits"].argmax(-1) == data["labels"]).mean())


@pytest.fixture(scope="module")
def fast(model: Classifier, loader: DataLoader[Any]) -> Any:
    before = set(Path.cwd().iterdir())
    words: dict[str, Any] = {"metric": accuracy, "max_drop": 0.05, "target": "ort-cpu", "vary_session": False}
    found = accel.optimize(model, example=(torch.randn(4, 3, 8, 8),), data=loader, **words)
    assert set(Path.cwd().iterdir()) == before, "the current folder is written to"
    return found


def test_the_result_is_called_like_the_module(fast: Any, model: Classifier) -> None:
    """Checks that the optimized module takes and returns values of the same types as the original module. The returned
    values must agree."""
    image = torch.randn(3, 3, 8, 8)
    found = fast(image)
    with torch.no_grad():
        wanted = model(image)
    assert list(found) == list(wanted)
    assert isinstance(found["logits"], torch.Tensor)
    # The bound of 0.2 is coarse, because the chosen candidate may be an int8 model.
    assert (found["logits"] - wanted["logits"]).abs().max() < 0.2
    assert isinstance(fast(image.numpy())["logits"], np.ndarray)
    assert isinstance(fast(image=image)["logits"], torch.Tensor)
    np.testing.assert_allclose(fast.run({"image": image.numpy()})["logits"], found["logits"], atol=1e-6)


@pytest.mark.parametrize("kind", ["tensor", "array", "dict", "batches"])
def test_every_function_takes_data_in_memory(kind: str, model: Classifier, own_cache: Any) -> None:
    """Fails if a function takes only the path of a file where ``accel.optimize`` takes data in memory."""
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    forms: dict[str, Any] = {
        "tensor": images,
        "array": images.numpy(),
        "dict": {"image": images},
        "batches": [(images,)],
    }
    words: dict[str, Any] = {"example": (images[:2],), "data": forms[kind]}
    made = accel.export(model, example=(images[:2],))
    checked = accel.verify(model, made, **words)
    assert checked.passed
    assert checked.cases == ("data batch 0",)
    assert accel.bisect(made, made, data=forms[kind]).divergence is None
    timed = accel.bench([model, made], rounds=5, block_seconds=0.01, budget_seconds=0, **words)
    assert all(row.error is None for row in timed.rows)


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(x)
        return found[:, :4][found[:, 4] > 0.9]


def test_a_model_that_keeps_no_row_of_a_sample(own_cache: Any) -> None:
    """Fails if a detector can't be optimized because a sample of its data has no object, or if no speedup is measured
    after a budget that was too short to measure a candidate."""
    model, x = Boxes().eval(), torch.zeros(40, 8)
    words: dict[str, Any] = {"target": "ort-cpu", "precision": "fp32", "budget_seconds": 1, "vary_session": False}
    fast = accel.optimize(model, example=(x,), dynamic={}, data=[(x,)], **words)
    several = 2 * torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(fast(several), model(several), rtol=1e-4, atol=1e-5)
    assert fast.speedup is not None
    assert fast.speedup > 0


def test_labels_in_memory(model: Classifier, own_cache: Any) -> None:
    """Fails if labels have to be in a file."""
    images = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    simple = nn.Sequential(model.body)
    with torch.no_grad():
        labels = simple(images).argmax(-1)
    words: dict[str, Any] = {"example": (images[:2],), "data": images, "target": "ort-cpu", "vary_session": False}
    for given in (labels, labels.numpy(), labels.tolist()):
        found = accel.optimize(simple, labels=given, max_drop=0.1, precision="int8", budget_seconds=20, **words)
        assert found.candidates[0].judgement is not None
        assert found.candidates[0].judgement.metric == pytest.approx(1.0)
    with pytest.raises(UsageError, match=r"^the labels: 7 labels for 40 samples"):
        accel.optimize(simple, labels=labels[:7], max_drop=0.1, **words)


def test_labels_of_a_loader_reach_the_metric(fast: Any) -> None:
    """Checks that the metric gets the labels, which the module itself doesn't take."""
    metrics = [row.judgement.metric for row in fast.candidates if row.judgement is not None]
    assert len(metrics) > 1
    assert max(metrics) == 1.0  # the source scores 1.0, because the test uses the source's outputs as labels


def test_what_it_says(fast: Any) -> None:
    """Checks that the table has at most 100 columns, that ``repr`` is short, and that a notebook shows a plot."""
    assert max(map(len, fast.table().splitlines())) <= 100
    assert "batch: the model ran at 4 and 5" in " ".join(fast.table().split())
    assert repr(fast).startswith("<accel optimized: ")
    assert len(repr(fast)) < 300
    assert "<svg" in fast._repr_html_()
    assert "median ms" in fast._repr_html_()


def test_save_and_load(fast: Any, tmp_path: Path) -> None:
    """Checks that a saved model gives the same outputs after loading, and can be called like the module. Also checks
    that ``save`` overwrites no file of the user."""
    image = torch.randn(2, 3, 8, 8)
    fast.save(tmp_path / "out")
    with accel.load(tmp_path / "out") as session:
        assert torch.equal(session(image)["logits"], fast(image)["logits"])
        assert repr(session).startswith("<accel session of model.")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / fast.artifact.path.name).write_text("mine")
    with pytest.raises(accel.AccelError, match="was not made by accel"):
        fast.save(tmp_path / "mine")


def test_speedup_is_over_the_module(fast: Any) -> None:
    """Checks that the speedup is relative to the module in eager mode, not to the exported model. A small module may be
    faster with one thread than with several threads, and the speedup is relative to the faster of both."""
    base, one_thread, own = fast.comparison.rows
    assert (base.name, one_thread.name) == ("eager", "eager, 1 thread")
    assert one_thread.options["threads"] == 1
    assert fast.speedup == own.speedup / max(1.0, one_thread.speedup) > 0


def test_the_other_functions_take_it(
    fast: Any, model: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that export, verify, bisect and bench accept a live module and a result of accel.optimize. Also checks
    that export doesn't write into the current folder."""
    example = (torch.randn(4, 3, 8, 8),)
    monkeypatch.chdir(tmp_path)
    exported = accel.export(model, example=example)
    assert not list(tmp_path.iterdir())
    assert accel.verify(model, exported, example=example).passed
    assert accel.verify(model, exported).passed  # ``accel verify`` draws the inputs from the artifact's signature
    report = accel.bench([fast, exported], against=model, example=example, budget_seconds=1.0, block_seconds=0.02)
    # The result may use one thread, and the baseline is then timed with one thread too.
    assert len(report.rows) in (3, 4)
    assert [row.error for row in report.rows] == [None] * len(report.rows)
    from accel.api.bisect import bisect

    assert bisect(model, exported, example=example) is not None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([(torch.ones(2, 3, 8, 8), torch.ones(2), torch.ones(2))], "a batch has 3 arrays, but the model takes 1"),
        ([{"picture": torch.ones(2, 3, 8, 8)}], "a batch has no array 'image'"),
        ([], "the data holds no samples"),
        (7, "the data has the type int"),
        ([("text",)], "'image' of a batch holds"),
        ({"image": np.ones((2, 3, 9, 9), np.float32)}, "the model takes image"),
    ],
)
def test_data_that_does_not_fit(model: Classifier, data: Any, message: str) -> None:
    """Checks that accel refuses in-memory samples that don't fit the model, and that the message names the reason."""
    with pytest.raises(BadData, match=message):
        accel.optimize(model, example=(torch.randn(4, 3, 8, 8),), data=data)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).mean(1)


def test_an_integer_outside_its_range_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that accel refuses an unsuitable sample before the export begins."""
    ids = np.zeros((300, 3), np.int64)
    ids[257, 1] = 50
    np.savez(tmp_path / "ids.npz", ids=ids)
    monkeypatch.setattr("accel.api.as_onnx.run_stage", None)  # nothing may run
    with pytest.raises(
        BadData, match=r"'ids' holds the number 50 in sample 257, but the model takes numbers in the range 0\.\.49"
    ):
        accel.optimize(Words(), example=(torch.zeros(2, 3, dtype=torch.int64),), data=tmp_path / "ids.npz")


@pytest.mark.parametrize(
    ("value", "length", "message"),
    [
        (50, 3, r"^batch 1 of the data: .* 50 in sample 7, .*0\.\.49; correct the sample or leave it out$"),
        (0, 4, r"^batch 0 of the data: .* export it again with dynamic=\{'ids': \{1: 'length'\}\} for a model"),
    ],
)
def test_data_in_memory_is_named_by_its_sample(value: int, length: int, message: str) -> None:
    """Fails if the error about data in memory names a temporary file, or advises the range that is in force."""
    ids = torch.zeros(20, length, dtype=torch.int64)
    ids[17, 1] = value
    batches = [ids[:10], ids[10:]]
    with pytest.raises(BadData, match=message):
        accel.optimize(Words(), example=(torch.zeros(2, 3, dtype=torch.int64),), data=batches, target="ort-cpu")


def test_other_lengths_follow_the_advice() -> None:
    """Fails if the error about another length doesn't name the option with the input's name, or the option doesn't
    help."""
    long = {"ids": np.zeros((2, 5), np.int64)}
    example = (torch.zeros(2, 3, dtype=torch.int64),)
    with accel.load(Words(), example=example) as session:
        with pytest.raises(BadFeeds, match=r"dynamic=\{'ids': \{1: 'length'\}\} for .*, or with inputs=\['ids:int64"):
            session.run(long)
        with on_command_line(), pytest.raises(BadFeeds, match=r"with --input ids:int64\[batch,length\]\{0..49\}$"):
            session.run(long)
    with accel.load(Words(), example=example, dynamic={"ids": {1: "length"}}) as session:
        assert session.run(long)["output"].shape == (2, 4)


def test_unknown_keywords_name_the_nearest() -> None:
    """Fails if the error about a misspelled keyword names an inner class, or not the keyword that was meant."""
    with pytest.raises(TypeError, match=r"^optimize\(\) has no keyword 'maxdrop'; write max_drop=$"):
        accel.optimize("x.onnx", maxdrop=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^load\(\) has no keyword 'zzz'; the keywords are model, runtime, .*dims"):
        accel.load("x.onnx", zzz=1)  # type: ignore[call-arg]


def test_bench_takes_one_model(tmp_path: Path) -> None:
    """Fails if the letters of a path are taken for models."""
    with pytest.raises(BadSource, match=r"^'missing' is no file"):
        accel.bench("missing")
    made = accel.export(nn.Linear(4, 2), example=(torch.ones(2, 4),), out=tmp_path / "m.onnx")
    for one in (str(made.path), made.path, made):
        report = accel.bench(one, budget_seconds=0.2, block_seconds=0.005, rounds=5)
        assert [row.error for row in report.rows][:1] == [None]
