"""Proves that wrong checkpoints give a one-line error, and that no code in the files runs. The checkpoints are damaged,
hostile, mixed from two saves, or of another model."""

from __future__ import annotations

import builtins
import collections
import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.errors import AccelError, BadSource, InvalidModel, UsageError
from accel.sources.checkpoints.checkpoint import open_checkpoint
from accel.sources.checkpoints.unpickle import Record, read_pickle, read_torch
from accel.sources.python_object import load_object
from accel.sources.torch.weights import load_weights

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
NET = f"{HERE / 'checkpoint_net.py'}:make"
ZERO1 = "deepspeed/zero1_bf16/global_step2"
ZERO3 = "deepspeed/zero3_bf16/global_step2"
TORCH_DIST = "megatron/torch_dist/iter_0000002"
LEGACY = "megatron/legacy/iter_0000002"


def net() -> torch.nn.Module:
    made: torch.nn.Module = load_object(NET, "factory")[1]()
    return made


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Copies the recordings, so that a test may damage them."""
    shutil.copytree(RECORDED, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


@pytest.fixture
def plain_dcp(tmp_path: Path) -> Path:
    """Makes a folder of torch.distributed.checkpoint from one process."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": dict(net().state_dict())}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


class Payload:
    """Makes the file ``mark`` when an object of this class is unpickled. ``way`` selects the function that the pickle
    calls."""

    def __init__(self, way: str, mark: Path) -> None:
        self.way, self.mark = way, mark

    def __reduce__(self) -> tuple[Any, ...]:
        code = f"open({str(self.mark)!r}, 'w').close()"
        return {
            "system": (os.system, (f"touch '{self.mark}'",)),
            "touch": (Path.touch, (self.mark,)),
            "exec": (builtins.exec, (code,)),
            "eval": (builtins.eval, (code,)),
            "getattr": (builtins.getattr, (self.mark, "touch")),
            "load": (torch.load, (self.mark,)),
        }[self.way]


class Own:
    """Stands for a class in the user's own code."""


WAYS = ["system", "touch", "exec", "eval", "getattr", "load"]


@pytest.mark.parametrize("way", WAYS)
def test_code_in_a_pickle_never_runs(recorded: Path, plain_dcp: Path, tmp_path: Path, way: str) -> None:
    """Checks that accel refuses a file with a planted payload, and doesn't run the payload."""
    mark = tmp_path / "ran"
    payload = Payload(way, mark)

    def zipped(file: Path) -> Path:
        """Rewrites the archive, and adds the payload to its contents."""
        body = torch.load(file, weights_only=False) if "deepspeed" not in str(file) else {"module": {}}
        torch.save({**body, "extra": payload}, file)
        return file

    places: list[tuple[Path, Path]] = [
        (zipped(recorded / ZERO1 / "mp_rank_00_model_states.pt"), recorded / "deepspeed/zero1_bf16"),
        (zipped(recorded / ZERO3 / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), recorded / ZERO3),
        (zipped(recorded / LEGACY / "mp_rank_01" / "model_optim_rng.pt"), recorded / "megatron/legacy"),
        (zipped(recorded / "accelerate/state_bin/pytorch_model.bin"), recorded / "accelerate/state_bin"),
        (zipped(recorded / "lightning/fabric.ckpt"), recorded / "lightning/fabric.ckpt"),
    ]
    (recorded / TORCH_DIST / ".metadata").write_bytes(pickle.dumps({"a": payload}))
    places.append((recorded / TORCH_DIST / ".metadata", recorded / "megatron/torch_dist"))
    (plain_dcp / ".metadata").write_bytes(pickle.dumps(payload, protocol=2))
    places.append((plain_dcp / ".metadata", plain_dcp))
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps(payload))
    places.append((bare, bare))
    for file, checkpoint in places:
        with pytest.raises(BadSource, match="refuses to unpickle") as caught:
            load_weights(net(), checkpoint)
        assert file.name in str(caught.value)
        assert not mark.exists(), f"the code in {file} ran ({way})"


