"""Proves that models with experts train on one rank and on several, and that the losses of the routers are the
formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from accel.api.plan import layout_of_config, plan, spec_of_config
from accel.errors import BadConfig
from accel.plan.traffic import expert_parallel_bytes, flops
from accel.train.build import make_model
from accel.train.config.rules import problems
from accel.train.experts.block import Experts, MixtureOfExperts, mixtures
from accel.train.experts.dispatch import distribute
from accel.train.loop import Trainer
from accel.train.parallel.zero import shard
from accel.train.run.launch import train
from accel.train.shards import local
from accel.train.simulate import fake_world
from tests.accel.train.parallel.suite import MOE_PLAN
from tests.support.runs import SMALL, config_of, logged, trainer_of

MOE = f"{SMALL}:moe"
BATCH = {"global_batch": 8, "micro_batch": 8}


def _tokens(count: int = 40) -> tuple[MixtureOfExperts, torch.Tensor]:
    torch.manual_seed(0)
    block = MixtureOfExperts(8, 6, experts=4, top_k=2)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return block, torch.randn(2, count // 2, 8)


def test_a_block_is_the_sum_of_its_experts() -> None:
    """Computes the block token by token: the two experts with the largest probabilities, weighted by their share. Also
    checks the form that an exported graph has."""
    block, x = _tokens()
    found = block(x)
    for token, output in zip(x.flatten(0, 1), found.flatten(0, 1), strict=True):
        p = (block.gate.weight @ token).softmax(0)
        best = p.argsort(descending=True)[:2].tolist()
        wanted = torch.zeros(8)
        for expert in best:
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            y = block.experts.down_proj[expert] @ (gate * gate.sigmoid() * up)
            wanted = wanted + p[expert] / p[best].sum() * y
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)
    flat = x.flatten(0, 1)
    _, weights, indices = block.gate(flat)
    torch.testing.assert_close(block.experts._dense(flat, indices, weights), found.flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_a_full_expert_drops_the_last_tokens() -> None:
    """Fails if an expert takes more tokens than its capacity, drops other tokens than the last, or drops any if its
    capacity is large. The router prefers expert 0 for all tokens."""
    block, x = _tokens()
    x, flat = x.abs(), x.abs().flatten(0, 1)
    with torch.no_grad():
        block.gate.weight[0] = 5.0
    whole = block(x).flatten(0, 1)
    _, weights, indices = block.gate(flat)
    assert bool((indices[:, 0] == 0).all())
    without = block.experts(flat, indices[:, 1:], weights[:, 1:])
    distribute(block, None, 100.0)
    torch.testing.assert_close(block(x).flatten(0, 1), whole, rtol=1e-5, atol=1e-6)
    block.experts.forward.capacity = 1.2  # type: ignore[attr-defined]
    most = 24  # 1.2 * 40 tokens * 2 copies / 4 experts
    counts = indices.flatten().bincount(minlength=4)
    found = block(x).flatten(0, 1)
    assert block.experts.forward.dropped == int((counts - most).clamp(min=0).sum())  # type: ignore[attr-defined]
    assert int(counts[1:].max()) <= most
    torch.testing.assert_close(found[:most], whole[:most], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[most:], without[most:], rtol=1e-5, atol=1e-6)


def test_the_losses_of_the_routers_are_the_formulas(tmp_path: Path) -> None:
    """Computes both losses, the load and the total by hand. Fails if a factor is wrong, if a loss isn't in the total,
    or if its gradient doesn't reach the router."""
    trainer = trainer_of(tmp_path, model=MOE, experts={"balance": 0.3, "z": 0.02}, **BATCH)
    x, y = next(trainer.batches())
    model = make_model(MOE, 0)
    routed = []
    for part in mixtures(model).values():
        part.gate.register_forward_hook(lambda _, __, output: routed.append(output))  # type: ignore[union-attr]
    with torch.no_grad():
        task = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    balance = z = load = 0.0
    for logits, _, indices in routed:
        share = indices.flatten().bincount(minlength=4) / indices.numel()
        balance += 4 * float((share * logits.softmax(-1).mean(0)).sum()) / 2
        z += float(logits.exp().sum(-1).log().square().mean()) / 2
        load = max(load, 4 * float(share.max()))
    found = trainer.one_step(iter([(x, y)]))
    assert found["balance_loss"] == pytest.approx(balance, rel=1e-5)
    assert found["z_loss"] == pytest.approx(z, rel=1e-5)
    assert found["expert_load"] == pytest.approx(load, rel=1e-5)
    assert found["dropped"] == 0
    assert found["loss"] == pytest.approx(float(task) + 0.3 * balance + 0.02 * z, rel=1e-5)


