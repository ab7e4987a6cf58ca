"""Opens TensorFlow models: a SavedModel, Keras file, frozen graph, TF1 checkpoint, TFLite file or Python factory.

This module only names and hashes files. TensorFlow itself runs in the TensorFlow process (see ``process``).
"""

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
from accel.spelling import option, options

from ..declare import Dims, Inputs, parse_dims, parse_inputs
from ..live import facts_about
from ..nearby import or_nearby
from .process import in_tensorflow

_FORMS = {".keras": "keras", ".h5": "keras", ".hdf5": "keras", ".pb": "graph", ".meta": "checkpoint"}
_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt")
_FRAMEWORKS = {"tensorflow", "keras", "tf_keras"}


@dataclass(frozen=True, kw_only=True)
class TensorFlowSpec:
    """The path of a TensorFlow model and the options for reading it. ``form`` is the file format, one of
    ``saved_model``, ``keras``, ``graph`` (a frozen GraphDef), ``checkpoint`` (TF1), ``python`` and ``tflite``.
    ``signature`` is the name of a SavedModel's signature. ``inputs`` and ``outputs`` are tensors of a graph, like
    ``x:0``. ``strip`` removes dropout that training left in the model. ``declared`` holds the inputs that the user
    declares, because a Keras model may not know its inputs. ``placeholders`` has a (name, value) pair for each
    placeholder that is set to a value instead of being an input.
    """

    form: str
    path: str
    signature: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    strip: bool = False
    declared: tuple[str, ...] = ()
    placeholders: tuple[tuple[str, str], ...] = ()

    @property
    def shown(self) -> str:
        """The path of the model for messages, or the name of its class if the model was given in memory."""
        return str(facts_about(Path(self.path)).get("class", self.path))

    @classmethod
    def of(cls, artifact: Artifact) -> TensorFlowSpec:
        """Returns the spec of the model behind ``artifact``, which is of kind ``tensorflow`` or ``tflite``."""
        loading = artifact.source.get("loading")
        if loading and artifact.manifest is None:
            lists = {name: tuple(loading.get(name, ())) for name in ("inputs", "outputs", "declared")}
            pairs = tuple(dict(loading.get("placeholders", {})).items())
            return cls(**{**loading, **lists, "placeholders": pairs})
        if artifact.kind == "tflite":
            return cls(form="tflite", path=str(artifact.path.absolute()))
        return cls(form="saved_model", path=str(artifact.path.absolute().parent))


def source_options(loading: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of ``accel.Source`` that were used to open a model. ``loading`` is the record of the model in
    a manifest."""
    given = {
        "graph_inputs": loading.get("inputs"),
        "graph_outputs": loading.get("outputs"),
        "signature": loading.get("signature"),
        "strip_training_ops": loading.get("strip"),
        "placeholders": loading.get("placeholders"),
    }
    return {name: value for name, value in given.items() if value}


def saved_model_file(path: Path) -> Path | None:
    """Returns the main file of a SavedModel. ``path`` is the folder of the SavedModel or the main file itself.

    Returns None if ``path`` is not a SavedModel.
    """
    if path.name in _SAVED_MODEL and path.is_file():
        return path
    return next((path / name for name in _SAVED_MODEL if (path / name).is_file()), None)


def form_of(text: str) -> str | None:
    """Returns the ``form`` of the TensorFlow model that ``text`` names, or None if ``text`` names no TensorFlow model.

    Imports nothing.
    """
    path = Path(text)
    if saved_model_file(path) is not None:
        return "saved_model"
    if path.suffix == ".tflite":
        return "tflite"
    if path.suffix in _FORMS:
        return _FORMS[path.suffix]
    return "python" if _written_in_tensorflow(text) else None


def _written_in_tensorflow(text: str) -> bool:
    """Tells whether the file of a factory imports TensorFlow or Keras and doesn't import torch. ``text`` is
    ``file.py:factory`` or ``package.module:factory``.

    Parses the file instead of importing it, because an import would load TensorFlow into this process.
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
    placeholders: Mapping[str, Any] | None = None,
) -> Artifact:
    """Opens the TensorFlow model that ``text`` names, as an artifact of kind ``tensorflow`` or ``tflite``.

    ``inputs`` names or fixes the model's dynamic dims, and gives the range of integer inputs. ``graph_inputs`` and
    ``graph_outputs`` are tensor names of a frozen graph or checkpoint. ``signature`` is the name of a SavedModel's
    signature. ``strip_training_ops`` removes dropout that training left in the model, and sets placeholders such as
    ``is_training`` for inference. ``placeholders`` sets placeholders of a graph that are not inputs.

    Raises ``BadSource`` or ``InvalidModel`` if the model can't be read, holds random ops, or needs an option that is
    missing. Raises ``UsageError`` for an option that this file format does not have.
    """
    form = form_of(text) or "python"
    path = Path(text)
    if form in ("graph", "checkpoint"):
        graph_inputs, graph_outputs = _tensor_names(graph_inputs), _tensor_names(graph_outputs)
    elif graph_inputs or graph_outputs:
        given = options("graph_inputs", "graph_outputs")
        raise UsageError(
            f"the model {text} names its inputs and outputs; leave out {given}, which are only for .pb and .meta files"
        )
    if placeholders and form not in ("graph", "checkpoint", "saved_model"):
        raise UsageError(f"the model {text} has no placeholders; leave out {option('placeholders')}")
    if signature and form != "saved_model":
        raise UsageError(f"the model {text} has no signatures; leave out {option('signature')}")
    if strip_training_ops and form == "tflite":
        raise UsageError(
            f"{option('strip_training_ops', True)} can't change the TFLite file {text}; "
            "export the SavedModel or Keras file that the TFLite file was made from"
        )
    files = _files(form, path, text)
    main = files[0]
    specs = parse_inputs(inputs) if inputs else ()
    spec = TensorFlowSpec(
        form=form,
        path=str(main.absolute().parent if form == "saved_model" else path.absolute() if form != "python" else text),
        signature=signature,
        inputs=tuple(graph_inputs),
        outputs=tuple(graph_outputs),
        strip=strip_training_ops,
        declared=tuple(map(str, specs)) if form in ("keras", "python") else (),
        placeholders=tuple((name.removesuffix(":0"), str(value)) for name, value in (placeholders or {}).items()),
    )
    ranges: dict[str, DimRange] = parse_dims(dims or {})
    try:
        found: Mapping[str, Any] = in_tensorflow(
            "accel.sources.tensorflow.model:describe", spec=spec, inputs=specs, dims=ranges
        )
    except ChildCrashed as error:
        raise InvalidModel(f"TensorFlow crashes on the model {text} ({error.died}); save the model again") from error
    bare = Signature(found["inputs"])
    if unknown := [d for d in ranges if d not in bare.dims]:
        raise BadInputSpec(f"no input has a dim called {unknown[0]!r}; the dims are {', '.join(bare.dims) or 'none'}")
    entries = [{"path": str(f.absolute()), "sha256": file_sha256(f)} for f in files]
    loading = {**asdict(spec), "placeholders": found["placeholders"]}
    del loading["declared"]  # ``given`` holds the same
    if not loading["placeholders"]:
        del loading["placeholders"]
    said = canonical_json({**loading, "path": "", "given": [str(s) for s in specs]})
    return Artifact(
        path=main,
        kind="tflite" if form == "tflite" else "tensorflow",
        signature=Signature(found["inputs"], found["outputs"], {**found["dims"], **ranges}),
        properties={"precision": "fp32", **found["properties"]},
        source={
            "kind": "tensorflow",
            "spec": text,
            "files": entries,
            "loading": {
                **loading,
                "inputs": list(spec.inputs),
                "outputs": list(spec.outputs),
                **({"declared": list(spec.declared)} if spec.declared else {}),
            },
            "sha256": text_sha256("\n".join([said, found["sha256"], *(e["sha256"] for e in entries)])),
        },
    )


