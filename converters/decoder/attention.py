"""Fuses the attention of a decoder into ONNX Runtime's GroupQueryAttention, whose cache can grow in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from accel.signature.decoder import IDS, MASK, Cache

from .rotary import Rotary
from .wires import MICROSOFT, Wires

# A mask of minus infinity would make NaN out of a row in which every key is masked, as padding is.
_MASKED = -1e30
_HEADS_SECOND = [0, 2, 1, 3]


class NotFused(Exception):
    """An attention differs from what the operator computes. The message is a phrase that says how."""


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """The attention of a layer. ``query`` is [batch, heads, sequence, head_dim]. Scores are bounded by ``softcap``
    unless it is 0, and then ``masks`` are added. ``end`` is the node that makes the result [batch, sequence, heads *
    head_dim]."""

    key: str
    value: str
    query: str
    scale: float
    softcap: float
    masks: tuple[str, ...]
    end: onnx.NodeProto


class Fusion:
    """Replaces every attention of the decoder in ``wires``."""

    def __init__(self, wires: Wires, cache: Cache) -> None:
        self._wires = wires
        self._presents = {present: past for past, present in cache.presents.items()}
        self._pasts = {spec.name: spec for spec in cache.past}
        self._masks: dict[tuple[str, ...], str] = {}
        self._rotary = Rotary(wires)
        self._lengths: tuple[str, str] | None = None

    def run(self) -> int:
        """Fuses all attentions and returns their number. Raises ``NotFused`` if one of them can't be fused."""
        wires = self._wires
        if all(value.name != MASK for value in wires.model.graph.input):
            raise NotFused(f"it has no input {MASK}, which tells how many tokens are in the cache")
        found = [one for node in wires.nodes if node.op_type == "Softmax" and (one := self._attention(node))]
        if len(found) * 2 != len(self._presents):
            raise NotFused(f"{len(self._presents) // 2 - len(found)} of its layers have another form of attention")
        for one in found:
            self._fuse(one)
        for past in self._pasts:
            self._measure_by_mask(past)
        return len(found)

    def _attention(self, softmax: onnx.NodeProto) -> _Attention | None:
        wires = self._wires
        masks: list[str] = []
        scores = softmax.input[0]
        while (added := wires.maker(scores, "Add")) is not None:
            sides = [wires.maker(wires.up(name)[0], "MatMul", "Add", "Tanh") is not None for name in added.input]
            if sides.count(True) != 1:
                return None
            masks.append(added.input[sides.index(False)])
            scores = added.input[sides.index(True)]
        scores, factor = wires.up(scores)
        softcap = 0.0
        if (bounded := wires.maker(scores, "Tanh")) is not None:
            softcap = factor
            scores, factor = wires.up(bounded.input[0])
            factor *= softcap
        product = wires.maker(scores, "MatMul")
        weighted = wires.only_reader(softmax.output[0])
        if product is None or not masks or weighted is None or weighted.op_type != "MatMul":
            return None
        key = wires.up_to(product.input[1], list(self._presents))
        value = wires.up_to(weighted.input[1], list(self._presents))
        end = self._end(weighted)
        if key is None or value is None or end is None or value[1] != 1.0:
            return None
        query, more = wires.up(product.input[0])
        scale = factor * more * key[1]
        return _Attention(
            key=key[0], value=value[0], query=query, scale=scale, softcap=softcap, masks=tuple(masks), end=end
        )

    def _end(self, weighted: onnx.NodeProto) -> onnx.NodeProto | None:
        """Returns the node that joins the heads of the result. Rows without any key may be set to 0 before."""
        wires = self._wires
        after = wires.only_reader(weighted.output[0])
        if after is not None and after.op_type == "Where" and wires.scalar(after.input[2]) == 0:
            after = wires.only_reader(after.output[0])
        if after is not None and after.op_type == "Reshape" and wires.shape(after.output[0]) is not None:
            after = wires.only_reader(after.output[0])
        if after is None or after.op_type != "Transpose" or _perm(after) != _HEADS_SECOND:
            return None
        joined = wires.only_reader(after.output[0])
        return joined if joined is not None and joined.op_type == "Reshape" else None

    def _fuse(self, one: _Attention) -> None:
        wires, end = self._wires, one.end
        new, pasts = [], []
        for present in (one.key, one.value):
            joined = wires.maker(present, "Concat")
            past = self._presents[present]
            if joined is None or len(joined.input) != 2 or joined.input[0] != past:
                raise NotFused(f"{present} isn't {past} and the new tokens")
            pasts.append(past)
            new.append(joined.input[1])
        heads = wires.shape(one.query)
        cached = [self._pasts[past].shape for past in pasts]
        if heads is None or not isinstance(heads[1], int) or cached[0][1:] != cached[1][1:] or heads[3] != cached[0][3]:
            raise NotFused(f"the heads of {one.key} and of its queries or values have unknown or unequal sizes")
        query, key = (self._rotary.joined(value, end) for value in (one.query, new[0]))
        value = self._rotary.joined(new[1], end)
        lengths, total = self._length_inputs()
        mask = self._mask(one.masks, end)
        attributes: dict[str, Any] = {
            "num_heads": heads[1], "kv_num_heads": cached[0][1], "scale": one.scale, "softcap": one.softcap,
        }  # fmt: skip
        result = end.output[0]
        flat = len(wires.shape(result) or []) != 3
        wires.instead(
            end,
            "GroupQueryAttention",
            [query, key, value, *pasts, lengths, total, "", "", "", mask],
            [wires.name("attention") if flat else result, one.key, one.value],
            MICROSOFT,
            **attributes,
        )
        if flat:  # some models join the batch and the sequence before a product
            wires.instead(end, "Reshape", [wires.made(end), end.input[1]], [result])

    def _mask(self, masks: tuple[str, ...], where: onnx.NodeProto) -> str:
        """Returns the sum of ``masks`` without infinities. The layers with equal masks share it."""
        if masks not in self._masks:
            wires = self._wires
            total = masks[0]
            for more in masks[1:]:
                total = wires.instead(where, "Add", [total, more])
            least = wires.constant(np.array(_MASKED, np.float32), "masked")
            self._masks[masks] = wires.instead(where, "Max", [total, least])
        return self._masks[masks]

    def _length_inputs(self) -> tuple[str, str]:
        """Returns the number of the last token of each row [batch] and the number of all tokens []. Both count the
        padding, which the mask excludes."""
        if self._lengths is None:
            wires = self._wires
            whole = wires.first("Cast", [wires.first("Shape", [MASK], start=1, end=2)], to=onnx.TensorProto.INT32)
            total = wires.first("Squeeze", [whole, wires.constant(np.array([0]))])
            last = wires.first("Sub", [whole, wires.constant(np.array([1], np.int32))])
            rows = wires.first("Shape", [IDS], start=0, end=1)
            self._lengths = wires.first("Expand", [last, rows]), total
        return self._lengths

    def _measure_by_mask(self, past: str) -> None:
        """Takes every size of the input ``past`` from the mask and the tokens, because the buffer of a cache that grows
        in place has more room than tokens."""
        wires = self._wires
        joins = [wires.makers[present] for present in self._presents]
        for node in wires.readers[past]:
            if any(node is join for join in joins):
                continue
            if node.op_type != "Shape":
                raise NotFused(f"{node.op_type} reads {past}")
            attributes = {a.name: a.i for a in node.attribute}
            axes = range(4)[attributes.get("start", 0) : attributes.get("end", 4)]
            sizes = [self._size(past, axis) for axis in axes]
            wires.instead(node, "Concat", sizes, [node.output[0]], axis=0)

    def _size(self, past: str, axis: int) -> str:
        wires = self._wires
        if axis == 0:
            return wires.first("Shape", [IDS], start=0, end=1)
        if axis == 2:
            whole, new = wires.first("Shape", [MASK], start=1, end=2), wires.first("Shape", [IDS], start=1, end=2)
            return wires.first("Sub", [whole, new])
        return wires.constant(np.array([self._pasts[past].shape[axis]], np.int64))


def _perm(node: onnx.NodeProto) -> list[int]:
    return next((list(a.ints) for a in node.attribute if a.name == "perm"), [])
