"""A TensorFlow model of any form, loaded. This module is imported in the TensorFlow process alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import AccelError, BadInputSpec, BadSource, InvalidModel, one_line
from accel.signature import BATCH, Dim, DimRange, Feeds, Signature, TensorSpec, shapes_of
from accel.sources.output_specs import far_runs, output_specs, probe_cases, same_output, step_advice
from accel.sources.tensorflow_source import TensorFlowSpec, with_given

if TYPE_CHECKING:
    import numpy as np

# How often a model is run again on the same inputs: what is drawn from a few numbers may come out the same once.
_AGAIN = 4
# What is tried where a net can't take the usual sizes: the last for sound alone, an image of that size takes long.
_LARGER = (DimRange(64, 64, 128), DimRange(256, 256, 512), DimRange(1024, 1024, 2048))
# How many models stay loaded: a conversion asks for the same one several times.
_KEPT = 2
_DTYPES = {"float": "float32", "double": "float64", "half": "float16"}
_Run = Callable[[Feeds], "dict[str, np.ndarray]"]
# Name, dtype and shape of a tensor.
Row = tuple[str, str, list[int | None] | None]


@dataclass(kw_only=True)
class Loaded:
    """A model that can be called and converted.

    ``call``: arrays by input name to arrays by output name. ``inputs``: their specs, None as a dim where it is open,
    and None as the shape where not even the rank is known. ``freeze``: the graph with its weights in it, and the
    tensor names of the inputs and outputs in that graph, by the user's names. ``declared``: the outputs as ``inputs``,
    where the file says them without being run.
    """

    call: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
    inputs: list[Row]
    outputs: list[str]
    freeze: Callable[[], Frozen]
    declared: Sequence[Row] = ()


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A GraphDef without variables; tensor names (``x:0``) by the user's names."""

    graph: Any
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


_loaded: dict[TensorFlowSpec, tuple[tuple[object, ...], Loaded]] = {}


def load(spec: TensorFlowSpec) -> Loaded:
    """The model behind ``spec``; the last few are kept while their files don't change."""
    from accel.sources import tensorflow_forms, tflite_model

    place = Path(spec.path.rpartition(":")[0] if spec.form == "python" else spec.path)
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    stamp = (Path.cwd(), *(f.stat().st_mtime for f in files if f.exists()))  # code may be named, and read, from here
    kept = _loaded.get(spec)
    if kept is not None and kept[0] == stamp:
        return kept[1]
    # What TensorFlow's loggers say before an error would hide it.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    made = tflite_model.load(spec) if spec.form == "tflite" else tensorflow_forms.load(spec)
    _loaded[spec] = (stamp, made)
    while len(_loaded) > _KEPT:
        _loaded.pop(next(iter(_loaded)))
    return made


