"""Implements context parallelism. Each rank holds a part of every sequence, and attention sees whole sequences.

The model's code stays unchanged. The modules of ``parallel.cp_split``, which embed tokens and positions, work on whole
sequences, and their outputs are cut over the ranks. ``F.scaled_dot_product_attention`` is replaced by ``Ulysses`` or
``Ring``. All other operations after the cut have to process each position independently, and so has the loss. Before
training, a run on a sample checks that the cut changes neither the model's output nor the loss.

ZeRO treats a context-parallel rank as a data-parallel rank. With tensor parallel, the ranks of a tensor-parallel group
hold the same part of a sequence, which sequence parallelism cuts once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from accel.errors import AccelError, BadConfig, BadData, one_line

from .. import loss as losses
from ..batch import call, input_names, moved, one_tensor, to_device
from ..config.schema import ParallelConfig, TrainConfig
from ..model_loss import BUILT_IN, tensor_of
from ..ranks import Ranks
from .ring import Ring, pieces
from .shared_attention import SharedAttention
from .tensor import fits
from .ulysses import Ulysses

_POSITIONS = "position_ids"
_FIX = (
    "let parallel.cp_split name the modules that embed tokens and positions, also a module that computes rotary "
    "positions, which has to do so for the whole length even if its input is cut, and let only "
    "F.scaled_dot_product_attention look at other positions"
)
_LOSS_FIX = "let the loss be a sum over positions that are independent of each other, or use parallel.cp = 1"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Cuts tensors along their positions into a part for each rank of ``mesh``. With ``balanced``, a part is a piece
    from the front and a piece from the back, as ring attention needs it."""

    mesh: DeviceMesh
    balanced: bool

    def part(self, tensor: torch.Tensor, dim: int = 1, rank: int | None = None) -> torch.Tensor:
        """Returns the part of ``rank`` (by default of this rank) of ``tensor`` along ``dim``.

        Raises ``BadData`` if ``tensor`` has no such dim, or if ``dim`` can't be cut into equal parts.
        """
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank() if rank is None else rank
        if tensor.ndim <= dim:
            raise BadData(
                f"a tensor of the shape {list(tensor.shape)} has no positions that ranks could share; give a target "
                "for each position, or use parallel.cp = 1"
            )
        length = tensor.shape[dim]
        if length % ranks:
            raise BadData(
                f"the sequence length {length} is not a multiple of cp {ranks}; "
                "pad the sequence, and its targets with -100"
            )
        mine = pieces(rank, ranks, length, balanced=self.balanced)
        found = [tensor.narrow(dim, piece.start, piece.stop - piece.start) for piece in mine]
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    def hidden(self, output: Any) -> Any:
        """Returns this rank's part of a module's ``output``: a tensor [..., positions, width], or a tuple of such
        tensors. Anything else in the tuple stays as it is."""
        if isinstance(output, tuple | list):
            return tuple(self.hidden(inner) for inner in output)
        # Copies the part, because a view would keep the whole output in memory until the backward pass.
        several = isinstance(output, torch.Tensor) and output.ndim > 1
        return self.part(output, output.ndim - 2).clone() if several else output

    def after(self, module: nn.Module) -> RemovableHandle:
        """Lets ``module`` return only this rank's part of its output."""
        return module.register_forward_hook(lambda _, __, output: self.hidden(output))


def cutter(ranks: Ranks, layout: ParallelConfig) -> Cut | None:
    """Returns how the ranks cut sequences, or None without context parallelism."""
    return Cut(mesh=ranks.cp, balanced=layout.cp_method == "ring") if ranks.cp is not None else None


def split_names(module: nn.Module, layout: ParallelConfig) -> list[str]:
    """Returns the names of the modules after which sequences are cut. ``*`` in ``parallel.cp_split`` matches any text
    without a dot.

    Raises ``BadConfig`` if a name in ``parallel.cp_split`` matches no module.
    """
    names = [name for name, _ in module.named_modules()]
    found = []
    for pattern in (text.strip() for text in layout.cp_split.split(",")):
        matched = [name for name in names if fits(name, pattern)]
        if not matched:
            said = f"the model has no module {pattern!r}, which parallel.cp_split names"
            raise BadConfig(f"{said}; name the module that embeds its tokens")
        found += matched
    return found


