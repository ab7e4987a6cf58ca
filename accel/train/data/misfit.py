"""Says in one sentence why a batch doesn't fit the model, after an error of torch or a loss that isn't finite.

Looks for the cause only then, so that a good step costs nothing. The arguments of the failed function come from the
frames of the traceback. After an error of a GPU, only the batch in the memory of the CPU can still be read.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.errors import AccelError, kind_of, one_line

from ..batch import Batch, call, moved, to_device
from ..config.schema import TrainConfig
from ..loss import cross_entropy
from ..ranks import Ranks
from .samples import Order, share
from .stream import Stream

_PARTS = ("inputs", "targets")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The micro-batches of a rank's step, in the memory of the CPU. ``numbers`` are the numbers of the step's samples.
    A micro-batch has ``size`` samples, except the last of an epoch."""

    batches: Sequence[Batch]
    numbers: Sequence[int]
    size: int

    def tensors(self, part: int) -> Iterator[tuple[str, torch.Tensor, Sequence[int]]]:
        """Yields the input tensors (``part`` 0) or target tensors (1), each with its name and the numbers of its
        samples. Leaves out the spare inputs of a rank that has no sample."""
        for index, batch in enumerate(self.batches):
            if batch[1] is not None:
                for name, value in _named(batch[part], _PARTS[part]):
                    yield name, value, self.numbers[index * self.size :]

    def first(self, part: int, wrong: Callable[[torch.Tensor], torch.Tensor]) -> tuple[str, Any] | None:
        """Returns words for the place of the first value for which ``wrong`` holds, and the value."""
        for name, value, numbers in self.tensors(part):
            places = wrong(value).nonzero()
            if value.ndim and len(places):
                place = places[0].tolist()
                return f"the {name} of sample {numbers[place[0]]}", value[tuple(place)].item()
        return None


def taken_at(step: int, batches: Sequence[Batch], data: Sequence[Any], config: TrainConfig, ranks: Ranks) -> Taken:
    """Returns the micro-batches ``batches`` of this rank with the numbers of their samples in ``data``. ``step`` counts
    the steps before."""
    rank, count = ranks.data_rank, ranks.data_ranks
    if isinstance(data, Stream):
        return Taken(batches=batches, numbers=share(data.batch, rank, count), size=config.micro_batch)
    order = Order(
        len(data),
        global_batch=config.global_batch,
        rank=rank,
        ranks=count,
        seed=config.seed,
        first=step,
        drop_last=config.drop_last,
    )
    return Taken(batches=batches, numbers=next(order.steps()), size=config.micro_batch)


def misfit(error: Exception, module: nn.Module, taken: Taken) -> str:
    """Returns why a pass of ``module`` on ``taken`` failed with ``error``, or "" if the reason isn't known."""
    if isinstance(error, AccelError):
        return ""
    with suppress(Exception):  # the user's objects may fail in any way, which must not hide ``error``
        if isinstance(error, torch.AcceleratorError):
            return _on_gpu(error, module, taken)
        for frame in _frames(error):
            said = _EXPLAIN[frame.f_code](frame.f_locals, module, taken) if frame.f_code in _EXPLAIN else ""
            if said:
                return said
    return ""


def not_finite(taken: Taken, dtype: torch.dtype) -> str:
    """Returns words that name the first sample with an input or a target that isn't finite, or "" if all are finite.

    The model gets floating-point inputs in ``dtype``.
    """
    found = taken.first(0, lambda value: ~value.to(dtype if value.is_floating_point() else value.dtype).isfinite())
    found = found or taken.first(1, lambda value: ~value.isfinite())
    if found is None:
        return ""
    place, value = found
    large = f", which {str(dtype).removeprefix('torch.')} can't hold" if abs(value) < float("inf") else ""
    return f"{place} hold {value:g}{large}"


