"""Finds out at which sizes beyond those of the gate an exported file still equals its source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from accel.artifact import Artifact
from accel.errors import AccelError, ExportFailed, one_line
from accel.proof.compare import compare
from accel.proof.gates import OutputGate, Outputs, case_name, gate_runtime, output_result, what_both_take
from accel.signature import Signature
from accel.signature.conditions import Condition, breaking_sizes, ranges_held, sizes_beyond, without_implied
from accel.sources.torch.quiet_export import quiet_export
from accel.spelling import option
from accel.stage import GateResult

# The most sizes that break a condition at which a file is run, in the ranges of the dims and beyond.
_INSIDE = 4
_BEYOND = 8
# A run with at most this product of sizes is cheap enough for a trial. A larger trial is at most this many times as
# large as the largest case of a gate.
_SMALL = 4096
_TIMES = 4


@dataclass(frozen=True)
class Trial:
    """A run of a file and its source at some sizes. ``fault`` is the error of the source, ``failed`` that of the file
    alone, and ``off`` has the outputs that differ. A trial that wasn't run has ``ran`` False."""

    fault: str = ""
    failed: str = ""
    off: tuple[GateResult, ...] = ()
    ran: bool = True

    @property
    def same(self) -> bool:
        """Tells whether the file gives the outputs of its source."""
        return self.ran and not (self.fault or self.failed or self.off)

    def __str__(self) -> str:
        return self.failed or self.fault or (f"an error of {self.off[0].value:.2g}" if self.off else "")


class OtherWay(ExportFailed):
    """Raised if a source does something else at sizes in the ranges of its dims than its graph. ``advice`` names
    ranges in which both do the same, or is "". ``results`` has the outputs that differ."""

    def __init__(self, message: str, results: Sequence[GateResult], advice: str) -> None:
        super().__init__(message)
        self.results = tuple(results)
        self.advice = advice


def held_sizes(conditions: Sequence[str], src: Artifact, made: Artifact, gate: OutputGate) -> dict[str, Any]:
    """Returns notes about the sizes at which ``made`` equals ``src``: the ``conditions`` that matter beyond the ranges
    of the dims, ``faults`` with the errors of ``src`` at sizes that break them, and ``not_empty`` with the dims that
    can't be empty and the reasons.

    torch.export also records conditions that change nothing, so the file is run at sizes that break them, in the
    ranges and beyond. Raises ``OtherWay`` if the file's outputs are off in the ranges.
    """
    parsed = [Condition.parse(text) for text in conditions]
    inside = _chosen(parsed, lambda one: breaking_sizes(one, src.signature))
    # A condition that the others imply may be the one that matters, so it's tried too, but after the others.
    implied = [one for one in parsed if one not in without_implied(parsed, src.signature)]
    own = {
        one.text: sizes
        for one in sorted(parsed, key=lambda one: one in implied)
        if not any(not one.holds(sizes) for sizes in inside)
        if (sizes := _affordable_beyond(one, src.signature)) is not None
    }
    beyond = list({case_name(sizes): sizes for sizes in own.values()}.values())[:_BEYOND]
    empty = [{**src.signature.sizes(), dim: 0} for dim in _may_be_empty(src)]
    every = {case_name(sizes): sizes for sizes in (*inside, *beyond, *empty)}
    trials = dict(zip(every, _tried(src, made, gate, list(every.values())), strict=True))
    for sizes in inside:
        trial = trials[case_name(sizes)]
        if trial.off or trial.failed:
            text = next(one.text for one in parsed if not one.holds(sizes))
            raise OtherWay(
                f"at {case_name(sizes)} the model does something else than its graph, which holds for {text} ({trial})",
                trial.off,
                _narrower(parsed, src, made, gate),
            )
    kept = []
    for one in parsed:
        broken = [trials[case_name(sizes)] for sizes in (*inside, *beyond) if not one.holds(sizes)]
        if not any(trial.same for trial in broken):
            trial = trials.get(case_name(own.get(one.text, {})), Trial(ran=False))
            where = case_name({dim: size for dim, size in own.get(one.text, {}).items() if dim in one.dims})
            kept.append(replace(one, fault=f"at {where}: {trial.fault}" if trial.ran and trial.fault else ""))
    kept = without_implied(kept, src.signature)
    faults = {one.text: one.fault for one in kept if one.fault}
    other = {dim: trials[case_name(sizes)] for dim, sizes in zip(_may_be_empty(src), empty, strict=True)}
    nothing = {
        dim: f"the file {f'fails ({trial.failed})' if trial.failed else 'gives other numbers than the source'}"
        for dim, trial in other.items()
        if trial.off or trial.failed
    }
    notes = {"conditions": [one.text for one in kept], "faults": faults, "not_empty": nothing}
    return {name: note for name, note in notes.items() if note}