def test_the_loss_of_balance_balances(tmp_path: Path) -> None:
    """Fails if training with a loss of balance doesn't even out the experts' load, or if capacity drops no token of an
    uneven router."""
    found = []
    for balance in (3.0, 0.0):
        table = {"balance": balance, "capacity": 1.0}
        trainer = trainer_of(tmp_path, model=MOE, experts=table, steps=20, optimizer={"lr": 1e-2}, **BATCH)
        batches = trainer.batches()
        found.append([trainer.one_step(batches) for _ in range(20)])
    assert found[0][0]["dropped"] == found[1][0]["dropped"] > 0
    even, uneven = (sum(step["balance_loss"] for step in steps[-5:]) for steps in found)
    assert even < 0.97 * uneven


def test_the_plan_counts_experts_once() -> None:
    """Fails if the planned parameters of a rank differ from the shards that a rank of four holds with ep 2, if the
    planned bytes of the two all-to-alls are wrong, or if the FLOPs count experts that a token doesn't use."""
    table = {"zero": 3, "ep": 2}
    config = config_of(model=MOE, data=f"{SMALL}:data", global_batch=32, micro_batch=4, parallel=table)
    layout = layout_of_config(config, 4)
    found = plan(spec_of_config(config), layout)
    spec = found.spec
    assert (spec.mixtures, spec.experts, spec.top_k, spec.expert_params) == (2, 4, 2, 2 * 4 * 3 * 16 * 32)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("beside", "ep"))
        model = make_model(MOE, 0)
        experts = distribute(model, mesh["ep"], 0.0)
        shard(model, mesh["beside", "ep"]._flatten("dp"), 3, experts=experts, beside=mesh["beside"])
        sizes = {name: local(p).numel() for name, p in model.named_parameters()}
    assert sum(size for name, size in sizes.items() if ".experts." in name) == spec.expert_params / 4
    # A rank of FSDP has up to one row more than its share.
    assert found.memory.parameters == pytest.approx(4 * sum(sizes.values()), rel=0.03)
    sent = (
        2 * 2 * 2 * (2 * 4 * 16 * 32 * 4) / 2
    )  # 2 micro-batches, 2 blocks, 2 passes, 2 all-to-alls of half the copies
    assert found.sent["ep"] == 2 * sent
    unused = spec.expert_params // 2
    assert flops(replace(spec, experts=0), layout) - flops(spec, layout) == 6 * unused * 32 * 16
    assert expert_parallel_bytes(spec, replace(layout, ep=1)) == 0


@pytest.mark.slow
def test_a_checkpoint_goes_to_another_ep_and_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trains 2 steps on four ranks with half of the experts and half of the attention each, then 2 steps on one rank
    with all. Fails if the losses differ from those of one undisturbed rank, which they would if experts or moments were
    mixed up. Then exports the run, and compares the ONNX model with the module."""
    from accel.cli import group, run

    words = {"model": MOE, "global_batch": 8, "experts": {"balance": 0.1}, "optimizer": {"lr": 3e-3}}
    out = tmp_path / "moved"
    split = {"parallel": {"tp": 2, "ep": 2, "zero": 3}, "tensor_parallel": MOE_PLAN}
    train(config_of(steps=2, **words, **split, micro_batch=4), out, nproc=4)
    alone, moved = (trainer_of(folder, **words, micro_batch=8) for folder in (tmp_path / "alone", out))
    moved.resume()
    wanted = _losses(alone, 4)
    assert logged(out) + _losses(moved, 2) == pytest.approx(wanted, abs=2e-5)
    weights = load_file(str(out / "final" / "model-00001-of-00001.safetensors"))
    assert weights["blocks.0.mlp.experts.gate_up_proj"].shape == (4, 32, 32)
    capsys.readouterr()
    assert run(group, ["export", str(out), "-o", str(tmp_path / "m.onnx"), "--no-cache", "-q", "--json"]) == 0
    import onnxruntime

    ids = torch.arange(32).reshape(2, 16)
    model = make_model(MOE, 0).eval()
    model.load_state_dict(weights)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(ids), rtol=1e-3, atol=1e-4)


_MIXTRAL = """
import torch
from transformers import MixtralConfig, MixtralForCausalLM