def _named(values: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(values, torch.Tensor):
        yield name, values
    elif isinstance(values, Mapping | tuple | list):
        for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            yield from _named(value, f"{name}[{key!r}]")


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yields the frames that ``error`` went through, and then the frames of its causes."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            yield frame
        error = error.__cause__ or error.__context__


def _of_embedding(given: Mapping[str, Any], module: nn.Module, taken: Taken) -> str:
    """Explains an id outside the rows of an embedding."""
    ids, weight = given["input"], given["weight"]
    rows = weight.shape[0]
    if ids.device.type != "cpu" or not len(wrong := ids[_outside(ids, rows)]):
        return ""
    name = next((name for name, parameter in module.named_parameters() if parameter is weight), "an embedding")
    has = f"{name} has only {rows} rows (0 to {rows - 1})"
    found = taken.first(0, lambda value: _outside(value, rows) & _same(value, ids))
    if found is not None:
        return f"{found[0]} hold the id {found[1]}, but {has}; correct the data, or give the embedding more rows"
    shape = " and ".join(str(list(value.shape)) for _, value in _named(taken.batches[0][0], _PARTS[0]))
    return (
        f"the model looks up row {int(wrong[0])} on inputs of the shape {shape}, but {has}; shorten or correct the "
        "samples, or give the embedding more rows"
    )


def _of_classes(given: Mapping[str, Any], _: nn.Module, taken: Taken) -> str:
    """Explains a class number that the model has no output for."""
    scores, targets, ignored = given["input"], given["target"], given["ignore_index"]
    if targets.device.type != "cpu" or targets.is_floating_point() or not scores.ndim:
        return ""
    classes = scores.shape[min(1, scores.ndim - 1)]
    wrong = targets[_outside(targets, classes) & (targets != ignored)]
    if not len(wrong):
        return ""
    place, value = taken.first(1, lambda v: torch.isin(v, wrong)) or ("the targets of a sample", int(wrong[0]))
    return (
        f"{place} hold the class {value}, but the model gives scores for {classes} classes (0 to {classes - 1}); "
        f"correct the data, or give the model more outputs (the loss ignores targets of {ignored})"
    )


def _of_shapes(given: Mapping[str, Any], _: nn.Module, __: Taken) -> str:
    """Explains targets that don't fit the outputs of the model."""
    scores, targets = list(given["outputs"].shape), list(given["targets"].shape)
    if len(scores) < 2:
        return (
            f"the model returns a tensor of the shape {scores}, but the default loss takes scores of the shape "
            "[batch, ..., classes]; let the model return a score for each class"
        )
    if given["outputs"].shape[:-1].numel() == given["targets"].numel():
        return ""
    if [scores[0], *scores[2:]] == targets:
        return (
            f"the model returns scores of the shape {scores} for targets of the shape {targets}, but the default loss "
            "takes scores with the classes in the last dim; return scores.movedim(1, -1)"
        )
    return (
        f"the model returns scores of the shape {scores}, but the targets of the batch have the shape {targets} "
        f"instead of {scores[:-1]}; let each sample have targets of the shape {scores[1:-1]}, or change the model"
    )


def _of_kind(given: Mapping[str, Any], _: nn.Module, __: Taken) -> str:
    """Explains an input or a target that isn't a tensor."""
    value = given.get("inputs", given.get("targets"))
    if isinstance(value, torch.Tensor | Mapping | tuple | list):
        return ""
    return f"the samples hold {kind_of(value)}; give tensors, arrays or numbers"


def _of_call(given: Mapping[str, Any], _: nn.Module, __: Taken) -> str:
    """Explains inputs that ``forward`` doesn't take."""
    inputs, called = given["inputs"], given["module"]
    forward = (called.module if isinstance(called, DistributedDataParallel) else called).forward
    names = list(inspect.signature(forward).parameters)
    try:
        if isinstance(inputs, Mapping):
            inspect.signature(forward).bind(**inputs)
        else:
            inspect.signature(forward).bind(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    except TypeError as error:
        return (
            f"the samples don't have the inputs that the model's forward takes ({error}); let each sample have inputs "
            f"for {', '.join(names)}: a tuple in this order, or a dict with these names"
        )
    return ""


def _on_gpu(error: Exception, module: nn.Module, taken: Taken) -> str:
    """Explains an error of a GPU, which comes late and ends all further work of the GPU, by the ranges of a batch."""
    ranges = [
        f"the {_PARTS[part]} go from {int(value.min())} to {int(value.max())}"
        for part in (0, 1)
        for _, value, _ in list(taken.tensors(part))[:1]
        if value.numel() and not value.is_floating_point()
    ]
    rows = [str(part.num_embeddings) for part in module.modules() if isinstance(part, nn.Embedding)]
    if not ranges:
        return ""
    return (
        f"the GPU stopped ({one_line(str(error).partition(chr(10))[0], 200)}), which an id or a class out of range may "
        f"cause: {' and '.join(ranges)}, and the embeddings have {', '.join(rows) or 'no'} rows; correct the data or "
        "the model, or run on the CPU (CUDA_VISIBLE_DEVICES=) to see the place"
    )


def _outside(values: torch.Tensor, count: int) -> torch.Tensor:
    return (values < 0) | (values >= count)


def _same(value: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    equal = value.numel() == ids.numel() and torch.equal(value.flatten(), ids.flatten())
    return torch.full(value.shape, equal)


# Maps the code of a function to the function that explains its errors.
_EXPLAIN: Mapping[CodeType, Callable[[Mapping[str, Any], nn.Module, Taken], str]] = {
    F.embedding.__code__: _of_embedding,
    F.cross_entropy.__code__: _of_classes,
    F.nll_loss.__code__: _of_classes,
    cross_entropy.__code__: _of_shapes,
    to_device.__code__: _of_kind,
    moved.__code__: _of_kind,
    call.__code__: _of_call,
}
