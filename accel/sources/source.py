"""Defines ``Source``, which holds the user's model and everything that the user specifies about the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack

from accel.artifact import Artifact, manifest_path
from accel.child import resolve
from accel.errors import BadSource, UsageError
from accel.signature import Signature
from accel.spelling import option
from accel.tables.kinds import KINDS, framework_suffixes, kind_of

from .argument_kinds import check_kinds
from .declare import Dims, Inputs, parse_dims, parse_inputs
from .hub.download import Located, locate
from .hub.model_id import model_id
from .live import captured, facts_about
from .main_file import main_file
from .nearby import or_nearby
from .run_folder import final_folder

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch.export import ExportedProgram

# A live model is a callable (such as an nn.Module), an exported program or an ONNX ModelProto.
Model: TypeAlias = "str | Path | Artifact | Source | Callable[..., Any] | ExportedProgram | ModelProto"

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

TENSORFLOW_OPTIONS = ("graph_inputs", "graph_outputs", "signature", "strip_training_ops", "placeholders")


class SourceOptions(TypedDict, total=False):
    """The keyword arguments of the public functions that take a model. The keywords are all fields of ``Source`` except
    ``spec``."""

    inputs: Inputs | None
    weights: str | Path | None
    weights_dtype: str
    adapters: str | Path | Sequence[str | Path] | None
    dims: Dims | None
    graph_inputs: Sequence[str]
    graph_outputs: Sequence[str]
    signature: str
    strip_training_ops: bool
    placeholders: Mapping[str, Any] | None
    example: Any
    dynamic: Mapping[str, Any] | Sequence[Any] | None
    decoder: bool | None


@dataclass(frozen=True)
class Source:
    """The user's model, in any format. ``spec`` names the model. A PyTorch model is a factory
    (``package.module:factory`` or ``file.py:factory``), an exported program (``.pt2``), a TorchScript file, or a folder
    that transformers' ``save_pretrained`` or ``accel train`` wrote. A TensorFlow model is a SavedModel, a Keras file, a
    frozen ``.pb``, a TF1 ``.meta``, a ``.tflite`` file or a factory. A model of the Hugging Face Hub is ``org/name``,
    ``org/name@revision`` or ``org/name:onnx/model.onnx``. A ``spec`` may also be an ONNX file, an artifact, or the
    folder of an artifact. A ``spec`` may also be a live model: a module of PyTorch, Keras or TensorFlow, a function of
    tensors, an exported program or an ONNX ``ModelProto``. accel writes a live model to the cache, and sets ``spec`` to
    the path of the cached copy.

    ``example`` holds example arguments for a call of a live model: a tuple, a dict by name, or a single tensor.
    ``dynamic`` names the dynamic axes of the example arguments, as in ``{"x": {0: "batch", 2: "height"}}``. An input
    inside a dict, a list or a dataclass has the name that accel prints, or its place in the argument, as in ``{"batch":
    {"ids": {1: "length"}}}``. By default the first axis is dynamic if the model runs with another batch size.

    ``inputs`` declares the inputs of a model that doesn't describe them itself, in a notation such as
    ``["x:float32[batch,3,32,32]"]`` or ``dict(x=("float32", ("batch", 3, 32, 32)))``. A named dim is dynamic. A range,
    as in ``x:float32[batch]{0..1}``, limits the random inputs. For an ONNX file, ``inputs`` gives the range of an
    input, or the size of a dim that the file leaves open. ``weights`` is a state dict or a training checkpoint for the
    module of a factory. accel takes the float32 master weights if a checkpoint or a run folder has them.
    ``weights_dtype`` rounds the weights of both to ``"bfloat16"`` or ``"float16"``, which are the weights that the
    training computed with. ``adapters`` is the folder of a LoRA adapter that PEFT wrote, which is merged into the
    weights of a PyTorch model. Only ``accel.export`` with ``adapters_as="inputs"`` takes several folders. ``dims`` are
    the ranges of dynamic dims as (min, opt, max) or (min, opt, max, step).

    ``graph_inputs`` and ``graph_outputs`` are tensor names (``x:0``) of a ``.pb`` or ``.meta`` file. ``signature`` is
    the name of a SavedModel's signature. ``strip_training_ops`` removes dropout that training left in a TensorFlow
    graph, and sets placeholders such as ``keep_prob`` and ``is_training`` to their values at inference.
    ``placeholders`` sets placeholders of a TF1 graph that aren't inputs, as in ``{"keep_prob": 1.0}``. With
    ``decoder``, a generative PyTorch model is opened with its KV cache as inputs and outputs.

    >>> accel.Source("net.py:make", inputs=["x:float32[batch,3]"]).open().signature  # doctest: +SKIP
    """

    spec: str | Path | Artifact | Callable[..., Any] | ExportedProgram | ModelProto
    _: KW_ONLY
    inputs: Inputs | None = None
    weights: str | Path | None = None
    weights_dtype: str = ""
    adapters: str | Path | Sequence[str | Path] | None = None
    dims: Dims | None = None
    graph_inputs: Sequence[str] = ()
    graph_outputs: Sequence[str] = ()
    signature: str = ""
    strip_training_ops: bool = False
    placeholders: Mapping[str, Any] | None = None
    example: Any = None
    dynamic: Mapping[str, Any] | Sequence[Any] | None = None
    decoder: bool | None = None

    def __post_init__(self) -> None:
        check_kinds(vars(self))
        # Sessions and results of accel.optimize have the attribute ``artifact``.
        made = getattr(self.spec, "artifact", None)
        if isinstance(made, Artifact):
            object.__setattr__(self, "spec", made)
        if isinstance(self.spec, PathLike):  # the text of an object that isn't a Path may be another than its path
            object.__setattr__(self, "spec", Path(self.spec))
        if not is_live(self.spec):
            for name in ("example", "dynamic"):
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"{self.text} is not a model in memory; leave out {option(name)}, or pass the model itself"
                    )
            return
        object.__setattr__(self, "spec", captured(self.spec, self.example, self.dynamic))
        object.__setattr__(self, "example", None)
        object.__setattr__(self, "dynamic", None)

    @classmethod
    def of(cls, model: Model, **about: Unpack[SourceOptions]) -> Source:
        """Returns ``model`` as a source. If ``model`` is a source, the keywords fill the fields that the source leaves
        empty."""
        if not isinstance(model, Source):
            return cls(model, **about)
        return replace(model, **{name: value for name, value in about.items() if not getattr(model, name)})

    @property
    def text(self) -> str:
        """Returns the spec as a string. For an artifact, returns the artifact's path."""
        return str(self.spec.path if isinstance(self.spec, Artifact) else self.spec)

    @property
    def hub_model(self) -> Located | None:
        """Returns the model of the Hugging Face Hub that the spec names, or None for any other spec. Downloads the
        model if the cache of huggingface_hub lacks it."""
        asked = model_id(self.spec) if isinstance(self.spec, str) else None
        return locate(asked) if asked else None

    @property
    def path(self) -> Path:
        """Returns the spec as a path. For the folder of an artifact, returns the path of the artifact's main file. For
        a model of the Hugging Face Hub, returns the path of its files on this machine."""
        if found := self.hub_model:
            return found.path
        path = Path(self.text)
        return (main_file(path) or path) if path.is_dir() else path

    @property
    def folder(self) -> Path | None:
        """Returns the folder with the model and the files beside it, or None for a model in memory or a factory. For a
        run folder of ``accel train``, returns the folder of the trained model."""
        path = self.path
        if path.is_dir():
            return final_folder(path) or path
        return path.parent if path.exists() else None

    @property
    def native(self) -> bool:
        """Tells whether the model is in its framework's own format, not an artifact or an ONNX file."""
        if isinstance(self.spec, Artifact):
            return False
        path = self.path
        made = path.suffix in framework_suffixes() and manifest_path(path).is_file()
        return kind_of(path) is None and not made

    @property
    def is_factory(self) -> bool:
        """Tells whether the model is named as ``file.py:factory`` or ``package.module:factory``."""
        return isinstance(self.spec, str) and ":" in self.spec and not Path(self.spec).exists()

    @property
    def form(self) -> str | None:
        """Returns the file format of a TensorFlow model (see ``TensorFlowSpec``), or None for any other model."""
        from .tensorflow.source import form_of

        return form_of(self.text) if self.native and not self.hub_model else None

    def open(self, *, like: Callable[[], Signature] | None = None, part: str = "") -> Artifact:
        """Finds, reads and describes the model.

        ``like`` is a function that returns the signature of another version of the model. The function is called only
        if nothing else declares the inputs.

        ``part`` opens only the encoder or the decoder of an encoder-decoder of transformers.

        Raises ``BadSource`` or ``InvalidModel`` if the model can't be found, read or understood. Raises ``UsageError``
        for an option that doesn't apply to this model.
        """
        artifact = self._open(like, part)
        facts = {} if isinstance(self.spec, Artifact) else facts_about(Path(self.text))
        if facts:
            call = {**artifact.source.get("call", {}), **facts["call"]}
            live = {name: facts[name] for name in ("class", "note", "not_finite") if name in facts}
            signature = artifact.signature.in_order(facts.get("inputs", ()), facts.get("outputs", ()))
            source = {**artifact.source, "live": live, "call": call}
            artifact = replace(artifact, source=source, signature=signature)
        found = self.hub_model
        if found and artifact.manifest is None:
            artifact = replace(artifact, source={**artifact.source, "spec": found.spec, "hub": found.facts})
        return artifact

    def _open(self, like: Callable[[], Signature] | None, part: str) -> Artifact:
        if isinstance(self.spec, Artifact):
            return self.spec
        if self.spec == "":
            raise BadSource("no model is named; give a path, file.py:factory or package.module:factory")
        check_name(Path(self.text))
        form = self.form
        if form is None:
            if self.graph_inputs and self.native:
                raise UsageError(
                    f"{self.text} is no TensorFlow model; leave out {option('graph_inputs')}, and declare the inputs "
                    f"with {option('inputs')}"
                )
            self._refuse(TENSORFLOW_OPTIONS, "is no TensorFlow model")
        found = self.hub_model
        if form is not None or found or not self.native:
            self._refuse(_WEIGHTS, "has its own weights")
        if form is not None or not self.native:
            self._refuse(("decoder", "adapters"), "is no PyTorch model")
        if form is not None:
            return self._open_tensorflow()
        if self.native:
            from .torch.factory import MadeByTensorFlow
            from .torch.source import open_torch

            weights = Path(self.weights) if self.weights else None
            dims = parse_dims(self.dims or {})
            try:
                spec = found.spec if found else self.text
                return open_torch(
                    spec,
                    inputs=self.inputs,
                    weights=weights,
                    weights_dtype=self.weights_dtype,
                    adapters=self._merged_adapter(),
                    dims=dims,
                    like=like,
                    decoder=bool(self.decoder),
                    part=part,
                )
            except MadeByTensorFlow:
                self._refuse((*_WEIGHTS, "adapters"), "is a model of TensorFlow, which has its own weights")
                return self._open_tensorflow()
        return self._open_file()

    @property
    def adapter_folders(self) -> tuple[Path, ...]:
        """Returns the folders of the adapters."""
        given = self.adapters or ()
        return (Path(given),) if isinstance(given, str | PathLike) else tuple(map(Path, given))

    def _merged_adapter(self) -> Path | None:
        """Returns the folder of the adapter to merge. Raises ``UsageError`` if there are several, because the sum of
        several adapters is no model that anyone trained."""
        folders = self.adapter_folders
        if len(folders) > 1:
            raise UsageError(
                f"{len(folders)} adapters can't be merged into one model; give one with {option('adapters')}, or keep "
                f"them as inputs of a decoder with accel export and {option('adapters_as', 'inputs')}"
            )
        return folders[0] if folders else None

    def _open_tensorflow(self) -> Artifact:
        from .tensorflow.source import open_tensorflow

        named: dict[str, Any] = {name: getattr(self, name) for name in TENSORFLOW_OPTIONS}
        return open_tensorflow(self.text, inputs=self.inputs, dims=parse_dims(self.dims or {}), **named)

    def _open_file(self) -> Artifact:
        """Opens an artifact or an ONNX file."""
        path = self.path
        if kind_of(path) == "onnx":
            from .onnx.decoder_sizes import with_cache_sizes
            from .onnx.file import open_onnx

            opened = open_onnx(path, dims=parse_dims(self.dims or {}), inputs=parse_inputs(self.inputs or ()))
            return with_cache_sizes(opened)
        self._refuse(("inputs",), "has its own inputs")
        if not path.is_file():
            raise BadSource(f"{path} does not exist; {or_nearby(str(path))}")
        if path.name in KINDS["openvino"].other_names and not manifest_path(path).is_file():
            return _described(path)
        return Artifact.open(path)

    def _refuse(self, names: Sequence[str], why: str) -> None:
        """Raises ``UsageError`` if one of the options ``names`` is set."""
        for name in names:
            if getattr(self, name):
                raise UsageError(f"{self.text} {why}; leave out {option(name)}")


