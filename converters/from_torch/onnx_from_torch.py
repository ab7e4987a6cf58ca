"""Exports PyTorch models to ONNX: tries exporters in order, and takes the first file that agrees with PyTorch."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.errors import AccelError, BadInputSpec, ExportFailed, no_space, one_line
from accel.progress import report
from accel.proof.gates import OutputGate, worst_result
from accel.signature import Signature
from accel.sources.onnx.file import describe, external_files, read_without_weights
from accel.sources.output_specs import farthest
from accel.sources.torch.probe.random_draws import lines_with
from accel.sources.torch.quiet_export import quiet_export
from accel.spelling import is_command_line, option
from accel.stage import GateResult, Proof, StageConfig
from accel.tables.limits import EXPORT_LIMITS
from accel.tables.stage_table import get_stage

from ..graph.write import check_file
from .advice import own_fault
from .exporters import NoComplexRule, dynamo, example, legacy, named
from .held_sizes import OtherWay, held_sizes
from .python_numbers import Place, during_export, places
from .traced_branches import value_branches

# The number of inputs on which each exporter's file is compared with PyTorch. The older exporter records only the
# branch that the example took, so its file is compared on many more inputs.
SEEDS = {"dynamo": 3, "legacy": 16}
# The largest number of source lines that an error message lists.
_SHOWN = 3

# Two patterns for the exporters' messages: an operator without an ONNX translation, and a color code.
_NO_OPERATOR = re.compile(
    r"No ONNX function found for <OpOverload\(op='([^']+)'|Exporting the operator '([^']+)' to ONNX"
    r"|Unsupported: ONNX export of operator (\w+)"
)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class OnnxFromTorchConfig(StageConfig):
    """``opset`` is the exact opset of the file. ``ladder`` lists the exporters in the order in which they are tried."""

    opset: int = 20
    ladder: tuple[str, ...] = ("dynamo", "legacy")


class OutputsOff(ExportFailed):
    """Raised if an exporter's file gives other outputs than PyTorch. ``results`` has the comparisons that exceed the
    limit."""

    def __init__(self, message: str, results: Sequence[GateResult]) -> None:
        super().__init__(message)
        self.results = tuple(results)


class OpsetNotGiven(ExportFailed):
    """Raised if the opset of an exporter's file differs from the requested opset."""


def onnx_from_torch(
    src: Artifact, config: OnnxFromTorchConfig, out: Path, proof: Proof | None = None, *, advise: bool = True
) -> Artifact:
    """Exports ``src`` (kind ``torch``) to ``out``.

    The file of an exporter has to pass the ONNX checker and match the signature of ``src``. The file's outputs have to
    agree with eager PyTorch at every combination of dim sizes in ``src.signature.cases()``. ``proof`` has the gates
    that check the signature and the outputs of the file. If ``proof`` has no gate for outputs, the largest allowed
    error is the default for the precision of ``src``. The notes name the chosen exporter, tell why each earlier
    exporter was refused, and tell at which sizes the graph equals the model (see ``held_sizes``). With ``advise``, a
    failed export is tried with fewer dynamic dims, for the error message.

    Raises ``ExportFailed`` if no exporter succeeds, with the reason for each failure. Raises ``BadInputSpec`` if
    PyTorch can't run the model at the smallest or largest declared size of a dim, or if no graph equals the model at
    all of these sizes.
    """
    proof = proof or Proof(get_stage("onnx_from_torch"), src, config)
    refused: dict[str, str] = {}
    missing: dict[str, str] = {}
    off: list[Sequence[GateResult]] = []
    no_rule = beyond = ""
    by_values = False  # True if torch.export found branches that depend on values.
    branches: Collection[tuple[str, int]] = ()
    conditions: list[str] = []
    for rung in config.ladder:
        if rung not in _RUNGS:
            raise ExportFailed(f"unknown exporter {rung!r}; use {' or '.join(_RUNGS)}")
        report(f"onnx_from_torch: {rung}")
        try:
            with quiet_export(), value_branches() if rung == "legacy" else nullcontext(()) as traced:
                # The older exporter finds no conditions, but its graph also holds one side of them.
                conditions = _RUNGS[rung](src, config.opset, out) or conditions
            if rung == "legacy":
                branches = traced if by_values else ()
                if read := _read(src, branches):
                    raise ExportFailed(f"the file has constants for the values that Python reads at {_where(read)}")
            made = _verified(src, config, out, SEEDS[rung], proof)
            held = held_sizes(conditions, src, made, _output_gate(src, proof))
        except AccelError as error:
            refused[rung] = str(error)
            no_rule = str(error) if isinstance(error, NoComplexRule) else no_rule
            beyond = f"{error}; {error.advice}" if isinstance(error, OtherWay) and error.advice else beyond
            off.append(error.results if isinstance(error, OutputsOff | OtherWay) else ())
        except Exception as error:  # exporters may raise anything
            if full := no_space(error):
                raise full from error
            by_values |= "data-dependent" in str(error)
            refused[rung] = f"{type(error).__name__}: {_first_line(error)}"
            off.append(())
            if found := _NO_OPERATOR.search(str(error)):
                missing[rung] = (found[1] or found[2] or found[3]).replace(".", "::", 1)
        else:
            return replace(made, notes={"rung": rung, "refused": refused, **held, **made.notes})
        _remove(out)
    spec = _name(src)
    if no_rule:
        raise ExportFailed(f"{spec} can't be exported: {no_rule}")
    if _packs(src):
        raise ExportFailed(
            f"{spec} uses torch.nn.utils.rnn.pack_padded_sequence in a way that no exporter can write; call "
            "pad_packed_sequence directly after the RNN; an RNN of one direction can also run on the padded batch: "
            "select its outputs by the lengths or a mask, as in output.gather(1, lengths - 1)"
        )
    # Many libraries read values only if they don't run inside torch.export, and these lines need no rewrite.
    read = _read(src, branches, exporting=True)
    if any(place.rewrite.certain for place in read):
        # The other lines are named too, because the next export may stop at them.
        ordered = sorted(read, key=lambda place: not place.rewrite.certain)
        raise ExportFailed(
            f"{spec} computes in Python with the values of its inputs, which no exporter can follow: {_fixes(ordered)}"
        )
    if beyond := beyond or _too_far(src):
        raise BadInputSpec(f"{spec} can't be exported as declared: {beyond}")
    if len(missing) == len(config.ladder):
        raise ExportFailed(
            f"{spec} uses {_called(src, list(missing.values()))}, which no exporter can write in ONNX; compute it from "
            "other operators of PyTorch"
        )
    reasons = "; ".join(f"{rung}: {reason}" for rung, reason in refused.items())
    fault = own_fault(src, named(src), off)
    if read and not fault:
        fault = f"; keep the values of the inputs in tensors: {_fixes(read)}"
    if advise and not fault:
        fault = _advice(src, config, out)
    raise ExportFailed(f"no exporter gave a correct model of {spec} ({reasons}){fault}")


