"""``Source`` holds the user's model with everything that the user specifies about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from accel.artifact import Artifact, manifest_path
from accel.errors import BadSource, UsageError
from accel.spelling import option
from accel.tables.kinds import framework_suffixes, kind_of

from .declare import Dims, Inputs, parse_dims, parse_inputs
from .main_file import main_file

if TYPE_CHECKING:
    from accel.signature import Signature

Model: TypeAlias = "str | Path | Artifact | Source"

TENSORFLOW_OPTIONS = ("graph_inputs", "graph_outputs", "signature", "strip_training_ops")


class SourceOptions(TypedDict, total=False):
    """The fields of a ``Source`` besides ``spec``, as the keywords of the public functions."""

    inputs: Inputs | None
    weights: str | Path | None
    dims: Dims | None
    graph_inputs: Sequence[str]
    graph_outputs: Sequence[str]
    signature: str
    strip_training_ops: bool


@dataclass(frozen=True)
class Source:
    """The user's model, in any format. ``spec`` names the model. A PyTorch model is ``package.module:factory``,
    ``file.py:factory``, an exported program (``.pt2``), a TorchScript file, or a folder of transformers'
    ``save_pretrained`` or of ``accel train``. A TensorFlow model is a SavedModel, a Keras file, a frozen ``.pb``, a TF1
    ``.meta``, a ``.tflite`` file or a factory. A ``spec`` may also be an ONNX file, an artifact, or the folder of an
    artifact.

    ``inputs`` declares the inputs if the spec doesn't, as ``["x:float32[batch,3,32,32]"]`` or ``dict(x=("float32",
    ("batch", 3, 32, 32)))``, where a named dim is dynamic. For an ONNX file, ``inputs`` gives the range of an integer
    input, or the size of a dim that the file leaves open. ``weights`` is a state dict or a training checkpoint for the
    module of a factory. ``dims`` are the ranges of dynamic dims as (min, opt, max) or (min, opt, max, step).

    ``graph_inputs`` and ``graph_outputs`` are tensor names (``x:0``) of a ``.pb`` or ``.meta`` file. ``signature`` is
    the name of a SavedModel's signature. ``strip_training_ops`` removes dropout that training left in a TensorFlow
    graph.

    >>> accel.Source("net.py:make", inputs=["x:float32[batch,3]"]).open().signature  # doctest: +SKIP
    """

    spec: str | Path | Artifact
    _: KW_ONLY
    inputs: Inputs | None = None
    weights: str | Path | None = None
    dims: Dims | None = None
    graph_inputs: Sequence[str] = ()
    graph_outputs: Sequence[str] = ()
    signature: str = ""
    strip_training_ops: bool = False

    @classmethod
    def of(
        cls,
        model: Model,
        *,
        inputs: Inputs | None = None,
        weights: str | Path | None = None,
        dims: Dims | None = None,
        graph_inputs: Sequence[str] = (),
        graph_outputs: Sequence[str] = (),
        signature: str = "",
        strip_training_ops: bool = False,
    ) -> Source:
        """Returns ``model`` as a source. If ``model`` is a source, the keywords fill the fields that the source leaves
        empty."""
        given: dict[str, Any] = {
            "inputs": inputs,
            "weights": weights,
            "dims": dims,
            "graph_inputs": graph_inputs,
            "graph_outputs": graph_outputs,
            "signature": signature,
            "strip_training_ops": strip_training_ops,
        }
        if not isinstance(model, Source):
            return cls(model, **given)
        return replace(model, **{name: value for name, value in given.items() if not getattr(model, name)})

    @property
    def options(self) -> SourceOptions:
        """Returns all fields besides ``spec``."""
        return {
            "inputs": self.inputs,
            "weights": self.weights,
            "dims": self.dims,
            "graph_inputs": self.graph_inputs,
            "graph_outputs": self.graph_outputs,
            "signature": self.signature,
            "strip_training_ops": self.strip_training_ops,
        }

    @property
    def text(self) -> str:
        """Returns the spec as a string. For an artifact, returns the artifact's path."""
        return str(self.spec.path if isinstance(self.spec, Artifact) else self.spec)

    @property
    def path(self) -> Path:
        """Returns the spec as a path. For the folder of an artifact, returns the path of the artifact's main file."""
        path = Path(self.text)
        return (main_file(path) or path) if path.is_dir() else path

    @property
    def native(self) -> bool:
        """Tells whether the model is in its framework's own format, not an artifact or an ONNX file."""
        if isinstance(self.spec, Artifact):
            return False
        path = self.path
        made = path.suffix in framework_suffixes() and manifest_path(path).is_file()
        return kind_of(path) is None and not made

    @property
    def form(self) -> str | None:
        """Returns the file format of a TensorFlow model (see ``TensorFlowSpec``), or None for any other model."""
        from .tensorflow.source import form_of

        return form_of(self.text) if self.native else None

    def open(self, *, like: Callable[[], Signature] | None = None) -> Artifact:
        """Finds, reads and describes the model.

        ``like`` returns the signature of another version of the model, and is called if the inputs aren't declared
        otherwise.

        Raises ``BadSource`` or ``InvalidModel`` if the model can't be found, read or understood. Raises ``UsageError``
        for an option that this model does not have.
        """
        if isinstance(self.spec, Artifact):
            return self.spec
        if self.spec == "":
            raise BadSource("no model is named; give a path, file.py:factory or package.module:factory")
        check_name(Path(self.spec))
        form = self.form
        if form is None:
            self._refuse(TENSORFLOW_OPTIONS, "is no TensorFlow model")
        if form is not None or not self.native:
            self._refuse(("weights",), "has its own weights")
        if form is not None:
            from .tensorflow.source import open_tensorflow

            named: dict[str, Any] = {name: getattr(self, name) for name in TENSORFLOW_OPTIONS}
            return open_tensorflow(self.text, inputs=self.inputs, dims=parse_dims(self.dims or {}), **named)
        if self.native:
            from .torch.source import open_torch

            weights = Path(self.weights) if self.weights else None
            dims = parse_dims(self.dims or {})
            return open_torch(self.text, inputs=self.inputs, weights=weights, dims=dims, like=like)
        return self._open_file()

    def _open_file(self) -> Artifact:
        """Opens an artifact or an ONNX file."""
        path = self.path
        if kind_of(path) == "onnx":
            from .onnx.file import open_onnx

            return open_onnx(path, dims=parse_dims(self.dims or {}), inputs=parse_inputs(self.inputs or ()))
        self._refuse(("inputs",), "has its own inputs")
        if not path.is_file():
            raise BadSource(f"{path} does not exist; check the path")
        return Artifact.open(path)

    def _refuse(self, names: Sequence[str], why: str) -> None:
        """Raises ``UsageError`` if one of the options ``names`` is set."""
        for name in names:
            if getattr(self, name):
                raise UsageError(f"{self.text} {why}; leave out {option(name)}")


def shared(models: Sequence[Model], options: SourceOptions) -> list[Source]:
    """Returns several models as sources that share ``options``. An artifact or an ONNX file gets no options, and a
    TensorFlow model gets the options of its file format. Raises ``UsageError`` if a TensorFlow option applies to none
    of the models.
    """
    from .tensorflow.source import OPTIONS

    sources = [Source.of(model) for model in models]
    own = [(*_BASIC, *OPTIONS.get(source.form or "", ())) if source.native else () for source in sources]
    given: Mapping[str, Any] = {name: value for name, value in options.items() if value}
    for name in TENSORFLOW_OPTIONS:
        if name in given and not any(name in names for names in own):
            raise UsageError(f"there is no TensorFlow model here that takes {option(name)}; leave it out")
    return [
        Source.of(source, **{name: value for name, value in given.items() if name in names})
        for source, names in zip(sources, own, strict=True)
    ]


_BASIC = ("inputs", "weights", "dims")


def check_name(path: Path) -> None:
    """Raises ``BadSource`` if the path is not valid UTF-8, because no runtime can open and no manifest can record such
    a path."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise BadSource(f"{str(path)!a} is not valid UTF-8; rename the file or the folder") from None
