"""Implements context parallelism by ring attention. Each rank holds a part of every sequence, and the parts of keys and
values travel around the ring of ranks.

The method is from Liu et al. 2023, "Ring Attention with Blockwise Transformers". A rank attends from its own queries to
one part of keys and values at a time, and combines the results by their logsumexp (Rabe and Staats 2021,
"Self-attention Does Not Need O(n^2) Memory"). The number of heads may be any, unlike with Ulysses.

In causal attention, early positions see few keys. So that all ranks have the same work, a sequence is cut into twice as
many pieces as ranks, and a rank holds one piece from the front and one from the back (the load balancing of Llama 3,
Grattafiori et al. 2024, section 3.3.2). If the length isn't a multiple of twice the ranks, a rank holds one piece.

A rank computes the scores of a few queries at a time, so the memory doesn't grow with the square of the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accel.errors import BadConfig
from accel.plan.rules import RING_SCORES

from .shared_attention import Call, SharedAttention


class Ring(SharedAttention):
    """A context in which keys and values travel around the ring of ranks."""

    def check(self, query: torch.Tensor, key: torch.Tensor, call: Call) -> None:
        if call.dropout:
            raise BadConfig("ring attention takes no dropout; use dropout 0 in attention, or parallel.cp = 1")
        if query.shape[2] != key.shape[2]:
            raise BadConfig(
                f"ring attention gets {query.shape[2]} queries and {key.shape[2]} keys, but takes only as many keys as "
                "queries; use parallel.cp = 1"
            )

    def shared(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
        if call.grouped:
            copies = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        factor = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        group = self.mesh.get_group()
        found: torch.Tensor = _RingAttention.apply(query, key, value, call.mask, group, call.causal, factor)
        return found


def pieces(rank: int, ranks: int, length: int, *, balanced: bool = True) -> list[slice]:
    """Returns the pieces of a sequence of ``length`` positions that ``rank`` holds, in order: one from the front and
    one from the back, or one piece if ``balanced`` is false or the length can't be cut into pairs."""
    if not balanced or length % (2 * ranks):
        size = length // ranks
        return [slice(rank * size, (rank + 1) * size)]
    size = length // (2 * ranks)
    return [slice(index * size, (index + 1) * size) for index in (rank, 2 * ranks - 1 - rank)]


@dataclass(frozen=True)
class _Block:
    """Selects a block of scores. ``queries`` and ``keys`` are places in the parts of two ranks, and ``rows`` and
    ``columns`` are the positions of these places in the sequence. In a ``diagonal`` block, the last keys are later than
    the first queries."""

    queries: slice
    keys: slice
    rows: slice
    columns: slice
    diagonal: bool

    def scores(self, query: torch.Tensor, key: torch.Tensor, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns float32[..., queries, keys]. In causal attention, a query doesn't see the keys after it."""
        found = query[..., self.queries, :] @ key[..., self.keys, :].float().transpose(-2, -1)
        found.mul_(scale)
        if self.diagonal:
            later = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device)
            found.masked_fill_(later.triu(1 + self.rows.start - self.columns.start), -torch.inf)
        if mask is not None:
            own = mask[..., self.rows if mask.shape[-2] > 1 else slice(None), self.columns]
            found = found.masked_fill_(~own, -torch.inf) if own.dtype == torch.bool else found.add_(own)
        return found


def _blocks(rank: int, source: int, ranks: int, part: int, *, causal: bool, most: int) -> Iterator[_Block]:
    """Yields the blocks between the queries of ``rank`` and the keys of ``source``. ``part`` is the number of positions
    of a rank. A block has at most ``most`` queries. Leaves out the keys that no query of a block sees."""
    for rows, queries in _placed(pieces(rank, ranks, part * ranks)):
        for columns, keys in _placed(pieces(source, ranks, part * ranks)):
            if columns.start > rows.start and causal:
                continue
            diagonal, size = causal and columns == rows, rows.stop - rows.start
            for first in range(0, size, most):
                last = min(first + most, size)
                seen = last if diagonal else size
                yield _Block(
                    queries=slice(queries.start + first, queries.start + last),
                    keys=slice(keys.start, keys.start + seen),
                    rows=slice(rows.start + first, rows.start + last),
                    columns=slice(columns.start, columns.start + seen),
                    diagonal=diagonal,
                )


