"""Reads the folders of DeepSpeed's ``save_checkpoint`` (ZeRO stages 0 to 3) and joins the shards of the ranks.

    FOLDER/latest: the name of the TAG to read.
    FOLDER/TAG/mp_rank_00_model_states.pt: names and shapes of the parameters, and the buffers (stages 0 to 2).
    FOLDER/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt: names and shapes of parameters, and buffers (stage 3).
    FOLDER/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt: rank R's part of the float32 master weights.

ZeRO stages 1 and 2 concatenate the parameters of each parameter group, and split the result into one shard per rank.
Stage 3 splits each parameter into shards of ceil(numel / ranks) numbers. The weights equal the output of DeepSpeed's
own ``zero_to_fp32`` bit for bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from accel.errors import BadSource, InvalidModel
from accel.spelling import option

from .checkpoint import Checkpoint, LazyTensor, part_of
from .unpickle import read_torch

LATEST = "latest"
_MODEL = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_OPTIMIZER = re.compile(r"^((?:bf16_)?zero_pp_rank_)(\d+)_mp_rank_(\d+)_optim_states\.pt$")


def detect(path: Path) -> bool:
    """Tells whether ``path`` is a folder of tags or the folder of one tag."""
    return path.is_dir() and ((path / LATEST).is_file() or _is_tag(path) or bool(_tags(path)))


def _is_tag(path: Path) -> bool:
    return any(path.glob("*_model_states.pt")) or any(path.glob("*_optim_states.pt"))


def _tags(path: Path) -> list[Path]:
    return sorted(f for f in path.iterdir() if f.is_dir() and _is_tag(f))


def _tag(path: Path) -> Path:
    """Returns the folder of the tag to read. If ``path`` itself isn't the folder of a tag, the file ``latest`` names
    the tag. Without the file ``latest``, ``path`` must hold only one tag."""
    if _is_tag(path):
        return path
    names = ", ".join(f.name for f in _tags(path)) or "none"
    if (path / LATEST).is_file():
        tag = (path / LATEST).read_text(encoding="utf-8", errors="replace").strip()[:200]
        if not tag or Path(tag).name != tag:
            raise InvalidModel(
                f"{path / LATEST} names the tag {tag!r}, which is not a folder name; give the folder of the tag"
            )
        if not (path / tag).is_dir() or not _is_tag(path / tag):
            raise BadSource(
                f"{path / LATEST} names the tag {tag!r}, which has no checkpoint; give the folder of one of these "
                f"tags: {names}"
            )
        return path / tag
    tags = _tags(path)
    if len(tags) > 1:
        raise BadSource(
            f"{path} has several tags ({names}) and no file 'latest'; name one tag: {option('weights', tags[-1])}"
        )
    return tags[0]


def _refuse_others(folder: Path) -> None:
    """Raises ``BadSource`` if the names of the files show expert, pipeline or model parallelism."""
    names = [file.name for file in folder.iterdir()]
    if any("expert" in name for name in names):
        raise BadSource(
            f"{folder} is a mixture of experts, which accel can't read; convert it with DeepSpeed's own scripts"
        )
    if any(name.startswith("layer_") and name.endswith("-model_states.pt") for name in names):
        raise BadSource(
            f"{folder} has the layout of DeepSpeed's pipeline engine, which accel can't read; "
            "save the model without the pipeline"
        )
    if any((m := _MODEL.match(name) or _OPTIMIZER.match(name)) and int(m.groups()[-1]) > 0 for name in names):
        raise BadSource(
            f"{folder} is model-parallel (it has mp_rank_01), and only the trainer knows how the parts join; "
            "merge the parts with the trainer's own script and give the result"
        )


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Holds the contents of all ranks' files for one tag."""

    folder: Path
    files: tuple[Path, ...]
    models: Sequence[Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]
    stage: int

    def bad(self, why: str) -> InvalidModel:
        return InvalidModel(f"{self.folder}: {why}; copy the checkpoint again, or save it again")


