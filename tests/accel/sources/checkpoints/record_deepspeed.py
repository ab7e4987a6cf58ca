"""Records the DeepSpeed checkpoints under ``recorded/deepspeed`` with the real library, without a GPU.

The suite doesn't run this script. ``make record`` makes an environment with deepspeed 0.19.8 and runs this script. In
an existing environment, run this script with ``DS_ACCELERATOR=cpu``.

Each case trains the net of ``checkpoint_net.py`` for two steps on two gloo ranks and saves it. Each case also writes
``expected.safetensors``, the output of DeepSpeed's own ``zero_to_fp32``. The weights that accel reads must equal
``expected.safetensors`` bit for bit.

Running the script again writes the same bytes, except for padding that DeepSpeed doesn't initialize. At ZeRO 3, the
last rank's ``fp32_flat_groups`` and ``frozen_param_fragments`` contain uninitialized padding. On another kind of CPU,
the last bits of the weights may differ.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE / "recorded" / "deepspeed"

# Each case has a ZeRO stage and a precision of the parameters.
CASES = {"zero1_bf16": (1, "bf16"), "zero2_fp32": (2, "fp32"), "zero3_bf16": (3, "bf16"), "zero0_fp32": (0, "fp32")}


def train(rank: int, case: str, port: int) -> None:
    """Trains the net of one case on one rank, and saves the checkpoint."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    sys.path.insert(0, str(HERE))
    import deepspeed
    import torch
    from checkpoint_net import Net

    stage, precision = CASES[case]
    torch.manual_seed(stage)
    net = Net()
    net.frozen.requires_grad_(False)
    weights = [p for n, p in net.named_parameters() if p.requires_grad and p.ndim > 1]
    biases = [p for n, p in net.named_parameters() if p.requires_grad and p.ndim <= 1]
    kind = torch.optim.SGD if stage == 1 else torch.optim.Adam
    optimizer = kind([{"params": weights}, {"params": biases, "lr": 0.05}], lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        precision: {"enabled": precision != "fp32"},
    }
    config.pop("fp32", None)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        ids = torch.randint(0, 11, (4, 3))
        loss = engine(ids).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(OUT / case), tag="global_step2")


def main() -> None:
    """Records every case of ``CASES``."""
    import torch.multiprocessing
    from safetensors.torch import save_file

    os.environ["OMP_NUM_THREADS"] = "1"  # with more threads, sums would be rounded differently
    for case in CASES:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        folder = OUT / case
        shutil.rmtree(folder, ignore_errors=True)
        torch.multiprocessing.spawn(train, args=(case, port), nprocs=2)
        for script in folder.glob("*.py"):  # removes the converter scripts that DeepSpeed adds
            script.unlink()
        if CASES[case][0]:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            state = get_fp32_state_dict_from_zero_checkpoint(str(folder), "global_step2")
            save_file({k: v.clone().contiguous() for k, v in state.items()}, str(folder / "expected.safetensors"))


if __name__ == "__main__":
    main()