def _name(src: Artifact) -> str:
    """Returns the name of the model for messages. A live module is named after its class, not after its file in the
    cache."""
    spec = str(src.source.get("spec", src.path))
    return Path(spec).stem if spec.endswith(".module") else spec


def _read(src: Artifact, branches: Collection[tuple[str, int]], *, exporting: bool = False) -> list[Place]:
    """Returns the lines of the model's source code that read values of the inputs. ``branches`` has the lines of
    branches that the older exporter found. If ``exporting`` is true, the model runs as it does inside
    ``torch.export``."""
    with quiet_export(), during_export() if exporting else nullcontext():
        return places(named(src), example(src), branches)


def _where(read: Sequence[Place]) -> str:
    return " and ".join(dict.fromkeys(place.where for place in read))


def _fixes(read: Sequence[Place]) -> str:
    """Returns a text that lists the first places in ``read`` with their rewrites, and the number of places that the
    text leaves out."""
    more = f"; {len(read) - _SHOWN} more follow" if len(read) > _SHOWN else ""
    return "; ".join(map(str, read[:_SHOWN])) + more


def _remove(out: Path) -> None:
    """Deletes the file of a refused exporter, and the file of its weights."""
    names: tuple[str, ...] = ()
    with contextlib.suppress(AccelError):  # the file may be missing or incomplete
        names = external_files(read_without_weights(out))
    for left in (out, *map(out.with_name, names)):
        left.unlink(missing_ok=True)


def _advice(src: Artifact, config: OnnxFromTorchConfig, out: Path) -> str:
    """Returns the end of an error message, with the advice to export the model for one size of its dims, or for one
    size of all dims but the batch. Returns "" if the export fails for these too, or if no dim is dynamic.

    Code that computes with sizes as numbers can be traced for one size only.
    """
    usual, batch = src.signature.sizes(), src.signature.batch_dim
    for sizes in ({dim: size for dim, size in usual.items() if dim != batch}, usual):
        if not sizes:
            continue
        report("onnx_from_torch: trying one size")
        try:
            fixed = _at_sizes(src, sizes)
            onnx_from_torch(fixed, config, out, advise=False)
        except AccelError:
            continue
        finally:
            _remove(out)
        inputs = [str(spec) for spec in fixed.signature.inputs]
        inputs = [shlex.quote(text) for text in inputs] if is_command_line() else inputs
        return f"; try one size instead of a dynamic one: {option('inputs', inputs)}"
    return ""


