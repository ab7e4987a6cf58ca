"""Reads folders of torch.distributed.checkpoint, as written by torchtitan, by accel train, and by FSDP in Accelerate,
Lightning and Fabric.

Each piece of a tensor is a small torch file inside a shard. The pickle file ``.metadata`` gives the shard, offset and
length of each piece. The module ``unpickle`` reads ``.metadata`` without executing code. Each piece is then copied into
the whole tensor.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel.errors import BadSource, InvalidModel

from .checkpoint import Checkpoint, LazyTensor
from .unpickle import is_record, read_pickle

METADATA = ".metadata"
# Matches the names of checkpoint entries that aren't part of the model, such as optimizer states.
_TRAINING = re.compile(
    r"^(optim(izer)?s?|lr_schedulers?|schedulers?|dataloader|train_state|scaler|rng\w*|loss_scale|compression)\b"
)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One piece of a tensor, with its position in the tensor (``offsets``, ``sizes``) and in a file (``start``,
    ``length``)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A whole tensor in pieces."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def read(self, row: int | None = None) -> torch.Tensor:
        """Assembles the tensor piece by piece. With ``row``, assembles only the values at index ``row`` of the first
        axis."""
        whole = torch.empty(self.shape if row is None else self.shape[1:], dtype=self.dtype)
        for piece in self.pieces:
            if row is not None and not piece.offsets[0] <= row < piece.offsets[0] + piece.sizes[0]:
                continue
            found = _read_piece(piece, self.name)
            if tuple(found.shape) != piece.sizes or found.dtype != self.dtype:
                raise InvalidModel(
                    f"{piece.file} holds the tensor {self.name!r} with dtype {found.dtype} and shape "
                    f"{list(found.shape)}, but {METADATA} declares dtype {self.dtype} and shape {list(piece.sizes)}; "
                    "the files come from different checkpoints, so copy the whole folder again"
                )
            slices = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            if row is None:
                whole[slices].copy_(found)
            else:
                whole[slices[1:]].copy_(found[row - piece.offsets[0]])
        return whole


def detect(path: Path) -> bool:
    """Tells whether the folder ``path`` or one of its step folders has ``.metadata`` or shards."""
    return path.is_dir() and (_is_one(path) or bool(_steps(path)))


def _is_one(path: Path) -> bool:
    return (path / METADATA).is_file() or any(path.glob("*.distcp"))


def _steps(path: Path) -> list[Path]:
    """Returns the folders ``step-N`` in ``path``, ``path/checkpoint`` and ``path/checkpoints``, oldest first."""
    found = [f for base in (path, path / "checkpoint", path / "checkpoints") for f in base.glob("step-*") if _is_one(f)]
    return sorted((f for f in found if f.name[5:].isdigit()), key=lambda f: int(f.name[5:]))


def read(path: Path) -> Checkpoint:
    """Reads the tensors of the folder. Reads only the newest step if the folder has a subfolder per step."""
    notes: tuple[str, ...] = ()
    if not _is_one(path):
        steps = _steps(path)
        path = steps[-1]
        notes = (f"the newest of {len(steps)} steps: {path.name}",)
    found = read_pieces(path)
    spare = frozenset(name for name in found if _TRAINING.match(name))
    model = {name: pieces for name, pieces in found.items() if name not in spare}
    masters = {name: found[own] for name in model if (own := _master(name)) in found and same(found[own], model[name])}
    if masters:
        notes = (*notes, f"{len(masters)} float32 master weights were taken")
    used = {**found, **masters}
    return Checkpoint(
        format="torch.distributed.checkpoint",
        path=path,
        tensors={n: LazyTensor(shape=p.shape, read=p.read) for n, p in used.items()},
        files=shards(path, [p for n, p in used.items() if n not in spare] or list(found.values())),
        notes=notes,
        spare=spare,
        rounded=frozenset(n for n, p in model.items() if n not in masters and masters and p.dtype.itemsize < 4),
    )


def _master(name: str) -> str:
    """Returns the name that ``accel train`` gives to the master weights of the parameter ``name``."""
    return f"optimizer.{name.removeprefix('model.')}.master"


def same(master: Pieces | None, model: Pieces) -> bool:
    """Tells whether ``master`` holds the master weights of the parameter ``model``, which has a smaller dtype."""
    return master is not None and master.shape == model.shape and master.dtype == torch.float32 != model.dtype


def shards(path: Path, found: Sequence[Pieces]) -> tuple[Path, ...]:
    """Returns the paths of ``.metadata`` and of the shards that hold the tensors ``found``."""
    return (path / METADATA, *sorted({piece.file for pieces in found for piece in pieces.pieces}))


def read_pieces(path: Path) -> dict[str, Pieces]:
    """Reads the pieces of every tensor from ``.metadata`` and checks their offsets against the sizes of the shards.

    Raises ``InvalidModel`` if the folder is incomplete or its files are inconsistent.
    """
    metadata = path / METADATA
    if not metadata.is_file():
        raise InvalidModel(
            f"{path} has no {METADATA}: the save did not finish, or the file was not copied; give a complete checkpoint"
        )
    try:
        return _pieces(path, read_pickle(metadata))
    except (TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
        raise InvalidModel(
            f"{metadata} is no metadata of torch.distributed.checkpoint; save the checkpoint again"
        ) from error


def _pieces(path: Path, body: Any) -> dict[str, Pieces]:
    if not is_record(body, "Metadata") or not isinstance(body.get("storage_data"), dict):
        raise ValueError("no Metadata")
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in body.get("storage_data").items():
        places[str(index.get("fqn")), _sizes(index.get("offset") or ())] = info
    lengths: dict[Path, int] = {}
    found: dict[str, Pieces] = {}
    for name, entry in body.get("state_dict_metadata").items():
        if not is_record(entry, "TensorStorageMetadata"):
            continue  # the entry is no tensor (a step count, for example)
        shape, dtype = _sizes(entry.get("size")), entry.get("properties").state[0]
        if not isinstance(dtype, torch.dtype):
            raise ValueError("no dtype")
        pieces = []
        for chunk in entry.get("chunks"):
            offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
            if len(offsets) != len(shape) or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
                raise InvalidModel(
                    f"{path / METADATA} puts a piece of the tensor {name!r} outside the tensor's shape; save the "
                    "checkpoint again"
                )
            info = places.get((name, offsets), places.get((name, ())) if not any(offsets) else None)
            if info is None:
                raise InvalidModel(
                    f"{path / METADATA} names no file for a piece of the tensor {name!r}; save the checkpoint again"
                )
            if info.get("transform_descriptors"):
                raise BadSource(
                    f"{path} is compressed ({info.get('transform_descriptors')[0]}); save it with a writer that has "
                    "no extensions"
                )
            file = path / str(info.get("relative_path"))
            if file.parent != path:
                raise InvalidModel(
                    f"{path / METADATA} points to the file {file} outside the checkpoint's folder; save the "
                    "checkpoint again"
                )
            start, length = int(info.get("offset")), int(info.get("length"))
            if file not in lengths:
                if not file.is_file():
                    raise InvalidModel(
                        f"the folder {path} lacks the file {file.name}, which holds a part of the tensor {name!r}; "
                        "copy the file there"
                    )
                lengths[file] = file.stat().st_size
            if start < 0 or length < 0 or start + length > lengths[file]:
                raise InvalidModel(f"{file} is truncated ({lengths[file]} bytes); copy it again")
            pieces.append(Piece(offsets=offsets, sizes=sizes, file=file, start=start, length=length))
        _check_covered(path, name, shape, pieces)
        found[str(name)] = Pieces(name=str(name), shape=shape, dtype=dtype, pieces=tuple(pieces))
    return found


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("no sizes")
    return sizes


def _check_covered(path: Path, name: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    """Raises ``InvalidModel`` if the pieces don't add up to the size of the tensor."""
    distinct = {piece.offsets: torch.Size(piece.sizes).numel() for piece in pieces if 0 not in piece.sizes}
    if sum(distinct.values()) != torch.Size(shape).numel() and 0 not in shape:
        raise InvalidModel(
            f"{path / METADATA} lists only {sum(distinct.values())} of the {torch.Size(shape).numel()} numbers of the "
            f"tensor {name!r}; a rank's part is missing, so give a complete checkpoint"
        )


def _read_piece(piece: Piece, name: str) -> torch.Tensor:
    with piece.file.open("rb") as file:
        file.seek(piece.start)
        data = file.read(piece.length)
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadSource(
            f"{piece.file} holds more than a tensor for the entry {name!r}; accel refuses to unpickle this file"
        ) from error
    except Exception as error:  # torch raises errors of many types on damaged bytes
        raise InvalidModel(f"{piece.file} holds damaged bytes for the tensor {name!r}; copy the file again") from error
    if not isinstance(found, torch.Tensor):
        raise InvalidModel(f"{piece.file} holds no tensor for the entry {name!r}; save the checkpoint again")
    return found.detach()
