"""Records the Megatron checkpoints under ``recorded/megatron`` with the real library. The suite doesn't run this
script. The script needs megatron-core 0.16.1 and torch, but no GPU.

Two tensor-parallel gloo ranks make a small GPT (grouped-query attention, SwiGLU, RMSNorm) and save it twice. The first
copy of the GPT is written by ``dist_checkpointing`` (torch_dist). The second copy is in Megatron's older layout, with a
folder for each rank. Each file of the older layout has the same keys as a file of Megatron's training script, and has
megatron-core's ``state_dict`` under the key ``model``. ``expected.safetensors`` holds the weights that megatron-core
itself loads on one rank.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "recorded" / "megatron"
SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 6}


def model(ranks: int) -> Any:
    """Makes this rank's tensor-parallel shard of the GPT."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    # Megatron reads the CUDA device and synchronizes with it, even if nothing is on a GPU.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    parallel_state.initialize_model_parallel(ranks, 1)
    config = TransformerConfig(
        **SIZES,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        normalization="RMSNorm",
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(config, spec, vocab_size=12, max_sequence_length=4, position_embedding_type="rope")


def run(rank: int, ranks: int, port: int) -> None:
    """Saves the GPT if ``ranks`` is 2, or loads the saved files if ``ranks`` is 1."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    gpt = model(ranks)
    from megatron.core import dist_checkpointing

    folder = OUT / "torch_dist" / "iter_0000002"
    if ranks == 1:
        from safetensors.torch import save_file

        gpt.load_state_dict(
            dist_checkpointing.load(gpt.sharded_state_dict(), str(folder), strict="log_all"), strict=False
        )
        state = {n: t.detach().clone() for n, t in gpt.state_dict().items() if isinstance(t, torch.Tensor)}
        save_file(state, str(OUT / "expected.safetensors"))
        return
    with torch.no_grad():
        for name, tensor in gpt.named_parameters():
            if tensor.ndim == 1:  # random values, because all norm weights start as ones and would look alike
                mark = 0 if "layernorm" in name else rank
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name) + mark)))
    if rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(gpt.sharded_state_dict(), str(folder))
    legacy = OUT / "legacy" / "iter_0000002" / f"mp_rank_{rank:02d}"
    legacy.mkdir(parents=True)
    arguments = argparse.Namespace(
        **SIZES, tensor_model_parallel_size=2, pipeline_model_parallel_size=1, swiglu=True, padded_vocab_size=12,
        untie_embeddings_and_output_weights=True, params_dtype=torch.float32,
    )  # fmt: skip
    body = {"args": arguments, "checkpoint_version": 3.0, "iteration": 2, "model": gpt.state_dict()}
    torch.save(body, legacy / "model_optim_rng.pt")
    torch.distributed.barrier()
    if rank == 0:  # replaces the path in the metadata by a name of the same length
        here = str(OUT).encode()
        metadata = folder / ".metadata"
        metadata.write_bytes(metadata.read_bytes().replace(here, b"x" * len(here)))
    for kind in ("legacy", "torch_dist"):
        (OUT / kind / "latest_checkpointed_iteration.txt").write_text("2")


def main() -> None:
    """Records both layouts."""
    import torch.multiprocessing

    shutil.rmtree(OUT, ignore_errors=True)
    torch.multiprocessing.spawn(run, args=(2, 29641), nprocs=2)
    torch.multiprocessing.spawn(run, args=(1, 29642), nprocs=1)


if __name__ == "__main__":
    main()