def share(
    module: nn.Module,
    names: Sequence[str],
    config: TrainConfig,
    ranks: Ranks,
    data: Sequence[Any],
    loss: losses.Loss,
    cut: Cut,
) -> dict[str, RemovableHandle]:
    """Changes ``module`` in place to work on this rank's part of the sequence, which is cut after its modules
    ``names``. ``module`` must not be sharded yet. Returns the hooks that cut the outputs of modules, by the name of the
    module.

    Raises ``BadConfig`` if the cut changes the model's output or the loss. The output changes if the model computes
    position numbers after the cut, or if an operation other than attention reads several positions.
    """
    found = {name: module.get_submodule(name) for name in names}
    sample, targets = torch.utils.data.default_collate([data[0]])
    inputs = to_device(sample, ranks.device, torch.float32)
    module.eval()
    with torch.no_grad(), _in_float32(module):
        whole = _scores(call(module, inputs), loss, config)
        targets = one_tensor(moved(targets, ranks.device), "context parallel")
        _check_loss(loss, config.loss or "the default loss", whole, targets, cut)
        expected = cut.part(whole).clone()
        del whole
        hooks = {name: cut.after(part) for name, part in found.items()}
        around: SharedAttention = Ring(cut.mesh) if config.parallel.cp_method == "ring" else Ulysses(cut.mesh)
        parts: list[nn.Module] = []
        if ranks.pp is not None:
            from .pipeline import chain

            parts = [module.get_submodule(name) for name in chain(module)]
        around.wrap(module, parts)
        limit = 1e-2 if config.precision.tf32 else 1e-3
        _place(module, cut, lambda: _problem(partial(call, module, inputs), expected, limit, around, ", ".join(names)))
    module.train()
    return hooks


@contextmanager
def _in_float32(module: nn.Module) -> Iterator[None]:
    """Opens a context in which the parameters and buffers of ``module`` are float32. The rounding of bfloat16 changes
    an output more than wrong rotary positions do."""
    low = [one for one in (*module.parameters(), *module.buffers()) if one.dtype in (torch.bfloat16, torch.float16)]
    kept = [one.data for one in low]
    try:
        for one in low:
            one.data = one.data.float()
        yield
    finally:
        for one, data in zip(low, kept, strict=True):
            one.data = data


def again(module: nn.Module, hooks: dict[str, RemovableHandle], cut: Cut) -> None:
    """Cuts the outputs of the modules in ``hooks`` after all hooks that the modules got since ``share``."""
    named = dict(module.named_modules())
    for name in hooks.keys() & named.keys():  # the other modules are in other pipeline stages
        hooks[name].remove()
        hooks[name] = cut.after(named[name])


def _scores(outputs: Any, loss: losses.Loss, config: TrainConfig) -> torch.Tensor:
    """Returns the tensor of a model's ``outputs`` that the loss takes."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(getattr(outputs, "loss", None), torch.Tensor):
        raise BadConfig(
            "the model computes its own loss from whole sequences, which context parallel can't do; leave the labels "
            "out of the inputs, and give samples (inputs, targets) with a target for each position (for a causal "
            "language model, the next token), or use parallel.cp = 1"
        )
    if loss not in BUILT_IN or getattr(outputs, "logits", None) is None:
        raise BadConfig(
            f"the model returns a {type(outputs).__name__}, but with context parallel {config.loss or 'the loss'} "
            "needs a tensor, or logits and a loss of accel; let the model return a tensor, or use parallel.cp = 1"
        )
    return tensor_of(outputs)


def _check_loss(loss: losses.Loss, name: str, outputs: torch.Tensor, targets: torch.Tensor, cut: Cut) -> None:
    """Raises ``BadConfig`` if the losses of the parts don't add up to the loss of whole sequences."""
    found: list[tuple[float, float, torch.Tensor]] = []
    for ranks in ([None], range(cut.mesh.size())):
        leaf = outputs.detach().clone().requires_grad_()
        with torch.enable_grad():
            try:
                pairs = [
                    losses.summed(loss, leaf, targets)
                    if rank is None
                    else losses.summed(loss, cut.part(leaf, rank=rank), cut.part(targets, rank=rank))
                    for rank in ranks
                ]
            except AccelError:
                raise
            except Exception as error:
                if not found:
                    raise
                reason = one_line(error, 200)
                raise BadConfig(f"{name} can't be computed for a part of a sequence ({reason}); {_LOSS_FIX}") from error
            total = torch.stack([total for total, _ in pairs]).sum()
            (gradient,) = torch.autograd.grad(total, leaf)
        found.append((float(total.detach()), float(sum(count for _, count in pairs)), gradient.float()))
    (one, count, slope), (parts, counts, slopes) = found
    near = 1e-4 if outputs.dtype == torch.float32 else 1e-2
    # The gradient shows a position that a part leaves out, however long the sequence is.
    same = abs(one - parts) <= near * abs(one) + 1e-6 and count == counts
    if not (same and torch.allclose(slope, slopes, rtol=1e-2, atol=1e-3 * float(slope.abs().max()))):
        raise BadConfig(
            f"{name} of a sequence is {one:g} over {count:g} targets, but the losses of its parts add up to {parts:g} "
            f"over {counts:g}; {_LOSS_FIX}"
        )


