"""Applies tensor and sequence parallelism with PyTorch's DTensor styles. A plan maps module-name patterns to styles.

    [tensor_parallel]
    "embed.tokens" = "vocabulary"               # an embedding or the head: cut along the vocabulary
    "embed.positions" = "split"                 # computes whole sequences, then gives each rank its part
    "blocks.*.norm?" = "sequence"               # works on each rank's part of the sequence
    "blocks.*.attention.[qkv]*" = "column"      # Linear: outputs are cut, inputs are whole
    "blocks.*.attention.out" = "row"            # Linear: inputs are cut, outputs are summed over the ranks.
    "blocks.*.attention.norm_?" = "heads"       # works on each rank's part of the heads

Column and row cuts are from Shoeybi et al. 2019, "Megatron-LM", section 3. Sequence parallelism is from Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2. Hidden states are [batch,
sequence, hidden]. Between the modules of the plan, each rank holds only its part of the sequence. ``column`` gathers
the sequence, and ``row`` reduce-scatters the sequence.

The model's code sees plain tensors. Only the logits stay a DTensor, because the cross entropy is computed on the
sharded logits. The model's code must not use a fixed number of heads, because a rank has only some of the heads.
``view(b, s, -1, width)`` works with any number of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from accel.errors import BadConfig, BadData, TrainingFailed

from ..shards import local

_SEQUENCE = 1


def match(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Returns the style of each module that matches a pattern of ``plan``. ``*`` matches any text without a dot.

    Raises ``BadConfig`` if a pattern matches no module, two patterns disagree, or a style doesn't fit its module.
    """
    found: dict[str, str] = {}
    modules = dict(module.named_modules())
    for pattern, style in plan.items():
        names = [name for name in modules if fits(name, pattern)]
        if not names:
            some = ", ".join([name for name in modules if name][:6])
            raise BadConfig(
                f"the pattern {pattern!r} of [tensor_parallel] matches no module of the model; the modules are "
                f"{some}, ..."
            )
        for name in names:
            if found.setdefault(name, style) != style:
                raise BadConfig(
                    f"[tensor_parallel] gives the module {name} both the styles {found[name]} and {style}; keep one of "
                    "these styles"
                )
            wanted = {"column": (nn.Linear,), "row": (nn.Linear,), "vocabulary": (nn.Linear, nn.Embedding)}
            if not isinstance(modules[name], wanted.get(style, nn.Module)):
                kinds = " or an ".join(kind.__name__ for kind in wanted[style])
                got = type(modules[name]).__name__
                raise BadConfig(
                    f"the module {name} is a {got}, but the style {style} needs a {kinds}; correct [tensor_parallel]"
                )
    return found


def check_sequence(module: nn.Module, styles: Mapping[str, str], first: Collection[str] = ()) -> None:
    """Raises ``BadConfig`` if a ``column`` layer would gather a sequence although no module splits the sequence.

    Context parallel cuts sequences after the modules ``first``. Also raises ``BadConfig`` if a module outside of them
    splits a sequence, because that would be before or instead of the cut.
    """
    modules = dict(module.named_modules())
    splits = [name for name, style in styles.items() if _splits(modules[name], style)]
    outside = next((name for name in splits if first and not any(_inside(name, part) for part in first)), None)
    if outside is not None:
        raise BadConfig(
            f"the module {outside} splits the sequence over the tensor-parallel ranks, but context parallel cuts it "
            f"after {', '.join(first)}; add {outside} to parallel.cp_split, or pass --parallel.sequence_parallel=false"
        )
    column = next((name for name, style in styles.items() if style == "column"), None)
    if column is not None and not splits:
        raise BadConfig(
            f"the layer {column} would gather the parts of a sequence, but no module of [tensor_parallel] splits the "
            'sequence; give the embedding the style "split" or "vocabulary" and the norms the style "sequence", or '
            "pass --parallel.sequence_parallel=false"
        )