def read(path: Path) -> Checkpoint:
    """Reads the weights of the tag. Uses the float32 master weights wherever the checkpoint has them."""
    folder = _tag(path)
    _refuse_others(folder)
    shards = _open(folder)
    module: Mapping[str, Any] = shards.models[0]["module"]
    if not isinstance(module, Mapping):
        raise BadSource(
            f"{folder} has the layout of DeepSpeed's pipeline engine, which accel can't read; "
            "save the model without the pipeline"
        )
    notes = [f"tag {folder.name}"]
    if (path / LATEST).is_file():
        shards = Shards(**{**vars(shards), "files": (path / LATEST, *shards.files)})
    if shards.stage == 0:
        tensors = {str(n): LazyTensor.of(v) for n, v in module.items() if isinstance(v, torch.Tensor)}
        low = _low_precision(tensors[name].read() for name in tensors)
        if low:
            notes.append(f"the parameters are {low} as saved: only ZeRO's master weights are read")
        return Checkpoint(format="DeepSpeed", path=path, tensors=tensors, files=shards.files, notes=tuple(notes))
    buffers = set(shards.models[0]["buffer_names"])
    tensors = {
        str(name): LazyTensor.of(value.float() if value.is_floating_point() else value)
        for name, value in module.items()
        if name in buffers
    }
    tensors |= _frozen(shards) | (_stage_3(shards) if shards.stage == 3 else _stages_1_and_2(shards))
    for alias, name in dict(shards.models[0].get("shared_params") or {}).items():
        if name in tensors:
            tensors[alias] = tensors[name]
    if shards.stage < 3:  # ZeRO stage 1 stores frozen parameters only in the state dict
        rest = {str(n): v for n, v in module.items() if n not in tensors and isinstance(v, torch.Tensor)}
        tensors |= {name: LazyTensor.of(value) for name, value in rest.items()}
        if rest:
            notes.append(f"{len(rest)} tensors that weren't trained were taken as saved")
    low = _low_precision(v for n, v in module.items() if n not in buffers and isinstance(v, torch.Tensor))
    low = low or _low_precision((shards.models[0].get("frozen_param_fragments") or {}).values())
    if low:
        notes.append(f"the parameters were trained in {low}; their float32 master weights were taken")
    return Checkpoint(
        format=f"DeepSpeed ZeRO-{shards.stage}",
        path=path,
        tensors=tensors,
        files=shards.files,
        notes=(*notes, f"put together from {len(shards.optimizers)} ranks"),
    )


def _low_precision(tensors: Any) -> str:
    kinds = {t.dtype for t in tensors if t.is_floating_point() and t.dtype.itemsize < 4}
    return ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def _open(folder: Path) -> Shards:
    """Opens the files of all ranks. Raises ``InvalidModel`` if a file is missing or comes from another save."""
    fix = "save it with DeepSpeed 0.10 or newer and without custom objects in client_state"
    by_rank = {int(m.group(1) or 0): f for f in folder.iterdir() if (m := _MODEL.match(f.name))}
    optimizer = {int(m.group(2)): f for f in folder.iterdir() if (m := _OPTIMIZER.match(f.name))}
    if 0 not in by_rank:
        name = "mp_rank_00_model_states.pt" if not by_rank else "zero_pp_rank_0_mp_rank_00_model_states.pt"
        raise InvalidModel(f"the folder {folder} lacks the file {name}; copy the file there")
    body = read_torch(by_rank[0], fix=fix)
    if not isinstance(body, dict) or "module" not in body:
        raise InvalidModel(
            f"{by_rank[0]} holds no module, so DeepSpeed did not write it; give a folder that save_checkpoint wrote"
        )
    if not optimizer:
        if body.get("param_shapes"):
            raise InvalidModel(f"the folder {folder} lacks the ranks' files *_optim_states.pt; copy the files there")
        return Shards(folder=folder, files=(by_rank[0],), models=[body], optimizers=[], stage=0)
    states = {rank: read_torch(file, fix=fix)["optimizer_state_dict"] for rank, file in sorted(optimizer.items())}
    first = next(iter(states.values()))
    stage, ranks = _stage(first), _ranks(first)
    pattern = next(m for f in optimizer.values() if (m := _OPTIMIZER.match(f.name)))
    for rank in range(ranks):
        if rank not in optimizer:
            name = f"{pattern.group(1)}{rank}_mp_rank_00_optim_states.pt"
            raise InvalidModel(
                f"the folder {folder} lacks the file {name} of rank {rank} ({ranks} ranks); copy the file there"
            )
        if stage == 3 and rank not in by_rank:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            raise InvalidModel(
                f"the folder {folder} lacks the file {name} of rank {rank} ({ranks} ranks); copy the file there"
            )
    models = [body, *(read_torch(f, fix=fix) for rank, f in sorted(by_rank.items()) if rank and stage == 3)]
    shards = Shards(
        folder=folder,
        files=(*(f for _, f in sorted(by_rank.items())), *(f for _, f in sorted(optimizer.items()))),
        models=models,
        optimizers=list(states.values()),
        stage=stage,
    )
    _check_one_save(shards, ranks)
    return shards


def _stage(state: Mapping[str, Any]) -> int:
    stage = state["zero_stage"]
    value = stage if isinstance(stage, int) else stage.args[0]  # the unpickler reads an enum as a ``Record``
    if value not in (1, 2, 3):
        raise ValueError(f"ZeRO stage {value}")
    return int(value)


def _ranks(state: Mapping[str, Any]) -> int:
    count = state["partition_count"]
    return int(max(count) if isinstance(count, list | tuple) else count)


def _check_one_save(shards: Shards, ranks: int) -> None:
    """Raises ``InvalidModel`` if the folder mixes files of several saves."""
    facts: dict[str, set[Any]] = {
        "ZeRO stages": {_stage(s) for s in shards.optimizers},
        "numbers of ranks": {_ranks(s) for s in shards.optimizers} | {len(shards.optimizers)},
        "steps": {s for state in shards.optimizers for s in _steps(state)},
        "global steps": {m.get("global_steps") for m in shards.models},
        "DeepSpeed versions": {m.get("ds_version") for m in shards.models},
    }
    for what, values in facts.items():
        if len(values) > 1:
            found = " and ".join(sorted(map(str, values)))
            raise shards.bad(
                f"the folder mixes files of different saves ({what}: {found}; rank 0 expects {ranks} ranks)"
            )