def _place(module: nn.Module, cut: Cut, problem: Callable[[], str]) -> None:
    """Gives ``module`` the position numbers with which ``problem()`` is "". Raises ``BadConfig`` if there are none.

    Some models compute the numbers before the cut, some after the cut, and some take the numbers of whole sequences.
    Only a run shows which of these a model does.
    """
    forward = module.forward
    said = problem()
    if said and _POSITIONS in input_names(module):
        for whole in (False, True):
            module.forward = update_wrapper(partial(_numbered, forward, input_names(module), cut, whole), forward)
            if not problem():
                return
        module.forward = forward
    if said:
        raise BadConfig(said)


def _numbered(
    forward: Callable[..., Any], names: Sequence[str], cut: Cut, whole: bool, *inputs: Any, **named: Any
) -> Any:
    """Runs ``forward`` with the numbers of all positions, or of this rank's positions if ``whole`` is false."""
    given = dict(zip(names, inputs, strict=False)) | named
    numbers = given.get(_POSITIONS)
    if numbers is None:
        first = next(value for value in given.values() if isinstance(value, torch.Tensor))
        numbers = torch.arange(first.shape[1], device=first.device).expand(first.shape[0], -1)
    return forward(**{**given, _POSITIONS: numbers if whole else cut.part(numbers)})


class _Elsewhere(Exception):
    """Another rank found a problem."""


def _problem(run: Callable[[], Any], expected: torch.Tensor, limit: float, around: SharedAttention, where: str) -> str:
    """Returns why ``run`` doesn't give ``expected`` on all ranks, or "". All ranks return the same text. ``limit`` is
    the largest relative distance of a position that counts as rounding.

    A rank that finds a problem doesn't reach the next call of attention, in which the other ranks would wait for it.
    So the ranks agree before each call whether one of them has a problem.
    """
    group = around.mesh.get_group()

    def agree(problem: bool) -> bool:
        flag = torch.tensor(float(problem), device=expected.device)
        dist.all_reduce(flag, group=group)
        return bool(flag)

    def before() -> None:
        if agree(False):
            raise _Elsewhere

    said, around.before = "", before
    try:
        with torch.no_grad():
            found = tensor_of(run())
        right = found.shape == expected.shape and _distance(found.float(), expected.float()) <= limit
        if not right:
            said = f"the output of the model changes if the sequence is cut after the module {where}; {_FIX}"
        agree(not right)
    except _Elsewhere:
        pass
    except Exception as error:
        said = (
            str(error)
            if isinstance(error, AccelError)
            else f"the model can't be run if the sequence is cut after the module {where} ({one_line(error, 200)}); "
            f"{_FIX}"
        )
        agree(True)
    finally:
        around.before = None
    every: list[Any] = [None] * around.mesh.size()
    dist.all_gather_object(every, said, group=group)
    return next(filter(None, every), "")


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest relative distance between a position of ``found`` and of ``expected``, in the 2-norm.

    Divides the distance by the norm of the expected position, or by the mean norm of all positions if that is larger.
    Infinite values have to be equal.
    """
    apart = torch.where(found == expected, 0.0, found - expected).norm(dim=-1)
    size = torch.where(expected.isfinite(), expected, 0.0).norm(dim=-1)
    relative = apart / torch.maximum(size, size.mean())
    return float(torch.where(apart == 0, 0.0, relative).max())
