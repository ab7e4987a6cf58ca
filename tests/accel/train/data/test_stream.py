"""Proves that a run on an iterable dataset resumes at its exact sample, and that ranks share its samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel.errors import BadData
from accel.sources.source import Source
from accel.train.build import make_data
from accel.train.data.stream import Stream, micro_batches
from accel.train.run.launch import train
from tests.support.runs import SMALL, config_of, logged, trainer_of

_SOURCE = (
    SMALL.read_text()
    + """

import random
import numpy


class Drawn(torch.utils.data.IterableDataset):
    # Draws every sample, so that only the same random numbers give the same losses.
    def __iter__(self):
        for _ in range(21 if self.epoch != 1 else 19):
            ids = torch.randint(0, VOCABULARY, (LENGTH,))
            shift = random.randrange(3) + int(numpy.random.randint(3)) + self.epoch
            yield ids, (ids * 3 + shift) % VOCABULARY

    def set_epoch(self, epoch):
        self.epoch = epoch


class Rows:
    def __iter__(self):
        for ids, targets in data():
            yield {"ids": ids.tolist(), "labels": targets.tolist()}


class Labels(GPT):
    def forward(self, ids, labels=None):
        return super().forward(ids)


def labels():
    return Labels(GPTConfig(vocab=VOCABULARY, layers=1, hidden=32, heads=4, seq=LENGTH))


def generator():
    return (sample for sample in data())


def mapping():
    return {"samples": data()}


class Few:
    def __iter__(self):
        return iter(data()[:3])
"""
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.py"
    file.write_text(_SOURCE)
    return file


@pytest.mark.parametrize("drop_last", [True, False])
def test_an_iterable_dataset_is_resumed_exactly(tmp_path: Path, source: Path, drop_last: bool) -> None:
    """Fails if a resumed run repeats or leaves out a sample, draws other random numbers, or loses the epoch. Also fails
    if two ranks train on other batches than one process. An epoch has 21 or 19 samples, in batches of 8."""
    tables: dict[str, Any] = {"data": f"{source}:Drawn", "drop_last": drop_last, "micro_batch": 4}
    whole = trainer_of(tmp_path / "none", steps=9, **tables)
    batches = whole.batches()
    expected = [whole.one_step(batches)["loss"] for _ in range(9)]
    for first in (1, 4, 6):
        out = tmp_path / str(first)
        train(config_of(steps=first, **tables), out)
        train(config_of(steps=9, **tables), out)
        assert logged(out) == pytest.approx(expected, abs=1e-6)
    train(config_of(steps=9, **tables), tmp_path / "two", nproc=2)
    assert logged(tmp_path / "two") == pytest.approx(expected, abs=2e-5)


def test_another_batch_goes_on_at_the_next_sample(tmp_path: Path, source: Path) -> None:
    """Fails if a resumed run with another global batch doesn't begin with the first sample that wasn't trained on."""
    train(config_of(steps=1, data=f"{source}:Drawn"), tmp_path)
    resumed = trainer_of(tmp_path, data=f"{source}:Drawn", global_batch=4)
    resumed.resume()
    assert resumed.reordered == []
    drawn = make_data(config_of(data=f"{source}:Drawn"))
    assert torch.equal(next(resumed.batches())[0], torch.stack([drawn[index][0] for index in range(8, 12)]))


def test_rows_with_labels_are_streamed(tmp_path: Path, source: Path) -> None:
    """Fails if rows with labels can't be streamed, or if the exported model asks for labels."""
    trainer = trainer_of(tmp_path, data=f"{source}:Rows", model=f"{source}:labels", steps=1)
    trainer.run()
    assert [spec.name for spec in Source(tmp_path).open().signature.inputs] == ["ids"]


def test_every_sample_is_trained_on_once(tmp_path: Path, source: Path) -> None:
    """Fails if the ranks of a stream repeat or leave out a sample, or end an epoch after different numbers of steps."""

    class Numbers:
        def __iter__(self) -> Iterator[tuple[int, int]]:
            return iter([(index, index) for index in range(19)])

    seen = []
    for rank in range(2):
        stream = Stream(Numbers(), "numbers", 0)
        made = micro_batches(stream, global_batch=8, micro_batch=2, rank=rank, ranks=2, drop_last=False)
        seen.append([next(made)[1] for _ in range(6)])  # three steps of two micro-batches are an epoch
        assert stream.place() == {"epoch": 0, "taken": 19}
    values = [value for part in seen for y in part if y is not None for value in y.tolist()]
    assert sorted(values) == list(range(19))


def test_the_users_generators_keep_their_state(source: Path) -> None:
    """Fails if a stream changes the random numbers that the run draws, or draws the same numbers for every sample."""
    stream = make_data(config_of(data=f"{source}:Drawn"))
    for seeds in (random.seed, np.random.seed, torch.manual_seed):
        seeds(5)
    expected = random.random(), np.random.rand(), torch.rand(1)
    for seeds in (random.seed, np.random.seed, torch.manual_seed):
        seeds(5)
    batch = next(stream.steps(8, drop_last=True))
    assert len({tuple(ids.tolist()) for ids, _ in batch}) == 8
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


@pytest.mark.parametrize(
    ("name", "tables", "says"),
    [
        (
            "generator",
            {},
            "returned a generator as the data, which can be read only once; return an object whose __iter",
        ),
        ("Drawn", {"pack": 16}, "returned an iterable dataset, which doesn't work with pack; .* use pack = 0"),
        ("Drawn", {"loader_processes": 1}, "which doesn't work with loader_processes; .* use loader_processes = 0"),
        ("mapping", {}, "returned a dict as the data; return a list .*, another map-style dataset .*, or an iterable"),
    ],
)
def test_what_cannot_be_streamed(source: Path, name: str, tables: dict[str, Any], says: str) -> None:
    """Checks that data that can't be resumed is refused, and that the error names the fix."""
    with pytest.raises(BadData, match=says):
        make_data(config_of(data=f"{source}:{name}", **tables))


def test_an_epoch_shorter_than_a_batch(source: Path) -> None:
    """Fails if a stream that never fills a batch makes the run hang."""
    stream = make_data(config_of(data=f"{source}:Few"))
    with pytest.raises(BadData, match="has only 3 samples, but global_batch is 8; use a smaller global_batch"):
        next(stream.steps(8, drop_last=True))
