"""Runs one rank of the distributed checks. ``python -m tests.accel.train.parallel.suite ORDER`` runs the checks listed
in the file ORDER, and writes the results to ``rank-RANK.json`` in ORDER's folder."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from accel.errors import AccelError
from accel.sources.python_object import load_object
from accel.train.checkpoints.final import gather
from accel.train.config.rules import check
from accel.train.config.schema import ParallelConfig, TrainConfig
from accel.train.config.toml import override
from accel.train.loop import Trainer
from accel.train.parallel.layout import join
from accel.train.ranks import Ranks
from tests.accel.train.parallel import rank_bytes, rank_faults, rows
from tests.accel.train.parallel.rows import HALF, OWN_MODEL, POWER_SGD, SAVED, STEPS, TAKEN_UP
from tests.support import ROOT
from tests.support.runs import SMALL

HERE = SMALL
PLAN = tomllib.loads((ROOT / "examples" / "gpt.toml").read_text())["tensor_parallel"]

# The tensor-parallel plan of ``small_gpt.py:decoder``.
OWN_PLAN = {
    "embed": "vocabulary",
    "layers.*.norm_*": "sequence",
    "layers.*.[qkv]": "column",
    "layers.*.o": "row",
    "layers.*.gate": "column",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "norm": "sequence",
    "lm_head": "vocabulary",
}


# The tensor-parallel plan of ``small_gpt.py:normed``.
NORMED_PLAN = PLAN | {"blocks.*.attention.norm_?": "heads"}
# The tensor-parallel plan of ``small_gpt.py:paired_llama``. A model of transformers takes the length from its input.
LLAMA_PLAN = {
    "model.embed_tokens": "vocabulary",
    "model.layers.*.self_attn.[qkv]_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "lm_head": "vocabulary",
}
# The tensor-parallel plan of ``small_gpt.py:moe``, whose blocks have experts in place of an MLP.
MOE_PLAN = {name: style for name, style in PLAN.items() if name not in ("blocks.*.up", "blocks.*.down")}
_TOKENS = "parallel.cp_split=model.embed_tokens"


def config(overrides: list[str]) -> TrainConfig:
    """Returns a config that uses SGD with momentum, because Adam would hide an error in a gradient's scale. A
    micro-batch holds two samples. If tensor-parallel or context-parallel ranks share samples, one micro-batch holds all
    samples of a step to save time. An override of ``micro_batch`` has priority."""
    body: dict[str, Any] = {
        "model": f"{HERE}:model",
        "data": f"{HERE}:data",
        "steps": STEPS,
        "global_batch": 8,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "tensor_parallel": PLAN,
    }
    for text in overrides:
        override(body, text)
    plans = {"decoder": OWN_PLAN, "normed": NORMED_PLAN, "paired_llama": LLAMA_PLAN, "moe": MOE_PLAN}
    if plan := plans.get(body["model"].rpartition(":")[2]):
        body["tensor_parallel"] = plan
    if "micro_batch" not in body:
        axes = body.get("parallel", {})
        sharing = axes.get("tp", 1) * axes.get("cp", 1)
        together = sharing > 1 and axes.get("pp", 1) == 1
        body["micro_batch"] = 8 * sharing // int(os.environ.get("WORLD_SIZE", "1")) if together else 2
    return TrainConfig.from_dict(body)


@cache
def _join(layout: ParallelConfig) -> Ranks:
    """Returns the process groups of a layout. The groups of each layout are made only once, because making them takes
    most of a check's time."""
    # DTensor remembers the layouts of operators by the ranks of a mesh. If an earlier layout has a mesh of these ranks,
    # some ranks of this layout would find entries, and the other ranks would wait for them.
    _clear_sharding_prop_cache()
    return join(TrainConfig(parallel=layout, global_batch=8 * 1024, micro_batch=1))


def start(overrides: list[str], out: Path) -> Trainer:
    made = config(overrides)
    p = made.parallel
    check(made, int(os.environ.get("WORLD_SIZE", "1")))
    layout = ParallelConfig(zero=min(p.zero, 1), replicate=p.replicate, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep)
    return Trainer(made, out, _join(layout))


def losses(trainer: Trainer, until: int = STEPS) -> list[float]:
    batches = trainer.batches()
    return [trainer.one_step(batches)["loss"] for _ in range(until - trainer.step)]


