"""Searches for the nodes that have to stay float32, by running the retyped model on data with 16-bit rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from accel.errors import StageFailed, one_line
from accel.progress import report
from accel.proof.compare import rel_l2
from accel.runtimes.onnx_rounded import RoundedModel, in_chunks
from accel.spelling import option
from accel.tables.limits import CAST_LIMITS

from .retype import Retyped, retype
from .rules import largest_value, masked_tensors
from .source import FLOAT, FORMATS, Source, largest, to_low

# If the relative l2 error of an output exceeds this limit, the search looks for the node that causes the error.
_TOLERANCE = {FORMATS[form]: CAST_LIMITS[form] for form in ("fp16", "bf16")}
# A node counts as the cause of an error if the error of its output exceeds the error of its input by this factor.
_JUMP = 8.0

_ROUNDS = 40
_CHUNK_BYTES = 1 << 30

# Nodes that square their input. GPU kernels compute the square in the dtype of the input.
_SQUARING = frozenset(
    {
        "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization", "LpPool",
        "MeanVarianceNormalization", "RMSNormalization", "ReduceL2", "ReduceSumSquare",
    }
)  # fmt: skip
_EXPONENTIAL = frozenset({"ReduceLogSumExp"})

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Seen:
    """A comparison of a tensor in the retyped model with the same tensor in the float32 model. ``largest`` is the
    largest absolute value in float32. ``lost`` counts the values that are finite in float32 but not in 16 bits. For
    floats and 8-bit integers, ``error`` is the relative l2 error. For other dtypes, ``error`` is the share of wrong
    values.
    """

    largest: float
    lost: int
    error: float


@dataclass(frozen=True)
class Searched:
    """``kept`` maps the index of each node that stays float32 to the reason. ``errors`` has the largest relative l2
    error of each output."""

    retyped: Retyped
    kept: Mapping[int, str]
    errors: Mapping[str, float]
    rounds: int


def search(source: Source, kept: Mapping[int, str], feeds: Sequence[Feeds], *, keep_io: bool) -> Searched:
    """Retypes and runs the model again and again, until no 16-bit node overflows or loses precision.

    A node that overflows or loses precision stays float32 in all later runs. Raises ``StageFailed`` if an output still
    has infinities or NaN that the float32 model doesn't have.
    """
    reference = RoundedModel(source.model)
    names = [n for n in reference.tensors if n in source.types]
    chunks = [list(in_chunks(source.model, names, one, _CHUNK_BYTES)) for one in feeds]
    masked = masked_tensors(source)
    kept = dict(kept)
    for rounds in range(1, _ROUNDS + 1):
        report(f"measuring in {_label(source)}, round {rounds}: {len(kept)} nodes in float32")
        retyped = retype(source, kept, keep_io=keep_io)
        rounded = RoundedModel(retyped.model)
        errors: dict[str, float] = {}
        found: dict[int, str] = {}
        for one, groups in zip(feeds, chunks, strict=True):
            seen = _compare(reference, rounded, one, groups, masked, source, retyped, set(source.outputs))
            for name in source.outputs:
                if name in seen:
                    errors[name] = max(errors.get(name, 0.0), seen[name].error)
            culprits = _lossy(source, retyped, seen, masked, kept)
            if not culprits and _far_off(source, seen):
                seen = _compare(reference, rounded, one, groups, masked, source, retyped, set(names))
                culprits = _new(source, kept, _astray(source, retyped, seen))
            for index, reason in culprits:
                found.setdefault(index, reason)
        if not found:
            return Searched(retyped, kept, errors, rounds)
        kept |= found
        del rounded  # frees memory before the next model is loaded
    raise StageFailed(
        f"the {_label(source)} model still computes infinities after {len(kept)} nodes were kept in float32; "
        "use fp32 or bf16"
    )


def _label(source: Source) -> str:
    return next(name for name, kind in FORMATS.items() if kind == source.low)


def _compare(
    reference: RoundedModel,
    rounded: RoundedModel,
    feeds: Feeds,
    chunks: Sequence[Sequence[str]],
    masked: set[str],
    source: Source,
    retyped: Retyped,
    measured: set[str],
) -> dict[str, Seen]:
    """Compares each tensor in the float32 model and in the retyped model. Computes errors only for the tensors in
    ``measured``, because computing errors is slow."""
    low = retyped.model
    own = {value.name: value.type.tensor_type.elem_type for value in low.graph.input}
    given = {n: _rounded_feed(v, own.get(n, FLOAT), source.low) for n, v in feeds.items()}
    top = largest(source.low)
    seen = {n: Seen(largest_value(v), 0, 0.0) for n, v in feeds.items() if source.is_float(n)}
    for names in chunks:
        wanted = reference.run(feeds, names)
        try:
            found = rounded.run(given, [n for n in names if n in rounded.types])
        except Exception as error:
            reason = one_line(error, 200)
            raise StageFailed(
                f"the cast model doesn't run ({reason}); pass {option('cast', ['keep-fp32=NAME'])} to keep the "
                "failing node in float32"
            ) from error
        for name, value in found.items():
            seen[name] = _look(wanted[name], value, top if name in masked else math.inf, name in measured)
    return seen


def _rounded_feed(value: np.ndarray, kind: int, low: int) -> np.ndarray:
    return to_low(value, low).astype(np.float32) if kind == low and value.dtype == np.float32 else value


def _look(wanted: np.ndarray, found: np.ndarray, clamped: float, measure: bool) -> Seen:
    """Compares one tensor. If the tensor may contain mask values, ``clamped`` is the format's largest number, otherwise
    infinity. An absolute value above ``clamped`` counts as a mask value. It is no error if a mask value becomes the
    format's largest or lowest number."""
    if wanted.shape != found.shape:
        return Seen(0.0, 0, math.inf)
    if wanted.dtype.kind != "f":
        return Seen(0.0, 0, _differing(wanted, found) if measure else 0.0)
    compared = np.isfinite(wanted)
    if clamped < math.inf:
        same = (np.abs(wanted) > clamped) & (np.sign(wanted) == np.sign(found)) & (np.abs(found) >= clamped * 0.99)
        compared &= ~same
    lost = int((compared & ~np.isfinite(found)).sum())
    error = math.inf if lost else 0.0
    if measure and not lost:
        error = rel_l2(np.where(compared, wanted, 0), np.where(compared, found, 0))
    return Seen(largest_value(wanted), lost, error)