def _at_sizes(src: Artifact, sizes: Mapping[str, int]) -> Artifact:
    """Returns ``src`` with fixed ``sizes`` of some dims. Runs the model for the sizes of its outputs."""
    from accel.sources.torch.call import run_named

    signature = src.signature
    left = {dim: bounds for dim, bounds in signature.dims.items() if dim not in sizes}
    with quiet_export():
        found = run_named(named(src), signature, signature.example_inputs())
    outputs = [
        replace(spec, shape=tuple(dim if dim in left else size for dim, size in zip(spec.shape, shape, strict=True)))
        for spec, shape in ((spec, found[spec.name].shape) for spec in signature.outputs)
    ]
    return replace(
        src, signature=Signature(tuple(spec.with_dims(sizes) for spec in signature.inputs), tuple(outputs), left)
    )


def _too_far(src: Artifact) -> str:
    """Returns a part of an error message about a dim whose declared range is too wide for the model. The text gives the
    largest or smallest size at which the model runs.

    Returns an empty string if PyTorch runs the model at the smallest and largest size of each dim.
    """
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
                    f"PyTorch itself can't run the model at {dim} {end} ({reason}), the model's {dim} is "
                    f"{most} {last}: give {option('dims', {dim: str(runs)})}"
                )
    return ""


def _fails(src: Artifact, sizes: Mapping[str, int]) -> str:
    """Returns the reason why eager PyTorch can't run ``src`` with the dims ``sizes``. Returns "" if PyTorch can run
    ``src``."""
    from accel.sources.torch.call import run_named

    try:
        with quiet_export():
            run_named(named(src), src.signature, src.signature.example_inputs(**sizes))
    except Exception as error:  # a model may raise anything
        return one_line(error, 160) or type(error).__name__
    return ""


def _called(src: Artifact, operators: Sequence[str]) -> str:
    """Returns the first operator that the model itself calls, with its lines, as in "aten::hypot at net.py:12". If the
    model calls none of them, returns the first operator, which an exporter made from another operator."""
    import torch

    for operator in operators:
        # An exporter has already reported a failure.
        with contextlib.suppress(Exception), quiet_export(), torch.no_grad():
            if found := lines_with(operator, lambda: named(src)(*example(src))):
                return f"{operator} at {found}"
    return operators[0]


def _packs(src: Artifact) -> bool:
    """Runs the model once, and tells whether the model calls ``pack_padded_sequence``."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    try:
        with quiet_export(), torch.no_grad(), Watch():
            named(src)(*example(src))
    except Exception:  # an exporter has already reported this failure
        pass
    return any("_pack_padded_sequence" in name for name in seen)


def _first_line(error: Exception) -> str:
    # PyTorch prints general advice before the reason.
    text = _COLOR.sub("", str(error)).rpartition("## Exception summary")[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else "no reason given"


def _verified(src: Artifact, config: OnnxFromTorchConfig, out: Path, seeds: int, proof: Proof) -> Artifact:
    """Checks the file that an exporter wrote to ``out``, and returns the artifact. At the first combination of dim
    sizes, compares the outputs with PyTorch on ``seeds`` different inputs. A deferred gate needs no comparison here,
    unless the exporter is to be compared on more inputs than the gate has.

    Raises ``OpsetNotGiven``, ``OutputsOff`` or ``ExportFailed`` if the file is wrong.
    """
    _, properties = describe(out)
    if properties["opset"] != config.opset:
        raise OpsetNotGiven(f"the exporter wrote opset {properties['opset']} instead of opset {config.opset}")
    if fault := check_file(out):
        raise ExportFailed(f"the exported file fails the ONNX checker: {fault}")
    companions = external_files(read_without_weights(out))
    plain = Artifact(path=out, kind="onnx", signature=src.signature, companions=companions)
    made, given = proof.of(plain)
    results = list(given)
    gate = _output_gate(src, proof)
    if gate.deferred and seeds <= gate.seeds:
        return replace(made, notes={"deferred_limit": gate.limit})
    if gate in proof.gates and not gate.deferred:
        results += gate.check_seeds(src, made, seeds)
    else:
        results += OutputGate(limit=gate.limit, seeds=seeds).check(src, made)
    worst = worst_result(results)
    failed = [r for r in results if r.passed is False]
    if failed:
        raise OutputsOff(
            f"the file's outputs are off: the output {failed[0].output} has an error of {failed[0].value:.2g} at "
            f"{failed[0].case} (limit {failed[0].limit:g}) {failed[0].note}".rstrip(),
            failed,
        )
    return replace(made, notes={"worst_rel_l2": worst.value if worst else None})


def _output_gate(src: Artifact, proof: Proof) -> OutputGate:
    """Returns the gate that compares the outputs of exported files. If ``proof`` has no such gate, the largest allowed
    error is the default for the precision of ``src``."""
    gates = [gate for gate in proof.gates if isinstance(gate, OutputGate)]
    return gates[0] if gates else OutputGate(limit=EXPORT_LIMITS[src.properties.get("precision", "fp32")])


_RUNGS: dict[str, Callable[[Artifact, int, Path], list[str]]] = {"dynamo": dynamo, "legacy": legacy}
