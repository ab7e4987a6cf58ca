"""The closed forms of tensor parallel, replicas of it and hpZ against a simulation on fake tensors."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from accel.examples.gpt import GPT, GPTConfig
from accel.plan.measure import SavedBytes, _plain, spec_of
from accel.plan.memory import activations, layer_activations, model_states, temporary
from accel.plan.spec import Layout, ModelSpec
from accel.plan.traffic import data_parallel_bytes, tensor_parallel_bytes
from accel.train.loss import cross_entropy
from accel.train.simulate import Simulated, simulate, simulate_pipeline

STYLES = tomllib.loads((Path(__file__).parents[2] / "examples" / "gpt.toml").read_text())["tensor_parallel"]


def _shape(layers: int) -> GPTConfig:
    return GPTConfig(vocab=1000, layers=layers, hidden=256, heads=8, seq=128)


def _spec(layers: int) -> ModelSpec:
    return replace(spec_of(GPT(_shape(layers))), seq=128)


def _simulated(layers: int, **kind: object) -> Simulated:
    ids = torch.zeros(2, 128, dtype=torch.long)
    return simulate(lambda: GPT(_shape(layers)), lambda: (ids, ids), styles=STYLES, **kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("again", ["none", "full"])
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("tp", [2, 8])
def test_a_layer_cut_by_tensor_parallel(tp: int, sequence: bool, again: str) -> None:
    """Fails if the planned activations leave by more than half a percent what autograd keeps of layers that are cut as
    `accel train` cuts them (the gathered inputs of column-parallel products are kept whole), or what ranks send for
    them isn't what is planned (but for gradients of positions and norms that see a part of the sequence)."""
    found = _simulated(3, world=tp, zero=0, precision="fp32", tp=tp, sequence=sequence, again=again)
    layout = Layout(world=tp, tp=tp, precision="fp32", micro_batch=2, sequence_parallel=sequence, recompute=again)
    planned = activations(_spec(3), layout)
    assert planned is not None
    if again == "full":
        planned -= layer_activations(_spec(3), replace(layout, recompute="none"))
    assert found.activations == pytest.approx(planned, rel=0.005)
    sent = tensor_parallel_bytes(_spec(3), layout)
    assert sent <= found.sent_tp <= sent * (1.035 if sequence else 1.002)


@pytest.mark.parametrize(
    ("tp", "ranks", "replicate", "zero", "accumulation"), [(2, 4, 1, 1, 2), (4, 4, 1, 2, 2), (2, 8, 2, 3, 2)]
)
def test_cut_models_are_sharded(tp: int, ranks: int, replicate: int, zero: int, accumulation: int) -> None:
    """Fails if what data-parallel ranks keep and send of a model that is cut leaves the closed form by more than the
    norms, biases and positions that tensor parallel doesn't cut (0.8 % of this model at tp 2) and padding; gradients
    that add up until the last micro-batch may have the embedding's whole among them, which is planned as temporary."""
    found = _simulated(6, world=tp * ranks, zero=zero, tp=tp, replicate=replicate, accumulation=accumulation)
    layout = Layout(world=tp * ranks, tp=tp, zero=zero, replicate=replicate, micro_batch=2, accumulation=accumulation)
    parameters, gradients, optimizer = model_states(_spec(6), layout)
    slack = 0.009 * (tp - 1) + 0.003
    assert optimizer <= found.optimizer <= optimizer * (1 + slack)
    whole = 2 * _spec(6).embedding * (1 - 1 / tp) if zero == 1 else 0
    assert gradients <= found.gradients - whole <= gradients * (1 + slack)
    assert whole <= temporary(_spec(6), layout)
    if zero < 3:
        assert parameters <= found.parameters <= parameters * (1 + slack)
    sent = data_parallel_bytes(_spec(6), layout)
    assert sent <= found.sent <= sent * (1 + slack)


@pytest.mark.parametrize(("ranks", "replicate", "hpz", "accumulation"), [(8, 1, 2, 1), (16, 2, 4, 2)])
def test_second_shards(ranks: int, replicate: int, hpz: int, accumulation: int) -> None:
    """Fails if the shards that hpZ keeps between forward and backward, or what is gathered from them and from all,
    leave the closed form by more than padding: what lies outside the blocks is held whole, and gathered once."""
    found = _simulated(6, world=ranks, zero=3, hpz=hpz, replicate=replicate, accumulation=accumulation)
    layout = Layout(world=ranks, zero=3, hpz=hpz, replicate=replicate, micro_batch=2, accumulation=accumulation)
    spec = _spec(6)
    second = 2 * (spec.params - spec.outside) / hpz + 2 * spec.outside
    assert second <= found.parameters <= second * 1.002
    # Beside them the first shards: 2 of the 2 + 12 bytes that the optimizer's are of. The plan has all in second ones.
    planned = model_states(spec, layout)[0] + 2 * spec.outside * (1 - 1 / hpz)
    assert planned <= (found.parameters + found.optimizer / 6) * 1.0001 <= planned * 1.002
    sent = data_parallel_bytes(spec, layout)
    assert sent <= found.sent * 1.0001 <= sent * 1.002


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("qwz", "qgz", "hpz"), [(True, False, 0), (False, True, 0), (True, True, 0), (True, True, 2)])
def test_what_is_sent_in_int8(qwz: bool, qgz: bool, hpz: int, accumulation: int) -> None:
    """Fails if what qwZ gathers and qgZ exchanges (counted collective by collective, codes and scales of every
    parameter) leaves the closed form by more than padding and the scales of short last blocks, or goes in other
    precision than asked for."""
    kind = {"world": 16, "zero": 3, "replicate": 2, "qwz": qwz, "qgz": qgz, "hpz": hpz, "accumulation": accumulation}
    found = _simulated(6, **kind)
    layout = Layout(micro_batch=2, **kind)  # type: ignore[arg-type]
    sent = data_parallel_bytes(_spec(6), layout)
    assert sent <= found.sent * 1.0001 <= sent * 1.005
    assert sent < 0.9 * data_parallel_bytes(_spec(6), replace(layout, qwz=False, qgz=False))
    assert (found.collectives["alltoall_base_"] > 0) == qgz


