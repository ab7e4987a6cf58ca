"""Writes ``final/``, the trained model for ``accel export``.

``model-00001-of-0000N.safetensors`` holds unsharded tensors, which ``model.safetensors.index.json`` lists. If the run
kept master weights, these are the tensors.
``config.json`` holds the factory, the SHA-256 of each file, the training config, the metrics and the signature. It
also tells whether the model can be exported with a KV cache.
``inputs.safetensors`` holds the inputs of up to 64 samples. If the factory declares no inputs, ``accel export`` takes
the names and ranges of the inputs from ``inputs.safetensors``. If the factory is ``NAME.py:FACTORY``, ``NAME.py``
and the modules that ``NAME.py`` imported from the same folder are copied too.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from accel.artifact import file_sha256
from accel.errors import CannotWrite, one_line
from accel.sources.python_object import SOURCE
from accel.sources.run_folder import CONFIG
from accel.sources.torch.fingerprint import as_bytes
from accel.sources.torch.train_folder import INDEX, INPUTS

from ..batch import named_inputs
from ..config.schema import TrainConfig
from ..ranks import Ranks

FORMAT = 1
SHARD_BYTES = 4 * 2**30


def gather(state: Mapping[str, Any], ranks: Ranks) -> dict[str, torch.Tensor] | None:
    """Returns the unsharded tensors of all pipeline stages on the CPU of rank 0, and None on the other ranks.

    Every rank has to call this function. The other ranks hold only one unsharded tensor at a time.
    """
    stages = ranks.pp.size() if ranks.pp is not None else 1
    first, leads = ranks.rank == 0, ranks.rank % (ranks.world // stages) == 0
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if leads:
            found[name] = whole.detach().cpu().contiguous().clone()
    if stages > 1 and leads:
        if first:
            for source in range(ranks.world // stages, ranks.world, ranks.world // stages):
                found |= _receive(source, ranks.saving)
        else:
            _send(found, ranks.saving)
    return found if first else None


def _send(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    dist.send_object_list([shapes], dst=0, group=group)
    for tensor in tensors.values():
        if tensor.numel():
            dist.send(as_bytes(tensor), dst=0, group=group)


def _receive(source: int, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    said: list[Any] = [None]
    dist.recv_object_list(said, src=source, group=group)
    found = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in said[0]}
    for tensor in found.values():
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), src=source, group=group)
    return found


def write_run(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    *,
    config: TrainConfig,
    data: Sequence[Any],
    names: Sequence[str],
    metrics: Mapping[str, float],
    code: Mapping[str, bytes],
    decoder: bool = False,
) -> None:
    """Writes the weights, the factory, the declared signature and example inputs of a run into ``folder``, on rank 0.

    ``decoder`` tells whether the model can be exported with a KV cache. ``names`` are the names of ``forward``'s
    inputs. ``code`` is the result of ``sources`` at the start of the run.
    """
    from accel.sources.python_object import load_object

    factory = load_object(config.model, "factory")[1]
    declaration = getattr(factory, "__accel__", None)
    samples = [data[i] for i in range(min(64, len(data)))]
    try:
        stacked = torch.utils.data.default_collate(samples)[0]
    except RuntimeError:  # samples of different lengths can't be stacked, so the example is a single sample
        stacked = torch.utils.data.default_collate(samples[:1])[0]
    if config.pack:  # keeps only the tokens, because at inference the model gets no positions or documents
        stacked = stacked[0]
    for name in getattr(data, "for_training", ()):
        del stacked[name]
    signature = None
    if declaration is not None:
        signature = {
            "inputs": [str(spec) for spec in declaration.inputs],
            "outputs": list(declaration.outputs),
            "dims": {name: r.to_json() for name, r in declaration.dims.items()},
        }
    write_final(
        folder,
        state,
        model=absolute(config.model),
        config=dataclasses.asdict(config),
        metrics=metrics,
        example=named_inputs(names, stacked),
        signature=signature,
        code=code,
        decoder=decoder,
    )


def export_words(out: Path) -> list[str]:
    """Returns the command that exports the trained model of the run folder ``out``, with a KV cache for a decoder."""
    return ["accel", "export", str(out), *_target(out / "final")]


def export_best_words(out: Path, model: str, checkpoint: Path) -> list[str]:
    """Returns the command that loads the weights of ``checkpoint`` into the module of the factory ``model``, and
    exports the module as ``export_words`` does."""
    target = _target(out / "final")
    inputs = [] if "--decoder" in target else input_options(out / "final")  # a decoder has inputs of its own
    return ["accel", "export", model, "--weights", str(checkpoint), *inputs, *target]


def _target(final: Path) -> list[str]:
    return ["--decoder", "-o", "decoder"] if _about(final).get("decoder") else ["-o", "model.onnx"]


def _about(final: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((final / CONFIG).read_text())
    return found


def input_options(folder: Path) -> list[str]:
    """Returns the ``--input`` options that ``accel export`` needs for a checkpoint of the run.

    ``folder`` is the run's ``final/``, and its file ``inputs.safetensors`` holds example inputs. Returns an empty list
    if the factory declares its inputs.
    """
    from safetensors.torch import load_file

    from accel.sources.torch.factory import specs_from_example

    if _about(folder)["signature"] is not None:
        return []
    specs = specs_from_example(load_file(str(folder / INPUTS)))
    return [word for spec in specs for word in ("--input", str(spec))]


def sources(spec: str) -> dict[str, bytes]:
    """Returns the Python files of ``file.py:factory`` by name. ``file.py`` comes first, before the imported files of
    the same folder.

    Returns an empty dict for ``package.module:factory``, because the code of a package is not copied.
    """
    where = spec.rpartition(":")[0]
    if not where.endswith(".py"):
        return {}
    own = Path(where).absolute()
    loaded = [(name, getattr(module, "__file__", None) or "") for name, module in sys.modules.copy().items()]
    # Thousands of modules are loaded, and making a ``Path`` is slow, so most files are ruled out by their text.
    near = [(name, f) for name, f in loaded if f.endswith(".py") and own.parent.name in f]
    beside = {Path(f) for name, f in near if not name.startswith((SOURCE, "__main__"))}
    files = [own, *sorted(file for file in beside if file.parent == own.parent and file != own)]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def absolute(spec: str) -> str:
    """Returns ``file.py:factory`` with the file's absolute path, and ``package.module:factory`` unchanged."""
    where, _, name = spec.rpartition(":")
    return f"{Path(where).absolute()}:{name}" if where.endswith(".py") else spec


