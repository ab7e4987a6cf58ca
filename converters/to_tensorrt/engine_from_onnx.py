"""Builds TensorRT and TensorRT-RTX engines from ONNX models, in a child process.

TensorRT-RTX can build engines without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accel.artifact import Artifact, Manifest, beside, file_sha256, manifest_path
from accel.cache import kept_folder
from accel.child import run_in_child
from accel.errors import BadInputSpec, BuildFailed, ChildCrashed, MissingExtra, UnsupportedHere
from accel.runtimes.engine_options import HARDWARE
from accel.runtimes.tensorrt_toolkit import PLUGIN_LIBRARY, check_capability, toolkit_runtime
from accel.signature import Dim, Signature, TensorSpec, with_values_of
from accel.sources.onnx.file import describe_model, external_files, read_proto
from accel.spelling import option
from accel.stage import StageConfig

from .profiles import OptimizationProfile, default_profile, merged_dims, parse_profiles

MAX_BUILDER_LEVEL = 5


@dataclass(frozen=True, kw_only=True)
class EngineFromOnnxConfig(StageConfig):
    """The options of an engine. An engine has the precision of the ONNX graph, because accel builds strongly typed
    TensorRT networks. With ``tf32``, the products of float32 tensors round their inputs to TF32.

    ``toolkit`` is ``tensorrt-rtx`` or ``tensorrt``. ``profiles`` has a text with the shapes min, opt and max for each
    dynamic input, such as ``input_ids=1x8,8x128,64x512``. A second text for the same input gives the shapes in a second
    profile. If ``profiles`` is empty, the engine has one profile with the signature's ranges. ``compute_capabilities``
    lists the GPUs to build for, such as ``8.6``. If ``compute_capabilities`` is empty, the toolkit chooses the GPUs.
    ``workspace_bytes`` limits the scratch memory of each kernel (None: no limit). ``builder_level`` ranges from 0 (fast
    build) to 5 (fast engine), or is None for the toolkit's default. ``version_compatible`` lets later versions of
    TensorRT run the engine. ``hardware`` (``ampere-plus`` or ``same-capability``) lets other GPUs run the engine. If
    ``kernels`` is set, the engine uses plugins for accel's operators. An operator without a plugin is built from its
    function body. With ``kernels``, ``plugin_library`` is the sha256 of this machine's plugin library, or empty if
    there is no library. The cache uses the sha256 to distinguish engines that were built with different plugin
    libraries.
    """

    toolkit: str = "tensorrt-rtx"
    profiles: tuple[str, ...] = ()
    compute_capabilities: tuple[str, ...] = ()
    workspace_bytes: int | None = None
    builder_level: int | None = None
    version_compatible: bool = False
    hardware: str | None = None
    kernels: bool = False
    plugin_library: str = ""
    tf32: bool = False

    def __post_init__(self) -> None:
        toolkit_runtime(self.toolkit)
        for text in self.compute_capabilities:
            check_capability(text)
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise BadInputSpec(f"workspace_bytes can't be {self.workspace_bytes}; give at least 1 byte, or None")
        if self.builder_level is not None and not 0 <= self.builder_level <= MAX_BUILDER_LEVEL:
            raise BadInputSpec(f"builder_level can't be {self.builder_level}; use 0 to {MAX_BUILDER_LEVEL}, or None")
        if self.hardware not in (None, *HARDWARE):
            raise BadInputSpec(f"hardware can't be {self.hardware!r}; use {', '.join(HARDWARE)} or None")
        # TensorRT for RTX doesn't refuse the unsupported options version_compatible and hardware. TensorRT for RTX only
        # logs a message, or searches for a library that is not part of the toolkit.
        if self.toolkit == "tensorrt-rtx" and (self.version_compatible or self.hardware):
            raise UnsupportedHere(
                "an engine of tensorrt-rtx only runs with the toolkit version that built it; leave out "
                f"version-compatible and hardware, and list the GPUs with {option('compute_capabilities')}"
            )

        if self.toolkit == "tensorrt-rtx" and self.kernels:
            raise UnsupportedHere(
                "tensorrt-rtx can't use accel's plugins; leave out kernels to build accel's operators from function "
                "bodies"
            )
        if self.kernels and not self.plugin_library:
            object.__setattr__(self, "plugin_library", _plugin_digest())


def _plugin_digest() -> str:
    from accel.kernels.native.bridges import find_tensorrt_plugins

    library = find_tensorrt_plugins(None)
    return file_sha256(library) if library is not None and library.is_file() else ""


class EngineNotBuilt(BuildFailed):
    """TensorRT refused a node, could not build the network, or crashed."""


def engine_from_onnx(src: Artifact, config: EngineFromOnnxConfig, out: Path) -> Artifact:
    """Builds an engine from the ONNX model ``src``, and writes the engine to ``out``.

    The artifact has the signature of the built network. The network's dims have the names of the dims of ``src``, and
    the ranges of the profiles. The property ``plugins`` maps each of accel's operators to its implementation. For an
    operator with two implementations, ``plugins`` names the plugin library, because the engine needs the library to
    run. The notes have the ONNX nodes of each kernel, and TensorRT's warnings. If an operator uses its function body,
    the notes give the reason.

    Raises ``MissingExtra`` if the toolkit isn't installed, ``BadInputSpec`` for a wrong profile, and
    ``UnsupportedHere`` for an unsupported compute capability. Raises ``InvalidModel`` for a broken file, and
    ``EngineNotBuilt`` if the build fails.
    """
    if not toolkit_runtime(config.toolkit).installed:
        raise MissingExtra(config.toolkit, config.toolkit)
    precision = _precision(src.path)
    precision = "tf32" if config.tf32 and precision == "fp32" else precision
    profiles = parse_profiles(config.profiles, src.signature)
    if not profiles and (profile := default_profile(src.signature)) is not None:
        profiles = (profile,)
    built = _build(src.path, config, [profile.to_json() for profile in profiles], out)
    return Artifact(
        path=out,
        kind="engine",
        signature=_signature(src.signature, built, profiles),
        properties={
            "toolkit": config.toolkit,
            "toolkit_version": built["toolkit_version"],
            "compute_capabilities": built["compute_capabilities"],
            "precision": precision,
            # The profiles are recorded here, because only a machine with a GPU can read them from the engine.
            "profiles": [profile.to_json() for profile in profiles],
            **build_options(config),
            **({"plugins": {row["operator"]: row["by"] for row in built["plugins"]}} if config.kernels else {}),
        },
        notes={
            "summary": built["summary"],
            "kernels": built["kernels"],
            "profiles": [profile.to_json() for profile in profiles],
            "warnings": built["warnings"],
            **({"plugins": built["plugins"]} if config.kernels else {}),
        },
    )


def _precision(path: Path) -> str:
    """Returns the precision that the file declares. Raises an error for weights outside the model's folder."""
    model = read_proto(path)
    external_files(model)
    return str(describe_model(model)[1]["precision"])


