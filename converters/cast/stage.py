"""float32 ONNX to float16 or bfloat16, for runtimes that compute in what the file says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.errors import StageFailed, UnknownName, UnsupportedHere, one_line
from accel.progress import report
from accel.stage import StageConfig

if TYPE_CHECKING:
    import numpy as np

    from accel.converters.cast_search import Searched
    from accel.converters.cast_source import Source

_DATA_SAMPLES = 8


class CastFailed(StageFailed):
    """No mixture of the format and float32 gives finite outputs, or the result is no valid ONNX."""


@dataclass(frozen=True, kw_only=True)
class CastConfig(StageConfig):
    """``precision``: fp16 or bf16. ``keep_io``: float32 inputs and outputs stay float32. ``keep_fp32``: nodes to leave
    alone, by name or operator, with * and ?. ``data``: samples on which overflow is looked for, beside random ones."""

    precision: str = "fp16"
    keep_io: bool = True
    keep_fp32: tuple[str, ...] = ()
    data: Path | None = None


def cast(src: Artifact, config: CastConfig, out: Path) -> Artifact:
    """Every float32 tensor becomes 16-bit, but for the nodes that can't be: those without such a form at this opset,
    those that make sizes and positions, those whose constants (an epsilon) would be lost, and those that were seen to
    overflow when the model ran with real rounding. ``notes["kept_fp32"]`` names them with the reason.

    Masks stay masks: what is beyond the format's range in a Where, an Add and the like becomes its lowest number.
    Raises ``CastFailed``; ``UnknownName`` for a precision or a pattern that is none.
    """
    from accel.converters.cast_rules import fixed_in_float32
    from accel.converters.cast_search import search
    from accel.converters.cast_source import FORMATS, Source
    from accel.converters.onnx_write import onnx_artifact
    from accel.sources.onnx_weights import read_detached

    if config.precision not in FORMATS:
        raise UnknownName(f"unknown precision {config.precision!r}; cast to {' or '.join(FORMATS)}")
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
    """What the search runs on: every case of the signature with a batch of two at most, then the data."""
    from accel.verify.stream import SampleStream

    signature = src.signature
    for index, case in enumerate(signature.cases(largest_batch=2)):
        yield signature.example_inputs(seed=index, **case)
    if config.data is not None:
        yield from SampleStream(config.data, signature).batches(4, _DATA_SAMPLES)


def _notes(source: Source, found: Searched, config: CastConfig, feeds: int) -> dict[str, Any]:
    from accel.converters.cast_source import FLOAT

    forbidden: dict[str, int] = {}
    for index in range(len(source.nodes)):
        reason = source.typing(index).reason
        if reason:
            forbidden[reason] = forbidden.get(reason, 0) + 1
    moved = found.retyped.kept - found.kept.keys()
    reasons = {**found.kept, **dict.fromkeys(moved, "it only moves values between nodes in float32")}
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
    """Refuse where most weights belong to nodes that have no such form: the result would be slower than float32."""
    sizes = {name: math.prod(tensor.dims) for name, tensor in source.constants.items()}
    stuck: dict[str, int] = {}
    for name, size in sizes.items():
        reasons = [source.typing(i).reason for i in source.consumers.get(name, [])]
        if reasons and all(reasons):
            stuck[reasons[0]] = stuck.get(reasons[0], 0) + size
    if sum(stuck.values()) > sum(sizes.values()) / 2:
        reason = max(stuck, key=lambda r: stuck[r])
        newer = re.search(r"from opset (\d+)", reason)
        advice = f"export with --opset {newer[1]}" if newer else "keep it in float32"
        raise UnsupportedHere(f"most weights of {src.path} can't become {precision}: {reason}; {advice}")
    if not any(source.castable(index) for index in range(len(source.nodes))):
        raise UnsupportedHere(f"{src.path} holds no float32 tensor that could become {precision}; it needs no cast")


def _check_types(model: Any) -> None:
    """The checker propagates no data; a shape computed from constants can still contradict a declared one."""
    import onnx

    from accel.runtimes.onnx_rounded import without_weights

    try:
        onnx.shape_inference.infer_shapes(without_weights(model), check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        if "No schema registered" not in str(error):
            raise CastFailed(
                f"the cast model has contradicting types ({one_line(error)}); leave the node with --cast keep-fp32=NAME"
            ) from error


def _check_loads(path: Path) -> None:
    """ONNX Runtime has a float32 form of every float16 node, so what it refuses is wrong (bfloat16 it can't run)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise CastFailed(
            f"ONNX Runtime refuses the cast model ({one_line(error)}); leave the node with --cast keep-fp32=NAME"
        ) from error
