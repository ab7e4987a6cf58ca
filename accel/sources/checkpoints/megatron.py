"""Merges the shards of Megatron's checkpoints into whole tensors. Reads torch_dist folders, and the older layout with
one folder per rank.

    FOLDER/latest_checkpointed_iteration.txt: the number of the iteration to read, here 2.
    FOLDER/iter_0000002/metadata.json, .metadata, *.distcp: torch_dist format, with whole tensors and stacked layers.
    FOLDER/iter_0000002/mp_rank_TT[_PPP]/model_optim_rng.pt: tensor-parallel rank TT, pipeline stage PPP.

Megatron shards column-parallel weights along axis 0 and row-parallel weights along axis 1. The name of a weight tells
whether it is column-parallel or row-parallel. A tensor that Megatron doesn't shard must be equal on every rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel.errors import BadSource, InvalidModel

from .checkpoint import Checkpoint, LazyTensor
from .dcp import read_pieces, same, shards
from .unpickle import Record, read_torch

LATEST = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?$")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_EXPERTS = re.compile(r"\.(local_)?experts\.")
_STACKED = re.compile(r"^(.*\blayers)\.(?!\d)(.*)$")
_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.*)$")
_QKV = re.compile(r"\b(query_key_value|linear_qkv)\.(weight|bias)$")
_GATED = re.compile(r"\b(dense_h_to_4h|linear_fc1)\.(weight|bias)$")
_COLUMN = re.compile(
    r"\b((query_key_value|linear_qkv|dense_h_to_4h|linear_fc1|query|key_value|linear_q|linear_kv)\.(weight|bias)"
    r"|(word_embeddings|word_embeddings_for_head|output_layer|lm_head)\.weight|(output_layer|lm_head)\.bias)$"
)
_ROW = re.compile(r"\b((linear_proj|linear_fc2|dense_4h_to_h)\.weight|(self_attention|attention)\.dense\.weight)$")
# The two possible prefixes of each norm before a linear layer. In each pair, Transformer Engine uses the first prefix,
# because it fuses the norm with the linear layer.
_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def detect(path: Path) -> bool:
    """Tells whether ``path`` is a folder of iterations or the folder of one iteration."""
    return path.is_dir() and ((path / LATEST).is_file() or _is_torch_dist(path) or bool(_rank_folders(path)))


def _is_torch_dist(path: Path) -> bool:
    try:
        return "sharded_backend" in json.loads((path / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _rank_folders(path: Path) -> dict[tuple[int, int], Path]:
    """Maps each (tensor-parallel rank, pipeline stage) to the folder of this rank."""
    found = {}
    for folder in path.iterdir():
        match = _RANK.match(folder.name)
        if match and folder.is_dir():
            if match.group(3):
                raise BadSource(
                    f"{path} is a mixture of experts, which accel can't read; convert it with Megatron's own scripts"
                )
            found[int(match.group(1)), int(match.group(2) or 0)] = folder
    return found


def read(path: Path) -> Checkpoint:
    """Reads the weights and joins the shards of all ranks."""
    folder, files = path, tuple[Path, ...]()
    if (path / LATEST).is_file():
        files = (path / LATEST,)
        text = (path / LATEST).read_text(encoding="utf-8", errors="replace").strip()[:40]
        if text != "release" and not text.isdecimal():
            raise InvalidModel(
                f"{path / LATEST} holds the text {text!r}, which is not an iteration number; give the folder of an "
                "iteration"
            )
        folder = path / (text if text == "release" else f"iter_{int(text):07d}")
        if not folder.is_dir():
            there = ", ".join(sorted(f.name for f in path.iterdir() if f.is_dir())) or "none"
            raise BadSource(
                f"{path / LATEST} names the folder {folder.name}, which does not exist; give one of the existing "
                f"folders: {there}"
            )
    ranks = _rank_folders(folder)
    if not ranks and not _is_torch_dist(folder):
        raise InvalidModel(f"{folder} has neither metadata.json nor mp_rank_XX folders; copy the whole folder")
    tensors, read_files, notes, spare = _legacy(folder, ranks) if ranks else _torch_dist(folder)
    expert = next((name for name in tensors if _EXPERTS.search(name)), None)
    if expert is not None:
        raise BadSource(
            f"{folder} is a mixture of experts ({expert}), which accel can't read; convert it with Megatron's scripts"
        )
    for name in list(tensors):
        for fused, own in _NORMS:
            for old, new in ((fused, own), (own, fused)):
                other = name.replace(old, new)
                if other != name and other not in tensors:
                    tensors[other] = tensors[name]
                    spare |= {name, other}
    return Checkpoint(
        format="Megatron, one folder a rank" if ranks else "Megatron torch_dist",
        path=path,
        tensors=tensors,
        files=(*files, *read_files),
        notes=(f"iteration folder {folder.name}", *notes),
        spare=frozenset(spare),
    )


Parts = tuple[dict[str, LazyTensor], tuple[Path, ...], tuple[str, ...], set[str]]


def _torch_dist(folder: Path) -> Parts:
    """Reads a torch_dist folder. In a torch_dist folder, tensors are unsharded, and stacked layers form one tensor with
    the layers on axis 0."""
    backend = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["sharded_backend"]
    if backend != "torch_dist":
        raise BadSource(f"{folder} is in Megatron's {backend} format; save it with --ckpt-format torch_dist")
    found = read_pieces(folder)
    masters = "optimizer.state.fp32_param."
    model = {n: p for n, p in found.items() if not n.startswith(("optimizer.", "rng_state", "rerun_state"))}
    better = {n: found[masters + n] for n, p in model.items() if same(found.get(masters + n), p)}
    used = {**model, **better}
    tensors: dict[str, LazyTensor] = {}
    for name, pieces in used.items():
        match = _STACKED.match(name)
        if match is None:
            tensors[name] = LazyTensor(shape=pieces.shape, read=pieces.read)
            continue
        for layer in range(pieces.shape[0]):
            whole = f"{match.group(1)}.{layer}.{match.group(2)}"
            tensors[whole] = LazyTensor(shape=pieces.shape[1:], read=partial(pieces.read, layer))
    low = {str(p.dtype).removeprefix("torch.") for n, p in model.items() if p.dtype.itemsize < 4 and n not in better}
    notes = [f"{len(better)} float32 master weights were taken"] if better else []
    notes += [f"parameters in {', '.join(sorted(low))} were taken as saved"] if low else []
    return tensors, (folder / "metadata.json", *shards(folder, list(used.values()))), tuple(notes), set()


def _legacy(folder: Path, ranks: Mapping[tuple[int, int], Path]) -> Parts:
    files = {place: _file(rank) for place, rank in sorted(ranks.items())}
    fix = "save it without the optimizer and objects of your own: only weights, args and numbers are read"
    bodies = {place: read_torch(file, fix=fix) for place, file in files.items()}
    first = bodies[min(bodies)]
    if not isinstance(first, dict) or not any(key in first for key in ("model", "model0")):
        raise InvalidModel(f"{files[min(files)]} has no key 'model', so Megatron did not write it; give another folder")
    arguments = first.get("args")
    said = arguments.get if isinstance(arguments, Record) else (lambda _, default=None: default)
    across = int(said("tensor_model_parallel_size") or max(t for t, _ in ranks) + 1)
    stages = int(said("pipeline_model_parallel_size") or max(p for _, p in ranks) + 1)
    for stage in range(stages):
        for rank in range(across):
            if (rank, stage) not in ranks:
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
                raise InvalidModel(
                    f"the folder {folder} lacks the folder {name} (the checkpoint has {across} x {stages} ranks); copy "
                    "the missing folder there"
                )
    if len(ranks) > across * stages:
        raise InvalidModel(
            f"{folder} holds the files of {len(ranks)} ranks, but the checkpoint has only {across * stages} ranks; "
            "copy the checkpoint to an empty folder"
        )
    iterations = {body.get("iteration") for body in bodies.values()}
    if len(iterations) > 1:
        found = " and ".join(map(str, sorted(iterations, key=str)))
        raise InvalidModel(f"{folder} mixes files of the iterations {found}; copy one checkpoint to an empty folder")
    join = _Joining(folder=folder, version=float(first.get("checkpoint_version") or 0), said=said)
    tensors: dict[str, LazyTensor] = {}
    first_layer = 0
    chunks = sorted((key for key in first if re.fullmatch(r"model\d*", str(key))), key=lambda k: int(k[5:] or 0))
    for chunk in chunks:  # in an interleaved schedule, each rank has several chunks of layers
        for stage in range(stages):
            parts = [dict(_flat(bodies[rank, stage].get(chunk))) for rank in range(across)]
            layers = set()
            for name in parts[0]:
                if any(name not in part for part in parts):
                    raise InvalidModel(
                        f"{folder}: the tensor {name!r} is not on every tensor-parallel rank; copy the folder again"
                    )
                match, whole = _LAYER.match(name), name
                if match:
                    layers.add(int(match.group(2)))
                    whole = f"{match.group(1)}.{int(match.group(2)) + first_layer}.{match.group(3)}"
                if whole not in tensors:
                    tensors[whole] = join(name, [part[name] for part in parts])
            first_layer += len(layers)
    spare = set()
    # The last pipeline stage has its own copy of tied weights.
    if stages > 1 and not said("untie_embeddings_and_output_weights"):
        spare = {n for n in tensors if n.endswith(("word_embeddings_for_head.weight", "output_layer.weight"))}
    kinds = {part.dtype for body in bodies.values() for key in chunks for _, part in _flat(body.get(key))}
    low = sorted(str(kind).removeprefix("torch.") for kind in kinds if kind.itemsize < 4)
    notes = [f"joined from {across} tensor-parallel x {stages} pipeline ranks", *join.notes]
    notes += (
        [f"parameters in {', '.join(low)} were taken as saved: master weights are read from torch_dist only"]
        if low
        else []
    )
    return tensors, tuple(files.values()), tuple(notes), spare


def _file(folder: Path) -> Path:
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise InvalidModel(f"the folder {folder} lacks the file {_FILES[0]}; copy the file there")
    return file


def _flat(body: Any, front: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of nested dicts, with their keys joined by dots."""
    for key, value in body.items() if isinstance(body, Mapping) else ():
        if isinstance(value, torch.Tensor) and not str(key).endswith("_extra_state"):
            yield f"{front}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{front}{key}.")