def _differing(wanted: np.ndarray, found: np.ndarray) -> float:
    if wanted.dtype.itemsize == 1 and wanted.dtype.kind in "iu":  # a quantized value may be off by one step
        return rel_l2(wanted, found)
    return float(np.mean(wanted != found)) if wanted.size else 0.0


def _new(source: Source, kept: Mapping[int, str], found: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(index, reason) for index, reason in found if index not in kept and source.castable(index)]


def _lossy(
    source: Source, retyped: Retyped, seen: Mapping[str, Seen], masked: set[str], kept: Mapping[int, str]
) -> list[tuple[int, str]]:
    """Returns the next nodes to keep in float32.

    Returns the nodes whose values exceed the format's range. If no value exceeds the range, returns the nodes that give
    infinities or NaN. Values out of range come first, because they may cause infinities in later nodes.
    """
    found = _new(source, kept, _out_of_range(source, seen, masked))
    found = found or _new(source, kept, _lost_values(source, retyped, seen))
    lost = [name for name in source.outputs if name in seen and seen[name].lost]
    if lost and not found:
        raise StageFailed(
            f"the output {lost[0]!r} has values beyond the range of {_label(source)}; keep the model's inputs and "
            "outputs in float32"
        )
    return found


def _far_off(source: Source, seen: Mapping[str, Seen]) -> list[str]:
    """Returns the outputs whose error exceeds the limit of the format."""
    quantized = any(node.op_type == "QuantizeLinear" for node in source.nodes)
    limit = CAST_LIMITS["quantized"] if quantized else _TOLERANCE[source.low]
    return [name for name in source.outputs if name in seen and seen[name].error > limit]


