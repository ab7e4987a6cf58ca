"""Proves that packing puts documents of any length into sequences of one length. No document is lost, and each document
trains as if it were alone."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from accel.errors import BadConfig, BadData
from accel.examples.gpt import GPT, GPTConfig
from accel.sources.source import Source
from accel.train.batch import call
from accel.train.build import make_data
from accel.train.config.schema import TrainConfig
from accel.train.data.packing import OwnDocument, Packed, best_fit, keep_apart
from accel.train.loop import Trainer
from accel.train.loss import cross_entropy
from accel.train.parallel.layout import join
from tests.support.runs import SMALL

Document = tuple[torch.Tensor, torch.Tensor]


def _documents(*lengths: int) -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for length in lengths:
        ids = torch.randint(0, 61, (length,), generator=generator)
        found.append((ids, (ids * 3 + 1) % 61))
    return found


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=30))
def test_every_document_is_in_one_sequence(lengths: list[int]) -> None:
    """Fails if a document is lost, duplicated or put into a sequence that is too short. Also fails if the documents of
    two sequences would fit into one sequence."""
    found = best_fit(lengths, 12)
    assert sorted(i for inside in found for i in inside) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in inside) for inside in found]
    assert all(size <= 12 for size in filled)
    assert all(a + b > 12 for a, b in combinations(filled, 2))


def test_a_sequence_says_where_each_token_stands() -> None:
    """Checks that positions restart with each document, and that padding doesn't count as targets. Also checks that a
    token and its target have the same index in the sequence."""
    documents = _documents(3, 2)
    (tokens, positions, numbers), targets = Packed(documents, 8)[0]
    assert tokens.tolist() == [*documents[0][0].tolist(), *documents[1][0].tolist(), 0, 0, 0]
    assert targets.tolist() == [*documents[0][1].tolist(), *documents[1][1].tolist(), -100, -100, -100]
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert numbers.tolist() == [0, 0, 0, 1, 1, -1, -1, -1]


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        (_documents(3, 9), "document 1 has 9 tokens, but pack is only 8; cut the document, or use --pack=9"),
        ([(torch.zeros(3, dtype=torch.long), torch.zeros(2, dtype=torch.long))], "equal length"),
        ([(torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2, dtype=torch.long))], r"has tokens of shape \[3, 2\]"),
    ],
)
def test_what_cannot_be_packed_is_refused(documents: list[Document], says: str) -> None:
    """Checks that packing refuses a document that is longer than the sequence, and a sample that isn't a document."""
    with pytest.raises(BadData, match=says):
        Packed(documents, 8)[0]


def _gradients(module: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_a_packed_document_trains_as_it_does_alone(recompute: bool) -> None:
    """Checks that a packed document attends only to itself, and that its positions start at 0. The loss and the
    gradient must equal the sums over separately trained documents."""
    from accel.train.recompute import recompute as again

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=61, layers=2, hidden=32, heads=4, seq=16)).train()
    documents = _documents(5, 1, 9, 16, 3, 7, 2, 4)
    totals = [cross_entropy(model(ids[None]), targets[None]) for ids, targets in documents]
    alone = torch.stack([total for total, _ in totals]).sum()
    expected = _gradients(model, alone)
    data = Packed(documents, 16)
    assert len(data) < len(documents)
    keep_apart(model, data, torch.device("cpu"), torch.float32)
    assert model.training
    if recompute:
        again(model, "full")
    inputs, targets = torch.utils.data.default_collate([data[i] for i in range(len(data))])
    total, count = cross_entropy(call(model, tuple(inputs)), targets)
    assert int(count) == sum(int(c) for _, c in totals)
    assert total.item() == pytest.approx(alone.item(), rel=1e-6)
    found = _gradients(model, total)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_masks_of_the_model_stay() -> None:
    """Checks that the model's own attention mask or causal order stays in effect when packed documents are
    separated."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    mode = OwnDocument()
    mode.enter(torch.tensor([[0, 0, 0, 1, 1, 1]]))
    own = torch.ones(6, 6, dtype=torch.bool)
    own[2, 0] = False
    bias = torch.randn(6, 6)
    for arguments in ({"is_causal": True}, {"attn_mask": own}, {"attn_mask": bias}, {}):
        halves = []
        for part in (slice(0, 3), slice(3, 6)):
            cut = {n: m[part, part] if isinstance(m, torch.Tensor) else m for n, m in arguments.items()}
            halves.append(F.scaled_dot_product_attention(q[:, :, part], k[:, :, part], v[:, :, part], **cut))
        with mode:
            found = F.scaled_dot_product_attention(q, k, v, **arguments)
        torch.testing.assert_close(found, torch.cat(halves, 2))


class _Whole(nn.Module):
    """Defines a model that ignores the ``positions`` input. If ``mixes`` is true, the model uses ``positions``, but
    mixes neighboring tokens outside of attention."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.inner, self.mixes = GPT(GPTConfig(vocab=61, layers=1, hidden=32, heads=4, seq=16)), mixes

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x: torch.Tensor = self.inner(ids, positions if self.mixes else None)
        return x + x.roll(1, 1) if self.mixes else x


@pytest.mark.parametrize("mixes", [False, True])
def test_a_model_that_does_not_keep_documents_apart_is_refused(mixes: bool) -> None:
    """Fails if a run starts although its model would mix documents or use wrong positions."""
    with pytest.raises(
        BadConfig, match="output for a document changes if other documents are in the same sequence; let forward take"
    ):
        keep_apart(_Whole(mixes), Packed(_documents(5, 6), 16), torch.device("cpu"), torch.float32)


def test_a_packed_run_resumes_and_exports(tmp_path: Path) -> None:
    """Checks that a resumed run on packed documents continues with the next samples. Also checks that the trained model
    takes only tokens as inputs."""
    body = {"model": f"{SMALL}:model", "data": f"{SMALL}:documents", "pack": 16, "global_batch": 8, "micro_batch": 4}
    config = TrainConfig.from_dict({**body, "steps": 4, "drop_last": False})
    assert len(make_data(config)) < 400
    whole = Trainer(config, tmp_path / "whole", join(config))
    batches = whole.batches()
    expected = [whole.one_step(batches)["loss"] for _ in range(4)]
    half = Trainer(config, tmp_path / "half", join(config))
    batches = half.batches()
    for _ in range(2):
        half.one_step(batches)
    half.save()
    resumed = Trainer(config, tmp_path / "half", join(config))
    resumed.resume()
    batches = resumed.batches()
    assert [resumed.one_step(batches)["loss"] for _ in range(2)] == expected[2:]
    resumed.finish()
    assert [spec.name for spec in Source(tmp_path / "half").open().signature.inputs] == ["ids"]
