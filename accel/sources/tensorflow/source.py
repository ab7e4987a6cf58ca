"""TensorFlow sources: a SavedModel, a Keras file, a frozen graph, a TF1 checkpoint, a TFLite file, a Python factory."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accel.artifact import Artifact, canonical_json, file_sha256, text_sha256
from accel.errors import BadInputSpec, BadSource, ChildCrashed, InvalidModel, UsageError
from accel.signature import DimRange, Signature, TensorSpec
from accel.sources.declare import Dims, Inputs, parse_dims, parse_inputs
from accel.sources.tensorflow_process import in_tensorflow

_FORMS = {".keras": "keras", ".h5": "keras", ".hdf5": "keras", ".pb": "graph", ".meta": "checkpoint"}
_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt")
_FRAMEWORKS = {"tensorflow", "keras", "tf_keras"}


@dataclass(frozen=True, kw_only=True)
class TensorFlowSpec:
    """Where a model is and how it is to be read.

    ``form``: ``saved_model``, ``keras``, ``graph`` (a frozen GraphDef), ``checkpoint`` (TF1), ``python`` or ``tflite``.
    ``signature``: which signature of a SavedModel. ``inputs``, ``outputs``: tensors of a graph, like ``x:0``.
    ``strip``: take dropout out that was left in it.
    """

    form: str
    path: str
    signature: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    strip: bool = False

    @classmethod
    def of(cls, artifact: Artifact) -> TensorFlowSpec:
        """How the model behind ``artifact`` (kind ``tensorflow`` or ``tflite``) is read."""
        loading = artifact.source.get("loading")
        if loading and artifact.manifest is None:
            return cls(**{**loading, "inputs": tuple(loading["inputs"]), "outputs": tuple(loading["outputs"])})
        if artifact.kind == "tflite":
            return cls(form="tflite", path=str(artifact.path.absolute()))
        return cls(form="saved_model", path=str(artifact.path.absolute().parent))


def saved_model_file(path: Path) -> Path | None:
    """The main file of the SavedModel in the folder ``path`` (or that ``path`` is itself); None where it is none."""
    if path.name in _SAVED_MODEL and path.is_file():
        return path
    return next((path / name for name in _SAVED_MODEL if (path / name).is_file()), None)


def form_of(text: str) -> str | None:
    """The form of ``TensorFlowSpec`` that ``text`` names, None where it is not TensorFlow's. Nothing is imported."""
    path = Path(text)
    if saved_model_file(path) is not None:
        return "saved_model"
    if path.suffix == ".tflite":
        return "tflite"
    if path.suffix in _FORMS:
        return _FORMS[path.suffix]
    return "python" if _written_in_tensorflow(text) else None


