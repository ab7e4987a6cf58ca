"""PyTorch to ONNX: a ladder of exporters, each rung verified, the first that is right is taken."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.converters.export_advice import own_fault
from accel.converters.torch_exporters import dynamo, example, legacy, named
from accel.errors import AccelError, BadInputSpec, ExportFailed, no_space, one_line
from accel.progress import report
from accel.sources.onnx_file import describe, external_files, read_proto
from accel.sources.output_specs import farthest
from accel.stage import GateResult, StageConfig, check_contract
from accel.stage_table import Stage, get_stage
from accel.verify.gates import OutputGate, worst_result

# Rewriting a float32 graph moves the result by a few units in the last place of each sum.
FP32_LIMIT = 1e-4
# A tracing exporter writes down the branch that the example took: it has to be right on many others.
SEEDS = {"dynamo": 3, "legacy": 16}
LIMITS = {"fp32": FP32_LIMIT, "fp16": 2e-2, "bf16": 1e-1}

# How the two exporters say that they have no form of an operator, and the colours that one of them prints.
_NO_OPERATOR = re.compile(
    r"No ONNX function found for <OpOverload\(op='([^']+)'|Exporting the operator '([^']+)' to ONNX"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class OnnxFromTorchConfig(StageConfig):
    """``opset``: what the file will have, exactly. ``ladder``: the exporters, in the order they are tried."""

    opset: int = 20
    ladder: tuple[str, ...] = ("dynamo", "legacy")


class OutputsOff(ExportFailed):
    """An exporter's file computes something else. ``results``: the comparisons over the limit."""

    def __init__(self, message: str, results: Sequence[GateResult]) -> None:
        super().__init__(message)
        self.results = tuple(results)


class OpsetNotGiven(ExportFailed):
    """An exporter wrote another opset than the one asked for."""


def onnx_from_torch(src: Artifact, config: OnnxFromTorchConfig, out: Path) -> Artifact:
    """Export ``src`` (kind ``torch``) to ``out``.

    Each rung's file has to pass the checker, keep the contract and agree with eager PyTorch at every case of the
    signature; the notes say which rung was taken and why the others before it were not. ``ExportFailed`` names the
    reason of every rung, ``BadInputSpec`` the dim that was declared farther than the model goes.
    """
    refused: dict[str, str] = {}
    missing: dict[str, str] = {}
    off: list[Sequence[GateResult]] = []
    by_values, branches = False, ""  # torch.export found that the model does something else for other values; where
    for rung in config.ladder:
        if rung not in _RUNGS:
            raise ExportFailed(f"unknown exporter {rung!r}; the ladder is made of {', '.join(_RUNGS)}")
        report(f"onnx_from_torch: {rung}")
        try:
            with _quiet() as said:
                _RUNGS[rung](src, config.opset, out)
            if by_values and (branches := _branches(said)):
                raise ExportFailed(f"it holds one branch of {branches}")
            made = _verified(src, config, out, SEEDS[rung])
        except AccelError as error:
            refused[rung] = str(error)
            off.append(error.results if isinstance(error, OutputsOff) else ())
        except Exception as error:  # exporters raise whatever the part that failed raises
            if full := no_space(error):
                raise full from error
            by_values |= "data-dependent" in str(error)
            refused[rung] = f"{type(error).__name__}: {_first_line(error)}"
            off.append(())
            if found := _NO_OPERATOR.search(str(error)):
                missing[rung] = found[1] or found[2]
        else:
            return replace(made, notes={"rung": rung, "refused": refused, **made.notes})
        _remove(out)
    spec = src.source.get("spec", src.path)
    if _packs(src):
        raise ExportFailed(
            f"{spec} packs its padded batch (torch.nn.utils.rnn.pack_padded_sequence), and no exporter wrote that as "
            "it is used here; run the RNN on the padded batch as it is and take its outputs by the lengths or a mask "
            "(output.gather(1, lengths - 1)), which gives the same numbers in one direction; or undo the packing with "
            "pad_packed_sequence directly after the RNN"
        )
    if branches:
        raise ExportFailed(
            f"{spec} takes one branch or another by the values that come in, at {branches}, and a traced file would "
            "hold the one that the example took; write torch.where or torch.cond there"
        )
    if len(missing) == len(config.ladder):
        raise ExportFailed(
            f"{spec} uses {missing[rung]}, which no exporter can write in ONNX; compute it from other operators there"
        )
    if beyond := _too_far(src):
        raise BadInputSpec(f"{spec} can't be exported as declared: {beyond}")
    reasons = "; ".join(f"{rung}: {reason}" for rung, reason in refused.items())
    raise ExportFailed(
        f"no exporter gave a right model of {spec} ({reasons}){own_fault(src, named(src), off) or _advice(src)}"
    )