def describe(
    spec: TensorFlowSpec, inputs: Sequence[TensorSpec] = (), dims: Mapping[str, DimRange] | None = None
) -> dict[str, Any]:
    """``inputs`` and ``outputs`` as specs, ``dims`` with their ranges, ``properties``, and the ``sha256`` of what a
    function made. The model is run at several sizes, and at one of them again and again: what is random isn't taken.
    Where it can't take the usual sizes of a dim that ``dims`` has no range for, larger ones are tried."""
    if spec.form == "python":  # it may read files, and import code, that nobody knows of
        _loaded.pop(spec, None)
    model = load(spec)
    properties: dict[str, Any] = {"form": spec.form}
    sha256 = ""
    # The numbers of an image, and those of a quantized tensor, stand for their whole range.
    outline: Frozen | None = None
    spans = {"uint8": (0, 255)} | ({"int8": (-128, 127)} if spec.form == "tflite" else {})
    bounds = {name: spans[dtype] for name, dtype, _ in model.inputs if dtype in spans}
    if spec.form == "tflite":
        from accel.sources.tflite_model import is_quantized

        if is_quantized(Path(spec.path)):
            properties["precision"] = "int8"
    else:
        from accel.sources.tensorflow_graph import graph_sha256, index_bounds, refuse_random, without_weights

        frozen = model.freeze()
        outline = without_weights(frozen)
        sha256 = graph_sha256(frozen) if spec.form == "python" else ""
        refuse_random(frozen, spec.path, stripped=spec.strip)
        bounds |= index_bounds(frozen)
    run_on = partial(_run_whole, model, outline, spec.path)
    last: AccelError | None = None
    tried: Signature | None = None
    odd: dict[str, Any] | None = None
    for larger in (None, *_LARGER):
        for named in _namings(model.inputs, spec.path, inputs):
            specs = tuple(replace(s, values=s.values or bounds.get(s.name)) for s in named)
            bare = Signature(with_given(specs, inputs, spec.path))
            batch = bare.batch_dim
            # Of a batch that is always the same one has to be seen that it needn't be.
            said = {d: r for d, r in (dims or {}).items() if d in bare.dims and (d != batch or r.min < r.max)}
            free = tuple(d for d in bare.dims if d not in said and d != batch)
            if larger and (not free or (larger is _LARGER[-1] and len(free) > 1)):
                continue
            signature = bare.with_dims({**{d: larger for d in free if larger}, **said})
            try:
                outputs, sound = _probe(run_on, signature, spec, doubled=free if larger else ())
            except BadSource as error:
                if last is None:
                    last, tried = error, signature
                continue
            if sound and free:
                signature = _without_too_small(run_on, signature, free)
            found = {
                "inputs": signature.inputs,
                "outputs": outputs,
                "dims": dict(signature.dims),
                "properties": properties,
                "sha256": sha256,
            }
            if sound:
                return found
            odd = odd or found
    if odd is None:
        assert last is not None
        assert tried is not None
        raise _with_step(last, tried, run_on)
    return odd  # it gives what is no number, or nothing, at every size


def declared(spec: TensorFlowSpec) -> tuple[list[Row], list[Row]]:
    """Inputs and outputs as the file (a SavedModel, a TFLite file) names them itself; it is loaded and not run."""
    model = load(spec)
    return model.inputs, list(model.declared)


def count(spec: TensorFlowSpec) -> dict[str, Any]:
    """``nodes``, ``operators`` (how many of each, by TensorFlow's names), ``parameters``, ``weight_bytes`` by dtype."""
    if spec.form == "tflite":
        from accel.sources.tflite_model import count_file

        return count_file(Path(spec.path))
    from accel.sources.tensorflow_graph import count_graph

    return count_graph(load(spec).freeze())


def run(spec: TensorFlowSpec, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name. ``BadSource`` where the model fails on these inputs."""
    return _called(load(spec), feeds, spec.path)


def _run_whole(
    model: Loaded, outline: Frozen | None, where: str, feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """As ``run``, after a look at whether each window fits."""
    if outline is not None:
        from accel.sources.tensorflow_graph import refuse_windows_beyond

        with _failures(feeds, where):
            refuse_windows_beyond(outline, {name: value.shape for name, value in feeds.items()})
    return _called(model, feeds, where)


def _called(model: Loaded, feeds: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    with _failures(feeds, where):
        return model.call(feeds)


@contextmanager
def _failures(feeds: Mapping[str, np.ndarray], where: str) -> Iterator[None]:
    """What TensorFlow raises as ``BadSource`` with the shapes of ``feeds``."""
    try:
        yield
    except Exception as error:
        shapes = shapes_of(feeds)
        raise BadSource(
            f"{where} fails in TensorFlow on {shapes}: {_reason(error)}; correct --input or --dim"
        ) from error


def _reason(error: Exception) -> str:
    """The part of TensorFlow's message that says what is wrong: it comes first, the graph's nodes after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [x for x in lines if not x.startswith(("Graph execution error", "Detected at node", "File ", "[["))]
    # Of a node its name, without all of its attributes.
    text = re.sub(r"'\{\{node (\S+)\}\} = .*", r"\1", " ".join(kept[:3]))
    return one_line(text or type(error).__name__)[:240]


def _probe(
    run_on: _Run, signature: Signature, spec: TensorFlowSpec, doubled: Sequence[str]
) -> tuple[tuple[TensorSpec, ...], bool]:
    """The outputs, and whether they are numbers at every size. The sizes of the dims ``doubled`` are their usual and
    their largest: what halves an image and puts it together again can't take one pixel more."""
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
                    f"the output {name!r} of {spec.path} differs from run to run on the same inputs: something random "
                    "is left in it; save it for inference"
                    + (", or take dropout out with --strip-training-ops" if strip else "")
                )
    far, found = far_runs(signature, run_on)
    return output_specs(signature, [*cases, *far], [*runs, *found], spec.path), all(map(_is_sound, runs))