FOLDER = {folder!r}

def model():
    return MixtralForCausalLM.from_pretrained(FOLDER)

def data():
    torch.manual_seed(5)
    rows = torch.randint(0, 61, (32, 12))
    return [dict(input_ids=row, labels=row) for row in rows]
"""


@pytest.mark.slow
def test_a_mixtral_trains_from_its_own_weights(tmp_path: Path) -> None:
    """Fails if a Mixtral of transformers gets other losses with half of its experts on each of two ranks, or if its
    weights aren't the pretrained ones."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=61, num_key_value_heads=1, num_local_experts=4, **shape)
    made = MixtralForCausalLM(config)
    made.save_pretrained(tmp_path / "mixtral")
    code = tmp_path / "pretrained.py"
    code.write_text(_MIXTRAL.format(folder=str(tmp_path / "mixtral")))
    words = {"model": f"{code}:model", "data": f"{code}:data", "global_batch": 8, "experts": {"balance": 0.1}}
    alone = _losses(trainer_of(tmp_path / "alone", **words, micro_batch=8), 3)
    train(config_of(steps=3, **words, micro_batch=4, parallel={"ep": 2, "zero": 3}), tmp_path / "both", nproc=2)
    assert logged(tmp_path / "both") == pytest.approx(alone, abs=2e-5)
    rows = torch.stack([row["input_ids"] for row in _data(code)])
    with torch.no_grad():
        own = float(made(input_ids=rows, labels=rows).loss)
    assert alone[0] == pytest.approx(own, abs=0.3)
    names = set(load_file(str(tmp_path / "both" / "final" / "model-00001-of-00001.safetensors")))
    assert names == set(made.state_dict())


def _losses(trainer: Trainer, steps: int) -> list[float]:
    batches = trainer.batches()
    return [trainer.one_step(batches)["loss"] for _ in range(steps)]


def _data(code: Path) -> list[dict[str, torch.Tensor]]:
    scope: dict[str, object] = {}
    exec(compile(code.read_text(), str(code), "exec"), scope)
    return scope["data"]()  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize(
    ("tables", "world", "said"),
    [
        ({"parallel": {"ep": 3, "zero": 1}}, 2, "groups of ep 3"),
        ({"parallel": {"ep": 2}}, 2, "use ZeRO 1, 2 or 3"),
        ({"parallel": {"ep": 2, "zero": 1, "pp": 2}}, 4, "use pp 1 and cp 1 with ep"),
        ({"parallel": {"ep": 2, "zero": 1}, "drop_last": False}, 2, "use drop_last = true"),
        ({"parallel": {"cp": 2}, "experts": {"z": 1.0}}, 2, "cp 1 with [experts]"),
        ({"experts": {"capacity": -1.0}}, 1, "experts.capacity is -1.0"),
    ],
)
def test_configs_that_are_refused(tables: dict[str, object], world: int, said: str) -> None:
    """Fails if a config that can't run is accepted."""
    assert any(said in problem for problem in problems(config_of(**tables), world)), said


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    """Fails if the table [experts] is ignored for a model without experts."""
    for table in ({"balance": 1.0}, {"capacity": 1.0}):
        with pytest.raises(BadConfig, match="no mixture of experts"):
            trainer_of(tmp_path, experts=table)
    assert isinstance(next(iter(mixtures(make_model(MOE, 0)).values())).experts, Experts)
    assert json.dumps(list(mixtures(make_model(f"{SMALL}:model", 0)))) == "[]"
