"""Everything that one world size is checked with, in one launch: ``torchrun suite.py FOLDER [FOLDER OF
CHECKPOINTS]``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from accel.train.checkpoint import plain
from accel.train.config import TrainConfig
from accel.train.final import gather
from accel.train.loop import Trainer, join

HERE = Path(__file__).parent / "small.py"
STEPS, HALF = 10, 5

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
    "ZeRO 3, autocast-bf16": ["parallel.zero=3", "precision.mode=autocast-bf16"],
    "ZeRO 0, autocast-fp16": ["parallel.zero=0", "precision.mode=autocast-fp16", "precision.loss_scale=1024"],
    "ZeRO 2, bf16 with master weights": ["parallel.zero=2", "precision.mode=bf16"],
    "ZeRO 3, fp16 with master weights (O2)": ["parallel.zero=3", "precision.mode=O2", "precision.loss_scale=1024"],
    "ZeRO 3, fp16-only (O3)": ["parallel.zero=3", "precision.mode=O3", "precision.loss_scale=1024"],
}  # fmt: skip
HYBRID = {
    "ZeRO 3 in 2 replicas (HSDP)": ["parallel.zero=3", "parallel.replicate=2"],
    "ZeRO 1 in 2 replicas, clipping": ["parallel.zero=1", "parallel.replicate=2", "optimizer.clip=0.1"],
}
SAVED = {"ddp": ["parallel.zero=0"], "zero1": ["parallel.zero=1"], "zero3": ["parallel.zero=3"]}


def config(overrides: list[str]) -> TrainConfig:
    """SGD with momentum: it shows an error in a gradient's scale, which Adam would hide."""
    body: dict[str, Any] = {
        "model": f"{HERE}:model",
        "data": f"{HERE}:data",
        "steps": STEPS,
        "global_batch": 8,
        "micro_batch": 2,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    }
    from accel.train.config import override

    for text in overrides:
        override(body, text)
    return TrainConfig.from_dict(body)


def start(overrides: list[str], out: Path) -> Trainer:
    made = config(overrides)
    return Trainer(made, out, join(made))


def losses(trainer: Trainer, until: int = STEPS) -> list[float]:
    batches = trainer.batches()
    return [trainer.one_step(batches)["loss"] for _ in range(until - trainer.step)]


def main(folder: Path, others: list[Path]) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    found: dict[str, Any] = {"parity": {}, "bytes": {}, "resumed": {}}
    for name, overrides in {**ROWS, **(HYBRID if world == 4 else {})}.items():
        found["parity"][name] = losses(start(overrides, folder / "none"))
    for zero in (0, 1, 2, 3):
        trainer = start([f"parallel.zero={zero}", "optimizer.name=adamw"], folder / "none")
        trainer.one_step(trainer.batches())
        local = [getattr(p, "to_local", lambda p=p: p)() for p in trainer.module.parameters()]
        found["bytes"][str(zero)] = {
            "parameters": sum(t.nbytes for t in local),
            "optimizer": sum(t.nbytes for t in trainer.optimizer.tensors()),
        }
    trainer = start(["parallel.zero=3", "optimizer.lr=1", "optimizer.momentum=0"], folder / "none")
    trainer.one_step(trainer.batches())
    weights = gather(plain(trainer.called))
    if weights is not None:
        torch.save(weights, folder / "one_step.pt")
    spiky = [
        "precision.mode=autocast-fp16",
        f"loss={HERE}:overflow_once",
        "parallel.zero=2",
        "precision.loss_scale=1024",
    ]
    trainer = start(spiky, folder / "none")
    batches = trainer.batches()
    seen = [trainer.one_step(batches) for _ in range(2)]
    found["spiky"] = [[s["skipped"], s["loss_scale"]] for s in seen]
    for name, overrides in SAVED.items():
        out = folder / name
        trainer = start([*overrides, "checkpoint.asynchronous=" + ("true" if name == "zero1" else "false")], out)
        losses(trainer, HALF)
        trainer.save()
        trainer.checkpoints.wait()
    continued = SAVED | ({"hsdp": HYBRID["ZeRO 3 in 2 replicas (HSDP)"]} if world == 4 else {})
    for source in (folder, *others):
        for saved in SAVED:
            for name, overrides in continued.items():
                trainer = start(overrides, source / saved)
                trainer.resume()
                assert trainer.step == HALF
                found["resumed"][f"{source.name} {saved} -> {world} {name}"] = losses(trainer)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(a) for a in sys.argv[2:]])
    torch.distributed.destroy_process_group()
