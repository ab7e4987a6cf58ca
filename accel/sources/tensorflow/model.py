"""Describes, counts and runs a TensorFlow model of any file format. Only the child process that runs TensorFlow imports
this module."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import BadInputSpec, BadSource, FailsOnInputs, one_line
from accel.signature import BATCH, Dim, DimRange, Feeds, Signature, TensorSpec, shapes_of
from accel.spelling import option, options

from ..output_specs import far_runs, output_specs, probe_cases, same_output, step_advice
from . import forms, tflite
from .graph import count_graph, graph_sha256, index_bounds, refuse_random, refuse_windows_beyond, without_weights
from .loaded import Frozen, Loaded, Row
from .source import TensorFlowSpec, with_given

if TYPE_CHECKING:
    import numpy as np

# To find random outputs, the model runs this many more times on the same inputs. One more run is not enough, because a
# random choice among a few values may repeat itself.
_AGAIN = 4
# Ranges to try for the dynamic dims if a model can't take the usual sizes. The largest range is tried only for models
# with one dynamic dim, such as the length of a sound. An image with two dims of the largest range would take too long.
_LARGER = (DimRange(64, 64, 128), DimRange(256, 256, 512), DimRange(1024, 1024, 2048))
# The number of models that stay loaded. A conversion loads the same model several times.
_KEPT = 2
_Run = Callable[[Feeds], "dict[str, np.ndarray]"]

_loaded: dict[TensorFlowSpec, tuple[tuple[object, ...], Loaded]] = {}


def load(spec: TensorFlowSpec) -> Loaded:
    """Loads the model that ``spec`` names. The last few models stay loaded, and a model is loaded again if its files
    change."""
    place = Path(spec.path.rpartition(":")[0] if spec.form == "python" else spec.path)
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    # The stamp of a loaded model includes the current folder, because a factory may have a relative path or read files
    # at relative paths.
    stamp = (Path.cwd(), *(f.stat().st_mtime for f in files if f.exists()))
    kept = _loaded.get(spec)
    if kept is not None and kept[0] == stamp:
        return kept[1]
    # TensorFlow's log shows only errors, because warnings would hide the error that follows them.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    made = tflite.load(spec) if spec.form == "tflite" else forms.load(spec)
    _loaded[spec] = (stamp, made)
    for oldest in list(_loaded)[:-_KEPT]:
        _loaded.pop(oldest, None)  # another thread may have dropped it
    return made


def describe(
    spec: TensorFlowSpec, inputs: Sequence[TensorSpec] = (), dims: Mapping[str, DimRange] | None = None
) -> dict[str, Any]:
    """Describes the model that ``spec`` names. Returns a dict with the specs of its ``inputs`` and ``outputs``, the
    ranges of its ``dims``, its ``properties``, a ``sha256`` and the ``placeholders`` that were set. If the source is a
    factory, ``sha256`` is the hash of the graph that the factory returned. For other sources, ``sha256`` is empty.

    Runs the model at several sizes. Repeats the run at one size to find random outputs. If the model can't take the
    usual sizes, tries larger sizes for the dims that have no range in ``dims``. ``inputs`` are the input specs that the
    user gave (see ``with_given``). Raises ``BadSource`` if the model fails at every size, or if its outputs are random.
    """
    if spec.form == "python":  # forgets the model, because a factory may read files that ``load`` doesn't watch
        _loaded.pop(spec, None)
    model = load(spec)
    properties: dict[str, Any] = {"form": spec.form}
    sha256 = ""
    # Images and quantized tensors use every value of their integer dtype.
    outline: Frozen | None = None
    spans = {"uint8": (0, 255)} | ({"int8": (-128, 127)} if spec.form == "tflite" else {})
    bounds = {name: spans[dtype] for name, dtype, _ in model.inputs if dtype in spans}
    if spec.form == "tflite":
        if tflite.is_quantized(Path(spec.path)):
            properties["precision"] = "int8"
    else:
        frozen = model.freeze()
        outline = without_weights(frozen)
        sha256 = graph_sha256(frozen) if spec.form == "python" else ""
        refuse_random(frozen, spec.path, stripped=spec.strip)
        bounds |= index_bounds(frozen)
    run_on = partial(_run_whole, model, outline, spec.path)
    first: BadSource | None = None
    tried: Signature | None = None
    odd: dict[str, Any] | None = None
    for larger in (None, *_LARGER):
        for named in _namings(model.inputs, spec.path, inputs):
            specs = tuple(replace(s, values=s.values or bounds.get(s.name)) for s in named)
            bare = Signature(with_given(specs, inputs, spec.path))
            batch = bare.batch_dim
            # A batch with a fixed size is probed at other sizes too, to find the output dims that depend on the batch.
            said = {d: r for d, r in (dims or {}).items() if d in bare.dims and (d != batch or r.min < r.max)}
            free = tuple(d for d in bare.dims if d not in said and d != batch)
            if larger and (not free or (larger is _LARGER[-1] and len(free) > 1)):
                continue
            signature = bare.with_dims({**{d: larger for d in free if larger}, **said})
            try:
                outputs, sound = _probe(run_on, signature, spec, doubled=free if larger else ())
            except BadSource as error:
                if first is None:
                    first, tried = error, signature
                continue
            if sound and free:
                signature = _without_too_small(run_on, signature, free)
            found = {
                "inputs": signature.inputs,
                "outputs": outputs,
                "dims": dict(signature.dims),
                "properties": properties,
                "sha256": sha256,
                "placeholders": dict(model.placeholders),
            }
            if sound:
                return found
            odd = odd or found
    if odd is None:
        assert first is not None
        assert tried is not None
        raise _with_step(first, tried, run_on)
    return odd  # every size gave an empty or non-finite output


def declared(spec: TensorFlowSpec) -> tuple[list[Row], list[Row]]:
    """Returns the inputs and outputs that a SavedModel or a TFLite file declares. Loads the model without running
    it."""
    model = load(spec)
    return model.inputs, list(model.declared)


def count(spec: TensorFlowSpec) -> dict[str, Any]:
    """Counts ``nodes``, ``operators`` (by TensorFlow's names), ``parameters`` and ``weight_bytes`` (by dtype)."""
    if spec.form == "tflite":
        return tflite.count_file(Path(spec.path))
    return count_graph(load(spec).freeze())


def run(spec: TensorFlowSpec, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs the model and returns its outputs by name. Raises ``BadSource`` if the model fails on these inputs."""
    return _called(load(spec), feeds, spec.path)


def _run_whole(
    model: Loaded, outline: Frozen | None, where: str, feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Runs the model like ``run``, but first refuses inputs that are smaller than a convolution or pooling window of
    the graph."""
    if outline is not None:
        with _failures(feeds, where):
            refuse_windows_beyond(outline, feeds)
    return _called(model, feeds, where)


def _called(model: Loaded, feeds: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    with _failures(feeds, where):
        return model.call(feeds)


@contextmanager
def _failures(feeds: Mapping[str, np.ndarray], where: str) -> Iterator[None]:
    """Turns any exception of TensorFlow into ``FailsOnInputs`` with the shapes of ``feeds``."""
    try:
        yield
    except Exception as error:
        reason = f"{where} fails in TensorFlow on {shapes_of(feeds)}: {_reason(error)}"
        failure = FailsOnInputs(f"{reason}; correct {options('inputs', 'dims')}")
        failure.reason = reason
        raise failure from error


def _reason(error: Exception) -> str:
    """Returns the first lines of TensorFlow's message. The first lines give the cause, and a list of graph nodes may
    follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [x for x in lines if not x.startswith(("Graph execution error", "Detected at node", "File ", "[["))]
    # Keeps a node's name in the message and drops the node's attributes.
    text = re.sub(r"'\{\{node (\S+)\}\} = .*", r"\1", " ".join(kept[:3]))
    return one_line(text or type(error).__name__)[:240]


def _probe(
    run_on: _Run, signature: Signature, spec: TensorFlowSpec, doubled: Sequence[str]
) -> tuple[tuple[TensorSpec, ...], bool]:
    """Returns the specs of the outputs, and a flag: True if all outputs are sound (see ``_is_sound``) at every size.

    The dims in ``doubled`` are probed only at their usual and their largest size, because a network that downsamples
    may not take an image that is one pixel larger.
    """
    cases = probe_cases(signature)
    for case in cases[1:]:
        case |= {d: signature.dims[d].max for d in doubled if case[d] != signature.dims[d].opt}
    runs = [run_on(signature.example_inputs(**sizes)) for sizes in cases]
    for _ in range(_AGAIN):
        again = run_on(signature.example_inputs(**cases[-1]))
        for name, value in runs[-1].items():
            if not same_output(value, again[name]):
                strip = spec.form != "tflite" and not spec.strip
                raise BadSource(
                    f"the output {name!r} of {spec.path} differs from run to run on the same inputs, because the "
                    "model still draws random numbers; save it for inference"
                    + (f", or remove dropout with {option('strip_training_ops', True)}" if strip else "")
                )
    far, found = far_runs(signature, run_on)
    return output_specs(signature, [*cases, *far], [*runs, *found], spec.path), all(map(_is_sound, runs))


def _is_sound(outputs: Mapping[str, np.ndarray]) -> bool:
    """Tells whether every output has elements and all its floats are finite. An output may be NaN if an input is too
    small: a mean over zero pixels is NaN."""
    import numpy as np

    return all(v.size and (v.dtype.kind != "f" or np.isfinite(v).all()) for v in outputs.values())


def _with_step(error: BadSource, signature: Signature, run_on: _Run) -> BadSource:
    """Returns ``error``. If the model runs only at sizes that are multiples of a step, adds advice to the error's text.
    The advice is to pass ranges with this step."""
    if not isinstance(error, FailsOnInputs) or not (fix := step_advice(signature, run_on)):
        return error
    return BadSource(error.reason + fix)


def _without_too_small(run_on: _Run, signature: Signature, free: Sequence[str]) -> Signature:
    """Returns ``signature`` if the model can take the smallest sizes of the dims ``free``. Otherwise returns a
    signature in which the ranges of ``free`` begin at the usual sizes."""
    smallest = {d: signature.dims[d].min for d in free}
    try:
        if _is_sound(run_on(signature.example_inputs(**smallest))):
            return signature
    except BadSource:
        pass  # the model can't take the smallest sizes
    return signature.with_dims({d: replace(signature.dims[d], min=signature.dims[d].opt) for d in free})


def _namings(found: Sequence[Row], where: str, given: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, ...]]:
    """Yields the input specs with names for their dynamic dims. First yields specs in which each input has its own dim
    names, and then yields specs in which all inputs share one name for each axis."""
    said = {spec.name: spec for spec in given}
    rows: list[tuple[str, str, list[int | None]]] = []
    for name, dtype, shape in found:
        if shape is None:
            if name not in said:
                raise BadInputSpec(
                    f"the model {where} doesn't declare the shape of the input {name!r}; "
                    f"pass {option('inputs', [f'{name}:{dtype}[batch,...]'])}"
                )
            shape = [d if isinstance(d, int) else None for d in said[name].shape]
        rows.append((name, dtype, shape))
    opened = {axis for _, _, shape in rows for axis, dim in enumerate(shape) if dim is None and axis > 0}
    for shared in (False, True) if len(rows) > 1 and opened else (True,):
        yield tuple(
            TensorSpec(
                name,
                dtype,
                tuple(_dim(dim, axis, shape, "" if shared else f"{name}_") for axis, dim in enumerate(shape)),
            )
            for name, dtype, shape in rows
        )


def _dim(dim: int | None, axis: int, shape: Sequence[int | None], prefix: str) -> Dim:
    """Returns a fixed dim unchanged, and a name for a dynamic dim. The first axis is called ``batch``. Other axes are
    called ``length`` in sequences, ``height`` or ``width`` in NHWC images, else ``dim_<axis>``."""
    if dim is not None:
        return dim
    if axis == 0:
        return BATCH
    image = {1: "height", 2: "width"} if len(shape) == 4 else {}
    sequence = {1: "length"} if len(shape) <= 3 else {}
    return prefix.replace(".", "_").replace("/", "_") + (image | sequence).get(axis, f"dim_{axis}")
