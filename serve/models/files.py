"""Reads a model's folder in a repository: reads the model's config and opens the model's versions.

The folder has Triton's layout. The file ``config.pbtxt`` is optional. The server fills in the fields that the config
leaves out. The class labels of an output are in the file that the output's ``label_filename`` names, such as
``labels.txt``. Each version of the model has its own folder, whose name is a number above 0. A version's folder has one
model file: ``model.onnx``, ``model.xml``, ``model.engine``, ``model.plan`` or ``model.pt2``.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.artifact import Artifact, manifest_path
from accel.cache import StageCache
from accel.child import resolve, run_in_child
from accel.errors import BadRepository, ChainBroken, InvalidModel
from accel.sources.main_file import main_file
from accel.sources.onnx.file import external_files, open_onnx, probe_apart, read_proto
from accel.tables.kinds import KINDS, artifact_suffixes, kind_of

from . import config as model_config
from .config import TOOLKIT, ModelConfig, declared_signature
from .sequence_config import INITIAL_STATES

CONFIG = "config.pbtxt"
TORCH_FILES = ("model.pt2", "model.pt")  # Exported programs and TorchScript may contain pickles.
PYTHON_FILE = "model.py"
PLAN = "model.plan"  # Triton's file name for a TensorRT engine.
# Maps a kind of artifact to the function that reads the signature of a file without a manifest.
_DESCRIBED = {
    "onnx": "accel.sources.onnx.file:describe",
    "openvino": "accel.converters.graph.read_ir:describe",
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,254}")

# A fingerprint has the name, size, modification time in nanoseconds and inode of each file. A fingerprint changes if a
# file is written, touched or replaced.
Fingerprint = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Options that allow the server to open models that are refused by default.

    ``insecure`` allows a model that differs from its manifest. ``allow_pickle`` allows exported programs and
    TorchScript, whose archives may hold pickles. ``allow_python`` allows models that are Python code.
    """

    insecure: bool = False
    allow_pickle: bool = False
    allow_python: bool = False


