"""Records ``recorded/lightning`` and ``recorded/accelerate`` with the real libraries. The suite doesn't run this
script. The script needs lightning 2.6.6, accelerate 1.15.0 and torch, but no GPU.

Beside each recording, ``expected.safetensors`` holds the weights that the library had in memory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = HERE / "recorded"


def net() -> Any:
    """Makes the net of ``checkpoint_net.py`` with random weights of seed 7."""
    sys.path.insert(0, str(HERE))
    import torch
    from checkpoint_net import Net

    torch.manual_seed(7)
    return Net()


def keep(model: Any, folder: Path) -> None:
    """Saves the model's current weights as ``expected.safetensors``."""
    from safetensors.torch import save_file

    save_file({n: t.detach().clone() for n, t in model.state_dict().items()}, str(folder / "expected.safetensors"))


def lightning() -> None:
    """Records a Trainer's checkpoint with hyperparameters, and a Fabric checkpoint."""
    import lightning as L
    import torch

    class Task(L.LightningModule):
        def __init__(self, lr: float, options: argparse.Namespace, folder: Path) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = net()
            self.scores = torch.nn.Linear(2, 2)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])

    folder = OUT / "lightning"
    folder.mkdir(parents=True)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randint(0, 11, (8, 3))), batch_size=4)
    task = Task(0.1, argparse.Namespace(depth=2), Path("data"))
    trainer = L.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=folder, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, data)
    trainer.save_checkpoint(folder / "trainer.ckpt")
    keep(task.model, folder)
    fabric = L.Fabric(accelerator="cpu")
    model, optimizer = fabric.setup(net(), torch.optim.SGD(net().parameters(), lr=0.1))
    fabric.save(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer, "step": 2, "options": {"a": 1}})


def accelerate() -> None:
    """Records the files of Accelerate's save_state with and without safetensors, and the shards of its save_model."""
    import torch
    from accelerate import Accelerator

    folder = OUT / "accelerate"
    folder.mkdir(parents=True)
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(net(), torch.optim.SGD(net().parameters(), lr=0.1))
    accelerator.save_state(str(folder / "state"))
    accelerator.save_state(str(folder / "state_bin"), safe_serialization=False)
    accelerator.save_model(model, str(folder / "sharded"), max_shard_size=400)
    keep(accelerator.unwrap_model(model), folder)
    for spare in (*folder.glob("*/random_states*"), *folder.glob("*/optimizer.bin")):
        spare.unlink()


def main() -> None:
    """Records the checkpoints of Lightning and Accelerate."""
    for name in ("lightning", "accelerate"):
        shutil.rmtree(OUT / name, ignore_errors=True)
    lightning()
    accelerate()


if __name__ == "__main__":
    main()
