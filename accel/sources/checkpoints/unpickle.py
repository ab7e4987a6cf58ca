"""Reads the pickle files of training checkpoints without executing code from them. ``RECORDS`` lists every class that a
pickle may name.

``read_torch`` maps files of ``torch.save`` into memory and reads them with torch's own weights-only unpickler.
``read_pickle`` reads a plain pickle, such as the ``.metadata`` of torch.distributed.checkpoint, with Python's
unpickler. ``read_torch`` and ``read_pickle`` refuse a pickle that names an unlisted class. An object of a listed class
becomes a ``Record``, which holds the object's constructor arguments and state as data. No constructor, ``__setstate__``
or function of a library ever runs.
"""

from __future__ import annotations

import collections
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from accel.errors import BadSource, InvalidModel
from accel.spelling import option


class Record:
    """Holds a pickled object as data: the ``name`` of its class, its constructor arguments and its state."""

    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Record:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {self.name} is called")

    def get(self, field: str, default: Any = None) -> Any:
        """Returns a field of a recorded dataclass or Namespace. Returns ``default`` if the field is missing."""
        return self.state.get(field, default) if isinstance(self.state, dict) else default


class PlainDict:
    """Makes a plain dict in place of a subclass of dict, such as Lightning's AttributeDict."""

    def __new__(cls, *_: Any, **__: Any) -> dict[Any, Any]:  # type: ignore[misc]
        return {}


def _member(kind: Any, name: Any) -> Record:
    """Makes a record in place of an enum member. Python 3.11 pickles enum members as ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, Record) and isinstance(name, str)):
        raise pickle.UnpicklingError("Unsupported global: GLOBAL builtins.getattr was not an allowed global")
    return kind(name)


def _strings(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


# Full names of the classes that training checkpoints may contain. Objects of these classes are read as records.
RECORDS = (
    *_strings("argparse", "Namespace"),
    *_strings("pathlib", "Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    *_strings("pathlib._local", "Path", "PosixPath", "WindowsPath"),
    *_strings("typing", "Any"),
    *_strings("types", "SimpleNamespace"),
    *_strings("datetime", "timedelta", "datetime"),
    *_strings(
        "torch.distributed.checkpoint.metadata",
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
    ),
    *_strings("torch.distributed.checkpoint.planner", "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    *_strings("torch.distributed.checkpoint.filesystem", "_StorageInfo", "_StoragePrefix"),
    *_strings("torch.distributed.checkpoint._fsspec_filesystem", "_StorageInfo"),
    *_strings("torch.distributed.checkpoint.hf_storage", "_HFStorageInfo"),
    *_strings("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "DynamicLossScaler"),
    *_strings("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    *_strings("deepspeed.utils.tensor_fragment", "fragment_address"),
    *_strings("deepspeed.runtime.config", "DtypeEnum"),
    *_strings("megatron.model.enums", "ModelType", "AttnMaskType", "PositionEmbeddingType"),
    *_strings("megatron.core.enums", "ModelType", "Fp8Recipe", "Fp4Recipe"),
    *_strings("megatron.core.transformer.enums", "AttnBackend", "AttnMaskType", "AttnType", "CudaGraphScope"),
    *_strings("megatron.core.rerun_state_machine", "RerunMode", "RerunState", "RerunDiagnostic"),
    *_strings("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"),
    *_strings("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    *_strings("omegaconf.dictconfig", "DictConfig"),
    *_strings("omegaconf.listconfig", "ListConfig"),
    *_strings("omegaconf.base", "Metadata", "ContainerMetadata"),
    *_strings("omegaconf.nodes", "AnyNode", "StringNode", "IntegerNode", "FloatNode", "BooleanNode", "PathNode"),
    *_strings("pytorch_lightning.callbacks.model_checkpoint", "ModelCheckpoint"),
    *_strings("lightning.pytorch.callbacks.model_checkpoint", "ModelCheckpoint"),
    *_strings("lightning.fabric.wrappers", "_FabricOptimizer"),
    *_strings("transformers.trainer_utils", "IntervalStrategy", "SchedulerType", "HubStrategy"),
)
DICTS = (
    *_strings("lightning.fabric.utilities.data", "AttributeDict"),
    *_strings("lightning_fabric.utilities.data", "AttributeDict"),
    *_strings("pytorch_lightning.utilities.parsing", "AttributeDict"),
    *_strings("lightning.pytorch.utilities.parsing", "AttributeDict"),
    *_strings("collections", "defaultdict"),
)
_RECORDS: dict[str, type[Record]] = {
    name: type(name.rpartition(".")[2], (Record,), {"name": name, "__module__": __name__}) for name in RECORDS
}
# The largest allowed compression ratio of an archive. Tools that compress weights reach a ratio of about 2.
_MOST_UNPACKED = 16
_PLAIN = {f"builtins.{kind.__name__}": kind for kind in (int, float, bool, str, list, dict, tuple, set, complex)}
_GLOBALS: dict[str, Any] = {
    **_RECORDS,
    **dict.fromkeys(DICTS, PlainDict),
    **_PLAIN,
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,
}


def is_record(value: Any, name: str) -> bool:
    """Tells whether ``value`` is the record of an object whose class has this ``name``, regardless of the module."""
    return isinstance(value, Record) and value.name.rpartition(".")[2] == name


@contextmanager
def _listed() -> Iterator[None]:
    with torch.serialization.safe_globals([(kind, name) for name, kind in _GLOBALS.items()]):
        yield


def read_torch(path: Path, *, fix: str = "save model.state_dict() alone, best as .safetensors") -> Any:
    """Reads a file of ``torch.save``. The tensors are memory-mapped and read when they are used.

    Raises ``BadSource`` if the file names an unlisted class. No code from the file runs. Raises ``InvalidModel`` if the
    file is empty or truncated, or wasn't written by ``torch.save``.
    """
    if not path.is_file():
        raise BadSource(f"the path {path} does not exist; check {option('weights')}")
    if path.stat().st_size == 0:
        raise InvalidModel(f"{path} is empty; save the weights again")
    refuse_bomb(path)
    try:
        with warnings.catch_warnings(), _listed():
            # Hides torch's warnings, because files that cause a warning are refused below.
            warnings.simplefilter("ignore")
            # Only zip files can be memory-mapped. Old versions of torch wrote a format without zip.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        _refuse(path, error, fix)
    except Exception as error:  # torch raises errors of many types on damaged bytes
        raise InvalidModel(f"{path} is no PyTorch file or is truncated; save the weights again") from error


def refuse_bomb(path: Path) -> None:
    """Raises ``InvalidModel`` if an archive unpacks to many times its own size. Files of torch are never compressed."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return  # a damaged archive raises an error later, when the weights are read
    if size > _MOST_UNPACKED * path.stat().st_size:
        raise InvalidModel(
            f"{path} unpacks to {size / 1e6:.0f} MB, but torch never compresses its files; save the file again"
        )