def _described(path: Path) -> Artifact:
    """Returns the IR of another tool. Raises ``InvalidModel`` if it can't be read."""
    row = KINDS["openvino"]
    assert row.reader is not None, "an IR can be read"
    signature, properties = resolve(row.reader)(path, Signature(()))
    return Artifact(
        path=path, kind=row.name, signature=signature, properties=properties, companions=row.companions_of(path)
    )


def is_live(model: Model) -> bool:
    """Tells whether ``model`` is a model in memory, rather than a source, an artifact, a session, a path or a name."""
    named = isinstance(model, str | Path | Artifact | Source | PathLike)
    return not named and not isinstance(getattr(model, "artifact", None), Artifact)


def known_keywords(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorates a public function with the keywords of ``SourceOptions``. A call with an unknown keyword raises
    ``TypeError`` with the name of the function and the nearest keyword. Python itself lets any keyword pass into
    ``**about``."""
    parameters = inspect.signature(function).parameters.values()
    own = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    known = [*own, *SourceOptions.__annotations__]

    @functools.wraps(function)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                fix = f"write {close[0]}=" if close else f"the keywords are {', '.join(known)}"
                raise TypeError(f"{function.__name__}() has no keyword {name!r}; {fix}")
        check_kinds(kwargs)
        return function(*args, **kwargs)

    return checked


def declared_dims(model: Model, about: SourceOptions) -> Dims:
    """Returns the dims that the user declares for ``model``, either in the source itself or by keyword arguments."""
    return (model.dims if isinstance(model, Source) else None) or about.get("dims") or {}


def with_declared(source: Source, about: SourceOptions) -> Source:
    """Returns ``source`` with the inputs and dims that ``about`` declares. For an artifact or an ONNX file, the
    function ``shared`` leaves out inputs and dims, so this function adds both."""
    return Source.of(source, inputs=about.get("inputs"), dims=about.get("dims"))


def shared(models: Sequence[Model], options: SourceOptions) -> list[Source]:
    """Returns several models as sources that share ``options``. An artifact or an ONNX file gets no options. Beside a
    factory, only factories get ``weights``. A TensorFlow model gets the options of its file format, and a live model
    gets ``example`` and ``dynamic``. Raises ``UsageError`` if an option for TensorFlow or live models applies to none
    of the models.
    """
    from .tensorflow.source import OPTIONS

    if unknown := set(options) - set(SourceOptions.__annotations__):
        raise TypeError(f"unexpected keyword argument {sorted(unknown)[0]!r}")
    called: SourceOptions = {"example": options.get("example"), "dynamic": options.get("dynamic")}
    if not any(map(is_live, models)) and any(value is not None for value in called.values()):
        raise UsageError(f"none of the models is in memory; leave out {option('example')}")
    sources = [Source.of(model, **(called if is_live(model) else {})) for model in models]
    own: list[tuple[str, ...]] = [
        (*_BASIC, *OPTIONS.get(source.form or "", ())) if source.native else () for source in sources
    ]
    given: Mapping[str, Any] = {n: value for n, value in options.items() if n not in called and value}
    if any(source.native and source.is_factory for source in sources):
        # Weights are for the factories among the models. Without a factory, ``open`` refuses them.
        own = [
            names if source.is_factory else tuple(name for name in names if name != "weights")
            for source, names in zip(sources, own, strict=True)
        ]
    for name in TENSORFLOW_OPTIONS:
        if name in given and not any(name in names for names in own):
            raise UsageError(
                f"none of the models is a TensorFlow model that takes {option(name)}; leave out the option"
            )
    return [
        Source.of(source, **{name: value for name, value in given.items() if name in names})
        for source, names in zip(sources, own, strict=True)
    ]


_WEIGHTS = ("weights", "weights_dtype")
_BASIC = ("inputs", *_WEIGHTS, "adapters", "dims", "decoder")


def check_name(path: Path) -> None:
    """Raises ``BadSource`` if the path is not valid UTF-8. Runtimes can't open a path that isn't valid UTF-8, and a
    manifest can't record it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise BadSource(f"{str(path)!a} is not valid UTF-8; rename the file or the folder") from None
