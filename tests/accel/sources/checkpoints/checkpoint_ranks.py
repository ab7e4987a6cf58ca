"""The tests start this script with torchrun. Two ranks shard the net with FSDP2, train it for a step, and save it like
torchtitan."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_net import Net


def main(folder: Path) -> None:
    """Saves the net three times. ``folder/step-1`` has the net's own tensor names. In ``folder/nested``, the tensor
    names have the prefix ``model.``. ``folder/whole.pt`` has the unsharded weights."""
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    net = Net()
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.arange(6).reshape(2, 3)).square().mean().backward()
    optimizer.step()
    model, states = get_state_dict(net, optimizer)
    dcp.save({**model, "optimizer": states, "train_state": {"step": 1}}, checkpoint_id=folder / "step-1")
    dcp.save({"model": model}, checkpoint_id=folder / "nested")
    whole = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.items()}
    if torch.distributed.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