def write_final(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    *,
    model: str,
    config: Mapping[str, Any],
    metrics: Mapping[str, float],
    example: Mapping[str, torch.Tensor],
    signature: Mapping[str, Any] | None,
    code: Mapping[str, bytes],
    decoder: bool = False,
) -> None:
    """Writes the files into a temporary folder and then renames it to ``folder``. Only rank 0 calls this function.

    Raises ``CannotWrite`` if the disk is full.
    """
    from safetensors import SafetensorError

    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        about = {
            "accel_train": FORMAT,
            "model": model,
            "signature": signature,
            "metrics": dict(metrics),
            "train": dict(config),
            "source": next(iter(code), None),
            "decoder": decoder,
        }
        for name, text in code.items():
            (part / name).write_bytes(text)
        _write(part, state, example, about)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise CannotWrite(
            f"{folder} could not be written ({one_line(error, 200)}); free some space and run the same command again "
            "to continue from the last checkpoint"
        ) from error
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    part.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def set_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Adds metrics to an existing ``final/``."""
    from accel.artifact import beside

    body = _about(folder)
    with beside(folder / CONFIG) as temporary:
        temporary.write_text(json.dumps({**body, "metrics": dict(metrics)}, indent=2))


def _write(
    part: Path, state: Mapping[str, torch.Tensor], example: Mapping[str, torch.Tensor], about: Mapping[str, Any]
) -> None:
    from safetensors.torch import save_file

    groups: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if groups[-1] and size + tensor.nbytes > SHARD_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, str(part / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    total = sum(t.nbytes for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (part / INDEX).write_text(json.dumps(index, indent=2))
    save_file({name: value.contiguous() for name, value in example.items()}, str(part / INPUTS))
    body = {**about, "files": {f.name: file_sha256(f) for f in sorted(part.iterdir())}}
    (part / CONFIG).write_text(json.dumps(body, indent=2))
