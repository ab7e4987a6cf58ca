"""Defines the table of model kinds on disk. Each row holds a kind's file names, reader, runtimes and export format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the table.

    ``main_file`` is the name of the model's main file in a folder that accel writes. ``companions`` lists the suffixes
    of companion files. Companion files are beside the main file and have the same stem. ``runtimes`` lists the names of
    the runtimes that can open the file, in the order in which accel tries them. ``reader`` is the import string of a
    function in ``accel.converters.graph.read_back``, which reads the signature and the properties from a file.
    ``reader`` is None for a kind that can't be read without its hardware. ``mend`` is the import string of a function
    that corrects wrong output shapes in a file. The function ``mend`` runs the model in the file, and corrects the
    shapes if the file has no other fault. ``export_as`` is the value of ``accel export --to``, or None if the kind
    can't be exported. ``other_names`` lists the names that other tools give to the main file. ``framework`` is True for
    a framework's own format, such as PyTorch's ``.pt2``. A file in a framework's format is a source if the file has no
    manifest.
    """

    name: str
    main_file: str
    runtimes: tuple[str, ...]
    reader: str | None = None
    mend: str | None = None
    companions: tuple[str, ...] = ()
    export_as: str | None = None
    other_names: tuple[str, ...] = ()
    framework: bool = False

    @property
    def suffix(self) -> str:
        """Returns the last suffix of the main file, such as ``.param`` for an ncnn net. The last suffix identifies the
        kind."""
        return Path(self.main_file).suffix

    @property
    def ending(self) -> str:
        """Returns all suffixes of the main file, such as ``.ncnn.param`` for an ncnn net."""
        return "".join(Path(self.main_file).suffixes)

    def companions_of(self, main: Path) -> tuple[str, ...]:
        """Returns the names of the companion files beside ``main``."""
        return tuple(main.with_suffix(suffix).name for suffix in self.companions)


# To find the artifact in a folder, accel looks for the main file of each kind in the order of this dict.
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="onnx",
            main_file="model.onnx",
            runtimes=("onnxruntime", "onnxruntime-cuda", "onnx-rounded"),
            reader="accel.converters.graph.read_back:onnx",
            mend="accel.converters.graph.annotations:mend",
            export_as="onnx",
            other_names=("decoder_with_past_model.onnx",),
        ),
        Kind(
            name="openvino",
            main_file="model.xml",
            runtimes=("openvino",),
            reader="accel.converters.graph.read_back:openvino",
            companions=(".bin",),
            export_as="openvino",
            other_names=("openvino_model.xml",),
        ),
        # The kind ``engine`` has no reader, because an engine can be opened only on its own GPU.
        Kind(name="engine", main_file="model.engine", runtimes=("tensorrt", "tensorrt-rtx")),
        Kind(
            name="tflite",
            main_file="model.tflite",
            runtimes=("tflite",),
            reader="accel.converters.graph.read_back:tflite",
            export_as="tflite",
            framework=True,
        ),
        Kind(
            name="ncnn",
            main_file="model.ncnn.param",
            runtimes=("ncnn",),
            reader="accel.converters.graph.read_back:ncnn",
            companions=(".bin",),
            export_as="ncnn",
        ),
        Kind(
            name="torch",
            main_file="model.pt2",
            runtimes=("torch", "torch-compile"),
            reader="accel.converters.graph.read_back:torch",
            export_as="torch",
            framework=True,
        ),
        Kind(
            name="tensorflow",
            main_file="saved_model.pb",
            runtimes=("tensorflow",),
            reader="accel.converters.graph.read_back:tensorflow",
            export_as="saved_model",
            framework=True,
        ),
        # The main file of a pipeline contains the names of the pipeline's function and parts. The parts are artifacts
        # in folders beside the main file.
        Kind(name="pipeline", main_file="model.pipeline", runtimes=("pipeline",)),
    )
}


def kind_of(path: Path) -> str | None:
    """Returns the kind that belongs to the suffix of ``path``, or None for a framework's own format and for an unknown
    suffix."""
    return next((k.name for k in KINDS.values() if k.suffix == path.suffix and not k.framework), None)


def framework_suffixes() -> tuple[str, ...]:
    """Returns the suffixes of main files that count as sources if they have no manifest."""
    return tuple(kind.suffix for kind in KINDS.values() if kind.framework)


def artifact_suffixes() -> tuple[str, ...]:
    """Returns the suffixes that identify a kind."""
    return tuple(kind.suffix for kind in KINDS.values() if not kind.framework)


def main_files() -> tuple[str, ...]:
    """Returns the names of main files, in the order in which accel looks for them in a folder."""
    return tuple(name for kind in KINDS.values() for name in (kind.main_file, *kind.other_names))


def export_formats() -> dict[str, Kind]:
    """Maps each export format, as in ``accel export --to``, to the kind of the exported file."""
    return {kind.export_as: kind for kind in KINDS.values() if kind.export_as is not None}