def valid_name(name: str) -> bool:
    """Tells whether ``name`` can be a model's name. A model's name is a plain folder name without a path."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def valid_version(version: str) -> bool:
    """Tells whether ``version`` is a number above 0 of at most 18 digits, without leading zeros."""
    return version.isascii() and version.isdigit() and not version.startswith("0") and len(version) < 19


def stamp(path: Path, folder: Path) -> tuple[str, int, int, int]:
    """Returns the fingerprint of one file below ``folder``."""
    stat = path.stat()
    return str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns, stat.st_ino


def fingerprint(folder: Path) -> Fingerprint:
    """Returns the name, size, modification time and inode of every file below ``folder``, sorted by name."""
    found = []
    for root, _, files in os.walk(folder, followlinks=True):
        for file in files:
            with contextlib.suppress(OSError):  # the file was removed after the listing
                found.append(stamp(Path(root, file), folder))
    return tuple(sorted(found))


@dataclass(frozen=True)
class ModelFolder:
    """The folder of one model. The model is named after its folder if ``alias`` is empty."""

    path: Path
    alias: str = ""

    @property
    def name(self) -> str:
        return self.alias or self.path.name

    def version_folder(self, version: str) -> Path:
        """Returns the folder that holds the model file of a version."""
        return self.path / version

    def versions(self) -> list[str]:
        """Returns the numbers of the existing versions, oldest first."""
        return sorted((p.name for p in self.path.iterdir() if p.is_dir() and valid_version(p.name)), key=int)

    def config_text(self) -> str | None:
        """Returns the text of ``config.pbtxt``, or None if the model has no such file."""
        path = self.path / CONFIG
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise BadRepository(f"can't read the config {path}: {error}; write the config as UTF-8 text") from None

    def config(self) -> tuple[ModelConfig, bool]:
        """Returns the config as written, and True if the file sets ``max_batch_size``."""
        text = self.config_text() or ""
        return model_config.parse(text, f"{self.name}/{CONFIG}"), model_config.gives_batch(text)

    def chosen(self, config: ModelConfig) -> list[str]:
        """Returns the versions that the config's ``version_policy`` selects, oldest first. The default is the latest
        version."""
        versions = self.versions()
        if not versions:
            raise BadRepository(
                f"failed to load '{self.name}', no version is available; put the model in {self.name}/1"
            )
        policy = config.version_policy
        kind = policy.WhichOneof("policy_choice")
        if kind == "all":
            return versions
        if kind == "specific":
            wanted = [str(version) for version in policy.specific.versions]
            if missing := [version for version in wanted if version not in versions]:
                raise BadRepository(
                    f"failed to load '{self.name}', its version_policy names version {missing[0]}, which does not "
                    f"exist; put the model in {self.name}/{missing[0]}"
                )
            return sorted(wanted, key=int)
        return versions[-max(1, policy.latest.num_versions) :]

    def model_file(self, version: str, named: str) -> tuple[Path | None, str]:
        """Returns the path of a version's model file, and the file name that was asked for. ``named`` is the
        ``default_model_filename`` of the config, or "". The path is None if no name was asked for and the folder has no
        known file."""
        folder = self.version_folder(version)
        if named:
            if Path(named).name != named:
                raise BadRepository(
                    f"model '{self.name}': default_model_filename {named!r} has to be a plain file name"
                )
            return folder / named, named
        others = (folder / name for name in (PLAN, *TORCH_FILES))
        return main_file(folder) or next((path for path in others if path.is_file()), None), ""

    def open(self, version: str, config: ModelConfig, trust: Trust) -> Artifact:
        """Opens the artifact of a version. Raises an ``AccelError`` if the model's file is missing, isn't trusted or
        differs from the manifest."""
        path, named = self.model_file(version, config.default_model_filename)
        if path is None or not path.is_file():
            folder = self.version_folder(version)
            looked = named or f"model.onnx, model.xml, model.engine, {PLAN} or model.pt2"
            models = sorted(p.name for p in folder.glob("*") if kind_of(p) or p.suffix == Path(PLAN).suffix)
            there = f"; it has {models[0]}: name it in {CONFIG} as default_model_filename" if models else ""
            raise BadRepository(f"model '{self.name}' version {version} has no file {looked}{there}")
        if path.suffix in (".pt2", ".pt"):
            if not trust.allow_pickle:
                raise BadRepository(
                    f"model '{self.name}' is {path.name}, which may hold pickles; export it to ONNX with accel export, "
                    "or pass --allow-pickle"
                )
            if manifest_path(path).is_file() and not trust.insecure:
                return _open(path, "torch", trust, config)
            from accel.sources.source import Source

            return Source(path).open()
        kind = "engine" if path.suffix == Path(PLAN).suffix else kind_of(path)
        if kind is None:
            raise BadRepository(
                f"model '{self.name}': the file {path.name} has to end in {', '.join(artifact_suffixes())}, .plan or "
                ".pt2"
            )
        found = _open(path, kind, trust, config)
        if found.kind == "onnx":
            # A file with a manifest is checked too, because anybody who can add the file can also add a manifest.
            probe_apart(path, found.digest, StageCache(), crashes_only=True)
        return found

    def labels(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """Returns the class labels of each output, read from the files that the config names."""
        found = {}
        for output in config.output:
            name = output.label_filename
            if not name:
                continue
            if Path(name).name != name:
                raise BadRepository(f"model '{self.name}': label_filename {name!r} has to be a plain file name")
            try:
                text = (self.path / name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadRepository(
                    f"model '{self.name}': can't read the labels in {name} ({error}); write one label per line in UTF-8"
                ) from None
            found[output.name] = tuple(text.splitlines())
        return found

    def fingerprints(self, versions: list[str]) -> dict[str, Any]:
        """Returns the fingerprint of each version. A version is loaded again if its own files, the config, the labels
        or the initial states change."""
        shared = self.files() + fingerprint(self.path / INITIAL_STATES)
        return {version: (shared, self.version_files(version)) for version in versions}

    def files(self) -> Fingerprint:
        """Returns the fingerprint of the files that all versions share, such as the config and the labels."""
        return tuple(stamp(path, self.path) for path in sorted(self.path.iterdir()) if path.is_file())

    def version_files(self, version: str) -> Fingerprint:
        """Returns the fingerprint of a version's own files."""
        return fingerprint(self.version_folder(version))


def _open(path: Path, kind: str, trust: Trust, config: ModelConfig) -> Artifact:
    try:
        if kind == "onnx":
            return open_onnx(path)
        if not manifest_path(path).is_file():
            return _bare(path, kind, config)
        artifact = Artifact.open(path)
        assert artifact.manifest is not None
        if artifact.hashes() != dict(artifact.manifest.files):
            raise InvalidModel(
                f"{path} is not the file its manifest describes (its sha256 differs); make the file again, or pass "
                "--insecure"
            )
        return artifact
    except (InvalidModel, ChainBroken):
        if not trust.insecure or not manifest_path(path).is_file():
            raise
        return _bare(path, kind, config)


def _bare(path: Path, kind: str, config: ModelConfig) -> Artifact:
    """Opens a file without a manifest. The signature of an engine comes from ``config``, and the signature of any other
    model comes from the model's file.

    Native parsers run in a child process, because a parser may crash.
    """
    if kind == "engine" and config.input and config.output:
        toolkit = config.parameters[TOOLKIT].string_value if TOOLKIT in config.parameters else "tensorrt"
        signature = declared_signature(config, path.name)
        return Artifact(path=path, kind=kind, signature=signature, properties={"toolkit": toolkit})
    if kind not in _DESCRIBED:
        raise InvalidModel(
            f"the engine {path} has no valid manifest, so the engine's inputs are unknown; build the engine again, or "
            f"write {CONFIG} with the engine's input and output"
        )
    companions = KINDS[kind].companions_of(path)
    if kind == "onnx":
        signature, properties = resolve(_DESCRIBED[kind])(path)
        companions = external_files(read_proto(path))
    else:
        signature, properties = run_in_child(_DESCRIBED[kind], timeout=600, path=path)
    return Artifact(path=path, kind=kind, signature=signature, properties=properties, companions=companions)
