"""Proves that accel reads the checkpoints of other trainers bit for bit, without the trainers' libraries.

The scripts ``record_*.py`` ran the real libraries to write the folders under ``recorded``. Each
``expected.safetensors`` holds the weights that the library itself reads from its checkpoint. The tests save the
checkpoints of torch.distributed.checkpoint with torch itself. For Megatron's pipeline stages and Megatron's layouts
before version 2, no recordings exist, so the tests write these checkpoints without the library.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from accel.artifact import file_sha256
from accel.errors import BadSource
from accel.sources.checkpoints.checkpoint import Checkpoint, LazyTensor, open_checkpoint
from accel.sources.checkpoints.names import fit
from accel.sources.python_object import load_object
from accel.sources.torch.weights import load_weights

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
NET = f"{HERE / 'checkpoint_net.py'}:make"
IDS = "ids:int64[batch,length]{0..10}"


def net() -> torch.nn.Module:
    """Makes the net of the recordings, with weights that no recording contains."""
    torch.manual_seed(99)
    made: torch.nn.Module = load_object(NET, "factory")[1]()
    return made


def equals(module: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Asserts that every tensor of the module equals the expected tensor bit for bit."""
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("case", ["zero1_bf16", "zero2_fp32", "zero3_bf16"])
def test_deepspeed_equals_zero_to_fp32(case: str) -> None:
    """Checks that accel joins shards in the same way as DeepSpeed. The cases include odd sizes, padding, tied weights,
    buffers and master weights."""
    folder = RECORDED / "deepspeed" / case
    expected = load_file(folder / "expected.safetensors")
    module = net()
    found = load_weights(module, folder)
    if case.startswith("zero1"):  # zero_to_fp32 leaves out a frozen parameter at ZeRO 1
        raw = torch.load(folder / "global_step2" / "mp_rank_00_model_states.pt", weights_only=True, mmap=True)["module"]
        expected["frozen"] = raw["frozen"].float()
    equals(module, expected)
    assert found.format == f"DeepSpeed ZeRO-{case[4]}"
    assert ("float32 master weights" in " ".join(found.notes)) == case.endswith("bf16")
    assert {f.name for f in found.files} == {"latest", *(f.name for f in (folder / "global_step2").iterdir())}
    equals_tag = net()
    load_weights(equals_tag, folder / "global_step2")
    equals(equals_tag, expected)


def test_the_master_weights_are_not_the_rounded_ones() -> None:
    """Checks that the recorded float32 master weights differ from the bfloat16 parameters, so that tests can tell them
    apart."""
    folder = RECORDED / "deepspeed" / "zero1_bf16"
    expected = load_file(folder / "expected.safetensors")["up.weight"]
    assert not torch.equal(expected, expected.bfloat16().float())


def test_deepspeed_without_zero() -> None:
    """Checks that accel reads a DeepSpeed folder without ZeRO shards, and loads exactly the saved weights."""
    folder = RECORDED / "deepspeed" / "zero0_fp32"
    module = net()
    assert load_weights(module, folder).format == "DeepSpeed"
    body = torch.load(folder / "global_step2" / "mp_rank_00_model_states.pt", weights_only=True)
    equals(module, body["module"])


def test_export_of_a_deepspeed_folder(cli: Any, tmp_path: Path) -> None:
    """Fails if the documented export command fails, or if the ONNX file lacks the weights of the checkpoint. Also fails
    if the manifest lacks the format, the chosen step, or the sha256 of a file that was read."""
    folder, out = RECORDED / "deepspeed" / "zero3_bf16", tmp_path / "my.onnx"
    ran = cli("export", NET, "--weights", folder, "--input", IDS, "-o", out, "-q")
    assert ran.code == 0, ran.stderr
    source = json.loads((tmp_path / "my.onnx.manifest.json").read_text())["source"]
    assert source["checkpoint"]["format"] == "DeepSpeed ZeRO-3"
    assert any("master weights were taken" in note for note in source["checkpoint"]["notes"])
    recorded = {Path(f["path"]): f["sha256"] for f in source["files"]}
    for file in (folder / "latest", *(folder / "global_step2").iterdir()):
        assert recorded[file.absolute()] == file_sha256(file)
    import accel

    ids = np.array([[1, 2, 10], [0, 3, 4]])
    module = net()
    module.load_state_dict(load_file(folder / "expected.safetensors"))
    with torch.inference_mode(), accel.load(out) as session:
        np.testing.assert_allclose(
            session.run({"ids": ids})["output"], module(torch.from_numpy(ids)).numpy(), rtol=1e-5, atol=1e-6
        )
    checked = cli("inspect", out, "--check")
    assert checked.code == 0, checked.stdout