# The options of ``open_tensorflow`` for each file format, except inputs and dims.
OPTIONS = {
    "saved_model": ("signature", "strip_training_ops", "placeholders"),
    "keras": ("strip_training_ops",),
    "graph": ("graph_inputs", "graph_outputs", "strip_training_ops", "placeholders"),
    "checkpoint": ("graph_inputs", "graph_outputs", "strip_training_ops", "placeholders"),
    "python": ("strip_training_ops",),
}


def _tensor_names(names: Sequence[str]) -> tuple[str, ...]:
    """Turns names of operations such as ``x`` into the names of their first outputs, such as ``x:0``."""
    return tuple(name if ":" in name else f"{name}:0" for name in names)


def _files(form: str, path: Path, text: str) -> list[Path]:
    """Returns the files of the model, with the main file first.

    Raises ``BadSource`` if a file is missing, and ``InvalidModel`` if the main file is empty.
    """
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
        raise BadSource(f"{path} does not exist; {or_nearby(str(path))}")
    if path.stat().st_size == 0:
        raise InvalidModel(f"{path} is empty; save it again")
    if form == "checkpoint":
        parts = sorted(path.parent.glob(f"{path.stem}.*"))
        if not any(f.suffix == ".index" for f in parts):
            raise BadSource(
                f"the file {path.stem}.index and its .data-* files are missing beside {path}; put them into this folder"
            )
        return [path, *(f for f in parts if f != path and f.is_file())]
    return [path]


def with_given(found: Sequence[TensorSpec], given: Sequence[TensorSpec], where: str) -> tuple[TensorSpec, ...]:
    """Copies the dims and value ranges of the specs ``given`` to the specs ``found`` of the same names, and returns the
    new specs.

    Raises ``BadInputSpec`` if a spec of ``given`` contradicts the model. ``where`` names the model in messages.
    """
    by_name = {spec.name: spec for spec in given}
    specs = []
    for spec in found:
        said = by_name.pop(spec.name, None)
        if said is None:
            specs.append(spec)
            continue
        if said.dtype != spec.dtype:
            raise BadInputSpec(
                f"input {spec.name!r} of {where} has the dtype {spec.dtype}, not {said.dtype}; correct "
                f"{option('inputs')}"
            )
        fixed = [d for d in zip(spec.shape, said.shape, strict=False) if isinstance(d[0], int) and d[0] != d[1]]
        if spec.shape and (len(spec.shape) != len(said.shape) or fixed):
            raise BadInputSpec(f"the model {where} takes the input {spec}, not {said}; correct {option('inputs')}")
        specs.append(replace(spec, shape=said.shape, values=said.values or spec.values))
    if by_name:
        names = ", ".join(spec.name for spec in found)
        raise BadInputSpec(f"the model {where} has no input {next(iter(by_name))!r}; its inputs are: {names}")
    return tuple(specs)
