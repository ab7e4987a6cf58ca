"""Proves that models of transformers are trained with their own loss, and as exactly as with a loss of accel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from accel.errors import BadConfig
from accel.sources.source import Source
from accel.train.loss import cross_entropy, squared_error
from accel.train.model_loss import ObjectLoss
from accel.train.run.launch import train
from tests.support.runs import config_of, logged, trainer_of

_SOURCE = """
import torch
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, GPT2Config
from transformers import GPT2LMHeadModel

SMALL = dict(vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
SMALL |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4)


def causal():
    none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=12, n_embd=16, n_layer=1, n_head=2, **none))


def tokens():
    return BertForTokenClassification(BertConfig(**SMALL))


def sequences():
    return BertForSequenceClassification(BertConfig(**SMALL))


def _ids():
    return torch.randint(0, 31, (40, 12), generator=torch.Generator().manual_seed(0))


def rows(classes=31):
    found = []
    for index, ids in enumerate(_ids()):
        labels = ids.clone() % classes
        labels[: index % 9] = -100  # ranks and micro-batches count different numbers of labels
        found.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return found


def token_rows():
    return rows(4)


def sequence_rows():
    return [{"input_ids": ids, "labels": int(ids[0]) % 4} for ids in _ids()]


def pairs():
    # What the causal model computes from its labels: the target of a position is the next label.
    return [({"input_ids": torch.tensor(r["input_ids"])}, torch.tensor([*r["labels"][1:], -100])) for r in rows()]


def token_pairs():
    return [({"input_ids": torch.tensor(r["input_ids"])}, torch.tensor(r["labels"])) for r in token_rows()]


def sequence_pairs():
    return [({"input_ids": r["input_ids"]}, torch.tensor(r["labels"])) for r in sequence_rows()]
"""


@pytest.mark.parametrize(
    ("model", "rows", "pairs"),
    [
        ("causal", "rows", "pairs"),
        ("tokens", "token_rows", "token_pairs"),
        ("sequences", "sequence_rows", "sequence_pairs"),
    ],
)
def test_a_models_own_loss_is_taken(tmp_path: Path, model: str, rows: str, pairs: str) -> None:
    """Fails if a model of transformers needs a loss of the user's. Also fails if the gradients depend on how a batch is
    cut, or differ from those of cross entropy on the logits with the same targets."""
    source = tmp_path / "source.py"
    source.write_text(_SOURCE)
    found = []
    for data, micro in ((rows, 8), (rows, 2), (pairs, 8)):
        tables = {"model": f"{source}:{model}", "data": f"{source}:{data}", "micro_batch": micro}
        trainer = trainer_of(tmp_path, optimizer={"name": "sgd", "lr": 0.5}, **tables)
        batches = trainer.batches()
        found.append([trainer.one_step(batches)["loss"] for _ in range(4)])
        assert found[-1] == pytest.approx(found[0], abs=2e-5)


def test_two_ranks_train_a_model_of_transformers(tmp_path: Path) -> None:
    """Fails if two ranks, one of them without samples at the end of an epoch, give other losses than one process. Also
    fails if the exported model asks for labels."""
    source = tmp_path / "source.py"
    source.write_text(_SOURCE + "\n\ndef few():\n    return rows()[:17]\n")
    common = {"model": f"{source}:causal", "data": f"{source}:few", "drop_last": False}
    tables = {**common, "optimizer": {"name": "sgd", "lr": 0.5}}
    train(config_of(**tables, parallel={"zero": 3}), tmp_path / "two", nproc=2)
    train(config_of(**tables), tmp_path / "one")
    assert logged(tmp_path / "two") == pytest.approx(logged(tmp_path / "one"), abs=2e-5)
    assert [spec.name for spec in Source(tmp_path / "two").open().signature.inputs] == ["input_ids"]


def test_objects_with_a_loss_or_logits() -> None:
    """Fails if a loss of the user's doesn't get the object, or if a batch without targets gives NaN."""
    logits = torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.tensor([[1, 2, -100], [0, -100, 4]])
    expected = cross_entropy(logits, targets)
    assert ObjectLoss(cross_entropy)(SimpleNamespace(logits=logits), targets) == expected
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    own = ObjectLoss(cross_entropy)
    total, count = own(SimpleNamespace(loss=mean, logits=logits), targets)
    assert int(count) == 4
    assert total.item() == pytest.approx(expected[0].item(), rel=1e-6)
    nothing = torch.full_like(targets, -100)
    nan = F.cross_entropy(logits.flatten(0, 1), nothing.flatten())
    total, count = own(SimpleNamespace(loss=nan, logits=logits), nothing)
    assert (total.item(), int(count)) == (0.0, 0)
    total.backward()
    assert not logits.grad.any()  # type: ignore[union-attr]
    values = torch.zeros(2, 3)
    total, count = ObjectLoss(cross_entropy)(SimpleNamespace(loss=torch.tensor(0.5)), values)
    assert (float(total), int(count)) == (3.0, 6)
    assert ObjectLoss(squared_error)(SimpleNamespace(logits=values), values)[1] == 6
    theirs = ObjectLoss(lambda outputs, _: (outputs.loss, torch.tensor(1)))
    assert theirs(SimpleNamespace(loss=mean), targets)[0] is mean
    with pytest.raises(BadConfig, match=r"the model returns a dict, but .* or an object with a loss or with logits"):
        ObjectLoss(cross_entropy)({"logits": logits}, targets)