def _written_in_tensorflow(text: str) -> bool:
    """Whether the file behind ``file.py:factory`` or ``package.module:factory`` imports TensorFlow or Keras, not torch.

    Read from its text: importing it is what must not happen in this process.
    """
    where, colon, _ = text.rpartition(":")
    if not colon:
        return False
    code = Path(where)
    if not where.endswith(".py"):
        if "." not in where and not Path(f"{where}.py").is_file():
            return False
        try:
            found = importlib.util.find_spec(where)
        except (ImportError, ValueError):
            return False
        code = Path(found.origin) if found and found.origin else Path()
    try:
        tree = ast.parse(code.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return False
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return bool(names & _FRAMEWORKS) and "torch" not in names


def open_tensorflow(
    text: str,
    *,
    inputs: Inputs | None = None,
    dims: Dims | None = None,
    graph_inputs: Sequence[str] = (),
    graph_outputs: Sequence[str] = (),
    signature: str = "",
    strip_training_ops: bool = False,
) -> Artifact:
    """The TensorFlow model that ``text`` names, as an artifact of kind ``tensorflow`` (``tflite`` for such a file).

    ``inputs``: names or fixes dims that the model leaves open, and says which values integers may have.
    ``graph_inputs``, ``graph_outputs``: tensor names of a frozen graph or checkpoint. ``signature``: which one of a
    SavedModel. ``strip_training_ops``: take dropout out of a model that still holds it.

    Raises ``BadSource`` (``InvalidModel``) where it can't be read, holds random ops, or lacks what has to be said.
    """
    form = form_of(text)
    assert form is not None, text
    path = Path(text)
    if form in ("graph", "checkpoint"):
        graph_inputs, graph_outputs = _tensor_names(graph_inputs), _tensor_names(graph_outputs)
    elif graph_inputs or graph_outputs:
        raise UsageError(f"{text} has its own inputs and outputs; --inputs and --outputs are for a .pb or .meta")
    if signature and form != "saved_model":
        raise UsageError(f"{text} has no signatures; leave out --signature")
    if strip_training_ops and form == "tflite":
        raise UsageError(
            f"{text} is a TFLite file, which --strip-training-ops can't change; export the SavedModel or Keras file "
            "that it was made of"
        )
    files = _files(form, path, text)
    main = files[0]
    spec = TensorFlowSpec(
        form=form,
        path=str(main.absolute().parent if form == "saved_model" else path.absolute() if form != "python" else text),
        signature=signature,
        inputs=tuple(graph_inputs),
        outputs=tuple(graph_outputs),
        strip=strip_training_ops,
    )
    given = parse_inputs(inputs) if inputs else ()
    ranges: dict[str, DimRange] = parse_dims(dims or {})
    try:
        found: Mapping[str, Any] = in_tensorflow(
            "accel.sources.tensorflow_model:describe", spec=spec, inputs=given, dims=ranges
        )
    except ChildCrashed as error:
        reason = str(error).partition("): ")[0].rpartition("(")[2].rstrip(")")
        raise InvalidModel(f"{text} ends TensorFlow's process ({reason}); save it again") from error
    bare = Signature(found["inputs"])
    if unknown := [d for d in ranges if d not in bare.dims]:
        raise BadInputSpec(f"no input has a dim called {unknown[0]!r}; the dims are {', '.join(bare.dims) or 'none'}")
    entries = [{"path": str(f.absolute()), "sha256": file_sha256(f)} for f in files]
    loading = asdict(spec)
    said = canonical_json({**loading, "path": "", "given": [str(s) for s in given]})
    return Artifact(
        path=main,
        kind="tflite" if form == "tflite" else "tensorflow",
        signature=Signature(found["inputs"], found["outputs"], {**found["dims"], **ranges}),
        properties={"precision": "fp32", **found["properties"]},
        source={
            "kind": "tensorflow",
            "spec": text,
            "files": entries,
            "loading": {**loading, "inputs": list(spec.inputs), "outputs": list(spec.outputs)},
            "sha256": text_sha256("\n".join([said, found["sha256"], *(e["sha256"] for e in entries)])),
        },
    )


# What of ``open_tensorflow`` can be said of each form, beside inputs and dims.
_OPTIONS = {
    "saved_model": ("signature", "strip_training_ops"),
    "keras": ("strip_training_ops",),
    "graph": ("graph_inputs", "graph_outputs", "strip_training_ops"),
    "checkpoint": ("graph_inputs", "graph_outputs", "strip_training_ops"),
    "python": ("strip_training_ops",),
}


def option_name(parameter: str) -> str:
    """How the command line spells a parameter of ``open_tensorflow``."""
    return "--" + {"graph_inputs": "inputs", "graph_outputs": "outputs"}.get(parameter, parameter.replace("_", "-"))


def options_of_each(models: Sequence[str], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each of several models those of ``options`` (parameters of ``open_tensorflow``) that concern its form.

    ``UsageError`` where one of them concerns none of the models.
    """
    from accel.sources import is_source

    given = {name: value for name, value in options.items() if value}
    forms = [form_of(text) if is_source(text) else None for text in models]
    each = [{name: given[name] for name in _OPTIONS.get(form or "", ()) if name in given} for form in forms]
    if unused := [name for name in given if not any(name in found for found in each)]:
        raise UsageError(f"there is no TensorFlow model here that takes {option_name(unused[0])}; leave it out")
    return each


def _tensor_names(names: Sequence[str]) -> tuple[str, ...]:
    """``x`` stands for ``x:0``: the first output of that operation."""
    return tuple(name if ":" in name else f"{name}:0" for name in names)


def _files(form: str, path: Path, text: str) -> list[Path]:
    """What the model is read from, the main file first. ``BadSource`` where it is not there, ``InvalidModel`` empty."""
    if form == "python":
        where = text.rpartition(":")[0]
        if where.endswith(".py"):
            return [Path(where)]
        found = importlib.util.find_spec(where)
        assert found is not None
        assert found.origin is not None
        return [Path(found.origin)]
    if form == "saved_model":
        main = saved_model_file(path)
        assert main is not None
        rest = sorted(f for f in main.parent.rglob("*") if f.is_file() and f != main)
        return [main, *(f for f in rest if f.relative_to(main.parent).parts[0] in ("variables", "assets"))]
    if not path.is_file():
        raise BadSource(f"{path} does not exist; check the path")
    if path.stat().st_size == 0:
        raise InvalidModel(f"{path} is empty; save it again")
    if form == "checkpoint":
        parts = sorted(path.parent.glob(f"{path.stem}.*"))
        if not any(f.suffix == ".index" for f in parts):
            raise BadSource(
                f"{path} has no {path.stem}.index and .data-* beside it; put the checkpoint's weights there"
            )
        return [path, *(f for f in parts if f != path and f.is_file())]
    return [path]


def with_given(found: Sequence[TensorSpec], given: Sequence[TensorSpec], where: str) -> tuple[TensorSpec, ...]:
    """``found`` with the dims and values that the user gave by name. ``BadInputSpec`` where they contradict it."""
    by_name = {spec.name: spec for spec in given}
    specs = []
    for spec in found:
        said = by_name.pop(spec.name, None)
        if said is None:
            specs.append(spec)
            continue
        if said.dtype != spec.dtype:
            raise BadInputSpec(f"input {spec.name!r} of {where} is {spec.dtype}, not {said.dtype}; correct --input")
        fixed = [d for d in zip(spec.shape, said.shape, strict=False) if isinstance(d[0], int) and d[0] != d[1]]
        if spec.shape and (len(spec.shape) != len(said.shape) or fixed):
            raise BadInputSpec(f"{where} takes {spec}, not {said}; correct --input")
        specs.append(replace(spec, shape=said.shape, values=said.values or spec.values))
    if by_name:
        names = ", ".join(spec.name for spec in found)
        raise BadInputSpec(f"{where} has no input {next(iter(by_name))!r}; its inputs are: {names}")
    return tuple(specs)