def _chosen(conditions: Sequence[Condition], sizes_of: Any) -> list[dict[str, int]]:
    """Returns a few sizes, one for each condition that none of the earlier sizes breaks."""
    found: list[dict[str, int]] = []
    for one in conditions:
        if len(found) < _INSIDE and all(one.holds(sizes) for sizes in found) and (sizes := sizes_of(one)) is not None:
            found.append(sizes)
    return found


def _affordable_beyond(condition: Condition, signature: Signature) -> dict[str, int] | None:
    """Returns sizes beyond the ranges that break ``condition``. The other dims have their usual sizes, or their
    smallest sizes if the run would take too long, or the result is None if it would still take too long."""
    most = max(_SMALL, _TIMES * max(math.prod(case.values()) for case in signature.cases()))
    found = sizes_beyond(condition, signature)
    smallest = {dim: bounds.min or 1 for dim, bounds in signature.dims.items() if dim not in condition.dims}
    every = [{**found, **others} for others in ({}, smallest)] if found else []
    return next((sizes for sizes in every if math.prod(sizes.values()) <= most), None)


def _may_be_empty(src: Artifact) -> list[str]:
    """Returns the dims whose size 0 no gate compares, and which the source takes."""
    refused = src.source.get("not_empty", {})
    return [dim for dim, bounds in src.signature.dims.items() if bounds.min and dim not in refused]


def _tried(src: Artifact, made: Artifact, gate: OutputGate, cases: Sequence[Mapping[str, int]]) -> list[Trial]:
    """Runs ``src`` and ``made`` at all ``cases``. Both are loaded one after the other, as in a gate."""
    src = gate.reference or src
    runtime = gate_runtime(made)
    taken = what_both_take(src.signature, made.signature)
    feeds: dict[int, Any] = {}
    wanted: dict[int, Any] = {}
    found = [Trial(ran=False)] * len(cases)
    if not cases or runtime is None:
        return found
    with quiet_export(), ExitStack() as stack:
        reference = Outputs(src, gate_runtime(src), stack)
        for index, sizes in enumerate(cases):
            try:
                feeds[index] = _feeds(taken, sizes)
                if not reference.too_large(feeds[index]):
                    outputs = reference.of(feeds[index])
                    if 0 in sizes.values() and not any(array.size for array in outputs.values()):
                        found[index] = Trial()  # without numbers to compare, the file needn't be loaded
                    else:
                        wanted[index] = outputs
            except Exception as error:  # a model may raise anything, and an integer may have no valid number
                own = error.__cause__ or error  # PyTorch's error, without the words of the session
                found[index] = Trial(fault=one_line(own, 120) or type(own).__name__, ran=index in feeds)
    if not wanted:
        return found
    with ExitStack() as stack:
        candidate = Outputs(made, runtime, stack)
        for index, outputs in wanted.items():
            if candidate.too_large(feeds[index]):
                continue
            try:
                differences = compare(outputs, candidate.of(feeds[index]))
            except AccelError as error:
                found[index] = Trial(failed=one_line(error.__cause__ or error, 160))
                continue
            results = [output_result(gate.name, case_name(cases[index]), one, gate.limit) for one in differences]
            found[index] = Trial(off=tuple(one for one in results if not one.passed))
    return found


def _feeds(signature: Signature, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns random inputs of ``sizes``, which may be 0."""
    empty = {dim: size for dim, size in sizes.items() if not size}
    if empty:
        signature = Signature(tuple(spec.with_dims(empty) for spec in signature.inputs))
    return signature.inputs_at({dim: size for dim, size in sizes.items() if size})


def _narrower(conditions: Sequence[Condition], src: Artifact, made: Artifact, gate: OutputGate) -> str:
    """Returns the advice to narrow the ranges of dims so that ``conditions`` hold, or "" if the file is wrong then
    too."""
    held = ranges_held(conditions, src.signature)
    narrow = src.signature.with_dims(held)
    try:
        results = OutputGate(limit=gate.limit, seeds=1).check(
            replace(src, signature=narrow), replace(made, signature=narrow)
        )
    except AccelError:
        return ""
    right = held and all(one.passed is not False for one in results)
    return f"give {option('dims', {dim: str(bounds) for dim, bounds in held.items()})}" if right else ""