def test_code_in_a_shard_never_runs(plain_dcp: Path, tmp_path: Path) -> None:
    """Fails if accel runs code in a tensor of a shard. Each tensor in a .distcp file is a separate pickle."""
    mark = tmp_path / "ran"
    buffer = io.BytesIO()
    torch.save({"a": Payload("system", mark)}, buffer)
    shard = plain_dcp / "__0_0.distcp"
    metadata = pickle.loads((plain_dcp / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.up.weight")
    info.offset, info.length = shard.stat().st_size, len(buffer.getvalue())
    shard.write_bytes(shard.read_bytes() + buffer.getvalue())
    (plain_dcp / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadSource, match=r"__0_0\.distcp holds more than a tensor for the entry 'model\.up\.weight'"):
        load_weights(net(), plain_dcp)
    assert not mark.exists()


def test_only_listed_names_and_never_the_real_class(tmp_path: Path) -> None:
    """Checks that accel never makes an object of a class that a pickle names, not even of an allowed class. Making such
    an object would run the code of the class."""
    import argparse

    body = {"args": argparse.Namespace(a=1), "path": Path("x"), "meta": dcp.metadata.BytesStorageMetadata()}
    file = tmp_path / "metadata"
    file.write_bytes(pickle.dumps(body))
    read = read_pickle(file)
    assert all(isinstance(value, Record) for value in read.values())
    assert read["args"].get("a") == 1
    torch.save(body, tmp_path / "a.pt")
    before = set(torch.serialization.get_safe_globals())
    assert all(isinstance(value, Record) for value in read_torch(tmp_path / "a.pt").values())
    assert set(torch.serialization.get_safe_globals()) == before, "the list stays allowed after the file is read"


DAMAGES: list[tuple[str, str, Callable[[Path], Any], str]] = [
    ("deepspeed/zero1_bf16", ZERO1, lambda f: (f / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
     "lacks the file bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt of rank 1 .2 ranks."),
    ("deepspeed/zero3_bf16", ZERO3, lambda f: (f / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
     "lacks the file zero_pp_rank_1_mp_rank_00_model_states.pt of rank 1 .2 ranks."),
    ("deepspeed/zero1_bf16", ZERO1, lambda f: (f / "mp_rank_00_model_states.pt").unlink(), "the file mp_rank_00_model"),
    ("deepspeed/zero1_bf16", ZERO1, lambda f: [x.unlink() for x in f.glob("*optim*")], "lacks the ranks'"),
    ("deepspeed/zero1_bf16", ZERO1, lambda f: (f / "mp_rank_01_model_states.pt").touch(), "is model-parallel"),
    ("deepspeed/zero1_bf16", ZERO1, lambda f: (f / "layer_0_expert_0_mp_rank_00_model_states.pt").touch(), "experts"),
    ("deepspeed/zero1_bf16", ZERO1, lambda f: (f / "layer_00-model_00-model_states.pt").touch(), "pipeline engine"),
    ("deepspeed/zero1_bf16", ZERO1, lambda f: (f.parent / "latest").write_text("global_step9"), "tag 'global_step9'"),
    ("deepspeed/zero1_bf16", ZERO1, lambda f: (f.parent / "latest").write_text("../x"), "not a folder name"),
    ("deepspeed/zero1_bf16", ZERO1, lambda f: ((f.parent / "latest").unlink(), shutil.copytree(f, f.parent / "step9")),
     "several tags .global_step2, step9. and no file 'latest'"),
    ("deepspeed/zero1_bf16", ZERO1,
     lambda f: shutil.copy(f / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                           f / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"), "mixes files of different saves"),
    ("deepspeed/zero3_bf16", ZERO3, lambda f: _edit(f / "zero_pp_rank_1_mp_rank_00_model_states.pt", "global_steps", 9),
     "different saves .global steps: 2 and 9"),
    ("deepspeed/zero2_fp32", "deepspeed/zero2_fp32/global_step2", lambda f: _another_step(f),
     "different saves .steps: 2.0 and 5.0"),
    ("deepspeed/zero2_fp32", "deepspeed/zero2_fp32/global_step2", lambda f: _shorter(f), "holds .* its shapes need"),
    ("megatron/legacy", LEGACY, lambda f: shutil.rmtree(f / "mp_rank_01"),
     "lacks the folder mp_rank_01 .the checkpoint has 2 x 1"),
    ("megatron/legacy", LEGACY, lambda f: (f / "mp_rank_01" / "model_optim_rng.pt").unlink(), "file model_optim_rng"),
    ("megatron/legacy", LEGACY, lambda f: _edit(f / "mp_rank_01" / "model_optim_rng.pt", "iteration", 9), "mixes"),
    ("megatron/legacy", LEGACY, lambda f: shutil.rmtree(f), "names the folder iter_0000002, which does not exist"),
    ("megatron/legacy", LEGACY, lambda f: (f.parent / "latest_checkpointed_iteration.txt").write_text("../2"),
     "which is not an iteration number"),
    ("megatron/legacy", LEGACY, lambda f: _unknown(f), "'decoder.mystery.weight' differs between the tensor-parallel"),
    ("megatron/torch_dist", TORCH_DIST, lambda f: (f / ".metadata").unlink(),
     "has no .metadata: the save did not finish"),
    ("megatron/torch_dist", TORCH_DIST, lambda f: (f / "__1_0.distcp").unlink(), "lacks the file __1_0.distcp"),
    ("megatron/torch_dist", TORCH_DIST, lambda f: os.truncate(f / "__1_0.distcp", 900), "is truncated .900 bytes"),
    ("megatron/torch_dist", TORCH_DIST, lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
     "zarr format"),
    ("accelerate/state", "accelerate/state", lambda f: (f / "model_1.safetensors").touch(), "holds several models"),
    ("accelerate/sharded", "accelerate/sharded", lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
     "names the shard model-00002-of-00002"),
]  # fmt: skip


def _edit(file: Path, key: str, value: object) -> None:
    from accel.sources.checkpoints.unpickle import _listed

    with _listed():
        body = torch.load(file, weights_only=True)
    torch.save({k: v for k, v in {**body, key: value}.items() if k not in ("args", "ds_config")}, file)


def _another_step(folder: Path) -> None:
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = read_torch(file)["optimizer_state_dict"]
    base = state["base_optimizer_state"]
    parts = base["state"].values() if isinstance(base["state"], dict) else base["state"]
    for part in parts:
        part["step"] = torch.tensor(5.0)
    _rewrite(file, state)


def _shorter(folder: Path) -> None:
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = read_torch(file)["optimizer_state_dict"]
    state["single_partition_of_fp32_groups"] = [g[:-8].clone() for g in state["single_partition_of_fp32_groups"]]
    _rewrite(file, state)


def _rewrite(file: Path, state: dict[str, Any]) -> None:
    names = ("base_optimizer_state", "single_partition_of_fp32_groups", "partition_count")
    kept = {name: state[name] for name in names}
    file.unlink()  # overwriting the file would change the tensors in ``state``, which are mapped from the file
    torch.save({"optimizer_state_dict": {**kept, "zero_stage": 2}}, file)


def _unknown(folder: Path) -> None:
    for rank in (0, 1):
        file = folder / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        body = read_torch(file)
        model = {n: t.clone() for n, t in body["model"].items() if isinstance(t, torch.Tensor)}
        model["decoder.mystery.weight"] = torch.full((2,), float(rank))
        file.unlink()
        torch.save({"model": model, "iteration": 2, "checkpoint_version": 3.0}, file)


@pytest.mark.parametrize(("checkpoint", "place", "damage", "words"), DAMAGES, ids=[d[3][:40] for d in DAMAGES])
def test_what_is_missing_or_mixed_is_named(
    recorded: Path, checkpoint: str, place: str, damage: Callable[[Path], Any], words: str
) -> None:
    """Fails if accel accepts a checkpoint without all of its shards, or with a shard from another save."""
    damage(recorded / place)
    with pytest.raises(UsageError, match=words) as caught:
        load_weights(net(), recorded / checkpoint)
    assert "\n" not in str(caught.value)


FILES = sorted(f.relative_to(RECORDED) for f in RECORDED.rglob("*") if f.is_file() and f.name != "expected.safetensors")


def read_all(checkpoint: Path) -> None:
    for tensor in open_checkpoint(checkpoint).tensors.values():
        tensor.read()


@pytest.mark.parametrize("file", FILES, ids=str)
def test_truncated_and_empty_files(recorded: Path, file: Path) -> None:
    """Checks that an empty or truncated file raises an accel error."""
    checkpoint = recorded / Path(*file.parts[:2])
    data = (RECORDED / file).read_bytes()
    unread = ("common.pt", "latest_checkpointed_iteration.txt", "latest")
    for length in (0, 1, len(data) // 3, len(data.rstrip()) - 1):
        (recorded / file).write_bytes(data[:length])
        if file.name in unread:
            continue
        with pytest.raises(AccelError):
            read_all(checkpoint)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_metadata_with_flipped_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """After random changes in the bytes of the metadata, accel must open the checkpoint or raise an accel error."""
    good = (RECORDED / TORCH_DIST / ".metadata").read_bytes()
    folder = tmp_path_factory.getbasetemp() / "flipped"
    if not folder.is_dir():
        shutil.copytree(RECORDED / TORCH_DIST, folder)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    (folder / ".metadata").write_bytes(bad)
    try:
        for tensor in open_checkpoint(folder).tensors.values():
            assert sum(tensor.shape) < 10_000
    except AccelError:
        pass


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pickles_of_ranks_with_flipped_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """After random changes in the bytes of a rank's file, accel must open the checkpoint or raise an accel error. The
    test changes only the pickle in the file, because accel can't notice changed numbers in tensors."""
    place, file = data.draw(
        st.sampled_from(
            [
                ("deepspeed/zero1_bf16", f"{ZERO1}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
                ("deepspeed/zero3_bf16", f"{ZERO3}/zero_pp_rank_0_mp_rank_00_model_states.pt"),
                ("megatron/legacy", f"{LEGACY}/mp_rank_01/model_optim_rng.pt"),
            ]
        )
    )
    base = tmp_path_factory.getbasetemp() / "ranks"
    if not base.is_dir():
        shutil.copytree(RECORDED, base)
    # Writes the archive anew, so that its checksums match the changed bytes.
    with zipfile.ZipFile(RECORDED / file) as old, zipfile.ZipFile(base / file, "w") as new:
        for info in old.infolist():
            bad = bytearray(old.read(info))
            for _ in range(data.draw(st.integers(1, 3)) if info.filename.endswith("data.pkl") else 0):
                bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
            new.writestr(info.filename, bytes(bad))
    try:
        read_all(base / place)
    except AccelError:
        pass
    finally:
        shutil.copy(RECORDED / file, base / file)


def test_dicts_and_classes_of_trainers(tmp_path: Path) -> None:
    """Fails if a checkpoint with a defaultdict is refused, or if a checkpoint with a class of the user is accepted.
    Also checks that the error names the user's class."""
    file = tmp_path / "a.ckpt"
    state = {"state_dict": dict(net().state_dict())}
    torch.save({**state, "hyper_parameters": collections.defaultdict(dict, {"a": {"b": 1}})}, file)
    assert read_torch(file)["hyper_parameters"] == {"a": {"b": 1}}
    load_weights(net(), file)
    file = tmp_path / "old.ckpt"
    torch.save(state, file, _use_new_zipfile_serialization=False)
    load_weights(net(), file)
    file = tmp_path / "own.ckpt"
    torch.save({**state, "hyper_parameters": Own()}, file)
    with pytest.raises(BadSource, match=r"holds more than weights \(\S*Own\)"):
        load_weights(net(), file)


def test_checkpoints_of_other_models(recorded: Path, plain_dcp: Path) -> None:
    """Checks that accel refuses the weights of another model, and that the error names the difference."""
    other = torch.nn.Sequential(torch.nn.Linear(3, 2))
    for folder in ("deepspeed/zero3_bf16", "megatron/legacy", "lightning/trainer.ckpt", "accelerate/state"):
        with pytest.raises(BadSource, match=r"lacks '0\.weight' \(2 missing, \d+ unexpected"):
            load_weights(other, recorded / folder)
    with pytest.raises(BadSource, match=r"lacks '0\.weight'"):
        load_weights(other, plain_dcp)
    smaller = net()
    smaller.up = torch.nn.Linear(5, 6)
    with pytest.raises(BadSource, match=r"'up.weight' has the shape \[7, 5\], but the model needs \[6, 5\]"):
        load_weights(smaller, recorded / "deepspeed/zero2_fp32")
    whole = net()
    whole.version = torch.tensor(1.5)
    with pytest.raises(BadSource, match=r"'version' has the dtype torch.int64 in .*, but the dtype torch.float32"):
        load_weights(whole, recorded / "deepspeed/zero2_fp32")


def test_paths_that_are_no_checkpoint(recorded: Path, tmp_path: Path, cli: Any) -> None:
    """Checks the error if the user passes a folder without a checkpoint, the file of one rank, or a checkpoint without
    the model's code. The error must name the fix and have no traceback."""
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadSource, match="is no checkpoint that accel reads"):
        load_weights(net(), empty)
    (empty / "__0_0.distcp").touch()
    with pytest.raises(InvalidModel, match=r"has no \.metadata"):
        load_weights(net(), empty)
    share = recorded / ZERO3 / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    with pytest.raises(BadSource, match="one rank's part of a checkpoint; give the checkpoint's folder"):
        load_weights(net(), share)
    ran = cli("export", recorded / "deepspeed/zero3_bf16", "-o", tmp_path / "a.onnx")
    assert ran.code == 2
    assert "weights and no code" in ran.stderr.replace("\n", " ")
    ran = cli("export", NET, "--weights", empty, "--input", "ids:int64[batch,3]{0..10}", "-o", tmp_path / "a.onnx")
    assert ran.code == 2
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "a.onnx").exists()


def test_metadata_that_points_elsewhere(plain_dcp: Path, tmp_path: Path) -> None:
    """Fails if the metadata can make accel read files outside the folder, or place shards outside their tensor."""
    metadata = pickle.loads((plain_dcp / ".metadata").read_bytes())
    (tmp_path / "__0_0.distcp").write_bytes((plain_dcp / "__0_0.distcp").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../__0_0.distcp"
    (plain_dcp / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InvalidModel, match=r"outside the checkpoint's folder; save the checkpoint again"):
        load_weights(net(), plain_dcp)
    for info in metadata.storage_data.values():
        info.relative_path = "__0_0.distcp"
    entry = metadata.state_dict_metadata["model.up.weight"]
    entry.chunks[0].sizes = torch.Size([70, 5])
    (plain_dcp / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InvalidModel, match=r"puts a piece of the tensor 'model\.up\.weight' outside"):
        load_weights(net(), plain_dcp)
    entry.chunks[0].sizes = torch.Size([6, 5])
    (plain_dcp / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InvalidModel, match=r"lists only 30 of the 35 numbers of the tensor 'model\.up\.weight'"):
        load_weights(net(), plain_dcp)


def test_a_whole_module_is_refused_at_once(cli: Any, tmp_path: Path) -> None:
    """Fails if the first message about a pickled module advises to pass the file as weights, which accel refuses, or if
    its advice fails when it is followed."""
    whole, weights = tmp_path / "whole.pt", tmp_path / "weights.pt"
    torch.save(torch.nn.Linear(3, 2), whole)
    ran = cli("export", whole, "-q", "-o", tmp_path / "m.onnx")
    assert ran.code == 2
    said = (
        "holds more than weights (torch.nn.modules.linear.Linear) or is no PyTorch file; save model.state_dict() alone"
    )
    assert said in ran.stderr
    assert "FILE.py:FACTORY with --weights WEIGHTS.pt" in ran.stderr
    torch.save(torch.nn.Linear(3, 2).state_dict(), weights)
    (tmp_path / "net.py").write_text("import torch\n\n\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    assert (
        "holds weights and no code; name the factory" in cli("export", weights, "-q", "-o", tmp_path / "m.onnx").stderr
    )
    factory = ["--weights", weights, "--input", "x:float32[batch,3]"]
    ran = cli("export", f"{tmp_path / 'net.py'}:make", *factory, "-q", "-o", tmp_path / "m.onnx")
    assert ran.code == 0, ran.stderr
