"""Casts float32 ONNX to float16 or bfloat16, for runtimes that compute in the dtypes of the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.errors import StageFailed, UnknownName, UnsupportedHere, one_line
from accel.progress import report
from accel.sources.onnx.refusal import plain_reason
from accel.spelling import option
from accel.stage import StageConfig

if TYPE_CHECKING:
    import numpy as np

    from .overflow_search import Searched
    from .source import Source

_DATA_SAMPLES = 8


class CastFailed(StageFailed):
    """The model could not be cast: no mixture of 16-bit and float32 nodes gives finite outputs, or the result is not
    valid ONNX."""


@dataclass(frozen=True, kw_only=True)
class CastConfig(StageConfig):
    """``precision`` is fp16 or bf16. ``keep_io`` keeps float32 inputs and outputs in float32. ``keep_fp32`` lists
    patterns with the wildcards * and ?. Nodes whose name or operator matches a pattern stay float32. The search for
    overflows uses random inputs, and the samples in the file ``data``."""

    precision: str = "fp16"
    keep_io: bool = True
    keep_fp32: tuple[str, ...] = ()
    data: Path | None = None


def cast(src: Artifact, config: CastConfig, out: Path) -> Artifact:
    """Casts the float32 tensors of ``src`` to 16 bits, except at nodes that need float32.

    A node needs float32 in each of these cases:

    - The node has no 16-bit schema at this opset.
    - The node computes sizes or positions.
    - The node overflows in a run with 16-bit rounding.
    - The 16-bit format would lose a constant of the node, such as an epsilon.

    ``notes["kept_fp32"]`` lists the float32 nodes with reasons.

    In a Where, an Add or a similar node, a constant beyond the format's range counts as a mask. The mask becomes the
    format's lowest or largest number. Raises ``UnknownName`` if the precision is unknown or a pattern matches nothing,
    and ``CastFailed`` if the cast fails.
    """
    from accel.sources.onnx.weights import read_detached

    from ..graph.write import onnx_artifact
    from .overflow_search import search
    from .rules import fixed_in_float32
    from .source import FORMATS, Source

    if config.precision not in FORMATS:
        raise UnknownName(f"unknown precision {config.precision!r}; use {' or '.join(FORMATS)}")
    report(f"cast to {config.precision}")
    source = Source(read_detached(src.path), FORMATS[config.precision])
    _check_worthwhile(src, source, config.precision)
    kept = fixed_in_float32(source, config.keep_fp32)
    feeds = list(_feeds(src, config))
    try:
        found = search(source, kept, feeds, keep_io=config.keep_io)
        _check_types(found.retyped.model)
        made = onnx_artifact(src, found.retyped.model, out, _notes(source, found, config, len(feeds)))
        if config.precision == "fp16":
            _check_loads(made.path)
    except StageFailed as error:
        raise CastFailed(str(error)) from error
    return made


def _feeds(src: Artifact, config: CastConfig) -> Iterator[dict[str, np.ndarray]]:
    """Yields the inputs of the search. The first inputs are random: one set of inputs for each combination of dim sizes
    to test, with a batch of at most two. The other inputs are samples from ``config.data``."""
    from accel.proof.stream import SampleStream

    signature = src.signature
    for index, case in enumerate(signature.cases(largest_batch=2)):
        yield signature.example_inputs(seed=index, **case)
    if config.data is not None:
        yield from SampleStream(config.data, signature).batches(4, _DATA_SAMPLES)


def _notes(source: Source, found: Searched, config: CastConfig, feeds: int) -> dict[str, Any]:
    from .source import FLOAT

    forbidden: dict[str, int] = {}
    for index in range(len(source.nodes)):
        reason = source.typing(index).reason
        if reason:
            forbidden[reason] = forbidden.get(reason, 0) + 1
    moved = found.retyped.kept - found.kept.keys()
    reasons = {**found.kept, **dict.fromkeys(moved, "it only moves values between float32 nodes")}
    low = sum(source.castable(i) for i in range(len(source.nodes)) if i not in found.retyped.kept)
    return {
        "precision": config.precision,
        "nodes_cast": low,
        "kept_fp32": [
            {"node": source.label(i), "op": source.nodes[i].op_type, "reason": reasons[i]} for i in sorted(reasons)
        ],
        "no_such_form": forbidden,
        "casts_inserted": found.retyped.casts,
        "float32_constants": sum(t.data_type == FLOAT for t in found.retyped.model.graph.initializer),
        "measured": {"feeds": feeds, "rounds": found.rounds, "rel_l2": dict(found.errors)},
    }


def _check_worthwhile(src: Artifact, source: Source, precision: str) -> None:
    """Raises ``UnsupportedHere`` if most weights belong to nodes that can't be 16-bit, or if nothing can be cast.

    A model with most weights in float32 would be slower than the original.
    """
    sizes = {name: math.prod(tensor.dims) for name, tensor in source.constants.items()}
    # Counts the weights that can't be cast. Each key has the reason and the first opset that would allow the cast.
    stuck: dict[tuple[str, int | None], int] = {}
    for name, size in sizes.items():
        typings = [source.typing(i) for i in source.consumers.get(name, [])]
        if typings and all(typing.reason for typing in typings):
            cause = typings[0].reason, typings[0].least_opset
            stuck[cause] = stuck.get(cause, 0) + size
    if sum(stuck.values()) > sum(sizes.values()) / 2:
        reason, newer = max(stuck, key=lambda cause: stuck[cause])
        advice = f"export with {option('opset', newer)}" if newer else "keep the model in float32"
        raise UnsupportedHere(f"most weights of {src.path} can't be cast to {precision} ({reason}); {advice}")
    if not any(source.castable(index) for index in range(len(source.nodes))):
        raise UnsupportedHere(f"{src.path} has no float32 tensor that can be cast to {precision}; leave out the cast")


def _check_types(model: Any) -> None:
    """Raises ``CastFailed`` if strict shape inference finds contradictions.

    The ONNX checker doesn't evaluate constants, so a shape computed from constants may still contradict a declared
    shape.
    """
    import onnx

    from accel.runtimes.onnx_rounded import without_weights

    try:
        onnx.shape_inference.infer_shapes(without_weights(model), check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        if "No schema registered" not in str(error):
            raise CastFailed(
                f"the cast model has contradicting types ({one_line(error)}); pass "
                f"{option('cast', ['keep-fp32=NAME'])} to keep the node in float32"
            ) from error


def _check_loads(path: Path) -> None:
    """Raises ``CastFailed`` if ONNX Runtime can't load the float16 model.

    ONNX Runtime can compute every float16 node in float32, so it refuses a float16 model only if the model is invalid.
    Models in bfloat16 aren't checked, because ONNX Runtime can't run them.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise CastFailed(
            f"ONNX Runtime refuses the cast model ({plain_reason(error)}); pass "
            f"{option('cast', ['keep-fp32=NAME'])} to keep the node in float32"
        ) from error