def _is_sound(outputs: Mapping[str, np.ndarray]) -> bool:
    """Whether there is something in each output, and numbers: a mean over no pixels is none."""
    import numpy as np

    return all(v.size and (v.dtype.kind != "f" or np.isfinite(v).all()) for v in outputs.values())


def _with_step(error: AccelError, signature: Signature, run_on: _Run) -> AccelError:
    """``error``, which the model gave at a size of ``signature``, with the step that its sizes may be in."""
    general = "; correct --input or --dim"
    if not str(error).endswith(general) or not (fix := step_advice(signature, run_on)):
        return error
    return BadSource(str(error).removesuffix(general) + fix)


def _without_too_small(run_on: _Run, signature: Signature, free: Sequence[str]) -> Signature:
    """``signature``, the dims ``free`` beginning at their usual size where the model can't take their smallest."""
    smallest = {d: signature.dims[d].min for d in free}
    try:
        if _is_sound(run_on(signature.example_inputs(**smallest))):
            return signature
    except BadSource:
        pass  # it says nothing that the sizes don't
    return signature.with_dims({d: replace(signature.dims[d], min=signature.dims[d].opt) for d in free})


def _namings(
    found: Sequence[tuple[str, str, list[int | None] | None]], where: str, given: Sequence[TensorSpec]
) -> Iterator[tuple[TensorSpec, ...]]:
    """The open dims with names, in the order they are tried: each input's own, then one name for an axis of all."""
    said = {spec.name: spec for spec in given}
    rows: list[tuple[str, str, list[int | None]]] = []
    for name, dtype, shape in found:
        if shape is None:
            if name not in said:
                raise BadInputSpec(
                    f"{where} doesn't say which shape {name!r} has; pass --input {name}:{dtype}[batch,...]"
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
    """``batch``, then ``length`` of a sequence, ``height`` and ``width`` of an image (NHWC), else ``dim_<axis>``."""
    if dim is not None:
        return dim
    if axis == 0:
        return BATCH
    image = {1: "height", 2: "width"} if len(shape) == 4 else {}
    sequence = {1: "length"} if len(shape) <= 3 else {}
    return prefix.replace(".", "_").replace("/", "_") + (image | sequence).get(axis, f"dim_{axis}")


def plain_name(name: str) -> str:
    """``x:0`` is the ``x`` that the user knows; ``x:1`` is ``x_1``."""
    operation, _, index = name.partition(":")
    return operation if index in ("", "0") else f"{operation}_{index}"


def dtype_name(kind: Any) -> str:
    """The field name of a ``tf.DType``; ``InvalidModel`` for one that ONNX has not (resource, variant, complex)."""
    name = str(_DTYPES.get(kind.name, kind.name))
    if name in ("resource", "variant") or name.startswith(("complex", "q")):
        raise InvalidModel(f"an input or output is {name}, which ONNX has not; export a signature of plain tensors")
    return name
