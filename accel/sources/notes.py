"""Writes notes and warnings about an opened model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel.artifact import Artifact
from accel.signature import Signature
from accel.spelling import option

_NAMED = 3  # names in a note


def source_notes(artifact: Artifact) -> list[str]:
    """Returns notes for the user about the inputs of an opened model."""
    notes = (
        _batch_note(artifact),
        _not_finite_note(artifact),
        _bounds_note(artifact),
        _sizes_note(artifact),
        _conditions_note(artifact),
        _samples_note(artifact),
        integers_note(artifact.signature),
        _renaming_note(artifact),
        _placeholder_note(artifact),
        _adapter_note(artifact),
        _narrowed_note(artifact),
        _defaults_note(artifact),
    )
    return [note for note in notes if note]


def _adapter_note(artifact: Artifact) -> str | None:
    """Returns a note about the adapter that was merged into the weights, or None if there is none."""
    found: Mapping[str, Any] | None = artifact.source.get("adapters")
    if not found:
        return None
    whole = f" and {found['replaced']} whole weights" if found["replaced"] else ""
    return f"the adapter {found['path']} is merged into {found['modules']} layers{whole} (error {found['rel_l2']:.1g})"


def _narrowed_note(artifact: Artifact) -> str | None:
    """Returns a note about operations in float64 that the artifact's runtime computes in float32, or else None."""
    count = sum(stage["notes"].get("float64_in_float32", 0) for stage in artifact.history)
    return f"the model has {count} operations in float64, which the runtime computes in float32" if count else None


def _defaults_note(artifact: Artifact) -> str | None:
    """Returns a note about the inputs that have a default in the ONNX file, or None if there are none."""
    names: Sequence[str] = artifact.source.get("defaults", ())
    if not names:
        return None
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    said = f"the input {names[0]!r} of the file has a default, which is"
    if len(names) > 1:
        said = f"the inputs {', '.join(map(repr, names[:_NAMED]))}{more} of the file have defaults, which are"
    return (
        f"{said} used, and can't be replaced in a converted model; remove the initializer {names[0]!r} from the file "
        "to keep the input"
    )


def _placeholder_note(artifact: Artifact) -> str | None:
    """Returns a note about the placeholders that were set in a TensorFlow graph, or None if none were set."""
    values: Mapping[str, str] = artifact.source.get("loading", {}).get("placeholders", {})
    if not values:
        return None
    said = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"set the placeholder{'s' * (len(values) > 1)} {said}; {option('placeholders')} sets other values"


def _renaming_note(artifact: Artifact) -> str | None:
    """Returns a note if an input has another name than its parameter of the ``forward`` method, or else None."""
    renamed: Mapping[str, str] = artifact.source.get("renamed") or {}
    for name, own in renamed.items():
        return f"forward calls its input {own!r}; the artifact calls it {name!r}, as {option('inputs')} does"
    return None


def _batch_note(artifact: Artifact) -> str | None:
    """Returns the note about the batch dim of a live model, or None for any other model. accel finds the batch dim by
    running the live model with another batch size."""
    return (artifact.source.get("live") or {}).get("note") or None


def _not_finite_note(artifact: Artifact) -> str | None:
    """Returns a note about the arguments of the example of a live model that hold NaN or infinity, or else None."""
    names = (artifact.source.get("live") or {}).get("not_finite")
    return (
        f"the example's {names} holds NaN or infinity; give finite numbers with {option('example')}" if names else None
    )


def _bounds_note(artifact: Artifact) -> str | None:
    """Returns a note about the bounds of integer inputs that accel found by running the model, or else None."""
    found = artifact.source.get("bounds")
    return f"{found}; {option('inputs')} declares other integers" if found else None


def _sizes_note(artifact: Artifact) -> str | None:
    """Returns a note about the sizes that accel found by running the model, or else None."""
    found = artifact.source.get("sizes")
    return f"{found}; {option('dims')} declares other sizes" if found else None


def _conditions_note(artifact: Artifact) -> str | None:
    """Returns a note about the sizes beyond the ranges at which the graph of a file equals its source, or None if these
    are all sizes."""
    found = [condition.text for condition in artifact.conditions]
    return f"beyond the ranges of its dims, the file holds for {' and '.join(found)}" if found else None


def _samples_note(artifact: Artifact) -> str | None:
    """Returns a note about the inputs that repeat the integers of a sample, or None if there are no such inputs."""
    names = " and ".join(spec.name for spec in artifact.signature.inputs if spec.sample is not None)
    return f"the model fails on random integers, so {names} repeats the integers of an example" if names else None


def integers_note(signature: Signature) -> str | None:
    """Returns a note about integer inputs with an unknown range, or else None. Random data for an input with an unknown
    range holds only the integers 0 and 1, so a comparison on random data proves little."""
    unknown = signature.unknown_integers
    if not unknown:
        return None
    names = " and ".join(spec.name for spec in unknown)
    declared = option("inputs", [f"{unknown[0]}{{0..999}}"])
    return f"the valid integers of {names} are unknown, so random inputs hold only 0 and 1; declare them: {declared}"


def training_note(artifact: Artifact) -> str | None:
    """Returns a warning if layers run in training mode although accel set the model to evaluation mode, or else
    None."""
    layers = artifact.source.get("in_training")
    if not layers:
        return None
    return f"{layers}; until then the output of a sample depends on the other samples in its batch"
