"""Checks that a stage's output keeps the names, dtypes, dims, opset and IR version of the stage's input.

In the stage table, ``may_change`` lists the parts of the contract that a stage may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accel.artifact import Artifact
from accel.child import resolve
from accel.errors import SignatureDrift
from accel.signature import Signature, TensorSpec, with_values_of
from accel.spelling import option
from accel.tables.kinds import KINDS
from accel.tables.stage_table import Stage


def check_contract(stage: Stage, src: Artifact, result: Artifact, *, opset: int | None = None) -> Artifact:
    """Returns ``result`` with the signature and properties read from its file. ``opset`` is the requested opset, or
    None to expect the opset of ``src``.

    Raises ``SignatureDrift`` if ``result`` breaks the contract of ``src``.
    """
    found, properties = result.signature, dict(result.properties)
    reader = KINDS[result.kind].reader
    if reader is not None:
        found, read = resolve(reader)(result.path, src.signature)
        mend = KINDS[result.kind].mend
        only_shapes = mend is not None and _only_shapes_differ(stage, src.signature, found)
        if mend is not None and only_shapes and resolve(mend)(result.path, src.signature):
            found, read = resolve(reader)(result.path, src.signature)
        properties |= read
    _compare_specs(stage.name, "input", src.signature.inputs, found.inputs, stage.may_change)
    if "optional" not in stage.may_change:
        _compare_specs(stage.name, "optional input", src.signature.optional, found.optional, stage.may_change)
    if src.signature.outputs:
        _compare_specs(stage.name, "output", src.signature.outputs, found.outputs, stage.may_change)
    for name, wanted in (("opset", opset or src.properties.get("opset")), ("ir", src.properties.get("ir"))):
        has = properties.get(name)
        asked_for = name == "opset" and bool(opset)
        if wanted is not None and has is not None and has != wanted and (asked_for or name not in stage.may_change):
            fix = f"ask for {option('opset', has)}" if name == "opset" else f"save the model with ir_version {has}"
            raise SignatureDrift(f"stage {stage.name} made a model with {name} {has} instead of {name} {wanted}; {fix}")
    # A stage may narrow the ranges of dims, for example to an engine's profile. The ranges are not in the model file.
    dims = {d: r for d, r in result.signature.dims.items() if d in found.dynamic_dims}
    known = result.signature if "interface" in stage.may_change else src.signature
    inputs = with_values_of(found.inputs, known.inputs)
    return replace(result, signature=Signature(inputs, found.outputs, dims, found.optional), properties=properties)


def _only_shapes_differ(stage: Stage, wanted: Signature, found: Signature) -> bool:
    """Tells whether ``found`` differs from ``wanted`` only in the dims of outputs."""
    if {"interface", "shapes"} & stage.may_change or not wanted.outputs:
        return False
    rows = list(zip(wanted.outputs, found.outputs, strict=False))
    if len(wanted.outputs) != len(found.outputs) or any(a.name != b.name for a, b in rows):
        return False
    return any(
        len(one.shape) == len(other.shape)
        and any(isinstance(a, str) != isinstance(b, str) or (isinstance(a, int) and a != b) for a, b in pairs)
        for one, other in rows
        for pairs in [list(zip(one.shape, other.shape, strict=False))]
    )


def _compare_specs(
    stage: str,
    role: str,
    wanted: Sequence[TensorSpec],
    found: Sequence[TensorSpec],
    may_change: frozenset[str],
) -> None:
    """Raises ``SignatureDrift`` if ``found`` lacks or changes a tensor of ``wanted``, or has an additional tensor."""
    if "interface" in may_change:
        return
    have = {spec.name: spec for spec in found}
    for spec in wanted:
        if spec.name not in have:
            raise SignatureDrift(
                f"stage {stage} lost the {role} {spec.name!r}; the remaining {role}s: {', '.join(have) or 'none'}"
            )
        other = have[spec.name]
        if spec.dtype != other.dtype and "dtypes" not in may_change:
            raise SignatureDrift(
                f"stage {stage} changed the dtype of the {role} {spec.name!r} to {other.dtype}; the dtype has to stay "
                f"{spec.dtype}"
            )
        if "shapes" in may_change:
            continue
        if len(spec.shape) != len(other.shape):
            raise SignatureDrift(f"stage {stage} changed the rank of the {role} {spec.name!r}: {spec} became {other}")
        for dim, now in zip(spec.shape, other.shape, strict=True):
            # A dynamic output dim may get another name, such as a formula, but has to stay dynamic.
            if isinstance(dim, str) != isinstance(now, str) or (isinstance(dim, int) and dim != now):
                raise SignatureDrift(f"stage {stage} turned the dim {dim!r} of the {role} {spec.name!r} into {now!r}")
            if role == "input" and dim != now:
                raise SignatureDrift(f"stage {stage} renamed the dim {dim!r} of the {role} {spec.name!r} to {now!r}")
    if extra := set(have) - {spec.name for spec in wanted}:
        raise SignatureDrift(f"stage {stage} added the {role} {sorted(extra)[0]!r}, which the model did not have")
