"""Implements Ulysses context parallelism. Each rank holds a part of every sequence, and computes attention for a part
of the heads.

The method is from Jacobs et al. 2023, "DeepSpeed Ulysses". The model's code stays unchanged. One module
(``parallel.cp_split``, which embeds tokens and positions) works on whole sequences, and its output is split over the
ranks. Two all-to-alls around each call of ``F.scaled_dot_product_attention`` let a rank see all positions for its share
of the heads. All other operations after the split have to process each position independently. Before training, a run
on a sample checks that the split doesn't change the model's output. ZeRO treats each rank as a data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from accel.errors import BadConfig, BadData, one_line

from ..attention import AroundAttention
from ..batch import call, to_device
from ..config.schema import ParallelConfig, TrainConfig
from ..precision.modes import parameter_dtype
from ..ranks import Ranks
from .ring import Ring, check_mask, pieces

_HEADS, _POSITIONS = 1, 2
_FIX = (
    "let parallel.cp_split name the module that embeds tokens and positions, and let only "
    "F.scaled_dot_product_attention look at other positions"
)


class Ulysses(AroundAttention):
    """A context in which attention sees whole sequences.

    ``attention`` takes and returns float[batch, heads, this rank's positions, width].
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        for tensor in (query, key, value):
            if tensor.ndim != 4 or tensor.shape[_HEADS] % self.mesh.size():
                raise BadConfig(
                    f"attention gets a tensor of shape {list(tensor.shape)}, but takes only the shape [batch, heads, "
                    f"positions, width], in which heads is a multiple of cp {self.mesh.size()}; use a cp that divides "
                    "the number of heads, or parallel.cp_method = ring"
                )
        if attn_mask is not None:
            causal = bool(rest[1] if len(rest) > 1 else named.get("is_causal", False))
            check_mask(attn_mask, query.shape[_POSITIONS] * self.mesh.size(), is_causal=causal)
            if attn_mask.ndim > _HEADS + 1 and attn_mask.shape[-3] > 1:  # a mask for each head
                attn_mask = attn_mask.chunk(self.mesh.size(), -3)[self.mesh.get_local_rank()]
        whole = [self._turn(tensor, _POSITIONS, _HEADS) for tensor in (query, key, value)]
        found = F.scaled_dot_product_attention(whole[0], whole[1], whole[2], attn_mask, *rest, **named)
        return self._turn(found, _HEADS, _POSITIONS)

    def _turn(self, tensor: torch.Tensor, had: int, gets: int) -> torch.Tensor:
        """Takes this rank's shard of a tensor that is sharded along dim ``had``. Returns this rank's shard of the same
        tensor along dim ``gets``."""
        shared = DTensor.from_local(tensor, self.mesh, (Shard(had),), run_check=False)
        return shared.redistribute(placements=(Shard(gets),)).to_local()


def share(module: nn.Module, config: TrainConfig, ranks: Ranks, data: Sequence[Any]) -> None:
    """Changes ``module`` in place to work on this rank's part of the sequence. ``module`` must not be sharded yet.

    Raises ``BadConfig`` if ``parallel.cp_split`` names no module of ``module``, or if the split changes the model's
    output. The output changes if the model computes position numbers after the split, or if an operation other than
    attention reads several positions.
    """
    mesh, name = ranks.cp, config.parallel.cp_split
    assert mesh is not None
    try:
        embedding = module.get_submodule(name)
    except AttributeError:
        said = f"the model has no module {name!r}, which parallel.cp_split names"
        raise BadConfig(f"{said}; name the module that embeds its tokens") from None
    sample = torch.utils.data.default_collate([data[0]])[0]
    inputs = to_device(sample, ranks.device, parameter_dtype(config.precision.resolved))
    module.eval()
    with torch.no_grad():
        ring = config.parallel.cp_method == "ring"
        expected = part(call(module, inputs), mesh, balanced=ring)
        # Copies the part, because a view would keep the whole output in memory until the backward pass.
        embedding.register_forward_hook(
            lambda _, __, output: part(output, mesh, output.ndim - 2, balanced=ring).clone()
        )
        around: AroundAttention = Ring(mesh) if ring else Ulysses(mesh)
        around.wrap(module)
        try:
            found = call(module, inputs)
        except BadConfig:
            raise
        except Exception as error:
            reason = one_line(error, 200)
            raise BadConfig(
                f"the model can't be run if the sequence is cut after the module {name} ({reason}); {_FIX}"
            ) from error
    module.train()
    right = found.shape == expected.shape and torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-3)
    wrong = torch.tensor(float(not right), device=ranks.device)
    dist.all_reduce(wrong, group=mesh.get_group())  # the output may be wrong on some ranks only
    if wrong:
        raise BadConfig(f"the output of the model changes if the sequence is cut after the module {name}; {_FIX}")


def cutter(ranks: Ranks, layout: ParallelConfig) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns the function that takes whole targets and returns this rank's part, or None without context
    parallelism."""
    return partial(part, mesh=ranks.cp, balanced=layout.cp_method == "ring") if ranks.cp is not None else None


def part(tensor: torch.Tensor, mesh: DeviceMesh, dim: int = 1, *, balanced: bool = False) -> torch.Tensor:
    """Returns this rank's part of ``tensor`` along ``dim``. With ``balanced``, the part is a piece from the front and a
    piece from the back, as ring attention needs it. Raises ``BadData`` if ``dim`` can't be cut into equal parts."""
    length = tensor.shape[dim]
    if length % mesh.size():
        raise BadData(f"the sequence length {length} is not a multiple of cp {mesh.size()}; pad the sequence")
    mine = pieces(mesh.get_local_rank(), mesh.size(), length, balanced=balanced)
    found = [tensor.narrow(dim, piece.start, piece.stop - piece.start) for piece in mine]
    return found[0] if len(found) == 1 else torch.cat(found, dim)