def _remove(out: Path) -> None:
    """The file of a rung that was refused, and that of its weights."""
    names: tuple[str, ...] = ()
    with contextlib.suppress(AccelError):  # there is none, or only half of it
        names = external_files(read_proto(out))
    for left in (out, *map(out.with_name, names)):
        left.unlink(missing_ok=True)


def _advice(src: Artifact) -> str:
    """What often helps: code that computes with sizes as numbers can be traced for one size only."""
    if not src.signature.dims:
        return ""
    sizes = src.signature.sizes()
    fixed = " ".join(f"--input '{replace(spec, shape=spec.resolve(sizes))}'" for spec in src.signature.inputs)
    return f"; try one size instead of a dynamic one: {fixed}"


def _too_far(src: Artifact) -> str:
    """Which dim was declared farther than the model itself goes (to the end of a table of positions, say), and how far
    that is; empty where PyTorch runs it at both ends of each dim."""
    usual = src.signature.sizes()
    if _fails(src, usual):
        return ""
    for dim, bounds in src.signature.dims.items():
        for end in (bounds.max, bounds.min):
            if reason := _fails(src, {**usual, dim: end}):

                def runs_at(steps: int, dim: str = dim, step: int = bounds.step) -> bool:
                    return not _fails(src, {**usual, dim: steps * step})

                last = farthest(runs_at, bounds.opt // bounds.step, end // bounds.step) * bounds.step
                runs, most = (
                    (replace(bounds, max=last), "at most")
                    if end == bounds.max
                    else (replace(bounds, min=last), "at least")
                )
                return (
                    f"PyTorch itself can't run it at {dim} {end} ({reason}), its {dim} is {most} {last}: "
                    f"give --dim {dim}={runs}"
                )
    return ""


def _fails(src: Artifact, sizes: Mapping[str, int]) -> str:
    """Why eager PyTorch can't run ``src`` at these sizes; empty where it can."""
    from accel.sources.torch_call import run_named

    try:
        with _quiet():
            run_named(named(src), src.signature, src.signature.example_inputs(**sizes))
    except Exception as error:  # a model raises what it likes
        return one_line(error, 160) or type(error).__name__
    return ""


def _packs(src: Artifact) -> bool:
    """Whether the model calls ``pack_padded_sequence``, found by running it once."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    try:
        with _quiet(), torch.no_grad(), Watch():
            named(src)(*example(src))
    except Exception:  # it is only looked at: why it fails is known already
        pass
    return any("_pack_padded_sequence" in name for name in seen)


def _first_line(error: Exception) -> str:
    text = _COLOUR.sub("", str(error)).rpartition("## Exception summary")[2]  # general advice comes before it
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else "no reason given"


def _verified(src: Artifact, config: OnnxFromTorchConfig, out: Path, seeds: int) -> Artifact:
    import onnx

    _, properties = describe(out)
    if properties["opset"] != config.opset:
        raise OpsetNotGiven(f"it wrote opset {properties['opset']}, not {config.opset}")
    try:
        onnx.checker.check_model(str(out), full_check=True)
    except Exception as error:
        raise ExportFailed(f"its file fails the checker: {one_line(error)}") from error
    stage: Stage = get_stage("onnx_from_torch")
    companions = external_files(read_proto(out))
    plain = Artifact(path=out, kind="onnx", signature=src.signature, companions=companions)
    made = check_contract(stage, src, config, plain)
    limit = LIMITS[src.properties.get("precision", "fp32")]
    results = OutputGate(limit=limit, seeds=seeds).check(src, made)
    worst = worst_result(results)
    failed = [r for r in results if r.passed is False]
    if failed:
        raise OutputsOff(
            f"its outputs are off: {failed[0].output} at {failed[0].case} by {failed[0].value:.2g} (limit {limit:g}) "
            f"{failed[0].note}".rstrip(),
            failed,
        )
    return replace(made, notes={"worst_rel_l2": worst.value if worst else None})


def _branches(said: Sequence[warnings.WarningMessage]) -> str:
    """Where the tracer saw a tensor become a condition, outside of PyTorch; empty where it didn't."""
    import torch

    own = str(Path(torch.__file__).parent)
    lines = [
        f"{Path(one.filename).name}:{one.lineno}"
        for one in said
        if "tensor to a Python boolean" in str(one.message) and not one.filename.startswith(own)
    ]
    return " and ".join(dict.fromkeys(lines))


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Exporters print, log and warn; what matters of it is checked on the file itself. The warnings are kept."""
    names = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export", "torch.fx.experimental.symbolic_shapes")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with (
        warnings.catch_warnings(record=True) as said,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("always")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield said
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


_RUNGS: dict[str, Callable[[Artifact, int, Path], None]] = {"dynamo": dynamo, "legacy": legacy}
