"""Everything that one world size is checked with, in one launch: ``torchrun suite.py FOLDER [OTHER] [then LATER]``
takes up the checkpoints of OTHER, and at last those that another launch leaves in LATER: it waits for them."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import time
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import rank_bytes
import rank_faults
import torch
from safetensors.torch import load_file

from accel.errors import AccelError
from accel.sources.python_object import load_object
from accel.train.config import ParallelConfig, TrainConfig
from accel.train.final import gather
from accel.train.layout import Ranks, join
from accel.train.loop import Trainer

HERE = Path(__file__).parent / "small.py"
STEPS, HALF = 10, 5
PLAN = tomllib.loads((Path(__file__).parents[2] / "examples" / "gpt.toml").read_text())["tensor_parallel"]

# For ``small.py:decoder``.
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

UNEVEN = [f"data={HERE}:few", "drop_last=false"]
PACKED = [f"data={HERE}:documents", "pack=16"]
POWER_SGD = ["parallel.compression=powersgd", "parallel.compression_rank=2", "parallel.compression_start=2"]

# name -> overrides. All of them see the same global batches as one process does.
ROWS: dict[str, list[str]] = {
    "ZeRO 0 (DDP)": ["parallel.zero=0"],
    "ZeRO 1": ["parallel.zero=1"],
    "ZeRO 2": ["parallel.zero=2"],
    "ZeRO 3": ["parallel.zero=3"],
    "ZeRO 0, accumulation": ["parallel.zero=0", "micro_batch=1"],
    "ZeRO 1, accumulation": ["parallel.zero=1", "micro_batch=1"],
    "ZeRO 2, accumulation": ["parallel.zero=2", "micro_batch=1"],
    "ZeRO 3, accumulation": ["parallel.zero=3", "micro_batch=1"],
    "ZeRO 0, clipping": ["parallel.zero=0", "optimizer.clip=0.1"],
    "ZeRO 3, clipping": ["parallel.zero=3", "optimizer.clip=0.1"],
    "ZeRO 3, full recomputation": ["parallel.zero=3", "parallel.recompute=full"],
    "ZeRO 1, selective recomputation": ["parallel.zero=1", "parallel.recompute=selective"],
    "ZeRO 3, CPU offload": ["parallel.zero=3", "parallel.offload=true"],
    "ZeRO 0, uneven last batch": UNEVEN,
    "ZeRO 3, uneven last batch": ["parallel.zero=3", *UNEVEN],
    "ZeRO 3, packed documents, full recomputation": ["parallel.zero=3", "parallel.recompute=full", *PACKED],
    "ZeRO 3, autocast-bf16": ["parallel.zero=3", "precision.mode=autocast-bf16"],
    "ZeRO 0, autocast-fp16": ["parallel.zero=0", "precision.mode=autocast-fp16", "precision.loss_scale=1024"],
    "ZeRO 2, bf16 with master weights": ["parallel.zero=2", "precision.mode=bf16"],
    "ZeRO 3, fp16 with master weights (O2)": ["parallel.zero=3", "precision.mode=O2", "precision.loss_scale=1024"],
    "ZeRO 3, fp16-only (O3)": ["parallel.zero=3", "precision.mode=O3", "precision.loss_scale=1024"],
}  # fmt: skip
OWN_MODEL = f"model={HERE}:decoder"
SCALED = ["precision.loss_scale=1024"]
SIXTEEN = {
    "autocast-bf16": ["precision.mode=autocast-bf16"],
    "autocast-fp16 (O1)": ["precision.mode=O1", *SCALED],
    "bf16 with master weights": ["precision.mode=bf16"],
    "fp16 with master weights (O2)": ["precision.mode=O2", *SCALED],
    "bf16-only": ["precision.mode=bf16-only"],
    "fp16-only (O3)": ["precision.mode=O3", *SCALED],
}
# Axes, and the modes that they are run in: all of them where a step takes little.
AXES = (
    ("TP 2", "parallel.tp=2", ("bf16 with master weights", "fp16-only (O3)")),
    ("PP 2", "parallel.pp=2", tuple(SIXTEEN)),
    ("CP 2 (Ulysses)", "parallel.cp=2", ("autocast-bf16", "fp16 with master weights (O2)", "bf16-only")),
)
# Rows of one world size.
ONLY: dict[int, dict[str, list[str]]] = {
    2: {
        "TP 2, sequence parallel": ["parallel.tp=2"],
        "TP 2, no sequence parallel": ["parallel.tp=2", "parallel.sequence_parallel=false"],
        "TP 2, accumulation, clipping": ["parallel.tp=2", "micro_batch=2", "optimizer.clip=0.1"],
        "TP 2, another decoder": [OWN_MODEL, "parallel.tp=2"],
        "TP 2, another decoder, no sequence parallel": [
            OWN_MODEL, "parallel.tp=2", "parallel.sequence_parallel=false",
        ],
        "TP 2, a loss of one's own": ["parallel.tp=2", f"loss={HERE}:own_loss"],
        "TP 2, uneven last batch": ["parallel.tp=2", "micro_batch=4", *UNEVEN],
        "TP 2, packed documents": ["parallel.tp=2", *PACKED],
        "CP 2 (Ulysses) x ZeRO 3, uneven last batch": ["parallel.cp=2", "parallel.zero=3", "micro_batch=4", *UNEVEN],
        "PP 2, GPipe": ["parallel.pp=2", "parallel.pipeline=gpipe"],
        "PP 2, 1F1B, clipping": ["parallel.pp=2", "micro_batch=1", "optimizer.clip=0.1"],
        "PP 2, interleaved": ["parallel.pp=2", "parallel.pipeline=interleaved"],
        "PP 2, zero-bubble": ["parallel.pp=2", "parallel.pipeline=zero-bubble"],
        "PP 2, interleaved, bf16 with master weights": [
            "parallel.pp=2", "parallel.pipeline=interleaved", "precision.mode=bf16",
        ],
        "PP 2, full recomputation": ["parallel.pp=2", "parallel.recompute=full"],
        "CP 2 (Ulysses) x ZeRO 0": ["parallel.cp=2"],
        "CP 2 (Ulysses) x ZeRO 3, full recomputation, clipping": [
            "parallel.cp=2", "parallel.zero=3", "parallel.recompute=full", "optimizer.clip=0.1",
        ],
        "ZeRO 0, gradients sent in bf16": ["parallel.compression=bf16"],
        "ZeRO 0, gradients sent in fp16": ["parallel.compression=fp16"],
        "ZeRO 0, PowerSGD of rank 4 from step 5": [
            "parallel.compression=powersgd", "parallel.compression_rank=4", "parallel.compression_start=5",
        ],
        "ZeRO 3, compiled blocks": ["parallel.zero=3", "compile=true"],
        "ZeRO 3, bf16-only": ["parallel.zero=3", "precision.mode=bf16-only"],
        **{f"{axis}, {mode}": [cut, *SIXTEEN[mode]] for axis, cut, modes in AXES for mode in modes},
        **{f"{axis}, selective recomputation": [cut, "parallel.recompute=selective"] for axis, cut, _ in AXES},
        "ZeRO 1, CPU offload": ["parallel.zero=1", "parallel.offload=true"],
        "ZeRO 2, CPU offload, accumulation": ["parallel.zero=2", "parallel.offload=true", "micro_batch=1"],
        "CP 2 (Ulysses) x ZeRO 3, CPU offload": ["parallel.cp=2", "parallel.zero=3", "parallel.offload=true"],
    },
    4: {
        "ZeRO 3 in 2 replicas (HSDP)": ["parallel.zero=3", "parallel.replicate=2"],
        "ZeRO 1 in 2 replicas, clipping": ["parallel.zero=1", "parallel.replicate=2", "optimizer.clip=0.1"],
        "ZeRO 3, hpZ 2": ["parallel.zero=3", "parallel.hpz=2"],
        "ZeRO 3, qwZ (int8 gather)": ["parallel.zero=3", "parallel.qwz=true"],
        "ZeRO 3, qgZ (int8 reduction)": ["parallel.zero=3", "parallel.qgz=true"],
        "ZeRO 3, hpZ 2, qwZ, qgZ": ["parallel.zero=3", "parallel.hpz=2", "parallel.qwz=true", "parallel.qgz=true"],
        "TP 2 x ZeRO 0": ["parallel.tp=2"],
        "TP 2 x ZeRO 3, another decoder": [OWN_MODEL, "parallel.tp=2", "parallel.zero=3"],
        "TP 2 x ZeRO 1, accumulation": ["parallel.tp=2", "parallel.zero=1", "micro_batch=2"],
        "TP 2 x ZeRO 3, clipping": ["parallel.tp=2", "parallel.zero=3", "optimizer.clip=0.1"],
        "TP 2 x ZeRO 3, full recomputation": ["parallel.tp=2", "parallel.zero=3", "parallel.recompute=full"],
        "TP 2 x ZeRO 3, autocast-bf16": ["parallel.tp=2", "parallel.zero=3", "precision.mode=autocast-bf16"],
        "PP 2 x ZeRO 0, 1F1B": ["parallel.pp=2"],
        "PP 2 x ZeRO 1, interleaved": ["parallel.pp=2", "parallel.zero=1", "parallel.pipeline=interleaved"],
        "PP 2 x ZeRO 2, zero-bubble, clipping": [
            "parallel.pp=2", "parallel.zero=2", "parallel.pipeline=zero-bubble", "micro_batch=1", "optimizer.clip=0.1",
        ],
        "PP 2 x ZeRO 1, fp16 with master weights": [
            "parallel.pp=2", "parallel.zero=1", "precision.mode=fp16", "precision.loss_scale=1024",
        ],
        "PP 2 x TP 2, zero-bubble, clipping": [
            "parallel.pp=2", "parallel.tp=2", "parallel.pipeline=zero-bubble", "optimizer.clip=0.1",
        ],
        "CP 2 (Ulysses) x ZeRO 3 in 2 replicas": ["parallel.cp=2", "parallel.zero=3", "parallel.replicate=2"],
        "ZeRO 3 in 2 replicas, CPU offload, selective recomputation": [
            "parallel.zero=3", "parallel.replicate=2", "parallel.offload=true", "parallel.recompute=selective",
        ],
        "ZeRO 3 in 2 replicas, qwZ, qgZ": [
            "parallel.zero=3", "parallel.replicate=2", "parallel.qwz=true", "parallel.qgz=true",
        ],
        "TP 2 x ZeRO 3, CPU offload": ["parallel.tp=2", "parallel.zero=3", "parallel.offload=true"],
        "PP 2 x ZeRO 1, CPU offload": ["parallel.pp=2", "parallel.zero=1", "parallel.offload=true"],
        "ZeRO 3 in 2 replicas, bf16 with master weights": [
            "parallel.zero=3", "parallel.replicate=2", "precision.mode=bf16",
        ],
        "ZeRO 3, hpZ 2, bf16 with master weights": ["parallel.zero=3", "parallel.hpz=2", "precision.mode=bf16"],
        "ZeRO 3, qwZ, qgZ, bf16 with master weights": [
            "parallel.zero=3", "parallel.qwz=true", "parallel.qgz=true", "precision.mode=bf16",
        ],
        "ZeRO 3, CPU offload, bf16 with master weights": [
            "parallel.zero=3", "parallel.offload=true", "precision.mode=bf16",
        ],
        "PP 4, GPipe": ["parallel.pp=4", "parallel.pipeline=gpipe"],
    },
    8: {
        "PP 2 x ZeRO 1 x TP 2, 1F1B, clipping": [
            "parallel.pp=2", "parallel.tp=2", "parallel.zero=1", "optimizer.clip=0.1",
        ],
        "TP 2 x ZeRO 3 in 2 replicas": ["parallel.tp=2", "parallel.zero=3", "parallel.replicate=2"],
        "PP 2 x ZeRO 1 in 2 replicas": ["parallel.pp=2", "parallel.zero=1", "parallel.replicate=2", "micro_batch=1"],
        "ZeRO 3 in 2 replicas, hpZ 2": [
            "parallel.zero=3", "parallel.replicate=2", "parallel.hpz=2", "micro_batch=1",
        ],
    },
}  # fmt: skip
# What is saved on each world size, and under what each of them is taken up.
SAVED = {
    2: {"ddp": ["parallel.zero=0"], "zero1": ["parallel.zero=1"], "pp": ["parallel.pp=2"]},
    4: {
        "zero3": ["parallel.zero=3"],
        "hsdp": ["parallel.zero=3", "parallel.replicate=2"],
        "tp_fsdp": ["parallel.tp=2", "parallel.zero=3"],
        "pp_tp": ["parallel.pp=2", "parallel.tp=2", "parallel.pipeline=interleaved", "micro_batch=4"],
    },
}
TAKEN_UP = {
    2: {**SAVED[2], "tp": ["parallel.tp=2"], "zero3": ["parallel.zero=3"]},
    4: {**SAVED[4], "ddp": ["parallel.zero=0"]},
}
# AdamW on float32 copies of bfloat16 weights: saved by 2 ranks, taken up by 4, what it holds compared bit for bit.
ADAMW = ["optimizer.name=adamw", "optimizer.lr=0.01", "precision.mode=bf16"]
# One plain step under these gives one process's gradient.
GRADIENTS = {
    2: {
        "ddp": [],
        "zero1": ["parallel.zero=1"],
        "zero2": ["parallel.zero=2"],
        "zero3": ["parallel.zero=3"],
        "tp": ["parallel.tp=2"],
        "cp": ["parallel.cp=2"],
        "pp": ["parallel.pp=2", "parallel.pipeline=zero-bubble"],
    },
    4: {"ddp": [], **SAVED[4]},
}


def rows(world: int) -> dict[str, list[str]]:
    """The rows of a world size."""
    return {**(ROWS if world in (2, 4) else {}), **ONLY[world]}


def config(overrides: list[str]) -> TrainConfig:
    """SGD with momentum: it shows an error in a gradient's scale, which Adam would hide. Samples come two by two; where
    ranks share them, which takes long for so small a model, all at once, but for rows of accumulation."""
    body: dict[str, Any] = {
        "model": f"{HERE}:model",
        "data": f"{HERE}:data",
        "steps": STEPS,
        "global_batch": 8,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "tensor_parallel": PLAN,
    }
    from accel.train.config import override

    for text in overrides:
        override(body, text)
    if body["model"].endswith(":decoder"):
        body["tensor_parallel"] = OWN_PLAN
    if "micro_batch" not in body:
        axes = body.get("parallel", {})
        sharing = axes.get("tp", 1) * axes.get("cp", 1)
        together = sharing > 1 and axes.get("pp", 1) == 1
        body["micro_batch"] = 8 * sharing // int(os.environ.get("WORLD_SIZE", "1")) if together else 2
    return TrainConfig.from_dict(body)


@cache
def _join(layout: ParallelConfig) -> Ranks:
    """Process groups are made once for each layout, which saves most of the time of a row."""
    return join(TrainConfig(parallel=layout, global_batch=8 * 1024, micro_batch=1))


def start(overrides: list[str], out: Path) -> Trainer:
    made = config(overrides)
    p = made.parallel
    made.validate(int(os.environ.get("WORLD_SIZE", "1")))
    layout = ParallelConfig(zero=min(p.zero, 1), replicate=p.replicate, tp=p.tp, pp=p.pp, cp=p.cp)
    return Trainer(made, out, _join(layout))


def losses(trainer: Trainer, until: int = STEPS) -> list[float]:
    batches = trainer.batches()
    return [trainer.one_step(batches)["loss"] for _ in range(until - trainer.step)]


def main(folder: Path, others: list[Path], later: list[Path]) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    faulthandler.enable()
    found: dict[str, Any] = {"parity": {}, "on": {}, "resumed": {}, "final": {}, "seconds": {}}
    for name, overrides in rows(world).items():
        began = time.monotonic()
        print(f"rank {rank}: {name}", flush=True)  # where a launch fails
        trainer = start(overrides, folder / "none")
        found["parity"][name] = losses(trainer)
        found["on"][name] = rank_bytes.switched_on(trainer)
        found["seconds"][name] = round(time.monotonic() - began, 2)
    began = time.monotonic()
    if world in SAVED:
        found["pipeline"] = rank_bytes.sent_by_stages(start, world, folder)
        found["spiky"] = rank_faults.overflow(start, folder)
        found["not a number"] = rank_faults.not_a_number(start, folder)
        found["damaged"] = rank_faults.damaged(start, folder / "damaged")
        _gradients(world, folder)
        _save(found, world, folder)
        found["tensor parallel"] = _tensor_parallel(world)
        found["adamw"] = _adamw(folder / "adamw" if world == 2 else others[0] / "adamw", world)
        for source in (folder, *others):
            resume(found, source, world)
    if world == 4:
        found["bytes"] = rank_bytes.held_and_sent(start, folder)
    if world == 2:
        found["refused"] = _refused(folder)
        found["context parallel"] = _context_parallel(folder)
        trainer = start(POWER_SGD, folder / "power_sgd")
        found["power_sgd"] = {"whole": losses(start(POWER_SGD, folder / "none")), "first": losses(trainer, HALF)}
        trainer.finish()
        forgetful = start(POWER_SGD, folder / "power_sgd")
        forgetful.resume()
        assert forgetful.built.memory is not None
        forgetful.built.memory.load_state_dict({})
        found["power_sgd"]["forgotten"] = losses(forgetful)
    for source in (folder, *others):
        if (source / "power_sgd").is_dir():
            trainer = start(POWER_SGD, source / "power_sgd")
            trainer.resume()
            found["power_sgd resumed"] = losses(trainer)
    if world > 1:
        torch.distributed.barrier()
    (folder / "saved").touch()
    found["seconds"]["the rest"] = round(time.monotonic() - began, 2)
    for source in later:
        deadline = time.monotonic() + 1800
        while not (source / "saved").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        resume(found, source, world)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def _adamw(folder: Path, world: int) -> dict[str, Any]:
    """The losses after the first half, and whether what the optimizer holds is bit for bit what was saved."""
    file = folder / "state.pt"
    trainer = start([f"parallel.zero={1 if world == 2 else 3}", *ADAMW], folder)
    if world == 2:
        losses(trainer, HALF)
        trainer.finish()
        state = gather(trainer.optimizer.state_dict(), trainer.ranks)
        if state is not None:
            torch.save(state, file)
        again = start(["parallel.zero=1", *ADAMW], folder / "none")
        return {"losses": losses(again)[HALF:]}
    trainer.resume()
    state = gather(trainer.optimizer.state_dict(), trainer.ranks)
    saved = torch.load(file, weights_only=True)
    kinds = sorted({name.rpartition(".")[2] for name in saved})
    equal = state is None or (
        set(state) == set(saved) and all(torch.equal(state[name], value) for name, value in saved.items())
    )
    return {"losses": losses(trainer), "equal": equal, "kinds": kinds}


def _gradients(world: int, folder: Path) -> None:
    for name, overrides in GRADIENTS[world].items():
        trainer = start([*overrides, "optimizer.lr=1", "optimizer.momentum=0"], folder / "none")
        trainer.one_step(trainer.batches())
        weights = gather(trainer.module.state_dict(), trainer.ranks)
        if weights is not None:
            torch.save(weights, folder / f"gradient-{name}.pt")


def _context_parallel(folder: Path) -> dict[str, float]:
    """What context parallel keeps for the backward pass of a micro-batch and sends in its forward pass."""
    from accel.plan.measure import SavedBytes
    from accel.train.context_parallel import Ulysses

    trainer = start(["parallel.cp=2", "micro_batch=2"], folder / "none")
    sent, turn = 0.0, Ulysses._turn

    def counted(self: Ulysses, tensor: torch.Tensor, had: int, gets: int) -> torch.Tensor:
        nonlocal sent
        sent += tensor.nbytes * (self.mesh.size() - 1) / self.mesh.size()
        return turn(self, tensor, had, gets)

    x, y = next(trainer.batches())
    Ulysses._turn = counted  # type: ignore[method-assign]
    with SavedBytes(trainer.module.parameters()) as saved:
        logits = trainer.module(x)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y[:, : logits.shape[1]].flatten())
    Ulysses._turn = turn  # type: ignore[method-assign]
    del loss
    return {"kept": saved.bytes, "sent": sent}


def _tensor_parallel(world: int) -> dict[str, int]:
    """What layers that all ranks share keep for the backward pass of a micro-batch, with sequence parallel or without,
    run again in it or not."""
    from torch.distributed.tensor.parallel import loss_parallel

    from accel.plan.measure import SavedBytes
    from accel.train.loss import cross_entropy
    from accel.train.recompute import recompute
    from accel.train.tensor_parallel import distribute, match

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


def _save(found: dict[str, Any], world: int, folder: Path) -> None:
    for name, overrides in SAVED[world].items():
        trainer = start(
            [*overrides, "checkpoint.asynchronous=" + ("true" if name == "zero1" else "false")], folder / name
        )
        losses(trainer, HALF)
        trainer.finish()
        written = load_file(folder / name / "final" / "model-00001-of-00001.safetensors")
        own = {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in trainer.module.state_dict().items()}
        found["final"][name] = {
            "equal": all(torch.equal(value, written[n]) for n, value in own.items()),
            "names": sorted(own),
            "written": sorted(written),
        }


def resume(found: dict[str, Any], source: Path, world: int) -> None:
    """Go on from every checkpoint in ``source`` under every layout of ``world`` ranks."""
    for saved in sorted({name for names in SAVED.values() for name in names if (source / name).is_dir()}):
        for name, overrides in TAKEN_UP[world].items():
            trainer = start(overrides, source / saved)
            trainer.resume()
            assert trainer.step == HALF
            found["resumed"][f"{source.name} {saved} -> {world} {name}"] = losses(trainer)


def _refused(folder: Path) -> dict[str, str]:
    """What is said about a plan that leaves something out, and data that can't be cut."""
    said = {}
    for name, plan, overrides in (
        ("left out", {k: v for k, v in PLAN.items() if k != "norm"}, []),
        ("odd length", PLAN, [f"data={HERE}:odd_data"]),
        *((name, PLAN, [f"model={HERE}:{name}"]) for name in ("one_head", "all_heads", "whole_heads", "one_product")),
        ("turned after the cut", {}, [OWN_MODEL, "parallel.tp=1", "parallel.cp=2"]),
        ("cut too late", PLAN, ["parallel.tp=1", "parallel.cp=2", "parallel.cp_split=blocks.0"]),
        ("cut too early", PLAN, ["parallel.tp=1", "parallel.cp=2", "parallel.cp_split=embed.tokens"]),
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


if __name__ == "__main__":
    words = [*sys.argv[1:], "then"]
    now, after = words[: words.index("then")], words[words.index("then") + 1 : -1]
    main(Path(now[0]), [Path(word) for word in now[1:]], [Path(word) for word in after])
    sys.stdout.flush()
    sys.stderr.flush()
    # As a rank of accel's ends: gloo's threads outlive the groups, and where another rank closes its sockets while
    # this one tears down what they use, they end it by a signal.
    os._exit(0)