class _Joining:
    """Concatenates the shards of a tensor from the tensor-parallel ranks."""

    def __init__(self, *, folder: Path, version: float, said: Callable[..., Any]) -> None:
        self.folder = folder
        self.version = version
        self.gated = bool(said("swiglu") or said("gated_linear_unit"))
        self.heads = int(said("num_attention_heads") or 0)
        self.notes: list[str] = []

    def __call__(self, name: str, parts: Sequence[torch.Tensor]) -> LazyTensor:
        if len({(part.dtype, part.ndim) for part in parts}) > 1:
            raise InvalidModel(
                f"{self.folder}: the ranks store the tensor {name!r} with different dtypes or numbers of dims; "
                "copy the folder again"
            )
        if _QKV.search(name) and self.version < 2:
            return self._old_qkv(parts)
        axis = 0 if _COLUMN.search(name) else 1 if _ROW.search(name) else None
        if axis is None:
            if any(not torch.equal(parts[0], part) for part in parts[1:]):
                raise BadSource(
                    f"{self.folder}: the tensor {name!r} differs between the tensor-parallel ranks, and accel doesn't "
                    "know how Megatron cuts this layer; merge the checkpoint with Megatron's own scripts and give the "
                    "result"
                )
            return LazyTensor.of(parts[0])
        shape = list(parts[0].shape)
        if axis >= len(shape):
            raise InvalidModel(
                f"{self.folder}: the tensor {name!r} has the shape {shape} and can't be joined along axis {axis}; copy "
                "the folder again"
            )
        if any(
            [n for i, n in enumerate(part.shape) if i != axis] != shape[:axis] + shape[axis + 1 :] for part in parts
        ):
            raise InvalidModel(
                f"{self.folder}: the parts of the tensor {name!r} don't fit together; copy the folder again"
            )
        shape[axis] = sum(part.shape[axis] for part in parts)
        return LazyTensor(
            shape=tuple(shape), read=partial(_join, parts, axis, self.gated and _GATED.search(name) is not None)
        )

    def _old_qkv(self, parts: Sequence[torch.Tensor]) -> LazyTensor:
        """Concatenates the shards of a fused QKV weight of an old checkpoint, and reorders the rows to the current
        order, [heads, 3, head]. Checkpoint version 0 has the row order [3, heads, head], and version 1 has [heads,
        head, 3].
        """
        if (
            not self.heads
            or self.heads % len(parts)
            or any(part.shape[0] % (3 * self.heads // len(parts)) for part in parts)
        ):
            raise BadSource(
                f"{self.folder} has the checkpoint version {self.version:g} and doesn't record its number of heads; "
                "convert it with Megatron's own scripts"
            )
        note = f"query, key and value were put into today's order (checkpoint version {self.version:g})"
        self.notes += [note] if note not in self.notes else []
        own, version = self.heads // len(parts), self.version

        def read() -> torch.Tensor:
            turned = []
            for part in parts:
                rest = part.shape[1:]
                if version < 1:
                    rows = part.reshape(3, own, -1, *rest).transpose(0, 1)
                else:
                    rows = part.reshape(own, -1, 3, *rest).transpose(1, 2)
                turned.append(rows.reshape(part.shape))
            return torch.cat(turned)

        return LazyTensor(shape=(sum(part.shape[0] for part in parts), *parts[0].shape[1:]), read=read)


def _join(parts: Sequence[torch.Tensor], axis: int, gated: bool) -> torch.Tensor:
    if not gated:
        return torch.cat(list(parts), dim=axis)
    halves = [part.chunk(2) for part in parts]  # each rank's part begins with its shard of the gate
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