def _splits(part: nn.Module, style: str) -> bool:
    """Tells whether sequence parallelism begins at the output of ``part``."""
    return style == "split" or (style == "vocabulary" and isinstance(part, nn.Embedding))


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def fits(name: str, pattern: str) -> bool:
    """Tells whether ``pattern`` matches a module's ``name``. Compares the components between the dots one by one."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    styles: Mapping[str, str],
    *,
    sequence: bool,
    first: Collection[str] = (),
    before: Callable[[], None] = lambda: None,
) -> None:
    """Shards each module of ``styles`` in place over the only axis of ``mesh``. The names of modules don't change.

    ``sequence`` adds sequence parallelism. Context parallel cuts sequences after the modules ``first``, which therefore
    work on whole sequences. Their outputs are split after ``before`` was called. Raises ``BadConfig`` if a column or
    row layer can't be split evenly over the ranks.
    """
    shared = _shared(module)
    gathered = _Gathered()
    for name, style in styles.items():
        try:
            part = module.get_submodule(name)
        except AttributeError:
            continue  # the module is in another pipeline stage
        if isinstance(part, nn.Linear) and style in ("column", "row"):
            size = part.out_features if style == "column" else part.in_features
            if size % mesh.size():
                raise BadConfig(
                    f"the layer {name} has {size} {style}s, but this number has to be a multiple of tp {mesh.size()}; "
                    f"use a tp that divides {size}"
                )
        inner = any(_inside(name, outer) for outer in first)
        for made in _styles(part, style, gathered, sequence=sequence and not inner):
            parallelize_module(part, mesh, made, src_data_rank=None)  # every rank has the same weights already
    before()
    modules = dict(module.named_modules())
    for outer in first if sequence else ():
        if any(_inside(n, outer) and n in modules and _splits(modules[n], s) for n, s in styles.items()):
            parallelize_module(modules[outer], mesh, _Split(), src_data_rank=None)
    for kept, others in shared:
        owner, _, key = kept.rpartition(".")
        for other in others:
            to, _, name = other.rpartition(".")
            setattr(module.get_submodule(to), name, getattr(module.get_submodule(owner), key))


def _styles(part: nn.Module, style: str, gathered: _Gathered, *, sequence: bool) -> Iterable[ParallelStyle]:
    whole = Shard(_SEQUENCE) if sequence else Replicate()
    if style == "column":
        yield _Column(gathered, input_layouts=whole)
    elif style == "row":
        yield RowwiseParallel(output_layouts=whole)
    elif style == "vocabulary" and isinstance(part, nn.Linear):
        yield ColwiseParallel(input_layouts=whole, use_local_output=False)
    elif style == "vocabulary":
        if sequence:
            yield _Divides()
        yield RowwiseParallel(input_layouts=Replicate(), output_layouts=whole)
    elif style == "sequence" and sequence:
        yield SequenceParallel(sequence_dim=_SEQUENCE, use_local_output=True)
    elif style == "split" and sequence:
        yield _Split()
    elif style == "heads":  # DTensor needs to know only that a dim is cut, so that it sums the parameter's gradient
        yield SequenceParallel(sequence_dim=_SEQUENCE, use_local_output=True)


class _Gathered:
    """Caches the last gathered tensor, so that column layers with the same input (query, key, value) share a
    single gather."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, int, bool, DTensor] | None = None

    def of(self, x: torch.Tensor, mesh: DeviceMesh, layouts: Any) -> DTensor:
        last, grad = self._last, torch.is_grad_enabled()
        if last is not None and last[0] is x and last[1:3] == (x._version, grad):
            return last[3]
        whole = DTensor.from_local(x, mesh, layouts, run_check=False).redistribute(placements=(Replicate(),))
        self._last = (x, x._version, grad, whole)
        return whole


class _Column(ColwiseParallel):
    def __init__(self, gathered: _Gathered, **named: Any) -> None:
        super().__init__(**named)
        self.gathered = gathered

    def _prepare_input_fn(  # type: ignore[override]
        self, input_layouts: Any, _desired: Any, _module: nn.Module, inputs: Any, mesh: DeviceMesh
    ) -> DTensor:
        return self.gathered.of(inputs[0], mesh, input_layouts)


class _Divides(ParallelStyle):
    """Refuses a sequence that can't be cut evenly, because DTensor assumes parts of equal length."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def check(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            _divides(inputs[0].shape[-1], device_mesh)

        module.register_forward_pre_hook(check)
        return module


class _Split(ParallelStyle):
    """Computes the whole output, [..., sequence, hidden], on every rank, and returns the rank's part of the
    sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
            dim = output.ndim - 2
            _divides(output.shape[dim], device_mesh)
            whole = DTensor.from_local(output, device_mesh, (Replicate(),), run_check=False)
            return whole.redistribute(placements=(Shard(dim),)).to_local()

        module.register_forward_hook(cut)
        return module


def _divides(length: int, mesh: DeviceMesh) -> None:
    if length % mesh.size():
        raise BadData(
            f"the sequence length {length} is not a multiple of tp {mesh.size()}; pad the sequence, and its targets "
            "with -100, or use --parallel.sequence_parallel=false"
        )


def _shared(module: nn.Module) -> list[tuple[str, list[str]]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [(same[0], same[1:]) for same in names.values() if len(same) > 1]


@torch.no_grad()
def check_replicated(
    named: Iterable[tuple[str, nn.Parameter]],
    mesh: DeviceMesh,
    value: Callable[[torch.Tensor | None], torch.Tensor | None],
) -> None:
    """Checks after the first backward pass that parameters outside the plan have the same gradient on every rank.
    ``value`` returns the values of a gradient in memory.

    Raises ``TrainingFailed`` with the name of the first parameter that has different gradients. If a parameter's
    gradients differ, its module saw only a part of the sequence or of the hidden states, and the ranks' weights would
    diverge.
    """
    outside = [(name, p) for name, p in named if p.grad is not None and not _is_on(p, mesh)]
    if not outside:
        return
    found = [value(p.grad) for _, p in outside]
    norms = torch.stack([local(gradient).double().norm() for gradient in found if gradient is not None])
    all_norms = [torch.empty_like(norms) for _ in range(mesh.size())]
    dist.all_gather(all_norms, norms, group=mesh.get_group())
    largest = torch.stack(all_norms).amax(0)
    spread = largest - torch.stack(all_norms).amin(0)
    for (name, _), apart, size in zip(outside, spread.tolist(), largest.tolist(), strict=True):
        if apart > 1e-3 * size:
            module = name.rpartition(".")[0]
            raise TrainingFailed(
                f"the parameter {name} has a different gradient on each tensor-parallel rank, because the module "
                f"{module} gets only a part of its input; give the module a style, e.g. "
                f'"{module}" = "sequence" in [tensor_parallel], or "heads" for a norm over heads'
            )


def _is_on(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    """Tells whether ``parameter`` is a DTensor over all ranks of ``mesh``. Its gradient is then summed over them."""
    if not isinstance(parameter, DTensor):
        return False
    return set(mesh.mesh.flatten().tolist()) <= set(parameter.device_mesh.mesh.flatten().tolist())
