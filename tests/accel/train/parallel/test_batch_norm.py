"""Proves that synchronized batch norm on two ranks computes what one process computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel.errors import BadConfig
from accel.train.parallel import batch_norm
from accel.train.run.launch import train
from tests.support.runs import config_of, logged, rows_of, trainer_of

_SOURCE = """
import torch
from torch import nn


def shallow():
    second = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, momentum=None))
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), second, nn.Flatten(), nn.Linear(16, 5))


def model():
    return shallow().append(nn.BatchNorm1d(5, affine=False))


def by_hand():
    return nn.SyncBatchNorm.convert_sync_batchnorm(shallow())


def data(count=24):
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.1, 4, count)[:, None, None, None]  # so that the statistics of the ranks differ
    images = torch.randn((count, 3, 6, 6), generator=generator) * scale
    return [(x, torch.tensor(i % 5)) for i, x in enumerate(images)]


def few():
    return data(19)  # the last batch has 3 samples: one on rank 0, two on rank 1


def fewer():
    return data(17)  # the last batch has 1 sample, on rank 1
"""


def _ran(
    folder: Path, ranks: int, name: str = "model", data: str = "data", precision: object = None, **parallel: object
) -> Path:
    source, out = folder / "source.py", folder / f"{ranks} {name} {data} {parallel}"
    source.write_text(_SOURCE)
    config = config_of(
        model=f"{source}:{name}",
        data=f"{source}:{data}",
        steps=7,
        micro_batch=8 // ranks,
        drop_last=data == "data",
        optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9},
        parallel=parallel,
        precision=precision or {},
    )
    train(config, out, nproc=ranks)
    return out


@pytest.mark.parametrize(
    ("name", "data", "parallel"),
    [
        ("model", "data", {"sync_batchnorm": True}),
        ("model", "few", {"sync_batchnorm": True, "zero": 3}),
        ("by_hand", "fewer", {}),
        pytest.param("by_hand", "fewer", {"zero": 2, "recompute": "full"}, marks=pytest.mark.proof),
    ],
)
def test_two_ranks_are_one_process(tmp_path: Path, name: str, data: str, parallel: dict[str, object]) -> None:
    """Fails if the losses, weights or running statistics of two ranks differ from those of one process, also if a rank
    has fewer samples or none. Fails if a model that was converted by hand is refused."""
    alone, both = (
        _ran(tmp_path, 1, "model" if name == "model" else "shallow", data),
        _ran(tmp_path, 2, name, data, **parallel),
    )
    # Recomputation updates the running statistics twice, as in torch.
    assert logged(both) == pytest.approx(logged(alone), abs=1e-5)
    found, expected = (load_file(str(out / "final" / "model-00001-of-00001.safetensors")) for out in (both, alone))
    assert found.keys() == expected.keys()
    if "recompute" not in parallel:
        for key, value in expected.items():
            assert torch.allclose(found[key], value, rtol=0, atol=1e-5), key
    assert not [row for row in rows_of(both) if "batch norm" in row.get("note", "")]


def test_small_local_batches_are_warned_of(tmp_path: Path) -> None:
    """Fails if a run with each rank's own statistics doesn't name the option. Also fails if its losses are those of one
    process, because then the other test proves nothing."""
    both = _ran(tmp_path, 2)
    notes = [row["note"] for row in rows_of(both) if "batch norm" in row.get("note", "")]
    assert notes == [
        "batch norm (1 and 2 more) uses each rank's own statistics, over 4 samples; pass --sync-batchnorm to use the "
        "statistics of all ranks"
    ]
    config = json.loads((both / "train.json").read_text())
    assert config["parallel"]["sync_batchnorm"] is False
    alone = _ran(tmp_path, 1)
    assert not [row for row in rows_of(alone) if "batch norm" in row.get("note", "")]
    assert max(abs(a - b) for a, b in zip(logged(both), logged(alone), strict=True)) > 1e-3


@pytest.mark.parametrize(
    ("mode", "kept"), [("O2", True), ("fp16", True), ("bf16", True), ("O3", False), ("bf16-only", False)]
)
def test_batch_norm_stays_float32(tmp_path: Path, mode: str, kept: bool) -> None:
    """Fails if a mode with master weights rounds the parameters or statistics of batch norm, which apex' O2 keeps, or
    if the rest of the model stays float32."""
    source = tmp_path / "source.py"
    source.write_text(_SOURCE)
    precision, optimizer = {"mode": mode, "loss_scale": 64.0}, {"name": "sgd", "lr": 0.05}
    tables: dict[str, Any] = {"model": f"{source}:model", "data": f"{source}:data", "steps": 3, "micro_batch": 8}
    trainer = trainer_of(tmp_path / "run", precision=precision, optimizer=optimizer, **tables)
    exact = trainer_of(tmp_path / "exact", optimizer=optimizer, **tables)
    batches, exact_batches = trainer.batches(), exact.batches()
    for _ in range(3):
        expected = exact.one_step(exact_batches)["loss"]
        assert trainer.one_step(batches)["loss"] == pytest.approx(expected, abs=0.02)
    small = torch.bfloat16 if "bf16" in mode else torch.float16
    for name, value in trainer.module.state_dict().items():
        normed = name.startswith(("1.", "3.1.", "6."))
        if "num_batches" not in name:
            assert value.dtype == (torch.float32 if normed and kept else small), name


@pytest.mark.parametrize(("mode", "zero"), [("bf16", 3), ("fp16", 1)])
def test_float32_batch_norm_is_sharded_beside_16_bits(tmp_path: Path, mode: str, zero: int) -> None:
    """Fails if FSDP2 refuses parameters of two dtypes, or if the losses differ from those of one process by more than
    the order of 16-bit sums explains."""
    precision = {"mode": mode, "loss_scale": 64.0}
    alone = _ran(tmp_path, 1, precision=precision)
    both = _ran(tmp_path, 2, precision=precision, sync_batchnorm=True, zero=zero)
    assert logged(both) == pytest.approx(logged(alone), abs=0.02)


def test_what_is_replaced() -> None:
    """Fails if a batch norm keeps its own statistics, if parameters are copied, or if a subclass loses what it adds."""

    class Activated(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm3d(3, affine=False)), nn.LayerNorm(3))
    names, parameters = list(model.state_dict()), list(model.parameters())
    assert batch_norm.replace(model, asked=False) is model
    assert not batch_norm.synced(model)
    batch_norm.replace(model.eval(), asked=True)
    assert [type(part).__name__ for part in model.modules()][1::2] == ["SyncedBatchNorm", "SyncedBatchNorm"]
    assert not model[0].training
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(batch_norm.replace(nn.BatchNorm2d(3), asked=True), batch_norm.SyncedBatchNorm)
    with pytest.raises(BadConfig, match=r"0 is a .*Activated, which accel can't synchronize; use torch.nn.BatchNorm2d"):
        batch_norm.replace(nn.Sequential(Activated(3)), asked=True)
    assert batch_norm.replace(nn.Sequential(Activated(3)), asked=False) is not None