def _out_of_range(source: Source, seen: Mapping[str, Seen], masked: set[str]) -> Iterator[tuple[int, str]]:
    """Yields the producers and consumers of tensors that exceed the format's range. Also yields nodes that square or
    exponentiate their input, if the result exceeds the range."""
    top = largest(source.low)
    for name, tensor in seen.items():
        if source.is_float(name) and name not in masked and tensor.largest > top:
            if name in source.producer:
                yield source.producer[name], f"{name!r} reaches {tensor.largest:.3g}"
            for user in source.consumers.get(name, []):
                yield user, f"its input {name!r} reaches {tensor.largest:.3g}"
    for index, node in enumerate(source.nodes):
        tensor_in = seen.get(node.input[0]) if node.input else None
        if tensor_in is None:
            continue
        if node.op_type in _SQUARING and tensor_in.largest**2 > top:
            yield index, f"it squares {node.input[0]!r}, which reaches {tensor_in.largest:.3g}"
        if node.op_type in _EXPONENTIAL and tensor_in.largest > math.log(top):
            yield index, f"it takes the exponential of {node.input[0]!r}, which reaches {tensor_in.largest:.3g}"


def _lost_values(source: Source, retyped: Retyped, seen: Mapping[str, Seen]) -> Iterator[tuple[int, str]]:
    """Yields the first nodes that give infinities or NaN. If a node gives infinities and can't be changed to float32,
    yields the nearest 16-bit nodes before this node."""
    for index, node in enumerate(source.nodes):
        out = [n for n in node.output if n in seen and seen[n].lost]
        if not out or any(n in seen and seen[n].lost for n in node.input):
            continue
        reason = f"{out[0]!r} has {seen[out[0]].lost} infinities or NaN that float32 doesn't have"
        if source.castable(index) and index not in retyped.kept:
            yield index, reason
        else:
            yield from _makers(source, retyped, index, reason)


def _makers(source: Source, retyped: Retyped, index: int, reason: str) -> Iterator[tuple[int, str]]:
    """Yields the nearest nodes before ``index`` that still compute in 16 bits."""
    queue, visited = [index], {index}
    while queue:
        for name in source.nodes[queue.pop()].input:
            maker = source.producer.get(name)
            if maker is None or maker in visited or not source.is_float(name):
                continue
            visited.add(maker)
            if source.castable(maker) and maker not in retyped.kept:
                yield maker, f"further on, {reason}"
            else:
                queue.append(maker)


def _astray(source: Source, retyped: Retyped, seen: Mapping[str, Seen]) -> Iterator[tuple[int, str]]:
    """If an output of the model is inaccurate, yields the nodes that cause the error: the error of their outputs far
    exceeds the error of their inputs. Also yields the nearest 16-bit nodes before each of these nodes."""
    limit = _TOLERANCE[source.low]
    for index in sorted(_above(source, _far_off(source, seen))):
        node = source.nodes[index]
        after = max((seen[n].error for n in node.output if n in seen), default=0.0)
        before = max((seen[n].error for n in node.input if n in seen), default=0.0)
        if node.op_type == "QuantizeLinear" or before > limit or after <= max(limit, _JUMP * before):
            continue
        reason = f"the error grows from {before:.2g} to {after:.2g} in it"
        if source.castable(index) and index not in retyped.kept:
            yield index, reason
        yield from _makers(source, retyped, index, f"in {source.label(index)!r} {reason}")


def _above(source: Source, names: Sequence[str]) -> set[int]:
    """Returns every node that the tensors ``names`` depend on."""
    queue = [source.producer[n] for n in names if n in source.producer]
    found: set[int] = set(queue)
    while queue:
        for name in source.nodes[queue.pop()].input:
            maker = source.producer.get(name)
            if maker is not None and maker not in found:
                found.add(maker)
                queue.append(maker)
    return found