def _refuse(path: Path, error: Exception, fix: str) -> NoReturn:
    named = re.search(r"GLOBAL (\S+)", str(error))
    what = f"({named.group(1)}) " if named else ""
    raise BadSource(
        f"accel refuses to unpickle {path}, because the file holds more than weights {what}or is no PyTorch file; {fix}"
    ) from error


class _Unpickler(pickle.Unpickler):
    """Unpickles only objects of the listed classes, ``OrderedDict``, torch's dtypes and ``torch.Size``."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _GLOBALS:
            return _GLOBALS[full]
        if full == "collections.OrderedDict":
            return collections.OrderedDict
        if full == "torch.Size":
            return torch.Size
        if full == "torch.serialization._get_layout":
            return str  # the name of a layout is enough, because accel doesn't use layouts
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {full}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"Unsupported persistent id {pid!r}")


def read_pickle(path: Path) -> Any:
    """Reads a plain pickle, and returns its objects as records. Raises the same errors as ``read_torch``."""
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except pickle.UnpicklingError as error:
        if "GLOBAL" not in str(error):
            raise InvalidModel(f"{path} is no pickle or is truncated; save the checkpoint again") from error
        _refuse(path, error, "it was not written by torch.distributed.checkpoint alone")
    except OSError as error:
        raise BadSource(f"{path} can't be read ({error.strerror}); check {option('weights')}") from error
    except Exception as error:  # the unpickler raises errors of many types on damaged bytes
        raise InvalidModel(f"{path} is no pickle or is truncated; save the checkpoint again") from error