def _most_queries(query: torch.Tensor, ranks: int) -> int:
    """Returns the number of queries [batch, heads, positions, width] whose scores are computed at once."""
    piece = pieces(0, ranks, query.shape[-2] * ranks)[0]
    scores: int = query.shape[0] * query.shape[1] * (piece.stop - piece.start)  # the scores of one query
    return max(1, RING_SCORES // scores)


def _placed(mine: list[slice]) -> Iterator[tuple[slice, slice]]:
    """Yields each piece of a rank with its place in the rank's part."""
    size = mine[0].stop - mine[0].start
    for index, piece in enumerate(mine):
        yield piece, slice(index * size, (index + 1) * size)


class _RingAttention(torch.autograd.Function):
    """Computes attention over all ranks of a group. Keeps the inputs, the output and the logsumexp for the backward
    pass, which sends keys and values around the ring again, together with their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        group: dist.ProcessGroup,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        q, pair, most = query.float(), torch.stack((key, value)), _most_queries(query, ranks)
        out = torch.zeros_like(q)
        total = q.new_full(q.shape[:-1], -torch.inf)
        for step in range(ranks):
            arriving = _Passed(pair, group) if step < ranks - 1 else None
            for block in _blocks(rank, (rank - step) % ranks, ranks, q.shape[-2], causal=causal, most=most):
                scores, before = block.scores(q, pair[0], scale, mask), total[..., block.queries]
                both = torch.logaddexp(before, scores.logsumexp(-1))
                to = _finite(both)
                seen = scores.sub_(to[..., None]).exp_() @ pair[1][..., block.keys, :].float()
                out[..., block.queries, :] = out[..., block.queries, :] * (before - to).exp()[..., None] + seen
                total[..., block.queries] = both
                del scores  # before the next block's scores are computed
            pair = arriving.wait() if arriving is not None else pair
        ctx.save_for_backward(query, key, value, mask, out, _finite(total))
        ctx.group, ctx.causal, ctx.scale = group, causal, scale
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, mask, out, total = ctx.saved_tensors
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        q, g = query.float(), gradient.float()
        delta = (g * out).sum(-1, keepdim=True)
        to_query = torch.zeros_like(q)
        pair, most = torch.stack((key, value)), _most_queries(query, ranks)
        to_pair = torch.zeros_like(pair, dtype=torch.float32)
        for step in range(ranks):
            arriving = _Passed(pair, ctx.group) if step < ranks - 1 else None
            for block in _blocks(rank, (rank - step) % ranks, ranks, q.shape[-2], causal=ctx.causal, most=most):
                k, v = pair[..., block.keys, :].float()
                mine = (..., block.queries, slice(None))
                weights = block.scores(q, pair[0], ctx.scale, mask).sub_(total[mine[:2]][..., None]).exp_()
                to_scores = (g[mine] @ v.transpose(-2, -1)).sub_(delta[mine]).mul_(weights).mul_(ctx.scale)
                to_query[mine] += to_scores @ k
                to_pair[0][..., block.keys, :] += to_scores.transpose(-2, -1) @ q[mine]
                to_pair[1][..., block.keys, :] += weights.transpose(-2, -1) @ g[mine]
                del weights, to_scores  # before the next block's scores are computed
            # The gradients travel with their keys and values, and come home after the last step.
            to_pair = _Passed(to_pair, ctx.group).wait()
            pair = arriving.wait() if arriving is not None else pair
        to_key, to_value = to_pair.to(key.dtype)
        return to_query.to(query.dtype), to_key, to_value, None, None, None, None


def _finite(total: torch.Tensor) -> torch.Tensor:
    """Returns the logsumexp ``total``, with 0 for a query that sees no key. The weights of such a query are then 0."""
    return total.masked_fill(total == -torch.inf, 0.0)


class _Passed:
    """A tensor on its way to the next rank of the ring. ``wait`` returns the tensor of the rank before."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        to, back = (dist.get_global_rank(group, (rank + turn) % ranks) for turn in (1, -1))
        self.sent, self.found = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        sends = [dist.P2POp(dist.isend, self.sent, to, group), dist.P2POp(dist.irecv, self.found, back, group)]
        self.work = dist.batch_isend_irecv(sends)

    def wait(self) -> torch.Tensor:
        for one in self.work:
            one.wait()
        return self.found