@pytest.mark.parametrize(
    ("pipeline", "pp", "batches", "again"),
    [
        ("gpipe", 4, 4, "none"),
        ("1f1b", 4, 10, "none"),
        ("1f1b", 2, 8, "full"),
        ("interleaved", 4, 4, "none"),
        ("interleaved", 2, 8, "none"),
        ("zero-bubble", 2, 2, "none"),
        ("zero-bubble", 4, 10, "none"),
    ],
)
def test_a_pipeline_holds_what_is_in_flight(pipeline: str, pp: int, batches: int, again: str) -> None:
    """Fails if the planned activations of the fullest rank of a pipeline leave by more than half a percent what
    autograd has saved of the micro-batches that torch's own schedule keeps in flight: the first stage's, or, where the
    logits weigh more, the last one's."""
    ids = torch.zeros(2, 128, dtype=torch.long)
    kind = {"pp": pp, "pipeline": pipeline, "accumulation": batches}
    found = simulate_pipeline(lambda: GPT(_shape(8)), lambda: (ids, ids), again=again, **kind)  # type: ignore[arg-type]
    layout = Layout(world=pp, precision="fp32", micro_batch=2, recompute=again, **kind)  # type: ignore[arg-type]
    planned = activations(_spec(8), layout)
    assert planned is not None
    if again == "full":
        planned -= layer_activations(_spec(8), replace(layout, recompute="none"))
    assert max(found) == pytest.approx(planned, rel=0.005)
    assert max(found) in (found[0], found[-1])


@pytest.mark.parametrize("sequence", [True, False])
def test_what_selective_recomputation_keeps_of_a_cut_layer(monkeypatch: pytest.MonkeyPatch, sequence: bool) -> None:
    """Fails if the planned activations of layers that are cut and recomputed selectively leave the results of products
    and attention that are kept, with what autograd keeps, by more than half a percent."""
    made: list[Any] = []
    kept: dict[int, int] = {}
    backward = torch.autograd.backward

    def recorded(policy: Any) -> Any:
        contexts = create_selective_checkpoint_contexts(policy)
        made.append(contexts[0])
        return contexts

    def counted(*arguments: Any) -> None:
        for results in (results for context in made for results in context.storage.values()):
            for tensor in tree_leaves([getattr(leaf, "val", leaf) for leaf in tree_leaves(results)]):
                if isinstance(tensor, torch.Tensor):
                    storage = _plain(tensor).untyped_storage()
                    kept[storage._cdata] = storage.nbytes()
        backward(*arguments)

    monkeypatch.setattr("accel.train.recompute.create_selective_checkpoint_contexts", recorded)
    monkeypatch.setattr(torch.autograd, "backward", counted)
    found = _simulated(3, world=4, zero=0, precision="fp32", tp=4, sequence=sequence, again="selective")
    assert len(made) == 3
    layout = Layout(world=4, tp=4, precision="fp32", micro_batch=2, sequence_parallel=sequence, recompute="selective")
    assert found.activations + sum(kept.values()) == pytest.approx(activations(_spec(3), layout), rel=0.005)
    sent = tensor_parallel_bytes(_spec(3), layout)
    assert sent <= found.sent_tp <= sent * (1.035 if sequence else 1.002)


def test_what_autocast_keeps() -> None:
    """Fails if the planned activations under autocast leave by more than half a percent what autograd keeps, but for
    the 16-bit copies of weights, which are planned as temporary: a float32 residual stream, and a copy of their input
    for each of query, key and value."""
    model = GPT(_shape(3))
    copied = sum(2 * part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
    ids = torch.zeros(2, 128, dtype=torch.long)
    with SavedBytes(model.parameters()) as saved:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        loss, _ = cross_entropy(logits, ids)
    planned = activations(_spec(3), Layout(world=1, precision="autocast-bf16", micro_batch=2))
    assert saved.bytes - copied == pytest.approx(planned, rel=0.005)
    assert copied <= temporary(_spec(3), Layout(world=1, precision="autocast-bf16", micro_batch=2))
    del loss
