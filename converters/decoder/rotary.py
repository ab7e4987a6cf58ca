"""Brings queries, keys and values into the layout of the fused attention, and fuses rotary positions on the way."""

from __future__ import annotations

import numpy as np
import onnx

from accel.signature.decoder import IDS

from .wires import MICROSOFT, Wires

_HEADS_SECOND = [0, 2, 1, 3]


class Rotary:
    """Holds the tables of rotary positions, which all layers share."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._tables: dict[str, str] = {}
        self._rows = ""

    def joined(self, value: str, where: onnx.NodeProto) -> str:
        """Returns ``value`` [batch, heads, sequence, head_dim] as [batch, sequence, heads * head_dim]. New nodes are
        put in the place ``where``."""
        wires = self._wires
        found = self._rotated(value)
        if found is not None:
            plain, cos, sin = found
            tables = [self._table(one, where) for one in (cos, sin)]
            inputs = [self.joined(plain, where), self._row_numbers(where), *tables]
            return wires.instead(where, "RotaryEmbedding", inputs, domain=MICROSOFT)
        turned = wires.maker(value, "Transpose")
        if turned is not None and list(turned.attribute[0].ints) == _HEADS_SECOND:
            split = wires.maker(turned.input[0], "Reshape")
            if split is not None and len(wires.shape(split.input[0]) or []) == 3:
                return str(split.input[0])
            apart = turned.input[0]
        else:
            apart = wires.instead(where, "Transpose", [value], perm=_HEADS_SECOND)
        return wires.instead(where, "Reshape", [apart, wires.constant(np.array([0, 0, -1]))])

    def _rotated(self, value: str) -> tuple[str, str, str] | None:
        """Returns x, cos and sin of ``x * cos + rotated(x) * sin``, where ``rotated`` swaps the halves of a head and
        negates the first. Returns None for any other value."""
        wires = self._wires
        added = wires.maker(value, "Add")
        products = [wires.maker(name, "Mul") for name in added.input] if added is not None else []
        for one, other in (products, products[::-1]) if len(products) == 2 and all(products) else ():
            assert one is not None
            assert other is not None
            for at in (0, 1):
                plain = self._half_swapped(other.input[at])
                if plain is not None and plain in one.input:
                    cos, sin = one.input[1 - list(one.input).index(plain)], other.input[1 - at]
                    if self._repeats(cos) and self._repeats(sin):
                        return plain, cos, sin
        return None

    def _half_swapped(self, value: str) -> str | None:
        wires = self._wires
        joined = wires.maker(value, "Concat")
        if joined is None or len(joined.input) != 2:
            return None
        negated, second = wires.maker(joined.input[0], "Neg"), wires.maker(joined.input[1], "Slice")
        first = wires.maker(negated.input[0], "Slice") if negated is not None else None
        if first is None or second is None or first.input[0] != second.input[0]:
            return None
        size = wires.last_dim(first.input[0])
        starts = [wires.scalar(part.input[1]) for part in (first, second)]
        return first.input[0] if size is not None and starts == [size // 2, 0] else None

    def _repeats(self, value: str) -> bool:
        """Tells whether the halves of the last dim of ``value`` are the same."""
        wires = self._wires
        while (node := wires.maker(value, "Cos", "Sin", "Unsqueeze", "Mul", "Cast")) is not None:
            if node.op_type == "Mul" and wires.scalar(node.input[1]) is None:
                return False
            value = node.input[0]
        joined = wires.maker(value, "Concat")
        return joined is not None and len(joined.input) == 2 and joined.input[0] == joined.input[1]

    def _table(self, value: str, where: onnx.NodeProto) -> str:
        """Returns the table [batch * sequence, head_dim / 2] of the cosines or sines [batch or 1, 1, sequence,
        head_dim]."""
        if value not in self._tables:
            wires = self._wires
            size = wires.last_dim(value)
            assert size is not None, "the halves of a head were compared"
            first = [wires.constant(np.array([number])) for number in (0, size // 2, -1)]
            half = wires.instead(where, "Slice", [value, *first])
            rows = wires.first("Shape", [IDS], start=0, end=1)
            ones = wires.constant(np.array([1, 1, 1]))
            shape = wires.instead(where, "Concat", [rows, ones], axis=0)
            every = wires.instead(where, "Expand", [half, shape])
            flat = wires.constant(np.array([-1, size // 2]))
            self._tables[value] = wires.instead(where, "Reshape", [every, flat])
        return self._tables[value]

    def _row_numbers(self, where: onnx.NodeProto) -> str:
        """Returns the row of the table for each token, [batch, sequence]."""
        if not self._rows:
            wires = self._wires
            shape = wires.first("Shape", [IDS])
            count = wires.first("ReduceProd", [shape], keepdims=0)
            zero, one = (wires.constant(np.array(number)) for number in (0, 1))
            self._rows = wires.instead(where, "Reshape", [wires.first("Range", [zero, count, one]), shape])
        return self._rows