def _steps(state: Mapping[str, Any]) -> set[float]:
    """Returns the optimizer's step counts, or an empty set if the optimizer has no step count."""
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or {}
    groups = base.get("state", {}) if isinstance(base, dict) else base
    parts = list(groups.values()) if isinstance(groups, dict) else list(groups if isinstance(groups, list) else [])
    steps = [part.get("step") for part in parts if isinstance(part, dict)]
    return {float(step) for step in steps if isinstance(step, int | float | torch.Tensor)}


def _shape(shards: Shards, name: Any, shape: Any) -> torch.Size:
    if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in shape):
        raise shards.bad(f"the parameter {name!r} has no shape")
    return torch.Size(shape)


def _flat(shards: Shards, key: str) -> list[list[torch.Tensor]]:
    """Returns the flat float32 tensors of each rank, one for each parameter group."""
    found: list[list[torch.Tensor]] = []
    for rank, state in enumerate(shards.optimizers):
        groups = state[key]
        if not isinstance(groups, list | tuple) or not all(isinstance(g, torch.Tensor) and g.ndim == 1 for g in groups):
            raise shards.bad(f"the part of rank {rank} has no master weights ({key})")
        found.append(list(groups))
    if len({len(groups) for groups in found}) > 1:
        raise shards.bad("the ranks have different numbers of parameter groups")
    return found


def _stages_1_and_2(shards: Shards) -> dict[str, LazyTensor]:
    ranks = _flat(shards, "single_partition_of_fp32_groups")
    shapes: list[Mapping[str, Any]] = shards.models[0]["param_shapes"]
    paddings = shards.optimizers[0].get("param_alignment_paddings")
    if len(shapes) != len(ranks[0]):
        raise shards.bad(f"the checkpoint names {len(shapes)} parameter groups but holds {len(ranks[0])} groups")
    tensors: dict[str, LazyTensor] = {}
    for group, named in enumerate(shapes):
        parts = [groups[group] for groups in ranks]
        padding = paddings[group] if paddings is not None else [0] * len(named)
        offset = 0
        for (name, shape), behind in zip(named.items(), padding, strict=True):
            size = _shape(shards, name, shape)
            tensors[name] = LazyTensor(shape=tuple(size), read=partial(_cut, parts, offset, size))
            offset += size.numel() + int(behind)
        there, unit = sum(part.numel() for part in parts), 2 * len(parts)
        # DeepSpeed pads each parameter group to a multiple of twice the number of ranks. Older versions of DeepSpeed
        # pad each rank's shard to an even count.
        if math.ceil(offset / unit) != math.ceil(there / unit):
            raise shards.bad(f"the parameter group {group} holds {there} numbers, but its shapes need {offset} numbers")
    return tensors


def _cut(parts: list[torch.Tensor], offset: int, size: torch.Size) -> torch.Tensor:
    return part_of(parts, offset, size.numel()).reshape(size)


def _stage_3(shards: Shards) -> dict[str, LazyTensor]:
    ranks = _flat(shards, "fp32_flat_groups")
    shapes = {name: shape for named in shards.models[0]["param_shapes"] for name, shape in named.items()}
    sizes = {name: _shape(shards, name, shape) for name, shape in shapes.items()}
    share = [math.ceil(size.numel() / len(ranks)) for size in sizes.values()]
    for rank, groups in enumerate(ranks):
        there = sum(group.numel() for group in groups)
        if there != sum(share):
            raise shards.bad(f"the part of rank {rank} holds {there} numbers, but the shapes need {sum(share)} numbers")
    offsets = [0, *accumulate(share)]
    return {
        name: LazyTensor(shape=tuple(size), read=partial(_gather, ranks, offset, count, size))
        for (name, size), offset, count in zip(sizes.items(), offsets, share, strict=False)
    }


def _gather(ranks: list[list[torch.Tensor]], offset: int, count: int, size: torch.Size) -> torch.Tensor:
    whole = torch.cat([part_of(groups, offset, count) for groups in ranks])
    return whole[: size.numel()].reshape(size)


def _frozen(shards: Shards) -> dict[str, LazyTensor]:
    """Returns the parameters that were not trained. ZeRO stages 1 and 2 store untrained parameters whole, and stage 3
    splits them into shards."""
    tensors: dict[str, LazyTensor] = {}
    for name, shape in dict(shards.models[0].get("frozen_param_shapes") or {}).items():
        size = _shape(shards, name, shape)
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in shards.models]
        if sum(part.numel() for part in parts) < size.numel():
            raise shards.bad(f"the checkpoint holds only a part of the frozen parameter {name!r}")
        tensors[name] = LazyTensor(shape=tuple(size), read=partial(_cut, parts, 0, size))
    return tensors