def build_options(config: EngineFromOnnxConfig) -> dict[str, Any]:
    """Returns the builder options that differ from the defaults, so that the engine can be built again."""
    names = ("builder_level", "workspace_bytes", "version_compatible", "hardware", "kernels", "tf32")
    said = {name: getattr(config, name) for name in names}
    return {name: value for name, value in said.items() if value is not None and value is not False}


def _build(model: Path, config: EngineFromOnnxConfig, profiles: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    try:
        # The parent process makes the folder, because a child process that dies can't delete its folder.
        with beside(out) as temporary, TemporaryDirectory(prefix="weights-", dir=out.parent) as weights:
            built: dict[str, Any] = run_in_child(
                "accel.converters.to_tensorrt.build:build",
                model=model,
                out=temporary,
                toolkit=config.toolkit,
                profiles=profiles,
                capabilities=config.compute_capabilities,
                workspace_bytes=config.workspace_bytes,
                builder_level=config.builder_level,
                version_compatible=config.version_compatible,
                hardware=config.hardware,
                kept=kept_folder() if config.toolkit == "tensorrt" else None,
                kernels=Path(weights) if config.kernels else None,
                tf32=config.tf32,
            )
    except ChildCrashed as error:
        raise EngineNotBuilt(
            f"{config.toolkit} died while building {model.name} ({error}); simplify the model or export it with "
            "another opset"
        ) from error
    return built


def _signature(source: Signature, built: Mapping[str, Any], profiles: Sequence[OptimizationProfile]) -> Signature:
    """Returns the signature of the network. A size that is dynamic (-1) in TensorRT is taken from ``source``."""
    known = {spec.name: spec for spec in (*source.inputs, *source.outputs)}

    def spec(row: Mapping[str, Any]) -> TensorSpec:
        declared = known.get(row["name"])
        shape: list[Dim] = []
        for axis, size in enumerate(row["shape"]):
            same_rank = declared is not None and len(declared.shape) == len(row["shape"])
            left_open = declared.shape[axis] if declared is not None and same_rank else f"{row['name']}_{axis}"
            shape.append(left_open if size < 0 else size)
        return TensorSpec(row["name"], row["dtype"], tuple(shape))

    def ordered(rows: Sequence[Mapping[str, Any]], like: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        order = {s.name: index for index, s in enumerate(like)}
        return tuple(spec(row) for row in sorted(rows, key=lambda row: order.get(row["name"], len(order))))

    inputs = with_values_of(ordered(built["inputs"], source.inputs), source.inputs)
    dynamic = {dim for s in inputs for dim in s.shape if isinstance(dim, str)}
    dims = {dim: found for dim, found in merged_dims(profiles).items() if dim in dynamic}
    return Signature(inputs, ordered(built["outputs"], source.outputs), dims)


def check_engine(path: Path, *, toolkit: str | None = None) -> str | None:
    """Checks an engine file, and returns a line that describes the problem, or None. Needs no GPU.

    First compares the file's sha256 with the manifest beside the file, if present. Only the comparison with the
    manifest finds a flipped bit in the weights. After the comparison, ``toolkit`` reads the file in a child process. By
    default, ``toolkit`` is the toolkit in the manifest, or ``tensorrt-rtx`` if no manifest names a toolkit. Without a
    GPU, the toolkit reads only the header and the layout. The header and the layout are enough to detect a truncated
    file, a damaged header, or a file that is not an engine. If the engine calls accel's plugins, the plugin library is
    loaded before the engine. Raises ``BadConfig`` or ``UnsupportedHere`` if the plugin library can't be loaded.
    """
    if not path.is_file():
        return f"{path} does not exist; check the path"
    sidecar = manifest_path(path)
    manifest: Manifest | None = None
    if sidecar.is_file():
        manifest = Manifest.read(sidecar)
        toolkit = toolkit or manifest.properties.get("toolkit")
        if next(iter(manifest.files.values()), "") != file_sha256(path):
            return f"{path} is not the file its manifest describes (its sha256 differs); build it again"
    toolkit = toolkit or "tensorrt-rtx"
    plugins = manifest is not None and PLUGIN_LIBRARY in dict(manifest.properties.get("plugins") or {}).values()
    if not toolkit_runtime(toolkit).installed:
        raise MissingExtra(toolkit, toolkit)
    try:
        problem: str | None = run_in_child(
            "accel.converters.to_tensorrt.build:check", path=path, toolkit=toolkit, plugins=plugins
        )
    except ChildCrashed as error:
        problem = f"the file crashes the runtime ({error})"
    return f"{path}: {problem}; build it again" if problem else None