def main(order: dict[str, Any]) -> None:
    """Trains the configs listed in ``order["parity"]``. For each other group of checks in ``order``, calls the group's
    function in PARTS with the names of the checks."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    faulthandler.enable()
    folder = Path(order["folder"])
    others = [Path(other) for other in order["others"]]
    found: dict[str, Any] = {"parity": {}, "on": {}, "seconds": {}}
    table = rows.of(world)

    def begin(name: str) -> None:
        print(f"rank {rank}: {name}", flush=True)  # if a launch fails, its output names the config that failed
        found["seconds"][name] = -time.process_time()

    def end(name: str) -> None:
        found["seconds"][name] = round(found["seconds"][name] + time.process_time(), 2)

    for name in order.get("parity", ()):
        begin(name)
        trainer = start(table[name], folder / "none")
        found["parity"][name] = losses(trainer)
        found["on"][name] = rank_bytes.switched_on(trainer)
        end(name)
    for part, run in PARTS.items():
        if part in order:
            begin(part)
            found[part] = run(order[part], world, folder, others)
            end(part)
    if world > 1:
        torch.distributed.barrier()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def _adamw(names: Sequence[str], world: int, folder: Path, others: list[Path]) -> dict[str, Any]:
    """Returns the losses of the second half of a run. Two ranks save the optimizer state after the first half, and four
    ranks load this state. The four ranks also return True if the loaded state equals the saved state bit for bit."""
    folder = (folder if world == 2 else others[0]) / "adamw"
    file = folder / "state.pt"
    trainer = start([f"parallel.zero={1 if world == 2 else 3}", *rows.ADAMW], folder)
    if world == 2:
        losses(trainer, HALF)
        trainer.finish()
        state = gather(trainer.optimizer.state_dict(), trainer.ranks)
        if state is not None:
            torch.save(state, file)
        again = start(["parallel.zero=1", *rows.ADAMW], folder / "none")
        return {"losses": losses(again)[HALF:]}
    trainer.resume()
    state = gather(trainer.optimizer.state_dict(), trainer.ranks)
    saved = torch.load(file, weights_only=True)
    kinds = sorted({name.rpartition(".")[2] for name in saved})
    equal = state is None or (
        set(state) == set(saved) and all(torch.equal(state[name], value) for name, value in saved.items())
    )
    return {"losses": losses(trainer), "equal": equal, "kinds": kinds}


def _gradients(names: Sequence[str], world: int, folder: Path, others: list[Path]) -> dict[str, float]:
    """For each layout of ``rows.GRADIENTS`` in ``names``, trains one plain SGD step and writes the new weights to
    ``folder``. Returns the gradient norms by layout."""
    norms = {}
    for name in names:
        trainer = start([*rows.GRADIENTS[world][name], "optimizer.lr=1", "optimizer.momentum=0"], folder / "none")
        norms[name] = trainer.one_step(trainer.batches())["grad_norm"]
        weights = gather(trainer.module.state_dict(), trainer.ranks)
        if weights is not None:
            torch.save(weights, folder / f"gradient-{name}.pt")
    return norms


def _tensor_parallel(names: Sequence[str], world: int, folder: Path, others: list[Path]) -> dict[str, int]:
    """Returns the bytes that tensor-parallel layers keep for the backward pass of a micro-batch. The layers run with
    and without sequence parallel and recomputation."""
    from torch.distributed.tensor.parallel import loss_parallel

    from accel.plan.measure import SavedBytes
    from accel.train.loss import cross_entropy
    from accel.train.parallel.tensor import distribute, match
    from accel.train.recompute import recompute

    x, y = next(start([f"parallel.tp={world}", "micro_batch=2"], Path("none")).batches())
    mesh, kept = _join(ParallelConfig(tp=world)).tp, {}
    assert mesh is not None
    for again in ("none", "full"):
        for sequence in (True, False):
            module = load_object(f"{HERE}:model", "factory")[1]()
            recompute(module, again)
            distribute(module, mesh, match(module, PLAN), sequence=sequence)
            with SavedBytes(module.parameters()) as saved, loss_parallel():
                loss, _ = cross_entropy(module(x), y)
            kept[f"{again} {sequence}"] = saved.bytes
            del loss
    return kept


def _saved(names: Sequence[str], world: int, folder: Path, others: list[Path]) -> dict[str, Any]:
    """Trains the first half of a run with each layout of ``rows.SAVED`` and saves a checkpoint. For each layout,
    returns True if the weights in ``final/`` equal the weights of this rank."""
    found = {}
    for name, overrides in SAVED[world].items():
        asynchronous = "true" if name == "zero1" else "false"
        trainer = start([*overrides, f"checkpoint.asynchronous={asynchronous}"], folder / name)
        losses(trainer, HALF)
        trainer.finish()
        written = load_file(folder / name / "final" / "model-00001-of-00001.safetensors")
        own = {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in trainer.module.state_dict().items()}
        found[name] = {
            "equal": all(torch.equal(value, written[n]) for n, value in own.items()),
            "names": sorted(own),
            "written": sorted(written),
        }
    return found


def _resumed(names: Sequence[str], world: int, folder: Path, others: list[Path]) -> dict[str, list[float]]:
    """Resumes each run after half of its steps, and trains the second half. Returns a dict that maps a name such as
    "world4 hsdp -> 2 ddp" to the losses."""
    found = {}
    for name in names:
        source, _, target = name.partition(" -> ")
        home, saved = source.split()
        trainer = start(TAKEN_UP[world][target.split()[1]], folder.parent / home / saved)
        trainer.resume()
        assert trainer.step == HALF
        found[name] = losses(trainer)
    return found


def _power_sgd(names: Sequence[str], world: int, folder: Path, others: list[Path]) -> dict[str, list[float]]:
    """Returns the losses of three runs. The first run trains all steps, and the second run saves a checkpoint after
    half of the steps. The third run resumes from the second run's checkpoint without PowerSGD's error feedback and
    starting matrices."""
    trainer = start(POWER_SGD, folder / "power_sgd")
    found = {"whole": losses(start(POWER_SGD, folder / "none")), "first": losses(trainer, HALF)}
    trainer.finish()
    forgetful = start(POWER_SGD, folder / "power_sgd")
    forgetful.resume()
    assert forgetful.built.memory is not None
    forgetful.built.memory.load_state_dict({})
    return {**found, "forgotten": losses(forgetful)}


def _power_sgd_resumed(names: Sequence[str], world: int, folder: Path, others: list[Path]) -> list[float]:
    """Resumes a run from the PowerSGD state that two ranks saved. Returns the losses of the second half."""
    trainer = start(POWER_SGD, (folder if world == 2 else others[0]) / "power_sgd")
    trainer.resume()
    return losses(trainer)


def _refused(names: Sequence[str], world: int, folder: Path, others: list[Path]) -> dict[str, str]:
    """Returns the error message of each faulty case. The cases are wrong plans, wrong models, and data that ranks can't
    split. One case is right, and has no message."""
    said = {}
    for name, plan, overrides in (
        ("left out", {k: v for k, v in PLAN.items() if k != "norm"}, []),
        ("odd length", PLAN, [f"data={HERE}:odd_data"]),
        *((name, PLAN, [f"model={HERE}:{name}"]) for name in ("one_head", "all_heads", "whole_heads", "one_product")),
        ("turned after the cut", {}, [OWN_MODEL, "parallel.tp=1", "parallel.cp=2"]),
        ("turned in bf16", {}, [OWN_MODEL, "parallel.tp=1", "parallel.cp=2", "precision.mode=bf16"]),
        ("right in bf16", {}, [f"model={HERE}:deep", "parallel.tp=1", *rows.RING, "precision.mode=bf16"]),
        ("cut too late", PLAN, ["parallel.tp=1", "parallel.cp=2", "parallel.cp_split=blocks.0"]),
        ("cut too early", PLAN, ["parallel.tp=1", "parallel.cp=2", "parallel.cp_split=embed.tokens"]),
        ("shifted loss", PLAN, ["parallel.tp=1", "parallel.cp=2", f"loss={HERE}:shifted_loss"]),
        ("mean loss", PLAN, ["parallel.tp=1", "parallel.cp=2", f"loss={HERE}:mean_loss"]),
        ("own loss", {}, [rows.LLAMA, f"data={HERE}:labelled", "parallel.tp=1", "parallel.cp=2", _TOKENS]),
        ("numbers of parts", {}, [rows.LLAMA, "parallel.tp=1", *rows.RING, _TOKENS]),
        ("styled experts", MOE_PLAN | {"blocks.*.mlp": "sequence"}, [f"model={HERE}:moe"]),
        ("wrong chain", PLAN, [f"model={HERE}:wrong_chain", "parallel.tp=1", "parallel.pp=2"]),
    ):
        made = dataclasses.replace(config(["parallel.tp=2", *overrides]), tensor_parallel=plan)
        try:
            p = made.parallel
            trainer = Trainer(made, folder / "none", _join(ParallelConfig(tp=p.tp, pp=p.pp, cp=p.cp)))
            trainer.one_step(trainer.batches())
        except AccelError as error:
            said[name] = str(error)
    return said


_Part = Callable[[Sequence[str], int, Path, list[Path]], Any]
# Maps the name of each group of checks to the function that runs the checks. The groups run in the order of this dict.
PARTS: dict[str, _Part] = {
    "pipeline": lambda names, world, folder, _: rank_bytes.sent_by_stages(start, names, world, folder),
    "spiky": lambda names, _, folder, __: rank_faults.overflow(start, names, folder),
    "not a number": lambda names, _, folder, __: rank_faults.not_a_number(start, names, folder),
    "damaged": lambda _, __, folder, ___: rank_faults.damaged(start, folder / "damaged"),
    "gradients": _gradients,
    "final": _saved,
    "tensor parallel": _tensor_parallel,
    "adamw": _adamw,
    "bytes": lambda names, _, folder, __: rank_bytes.held_and_sent(start, names, folder),
    "refused": _refused,
    "context parallel": lambda names, world, folder, _: rank_bytes.of_shared_sequences(start, names, world, folder),
    "experts": lambda names, _, folder, __: rank_bytes.of_experts(start, names, folder),
    "power_sgd": _power_sgd,
    "power_sgd resumed": _power_sgd_resumed,
    "resumed": _resumed,
}

if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    sys.stderr.flush()
    # Like a rank of accel, this process ends without cleanup, because gloo's threads outlive the process groups. During
    # a cleanup, a signal could kill this process, because another rank may close its sockets.
    os._exit(0)