@pytest.mark.parametrize("layout", ["torch_dist", "legacy"])
def test_megatron_equals_what_one_rank_loads(layout: str) -> None:
    """Checks that accel joins the parts of a tensor in the same way as Megatron. The test covers grouped-query
    attention, SwiGLU, row- and column-parallel layers, the vocabulary and stacked layers. Megatron has two names for
    some norms, and accel must find such a norm under either name."""
    expected = load_file(RECORDED / "megatron" / "expected.safetensors")
    for folder in (RECORDED / "megatron" / layout, RECORDED / "megatron" / layout / "iter_0000002"):
        found = open_checkpoint(folder)
        for name, value in expected.items():
            assert torch.equal(found.tensors[name].read(), value), name
            assert found.tensors[name].shape == tuple(value.shape)
        assert set(found.tensors) - found.spare <= set(expected)
    fused = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    assert torch.equal(found.tensors[fused].read(), expected["decoder.layers.1.input_layernorm.weight"])


def _megatron(folder: Path, parts: dict[str, dict[str, Any]], version: float = 3.0, **arguments: Any) -> Path:
    for name, model in parts.items():
        file = folder / "iter_0000007" / name / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        body = {"args": argparse.Namespace(**arguments), "checkpoint_version": version, "iteration": 7, **model}
        torch.save(body, file)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def test_megatron_pipeline_stages(tmp_path: Path) -> None:
    """Megatron numbers layers within a pipeline stage, or within a chunk of an interleaved schedule. Checks that accel
    numbers the layers through the whole model. The last pipeline stage saves a copy of the embedding, which must not
    count as an unexpected tensor. The test writes the checkpoint by hand in Megatron's layout."""
    torch.manual_seed(0)
    layers = [torch.randn(4, 4) for _ in range(4)]
    embedding = torch.randn(6, 4)
    row = "self_attention.linear_proj.weight"

    def part(rank: int, stage: int) -> dict[str, Any]:
        half = slice(2 * rank, 2 * rank + 2)
        first = {"language_model": {"encoder": {f"layers.0.{row}": layers[stage][:, half]}}}
        second = {"language_model": {"encoder": {f"layers.0.{row}": layers[2 + stage][:, half]}}}
        if stage == 0:
            words = {"word_embeddings": {"weight": embedding[3 * rank : 3 * rank + 3]}}
            first["language_model"]["embedding"] = words
        else:
            second["word_embeddings_for_head"] = {"weight": embedding[3 * rank : 3 * rank + 3]}
        return {"model0": first, "model1": second}

    parts = {f"mp_rank_{r:02d}_{s:03d}": part(r, s) for r in (0, 1) for s in (0, 1)}
    folder = _megatron(tmp_path, parts, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    found = open_checkpoint(folder)
    for index, layer in enumerate(layers):
        assert torch.equal(found.tensors[f"language_model.encoder.layers.{index}.{row}"].read(), layer)
    assert torch.equal(found.tensors["language_model.embedding.word_embeddings.weight"].read(), embedding)
    assert found.spare == {"word_embeddings_for_head.weight"}


@pytest.mark.parametrize("version", [0.0, 1.0])
def test_megatron_before_version_2(tmp_path: Path, version: float) -> None:
    """Checks that accel changes the rows of query, key and value from Megatron's old order to today's order. The test
    writes the checkpoint by hand."""
    heads, size = 4, 3
    today = torch.randn(heads, 3, size, 5)
    order = (1, 0, 2, 3) if version == 0 else (0, 2, 1, 3)
    name = "encoder.layers.0.self_attention.query_key_value.weight"
    parts = {
        f"mp_rank_{rank:02d}": {"model": {name: today[2 * rank : 2 * rank + 2].permute(order).reshape(-1, 5).clone()}}
        for rank in (0, 1)
    }
    folder = _megatron(tmp_path, parts, version, tensor_model_parallel_size=2, num_attention_heads=heads)
    found = open_checkpoint(folder)
    assert torch.equal(found.tensors[name].read(), today.reshape(-1, 5))
    assert any("today's order" in note for note in found.notes)


@pytest.mark.parametrize(
    ("path", "format"),
    [
        ("lightning/trainer.ckpt", "Lightning checkpoint (2.6.6)"),
        ("lightning/fabric.ckpt", "PyTorch state dict"),
        ("accelerate/state", "folder with model.safetensors"),
        ("accelerate/state_bin", "folder with pytorch_model.bin"),
        ("accelerate/sharded", "folder with model.safetensors.index.json"),
    ],
)
def test_lightning_fabric_and_accelerate(path: str, format: str) -> None:
    """Checks that accel reads a Lightning checkpoint with hyperparameters such as a Namespace or a Path. From the names
    of the module's weights, accel must remove the prefix ``model.``. Also checks that accel reads every shard, and that
    a tied weight that was saved once doesn't count as missing."""
    module = net()
    found = load_weights(module, RECORDED / path)
    # Fabric and Accelerate saved the same untrained net.
    beside = "lightning" if path == "lightning/trainer.ckpt" else "accelerate"
    equals(module, load_file(RECORDED / beside / "expected.safetensors"))
    assert found.format == format
    assert (path == "lightning/trainer.ckpt") == ("2 tensors outside 'model.' were left out" in found.notes)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder that two FSDP ranks of torch saved."""
    folder = tmp_path_factory.mktemp("dcp")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*command, str(HERE / "checkpoint_ranks.py"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.slow
@pytest.mark.parametrize("place", ["", "step-1", "nested", "accelerate"])
def test_distributed_checkpoint(sharded: Path, tmp_path: Path, place: str) -> None:
    """Fails if a rank's shard is copied to the wrong offset, or if the optimizer's states count as unexpected. Also
    fails if a weight differs from the result of torch's own dcp.load."""
    folder = sharded / place
    if place == "accelerate":  # Accelerate saves the files of a distributed checkpoint in pytorch_model_fsdp_0
        folder = tmp_path / "state"
        shutil.copytree(sharded / "nested", folder / "pytorch_model_fsdp_0")
    module = net()
    found = load_weights(module, folder)
    equals(module, torch.load(sharded / "whole.pt", weights_only=True))
    import torch.distributed.checkpoint as dcp

    own: dict[str, Any] = {n: torch.zeros_like(t) for n, t in net().state_dict().items()}
    dcp.load(own, checkpoint_id=sharded / "step-1", no_dist=True)
    equals(module, own)
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= {f.name for f in found.files}
    if place == "":
        assert "the newest of 1 steps: step-1" in found.notes


def _as_checkpoint(state: dict[str, torch.Tensor]) -> Checkpoint:
    tensors = {name: LazyTensor.of(value) for name, value in state.items()}
    return Checkpoint(format="test", path=Path("test.pt"), tensors=tensors, files=())


@settings(max_examples=40, deadline=None)
@given(
    front=st.sampled_from(["", "module.", "model.", "_orig_mod.", "task.net.", "_forward_module.model."]),
    inside=st.lists(
        st.sampled_from(["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."]), max_size=2
    ),
    others=st.booleans(),
)
def test_names_of_wrappers(front: str, inside: list[str], others: bool) -> None:
    """Checks that a model loads its weights even if a wrapper has put prefixes before the names. Also fails if tensors
    of other modules in the file prevent the loading."""
    module = net()
    state = module.state_dict()
    named = {front + name.replace("up.", "".join(inside) + "up."): value for name, value in state.items()}
    if others and front not in ("", "_orig_mod."):
        named["metric.total"] = torch.ones(1)
    found = fit(_as_checkpoint(named), module)
    assert list(found.tensors) == list(state)
    assert all(found.tensors[name].read() is value for name, value in named.items() if name in state)


def test_names_that_do_not_fit() -> None:
    """Checks that the error gives the first wrong name, the closest name in the checkpoint, and the fix."""
    state = dict(net().state_dict())
    renamed = {name.replace("up.", "upp."): value for name, value in state.items()}
    with pytest.raises(
        BadSource, match=r"lacks 'up.weight' \(2 missing, 2 unexpected; closest in the checkpoint: 'upp"
    ):
        fit(_as_checkpoint(renamed), net())
    twice = {f"{front}.{name}": value for front in ("student", "teacher") for name, value in state.items()}
    with pytest.raises(BadSource, match=r"several copies of this model, under 'student\.' and 'teacher\.'"):
        fit(_as_checkpoint(twice), net())
    outer = torch.nn.Module()
    outer.add_module("model", net())
    with pytest.raises(BadSource, match=r"fit without the model's 'model\.'"):
        fit(_as_checkpoint(state), outer)


def test_a_tensor_is_in_memory_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if loading reads all tensors of a checkpoint before copying the first tensor."""
    state = dict(net().state_dict())
    alive: list[str] = []
    most = 0

    def lazily(name: str, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            nonlocal most
            import weakref

            copy = value.clone()
            alive.append(name)
            most = max(most, len(alive))
            weakref.finalize(copy, alive.remove, name)
            return copy

        return read

    tensors = {n: LazyTensor(shape=tuple(v.shape), read=lazily(n, v)) for n, v in state.items()}
    checkpoint = Checkpoint(format="test", path=Path("test.pt"), tensors=tensors, files=())
    monkeypatch.setattr("accel.sources.torch.weights.open_checkpoint", lambda _: checkpoint)
    module = net()
    load_weights(module, Path("test.pt"))
    equals(module, state)
    assert 1 <= most <= 2
